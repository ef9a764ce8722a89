// disk: 16M
// option: provoke=power-loss
// kernel-only: it needs the kernel's disk, and a machine whose power fails
//
// The power fails after an fsync, an msync, a sync and a rename. The machine is started again with
// the same disk: it has all that was synchronized.

#include "disk.h"

#define PAGES 40

static char content[PAGES * PAGE];

static int made(const char *path, size_t size) {
    int file = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    NEED(file >= 0 && write(file, content, size) == (ssize_t)size);
    return file;
}

static int holds(const char *path, char byte, size_t size) {
    static char read_back[PAGES * PAGE + 1];
    int file = open(path, O_RDONLY);
    NEED(file >= 0);
    ssize_t count = read(file, read_back, sizeof read_back);
    close(file);
    for (size_t at = 0; at < size; at++)
        if (read_back[at] != byte)
            return 0;
    return count == (ssize_t)size;
}

static void first_time(void) {
    memset(content, 'a', sizeof content);
    int file = made("/disk/fsync", sizeof content);
    NEED(fsync(file) == 0);
    // Never synchronized: the disk may have any part of it.
    NEED(made("/disk/lost", sizeof content) >= 0);

    int old = made("/disk/name", PAGE), other = made("/disk/other", 2 * PAGE);
    NEED(fsync(old) == 0 && fsync(other) == 0);
    EQUAL(rename("/disk/other", "/disk/name"), 0, "a file takes the name of another");
    NEED(unlink("/disk/fsync") == 0 && close(file) == 0);
    // Takes the blocks of the file that was removed.
    memset(content, 'd', sizeof content);
    file = made("/disk/synced", sizeof content);
    sync();
    memset(content, 'e', sizeof content);
    NEED(pwrite(file, content, PAGE, 0) == PAGE && fdatasync(file) == 0);
    NEED(pwrite(file, content, PAGE, PAGE) == PAGE);

    // Last, because sync stores all that msync would have left.
    // Pages in a hole get their places when msync stores them.
    int hole = disk_open("/disk/hole");
    NEED(ftruncate(hole, PAGES * PAGE) == 0 && fsync(hole) == 0);
    char *map = disk_map(hole, PAGES * PAGE);
    memset(map, 'b', PAGES * PAGE);
    EQUAL(msync(map, PAGES * PAGE, MS_SYNC), 0, "pages in a hole are synchronized");
    EQUAL(msync(map, PAGES * PAGE, MS_SYNC), 0, "and again, with nothing to store");

    // The file grows after its last fsync: msync has to keep its size, too.
    int grown = made("/disk/grown", PAGE);
    NEED(fsync(grown) == 0 && pwrite(grown, content, PAGE, PAGE) == PAGE);
    map = disk_map(grown, 2 * PAGE);
    memset(map, 'c', 2 * PAGE);
    EQUAL(msync(map, 2 * PAGE, MS_SYNC), 0, "pages behind the last end are synchronized");
    disk_power_fails();
}

int main(void) {
    test_start();
    if (access("/disk/hole", F_OK) != 0) {
        first_time();
        return test_end();
    }
    CHECK(holds("/disk/hole", 'b', PAGES * PAGE), "msync has kept pages of a hole");
    CHECK(holds("/disk/grown", 'c', 2 * PAGE), "msync has kept pages behind the last end");
    CHECK(holds("/disk/name", 'a', 2 * PAGE), "a name is that of the later file");
    FAILS(access("/disk/other", F_OK), ENOENT, "which has no other");
    FAILS(access("/disk/fsync", F_OK), ENOENT, "a file that was removed is gone");
    struct stat status;
    CHECK(stat("/disk/lost", &status) == 0 && status.st_size <= (off_t)sizeof content,
          "a file that was not synchronized has a size that it had");
    int file = open("/disk/synced", O_RDONLY);
    char byte = 0;
    NEED(file >= 0 && fstat(file, &status) == 0);
    EQUAL(status.st_size, sizeof content, "sync has kept a size");
    CHECK(pread(file, &byte, 1, 0) == 1 && byte == 'e', "fdatasync has kept a page");
    CHECK(pread(file, &byte, 1, 2 * PAGE) == 1 && byte == 'd', "sync has kept the others");
    return test_end();
}
