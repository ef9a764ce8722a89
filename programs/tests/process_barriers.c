// membarrier: the registration that each barrier needs, and its inheritance.

#include "test.h"

#include <sched.h>

enum {
    QUERY = 0,
    GLOBAL = 1 << 0,
    GLOBAL_EXPEDITED = 1 << 1,
    REGISTER_GLOBAL_EXPEDITED = 1 << 2,
    PRIVATE_EXPEDITED = 1 << 3,
    REGISTER_PRIVATE_EXPEDITED = 1 << 4,
    SYNC_CORE = 1 << 5,
    REGISTER_SYNC_CORE = 1 << 6,
    RSEQ = 1 << 7,
    REGISTER_RSEQ = 1 << 8,
    GET_REGISTRATIONS = 1 << 9,
};

static long barrier(int command) { return syscall(SYS_membarrier, command, 0, 0); }

static int registrations(void *argument) {
    (void)argument;
    return barrier(GET_REGISTRATIONS) >> 2;
}

static int use_registered(void *argument) {
    (void)argument;
    return barrier(PRIVATE_EXPEDITED) == 0 && barrier(REGISTER_GLOBAL_EXPEDITED) == 0 ? 0 : 1;
}

static int run(int (*function)(void *), int flags) {
    char *stack = test_map(1 << 16);
    int status = test_wait(clone(function, stack + (1 << 16), flags | SIGCHLD, 0));
    munmap(stack, 1 << 16);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(int count, char **arguments) {
    if (count > 1)
        return registrations(0);
    test_start();
    long known = barrier(QUERY);
    CHECK(known > 0, "QUERY tells the commands");
    int needed = GLOBAL | GLOBAL_EXPEDITED | REGISTER_GLOBAL_EXPEDITED | PRIVATE_EXPEDITED |
                 REGISTER_PRIVATE_EXPEDITED | SYNC_CORE | REGISTER_SYNC_CORE | GET_REGISTRATIONS;
    EQUAL(known & needed, needed, "all commands but those of restartable sequences are there");
    int before = test_failures;
    for (int bit = 0; bit < 32; bit++) {
        int command = 1 << bit;
        if (!(known & command))
            STEP_FAILS(barrier(command), EINVAL);
    }
    ALL_STEPS(before, "a command that QUERY does not tell is EINVAL");
    FAILS(barrier(GLOBAL | GLOBAL_EXPEDITED), EINVAL, "two commands at once are EINVAL");
    FAILS(syscall(SYS_membarrier, QUERY, 1, 0), EINVAL, "flags are EINVAL");
    FAILS(syscall(SYS_membarrier, GLOBAL, 1, 0), EINVAL, "flags are EINVAL for a barrier");
    FAILS(syscall(SYS_membarrier, RSEQ, 2, 0), EINVAL, "an unknown flag is EINVAL");

    EQUAL(barrier(GLOBAL), 0, "GLOBAL");
    EQUAL(barrier(GLOBAL_EXPEDITED), 0, "GLOBAL_EXPEDITED needs no registration");
    EQUAL(barrier(GET_REGISTRATIONS), 0, "nothing is registered");
    FAILS(barrier(PRIVATE_EXPEDITED), EPERM, "PRIVATE_EXPEDITED needs a registration");
    FAILS(barrier(SYNC_CORE), EPERM, "so does that with SYNC_CORE");
    EQUAL(barrier(REGISTER_SYNC_CORE), 0, "register for SYNC_CORE");
    EQUAL(barrier(GET_REGISTRATIONS), REGISTER_SYNC_CORE | REGISTER_PRIVATE_EXPEDITED,
          "it is listed with the plain one");
    FAILS(barrier(PRIVATE_EXPEDITED), EPERM, "which is still refused");
    EQUAL(barrier(SYNC_CORE), 0, "SYNC_CORE works");
    EQUAL(barrier(REGISTER_PRIVATE_EXPEDITED), 0, "register for the plain one");
    EQUAL(barrier(REGISTER_PRIVATE_EXPEDITED), 0, "and again");
    EQUAL(barrier(PRIVATE_EXPEDITED), 0, "PRIVATE_EXPEDITED works");

    int both = REGISTER_SYNC_CORE | REGISTER_PRIVATE_EXPEDITED;
    EQUAL(run(registrations, 0), both >> 2, "a child inherits them");
    EQUAL(run(use_registered, 0), 0, "and may use them");
    EQUAL(barrier(GET_REGISTRATIONS), both, "what it registers is its own");
    EQUAL(run(use_registered, CLONE_VM), 0, "a child with the same memory");
    EQUAL(barrier(GET_REGISTRATIONS), both | REGISTER_GLOBAL_EXPEDITED, "registers for both");
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", arguments[0], "again", (char *)0);
        _exit(99);
    }
    EQUAL(WEXITSTATUS(test_wait(child)), 0, "execve forgets them");
    return test_end();
}
