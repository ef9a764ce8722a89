/*
 * Phases: what was counted between the two marks of each, one line of output for each occurrence.
 */
#ifndef BINDERY_PHASES_H
#define BINDERY_PHASES_H

#include <stdbool.h>
#include <stdio.h>

#include "counters.h"

/* A phase has 11 bits. */
#define PHASES 2048

/* The mark of an end has this bit besides. */
#define MARK_ENDS 0x800

/* Writes the names of the columns. */
void phases_start(FILE *output);

/*
 * A mark was executed when the counters stood at `now`. When it is the end of a phase that has begun,
 * a line is written, and the number of the phase's occurrences so far is returned; else 0.
 */
uint64_t phases_mark(FILE *output, unsigned number, const struct counts *now);

/* Whether the phase has begun and not ended, and how often it has ended. */
bool phase_is_open(unsigned phase);
uint64_t phase_occurrences(unsigned phase);

#endif
