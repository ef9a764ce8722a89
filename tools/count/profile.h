/*
 * The profile of one phase: how often each instruction of the kernel was executed in one of its
 * occurrences. It makes the machine several times slower and changes no count.
 */
#ifndef BINDERY_PROFILE_H
#define BINDERY_PROFILE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* Executions of the instruction at one address. It stays where it is for good. */
struct profile_entry {
    uint64_t address;
    uint64_t executions;
    struct profile_entry *next;
};

/* The entry of an address, or NULL if there is no memory for it. */
struct profile_entry *profile_entry(uint64_t address);

/* Sets all executions to zero. */
void profile_clear(void);

/* Writes a line for each instruction that was executed: address in hexadecimal, tab, executions. */
void profile_write(FILE *output);

#endif
