/*
 * System 1: 1 MiB of memory is mapped at 1 GiB, written, moved by mremap, and unmapped, again and
 * again. Each of the four calls is a phase.
 *
 *      0x4000_0000          0x4010_0000
 *      | source, 1 MiB      | destination: + offset, 1 MiB  |
 *
 * --iterations N   how often (1000)
 * --offset BYTES   moves the destination away from the 1 MiB boundary (0): with 4096 no folio keeps
 *                  its alignment. Phases are numbered apart (PHASE_OFFSET)
 * --verify         checks contents after each move, and what is unmapped afterwards
 */
#define _GNU_SOURCE
#include "mark.h"
#include "workload.h"

#define SIZE MIB
#define SOURCE GIB

/* Runs a statement as a phase that has a number of its own when the destination is offset. */
#define PHASE(phase, statement)                                                                    \
    do {                                                                                           \
        if (offset != 0) {                                                                         \
            MARK_BEGIN((phase) + PHASE_OFFSET);                                                    \
            statement;                                                                             \
            MARK_END((phase) + PHASE_OFFSET);                                                      \
        } else {                                                                                   \
            MARK_BEGIN(phase);                                                                     \
            statement;                                                                             \
            MARK_END(phase);                                                                       \
        }                                                                                          \
    } while (0)

static size_t offset;

static void measure(unsigned long iterations)
{
    for (unsigned long i = 0; i < iterations; i++) {
        char *source, *moved;
        int result;
        PHASE(PHASE_MMAP, source = map_at(SOURCE, SIZE, 0));
        PHASE(PHASE_FIRST_TOUCH, memset(source, 0xAA, SIZE));
        char *destination = source + SIZE + offset;
        PHASE(PHASE_MREMAP,
              moved = mremap(source, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, destination));
        if (moved != destination)
            FAIL("mremap gives %p, errno %d", (void *)moved, errno);
        PHASE(PHASE_MUNMAP, result = munmap(moved, SIZE));
        if (result != 0)
            FAIL("munmap: errno %d", errno);
    }
}

static void verify(unsigned long iterations)
{
    for (unsigned long i = 0; i < iterations; i++) {
        char *source = map_at(SOURCE, SIZE, 0);
        /* Reading first maps zeroes that the stores must replace; every other time, so that first
         * touches that write are met as well. */
        if (i % 2 == 1)
            check_zero(source, SIZE);
        fill(source, SIZE, sizeof(uint64_t), i);
        char *destination = source + SIZE + offset;
        if (mremap(source, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, destination) != destination)
            FAIL("mremap: errno %d", errno);
        check_unmapped(source, SIZE);
        check_filled(destination, SIZE, sizeof(uint64_t), i);
        fill(destination, SIZE, sizeof(uint64_t), ~i);
        check_filled(destination, SIZE, sizeof(uint64_t), ~i);
        if (munmap(destination, SIZE) != 0)
            FAIL("munmap: errno %d", errno);
        check_unmapped(destination, SIZE);
    }
    say("system1: contents are right after %lu moves\n", iterations);
}

int main(int count, char **words)
{
    unsigned long iterations = option(count, words, "--iterations", 1000);
    offset = option(count, words, "--offset", 0);
    if (flag(count, words, "--verify")) {
        verify(iterations);
        return 0;
    }
    PHASE(PHASE_LOOP, measure(iterations));
    return 0;
}
