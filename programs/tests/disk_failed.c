// disk: 16M
// option: provoke=power-loss
// kernel-only: it needs the kernel's disk, of which single writes fail
//
// A write of a file's block fails: the call says so, and the file is as it was, or the next sync
// does what is left. The next start finds that.

#include "disk.h"

#include <sys/statfs.h>

#define SIZE (3 * PAGE)

static char content[SIZE];

static long free_blocks(void) {
    struct statfs volume;
    NEED(statfs("/disk", &volume) == 0);
    return (long)volume.f_bfree;
}

static int made(const char *path, char byte) {
    int file = disk_open(path);
    memset(content, byte, SIZE);
    NEED(write(file, content, SIZE) == SIZE && fsync(file) == 0);
    return file;
}

// Whether a file has a byte up to a place, and another one up to its end.
static int holds(int file, char byte, long size, char rest) {
    NEED(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0);
    long count = pread(file, content, SIZE, 0);
    for (long at = 0; at < count; at++)
        if (content[at] != (at < size ? byte : rest))
            return 0;
    return count == SIZE;
}

static int is_at(const char *path, char byte, long size, char rest) {
    int file = open(path, O_RDONLY);
    return file >= 0 && holds(file, byte, size, rest) && close(file) == 0;
}

static void truncations(void) {
    int file = made("/disk/cut", 'c');
    long room = free_blocks();
    disk_fails(1);
    EQUAL(ftruncate(file, 100), -1, "a truncation whose block fails is no truncation");
    EQUAL(free_blocks(), room, "and gives no block back");
    memset(content, 'n', PAGE);
    EQUAL(pwrite(file, content, PAGE, 2 * PAGE), PAGE, "the file is written inside its size");
    EQUAL(fsync(file), 0, "and stored");
    CHECK(holds(file, 'c', 2 * PAGE, 'n'), "and has its content");

    file = made("/disk/end", 'e');
    disk_fails(2);
    EQUAL(ftruncate(file, SIZE - 100), -1, "the rest of the last block cannot be cleared");
    memset(content, 'n', PAGE);
    EQUAL(pwrite(file, content, PAGE, 0), PAGE, "the file is written");
    EQUAL(fsync(file), 0, "and stored with its size");

    file = made("/disk/hole", 'h');
    room = free_blocks();
    disk_fails(1);
    EQUAL(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, PAGE), -1,
          "no hole is punched");
    EQUAL(free_blocks(), room, "which would give a block back");
    CHECK(holds(file, 'h', SIZE, 0), "and none is there");
    EQUAL(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2 * PAGE, PAGE), 0,
          "one is punched");
    EQUAL(free_blocks(), room + 1, "which gives a block back");
    CHECK(holds(file, 'h', 2 * PAGE, 0), "and is there");
}

static void removals(void) {
    made("/disk/unlinked", 'u');
    disk_fails(1);
    EQUAL(unlink("/disk/unlinked"), -1, "the block of an open file that is removed fails");
    sync();

    long room = free_blocks();
    NEED(close(made("/disk/closed", 'c')) == 0);
    disk_fails(2);
    EQUAL(unlink("/disk/closed"), 0, "the content of a removed file fails to go");
    sync();
    EQUAL(free_blocks(), room, "and goes with the next sync");
}

static void renames(void) {
    int old = made("/disk/old", 'o');
    NEED(close(made("/disk/other", 't')) == 0);
    disk_fails(1);
    EQUAL(rename("/disk/old", "/disk/other"), -1, "a rename fails");
    CHECK(is_at("/disk/old", 'o', SIZE, 0) && is_at("/disk/other", 't', SIZE, 0),
          "and both files have their names");
    struct stat status;
    NEED(stat("/disk/other", &status) == 0);
    EQUAL(status.st_nlink, 1, "of which they have one");

    NEED(close(made("/disk/source", 's')) == 0 && close(made("/disk/target", 't')) == 0);
    disk_fails(2);
    EQUAL(rename("/disk/source", "/disk/target"), 0, "the end of the file that loses its name fails");
    CHECK(access("/disk/source", F_OK) == -1 && is_at("/disk/target", 's', SIZE, 0),
          "and the other one has it");
    EQUAL(fsync(old), 0, "the first file is stored");
    sync();
}

int main(void) {
    test_start();
    if (access("/disk/target", F_OK) != 0) {
        disk_has_no_writer();
        truncations();
        removals();
        renames();
        disk_power_fails();
        return test_end();
    }
    CHECK(is_at("/disk/cut", 'c', 2 * PAGE, 'n'), "a file that was not cut is whole");
    CHECK(is_at("/disk/hole", 'h', 2 * PAGE, 0), "one has its hole");
    struct stat status;
    CHECK(stat("/disk/end", &status) == 0 && status.st_size == SIZE, "another has its size");
    FAILS(access("/disk/unlinked", F_OK), ENOENT, "a file that was removed is gone");
    FAILS(access("/disk/closed", F_OK), ENOENT, "and so is the closed one");
    CHECK(is_at("/disk/old", 'o', SIZE, 0) && is_at("/disk/other", 't', SIZE, 0),
          "a rename that failed has changed nothing");
    CHECK(access("/disk/source", F_OK) == -1 && is_at("/disk/target", 's', SIZE, 0),
          "and the other one is whole");
    return test_end();
}
