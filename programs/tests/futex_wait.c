// futex: wait and wake, values, timeouts of both kinds, bit sets, errors.

#include "test.h"

#include <pthread.h>

static volatile int word, woken, waiting;

static void *wait_once(void *argument) {
    (void)argument;
    __sync_fetch_and_add(&waiting, 1);
    while (word == 0)
        test_futex(&word, FUTEX_WAIT | FUTEX_PRIVATE, 0, 0, 0, 0);
    __sync_fetch_and_add(&woken, 1);
    return 0;
}

static volatile int sleepers;
static void *sleep_once(void *argument) {
    long bits = (long)(intptr_t)argument;
    __sync_fetch_and_add(&sleepers, 1);
    long result = bits ? test_futex(&word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE, 0, 0, 0, bits)
                       : test_futex(&word, FUTEX_WAIT | FUTEX_PRIVATE, 0, 0, 0, 0);
    __sync_fetch_and_add(&woken, 1);
    return (void *)result;
}

// Wakes until as many as wanted were woken in all: a thread that has announced
// itself may not sleep yet.
static int wake_until(int operation, int wanted, int bits) {
    int total = 0;
    for (int round = 0; round < 5000 && total < wanted; round++) {
        total += test_futex(&word, operation | FUTEX_PRIVATE, wanted - total, 0, 0, bits);
        test_sleep(1);
    }
    return total;
}

static volatile int caught;
static void catch(int signal) { caught = signal; }

int main(void) {
    test_start();
    pthread_t threads[10];
    long long start;

    FAILS(test_futex(&word, FUTEX_WAIT, 1, 0, 0, 0), EAGAIN, "wait: another value");
    EQUAL(test_futex(&word, FUTEX_WAKE, 1, 0, 0, 0), 0, "wake: nobody waits");
    FAILS(test_futex(test_wild(8), FUTEX_WAIT, 0, 0, 0, 0), EFAULT, "wait: a bad pointer");
    FAILS(test_futex((int *)((char *)&word + 1), FUTEX_WAIT, 0, 0, 0, 0), EINVAL, "wait: a crooked pointer");
    FAILS(test_futex((int *)((char *)&word + 1), FUTEX_WAKE, 1, 0, 0, 0), EINVAL, "wake: a crooked pointer");
    FAILS(test_futex(&word, 99, 0, 0, 0, 0), ENOSYS, "an unknown operation");
    struct timespec time = {0, 20000000};
    start = test_now();
    FAILS(test_futex(&word, FUTEX_WAIT, 0, &time, 0, 0), ETIMEDOUT, "wait: relative timeout");
    CHECK(test_now() - start >= 20000000, "the time is over");
    struct timespec bad = {0, 1000000000};
    FAILS(test_futex(&word, FUTEX_WAIT, 0, &bad, 0, 0), EINVAL, "wait: a bad time");
    FAILS(test_futex(&word, FUTEX_WAIT, 0, test_wild(8), 0, 0), EFAULT, "wait: a bad pointer to the time");
    start = test_now();
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_nsec += 20000000;
    if (time.tv_nsec >= 1000000000)
        time.tv_sec++, time.tv_nsec -= 1000000000;
    FAILS(test_futex(&word, FUTEX_WAIT_BITSET, 0, &time, 0, -1), ETIMEDOUT, "wait: absolute timeout");
    CHECK(test_now() - start >= 20000000, "not before its time");
    FAILS(test_futex(&word, FUTEX_WAIT_BITSET, 0, &time, 0, -1), ETIMEDOUT, "wait: a time in the past");
    clock_gettime(CLOCK_REALTIME, &time);
    time.tv_nsec += 10000000;
    if (time.tv_nsec >= 1000000000)
        time.tv_sec++, time.tv_nsec -= 1000000000;
    FAILS(test_futex(&word, FUTEX_WAIT_BITSET | FUTEX_REALTIME, 0, &time, 0, -1), ETIMEDOUT,
          "wait: absolute timeout of the real-time clock");
    FAILS(test_futex(&word, FUTEX_WAIT_BITSET, 0, 0, 0, 0), EINVAL, "wait: no bits");
    FAILS(test_futex(&word, FUTEX_WAIT | FUTEX_REALTIME, 1, 0, 0, 0), ENOSYS, "wait: a relative time has no clock");

    for (int index = 0; index < 10; index++)
        NEED(pthread_create(&threads[index], 0, wait_once, 0) == 0);
    while (waiting < 10)
        test_sleep(1);
    test_sleep(10);
    EQUAL(woken, 0, "ten threads wait");
    word = 1;
    test_futex(&word, FUTEX_WAKE | FUTEX_PRIVATE, INT32_MAX, 0, 0, 0);
    for (int index = 0; index < 10; index++)
        pthread_join(threads[index], 0);
    EQUAL(woken, 10, "wake all wakes ten");

    word = woken = 0;
    for (int index = 0; index < 4; index++)
        NEED(pthread_create(&threads[index], 0, sleep_once, 0) == 0);
    while (sleepers < 4)
        test_sleep(1);
    EQUAL(wake_until(FUTEX_WAKE, 1, 0), 1, "wake one wakes one");
    test_sleep(20);
    EQUAL(woken, 1, "and no other");
    EQUAL(wake_until(FUTEX_WAKE, 3, 0), 3, "wake three");
    void *result;
    for (int index = 0; index < 4; index++) {
        pthread_join(threads[index], &result);
        STEP_EQUAL((long)result, 0);
    }

    woken = sleepers = 0;
    NEED(pthread_create(&threads[0], 0, sleep_once, (void *)1) == 0);
    NEED(pthread_create(&threads[1], 0, sleep_once, (void *)2) == 0);
    while (sleepers < 2)
        test_sleep(1);
    test_sleep(20);
    EQUAL(test_futex(&word, FUTEX_WAKE_BITSET | FUTEX_PRIVATE, 10, 0, 0, 4), 0,
          "wake: bits that nobody waits for");
    EQUAL(wake_until(FUTEX_WAKE_BITSET, 1, 2), 1, "wake: by one bit");
    pthread_join(threads[1], 0);
    EQUAL(woken, 1, "the right thread wakes");
    EQUAL(wake_until(FUTEX_WAKE, 1, 0), 1, "plain wake has all bits");
    pthread_join(threads[0], 0);

    struct sigaction action = {.sa_handler = catch};
    sigaction(SIGUSR1, &action, 0);
    pid_t self = getpid();
    pid_t child = CHILD({ test_sleep(300); kill(self, SIGUSR1); });
    FAILS(test_futex(&word, FUTEX_WAIT, 0, 0, 0, 0), EINTR, "wait: a signal");
    EQUAL(caught, SIGUSR1, "its handler has run");
    test_wait(child);

    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, 0);
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_sec += 20;
    child = CHILD({ test_sleep(300); kill(self, SIGUSR1); });
    FAILS(test_futex(&word, FUTEX_WAIT_BITSET, 0, &time, 0, -1), EINTR,
          "wait: a handler ends a wait with a timeout, whatever its flags");
    test_wait(child);
    child = CHILD({
        test_sleep(300);
        kill(self, SIGUSR1);
        test_sleep(300);
        kill(self, SIGUSR2);
    });
    action.sa_flags = 0;
    sigaction(SIGUSR2, &action, 0);
    FAILS(test_futex(&word, FUTEX_WAIT_BITSET, 0, 0, 0, -1), EINTR, "wait: no timeout, a handler that restarts");
    EQUAL(caught, SIGUSR2, "and one that does not");
    test_wait(child);

    // Memory that is not mapped yet, and memory that the kernel must not write.
    volatile int *fresh = (volatile int *)test_map(PAGE);
    FAILS(test_futex(fresh, FUTEX_WAIT, 1, 0, 0, 0), EAGAIN, "wait: on a page not touched before");
    NEED(mprotect((void *)fresh, PAGE, PROT_READ) == 0);
    FAILS(test_futex(fresh, FUTEX_WAIT | FUTEX_PRIVATE, 1, 0, 0, 0), EAGAIN, "wait: on read-only memory");
    NEED(mprotect((void *)fresh, PAGE, PROT_NONE) == 0);
    FAILS(test_futex(fresh, FUTEX_WAIT | FUTEX_PRIVATE, 1, 0, 0, 0), EFAULT, "wait: on memory without access");
    return test_end();
}
