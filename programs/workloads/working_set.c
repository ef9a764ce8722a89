// memory: 64M
/*
 * A working set that is larger than memory: each process writes the pages of its part, visits them
 * in the order of a pattern, and reads all; one visit in four writes the page anew. The content of
 * a page is known and checked at each visit, and all of it at the end. Pages have 64 random words
 * and zeroes. There must be a swap area with room for the workload (or --swap).
 *
 * --mib N        how much memory, of all processes together (1024)
 * --processes N  how many processes (1)
 * --passes N     how often each page is visited, on average (3)
 * --pattern NAME sequential, random, 80-20, 95-20, zipf, scan or shared; see pattern.h (sequential)
 * --seed N       other visits (1)
 * --swap         makes the swap area itself, on /dev/zram0, and takes it away at the end
 * --verify       says that contents are right; they are checked anyway
 * --moved        says how many pages went to swap and came back (/proc/vmstat), how many frames held pages of the
 *                working set during the visits, on average, and how long it all took, and how long it takes again
 *                on pages that are in memory: where the clock counts instructions, the difference is the kernel's
 * --trace        says which pages are visited, and does nothing else
 */
#define _GNU_SOURCE
#include "pattern.h"
#include "swap.h"
#include "workload.h"

#include <sys/wait.h>
#include <time.h>

enum { WORDS = 64, MOST_PROCESSES = 16, WRITES = 4, SAMPLES = 8, FEW = 64 };

/* The work, the same in each process. */
struct task {
    size_t pages;
    unsigned long passes;
    enum pattern pattern;
};

/* Of one process. */
struct result {
    /* Frames that held pages of it, on average. */
    unsigned long frames;
    /* Nanoseconds that it took to count them. */
    uint64_t counting;
};

/* The versions of the pages, which the process knows beside their contents. */
static uint8_t *versions;

static uint64_t key_of(uint64_t seed, size_t page)
{
    return seed << 48 ^ (uint64_t)versions[page] << 40 ^ page;
}

static void write_page(volatile uint64_t *words, uint64_t key)
{
    for (size_t at = 0; at < WORDS; at++)
        words[at * 8] = word(key, at);
}

static void check_page(volatile uint64_t *words, uint64_t key, size_t page, size_t step)
{
    for (size_t at = 0; at < WORDS; at += step)
        if (words[at * 8] != word(key, at) || words[at * 8 + 1] != 0)
            FAIL("page %zu, word %zu is %#llx, not %#llx", page, at * 8, (unsigned long long)words[at * 8],
                 (unsigned long long)word(key, at));
}

static void visit(char *start, size_t page, uint64_t seed, uint64_t number)
{
    volatile uint64_t *words = (volatile uint64_t *)(start + page * BASE_PAGE);
    check_page(words, key_of(seed, page), page, WORDS / 2);
    if (mix(number) % WRITES == 0) {
        versions[page]++;
        write_page(words, key_of(seed, page));
    }
}

/* The frames that hold pages of the process. mincore counts those of the swap cache as well. */
static unsigned long frames_of(char *start, size_t pages)
{
    static unsigned char held[BASE_PAGE];
    unsigned long frames = 0;
    for (size_t first = 0; first < pages; first += sizeof held) {
        size_t count = pages - first < sizeof held ? pages - first : sizeof held;
        if (mincore(start + first * BASE_PAGE, count * BASE_PAGE, held) != 0)
            FAIL("mincore: errno %d", errno);
        for (size_t page = 0; page < count; page++)
            frames += held[page] & 1;
    }
    return frames;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static char *memory_for(struct task task)
{
    if (task.pattern != SHARED)
        return map_at(0, task.pages * BASE_PAGE, 0);
    char *start =
        mmap(NULL, task.pages * BASE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        FAIL("mmap: errno %d", errno);
    return start;
}

/* Page N is page N modulo `there`, the number of existing pages. */
static struct result work(struct task task, size_t there, uint64_t seed)
{
    struct result result = {0, 0};
    size_t pages = task.pages;
    uint64_t visits = pages * task.passes, between = visits / SAMPLES;
    char *start = memory_for((struct task){there, task.passes, task.pattern});
    versions = (uint8_t *)map_at(0, (pages + BASE_PAGE - 1) & ~(BASE_PAGE - 1), 0);
    for (size_t page = 0; page < pages; page++)
        write_page((volatile uint64_t *)(start + page % there * BASE_PAGE), key_of(seed, page % there));
    for (uint64_t number = 0; number < visits; number++) {
        visit(start, pattern_page(task.pattern, pages, seed, number) % there, seed, number + seed);
        if (between != 0 && (number + 1) % between == 0 && (number + 1) / between <= SAMPLES) {
            uint64_t before = now();
            result.frames += frames_of(start, there);
            result.counting += now() - before;
        }
    }
    for (size_t page = 0; page < pages; page++) {
        size_t at = page % there;
        check_page((volatile uint64_t *)(start + at * BASE_PAGE), key_of(seed, at), at, 1);
    }
    result.frames /= SAMPLES;
    return result;
}

/* A number of /proc/vmstat. */
static unsigned long event(const char *name)
{
    static char text[1 << 16];
    int file = open("/proc/vmstat", O_RDONLY);
    size_t length = 0;
    for (ssize_t got; file >= 0 && (got = read(file, text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)got;
    close(file);
    text[length] = 0;
    char *at = strstr(text, name);
    if (at == NULL)
        FAIL("/proc/vmstat has no %s", name);
    return strtoul(at + strlen(name), NULL, 10);
}

/* The pattern that was asked for. */
static enum pattern chosen_pattern(int count, char **words)
{
    for (int number = 1; number + 1 < count; number++)
        if (strcmp(words[number], "--pattern") == 0)
            return pattern_named(words[number + 1]);
    return SEQUENTIAL;
}

static int trace(struct task task, uint64_t seed)
{
    for (uint64_t number = 0; number < task.pages * task.passes; number++)
        say("%zu\n", pattern_page(task.pattern, task.pages, seed, number));
    return 0;
}

int main(int count, char **words)
{
    size_t pages = option(count, words, "--mib", 1024) * MIB / BASE_PAGE;
    unsigned long processes = option(count, words, "--processes", 1);
    uint64_t seed = option(count, words, "--seed", 1);
    enum pattern pattern = chosen_pattern(count, words);
    int swaps = flag(count, words, "--swap");
    if (pages == 0 || processes == 0 || processes > MOST_PROCESSES || pattern == PATTERNS) {
        say("working_set: a bad option: --mib must be above 0, --processes from 1 to %d, and --pattern",
            MOST_PROCESSES);
        for (int named = 0; named < PATTERNS; named++)
            say("%s %s", named == 0 ? "" : named == PATTERNS - 1 ? " or" : ",", pattern_names[named]);
        say("\n");
        return 2;
    }
    struct task task = {pages / processes, option(count, words, "--passes", 3), pattern};
    if (flag(count, words, "--trace"))
        return trace(task, seed * MOST_PROCESSES);
    if (swaps && swap_begin(pages * BASE_PAGE + MIB) != 0)
        FAIL("no swap: errno %d", errno);
    /* Of each process. */
    struct result *results =
        mmap(NULL, BASE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (results == MAP_FAILED)
        FAIL("mmap: errno %d", errno);
    unsigned long in = event("pswpin "), out = event("pswpout ");
    uint64_t took = now();
    for (unsigned long number = 0; number < processes; number++) {
        pid_t child = fork();
        if (child == -1)
            FAIL("fork: errno %d", errno);
        if (child == 0) {
            results[number] = work(task, task.pages, seed * MOST_PROCESSES + number);
            _exit(0);
        }
    }
    int failed = 0;
    for (unsigned long number = 0; number < processes; number++) {
        int status = 0;
        failed |= wait(&status) == -1 || status != 0;
    }
    took = now() - took;
    unsigned long held = 0;
    for (unsigned long number = 0; number < processes; number++) {
        held += results[number].frames;
        took -= results[number].counting;
    }
    in = event("pswpin ") - in;
    out = event("pswpout ") - out;
    if (swaps && swap_end() != 0)
        FAIL("swap does not end: errno %d", errno);
    if (failed)
        FAIL("a process has failed");
    if (flag(count, words, "--verify"))
        say("working_set: contents are right after %lu passes\n", task.passes);
    if (flag(count, words, "--moved")) {
        uint64_t again = now();
        for (unsigned long number = 0; number < processes; number++)
            again += work(task, FEW, seed * MOST_PROCESSES + number).counting;
        again = now() - again;
        say("working_set: %lu pages came back, %lu went out, %lu in all, in %lu frames; %llu ns, and %llu ns\n",
            in, out, in + out, held, (unsigned long long)took, (unsigned long long)again);
    }
    return 0;
}
