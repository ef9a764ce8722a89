/*
 * System 2: a large piece of touched memory is moved to and fro by mremap, then unmapped. Each move,
 * the first touches and the munmap are phases.
 *
 * Four cases, by the place of the destination. All addresses, apart from the given distance, are
 * multiples of 64 GiB:
 *      1   congruent with the source modulo 1 GiB: tables of the third level can move whole
 *      2   congruent modulo 2 MiB: tables of the last level can move whole
 *      3   off by 64 KiB: single entries move, folios of 64 KiB keep their alignment
 *      4   off by 4 KiB: single entries move, and no folio keeps its alignment
 *
 * --mib N      how much memory (1024)
 * --moves N    how often it is moved in each case (4)
 * --case N     one case alone (all)
 * --verify     checks every page after each move
 */
#define _GNU_SOURCE
#include "mark.h"
#include "workload.h"

#define SOURCE (64 * GIB * 256)
#define DESTINATION (SOURCE + 64 * GIB)

struct destination {
    const char *name;
    size_t distance;
};

static const struct destination DESTINATIONS[] = {
    {"by 1 GiB", 0},
    {"by 2 MiB", 2 * MIB},
    {"off by 64 KiB", 64 * KIB},
    {"off by 4 KiB", 4 * KIB},
};
#define CASES (sizeof DESTINATIONS / sizeof *DESTINATIONS)

static char *move(char *from, char *to, size_t size)
{
    return mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, to);
}

/* A phase's number is part of an instruction, so each case has a move of its own. */
static char *move_in_case(unsigned long number, char *from, char *to, size_t size)
{
    char *moved;
    switch (number) {
    case 1:
        MARK_BEGIN(PHASE_MOVE_BY_1G);
        moved = move(from, to, size);
        MARK_END(PHASE_MOVE_BY_1G);
        return moved;
    case 2:
        MARK_BEGIN(PHASE_MOVE_BY_2M);
        moved = move(from, to, size);
        MARK_END(PHASE_MOVE_BY_2M);
        return moved;
    case 3:
        MARK_BEGIN(PHASE_MOVE_OFF_64K);
        moved = move(from, to, size);
        MARK_END(PHASE_MOVE_OFF_64K);
        return moved;
    default:
        MARK_BEGIN(PHASE_MOVE_OFF_4K);
        moved = move(from, to, size);
        MARK_END(PHASE_MOVE_OFF_4K);
        return moved;
    }
}

/* Looks at one page in 251: enough to notice that nothing was moved at all. */
static void check_sample(const char *start, size_t size)
{
    for (size_t at = 0; at < size; at += 251 * BASE_PAGE)
        if (start[at] != (char)((char)(at / BASE_PAGE) | 1))
            FAIL("the page at %p + %#zx has other contents", (void *)start, at);
}

static void run(unsigned long number, size_t size, unsigned long moves, int verify)
{
    const struct destination *destination = &DESTINATIONS[number - 1];
    char *places[] = {(char *)SOURCE, (char *)DESTINATION + destination->distance};
    char *start;
    int result;

    MARK_BEGIN(PHASE_POPULATE_1G);
    start = map_at(SOURCE, size, MAP_FIXED);
    touch(start, size);
    MARK_END(PHASE_POPULATE_1G);
    if (verify)
        fill(start, size, BASE_PAGE, number);

    for (unsigned long i = 0; i < moves; i++) {
        char *from = places[i % 2], *to = places[(i + 1) % 2];
        start = move_in_case(number, from, to, size);
        if (start != to)
            FAIL("mremap %s gives %p, errno %d", destination->name, (void *)start, errno);
        if (verify) {
            check_unmapped(from, size);
            check_filled(start, size, BASE_PAGE, number);
        }
    }
    if (!verify)
        check_sample(start, size);

    MARK_BEGIN(PHASE_MUNMAP_1G);
    result = munmap(start, size);
    MARK_END(PHASE_MUNMAP_1G);
    if (result != 0)
        FAIL("munmap: errno %d", errno);
    if (verify) {
        check_unmapped(start, size);
        say("system2: contents are right after %lu moves %s\n", moves, destination->name);
    }
}

int main(int count, char **words)
{
    size_t size = option(count, words, "--mib", 1024) * MIB;
    unsigned long moves = option(count, words, "--moves", 4);
    unsigned long only = option(count, words, "--case", 0);
    int verify = flag(count, words, "--verify");
    if (size == 0 || only > CASES) {
        say("--mib must not be 0, and --case is a number from 1 to %zu\n", CASES);
        return 2;
    }
    for (unsigned long number = 1; number <= CASES; number++)
        if (only == 0 || only == number)
            run(number, size, moves, verify);
    return 0;
}
