// Bytes between files, pipes and memory, from all places in a page to all
// others, of lengths around words, blocks and pages.

#include "test.h"

enum { SIZE = 4 * 4096 };

static const unsigned places[] = {0, 1, 3, 7, 8, 9, 15, 16, 31, 64, 127, 4089, 4095};
#define PLACES (sizeof places / sizeof *places)

static unsigned char pattern[SIZE], buffer[SIZE + 2 * 4096];

static unsigned char byte_at(unsigned at) {
    return (unsigned char)(at * 7 + at / 251 + 1);
}

// Whether memory has what `pattern` has from a place on.
static int is_pattern(const unsigned char *memory, unsigned from, unsigned length) {
    return memcmp(memory, pattern + from, length) == 0;
}

static int neighbors_are(unsigned char value, unsigned place, unsigned length) {
    return (place == 0 || buffer[place - 1] == value) && buffer[place + length] == value;
}

static void read_all_ways(int file, unsigned length) {
    for (unsigned to = 0; to < PLACES; to++)
        for (unsigned from = 0; from < PLACES; from++) {
            if (places[from] + length > SIZE)
                continue;
            memset(buffer, 0xee, places[to] + length + 1);
            STEP_EQUAL(pread(file, buffer + places[to], length, places[from]), length);
            STEP(is_pattern(buffer + places[to], places[from], length));
            STEP(neighbors_are(0xee, places[to], length));
        }
}

static void write_all_ways(int file, const unsigned char *mapped, unsigned length) {
    for (unsigned to = 0; to < PLACES; to++)
        for (unsigned from = 0; from < PLACES; from += 2) {
            unsigned end = places[to] + length;
            if (end >= SIZE || places[from] + length > SIZE)
                continue;
            unsigned char before = places[to] > 0 ? mapped[places[to] - 1] : 0, behind = mapped[end];
            STEP_EQUAL(pwrite(file, pattern + places[from], length, places[to]), length);
            STEP(is_pattern(mapped + places[to], places[from], length));
            STEP(places[to] == 0 || mapped[places[to] - 1] == before);
            STEP(mapped[end] == behind);
        }
}

static void through_pipe(int ends[2], unsigned length) {
    for (unsigned place = 0; place < PLACES; place++) {
        unsigned at = places[place];
        if (at + length > SIZE)
            continue;
        memset(buffer, 0xee, at + length + 1);
        STEP_EQUAL(write(ends[1], pattern + at, length), length);
        STEP_EQUAL(read(ends[0], buffer + at, length), length);
        STEP(is_pattern(buffer + at, at, length));
        STEP(neighbors_are(0xee, at, length));
    }
}

int main(void) {
    test_start();
    for (unsigned at = 0; at < SIZE; at++)
        pattern[at] = byte_at(at);
    int file = (int)syscall(SYS_memfd_create, "lengths", 0), copy = (int)syscall(SYS_memfd_create, "copy", 0);
    int ends[2];
    NEED(file >= 0 && copy >= 0 && pipe(ends) == 0 && ftruncate(copy, SIZE) == 0);
    STEP_EQUAL(write(file, pattern, SIZE), SIZE);
    unsigned char *mapped = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, copy, 0);
    NEED(mapped != MAP_FAILED);

    static const unsigned around[] = {0, 64, 128, 256, 384, 4096, 8192, 3 * 4096};
    int before = test_failures;
    for (unsigned index = 0; index < sizeof around / sizeof *around; index++)
        for (unsigned length = around[index] > 9 ? around[index] - 9 : 0; length <= around[index] + 9; length++)
            read_all_ways(file, length);
    ALL_STEPS(before, "pread of all lengths, from and to all places");

    before = test_failures;
    for (unsigned index = 0; index < sizeof around / sizeof *around; index++)
        for (unsigned length = around[index] > 9 ? around[index] - 9 : 0; length <= around[index] + 9; length += 3)
            write_all_ways(copy, mapped, length);
    ALL_STEPS(before, "pwrite of all lengths, from and to all places");

    before = test_failures;
    for (unsigned index = 0; index < sizeof around / sizeof *around; index++)
        for (unsigned length = around[index] > 9 ? around[index] - 9 : 1; length <= around[index] + 9; length += 2)
            through_pipe(ends, length);
    ALL_STEPS(before, "all lengths through a pipe, from and to all places");

    before = test_failures;
    for (unsigned length = 1; length <= SIZE; length += 509) {
        int fresh = (int)syscall(SYS_memfd_create, "fresh", 0);
        NEED(fresh >= 0);
        STEP_EQUAL(pwrite(fresh, pattern, length, 5), length);
        STEP_EQUAL(lseek(fresh, 0, SEEK_END), length + 5);
        memset(buffer, 0xee, sizeof buffer);
        STEP_EQUAL(pread(fresh, buffer, sizeof buffer, 0), length + 5);
        STEP(buffer[0] == 0 && buffer[4] == 0 && is_pattern(buffer + 5, 0, length));
        STEP(buffer[length + 5] == 0xee);
        STEP_EQUAL(ftruncate(fresh, SIZE + 4096), 0);
        STEP_EQUAL(pread(fresh, buffer, sizeof buffer, length + 5), SIZE + 4096 - length - 5);
        for (unsigned at = 0; at < SIZE + 4096 - length - 5; at++)
            STEP(buffer[at] == 0);
        close(fresh);
    }
    ALL_STEPS(before, "a new file has what was written, and zeroes behind it");
    return test_end();
}
