// disk: 2M
// kernel-only: it needs the kernel's disk
//
// A write to a full disk says so itself: what a write has accepted finds room when it is stored.
// Truncation, removal and a removal before the store give the room back.

#include <sys/statfs.h>

#include "test.h"

static char piece[60000];

static long free_bytes(void) {
    struct statfs volume;
    NEED(statfs("/disk", &volume) == 0);
    return (long)volume.f_bfree * 4096;
}

static long fill(int file) {
    long total = 0;
    ssize_t count;
    while ((count = write(file, piece, sizeof piece)) > 0)
        total += count;
    CHECK(count == -1 && errno == ENOSPC, "a write to a full disk is ENOSPC");
    return total;
}

int main(void) {
    test_start();
    memset(piece, 'x', sizeof piece);
    long room = free_bytes();
    CHECK(room > 0 && room < 2 << 20, "the disk has room, and an end");
    int file = open("/disk/full", O_RDWR | O_CREAT | O_TRUNC, 0600);
    int other = open("/disk/other", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && other >= 0);

    EQUAL(fill(file), room, "writes fill the disk to its last block");
    EQUAL(free_bytes(), 0, "no block is free, although none was stored");
    FAILS(write(other, "x", 1), ENOSPC, "another file finds no room either");
    EQUAL(pwrite(file, "y", 1, 5000), 1, "a page that has room is written again");
    EQUAL(fsync(file), 0, "all that was accepted is stored");
    EQUAL(pwrite(file, "z", 1, 5000), 1, "and is written again");
    EQUAL(fsync(file), 0, "and stored again");

    EQUAL(ftruncate(file, room / 2), 0, "a file is cut");
    EQUAL(free_bytes(), (room - room / 2) / 4096 * 4096, "the rest of its blocks is free");
    EQUAL(pwrite(other, "x", 1, 1 << 20), 1, "a hole takes one block");
    EQUAL(free_bytes(), (room - room / 2) / 4096 * 4096 - 4096, "and no more");
    EQUAL(ftruncate(other, 0), 0, "and gives it back");
    CHECK(fill(other) == (room - room / 2) / 4096 * 4096, "the other file fills the room");
    EQUAL(ftruncate(other, 8192), 0, "a cut gives back what was never stored");
    EQUAL(free_bytes(), (room - room / 2) / 4096 * 4096 - 8192, "all but its two blocks");
    EQUAL(unlink("/disk/other"), 0, "a file is removed");
    EQUAL(close(other), 0, "and closed");
    EQUAL(unlink("/disk/full"), 0, "and so is the first");
    EQUAL(close(file), 0, "which is closed");
    EQUAL(free_bytes(), room, "the disk is empty again");

    file = open("/disk/again", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    EQUAL(write(file, piece, sizeof piece), sizeof piece, "a write finds room again");
    EQUAL(pwrite(file, (void *)8, 1, 200000), -1, "a write from nowhere fails");
    EQUAL(unlink("/disk/again"), 0, "the file is removed");
    NEED(close(file) == 0);
    EQUAL(free_bytes(), room, "and leaves nothing");
    return test_end();
}
