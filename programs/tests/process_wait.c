// wait4 and waitid: every way a child ends, options, orphans, and errors.

#include "test.h"

#include <sys/resource.h>

static void take_and_give_back(size_t mib) {
    char *memory = test_map(mib << 20);
    memset(memory, 1, mib << 20);
    munmap(memory, mib << 20);
}

int main(void) {
    test_start();
    int status;
    EXITS(0, "exit 0", _exit(0));
    EXITS(255, "exit 255", _exit(255));
    EXITS(1, "exit keeps the low byte", _exit(257));
    DIES(SIGKILL, "killed by SIGKILL", kill(getpid(), SIGKILL));
    DIES(SIGTERM, "killed by SIGTERM", raise(SIGTERM));
    DIES(SIGABRT, "abort dies of SIGABRT", abort());

    FAILS(waitpid(-1, &status, 0), ECHILD, "waitpid with no child");
    FAILS(waitpid(999999, &status, 0), ECHILD, "waitpid for no child of ours");
    pid_t child = CHILD({ test_sleep(30); _exit(4); });
    EQUAL(waitpid(child, &status, WNOHANG), 0, "WNOHANG on a running child");
    FAILS(waitpid(getpid(), &status, 0), ECHILD, "waitpid for itself");
    FAILS(waitpid(child, &status, 0x400), EINVAL, "an unknown option");
    EQUAL(waitpid(child, &status, 0), child, "waitpid waits for the child");
    EQUAL(WEXITSTATUS(status), 4, "the status arrives");
    FAILS(waitpid(child, &status, WNOHANG), ECHILD, "a child is waited for once");

    pid_t first = CHILD(_exit(1));
    pid_t second = CHILD({ test_sleep(20); _exit(2); });
    EQUAL(waitpid(second, &status, 0), second, "waitpid for the second of two");
    EQUAL(WEXITSTATUS(status), 2, "and its status");
    EQUAL(waitpid(-1, &status, 0), first, "waitpid -1 finds the zombie");
    EQUAL(WEXITSTATUS(status), 1, "and its status");
    child = CHILD(_exit(6));
    EQUAL(waitpid(0, &status, 0), child, "waitpid 0 means the own group");
    child = CHILD({ setpgid(0, 0); test_sleep(20); });
    setpgid(child, child);
    EQUAL(waitpid(-child, &status, 0), child, "waitpid by group");
    child = CHILD(_exit(6));
    EQUAL(waitpid(child, 0, 0), child, "waitpid without a place for the status");
    child = CHILD(_exit(6));
    struct rusage usage;
    memset(&usage, 0xff, sizeof usage);
    EQUAL(wait4(child, &status, 0, &usage), child, "wait4 with rusage");
    CHECK(usage.ru_utime.tv_sec >= 0 && usage.ru_utime.tv_sec < 60, "rusage is filled");
    child = CHILD(_exit(6));
    siginfo_t info;
    memset(&info, 0, sizeof info);
    EQUAL(waitid(P_PID, child, &info, WEXITED | WNOWAIT), 0, "waitid with WNOWAIT");
    CHECK(info.si_pid == child && info.si_status == 6 && info.si_code == CLD_EXITED &&
              info.si_signo == SIGCHLD,
          "waitid fills siginfo");
    EQUAL(waitid(P_PID, child, &info, WEXITED), 0, "waitid after WNOWAIT");
    FAILS(waitid(P_PID, child, &info, WEXITED), ECHILD, "and then it is gone");

    const idtype_t by_descriptor = 3; // P_PIDFD
    child = CHILD(pause());
    int handle = syscall(434, child, O_NONBLOCK); // pidfd_open
    NEED(handle >= 0);
    FAILS(waitid(by_descriptor, handle, &info, WEXITED), EAGAIN, "a pidfd with O_NONBLOCK: nobody waits");
    EQUAL(waitid(by_descriptor, handle, &info, WEXITED | WNOHANG), 0, "unless the caller asks for that");
    kill(child, SIGKILL);
    while (waitid(by_descriptor, handle, &info, WEXITED) < 0 && errno == EAGAIN)
        test_sleep(1);
    CHECK(info.si_pid == child && info.si_code == CLD_KILLED, "its end is reported");
    FAILS(waitid(by_descriptor, handle, &info, WEXITED), ECHILD, "once");
    close(handle);

    // The most memory that a child, or a child of it, has had at a time, though it gave it back.
    child = CHILD({
        pid_t grandchild = CHILD(take_and_give_back(24));
        test_wait(grandchild);
        take_and_give_back(4);
    });
    EQUAL(wait4(child, &status, 0, &usage), child, "wait4 of a child with a child");
    CHECK(usage.ru_maxrss >= 24 << 10 && usage.ru_maxrss < 32 << 10, "rusage has the largest peak of both");
    STEP_EQUAL(getrusage(RUSAGE_CHILDREN, &usage), 0);
    CHECK(usage.ru_maxrss >= 24 << 10 && usage.ru_maxrss < 32 << 10, "and so has that of all children");
    take_and_give_back(8);
    STEP_EQUAL(getrusage(RUSAGE_SELF, &usage), 0);
    CHECK(usage.ru_maxrss >= 8 << 10 && usage.ru_maxrss < 16 << 10, "the process' own peak stays");

    // A grandchild whose parent ends gets another parent.
    int pipes[2];
    NEED(pipe(pipes) == 0);
    child = fork();
    if (child == 0) {
        if (fork() == 0) {
            pid_t parent = getppid();
            for (int round = 0; round < 1000 && getppid() == parent; round++)
                test_sleep(1);
            pid_t now = getppid();
            write(pipes[1], &now, sizeof now);
            _exit(9);
        }
        test_sleep(5);
        _exit(8);
    }
    EQUAL(WEXITSTATUS(test_wait(child)), 8, "the parent in the middle exits");
    pid_t now = -1;
    STEP_EQUAL(read(pipes[0], &now, sizeof now), sizeof now);
    CHECK(now != child && now >= 0, "an orphan gets another parent");
    if (getpid() == 1) {
        EQUAL(now, 1, "an orphan's parent is process 1");
        STEP(waitpid(-1, &status, 0) > 0);
        EQUAL(WEXITSTATUS(status), 9, "process 1 reaps the orphan");
    }
    close(pipes[0]);
    close(pipes[1]);

    signal(SIGCHLD, SIG_IGN);
    child = CHILD(_exit(3));
    FAILS(waitpid(child, &status, 0), ECHILD, "SIGCHLD ignored: children leave no zombie");
    signal(SIGCHLD, SIG_DFL);

    int before = test_failures;
    for (int round = 0; round < 100; round++)
        STEP(fork() ? 1 : (_exit(round), 0));
    int sum = 0;
    for (int round = 0; round < 100; round++) {
        STEP(wait(&status) > 0);
        sum += WEXITSTATUS(status);
    }
    STEP_EQUAL(sum, 4950);
    ALL_STEPS(before, "a hundred children are reaped in any order");
    FAILS(wait(&status), ECHILD, "and none is left");
    return test_end();
}
