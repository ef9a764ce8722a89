// memory: 64M
// kernel-only: it uses all memory of the machine
//
// defrag: the effect of a first touch if no block for a large folio is free,
// but would be after the kernel's caches were freed.

#include "settings.h"

#include <pthread.h>
#include <sys/sysinfo.h>

#define SIZE (2l << 20)
#define MOST 32
#define THREADS 12

static char text[200000];

static unsigned long free_pages(void) {
    struct sysinfo information;
    NEED(sysinfo(&information) == 0);
    return information.freeram / PAGE;
}

static char *area(long count) {
    char *whole = mmap(0, (count + 1) * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(whole != MAP_FAILED);
    return (char *)(((uintptr_t)whole + SIZE - 1) & ~(uintptr_t)(SIZE - 1));
}

// KiB in 2 MiB that are in memory.
static long resident(char *memory) {
    static unsigned char pages[SIZE / 4096];
    NEED(mincore(memory, SIZE, pages) == 0);
    long count = 0;
    for (unsigned page = 0; page < sizeof pages; page++)
        count += pages[page] & 1;
    return count * 4;
}

static int hold_pipe[2];

static void *wait_in_kernel(void *none) {
    char byte;
    return read(hold_pipe[0], &byte, 1) == 1 ? none : none;
}

// The kernel takes stacks for threads, from the one block that is free, and keeps
// some of them when the threads have ended.
static void scatter(void) {
    pthread_t threads[THREADS];
    for (int index = 0; index < THREADS; index++)
        NEED(pthread_create(&threads[index], 0, wait_in_kernel, 0) == 0);
    NEED(write(hold_pipe[1], "123456789012", THREADS) == THREADS);
    for (int index = 0; index < THREADS; index++)
        NEED(pthread_join(threads[index], 0) == 0);
}

// KiB that one store brings in; nothing of them stays.
static long touched(char *memory, int advice) {
    STEP_EQUAL(madvise(memory, SIZE, advice ? advice : MADV_NORMAL), 0);
    memory[17 * PAGE] = 1;
    long result = resident(memory);
    STEP_EQUAL(madvise(memory, SIZE, MADV_DONTNEED), 0);
    return result;
}

static char *blocks, *small, *place;
static int released;
static long used;

// Leaves exactly one block of 2 MiB free, and little else: if the free one cannot
// be had whole, another one. Pages are taken from the smallest blocks.
static void one_block(void) {
    STEP(write_thp("defrag", "always") > 0);
    while (touched(place, 0) != SIZE / 1024)
        STEP_EQUAL(madvise(blocks + released++ * SIZE, SIZE, MADV_DONTNEED), 0);
    while (free_pages() > 512 + 24)
        small[PAGE * used++] = 1;
}

// The size that one store maps under the rule `word` when the kernel's caches
// keep the missing part of a block. A block in which the kernel has since made
// a lasting allocation is no test of `expected`: then another one.
static long outcome(const char *word, char *at, int advice, int later, long expected) {
    long result = 0;
    for (int tries = 0; tries < 12; tries++) {
        one_block();
        scatter();
        STEP(write_thp("defrag", word) > 0);
        result = touched(at, advice);
        // The kernel collects at its own pace: a busy host takes its time.
        for (int waits = 0; later && waits < 30 && result != expected; waits++) {
            test_sleep(50);
            result = touched(at, advice);
        }
        if (result == expected || expected == 4)
            break;
    }
    return result;
}

int main(void) {
    test_start();
    NEED(pipe(hold_pipe) == 0);
    static const char *words[] = {"always", "defer", "defer+madvise", "madvise", "never"};
    int before = test_failures;
    for (int index = 0; index < 5; index++) {
        STEP_EQUAL(write_thp("defrag", words[index]), strlen(words[index]));
        NEED(test_read_file(THP_ROOT "defrag", text, 200) > 0);
        char *open = strchr(text, '[');
        STEP(open && strncmp(open + 1, words[index], strlen(words[index])) == 0 && open[strlen(words[index]) + 1] == ']');
    }
    ALL_STEPS(before, "defrag: what is written is read back");
    CHECK(strcmp(text, "always defer defer+madvise madvise [never]\n") == 0, "defrag: the whole line");
    FAILS(write_thp("defrag", "sometimes"), EINVAL, "defrag: another word is refused");

    // Stacks and all that threads need of the program's own memory come now.
    scatter();
    STEP(write_thp("hugepages-2048kB/enabled", "always") > 0);
    blocks = area(MOST);
    small = area(MOST);
    place = area(4);
    STEP_EQUAL(madvise(small, MOST * SIZE, MADV_NOHUGEPAGE), 0);
    place[0] = 1;
    STEP_EQUAL(madvise(place, SIZE, MADV_DONTNEED), 0);
    // All blocks of 2 MiB, then one of them back, then pages until little else is free.
    int count = 0;
    while (count < MOST) {
        blocks[count * SIZE] = 1;
        if (resident(blocks + count * SIZE) < SIZE / 1024)
            break;
        count++;
    }
    NEED(count > 2 && count < MOST);
    STEP_EQUAL(madvise(blocks + released++ * SIZE, SIZE, MADV_DONTNEED), 0);
    one_block();
    EQUAL(touched(place, 0), SIZE / 1024, "one block is free");

    static const struct {
        const char *word;
        int plain, advised, later;
    } rules[] = {{"never", 0, 0, 0}, {"madvise", 0, 1, 0}, {"always", 1, 1, 0}, {"defer", 0, 0, 1}, {"defer+madvise", 0, 1, 1}};
    for (int index = 0; index < 5; index++) {
        char what[100];
        const char *word = rules[index].word;
        long plain = rules[index].plain ? SIZE / 1024 : 4, advised = rules[index].advised ? SIZE / 1024 : 4;
        snprintf(what, sizeof what, "%s: a touch %s", word, rules[index].plain ? "collects" : "makes do with a page");
        EQUAL(outcome(word, place, 0, 0, plain), plain, what);
        snprintf(what, sizeof what, "%s: with MADV_HUGEPAGE, it %s", word, rules[index].advised ? "collects" : "makes do with a page");
        EQUAL(outcome(word, place + SIZE, MADV_HUGEPAGE, 0, advised), advised, what);
        if (rules[index].later) {
            snprintf(what, sizeof what, "%s: the kernel collects meanwhile", word);
            EQUAL(outcome(word, place, 0, 1, SIZE / 1024), SIZE / 1024, what);
        }
    }
    return test_end();
}
