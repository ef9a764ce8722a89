#include <stdlib.h>
#include <string.h>

#include "lines.h"

/* A power of two, far above the lines of one operation: a folio of 2 MiB has 32,768. */
#define PLACE_SHIFT 17
#define PLACES ((size_t)1 << PLACE_SHIFT)

bool lines_new(struct lines *lines)
{
    lines->places = calloc(PLACES, sizeof *lines->places);
    lines->generation = 1;
    lines->count = 0;
    return lines->places != NULL;
}

void lines_clear(struct lines *lines)
{
    lines->generation++;
    lines->count = 0;
}

/* The place of a line, or the free place where it belongs. One place is always free. */
static struct line *place_of(const struct lines *lines, uint64_t number)
{
    size_t at = (number * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - PLACE_SHIFT);
    while (lines->places[at].generation == lines->generation && lines->places[at].number != number)
        at = (at + 1) % PLACES;
    return &lines->places[at];
}

static struct line *find_or_add(struct lines *lines, uint64_t number)
{
    struct line *line = place_of(lines, number);
    if (line->generation == lines->generation)
        return line;
    if (lines->count == PLACES - 1)
        return NULL;
    lines->count++;
    memset(line, 0, sizeof *line);
    line->number = number;
    line->generation = lines->generation;
    return line;
}

bool lines_note(struct lines *lines, uint64_t address, size_t size, bool is_store,
                uint64_t instruction)
{
    uint64_t last = (address + size - 1) >> WORD_SHIFT;
    for (uint64_t at = address >> WORD_SHIFT; at <= last; at++) {
        struct line *line = find_or_add(lines, at / WORDS_PER_LINE);
        if (!line)
            return false;
        struct word *word = &line->words[at % WORDS_PER_LINE];
        uint64_t *first = is_store ? &word->written_by : &word->read_by;
        if (*first == 0)
            *first = instruction;
    }
    return true;
}

const struct line *lines_find(const struct lines *lines, uint64_t number)
{
    const struct line *line = place_of(lines, number);
    return line->generation == lines->generation ? line : NULL;
}

void lines_each(const struct lines *lines, void (*visit)(const struct line *, void *), void *data)
{
    for (size_t i = 0; i < PLACES; i++)
        if (lines->places[i].generation == lines->generation)
            visit(&lines->places[i], data);
}

bool line_is_written(const struct line *line)
{
    for (size_t i = 0; i < WORDS_PER_LINE; i++)
        if (line->words[i].written_by)
            return true;
    return false;
}
