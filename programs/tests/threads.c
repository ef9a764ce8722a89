// POSIX threads: create, join, detach, mutexes, conditions, keys,
// thread-local storage, exit of threads.

#include "test.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static long counter;
static int turn, destroyed;
static _Thread_local int local = 5;
static pthread_key_t key;
static sem_t semaphore;

static void *add(void *argument) {
    for (int round = 0; round < 2000; round++) {
        pthread_mutex_lock(&mutex);
        counter++;
        pthread_mutex_unlock(&mutex);
    }
    return argument;
}

static void *take_turns(void *argument) {
    int mine = (int)(intptr_t)argument;
    for (int round = 0; round < 100; round++) {
        pthread_mutex_lock(&mutex);
        while (turn % 3 != mine)
            pthread_cond_wait(&condition, &mutex);
        turn++;
        pthread_cond_broadcast(&condition);
        pthread_mutex_unlock(&mutex);
    }
    return 0;
}

static void *use_local(void *argument) {
    int start = local;
    for (int round = 0; round < 50; round++) {
        local += (int)(intptr_t)argument;
        sched_yield();
    }
    return (void *)(intptr_t)(start == 5 && local == 5 + 50 * (int)(intptr_t)argument);
}

static void destroy(void *value) { destroyed += (int)(intptr_t)value; }

static void *use_key(void *argument) {
    pthread_setspecific(key, argument);
    pthread_exit((void *)77);
}

static void *post(void *argument) {
    (void)argument;
    test_sleep(5);
    sem_post(&semaphore);
    return 0;
}

static void *deep(void *argument) {
    volatile char space[40000];
    space[0] = 1;
    space[39999] = 2;
    return (void *)(intptr_t)(space[0] + space[39999] + (argument != 0));
}

static volatile int stop, spins;
static void *spin(void *argument) {
    (void)argument;
    while (!stop)
        spins++;
    return 0;
}

int main(void) {
    test_start();
    pthread_t threads[50];
    void *result;

    NEED(pthread_create(&threads[0], 0, add, (void *)0x1234) == 0);
    STEP_EQUAL(pthread_join(threads[0], &result), 0);
    EQUAL((intptr_t)result, 0x1234, "create and join");
    EQUAL(counter, 2000, "the thread shares the memory");

    counter = 0;
    for (int index = 0; index < 50; index++)
        NEED(pthread_create(&threads[index], 0, add, 0) == 0);
    for (int index = 0; index < 50; index++)
        STEP_EQUAL(pthread_join(threads[index], 0), 0);
    EQUAL(counter, 100000, "fifty threads and a mutex");

    for (int index = 0; index < 3; index++)
        NEED(pthread_create(&threads[index], 0, take_turns, (void *)(intptr_t)index) == 0);
    for (int index = 0; index < 3; index++)
        STEP_EQUAL(pthread_join(threads[index], 0), 0);
    EQUAL(turn, 300, "three threads take turns by a condition");

    int good = 0;
    for (int index = 0; index < 10; index++)
        NEED(pthread_create(&threads[index], 0, use_local, (void *)(intptr_t)index) == 0);
    for (int index = 0; index < 10; index++) {
        STEP_EQUAL(pthread_join(threads[index], &result), 0);
        good += (int)(intptr_t)result;
    }
    EQUAL(good, 10, "each thread has its own thread-local storage");
    EQUAL(local, 5, "and the first thread too");

    STEP_EQUAL(pthread_key_create(&key, destroy), 0);
    NEED(pthread_create(&threads[0], 0, use_key, (void *)3) == 0);
    STEP_EQUAL(pthread_join(threads[0], &result), 0);
    EQUAL((intptr_t)result, 77, "pthread_exit gives the result");
    EQUAL(destroyed, 3, "destructors of keys run at thread exit");

    STEP_EQUAL(sem_init(&semaphore, 0, 0), 0);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    NEED(pthread_create(&threads[0], &attributes, post, 0) == 0);
    EQUAL(sem_wait(&semaphore), 0, "a detached thread posts a semaphore");
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_JOINABLE);
    STEP_EQUAL(pthread_attr_setstacksize(&attributes, 256 * 1024), 0);
    NEED(pthread_create(&threads[0], &attributes, deep, 0) == 0);
    STEP_EQUAL(pthread_join(threads[0], &result), 0);
    EQUAL((intptr_t)result, 3, "a small stack");
    pthread_attr_setstacksize(&attributes, 64 * 1024 * 1024);
    NEED(pthread_create(&threads[0], &attributes, deep, &good) == 0);
    STEP_EQUAL(pthread_join(threads[0], &result), 0);
    EQUAL((intptr_t)result, 4, "a large stack");

    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 20000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&mutex);
    EQUAL(pthread_cond_timedwait(&condition, &mutex, &until), ETIMEDOUT, "a condition's timeout");
    pthread_mutex_unlock(&mutex);
    EQUAL(sem_timedwait(&semaphore, &until), -1, "a semaphore's timeout");
    EQUAL(sem_trywait(&semaphore), -1, "sem_trywait");

    pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
    STEP_EQUAL(pthread_rwlock_rdlock(&lock), 0);
    EQUAL(pthread_rwlock_trywrlock(&lock), EBUSY, "a read lock keeps writers out");
    pthread_rwlock_unlock(&lock);

    // Spinning threads that never call the kernel do not stop the others.
    for (int index = 0; index < 4; index++)
        NEED(pthread_create(&threads[index], 0, spin, 0) == 0);
    long long start = test_now();
    test_sleep(50);
    CHECK(test_now() - start < 20000000000, "spinning threads are preempted");
    while (spins == 0)
        sched_yield();
    stop = 1;
    int before = test_failures;
    for (int index = 0; index < 4; index++)
        STEP_EQUAL(pthread_join(threads[index], 0), 0);
    ALL_STEPS(before, "and end when told");

    before = test_failures;
    for (int round = 0; round < 200; round++) {
        NEED(pthread_create(&threads[0], 0, use_local, (void *)1) == 0);
        STEP_EQUAL(pthread_join(threads[0], 0), 0);
    }
    ALL_STEPS(before, "two hundred threads one after the other");
    return test_end();
}
