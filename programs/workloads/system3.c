/*
 * System 3: madvise(MADV_PAGEOUT) swaps touched memory out, reading it page by page swaps it in,
 * and is unmapped while it is in swap. Each is a phase. There must be a swap area with room for the
 * workload (or --swap).
 *
 *      touch -> MADV_PAGEOUT -> read each page -> munmap
 *      touch -> MADV_PAGEOUT -> munmap
 *
 * --mib N      how much memory (256)
 * --rounds N   how often (2)
 * --random     one word in eight is random, so that pages have to be compressed; else all are zero
 * --swap       makes the swap area itself, on /dev/zram0, and takes it away at the end
 * --verify     checks every word instead, and that the pages were out
 */
#define _GNU_SOURCE
#include "mark.h"
#include "swap.h"
#include "workload.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

#define START (64 * GIB * 256)
#define WORDS_PER_PAGE (BASE_PAGE / sizeof(uint64_t))

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* The words from `start` on, or with `check` a comparison with them. */
static void random_words(char *start, size_t size, uint64_t seed, int check)
{
    uint64_t state = 88172645463325252u + seed;
    volatile uint64_t *words = (volatile uint64_t *)start;
    for (size_t at = 0; at < size / sizeof *words; at++) {
        uint64_t word = at % 8 == 0 ? next_random(&state) : at % WORDS_PER_PAGE;
        if (!check)
            words[at] = word;
        else if (words[at] != word)
            FAIL("the word at %p is %#llx, not %#llx", (void *)&words[at],
                 (unsigned long long)words[at], (unsigned long long)word);
    }
}

static void prepare(char *start, size_t size, int random, uint64_t seed)
{
    if (random)
        random_words(start, size, seed, 0);
    else
        memset(start, 0, size);
}

static void check(char *start, size_t size, int random, uint64_t seed)
{
    if (random)
        random_words(start, size, seed, 1);
    else
        check_zero(start, size);
}

/* How many pages are resident. */
static size_t resident(char *start, size_t size)
{
    static unsigned char pages[GIB / BASE_PAGE];
    size_t count = 0;
    if (size > GIB || mincore(start, size, pages) != 0)
        FAIL("mincore: errno %d", errno);
    for (size_t at = 0; at < size / BASE_PAGE; at++)
        count += pages[at] & 1;
    return count;
}

static void read_pages(volatile char *start, size_t size)
{
    for (size_t at = 0; at < size; at += BASE_PAGE)
        (void)start[at];
}

static void out(char *start, size_t size, int random)
{
    int result;
    if (random) {
        MARK_BEGIN(PHASE_PAGEOUT_RANDOM);
        result = madvise(start, size, MADV_PAGEOUT);
        MARK_END(PHASE_PAGEOUT_RANDOM);
    } else {
        MARK_BEGIN(PHASE_PAGEOUT);
        result = madvise(start, size, MADV_PAGEOUT);
        MARK_END(PHASE_PAGEOUT);
    }
    if (result != 0)
        FAIL("MADV_PAGEOUT: errno %d", errno);
    if (resident(start, size) != 0)
        FAIL("%zu pages are still resident", resident(start, size));
}

static void in(char *start, size_t size, int random)
{
    if (random) {
        MARK_BEGIN(PHASE_SWAP_IN_RANDOM);
        read_pages(start, size);
        MARK_END(PHASE_SWAP_IN_RANDOM);
    } else {
        MARK_BEGIN(PHASE_SWAP_IN);
        read_pages(start, size);
        MARK_END(PHASE_SWAP_IN);
    }
}

static void unmap_swapped(char *start, size_t size, int random)
{
    int result;
    if (random) {
        MARK_BEGIN(PHASE_MUNMAP_SWAPPED_RANDOM);
        result = munmap(start, size);
        MARK_END(PHASE_MUNMAP_SWAPPED_RANDOM);
    } else {
        MARK_BEGIN(PHASE_MUNMAP_SWAPPED);
        result = munmap(start, size);
        MARK_END(PHASE_MUNMAP_SWAPPED);
    }
    if (result != 0)
        FAIL("munmap: errno %d", errno);
}

static void run(size_t size, int random, uint64_t seed, int verify)
{
    char *start = map_at(START, size, MAP_FIXED);
    prepare(start, size, random, seed);
    out(start, size, random);
    in(start, size, random);
    if (verify)
        check(start, size, random, seed);
    if (munmap(start, size) != 0)
        FAIL("munmap: errno %d", errno);

    start = map_at(START, size, MAP_FIXED);
    prepare(start, size, random, seed);
    out(start, size, random);
    unmap_swapped(start, size, random);
}

int main(int count, char **words)
{
    size_t size = option(count, words, "--mib", 256) * MIB;
    unsigned long rounds = option(count, words, "--rounds", 2);
    int random = flag(count, words, "--random"), verify = flag(count, words, "--verify");
    if (size == 0) {
        say("--mib must not be 0\n");
        return 2;
    }
    int swaps = flag(count, words, "--swap");
    if (swaps && swap_begin(2 * size) != 0)
        FAIL("no swap: errno %d", errno);
    for (unsigned long round = 0; round < rounds; round++)
        run(size, random, round, verify);
    if (swaps && swap_end() != 0)
        FAIL("swap does not end: errno %d", errno);
    if (verify)
        say("system3: contents are right after %lu rounds\n", rounds);
    return 0;
}
