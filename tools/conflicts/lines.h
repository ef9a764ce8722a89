/*
 * The cache lines that one operation touched.
 */
#ifndef BINDERY_LINES_H
#define BINDERY_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LINE_SHIFT 6
#define WORD_SHIFT 3
#define WORDS_PER_LINE (1 << (LINE_SHIFT - WORD_SHIFT))

/* The first instruction that read a word, and the first that wrote it; 0 if none did. */
struct word {
    uint64_t read_by, written_by;
};

struct line {
    /* The address without its lowest bits. Only the element of a free place has generation 0. */
    uint64_t number;
    uint64_t generation;
    struct word words[WORDS_PER_LINE];
};

/* A hash table, which a new generation empties at once. */
struct lines {
    struct line *places;
    uint64_t generation;
    size_t count;
};

bool lines_new(struct lines *);
void lines_clear(struct lines *);

/* Notes an access of `size` bytes; false if there is no room for its lines. */
bool lines_note(struct lines *, uint64_t address, size_t size, bool is_store, uint64_t instruction);

/* NULL if the operation did not touch the line. */
const struct line *lines_find(const struct lines *, uint64_t number);

/* Calls `visit` for each line. */
void lines_each(const struct lines *, void (*visit)(const struct line *, void *), void *data);

bool line_is_written(const struct line *);

#endif
