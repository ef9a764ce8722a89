#include "phases.h"

#include <inttypes.h>

static struct phase {
    bool open;
    uint64_t occurrences;
    struct counts at_begin;
} phases[PHASES];

void phases_start(FILE *output)
{
    fputs("phase", output);
#define COUNTER(name, column) fputs("\t" column, output);
    COUNTERS(COUNTER)
#undef COUNTER
    fputc('\n', output);
    fflush(output);
}

static void write_line(FILE *output, unsigned number, const struct counts *begin,
                       const struct counts *end)
{
    fprintf(output, "%u", number);
    for (int i = 0; i < COUNTER_COUNT; i++)
        fprintf(output, "\t%" PRIu64, end->of[i] - begin->of[i]);
    fputc('\n', output);
    /* The machine may end at any instruction, and what was counted until then still counts. */
    fflush(output);
}

uint64_t phases_mark(FILE *output, unsigned number, const struct counts *now)
{
    struct phase *phase = &phases[number % PHASES];
    if (!(number & MARK_ENDS)) {
        phase->open = true;
        phase->at_begin = *now;
        return 0;
    }
    if (!phase->open)
        return 0;
    write_line(output, number % PHASES, &phase->at_begin, now);
    phase->open = false;
    return ++phase->occurrences;
}

bool phase_is_open(unsigned phase)
{
    return phases[phase % PHASES].open;
}

uint64_t phase_occurrences(unsigned phase)
{
    return phases[phase % PHASES].occurrences;
}
