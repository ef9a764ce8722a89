// disk: 16M
// kernel-only: it needs the kernel's disk
//
// A file in more stretches than its block on the disk has room for: each second page is a hole. It is
// written until the disk is full, and all of it is stored. The second start finds it.

#include <sys/statfs.h>

#include "test.h"

#define PAGE 4096
#define MANY 1000

static char page[PAGE], read_back[PAGE];

static long free_blocks(void) {
    struct statfs volume;
    NEED(statfs("/disk", &volume) == 0);
    return (long)volume.f_bfree;
}

static void fill(int number) { memset(page, 'a' + number % 23, PAGE); }

static int put(int file, int number) {
    fill(number);
    return pwrite(file, page, PAGE, (off_t)number * 2 * PAGE) == PAGE;
}

static int holds(int file, int pages) {
    for (int number = 0; number < pages; number++) {
        fill(number);
        if (pread(file, read_back, PAGE, (off_t)number * 2 * PAGE) != PAGE ||
            memcmp(page, read_back, PAGE) != 0)
            return 0;
        if (number > 0 && (pread(file, read_back, PAGE, (off_t)(number * 2 - 1) * PAGE) != PAGE ||
                           read_back[0] != 0 || read_back[PAGE - 1] != 0))
            return 0;
    }
    return 1;
}

int main(void) {
    test_start();
    int is_first = access("/disk/scattered", F_OK) != 0;
    int file = open("/disk/scattered", O_RDWR | O_CREAT, 0600);
    NEED(file >= 0);
    long room = free_blocks();
    if (is_first) {
        for (int number = 0; number < MANY; number++)
            NEED(put(file, number));
        EQUAL(fsync(file), 0, "a file in many stretches is stored");
        EQUAL(free_blocks(), room - MANY, "in as many blocks as it has pages");
        int full = open("/disk/full", O_RDWR | O_CREAT, 0600), count = 0;
        NEED(full >= 0);
        while (put(full, count))
            count++;
        EQUAL(errno, ENOSPC, "a write to a full disk is ENOSPC");
        EQUAL(count, room - MANY, "after the last block");
        EQUAL(fsync(full), 0, "all that was accepted is stored");
        CHECK(put(full, count / 2), "and written again");
        EQUAL(fsync(full), 0, "and stored again");
        EQUAL(posix_fadvise(full, 0, 0, POSIX_FADV_DONTNEED), 0, "its pages are dropped");
        CHECK(holds(full, count), "and read again from the disk");
        EQUAL(ftruncate(full, 20 * PAGE), 0, "it is cut");
        EQUAL(free_blocks(), room - MANY - 10, "and gives its blocks back");
        NEED(unlink("/disk/full") == 0 && close(full) == 0);
        EQUAL(free_blocks(), room - MANY, "and its last ones");
        return test_end();
    }
    CHECK(holds(file, MANY), "the next start finds it");
    NEED(unlink("/disk/scattered") == 0 && close(file) == 0);
    EQUAL(free_blocks(), room + MANY, "it gives its blocks back");
    return test_end();
}
