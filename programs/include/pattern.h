/*
 * The order in which a program visits the pages of its memory, as numbers that depend only on a
 * seed. The same is written in Rust, in crates/bindery-hosted/src/working_set.rs, and a test
 * compares both.
 */
#ifndef BINDERY_PATTERN_H
#define BINDERY_PATTERN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum pattern { SEQUENTIAL, RANDOM, HOT_80, HOT_95, ZIPF, SCAN, SHARED, PATTERNS };

static const char *const pattern_names[PATTERNS] = {"sequential", "random", "80-20", "95-20",
                                                    "zipf",       "scan",   "shared"};

static inline uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 31) * 0x7fb5d329728ea185u;
    value = (value ^ value >> 27) * 0x81dadef4bc2dd44du;
    return value ^ value >> 33;
}

static inline uint64_t word(uint64_t key, uint64_t at)
{
    return mix(key + at * 0x9e3779b97f4a7c15u);
}

/*
 * The page of that visit, of at least five. The hot pages are the first fifth. In Zipf's law the page of rank k
 * is visited k times less often than the first: each power of two is as likely as the next, and so is each rank
 * between two. Ranks are scattered over the pages by a prime.
 */
static inline size_t pattern_page(enum pattern pattern, size_t pages, uint64_t seed, uint64_t visit)
{
    uint64_t choice = word(seed, 2 * visit), place = word(seed, 2 * visit + 1), hot = pages / 5;
    uint64_t in_hot = place % hot, in_rest = hot + place % (pages - hot);
    switch (pattern) {
    case SEQUENTIAL:
        return visit % pages;
    case HOT_80:
        return choice % 10 < 8 ? in_hot : in_rest;
    case HOT_95:
        return choice % 20 < 19 ? in_hot : in_rest;
    case ZIPF: {
        uint64_t power = 1ull << choice % (64 - __builtin_clzll(pages));
        uint64_t rank = power + place % power;
        return (rank > pages ? rank / 2 : rank) * 2654435761u % pages;
    }
    case SCAN:
        return visit % 2 == 0 ? in_hot : hot + visit / 2 % (pages - hot);
    default:
        return place % pages;
    }
}

/* The number of the pattern of that name, or PATTERNS. */
static inline enum pattern pattern_named(const char *name)
{
    enum pattern number = SEQUENTIAL;
    while (number < PATTERNS && strcmp(pattern_names[number], name) != 0)
        number++;
    return number;
}

#endif
