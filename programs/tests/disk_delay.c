// disk: 16M
// option: disk-delay=20000
// kernel-only: it needs the kernel's disk, which answers late
//
// A disk that answers after 20 ms: reads and stores wait for it, other threads run in the meantime,
// and files may change before an answer comes.

#include <pthread.h>

#include "test.h"

#define PAGES 64
#define LATE 20000000LL

static char bytes[PAGES * PAGE];
static int file;
static volatile long turns;
static volatile int ends;

static void *run(void *unused UNUSED) {
    while (!ends) {
        turns++;
        sched_yield();
    }
    return 0;
}

static int wrong;

// Reads all pages, each after its pages were dropped. Those behind the end are missing.
static void *read_all(void *unused UNUSED) {
    for (int page = 0; page < PAGES; page += 8) {
        char byte = 0;
        posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
        ssize_t count = pread(file, &byte, 1, (off_t)page * PAGE);
        if (count < 0 || (count == 1 && byte != 'a' + page % 26 && byte != 0))
            wrong++;
    }
    return 0;
}

int main(void) {
    test_start();
    for (size_t at = 0; at < sizeof bytes; at++)
        bytes[at] = (char)('a' + at / PAGE % 26);
    file = open("/disk/late", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && write(file, bytes, sizeof bytes) == sizeof bytes);
    long long start = test_now();
    EQUAL(fsync(file), 0, "content is stored");
    CHECK(test_now() - start >= LATE, "after the answer");
    NEED(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0);

    pthread_t other, readers[3];
    NEED(pthread_create(&other, 0, run, 0) == 0);
    char byte = 0;
    start = test_now();
    long before = turns;
    NEED(pread(file, &byte, 1, 5 * PAGE) == 1);
    CHECK(test_now() - start >= LATE, "a page is read when the answer comes");
    CHECK(byte == 'f' && turns > before, "another thread runs in the meantime");
    ends = 1;
    NEED(pthread_join(other, 0) == 0);

    for (int reader = 0; reader < 3; reader++)
        NEED(pthread_create(&readers[reader], 0, read_all, 0) == 0);
    for (int turn = 0; turn < 8; turn++) {
        NEED(ftruncate(file, (turn % 4 + 1) * 16 * (long)PAGE - 100) == 0);
        NEED(pwrite(file, bytes, sizeof bytes, 0) == sizeof bytes && fdatasync(file) == 0);
    }
    for (int reader = 0; reader < 3; reader++)
        NEED(pthread_join(readers[reader], 0) == 0);
    CHECK(wrong == 0, "readers beside truncations see what was written");
    // The machine ends before the answer to a request for later.
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    posix_fadvise(file, 0, 0, POSIX_FADV_WILLNEED);
    return test_end();
}
