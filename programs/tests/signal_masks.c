// Masks and waiting: blocked and pending signals, sigsuspend, sigtimedwait,
// order and queueing.

#include "test.h"

static volatile int caught, count, order[20];
static void catch(int signal) {
    caught = signal;
    order[count++ % 20] = signal;
}

int main(void) {
    test_start();
    sigset_t set, empty, old, pending;
    sigemptyset(&empty);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2);
    sigaddset(&set, SIGRTMIN);
    sigaddset(&set, SIGRTMIN + 1);
    struct sigaction action = {.sa_handler = catch};
    sigaction(SIGUSR1, &action, 0);
    sigaction(SIGUSR2, &action, 0);
    sigaction(SIGRTMIN, &action, 0);
    sigaction(SIGRTMIN + 1, &action, 0);

    WORKS(sigprocmask(SIG_BLOCK, &set, &old), "sigprocmask: block");
    CHECK(!sigismember(&old, SIGUSR1), "it gives the old mask");
    raise(SIGUSR1);
    raise(SIGUSR1);
    kill(getpid(), SIGUSR2);
    EQUAL(count, 0, "blocked signals are not delivered");
    sigpending(&pending);
    CHECK(sigismember(&pending, SIGUSR1) && sigismember(&pending, SIGUSR2) &&
              !sigismember(&pending, SIGHUP),
          "sigpending names them");
    EXITS(0, "a child has the mask but not the pending signals", {
        sigpending(&pending);
        STEP(!sigismember(&pending, SIGUSR1));
        sigprocmask(SIG_BLOCK, 0, &old);
        STEP(sigismember(&old, SIGUSR1));
    });
    sigprocmask(SIG_UNBLOCK, &set, 0);
    EQUAL(count, 2, "unblocked, each comes once before sigprocmask returns");
    sigpending(&pending);
    CHECK(!sigismember(&pending, SIGUSR1), "nothing is pending");
    FAILS(sigprocmask(99, &set, 0), EINVAL, "sigprocmask: a bad way");
    sigprocmask(SIG_SETMASK, &set, 0);
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, 0);
    sigprocmask(SIG_SETMASK, 0, &old);
    CHECK(!sigismember(&old, SIGKILL) && !sigismember(&old, SIGSTOP) && sigismember(&old, SIGTERM),
          "SIGKILL and SIGSTOP cannot be blocked");
    sigprocmask(SIG_SETMASK, &set, 0);

    count = 0;
    for (int value = 0; value < 3; value++) {
        sigqueue(getpid(), SIGRTMIN + 1, (union sigval){.sival_int = value});
        sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = value});
    }
    siginfo_t info;
    EQUAL(sigwaitinfo(&set, &info), SIGRTMIN, "sigwaitinfo: the lowest real-time signal first");
    EQUAL(info.si_value.sival_int, 0, "and the first value");
    EQUAL(sigwaitinfo(&set, &info), SIGRTMIN, "real-time signals queue");
    EQUAL(info.si_value.sival_int, 1, "in order");
    sigprocmask(SIG_UNBLOCK, &set, 0);
    EQUAL(count, 4, "the rest goes to the handler");
    sigprocmask(SIG_SETMASK, &set, 0);

    struct timespec time = {0, 20000000};
    long long start = test_now();
    FAILS(sigtimedwait(&set, &info, &time), EAGAIN, "sigtimedwait: timeout");
    CHECK(test_now() - start >= 20000000, "the time is over");
    count = 0;
    raise(SIGUSR2);
    time = (struct timespec){0, 0};
    EQUAL(sigtimedwait(&set, &info, &time), SIGUSR2, "sigtimedwait takes a pending signal");
    EQUAL(info.si_signo, SIGUSR2, "and tells about it");
    EQUAL(count, 0, "without its handler");
    pid_t self = getpid();
    pid_t child = CHILD({ test_sleep(20); kill(self, SIGUSR1); });
    time.tv_sec = 30;
    EQUAL(sigtimedwait(&set, &info, &time), SIGUSR1, "sigtimedwait waits for a signal");
    CHECK(info.si_pid == child && info.si_code == SI_USER, "and tells who sent it");
    test_wait(child);
    int number;
    raise(SIGUSR1);
    EQUAL(sigwait(&set, &number), 0, "sigwait");
    EQUAL(number, SIGUSR1, "gives the signal");

    raise(SIGUSR1);
    count = 0;
    FAILS(sigsuspend(&empty), EINTR, "sigsuspend with a pending signal");
    EQUAL(count, 1, "the handler has run");
    sigprocmask(SIG_SETMASK, 0, &old);
    CHECK(sigismember(&old, SIGUSR1), "the mask is back");
    child = CHILD({ test_sleep(20); kill(self, SIGUSR2); });
    FAILS(sigsuspend(&empty), EINTR, "sigsuspend waits");
    EQUAL(caught, SIGUSR2, "for a signal");
    test_wait(child);
    int before = test_failures;
    child = CHILD({
        pid_t parent = getppid();
        for (int round = 0; round < 100; round++) {
            kill(parent, SIGUSR1);
            sigsuspend(&empty);
        }
    });
    for (int round = 0; round < 100; round++) {
        sigsuspend(&empty);
        kill(child, SIGUSR1);
    }
    STEP_EQUAL(test_wait(child), 0);
    ALL_STEPS(before, "two processes signal each other a hundred times");
    signal(SIGUSR1, SIG_IGN);
    sigpending(&pending);
    raise(SIGUSR2);
    signal(SIGUSR2, SIG_IGN);
    sigpending(&pending);
    CHECK(!sigismember(&pending, SIGUSR2), "ignoring a signal discards it");
    return test_end();
}
