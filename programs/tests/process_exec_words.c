// memory: 64M
// kernel-only: it asks for all that the kernel keeps for itself
//
// execve with very many strings while the kernel has hardly any memory of its own left: it is
// refused or works.

#include "test.h"

#include <sys/socket.h>

enum { WORDS = 110000, PAIRS = 200 };

static char *words[WORDS + 1];
static int pairs[PAIRS][2];

static int again(int count, char **environment) {
    int variables = 0;
    while (environment[variables])
        variables++;
    return count != WORDS || variables != WORDS;
}

// Messages that are not read keep the kernel's memory.
static int fill(void) {
    static char message[30000];
    int made = 0;
    for (; made < PAIRS; made++) {
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pairs[made]) < 0)
            return made;
        // Short ones, too: a large one may be refused while some memory is left.
        for (int end = 0; end < 4; end++)
            while (write(pairs[made][end % 2], message, end < 2 ? sizeof message : 400) > 0)
                ;
    }
    return made;
}

int main(int count, char **arguments, char **environment) {
    if (count == WORDS)
        return again(count, environment);
    (void)arguments;
    test_start();
    for (int at = 0; at < WORDS; at++)
        words[at] = "";
    int made = fill(), refused = 0, started = 0;
    CHECK(made > 10 && made < PAIRS && errno == ENOMEM, "the kernel's memory is used up");
    while (made > 0 && !started) {
        made--;
        close(pairs[made][0]), close(pairs[made][1]);
        pid_t child = fork();
        if (child == 0) {
            execve("/proc/self/exe", words, words);
            _exit(errno == ENOMEM ? 2 : 3);
        }
        if (child < 0) {
            STEP_EQUAL(errno, ENOMEM);
            refused++;
            continue;
        }
        int status = test_wait(child);
        STEP(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 2));
        started = status == 0;
        refused += !started;
        test_arm_watchdog();
    }
    CHECK(refused > 0, "the program is not started at first");
    CHECK(started && made > 0, "and later it is, before all memory is free again");
    while (made-- > 0)
        close(pairs[made][0]), close(pairs[made][1]);
    EXITS(0, "the machine works on", memset(test_map(1 << 20), 1, 1 << 20));
    return test_end();
}
