// The two numbers that name the caller where a pidfd is asked for.

#include "test.h"

#include <pthread.h>
#include <sys/uio.h>

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef P_PIDFD
#define P_PIDFD 3
#endif

enum { SELF_THREAD = -10000, SELF_PROCESS = -10001 };
enum { TO_THREAD = 1, TO_PROCESS = 2, TO_GROUP = 4 };

static volatile pid_t taken_by;
static volatile int taken_code;

static void note(int signal, siginfo_t *information, void *context) {
    (void)signal, (void)context;
    taken_by = syscall(SYS_gettid);
    taken_code = information->si_code;
}

static long send_to(int whom, int signal, unsigned flags) {
    taken_by = 0;
    return syscall(SYS_pidfd_send_signal, whom, signal, 0, flags);
}

static void *other(void *argument) {
    (void)argument;
    pid_t own = syscall(SYS_gettid);
    EQUAL(send_to(SELF_THREAD, SIGUSR1, 0), 0, "a thread sends itself a signal");
    EQUAL(taken_by, own, "and takes it itself");
    EQUAL(taken_code, SI_TKILL, "as from tgkill");
    EQUAL(send_to(SELF_PROCESS, SIGUSR1, 0), 0, "it sends its process a signal");
    CHECK(taken_by != 0 || (test_sleep(20), taken_by != 0), "which some thread takes");
    EQUAL(taken_code, SI_USER, "as from kill");
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &set, 0);
    EQUAL(send_to(SELF_THREAD, SIGUSR2, 0), 0, "a signal that the thread blocks");
    sigpending(&set);
    CHECK(sigismember(&set, SIGUSR2), "waits for it");
    CHECK(taken_by == 0, "and for nobody else");
    return 0;
}

int main(void) {
    test_start();
    struct sigaction action = {.sa_sigaction = note, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &action, 0);
    sigaction(SIGUSR2, &action, 0);
    EQUAL(send_to(SELF_THREAD, 0, 0), 0, "the thread is there");
    EQUAL(send_to(SELF_PROCESS, 0, 0), 0, "the process is there");
    FAILS(send_to(-10009, 0, 0), EBADF, "another such number is no descriptor");
    FAILS(send_to(-1, 0, 0), EBADF, "nor is -1");
    FAILS(send_to(SELF_THREAD, 65, 0), EINVAL, "no such signal");
    FAILS(send_to(SELF_THREAD, 0, 8), EINVAL, "an unknown flag");
    FAILS(send_to(SELF_THREAD, 0, TO_THREAD | TO_PROCESS), EINVAL, "two flags");
    EQUAL(send_to(SELF_THREAD, SIGUSR1, TO_PROCESS), 0, "a thread's number, for its process");
    EQUAL(taken_by, getpid(), "arrives");
    pthread_t thread;
    NEED(pthread_create(&thread, 0, other, 0) == 0);
    pthread_join(thread, 0);

    char *memory = test_map(4 * PAGE);
    memset(memory, 7, 4 * PAGE);
    struct iovec range = {memory, 2 * PAGE};
    for (int whom = SELF_PROCESS; whom <= SELF_THREAD; whom++) {
        memset(memory, 7, 4 * PAGE);
        EQUAL(syscall(SYS_process_madvise, whom, &range, 1, MADV_COLD, 0), 2 * PAGE,
              "process_madvise on oneself");
    }
    FAILS(syscall(SYS_process_madvise, -10009, &range, 1, MADV_COLD, 0), EBADF,
          "process_madvise with another such number");
    FAILS(fcntl(SELF_THREAD, F_GETFD), EBADF, "it is no descriptor otherwise");
    siginfo_t information;
    FAILS(waitid(P_PIDFD, SELF_PROCESS, &information, WEXITED), EINVAL,
          "nobody waits for himself");
    return test_end();
}
