// memory: 48M
// kernel-only: it uses all memory of the machine
//
// Threads append to one file on a machine whose memory is in use, where a
// call that allocates lets the others run.

#include "test.h"
#include "swap.h"

#include <pthread.h>

#define MIB ((size_t)1 << 20)
#define PRESSURE (64 * MIB)

enum { WRITERS = 3, RECORDS = 60, RECORD = 65536 };

static volatile int rounds, done;
static long written[WRITERS];

// Uses more memory than there is.
static void *press(void *memory) {
    while (!done) {
        for (size_t page = 0; page < PRESSURE / PAGE && !done; page++)
            *(volatile uint64_t *)((char *)memory + page * PAGE) = (rounds + page + 1) * 0x9E3779B97F4A7C15u;
        rounds++;
    }
    return 0;
}

// Memory may allow less than a record, but whole pages.
static void *append(void *number) {
    long writer = (long)number;
    char *record = test_map(RECORD);
    int file = open("/tmp/appended", O_WRONLY | O_APPEND);
    memset(record, 'a' + writer, RECORD);
    for (int count = 0; count < RECORDS; count++) {
        ssize_t length = write(file, record, RECORD);
        written[writer] += length > 0 ? length : 0;
    }
    close(file);
    return 0;
}

static void run(void *(*body)(void *), int count) {
    pthread_t threads[WRITERS];
    for (long number = 0; number < count; number++)
        STEP_EQUAL(pthread_create(&threads[number], 0, body, (void *)number), 0);
    for (int number = 0; number < count; number++)
        STEP_EQUAL(pthread_join(threads[number], 0), 0);
}

int main(void) {
    test_start();
    STEP_EQUAL(swap_begin(400 * MIB), 0);
    pthread_t presser;
    STEP_EQUAL(pthread_create(&presser, 0, press, test_map(PRESSURE)), 0);
    while (!rounds)
        usleep(1000);
    int file = open("/tmp/appended", O_RDONLY | O_CREAT, 0600);
    run(append, WRITERS);
    done = 1;
    STEP_EQUAL(pthread_join(presser, 0), 0);

    long found[WRITERS] = {0}, other = 0, all = 0;
    static char page[PAGE];
    for (off_t at = 0; pread(file, page, PAGE, at) == PAGE; at += PAGE) {
        int writer = page[0] - 'a';
        int whole = writer >= 0 && writer < WRITERS && !memcmp(page, page + 1, PAGE - 1);
        *(whole ? &found[writer] : &other) += PAGE;
    }
    for (int writer = 0; writer < WRITERS; writer++) {
        EQUAL(found[writer], written[writer], "the file has what a writer has appended");
        all += written[writer];
    }
    EQUAL(other, 0, "and nothing else");
    EQUAL(lseek(file, 0, SEEK_END), all, "its size is the sum");
    return test_end();
}
