// memory: 64M
// clock: instructions
// kernel-only: it uses all memory of the machine
//
// Memory runs out, and a process is killed. A bystander that sleeps for ten
// milliseconds at a time never waits for long: work that frees memory gives
// the CPU away in between. Times are instructions, one nanosecond each.

#include "test.h"
#include "swap.h"

#include <sys/prctl.h>
#include <sys/sysinfo.h>

#define MIB ((size_t)1 << 20)
#define MILLISECOND 1000000ull
#define NAP (10 * MILLISECOND)
#define LONGEST (50 * MILLISECOND)

// Shared by the processes.
static struct {
    volatile int begins, ends;
    volatile uint64_t naps, worst;
} *shared;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static void bystander(void) {
    while (!shared->ends) {
        uint64_t before = now();
        struct timespec nap = {0, NAP};
        nanosleep(&nap, 0);
        uint64_t gap = now() - before - NAP;
        if (shared->begins) {
            shared->naps++;
            if (gap > shared->worst)
                shared->worst = gap;
        }
    }
}

// Writes random numbers to one word in `one_in` of a page; the others stay zero.
static void fill(uint64_t *page, uint64_t *seed, int one_in) {
    for (int at = 0; at < 512; at += one_in) {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        page[at] = *seed;
    }
}

// Takes memory until it is killed.
static void hog(size_t length, int one_in) {
    char *memory = mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(memory != MAP_FAILED);
    uint64_t seed = 88172645463325252u;
    for (size_t at = 0; at < length; at += PAGE)
        fill((uint64_t *)(memory + at), &seed, one_in);
}

static void pressure(const char *text, size_t length, int one_in) {
    memset((void *)shared, 0, sizeof *shared);
    pid_t sleeper = CHILD(bystander());
    shared->begins = 1;
    pid_t taker = CHILD(hog(length, one_in));
    int status = test_wait(taker);
    shared->begins = 0;
    shared->ends = 1;
    int slept = test_wait(sleeper);
    test_print("%s: %llu naps, the longest wait %llu us", text, (unsigned long long)shared->naps,
               (unsigned long long)shared->worst / 1000);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, text);
    CHECK(WIFEXITED(slept) && WEXITSTATUS(slept) == 0, "the bystander lives");
    CHECK(shared->naps > 0 && shared->worst <= LONGEST, "no wait is long");
    test_arm_watchdog();
}

int main(void) {
    test_start();
    struct sysinfo machine;
    NEED(sysinfo(&machine) == 0);
    size_t memory = machine.totalram;
    shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    pressure("no swap", 2 * memory, 512);
    // A quarter of memory as slots: swap is full first.
    STEP_EQUAL(swap_begin(memory / 4 & -MIB), 0);
    pressure("swap is full", 2 * memory, 8);
    STEP_EQUAL(swap_end(), 0);
    // As many slots as memory has, and a store of an eighth: the store is full first.
    STEP_EQUAL(swap_setting("disksize", memory & -MIB), 0);
    STEP_EQUAL(swap_setting("mem_limit", memory / 8 & -MIB), 0);
    STEP_EQUAL(swap_make((memory & -MIB) / PAGE), 0);
    STEP_EQUAL(swapon(SWAP_DEVICE, 0), 0);
    pressure("the store is full", 2 * memory, 2);
    STEP_EQUAL(swap_end(), 0);
    return test_end();
}
