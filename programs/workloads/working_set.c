// memory: 64M
/*
 * A working set that is larger than memory: each process visits the pages of its part, again and again, in
 * order or at random; one visit in four writes the page anew. What a page holds is known and checked at each
 * visit, all of it at the end. Pages have 64 random words and zeroes. There must be a swap area with room for
 * the workload (or --swap).
 *
 * --mib N        how much memory, of all processes together (1024)
 * --processes N  how many processes (1)
 * --passes N     how often each page is visited, on average (3)
 * --random       visits at random, else in order
 * --seed N       another order (1)
 * --swap         makes the swap area itself, on /dev/zram0, and takes it away at the end
 * --verify       says that contents are right; they are checked anyway
 * --moved        says how many pages went to swap and came back (/proc/vmstat), and how many frames held pages
 *                of the working set during the visits, on average
 */
#define _GNU_SOURCE
#include "swap.h"
#include "workload.h"

#include <sys/wait.h>

enum { WORDS = 64, MOST_PROCESSES = 16, WRITES = 4, SAMPLES = 8 };

/* The versions of the pages, which the process knows beside their contents. */
static uint8_t *versions;

static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 31) * 0x7fb5d329728ea185u;
    value = (value ^ value >> 27) * 0x81dadef4bc2dd44du;
    return value ^ value >> 33;
}

static uint64_t word(uint64_t key, size_t at)
{
    return mix(key + at * 0x9e3779b97f4a7c15u);
}

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

/* Returns how many frames held pages of the process, on average. */
static unsigned long work(size_t pages, unsigned long passes, int random, uint64_t seed)
{
    unsigned long frames = 0;
    uint64_t visits = pages * passes, between = visits / SAMPLES;
    char *start = map_at(0, pages * BASE_PAGE, 0);
    versions = (uint8_t *)map_at(0, (pages + BASE_PAGE - 1) & ~(BASE_PAGE - 1), 0);
    for (size_t page = 0; page < pages; page++)
        write_page((volatile uint64_t *)(start + page * BASE_PAGE), key_of(seed, page));
    for (uint64_t number = 0; number < visits; number++) {
        size_t page = random ? word(seed, number) % pages : number % pages;
        visit(start, page, seed, number + seed);
        if (between != 0 && (number + 1) % between == 0 && (number + 1) / between <= SAMPLES)
            frames += frames_of(start, pages);
    }
    for (size_t page = 0; page < pages; page++)
        check_page((volatile uint64_t *)(start + page * BASE_PAGE), key_of(seed, page), page, 1);
    return frames / SAMPLES;
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

int main(int count, char **words)
{
    size_t pages = option(count, words, "--mib", 1024) * MIB / BASE_PAGE;
    unsigned long processes = option(count, words, "--processes", 1);
    unsigned long passes = option(count, words, "--passes", 3);
    uint64_t seed = option(count, words, "--seed", 1);
    int random = flag(count, words, "--random"), swaps = flag(count, words, "--swap");
    if (pages == 0 || processes == 0 || processes > MOST_PROCESSES) {
        say("--mib must not be 0, and --processes from 1 to %d\n", MOST_PROCESSES);
        return 2;
    }
    if (swaps && swap_begin(pages * BASE_PAGE + MIB) != 0)
        FAIL("no swap: errno %d", errno);
    /* Of each process. */
    unsigned long *frames =
        mmap(NULL, BASE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (frames == MAP_FAILED)
        FAIL("mmap: errno %d", errno);
    unsigned long in = event("pswpin "), out = event("pswpout ");
    for (unsigned long number = 0; number < processes; number++) {
        pid_t child = fork();
        if (child == -1)
            FAIL("fork: errno %d", errno);
        if (child == 0) {
            frames[number] = work(pages / processes, passes, random, seed * MOST_PROCESSES + number);
            _exit(0);
        }
    }
    int failed = 0;
    for (unsigned long number = 0; number < processes; number++) {
        int status = 0;
        failed |= wait(&status) == -1 || status != 0;
    }
    unsigned long held = 0;
    for (unsigned long number = 0; number < processes; number++)
        held += frames[number];
    in = event("pswpin ") - in;
    out = event("pswpout ") - out;
    if (swaps && swap_end() != 0)
        FAIL("swap does not end: errno %d", errno);
    if (failed)
        FAIL("a process has failed");
    if (flag(count, words, "--verify"))
        say("working_set: contents are right after %lu passes\n", passes);
    if (flag(count, words, "--moved"))
        say("working_set: %lu pages came back, %lu went out, %lu in all, in %lu frames\n", in, out, in + out,
            held);
    return 0;
}
