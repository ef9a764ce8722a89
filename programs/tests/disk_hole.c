// disk: 2M
// kernel-only: it needs the kernel's disk
//
// A mapping's write into a hole takes a block: on a full disk it is SIGBUS, and EFAULT in a call. A
// page that was written finds room when it is stored. Holes, truncations and the end of the file
// give the room back. The first write to a page is the time of the file's change.

#include "disk.h"
#include "userfault.h"

#include <sys/statfs.h>
#include <sys/uio.h>

#define PAST 1000
#define PAGES 16

static char piece[60000];

static long free_bytes(void) {
    struct statfs volume;
    NEED(statfs("/disk", &volume) == 0);
    return (long)volume.f_bfree * 4096;
}

// A file of holes.
static int file_of_holes(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && ftruncate(file, PAGES * PAGE) == 0);
    return file;
}

// Another file takes all blocks but some.
static int fill_but(long blocks) {
    int file = open("/disk/other", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    ssize_t count;
    long total = 0;
    while ((count = write(file, piece, sizeof piece)) > 0)
        total += count;
    NEED(errno == ENOSPC && total > blocks * 4096);
    NEED(ftruncate(file, total - blocks * 4096) == 0 && free_bytes() == blocks * 4096);
    return file;
}

static long modified(int file) {
    struct stat status;
    NEED(fstat(file, &status) == 0);
    return status.st_mtim.tv_sec;
}

static void make_old(int file) {
    struct timespec past[2] = {{PAST, 0}, {PAST, 0}};
    NEED(futimens(file, past) == 0 && modified(file) == PAST);
}

static void full_disk(void) {
    int file = file_of_holes("/disk/hole");
    int other = fill_but(2);
    char *map = disk_map(file, PAGES * PAGE);
    EQUAL(map[4 * PAGE], 0, "a hole is read");
    EQUAL(free_bytes(), 2 * 4096, "which takes no block");
    make_old(file);
    map[0] = 'a';
    EQUAL(free_bytes(), 4096, "a mapping's write takes one");
    CHECK(modified(file) > PAST, "and is a change of the file");
    map[1] = 'b';
    EQUAL(STORES(map + PAGE), 0, "the last block is taken");
    EQUAL(free_bytes(), 0, "and the disk is full");
    EQUAL(msync(map, PAGE, MS_SYNC), 0, "a page is stored");
    make_old(file);
    EQUAL(STORES(map + 4 * PAGE), SIGBUS, "a write to a page that was read is SIGBUS");
    EQUAL(STORES(map + 5 * PAGE), SIGBUS, "and so is one to another page");
    CHECK(test_last_fault.code == BUS_ADRERR, "for its address");
    EQUAL(modified(file), PAST, "which is no change");
    FAILS(madvise(map + 4 * PAGE, PAGE, MADV_POPULATE_WRITE), EFAULT, "it cannot be populated");
    FAILS(pread(other, map + 4 * PAGE, 10, 0), EFAULT, "no call writes it");
    struct iovec from = {"x", 1}, to = {map + 4 * PAGE, 1};
    FAILS(process_vm_writev(getpid(), &from, 1, &to, 1, 0), EFAULT, "nor does another process");
    EQUAL(map[4 * PAGE], 0, "it is a hole");
    map[0] = 'c';
    CHECK(modified(file) > PAST, "a page with a block is written again, which is a change");
    EQUAL(mprotect(map, PAGES * PAGE, PROT_READ), 0, "writes are forbidden");
    EQUAL(mprotect(map, PAGES * PAGE, PROT_READ | PROT_WRITE), 0, "and allowed");
    EQUAL(STORES(map + 4 * PAGE), SIGBUS, "a hole stays one");
    EQUAL(STORES(map), 0, "and a block stays one");
    pid_t child = CHILD({ _exit(STORES(map + 4 * PAGE) != SIGBUS || STORES(map + PAGE) != 0); });
    CHECK(test_wait(child) == 0, "a child finds the same");

    EQUAL(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, PAGE), 0,
          "a hole is punched, where a page was not stored");
    EQUAL(free_bytes(), 4096, "it gives its room back");
    EQUAL(STORES(map + 4 * PAGE), 0, "to another page");
    EQUAL(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE), 0,
          "another one, where a page was stored");
    EQUAL(free_bytes(), 4096, "gives back a block");
    EQUAL(fsync(file), 0, "the rest is stored, although the disk is full");
    EQUAL(free_bytes(), 4096, "in its block");
    EQUAL(STORES(map + 6 * PAGE), 0, "the block is taken again");
    EQUAL(ftruncate(file, 5 * PAGE), 0, "a truncation");
    EQUAL(free_bytes(), 4096, "gives it back");
    NEED(munmap(map, PAGES * PAGE) == 0 && close(file) == 0 && close(other) == 0);
    NEED(unlink("/disk/hole") == 0 && unlink("/disk/other") == 0);
}

static int written;
static char *served;

// Its second page never comes.
static void *write_served(void *unused UNUSED) {
    return (void *)pwrite(written, served, 2 * PAGE, 0);
}

// A mapping writes a page that a call is about to write, and then does not.
static void mapping_beside_a_write(void) {
    written = file_of_holes("/disk/written");
    int other = fill_but(2);
    char *map = disk_map(written, PAGES * PAGE);
    int fault = uf_open(O_CLOEXEC, 0);
    served = uf_map(2 * PAGE);
    NEED(fault >= 0 && served != MAP_FAILED);
    memset(served, 's', PAGE);
    NEED(uf_register(fault, served + PAGE, PAGE, MISSING) == 0);
    pthread_t writer;
    NEED(pthread_create(&writer, 0, write_served, 0) == 0);
    NEED(uf_next(fault).event == FAULT);
    EQUAL(STORES(map + PAGE), 0, "a page is written in the middle of a call that has its block");
    EQUAL(STORES(map + 2 * PAGE), SIGBUS, "and no other page");
    NEED(munmap(served + PAGE, PAGE) == 0 && close(fault) == 0);
    void *count;
    NEED(pthread_join(writer, &count) == 0);
    EQUAL((long)count, PAGE, "the call ends before it");
    EQUAL(free_bytes(), 0, "the page keeps its block");
    EQUAL(STORES(map + 2 * PAGE), SIGBUS, "which no other page gets");
    EQUAL(fsync(written), 0, "and is stored in it");
    NEED(munmap(map, PAGES * PAGE) == 0 && munmap(served, PAGE) == 0);
    NEED(close(written) == 0 && close(other) == 0);
    NEED(unlink("/disk/written") == 0 && unlink("/disk/other") == 0);
}

// The last end of a file, its mapping's, stores what was written.
static void last_mapping(void) {
    int file = file_of_holes("/disk/last");
    int other = fill_but(1);
    char *map = disk_map(file, PAGES * PAGE);
    NEED(close(file) == 0);
    map[7 * PAGE] = 'l';
    EQUAL(STORES(map + 8 * PAGE), SIGBUS, "the disk is full");
    NEED(munmap(map, PAGES * PAGE) == 0);
    file = open("/disk/last", O_RDWR);
    char byte;
    CHECK(pread(file, &byte, 1, 7 * PAGE) == 1 && byte == 'l', "the last mapping's page is stored");
    CHECK(pread(file, &byte, 1, 8 * PAGE) == 1 && byte == 0, "and the other one is a hole");
    NEED(close(file) == 0 && close(other) == 0);
    NEED(unlink("/disk/last") == 0 && unlink("/disk/other") == 0);
}

int main(void) {
    test_start();
    disk_has_no_writer();
    memset(piece, 'x', sizeof piece);
    long room = free_bytes();
    full_disk();
    EQUAL(free_bytes(), room, "nothing is left of it");
    mapping_beside_a_write();
    EQUAL(free_bytes(), room, "nor of a file that was written by both");
    last_mapping();
    EQUAL(free_bytes(), room, "nor of a file that was mapped last");
    return test_end();
}
