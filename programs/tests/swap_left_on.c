// memory: 40M
// kernel-only: the machine ends with its swap area on
//
// Memory gets short, so that all cold pages are swapped out, and the area is
// still on at the machine's end: the pages left in it belong to the device.

#include "test.h"
#include "swap.h"

#define MIB ((size_t)1 << 20)
#define SIZE (40 * MIB)
#define DISK (256 * MIB)
#define BEHIND (64 * MIB)

static uint64_t word(size_t page) { return (page + 1) * 0x9E3779B97F4A7C15u; }

// The bytes that a program wrote to the device, after the header.
static int holds(int device) {
    uint64_t words[512];
    for (size_t page = 0; page < 16; page++) {
        NEED(pread(device, words, sizeof words, BEHIND + page * PAGE) == sizeof words);
        for (int at = 0; at < 512; at++)
            if (words[at] != word(page * 512 + at))
                return 0;
    }
    return 1;
}

int main(void) {
    test_start();
    STEP_EQUAL(swap_setting("disksize", DISK), 0);
    STEP_EQUAL(swap_make(DISK / PAGE), 0);
    int device = open(SWAP_DEVICE, O_RDWR);
    NEED(device >= 0);
    for (size_t page = 0; page < 16; page++) {
        uint64_t words[512];
        for (int at = 0; at < 512; at++)
            words[at] = word(page * 512 + at);
        NEED(pwrite(device, words, sizeof words, BEHIND + page * PAGE) == sizeof words);
    }
    EQUAL(swapon(SWAP_DEVICE, 0), 0, "swapon");
    for (int round = 0; round < 2; round++) {
        char *memory = test_map(SIZE);
        for (size_t page = 0; page < SIZE / PAGE; page++)
            *(volatile uint64_t *)(memory + page * PAGE) = word(page);
        size_t wrong = 0;
        for (size_t page = 0; page < SIZE / PAGE; page++)
            wrong += *(volatile uint64_t *)(memory + page * PAGE) != word(page);
        EQUAL(wrong, 0, "as much as the machine has");
        STEP_EQUAL(munmap(memory, SIZE), 0);
    }
    CHECK(holds(device), "the device's own content");
    close(device);
    // The machine's end audits, with the area on.
    return test_end();
}
