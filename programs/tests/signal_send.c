// Sending: kill and its errors, default actions of all signals, stop and
// continue.

#include "test.h"

int main(void) {
    test_start();
    int status;
    FAILS(kill(getpid(), 65), EINVAL, "kill: signal 65");
    FAILS(kill(getpid(), -1), EINVAL, "kill: signal -1");
    FAILS(kill(999999, SIGTERM), ESRCH, "kill: no such process");
    WORKS(kill(getpid(), 0), "kill: signal 0");
    pid_t child = CHILD(_exit(0));
    siginfo_t info;
    NEED(waitid(P_PID, child, &info, WEXITED | WNOWAIT) == 0);
    WORKS(kill(child, SIGTERM), "kill: a zombie is still there");
    EQUAL(test_wait(child), 0, "and keeps its status");
    FAILS(kill(child, 0), ESRCH, "kill: gone after wait");

    static const int deadly[] = {SIGHUP,  SIGINT,  SIGQUIT, SIGILL,    SIGTRAP, SIGABRT, SIGBUS,
                                 SIGFPE,  SIGKILL, SIGUSR1, SIGSEGV,   SIGUSR2, SIGPIPE, SIGALRM,
                                 SIGTERM, SIGXCPU, SIGXFSZ, SIGVTALRM, SIGPROF, SIGIO,   SIGSYS,
                                 40,      64};
    int before = test_failures;
    for (size_t index = 0; index < sizeof deadly / sizeof *deadly; index++) {
        child = CHILD({
            signal(deadly[index], SIG_DFL);
            kill(getpid(), deadly[index]);
            _exit(1);
        });
        int ended = test_wait(child);
        STEP(WIFSIGNALED(ended));
        STEP_EQUAL(WTERMSIG(ended), deadly[index]);
    }
    ALL_STEPS(before, "23 signals kill by default");
    static const int harmless[] = {SIGCHLD, SIGURG, SIGWINCH, SIGCONT};
    before = test_failures;
    for (int index = 0; index < 4; index++) {
        child = CHILD({ kill(getpid(), harmless[index]); _exit(7); });
        STEP_EQUAL(WEXITSTATUS(test_wait(child)), 7);
    }
    ALL_STEPS(before, "four signals are ignored by default");

    // SIGSTOP stops, SIGCONT continues, wait tells of both.
    volatile int *shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    child = CHILD({
        for (;;) {
            (*shared)++;
            test_sleep(1);
        }
    });
    while (*shared == 0)
        test_sleep(1);
    STEP_EQUAL(kill(child, SIGSTOP), 0);
    EQUAL(waitpid(child, &status, WUNTRACED), child, "wait tells that a child stopped");
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP, "by SIGSTOP");
    int value = *shared;
    test_sleep(30);
    EQUAL(*shared, value, "a stopped process does not run");
    EQUAL(waitpid(child, &status, WUNTRACED | WNOHANG), 0, "a stop is told once");
    STEP_EQUAL(kill(child, SIGCONT), 0);
    EQUAL(waitpid(child, &status, WCONTINUED), child, "wait tells that a child continued");
    CHECK(WIFCONTINUED(status), "by SIGCONT");
    for (int round = 0; round < 5000 && *shared == value; round++)
        test_sleep(1);
    CHECK(*shared != value, "it runs again");
    STEP_EQUAL(kill(child, SIGTSTP), 0);
    // An orphaned process group is not stopped by SIGTSTP, only by SIGSTOP.
    STEP_EQUAL(kill(child, SIGSTOP), 0);
    STEP_EQUAL(waitpid(child, &status, WUNTRACED), child);
    STEP_EQUAL(kill(child, SIGTERM), 0);
    test_sleep(10);
    EQUAL(waitpid(child, &status, WNOHANG), 0, "SIGTERM waits for a stopped process to continue");
    STEP_EQUAL(kill(child, SIGCONT), 0);
    EQUAL(waitpid(child, &status, 0), child, "then it dies");
    EQUAL(WTERMSIG(status), SIGTERM, "of SIGTERM");
    child = CHILD({
        for (;;)
            pause();
    });
    STEP_EQUAL(kill(child, SIGSTOP), 0);
    STEP_EQUAL(waitpid(child, &status, WUNTRACED), child);
    STEP_EQUAL(kill(child, SIGKILL), 0);
    EQUAL(WTERMSIG(test_wait(child)), SIGKILL, "SIGKILL kills a stopped process");

    before = test_failures;
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, 0);
    child = CHILD(_exit(5));
    STEP_EQUAL(sigwaitinfo(&mask, &info), SIGCHLD);
    STEP(info.si_pid == child && info.si_status == 5);
    test_wait(child);
    child = CHILD({ kill(getpid(), SIGKILL); });
    STEP_EQUAL(sigwaitinfo(&mask, &info), SIGCHLD);
    STEP(info.si_code == CLD_KILLED && info.si_status == SIGKILL);
    test_wait(child);
    ALL_STEPS(before, "SIGCHLD tells how a child ended");
    return test_end();
}
