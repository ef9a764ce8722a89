// Handlers: arguments, registers and masks around them, nesting, SA_NODEFER,
// SA_RESETHAND, SA_RESTART and EINTR, changing the context.

#include "test.h"

#include <ucontext.h>

static volatile int caught, depth, deepest, order[10], orders;
static siginfo_t last;

static void catch(int signal) { caught = signal; }

static void catch_info(int signal, siginfo_t *info, void *context) {
    caught = signal;
    last = *info;
    STEP(context != 0);
}

static void nest(int signal) {
    depth++;
    if (depth > deepest)
        deepest = depth;
    order[orders++ % 10] = signal;
    if (signal == SIGUSR1 && depth < 3 && orders < 9)
        raise(orders == 1 ? SIGUSR2 : SIGUSR1);
    depth--;
}

static void check_masked(int signal) {
    sigset_t mask;
    sigprocmask(SIG_BLOCK, 0, &mask);
    caught = sigismember(&mask, signal) + 2 * sigismember(&mask, SIGHUP) +
             4 * sigismember(&mask, SIGTERM);
}

static void clobber(int signal) {
    (void)signal;
    volatile double values[20];
    for (int index = 0; index < 20; index++)
        values[index] = index * 1.5;
    errno = 12345;
    caught = (int)values[4];
}

static void change_mask(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)info;
    ucontext_t *user = context;
    sigaddset(&user->uc_sigmask, SIGUSR2);
}

static void skip(int signal, siginfo_t *info, void *context) {
    (void)info;
    ucontext_t *user = context;
    caught = signal;
#if defined(__x86_64__)
    user->uc_mcontext.gregs[REG_RIP] += 2;
    user->uc_mcontext.gregs[REG_RAX] = 4242;
#elif defined(__aarch64__)
    user->uc_mcontext.pc += 4;
    user->uc_mcontext.regs[0] = 4242;
#endif
}

static void install(int signal, void (*handler)(int), int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    NEED(sigaction(signal, &action, 0) == 0);
}

int main(void) {
    test_start();
    struct sigaction action = {.sa_handler = catch}, old;
    sigaddset(&action.sa_mask, SIGHUP);
    WORKS(sigaction(SIGUSR1, &action, 0), "sigaction");
    STEP_EQUAL(sigaction(SIGUSR1, 0, &old), 0);
    CHECK(old.sa_handler == catch && sigismember(&old.sa_mask, SIGHUP), "sigaction gives the old action");
    EQUAL(raise(SIGUSR1), 0, "raise");
    EQUAL(caught, SIGUSR1, "the handler has run before raise returns");
    FAILS(syscall(SYS_rt_sigaction, SIGKILL, &action, 0, 8), EINVAL, "sigaction: SIGKILL");
    FAILS(syscall(SYS_rt_sigaction, 65, &action, 0, 8), EINVAL, "sigaction: signal 65");
    FAILS(syscall(SYS_rt_sigaction, SIGUSR1, &action, 0, 4), EINVAL, "sigaction: a bad set size");

    struct sigaction with_info = {.sa_sigaction = catch_info, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR2, &with_info, 0);
    kill(getpid(), SIGUSR2);
    CHECK(caught == SIGUSR2 && last.si_signo == SIGUSR2 && last.si_code == SI_USER &&
              last.si_pid == getpid(),
          "SA_SIGINFO: kill");
    union sigval value = {.sival_ptr = (void *)0x123456789a};
    WORKS(sigqueue(getpid(), SIGUSR2, value), "sigqueue");
    CHECK(last.si_code == SI_QUEUE && last.si_value.sival_ptr == value.sival_ptr, "SA_SIGINFO: the value");
    raise(SIGUSR2);
    EQUAL(last.si_code, SI_TKILL, "SA_SIGINFO: raise");
    sigaction(SIGCHLD, &with_info, 0);
    pid_t child = CHILD(_exit(9));
    test_wait(child);
    CHECK(last.si_signo == SIGCHLD && last.si_code == CLD_EXITED && last.si_pid == child &&
              last.si_status == 9,
          "SA_SIGINFO: SIGCHLD");
    signal(SIGCHLD, SIG_DFL);

    struct sigaction masked = {.sa_handler = check_masked};
    sigaddset(&masked.sa_mask, SIGHUP);
    sigaction(SIGUSR1, &masked, 0);
    raise(SIGUSR1);
    EQUAL(caught, 3, "in a handler its signal and sa_mask are blocked");
    sigset_t mask;
    sigprocmask(SIG_BLOCK, 0, &mask);
    CHECK(!sigismember(&mask, SIGUSR1) && !sigismember(&mask, SIGHUP), "afterwards the mask is back");
    masked.sa_flags = SA_NODEFER;
    sigaction(SIGUSR1, &masked, 0);
    raise(SIGUSR1);
    EQUAL(caught, 2, "SA_NODEFER: the signal itself is not blocked");

    install(SIGUSR1, nest, 0);
    install(SIGUSR2, nest, 0);
    raise(SIGUSR1);
    CHECK(deepest == 2 && orders == 2 && order[1] == SIGUSR2, "another signal nests");
    orders = 1;
    deepest = 0;
    raise(SIGUSR1);
    CHECK(deepest == 1 && orders > 3, "the same signal waits until its handler returns");
    orders = 5;
    deepest = 0;
    install(SIGUSR1, nest, SA_NODEFER);
    raise(SIGUSR1);
    EQUAL(deepest, 3, "SA_NODEFER: the same signal nests");

    install(SIGUSR1, catch, SA_RESETHAND);
    raise(SIGUSR1);
    sigaction(SIGUSR1, 0, &old);
    CHECK(old.sa_handler == SIG_DFL, "SA_RESETHAND: the action is the default again");

    install(SIGUSR1, clobber, 0);
    double sum = 0;
    for (int round = 0; round < 100; round++) {
        double before = round / 3.0;
        kill(getpid(), SIGUSR1);
        sum += before * 3.0;
    }
    CHECK(sum > 4949.9 && sum < 4950.1, "registers survive a handler");

    int pipes[2];
    char one;
    NEED(pipe(pipes) == 0);
    pid_t self = getpid();
    install(SIGUSR1, catch, 0);
    child = CHILD({ test_sleep(300); kill(self, SIGUSR1); test_sleep(20); write(pipes[1], "x", 1); });
    FAILS(read(pipes[0], &one, 1), EINTR, "read without SA_RESTART");
    EQUAL(read(pipes[0], &one, 1), 1, "and again");
    test_wait(child);
    install(SIGUSR1, catch, SA_RESTART);
    caught = 0;
    child = CHILD({ test_sleep(300); kill(self, SIGUSR1); test_sleep(20); write(pipes[1], "x", 1); });
    EQUAL(read(pipes[0], &one, 1), 1, "read with SA_RESTART goes on");
    EQUAL(caught, SIGUSR1, "after the handler");
    test_wait(child);
    child = CHILD({
        pid_t inner = CHILD({ test_sleep(300); kill(getppid(), SIGUSR1); test_sleep(20); _exit(3); });
        int status;
        STEP_EQUAL(waitpid(inner, &status, 0), inner);
        STEP_EQUAL(WEXITSTATUS(status), 3);
    });
    EQUAL(test_wait(child), 0, "wait with SA_RESTART goes on");
    child = CHILD({ test_sleep(300); kill(self, SIGUSR1); });
    struct timespec rest = {20, 0}, left = {0, 0};
    FAILS(nanosleep(&rest, &left), EINTR, "nanosleep ends even with SA_RESTART");
    CHECK(left.tv_sec >= 15 && left.tv_sec < 20, "and tells the time that is left");
    test_wait(child);
    child = CHILD({ test_sleep(300); kill(self, SIGUSR1); });
    FAILS(pause(), EINTR, "pause ends after a handler");
    test_wait(child);
    signal(SIGUSR1, SIG_IGN);
    child = CHILD({ test_sleep(10); kill(self, SIGUSR1); test_sleep(10); write(pipes[1], "x", 1); });
    EQUAL(read(pipes[0], &one, 1), 1, "an ignored signal interrupts nothing");
    test_wait(child);

    struct sigaction change = {.sa_sigaction = change_mask, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &change, 0);
    raise(SIGUSR1);
    sigprocmask(SIG_BLOCK, 0, &mask);
    CHECK(sigismember(&mask, SIGUSR2), "a handler changes the mask in its context");
    struct sigaction jump = {.sa_sigaction = skip, .sa_flags = SA_SIGINFO};
    sigaction(SIGILL, &jump, 0);
#if defined(__x86_64__)
    long result;
    __asm__ volatile("xor %%eax, %%eax\n ud2" : "=a"(result) : : "cc");
#else
    register long result __asm__("x0");
    __asm__ volatile("mov x0, #0\n udf #0" : "=r"(result));
#endif
    EQUAL(result, 4242, "a handler changes registers in its context");
    return test_end();
}
