// memory: 64M
// kernel-only: it fills all memory of the machine
//
// A full file system: a writer gets ENOSPC, fallocate takes all or nothing, and a
// touch of a mapping that would need a page is SIGBUS, and what
// is removed can be used again.

#include "test.h"

#include <sys/statfs.h>

static char block[65536];

static long free_blocks(void) {
    struct statfs status;
    NEED(statfs("/tmp", &status) == 0 && status.f_bsize == PAGE);
    STEP_EQUAL(status.f_bfree, status.f_bavail);
    return status.f_bavail;
}

static long meminfo(const char *field) {
    char text[4000];
    NEED(test_read_file("/proc/meminfo", text, sizeof text) > 0);
    const char *line = strstr(text, field);
    NEED(line);
    return atol(line + strlen(field)) / 4;
}

// Writes blocks until one is refused; gives the bytes.
static long fill(int file) {
    long written = 0;
    ssize_t count;
    while (written < 2000000000 && (count = write(file, block, sizeof block)) > 0)
        written += count;
    return written;
}

static int create(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    return file;
}

int main(void) {
    test_start();
    memset(block, 'f', sizeof block);
    long all = free_blocks();
    struct statfs status;
    NEED(statfs("/tmp", &status) == 0);
    CHECK(status.f_blocks >= meminfo("MemTotal:") / 2 && status.f_blocks < meminfo("MemTotal:"),
          "the size is half of memory, and what there was at the start");

    int file = create("/tmp/full");
    long written = fill(file);
    int error = errno;
    EQUAL(error, ENOSPC, "2 GB into /tmp: ENOSPC");
    CHECK(written <= all * 4096 && written > (all - 16) * 4096, "when it is full");
    CHECK(free_blocks() < 16, "statfs says that it is full");
    CHECK(pwrite(file, block, 4096, 0) == 4096, "what is there can be written again");
    int other = create("/tmp/other");
    STEP(fill(other) < 16 * 4096);
    FAILS(write(other, block, sizeof block), ENOSPC, "another file has no room either");
    WORKS(ftruncate(file, 8 * 65536), "ftruncate gives room back");
    CHECK(free_blocks() > all - 160, "and statfs says so");
    STEP_EQUAL(lseek(file, 0, SEEK_END), 8 * 65536);
    CHECK(fill(file) > (all - 160) * 4096, "which can be written");
    STEP_EQUAL(unlink("/tmp/full"), 0);
    CHECK(free_blocks() < 16, "a file that was unlinked and is open keeps its room");
    close(file);
    close(other);
    STEP_EQUAL(unlink("/tmp/other"), 0);
    EQUAL(free_blocks(), all, "the last close gives all of it back");

    file = create("/tmp/full");
    long memory = meminfo("MemFree:");
    FAILS(fallocate(file, 0, 0, (off_t)2 << 30), ENOSPC, "fallocate of 2 GiB");
    FAILS(fallocate(file, 0, 0, (all + 1) * 4096), ENOSPC, "fallocate of one page too much");
    CHECK(free_blocks() == all && lseek(file, 0, SEEK_END) == 0, "takes nothing");
    CHECK(meminfo("MemFree:") > memory - 64, "and no memory");
    WORKS(fallocate(file, 0, 0, (all - 1) * 4096), "fallocate of nearly all");
    EQUAL(free_blocks(), 1, "leaves the rest");

    int sparse = create("/tmp/sparse");
    STEP_EQUAL(ftruncate(sparse, 4 * PAGE), 0);
    char *mapping = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, sparse, 0);
    NEED(mapping != MAP_FAILED);
    EQUAL(STORES(mapping), 0, "the last free page, through a mapping");
    EQUAL(STORES(mapping + PAGE), SIGBUS, "the page after it: SIGBUS");
    FAILS(pwrite(sparse, block, 1, PAGE), ENOSPC, "and ENOSPC from pwrite");
    STEP_EQUAL(ftruncate(file, 0), 0);
    EQUAL(STORES(mapping + PAGE), 0, "once there is room, the page comes");
    munmap(mapping, 4 * PAGE);
    close(sparse);
    close(file);

    // Programs have the memory that the file system might use.
    int ready[2], done[2];
    NEED(pipe(ready) == 0 && pipe(done) == 0);
    pid_t large = CHILD({
        char end;
        long pages = meminfo("MemFree:") - 2048;
        madvise(memset(test_map(pages * PAGE), 1, pages * PAGE), PAGE, MADV_NORMAL);
        STEP_EQUAL(write(ready[1], "x", 1), 1);
        STEP_EQUAL(read(done[0], &end, 1), 1);
    });
    char one;
    STEP_EQUAL(read(ready[0], &one, 1), 1);
    EXITS(0, "a writer who fills all memory lives", {
        int other = create("/tmp/full");
        long count = fill(other);
        // The file system has room, and the machine none.
        STEP_EQUAL(errno, ENOMEM);
        STEP(count > 1 << 20 && count < 8 << 20);
        STEP_FAILS(fallocate(other, 0, count, 16 << 20), ENOMEM);
        // Its own memory is not used up either.
        memset(test_map(128 * PAGE), 2, 128 * PAGE);
    });
    STEP_EQUAL(unlink("/tmp/full"), 0);
    EXITS(0, "and so does one who fills a memfd", {
        int other = memfd_create("full", 0);
        NEED(other >= 0);
        STEP(fill(other) > 1 << 20);
        STEP_EQUAL(errno, ENOMEM);
    });
    STEP_EQUAL(write(done[1], "x", 1), 1);
    EQUAL(test_wait(large), 0, "nobody was killed for it");
    return test_end();
}
