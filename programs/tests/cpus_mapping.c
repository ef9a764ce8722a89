// One thread changes mappings while another, on another CPU, accesses them
// without a system call. Each change holds on both CPUs once its call returns.
//
// cpus: 2

#include "test.h"

#include <pthread.h>

enum { ROUNDS = 200, READS = 2000 };

static volatile uint32_t *page;
static volatile uint32_t wanted, answered, stop;
static volatile uint64_t faults;

static void *map(void *at, int fixed) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | fixed;
    return mmap(at, PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
}

// The page is protected: waits until it may be written again.
static void wait_for_page(int signal) {
    (void)signal;
    uint64_t now = __atomic_add_fetch(&faults, 1, __ATOMIC_ACQ_REL);
    while (!stop && __atomic_load_n(&wanted, __ATOMIC_ACQUIRE) < now)
        ;
}

static void *write_always(void *argument) {
    while (!stop)
        page[0]++;
    return argument;
}

// Reads the page once for each number that the other thread has put into it.
static void *read_when_told(void *argument) {
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        while (__atomic_load_n(&wanted, __ATOMIC_ACQUIRE) < round)
            ;
        STEP_EQUAL(page[0], round);
        page[1] = round + 1;
        __atomic_store_n(&answered, round, __ATOMIC_RELEASE);
    }
    return argument;
}

static void protect(void) {
    struct sigaction action = {.sa_handler = wait_for_page};
    sigaction(SIGSEGV, &action, 0);
    pthread_t thread;
    wanted = stop = 0;
    NEED(pthread_create(&thread, 0, write_always, 0) == 0);
    int before = test_failures;
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        uint32_t start = page[0];
        while (page[0] == start)
            ;
        STEP_EQUAL(mprotect((void *)page, PAGE, PROT_READ), 0);
        uint32_t kept = page[0];
        for (int read = 0; read < READS; read++)
            STEP_EQUAL(page[0], kept);
        // The writer has to notice by itself.
        while (__atomic_load_n(&faults, __ATOMIC_ACQUIRE) < round)
            ;
        STEP_EQUAL(page[0], kept);
        STEP_EQUAL(mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE), 0);
        __atomic_store_n(&wanted, round, __ATOMIC_RELEASE);
    }
    stop = 1;
    STEP_EQUAL(pthread_join(thread, 0), 0);
    ALL_STEPS(before, "no write arrives after mprotect");
}

static void replace(void) {
    pthread_t thread;
    wanted = answered = 0;
    NEED(pthread_create(&thread, 0, read_when_told, 0) == 0);
    int before = test_failures;
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        switch (round % 3) {
        case 0:
            STEP_EQUAL(munmap((void *)page, PAGE), 0);
            NEED(map((void *)page, MAP_FIXED) == page);
            break;
        case 1:
            NEED(map((void *)page, MAP_FIXED) == page);
            break;
        default:
            STEP_EQUAL(madvise((void *)page, PAGE, MADV_DONTNEED), 0);
        }
        page[0] = round;
        __atomic_store_n(&wanted, round, __ATOMIC_RELEASE);
        while (__atomic_load_n(&answered, __ATOMIC_ACQUIRE) < round)
            ;
        STEP_EQUAL(page[1], round + 1);
    }
    STEP_EQUAL(pthread_join(thread, 0), 0);
    ALL_STEPS(before, "both CPUs see the new page");
}

// A writer goes on while the process forks: the child's copy never changes.
static void copy(void) {
    pthread_t thread;
    stop = 0;
    NEED(pthread_create(&thread, 0, write_always, 0) == 0);
    int before = test_failures;
    for (int round = 0; round < 20; round++) {
        pid_t child = fork();
        NEED(child >= 0);
        if (child == 0) {
            uint32_t kept = page[0];
            int changes = 0;
            for (int read = 0; read < READS; read++)
                changes += page[0] != kept;
            _exit(changes != 0);
        }
        int status;
        STEP_EQUAL(waitpid(child, &status, 0), child);
        STEP_EQUAL(status, 0);
    }
    stop = 1;
    STEP_EQUAL(pthread_join(thread, 0), 0);
    ALL_STEPS(before, "a child's copy stays as it was");
}

static void *touch(void *argument) {
    unsigned seed = (unsigned)(intptr_t)argument;
    int before = test_failures;
    for (int round = 0; round < 60; round++) {
        size_t length = (1 + (seed = seed * 1103515245 + 12345) / 65536 % 64) * PAGE;
        char *at = mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        NEED(at != MAP_FAILED);
        for (size_t offset = 0; offset < length; offset += PAGE)
            at[offset] = (char)(seed + offset / PAGE);
        STEP_EQUAL(mprotect(at, length / 2, PROT_READ), 0);
        for (size_t offset = 0; offset < length; offset += PAGE)
            STEP_EQUAL(at[offset], (char)(seed + offset / PAGE));
        STEP_EQUAL(munmap(at, length), 0);
    }
    return (void *)(intptr_t)(test_failures - before);
}

int main(void) {
    test_start();
    page = map(0, 0);
    NEED((void *)page != MAP_FAILED);
    protect();
    replace();
    copy();
    pthread_t threads[4];
    int before = test_failures;
    for (int index = 0; index < 4; index++)
        NEED(pthread_create(&threads[index], 0, touch, (void *)(intptr_t)(index + 1)) == 0);
    for (int index = 0; index < 4; index++)
        STEP_EQUAL(pthread_join(threads[index], 0), 0);
    ALL_STEPS(before, "four threads map, fault, protect and unmap side by side");
    return test_end();
}
