// Storms: threads and processes that make calls against each other for a time,
// on several CPUs. A program's arguments are the number of CPUs, 2 by default,
// and the seconds of each storm, half a second by default.

#ifndef BINDERY_STORM_H
#define BINDERY_STORM_H

#include "test.h"

#include <pthread.h>

enum { STORM_MOST = 8 };

static int storm_count = 2;
static long long storm_length = 500000000;
static volatile long long storm_end;
static volatile int storm_over;

UNUSED static void storm_start(int count, char **arguments) {
    test_start();
    if (count > 1)
        storm_count = atoi(arguments[1]);
    if (count > 2)
        storm_length = atoll(arguments[2]) * 1000000000;
    NEED(storm_count >= 1 && storm_count <= STORM_MOST);
}

// A storm begins: threads go on until storm_over, and the caller while storm_goes_on().
UNUSED static void storm_begin(void) {
    test_arm_watchdog();
    alarm(TEST_SECONDS + storm_length / 1000000000);
    storm_over = 0;
    storm_end = test_now() + storm_length;
}

UNUSED static int storm_goes_on(void) { return test_now() < storm_end; }

// The content of a page: no two pages, owners or rounds have the same.
UNUSED static uint64_t storm_mark(uint64_t owner, uint64_t round, uint64_t page) {
    return (owner + 1) << 56 | (round & 0xffffffff) << 24 | (page & 0xffffff);
}

UNUSED static uint64_t *storm_word(void *at, size_t page) {
    return (uint64_t *)((char *)at + page * PAGE) + page % 500;
}

UNUSED static void storm_fill(void *at, uint64_t owner, uint64_t round, size_t pages) {
    for (size_t page = 0; page < pages; page++)
        *storm_word(at, page) = storm_mark(owner, round, page);
}

// The number of pages with another content.
UNUSED static int storm_wrong(void *at, uint64_t owner, uint64_t round, size_t pages) {
    int wrong = 0;
    for (size_t page = 0; page < pages; page++)
        wrong += *storm_word(at, page) != storm_mark(owner, round, page);
    return wrong;
}

// Starts one thread for each CPU; its argument is its number.
UNUSED static void storm_threads(pthread_t *threads, void *(*run)(void *)) {
    for (intptr_t index = 0; index < storm_count; index++)
        NEED(pthread_create(&threads[index], 0, run, (void *)index) == 0);
}

// Ends the threads. Each returns its number of failures.
UNUSED static void storm_join(pthread_t *threads) {
    storm_over = 1;
    for (int index = 0; index < storm_count; index++) {
        void *failed;
        STEP_EQUAL(pthread_join(threads[index], &failed), 0);
        STEP_EQUAL((intptr_t)failed, 0);
    }
}

#endif
