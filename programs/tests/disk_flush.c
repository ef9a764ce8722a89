// disk: 32M
// kernel-only: it needs the kernel's disk
//
// An fsync beside readers that always have the disk work: it waits for what the disk had to do before
// it, and not for the reads that are begun meanwhile.

#include <pthread.h>

#include "test.h"

#define PAGE 4096
#define PAGES 2048
#define READERS 4

static char piece[64 * PAGE];
static int content;
static volatile int ends;

// The reads of the disk so far.
static long reads(void) {
    char text[200], *at;
    NEED(test_read_file("/proc/diskstats", text, sizeof text) > 0);
    NEED((at = strstr(text, "vda ")));
    return atol(at + 4);
}

static void *read_always(void *number) {
    while (!ends) {
        posix_fadvise(content, 0, 0, POSIX_FADV_DONTNEED);
        for (long page = (long)number; page < PAGES && !ends; page += READERS) {
            posix_fadvise(content, page * PAGE, PAGE, POSIX_FADV_WILLNEED);
            if (page % 64 < READERS)
                sched_yield();
        }
    }
    return 0;
}

int main(void) {
    test_start();
    content = open("/disk/read", O_RDWR | O_CREAT | O_TRUNC, 0600);
    int file = open("/disk/written", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(content >= 0 && file >= 0);
    for (int page = 0; page < PAGES; page += 64)
        NEED(write(content, piece, sizeof piece) == sizeof piece);
    NEED(fsync(content) == 0);
    pthread_t readers[READERS];
    for (long reader = 0; reader < READERS; reader++)
        NEED(pthread_create(&readers[reader], 0, read_always, (void *)reader) == 0);
    long most = 0;
    for (int turn = 0; turn < 10; turn++) {
        test_sleep(5);
        NEED(pwrite(file, piece, PAGE, (off_t)turn * PAGE) == PAGE);
        long before = reads();
        NEED(fsync(file) == 0);
        long during = reads() - before;
        if (during > most)
            most = during;
    }
    ends = 1;
    for (int reader = 0; reader < READERS; reader++)
        NEED(pthread_join(readers[reader], 0) == 0);
    CHECK(most < 2000, "an fsync waits for few reads");
    printf("%ld reads during an fsync, at most\n", most);
    return test_end();
}
