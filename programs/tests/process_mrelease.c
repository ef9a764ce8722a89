// process_mrelease: frees the memory of a killed process before the process has
// ended, and of no other.

#include "test.h"

#include <sched.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_process_mrelease
#define SYS_process_mrelease 448
#endif

enum { LENGTH = 16 << 20 };

static int release(int process, unsigned flags) {
    return (int)syscall(SYS_process_mrelease, process, flags);
}

static volatile int *ready;

// A process with much memory, which sleeps.
static pid_t large(void) {
    *ready = 0;
    pid_t child = fork();
    if (child == 0) {
        memset(test_map(LENGTH), 1, LENGTH);
        *ready = 1;
        for (;;)
            pause();
    }
    while (!*ready)
        sched_yield();
    return child;
}

static int shares(void *unused) {
    (void)unused;
    int own = (int)syscall(SYS_pidfd_open, getpid(), 0);
    *ready = release(own, 0) == -1 ? errno : 0;
    return 0;
}

int main(void) {
    test_start();
    ready = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(ready != MAP_FAILED);
    FAILS(release(-1, 0), EBADF, "no descriptor");
    FAILS(release(1, 0), EBADF, "a descriptor of something else");
    FAILS(release(-1, 1), EINVAL, "flags, which are looked at first");
    pid_t child = large();
    int process = (int)syscall(SYS_pidfd_open, child, 0);
    NEED(process >= 0);
    FAILS(release(process, 0), EINVAL, "a process that goes on");
    FAILS(release(process, ~0u), EINVAL, "flags");
    NEED(kill(child, SIGKILL) == 0);
    siginfo_t info;
    NEED(waitid(P_PID, child, &info, WEXITED | WNOWAIT) == 0);
    FAILS(release(process, 0), ESRCH, "a process that has ended");
    test_wait(child);
    FAILS(release(process, 0), ESRCH, "and was waited for");
    close(process);

    // It may be faster than we are.
    int released = 0;
    for (int round = 0; round < 20 && !released; round++) {
        child = large();
        process = (int)syscall(SYS_pidfd_open, child, 0);
        NEED(process >= 0 && kill(child, SIGKILL) == 0);
        released = release(process, 0) == 0;
        STEP(released || errno == ESRCH);
        int status = test_wait(child);
        STEP(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        close(process);
    }
    CHECK(released, "the memory of a process that was killed");

    // A process that shares its memory with one that goes on.
    static char stack[16 * PAGE] __attribute__((aligned(16)));
    child = clone(shares, stack + sizeof stack, CLONE_VM | SIGCHLD, 0);
    NEED(child > 0);
    test_wait(child);
    EQUAL(*ready, EINVAL, "memory that others have too");
    return test_end();
}
