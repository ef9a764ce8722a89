// Shared parts of the programs about shortage of memory: memory with content
// that compresses well or not, and a bystander that measures how long it waits.

#ifndef PRESSURE_H
#define PRESSURE_H

#include "test.h"

#define MIB ((size_t)1 << 20)
#define NAP 10000000ull

// Memory through which processes communicate.
struct shared {
    volatile int begins, ends;
    volatile uint64_t naps, worst, writes, forks;
};

UNUSED static struct shared *pressure_shared(void) {
    void *shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    return shared;
}

UNUSED static uint64_t pressure_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

// Sleeps for ten milliseconds at a time, and records the longest wait beyond that, in nanoseconds.
UNUSED static void pressure_sleeper(struct shared *shared) {
    while (!shared->ends) {
        uint64_t before = pressure_now();
        struct timespec nap = {0, NAP};
        nanosleep(&nap, 0);
        uint64_t gap = pressure_now() - before - NAP;
        if (shared->begins) {
            shared->naps++;
            if (gap > shared->worst)
                shared->worst = gap;
        }
    }
}

// Writes random numbers to one word in `one_in` of a page; the others stay as they are.
UNUSED static void pressure_fill(uint64_t *page, uint64_t *seed, int one_in) {
    for (int at = 0; at < 512; at += one_in) {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        page[at] = *seed;
    }
}

// Takes memory of a mapping with these flags, page by page.
UNUSED static void pressure_take(size_t length, int flags, int one_in) {
    char *memory = mmap(0, length, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(memory != MAP_FAILED);
    uint64_t seed = 88172645463325252u;
    for (size_t at = 0; at < length; at += PAGE)
        pressure_fill((uint64_t *)(memory + at), &seed, one_in);
}

#endif
