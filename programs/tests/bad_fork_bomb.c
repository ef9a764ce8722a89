// option: processes=64
// kernel-only: a fork bomb up to the limit would disturb the host
//
// Bad programs: processes without end.

#include "test.h"

static void reap(void) {
    while (wait(0) > 0 || errno == EINTR)
        ;
}

int main(void) {
    test_start();
    // One process makes all the children that it can get.
    pid_t children[200];
    int count = 0;
    while (count < 200) {
        pid_t child = fork();
        if (child == 0)
            for (;;)
                pause();
        if (child < 0)
            break;
        children[count++] = child;
    }
    CHECK(count < 200 && errno == EAGAIN, "fork fails with EAGAIN at the limit");
    CHECK(count >= 32 && count <= 64, "near the limit of 64 processes");
    FAILS(vfork(), EAGAIN, "vfork too");
    char *memory = test_map(64 * PAGE);
    memset(memory, 1, 64 * PAGE);
    EQUAL(memory[64 * PAGE - 1], 1, "memory calls work at the limit");
    STEP_EQUAL(kill(children[0], SIGKILL), 0);
    STEP_EQUAL(WTERMSIG(test_wait(children[0])), SIGKILL);
    children[0] = CHILD(pause());
    CHECK(children[0] > 0, "one dies, one can start");
    for (int index = 0; index < count; index++)
        kill(children[index], SIGKILL);
    reap();
    EXITS(3, "all are gone, fork works again", _exit(3));

    // A real bomb: every child does the same, in a group of its own.
    for (int round = 0; round < 3; round++) {
        pid_t bomb = fork();
        if (bomb == 0) {
            setpgid(0, 0);
            for (;;)
                if (fork() < 0)
                    test_sleep(1);
        }
        NEED(bomb > 0);
        test_sleep(200);
        int before = test_failures;
        // New ones may be created while the others end: repeat until none is
        // left.
        int alive = 1;
        for (int attempt = 0; attempt < 2000 && alive; attempt++) {
            alive = kill(-bomb, SIGKILL) == 0;
            while (waitpid(-1, 0, WNOHANG) > 0)
                ;
            test_sleep(1);
        }
        STEP(!alive);
        reap();
        STEP_EQUAL(test_wait(CHILD(_exit(0))), 0);
        ALL_STEPS(before, "a bomb goes off and is cleared away");
    }
    return test_end();
}
