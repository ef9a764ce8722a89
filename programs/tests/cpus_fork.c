// Threads on several CPUs fork and move their mappings at the same time. Each
// child has all pages of a mapping at its old place or all at its new one, with
// the content that they had. The arguments are those of every storm.
//
// cpus: 2

#include "storm.h"

enum { OWN = 24, PLACES = 3 };

// Moves and resizes a mapping of its own. Returns the number of failures.
static int move(uint64_t who, uint64_t round) {
    char *at = test_map(OWN * PAGE), *other = test_map(3 * OWN * PAGE);
    storm_fill(at, who, round, OWN);
    char *moved = mremap(at, OWN * PAGE, OWN * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, other + OWN * PAGE);
    if (moved != other + OWN * PAGE)
        return 1;
    int failed = storm_wrong(moved, who, round, OWN);
    failed += munmap(other, OWN * PAGE) != 0;
    // The pages go, and the mapping stays.
    char *kept = mremap(moved, OWN * PAGE, OWN * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
    if (kept == MAP_FAILED)
        return failed + 1;
    failed += storm_wrong(kept, who, round, OWN);
    for (size_t page = 0; page < OWN; page++)
        failed += *storm_word(moved, page) != 0;
    char *grown = mremap(kept, OWN * PAGE, 2 * OWN * PAGE, MREMAP_MAYMOVE);
    if (grown == MAP_FAILED)
        return failed + 1;
    failed += storm_wrong(grown, who, round, OWN);
    failed += mremap(grown, 2 * OWN * PAGE, OWN / 2 * PAGE, 0) != grown;
    failed += storm_wrong(grown, who, round, OWN / 2);
    failed += munmap(grown, OWN / 2 * PAGE) != 0;
    return failed + (munmap(moved, 2 * OWN * PAGE) != 0);
}

static void *move_and_fork(void *argument) {
    uint64_t who = (uint64_t)(intptr_t)argument;
    intptr_t failed = 0;
    char *own = test_map(OWN * PAGE);
    for (uint64_t round = 0; !storm_over; round++) {
        failed += move(who, round);
        storm_fill(own, who, round, OWN);
        pid_t child = fork();
        if (child == 0) {
            int wrong = storm_wrong(own, who, round, OWN);
            storm_fill(own, who, round + 1, OWN);
            wrong += move(who, round);
            _exit(wrong + storm_wrong(own, who, round + 1, OWN) != 0);
        }
        storm_fill(own, who, round + 2, OWN / 2);
        failed += child < 0 || test_wait(child) != 0;
        failed += storm_wrong(own, who, round + 2, OWN / 2);
    }
    munmap(own, OWN * PAGE);
    return (void *)failed;
}

static char *places;

static int is_mapped(int place) {
    unsigned char resident[OWN];
    return mincore(places + place * OWN * PAGE, OWN * PAGE, resident) == 0;
}

// Forks: the child finds the mapping at one place, whole.
static void *fork_always(void *argument) {
    intptr_t failed = 0;
    while (!storm_over) {
        pid_t child = fork();
        if (child == 0) {
            int found = 0, wrong = 0;
            for (int place = 0; place < PLACES; place++)
                if (is_mapped(place)) {
                    found++;
                    wrong += storm_wrong(places + place * OWN * PAGE, STORM_MOST, 0, OWN);
                }
            _exit(found != 1 || wrong);
        }
        failed += child < 0 || test_wait(child) != 0;
    }
    (void)argument;
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

static void move_own(uint64_t round) { STEP_EQUAL(move(STORM_MOST, round), 0); }

static void move_to_next_place(uint64_t round) {
    char *from = places + round % PLACES * OWN * PAGE, *to = places + (round + 1) % PLACES * OWN * PAGE;
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
    STEP(mremap(from, OWN * PAGE, OWN * PAGE, flags, to) == to);
    // A write makes its own copy of a page that a child has.
    *storm_word(to, round % OWN) = storm_mark(STORM_MOST, 0, round % OWN);
}

int main(int count, char **arguments) {
    storm_start(count, arguments);
    storm(move_and_fork, move_own, "threads fork and move their mappings");
    // Far from all mappings whose place the kernel chooses.
    places = mmap(test_wild((uintptr_t)1 << 44), OWN * PAGE, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    NEED(places != MAP_FAILED);
    storm_fill(places, STORM_MOST, 0, OWN);
    storm(fork_always, move_to_next_place, "a child has a moving mapping at one place");
    return test_end();
}
