// Clocks and sleeping.

#include "test.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/times.h>

static long long nanoseconds(clockid_t clock) {
    struct timespec now;
    NEED(clock_gettime(clock, &now) == 0);
    STEP(now.tv_nsec >= 0 && now.tv_nsec < 1000000000);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

enum { PAGES = 50 };

static long minor_faults(int who) {
    struct rusage usage;
    NEED(getrusage(who, &usage) == 0);
    return usage.ru_minflt;
}

// Runs into PAGES faults, and a few at most beside.
static void touch_pages(void) {
    volatile char *memory = test_map(PAGES * PAGE);
    NEED(madvise((void *)memory, PAGES * PAGE, MADV_NOHUGEPAGE) == 0);
    for (int page = 0; page < PAGES; page++)
        memory[page * PAGE] = 1;
}

static void *touch_as_thread(void *faults) {
    long before = minor_faults(RUSAGE_THREAD);
    touch_pages();
    *(long *)faults = minor_faults(RUSAGE_THREAD) - before;
    return 0;
}

static void count_faults(void) {
    long own = minor_faults(RUSAGE_THREAD), all = minor_faults(RUSAGE_SELF), others;
    pthread_t thread;
    NEED(pthread_create(&thread, 0, touch_as_thread, &others) == 0 && !pthread_join(thread, 0));
    CHECK(others >= PAGES && others < 2 * PAGES, "a thread's minor faults");
    CHECK(minor_faults(RUSAGE_THREAD) - own < PAGES, "are not those of another thread");
    long both = minor_faults(RUSAGE_SELF) - all;
    CHECK(both >= PAGES && both < 2 * PAGES, "but those of the process, after its end too");
    long children = minor_faults(RUSAGE_CHILDREN);
    CHILD(touch_pages());
    wait(0);
    CHECK(minor_faults(RUSAGE_CHILDREN) - children >= PAGES, "and those of a child");
}

static long read_clock(unsigned id) {
    struct timespec now;
    return syscall(SYS_clock_gettime, id, &now);
}

// Clocks of processor time by the number of a process or a thread.
static void clocks_by_number(void) {
    enum { SCHEDULED = 2, OF_FILE = 3, OF_THREAD = 4 };
    const unsigned caller = ~0u << 3;
    WORKS(read_clock(caller | SCHEDULED), "the number 0 means the caller's process");
    WORKS(read_clock(caller | SCHEDULED | OF_THREAD), "and the caller's thread");
    FAILS(read_clock(caller | OF_FILE), EINVAL, "a clock of a file");
    FAILS(read_clock(caller | OF_FILE | OF_THREAD), EINVAL, "an unknown clock of a thread");
    pid_t child = CHILD(pause());
    unsigned other = ~(unsigned)child << 3 | SCHEDULED;
    WORKS(read_clock(other), "the clock of another process");
    FAILS(read_clock(other | OF_THREAD), EINVAL, "the clock of its thread");
    kill(child, SIGKILL);
    test_wait(child);
    struct timespec time = {0, 1};
    FAILS(syscall(SYS_clock_settime, CLOCK_REALTIME, &time), EINVAL, "a real time before the start");
    time.tv_sec = 9223372036 - 30 * 365 * 86400LL;
    FAILS(syscall(SYS_clock_settime, CLOCK_REALTIME, &time), EINVAL, "a real time near the last one");
}

int main(void) {
    test_start();
    int before = test_failures;
    long long last = nanoseconds(CLOCK_MONOTONIC), first = last;
    for (int round = 0; round < 2000; round++) {
        long long now = nanoseconds(CLOCK_MONOTONIC);
        STEP(now >= last);
        last = now;
    }
    STEP(last > first);
    ALL_STEPS(before, "CLOCK_MONOTONIC rises");
    static const clockid_t clocks[] = {CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_MONOTONIC_RAW,
                                       CLOCK_REALTIME_COARSE, CLOCK_MONOTONIC_COARSE, CLOCK_BOOTTIME,
                                       CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID};
    before = test_failures;
    for (int index = 0; index < 8; index++) {
        nanoseconds(clocks[index]);
        struct timespec resolution = {-1, -1};
        STEP_EQUAL(clock_getres(clocks[index], &resolution), 0);
        STEP(resolution.tv_sec == 0 && resolution.tv_nsec > 0 && resolution.tv_nsec <= 100000000);
    }
    ALL_STEPS(before, "eight clocks and their resolution");
    struct timespec time;
    FAILS(syscall(SYS_clock_gettime, 99, &time), EINVAL, "an unknown clock");
    FAILS(syscall(SYS_clock_gettime, CLOCK_REALTIME, test_wild(8)), EFAULT, "a bad pointer");
    // The emulated machine starts in 2026, or knows nothing better than 1970.
    struct timeval day;
    STEP_EQUAL(gettimeofday(&day, 0), 0);
    long long difference = nanoseconds(CLOCK_REALTIME) / 1000 - (day.tv_sec * 1000000LL + day.tv_usec);
    CHECK(difference >= 0 && difference < 5000000, "gettimeofday is CLOCK_REALTIME");
    CHECK(day.tv_usec >= 0 && day.tv_usec < 1000000, "with microseconds");
    CHECK(day.tv_sec > 0, "the real time is after 1970");

    long long start = nanoseconds(CLOCK_MONOTONIC);
    struct timespec rest = {0, 30000000};
    EQUAL(nanosleep(&rest, 0), 0, "nanosleep");
    long long slept = nanoseconds(CLOCK_MONOTONIC) - start;
    CHECK(slept >= 30000000, "sleeps as long as it must");
    CHECK(slept < 5000000000, "and not for ever");
    rest = (struct timespec){0, 0};
    EQUAL(nanosleep(&rest, 0), 0, "nanosleep of nothing");
    rest.tv_nsec = 1000000000;
    FAILS(nanosleep(&rest, 0), EINVAL, "nanosleep: too many nanoseconds");
    rest = (struct timespec){-1, 0};
    FAILS(nanosleep(&rest, 0), EINVAL, "nanosleep: a negative time");
    FAILS(nanosleep(test_wild(8), 0), EFAULT, "nanosleep: a bad pointer");
    start = nanoseconds(CLOCK_MONOTONIC) + 30000000;
    rest = (struct timespec){start / 1000000000, start % 1000000000};
    EQUAL(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &rest, 0), 0, "clock_nanosleep: absolute");
    CHECK(nanoseconds(CLOCK_MONOTONIC) >= start, "until its time");
    EQUAL(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &rest, 0), 0, "clock_nanosleep: in the past");
    start = nanoseconds(CLOCK_REALTIME) + 10000000;
    rest = (struct timespec){start / 1000000000, start % 1000000000};
    EQUAL(clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &rest, 0), 0, "clock_nanosleep: real time");
    CHECK(nanoseconds(CLOCK_REALTIME) >= start, "until its time");
    rest = (struct timespec){0, 1000000};
    EQUAL(clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, 0), 0, "clock_nanosleep: relative");
    EQUAL(clock_nanosleep(99, 0, &rest, 0), EINVAL, "clock_nanosleep: an unknown clock");
    EQUAL(usleep(1000), 0, "usleep");

    long long process = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
    start = nanoseconds(CLOCK_MONOTONIC);
    volatile long sum = 0;
    while (nanoseconds(CLOCK_MONOTONIC) - start < 100000000)
        for (int round = 0; round < 1000; round++)
            sum += round;
    CHECK(nanoseconds(CLOCK_PROCESS_CPUTIME_ID) > process, "work uses processor time");
    process = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
    test_sleep(1000);
    CHECK(nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - process < 800000000, "sleep does not");
    struct tms ticks;
    CHECK(times(&ticks) != -1 && ticks.tms_utime >= 0 && ticks.tms_utime < 6000, "times");
    struct rusage usage;
    EQUAL(getrusage(RUSAGE_SELF, &usage), 0, "getrusage");
    CHECK(usage.ru_utime.tv_usec >= 0 && usage.ru_utime.tv_usec < 1000000 &&
              usage.ru_utime.tv_sec + usage.ru_stime.tv_sec < 60,
          "with sensible values");
    EQUAL(getrusage(RUSAGE_CHILDREN, &usage), 0, "getrusage of children");
    FAILS(syscall(SYS_getrusage, 77, &usage), EINVAL, "getrusage: of whom?");
    count_faults();
    clocks_by_number();

    // Sleepers wake in the order of their times, not of their start.
    int pipes[2];
    NEED(pipe(pipes) == 0);
    // The time is the same for all, however long the host takes to start them.
    start = nanoseconds(CLOCK_MONOTONIC) + 1000000000;
    for (int index = 0; index < 5; index++)
        CHILD({
            long long end = start + 100000000 * (4 - index);
            struct timespec at = {end / 1000000000, end % 1000000000};
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, 0);
            write(pipes[1], &index, sizeof index);
        });
    before = test_failures;
    for (int index = 4; index >= 0; index--) {
        int got = -1;
        STEP_EQUAL(read(pipes[0], &got, sizeof got), sizeof got);
        STEP_EQUAL(got, index);
    }
    for (int index = 0; index < 5; index++)
        wait(0);
    ALL_STEPS(before, "five sleepers wake in the order of their times");
    return test_end();
}
