// disk: 16M
// option: provoke=unlink-without-memory
// kernel-only: it needs the kernel's disk, and a kernel that lacks memory when it removes a file
//
// An unlink without memory takes the name all the same, also on the disk. The content follows later.

#include <sys/statfs.h>

#include "test.h"

static char content[4 * 4096];

static long free_blocks(void) {
    struct statfs volume;
    NEED(statfs("/disk", &volume) == 0);
    return (long)volume.f_bfree;
}

static int made(const char *path) {
    int file = open(path, O_RDWR | O_CREAT, 0600);
    NEED(file >= 0 && write(file, content, sizeof content) == sizeof content && fsync(file) == 0);
    return file;
}

int main(void) {
    test_start();
    FAILS(access("/disk/gone", F_OK), ENOENT, "no earlier start has left the name");
    FAILS(access("/disk/open", F_OK), ENOENT, "nor that of an open file");
    long room = free_blocks();
    NEED(close(made("/disk/gone")) == 0);
    int file = made("/disk/open");
    EQUAL(unlink("/disk/gone"), 0, "a file is removed");
    FAILS(access("/disk/gone", F_OK), ENOENT, "and has no name");
    EQUAL(unlink("/disk/open"), 0, "and so is an open one");
    sync();
    EQUAL(free_blocks(), room - 4, "the content of a file without a name goes with the next sync");
    EQUAL(pread(file, content, sizeof content, 0), sizeof content, "that of an open one stays");
    NEED(close(file) == 0);
    sync();
    EQUAL(free_blocks(), room, "until it is closed");
    return test_end();
}
