/*
 * Shared parts of the workloads: command-line options, failures, and memory contents that can be
 * checked.
 *
 * A workload prints nothing unless it fails or is asked to verify, and nothing that depends on a
 * clock, so that its work is the same on every kernel.
 */
#ifndef BINDERY_WORKLOAD_H
#define BINDERY_WORKLOAD_H

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BASE_PAGE 4096UL
#define KIB (1UL << 10)
#define MIB (1UL << 20)
#define GIB (1UL << 30)

/* One write(2) for each message: a workload that ran out of memory cannot allocate a buffer. */
__attribute__((format(printf, 1, 2))) static inline void say(const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof text)
        length = sizeof text - 1;
    if (length > 0 && write(STDOUT_FILENO, text, (size_t)length) != length)
        _exit(3);
}

/* Ends the program with status 1. */
#define FAIL(...)                                                                                  \
    do {                                                                                           \
        say("FAILED: " __VA_ARGS__);                                                               \
        say("\n");                                                                                 \
        _exit(1);                                                                                  \
    } while (0)

/* The value of option `name`, or `otherwise` if it was not given. Ends the program if it is wrong. */
static inline unsigned long option(int count, char **words, const char *name,
                                   unsigned long otherwise)
{
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], name) != 0)
            continue;
        char *end = NULL;
        errno = 0;
        unsigned long value = i + 1 < count ? strtoul(words[i + 1], &end, 0) : 0;
        if (end == NULL || end == words[i + 1] || *end != '\0' || errno != 0) {
            say("%s needs a number\n", name);
            _exit(2);
        }
        return value;
    }
    return otherwise;
}

/* Whether the flag `name` was given. */
static inline int flag(int count, char **words, const char *name)
{
    for (int i = 1; i < count; i++)
        if (strcmp(words[i], name) == 0)
            return 1;
    return 0;
}

/* Stores one byte to each page. */
static inline void touch(volatile char *start, size_t size)
{
    for (size_t at = 0; at < size; at += BASE_PAGE)
        start[at] = (char)(at / BASE_PAGE) | 1;
}

/* Private anonymous memory at `address`, or the end of the program. */
static inline char *map_at(uintptr_t address, size_t size, int more_flags)
{
    char *start = mmap((void *)address, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | more_flags, -1, 0);
    if (start == MAP_FAILED)
        FAIL("mmap of %zu bytes at %#lx: errno %d", size, (unsigned long)address, errno);
    return start;
}

/*
 * Contents for --verify: each word is a function of its place and of `seed`, so that pages that were
 * lost, doubled or swapped are found, and so are those of an earlier round.
 */
static inline uint64_t expected_word(size_t place, uint64_t seed)
{
    return (place + 1) * 0x9E3779B97F4A7C15u ^ seed;
}

/* Fills the words that lie `stride` bytes apart. */
static inline void fill(char *start, size_t size, size_t stride, uint64_t seed)
{
    for (size_t at = 0; at < size; at += stride)
        *(volatile uint64_t *)(start + at) = expected_word(at, seed);
}

/* Checks what `fill` wrote. */
static inline void check_filled(char *start, size_t size, size_t stride, uint64_t seed)
{
    for (size_t at = 0; at < size; at += stride) {
        uint64_t found = *(volatile uint64_t *)(start + at);
        if (found != expected_word(at, seed))
            FAIL("the word at %p + %#zx is %#llx, not %#llx", (void *)start, at,
                 (unsigned long long)found, (unsigned long long)expected_word(at, seed));
    }
}

/* Checks that fresh memory reads as zero. */
static inline void check_zero(char *start, size_t size)
{
    for (size_t at = 0; at < size; at += sizeof(uint64_t))
        if (*(volatile uint64_t *)(start + at) != 0)
            FAIL("fresh memory at %p + %#zx is not zero", (void *)start, at);
}

/* Checks that nothing is mapped at the first and the last page of a range. */
static inline void check_unmapped(char *start, size_t size)
{
    unsigned char resident;
    char *pages[] = {start, start + size - BASE_PAGE};
    for (int i = 0; i < 2; i++) {
        int result = mincore(pages[i], BASE_PAGE, &resident);
        if (result != -1 || errno != ENOMEM)
            FAIL("%p is still mapped: mincore gives %d, errno %d", (void *)pages[i], result, errno);
    }
}

#endif
