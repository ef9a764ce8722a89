// Identities: pid, parent, thread, group, session, user; kill by group.

#include "test.h"

#include <sys/prctl.h>

int main(void) {
    test_start();
    pid_t self = getpid();
    CHECK(self > 0, "getpid");
    EQUAL(syscall(SYS_gettid), self, "the first thread's tid is the pid");
    CHECK(getppid() >= 0, "getppid");
    EQUAL(getuid(), 0, "root: getuid");
    EQUAL(geteuid(), 0, "root: geteuid");
    EQUAL(getgid(), 0, "root: getgid");
    EQUAL(getegid(), 0, "root: getegid");
    EQUAL(getpgid(0), getpgrp(), "getpgid 0 is getpgrp");
    EQUAL(getpgid(self), getpgrp(), "getpgid of itself");
    CHECK(getsid(0) >= 0, "getsid");

    EXITS(0, "setpgid makes a group of its own", {
        STEP_EQUAL(setpgid(0, 0), 0);
        STEP_EQUAL(getpgrp(), getpid());
    });
    EXITS(0, "a child is in its parent's group", {
        pid_t group = getpgrp();
        pid_t child = CHILD(STEP_EQUAL(getpgrp(), group));
        STEP_EQUAL(test_wait(child), 0);
    });
    EXITS(0, "setsid makes a session and a group", {
        STEP_EQUAL(setsid(), getpid());
        STEP_EQUAL(getsid(0), getpid());
        STEP_EQUAL(getpgrp(), getpid());
        STEP_FAILS(setsid(), EPERM);
        STEP_FAILS(setpgid(0, 0), EPERM);
    });
    FAILS(setpgid(0, -1), EINVAL, "setpgid to a negative group");
    FAILS(setpgid(999999, 0), ESRCH, "setpgid of no process");
    FAILS(getpgid(999999), ESRCH, "getpgid of no process");
    FAILS(getsid(999999), ESRCH, "getsid of no process");
    EXITS(0, "setpgid into a group that is not there", STEP_FAILS(setpgid(0, 999999), EPERM));

    // Three processes of one group die of one signal; the parent is in another.
    pid_t leader = CHILD({ setpgid(0, 0); pause(); });
    setpgid(leader, leader);
    pid_t members[2];
    for (int index = 0; index < 2; index++) {
        members[index] = CHILD(pause());
        STEP_EQUAL(setpgid(members[index], leader), 0);
    }
    EQUAL(getpgid(members[1]), leader, "a parent moves its child into a group");
    WORKS(kill(-leader, 0), "kill 0 finds the group");
    WORKS(kill(-leader, SIGTERM), "kill by group");
    int before = test_failures;
    STEP_EQUAL(WTERMSIG(test_wait(leader)), SIGTERM);
    STEP_EQUAL(WTERMSIG(test_wait(members[0])), SIGTERM);
    STEP_EQUAL(WTERMSIG(test_wait(members[1])), SIGTERM);
    ALL_STEPS(before, "every member of the group dies");
    FAILS(kill(-leader, 0), ESRCH, "the empty group is gone");

    char name[17] = "";
    WORKS(prctl(PR_SET_NAME, "a name that is too long"), "prctl sets the name");
    WORKS(prctl(PR_GET_NAME, name), "prctl gives the name");
    CHECK(strcmp(name, "a name that is ") == 0, "the name is cut to 15 bytes");
    mode_t mask = umask(027);
    EQUAL(umask(mask), 027, "umask gives the old mask");
    return test_end();
}
