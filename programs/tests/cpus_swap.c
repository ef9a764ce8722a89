// Pages go to swap on some CPUs while threads and processes on others fault on
// them: by MADV_PAGEOUT, by fork, and while the swap area is turned off and on.
// No content is lost. The arguments are those of every storm.
//
// cpus: 2
// memory: 48M
// kernel-only: it needs a swap device that no other program uses

#include "storm.h"
#include "swap.h"

#include <sys/sysinfo.h>

enum { OWN = 96, COMMON = 128, MIB = 1 << 20 };

static char *common, *owned[STORM_MOST + 1];

// Writes and reads pages of its own, and reads the pages of all.
static void *fault_always(void *argument) {
    uint64_t who = (uint64_t)(intptr_t)argument;
    intptr_t failed = 0;
    for (uint64_t round = 0; !storm_over; round++) {
        storm_fill(owned[who], who, round, OWN);
        failed += storm_wrong(owned[who], who, round, OWN);
        failed += storm_wrong(common, STORM_MOST, 0, COMMON);
        if (round % 4 == who % 4)
            failed += madvise(owned[who] + PAGE, (OWN - 2) * PAGE, MADV_PAGEOUT) != 0;
        failed += storm_wrong(owned[who], who, round, OWN);
    }
    return (void *)failed;
}

// A child has the pages, in memory or in swap, as they were.
static void fork_and_look(uint64_t round) {
    char *own = owned[storm_count];
    storm_fill(own, STORM_MOST, round, OWN);
    STEP_EQUAL(madvise(own, OWN / 2 * PAGE, MADV_PAGEOUT), 0);
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        int wrong = storm_wrong(own, STORM_MOST, round, OWN);
        storm_fill(own, STORM_MOST, round + 1, OWN / 3);
        wrong += madvise(own, OWN * PAGE, MADV_PAGEOUT) != 0;
        wrong += storm_wrong(own, STORM_MOST, round + 1, OWN / 3);
        wrong += storm_wrong(common, STORM_MOST, 0, COMMON);
        _exit(wrong != 0);
    }
    STEP_EQUAL(madvise(own, OWN * PAGE, MADV_PAGEOUT), 0);
    STEP_EQUAL(storm_wrong(own, STORM_MOST, round, OWN), 0);
    STEP_EQUAL(test_wait(child), 0);
}

static void page_out(uint64_t round) {
    STEP_EQUAL(madvise(common, COMMON * PAGE, MADV_PAGEOUT), 0);
    for (int who = 0; who < storm_count; who++)
        STEP_EQUAL(madvise(owned[who], OWN * PAGE, round % 2 ? MADV_PAGEOUT : MADV_COLD), 0);
}

// Memory is ample, so that the area can always be turned off.
static void turn_off_and_on(uint64_t round) {
    page_out(round);
    STEP_EQUAL(swapoff(SWAP_DEVICE), 0);
    page_out(round);
    STEP_EQUAL(swapon(SWAP_DEVICE, 0), 0);
}

static size_t many;

// All threads together have more pages than there is memory.
static void *use_more_than_memory(void *argument) {
    uint64_t who = (uint64_t)(intptr_t)argument, round = 0;
    intptr_t failed = 0;
    char *pages = test_map(many * PAGE);
    do {
        storm_fill(pages, who, round, many);
        failed += storm_wrong(common, STORM_MOST, 0, COMMON);
        failed += storm_wrong(pages, who, round++, many);
    } while (!storm_over);
    munmap(pages, many * PAGE);
    return (void *)failed;
}

static void storm(void *(*run)(void *), void (*beside)(uint64_t round), const char *what) {
    pthread_t threads[STORM_MOST];
    int before = test_failures;
    uint64_t round = 0;
    storm_begin();
    storm_threads(threads, run);
    do
        beside(round++);
    while (storm_goes_on());
    storm_join(threads);
    ALL_STEPS(before, what);
}

int main(int count, char **arguments) {
    storm_start(count, arguments);
    NEED(swap_begin(128 * MIB) == 0);
    common = test_map(COMMON * PAGE);
    storm_fill(common, STORM_MOST, 0, COMMON);
    for (int who = 0; who <= storm_count; who++)
        owned[who] = test_map(OWN * PAGE);
    storm(fault_always, page_out, "pages go to swap while threads fault on them");
    storm(fault_always, fork_and_look, "and while processes share them");
    storm(fault_always, turn_off_and_on, "and while the area is turned off and on");
    struct sysinfo machine;
    NEED(sysinfo(&machine) == 0);
    many = machine.totalram / PAGE * 5 / 4 / storm_count;
    storm(use_more_than_memory, fork_and_look, "and while memory is short");
    EQUAL(swap_end(), 0, "swap is off");
    return test_end();
}
