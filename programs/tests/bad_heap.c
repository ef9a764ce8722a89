// memory: 64M
// kernel-only: it asks for all that the kernel keeps for itself
//
// Bad programs: what the kernel keeps for programs (names, messages, signals,
// pipes) asked for without end. It is refused, and the kernel lives.

#include "test.h"

#include <sys/resource.h>
#include <sys/socket.h>

// Makes symbolic links in the current folder until the kernel has no room.
static int links(const char *target) {
    char name[16];
    int made = 0;
    for (;; made++) {
        snprintf(name, sizeof name, "%d", made);
        if (symlink(target, name) < 0)
            return errno == ENOMEM ? made : -1;
    }
}

static void fragmented(void) {
    static char block[65536], target[101];
    char name[16];
    memset(target, 't', sizeof target - 1);
    NEED(mkdir("/tmp/many", 0700) == 0 && chdir("/tmp/many") == 0);
    int made = links(target);
    CHECK(made > 1000, "names are refused with ENOMEM");
    for (int at = 0; at < made; at += 2) {
        snprintf(name, sizeof name, "%d", at);
        STEP_EQUAL(unlink(name), 0);
    }
    // Free memory there is now, but in small pieces.
    int ends[2], error = 0;
    for (int at = 0; at < 500 && !error; at++)
        if (pipe2(ends, O_NONBLOCK) < 0 || write(ends[1], block, sizeof block) < 0)
            error = errno;
    CHECK(error == 0 || error == ENOMEM || error == EMFILE, "pipes in what lies between are refused or work");
    for (int at = 1; at < made; at += 2) {
        snprintf(name, sizeof name, "%d", at);
        STEP_EQUAL(unlink(name), 0);
    }
    NEED(chdir("/") == 0);
    EQUAL(rmdir("/tmp/many"), 0, "all names can be taken away again");
}

// A folder with very many others in it is renamed, while free memory lies in small pieces.
static void folders(void) {
    char name[16];
    static char target[4000];
    memset(target, 't', sizeof target - 1);
    NEED(mkdir("/tmp/wide", 0700) == 0 && chdir("/tmp/wide") == 0);
    int made = 0, between = 0;
    while (snprintf(name, sizeof name, "%d", made) > 0 && mkdir(name, 0700) == 0)
        made++;
    CHECK(made > 1000 && errno == ENOMEM, "folders are refused with ENOMEM");
    for (int at = 0; at < made; at += 4) {
        snprintf(name, sizeof name, "%d", at);
        STEP_EQUAL(rmdir(name), 0);
    }
    NEED(mkdir("/tmp/narrow", 0700) == 0 && chdir("/tmp/narrow") == 0);
    between = links(target);
    NEED(between > 0 && unlink("0") == 0 && chdir("/") == 0);
    EQUAL(rename("/tmp/wide", "/tmp/wider"), 0, "the folder around them can be renamed");
    FAILS(rename("/tmp/wider", "/tmp/wider/1/within"), EINVAL, "and not into one of them");
    NEED(chdir("/tmp/narrow") == 0);
    for (int at = 1; at < between; at++) {
        snprintf(name, sizeof name, "%d", at);
        STEP_EQUAL(unlink(name), 0);
    }
    NEED(chdir("/tmp/wider") == 0);
    for (int at = 1; at < made; at++) {
        snprintf(name, sizeof name, "%d", at);
        if (at % 4 != 0)
            STEP_EQUAL(rmdir(name), 0);
    }
    NEED(chdir("/") == 0 && rmdir("/tmp/wider") == 0 && rmdir("/tmp/narrow") == 0);
}

static void messages(int kind, size_t length, const char *text) {
    int ends[2];
    char message[16] = {0};
    NEED(socketpair(AF_UNIX, kind | SOCK_NONBLOCK, 0, ends) == 0);
    long sent = 0;
    while (sent < 1000000 && write(ends[0], message, length) >= 0)
        sent++;
    CHECK(sent > 0 && sent < 1000000 && errno == EAGAIN, text);
    close(ends[0]);
    close(ends[1]);
}

static void signals(void) {
    struct rlimit limit = {4096, 4096};
    STEP_EQUAL(setrlimit(RLIMIT_SIGPENDING, &limit), 0);
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGRTMIN + 2);
    STEP_EQUAL(sigprocmask(SIG_BLOCK, &blocked, 0), 0);
    pid_t children[100];
    int count = 0;
    while (count < 100 && (children[count] = CHILD(for (;;) pause())) > 0)
        count++;
    long refused = 0;
    for (int at = 0; at < count; at++)
        for (int sent = 0; sent < 5000; sent++)
            if (sigqueue(children[at], SIGRTMIN + 2, (union sigval){0}) < 0) {
                refused += errno == EAGAIN;
                break;
            }
    CHECK(count > 10 && refused == count, "queued signals are refused with EAGAIN");
    for (int at = 0; at < count; at++) {
        kill(children[at], SIGKILL);
        STEP(WIFSIGNALED(test_wait(children[at])));
    }
}

static void deep(void) {
    static char name[256], path[5000];
    memset(name, 'd', sizeof name - 1);
    NEED(chdir("/tmp") == 0);
    int depth = 0;
    while (depth < 2000 && mkdir(name, 0700) == 0 && chdir(name) == 0)
        depth++;
    CHECK(depth > 100, "folders in folders, deeper than a path can tell");
    errno = 0;
    CHECK(syscall(SYS_getcwd, path, sizeof path) < 0 && errno == ENAMETOOLONG, "getcwd: ENAMETOOLONG");
    // One that could be made and not entered.
    rmdir(name);
    while (depth-- > 0) {
        STEP_EQUAL(chdir(".."), 0);
        STEP_EQUAL(rmdir(name), 0);
    }
    CHECK(access("/tmp", F_OK) == 0 && chdir("/") == 0, "and out again");
}

int main(void) {
    test_start();
    fragmented();
    folders();
    messages(SOCK_SEQPACKET, 0, "messages of no length are refused in the end");
    messages(SOCK_SEQPACKET, 1, "messages of one byte too");
    messages(SOCK_STREAM, 1, "and bytes of a stream");
    test_arm_watchdog();
    signals();
    test_arm_watchdog();
    deep();
    EXITS(0, "the machine works on", memset(test_map(1 << 20), 1, 1 << 20));
    return test_end();
}
