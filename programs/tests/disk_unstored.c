// disk: 16M
// option: provoke=power-loss
// option: disk-silent=8
// kernel-only: it needs the kernel's disk, which falls silent, and a machine whose power fails
//
// The device stores no content any more, and the power fails: after a store that has failed, and
// beside one that has no answer yet. In between another file is synchronized, and with it the blocks
// of all files. The next start must not find in a file what a removed file had in its blocks.

#include <sys/wait.h>

#include "disk.h"

#define PAGES 16
#define ANSWERS 8

static char content[PAGES * PAGE];

// A child that waits for the store of a file.
static pid_t storer(const char *path, size_t size) {
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        int file = disk_open(path);
        _exit(write(file, content, size) == (ssize_t)size && fsync(file) == 0);
    }
    usleep(100000);
    EQUAL(waitpid(child, 0, WNOHANG), 0, "a store waits for the silent device");
    return child;
}

static void first_time(void) {
    disk_has_no_writer();
    memset(content, 's', sizeof content);
    int removed = disk_open("/disk/removed"), other = disk_open("/disk/other");
    NEED(write(removed, content, sizeof content) == sizeof content && fsync(removed) == 0);
    NEED(unlink("/disk/removed") == 0 && close(removed) == 0);
    for (int turn = 1; turn < ANSWERS; turn++)
        NEED(pwrite(other, "o", 1, 0) == 1 && fsync(other) == 0);
    char *map = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, other, 0);
    NEED(map != MAP_FAILED && map[0] == 'o');

    memset(content, 'n', sizeof content);
    pid_t child = storer("/disk/failed", 4 * PAGE);
    NEED(kill(child, SIGKILL) == 0 && waitpid(child, 0, 0) == child);
    storer("/disk/begun", 4 * PAGE);
    EQUAL(msync(map, PAGE, MS_SYNC), 0, "another file is synchronized meanwhile");
    disk_power_fails();
}

// The disk may have any size of the file that it had, and zeroes for content that it never got.
static int is_clean(const char *path) {
    int file = disk_open(path);
    ssize_t count = read(file, content, sizeof content);
    for (ssize_t at = 0; at < count; at++)
        if (content[at] != 0)
            return 0;
    return count >= 0 && close(file) == 0;
}

int main(void) {
    test_start();
    if (access("/disk/other", F_OK) != 0) {
        first_time();
        return test_end();
    }
    CHECK(is_clean("/disk/failed"), "a file whose store has failed has no old blocks");
    CHECK(is_clean("/disk/begun"), "nor has one whose store had no answer");
    return test_end();
}
