/*
 * Fork: a child writes to memory that its parent has touched, and ends. The writes are a phase.
 *
 *      parent   | 16 MiB, touched | fork | waits                          | munmap
 *      child                             | writes 1 MiB, or all | _exit   |
 *
 * The memory begins at a multiple of 1 GiB, so each folio fits, whatever its size.
 *
 * --mib N      how much memory (16)
 * --rounds N   how often (4)
 * --verify     checks every word, in both processes
 */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/wait.h>

#include "mark.h"
#include "workload.h"

#define MEMORY ((uintptr_t)(64 * GIB))
#define PART MIB

static size_t size;
static int verify;

static size_t stride(void)
{
    return verify ? sizeof(uint64_t) : BASE_PAGE;
}

/* The child writes the first `written` bytes. */
static void child(char *start, size_t written, uint64_t seed)
{
    /* The parent gets to its wait first, so that only the child runs in the phase. */
    sched_yield();
    if (verify)
        check_filled(start, size, stride(), seed);
    if (written == size) {
        MARK_BEGIN(PHASE_CHILD_WRITES_ALL);
        fill(start, written, stride(), ~seed);
        MARK_END(PHASE_CHILD_WRITES_ALL);
    } else {
        MARK_BEGIN(PHASE_CHILD_WRITES_PART);
        fill(start, written, stride(), ~seed);
        MARK_END(PHASE_CHILD_WRITES_PART);
    }
    if (verify) {
        check_filled(start, written, stride(), ~seed);
        for (size_t at = written; at < size; at += BASE_PAGE)
            if (*(volatile uint64_t *)(start + at) != expected_word(at, seed))
                FAIL("the child's page at %#zx has changed", at);
    }
    _exit(0);
}

static void measure(size_t written, uint64_t seed)
{
    char *start = map_at(MEMORY, size, MAP_FIXED);
    fill(start, size, stride(), seed);
    pid_t pid = fork();
    if (pid < 0)
        FAIL("fork: errno %d", errno);
    if (pid == 0)
        child(start, written, seed);
    int status;
    if (waitpid(pid, &status, 0) != pid || status != 0)
        FAIL("the child ends with %#x", (unsigned)status);
    if (verify) {
        check_filled(start, size, stride(), seed);
        /* No other process maps the pages any more. */
        fill(start, size, stride(), seed + 1);
        check_filled(start, size, stride(), seed + 1);
    }
    if (munmap(start, size) != 0)
        FAIL("munmap: errno %d", errno);
}

int main(int count, char **words)
{
    size = option(count, words, "--mib", 16) * MIB;
    unsigned long rounds = option(count, words, "--rounds", 4);
    verify = flag(count, words, "--verify");
    if (size <= PART) {
        say("--mib must be above 1\n");
        return 2;
    }
    for (unsigned long round = 1; round <= rounds; round++) {
        measure(PART, round);
        measure(size, round);
    }
    if (verify)
        say("fork: contents are right after %lu rounds\n", rounds);
    return 0;
}
