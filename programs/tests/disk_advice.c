// disk: 16M
// kernel-only: it counts the requests to the kernel's disk
//
// posix_fadvise about the order of reads: it belongs to the open file, which descriptors share after
// dup, and not to another opening. At random each page is a request; in order few requests bring all.

#include "test.h"

#define PAGE 4096
#define PAGES 256

static char bytes[PAGES * PAGE];

// The reads of the disk so far.
static long reads(void) {
    char text[200], *at;
    NEED(test_read_file("/proc/diskstats", text, sizeof text) > 0);
    NEED((at = strstr(text, "vda ")));
    return atol(at + 4);
}

static long reads_of_all_pages(int file) {
    NEED(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0);
    long before = reads();
    for (int page = 0; page < PAGES; page++) {
        char byte = 0;
        NEED(pread(file, &byte, 1, (off_t)page * PAGE) == 1 && byte == (char)page);
    }
    return reads() - before;
}

int main(void) {
    test_start();
    for (int at = 0; at < PAGES * PAGE; at++)
        bytes[at] = (char)(at / PAGE);
    int file = open("/disk/advice", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && write(file, bytes, sizeof bytes) == sizeof bytes && fsync(file) == 0);
    int other = open("/disk/advice", O_RDONLY), same = dup(file);
    NEED(other >= 0 && same >= 0);

    long usual = reads_of_all_pages(file);
    CHECK(usual > 1 && usual <= 16, "few requests read pages in order");
    EQUAL(posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM), 0, "an order is announced: none");
    EQUAL(reads_of_all_pages(file), PAGES, "each page is a request");
    EQUAL(reads_of_all_pages(same), PAGES, "for the same open file, too");
    EQUAL(reads_of_all_pages(other), usual, "another open file has its own order");
    EQUAL(posix_fadvise(same, 0, 0, POSIX_FADV_SEQUENTIAL), 0, "an order is announced: rising");
    CHECK(reads_of_all_pages(file) < usual, "fewer requests read more pages each");
    EQUAL(posix_fadvise(file, 0, 0, POSIX_FADV_NORMAL), 0, "no order is announced any more");
    EQUAL(reads_of_all_pages(file), usual, "and the requests are the usual ones");
    return test_end();
}
