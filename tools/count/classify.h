/*
 * The effect of an instruction on the counters, derived only from its encoding.
 */
#ifndef BINDERY_CLASSIFY_H
#define BINDERY_CLASSIFY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "counters.h"

#define NO_MARK (-1)

struct meaning {
    /* Each time it runs, the processor has done one iteration of a loop. */
    bool is_string;
    /* How many bytes an iteration moves or fills; 0 where the encoding does not tell. */
    unsigned string_bytes;
    /* A set of counters: bit n stands for the counter n. */
    uint32_t events;
    /* The number that a mark carries, or NO_MARK. */
    int mark;
};

_Static_assert(COUNTER_COUNT <= 32, "a set of counters has 32 bits");

static inline uint32_t event(enum counter counter)
{
    return (uint32_t)1 << counter;
}

struct meaning classify_x86_64(const uint8_t *bytes, size_t size);
struct meaning classify_aarch64(uint32_t word);

#endif
