// disk: 2M
// kernel-only: it needs the kernel's disk
//
// A write to a full disk says so itself: what a write has accepted finds room when it is stored.
// Truncation, removal and a removal before the store give the room back, and so does the end of a
// write that was shorter than asked for. A truncation beside a write leaves that its room.

#include <sys/statfs.h>

#include "userfault.h"

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

static void short_writes(void) {
    long room = free_bytes();
    int file = open("/disk/short", O_RDWR | O_CREAT | O_TRUNC, 0600);
    char *memory = uf_map(3 * PAGE);
    NEED(file >= 0 && ftruncate(file, 64 * PAGE) == 0 && memory != MAP_FAILED);
    memset(memory, 's', 3 * PAGE);
    NEED(munmap(memory + PAGE, PAGE) == 0);
    FAILS(pwrite(file, memory + PAGE, PAGE, 8 * PAGE), EFAULT, "a write from nowhere fails");
    EQUAL(free_bytes(), room, "and takes no room");
    EQUAL(pwrite(file, memory, 2 * PAGE, 8 * PAGE), PAGE, "a write ends where its memory does");
    EQUAL(free_bytes(), room - PAGE, "and takes room for what it has written");
    EQUAL(pwrite(file, memory + PAGE, PAGE, 8 * PAGE), -1, "a further one fails");
    EQUAL(free_bytes(), room - PAGE, "and takes no room from a page that was written before");
    EQUAL(fsync(file), 0, "which is stored");
    EQUAL(free_bytes(), room - PAGE, "in its block");
    NEED(unlink("/disk/short") == 0 && close(file) == 0);
}

static int beside;
static char *served;

// Its second page comes while the file is truncated.
static void *write_served(void *unused UNUSED) { return (void *)pwrite(beside, served, 2 * PAGE, 0); }

// The pages that are written have blocks before, or none.
static void truncation_beside_a_write(int have_blocks) {
    beside = open("/disk/beside", O_RDWR | O_CREAT | O_TRUNC, 0600);
    int other = open("/disk/other", O_RDWR | O_CREAT | O_TRUNC, 0600);
    int fault = uf_open(O_CLOEXEC, 0);
    served = uf_map(2 * PAGE);
    NEED(beside >= 0 && other >= 0 && fault >= 0 && served != MAP_FAILED);
    memset(served, 'b', PAGE);
    if (have_blocks)
        NEED(pwrite(beside, piece, 2 * PAGE, 0) == 2 * PAGE && fsync(beside) == 0);
    NEED(uf_register(fault, served + PAGE, PAGE, MISSING) == 0);
    pthread_t writer;
    NEED(pthread_create(&writer, 0, write_served, 0) == 0);
    NEED(uf_next(fault).event == FAULT);
    EQUAL(ftruncate(beside, 0), 0, "a file is truncated in the middle of a write");
    fill(other);
    NEED(uf_copy(fault, served + PAGE, piece, PAGE, 0) == PAGE);
    void *written;
    NEED(pthread_join(writer, &written) == 0);
    EQUAL((long)written, 2 * PAGE, "the write goes on");
    EQUAL(fsync(beside), 0, "and what it has written is stored, although the disk is full");
    NEED(unlink("/disk/beside") == 0 && unlink("/disk/other") == 0);
    NEED(close(beside) == 0 && close(other) == 0 && close(fault) == 0);
    NEED(munmap(served, 2 * PAGE) == 0);
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
    short_writes();
    truncation_beside_a_write(0);
    truncation_beside_a_write(1);
    EQUAL(free_bytes(), room, "no file leaves anything");
    return test_end();
}
