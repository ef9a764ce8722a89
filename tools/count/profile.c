#include "profile.h"

#include <inttypes.h>
#include <stdlib.h>

#define BUCKETS (1 << 16)

static struct profile_entry *buckets[BUCKETS];

struct profile_entry *profile_entry(uint64_t address)
{
    struct profile_entry **bucket = &buckets[(address >> 1) % BUCKETS];
    for (struct profile_entry *entry = *bucket; entry; entry = entry->next)
        if (entry->address == address)
            return entry;
    struct profile_entry *entry = calloc(1, sizeof *entry);
    if (entry) {
        entry->address = address;
        entry->next = *bucket;
        *bucket = entry;
    }
    return entry;
}

void profile_clear(void)
{
    for (int i = 0; i < BUCKETS; i++)
        for (struct profile_entry *entry = buckets[i]; entry; entry = entry->next)
            entry->executions = 0;
}

void profile_write(FILE *output)
{
    for (int i = 0; i < BUCKETS; i++)
        for (struct profile_entry *entry = buckets[i]; entry; entry = entry->next)
            if (entry->executions != 0)
                fprintf(output, "%" PRIx64 "\t%" PRIu64 "\n", entry->address,
                        entry->executions);
    fflush(output);
}
