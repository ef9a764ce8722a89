// Threads and processes on several CPUs change their memory at the same time:
// mmap, mprotect, madvise, mremap, brk and munmap, in ranges of their own and in
// one range of all. Signals arrive meanwhile, processes fork, execute and end,
// and one is killed. No content is lost, none is another's.
// The argument is the number of threads and of processes, 2 by default.
//
// cpus: 2
// memory: 64M

#include "test.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>

enum { PAGES = 16, ROUNDS = 60, COMMON = 32, MOST = 8 };

static int count = 2;
static volatile int stop;
static uint32_t *common[COMMON];
static pthread_barrier_t barrier;

static uint32_t mark(int who, uint32_t round, uint32_t page) {
    return (uint32_t)(who + 1) << 24 | (round & 0xfff) << 12 | page;
}

static uint32_t *page_of(void *at, uint32_t page) {
    return (uint32_t *)((char *)at + page * PAGE);
}

static void fill(void *at, int who, uint32_t round, uint32_t first, uint32_t end) {
    for (uint32_t page = first; page < end; page++)
        page_of(at, page)[page] = mark(who, round, page);
}

static int wrong(void *at, int who, uint32_t round, uint32_t first, uint32_t end) {
    int found = 0;
    for (uint32_t page = first; page < end; page++)
        found += page_of(at, page)[page] != mark(who, round, page);
    return found;
}

static int not_zero(void *at, uint32_t first, uint32_t end) {
    int found = 0;
    for (uint32_t page = first; page < end; page++)
        found += page_of(at, page)[page] != 0;
    return found;
}

static void *map(size_t pages) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    return mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
}

// One round of a thread in a range of its own. Returns the number of failures.
static int change_own(int who, uint32_t round) {
    int failed = 0;
    char *at = map(PAGES);
    if (at == MAP_FAILED)
        return 1;
    fill(at, who, round, 0, PAGES);
    failed += mprotect(at + PAGE, 4 * PAGE, PROT_READ) != 0;
    failed += wrong(at, who, round, 0, PAGES);
    failed += mprotect(at, PAGES * PAGE, PROT_READ | PROT_WRITE) != 0;
    failed += madvise(at + 2 * PAGE, 3 * PAGE, MADV_DONTNEED) != 0;
    failed += not_zero(at, 2, 5);
    fill(at, who, round, 2, 5);
    // The pages move, with a hole behind them.
    char *moved = mremap(at, PAGES * PAGE, 3 * PAGES * PAGE, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED)
        return failed + 1;
    failed += wrong(moved, who, round, 0, PAGES);
    failed += not_zero(moved, PAGES, 3 * PAGES);
    unsigned char resident[3 * PAGES];
    failed += mincore(moved, 3 * PAGES * PAGE, resident) != 0;
    failed += !resident[0] || !resident[PAGES - 1];
    failed += madvise(moved, 3 * PAGES * PAGE, MADV_COLD) != 0;
    failed += munmap(moved + PAGES * PAGE, PAGES * PAGE) != 0;
    failed += wrong(moved, who, round, 0, PAGES);
    failed += madvise(moved, PAGES * PAGE, MADV_FREE) != 0;
    fill(moved, who, round + 1, 0, PAGES);
    failed += wrong(moved, who, round + 1, 0, PAGES);
    failed += munmap(moved, PAGES * PAGE) != 0;
    failed += munmap(moved + 2 * PAGES * PAGE, PAGES * PAGE) != 0;
    return failed;
}

// One round in the range of all: each page is empty, or has the mark of a thread for it.
static int change_common(int who, uint32_t round) {
    int failed = 0;
    uint32_t first = (round * 5 + who * 3) % (COMMON - 6), end = first + 6;
    char *at = (char *)common[first];
    fill(common[0], who, round, first, end);
    switch (round % 4) {
    case 0:
        failed += mmap(at, 6 * PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at;
        break;
    case 1:
        failed += madvise(at, 6 * PAGE, MADV_DONTNEED) != 0;
        break;
    case 2:
        failed += madvise(at, 6 * PAGE, who % 2 ? MADV_FREE : MADV_RANDOM) != 0;
        break;
    default:
        failed += mprotect(at, 6 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) != 0;
        failed += mprotect(at, 6 * PAGE, PROT_READ | PROT_WRITE) != 0;
    }
    for (uint32_t page = 0; page < COMMON; page++) {
        uint32_t found = page_of(common[0], page)[page];
        failed += found != 0 && ((found & 0xfff) != page || found >> 24 > (uint32_t)count);
    }
    return failed;
}

static void *change(void *argument) {
    int who = (int)(intptr_t)argument, failed = 0;
    pthread_barrier_wait(&barrier);
    for (uint32_t round = 0; round < ROUNDS; round++)
        failed += change_own(who, round) + change_common(who, round);
    return (void *)(intptr_t)failed;
}

static volatile int handled;

static void handle(int signal) {
    (void)signal;
    handled++;
}

// Signals interrupt the threads' calls, and are handled on their way back.
static void threads(void) {
    pthread_t threads[MOST];
    int before = test_failures;
    char *at = map(COMMON);
    NEED(at != MAP_FAILED);
    for (int page = 0; page < COMMON; page++)
        common[page] = page_of(at, page);
    NEED(pthread_barrier_init(&barrier, 0, count + 1) == 0);
    NEED(signal(SIGUSR1, handle) != SIG_ERR);
    for (intptr_t index = 0; index < count; index++)
        NEED(pthread_create(&threads[index], 0, change, (void *)index) == 0);
    pthread_barrier_wait(&barrier);
    for (int round = 0; round < ROUNDS; round++) {
        pthread_kill(threads[round % count], SIGUSR1);
        STEP_EQUAL(change_own(MOST, round), 0);
    }
    for (int index = 0; index < count; index++) {
        void *failed;
        STEP_EQUAL(pthread_join(threads[index], &failed), 0);
        STEP_EQUAL((intptr_t)failed, 0);
    }
    STEP_EQUAL(handled > 0, 1);
    munmap(at, COMMON * PAGE);
    ALL_STEPS(before, "threads change the same memory");
}

static void *change_always(void *argument) {
    while (!stop)
        change_own((int)(intptr_t)argument, 1);
    return 0;
}

// Other threads change their memory while one forks: each child has a copy of its own.
static void forks(void) {
    pthread_t threads[MOST];
    int before = test_failures;
    char *at = map(PAGES);
    NEED(at != MAP_FAILED);
    for (intptr_t index = 0; index < count; index++)
        NEED(pthread_create(&threads[index], 0, change_always, (void *)index) == 0);
    for (uint32_t round = 0; round < ROUNDS / 6; round++) {
        fill(at, MOST, round, 0, PAGES);
        pid_t child = fork();
        NEED(child >= 0);
        if (child == 0) {
            int failed = wrong(at, MOST, round, 0, PAGES);
            failed += change_own(0, round);
            failed += wrong(at, MOST, round, 0, PAGES);
            _exit(failed != 0);
        }
        madvise(at, PAGES * PAGE, MADV_DONTNEED);
        STEP_EQUAL(not_zero(at, 0, PAGES), 0);
        int status;
        STEP_EQUAL(waitpid(child, &status, 0), child);
        STEP_EQUAL(status, 0);
    }
    stop = 1;
    for (int index = 0; index < count; index++)
        STEP_EQUAL(pthread_join(threads[index], 0), 0);
    munmap(at, PAGES * PAGE);
    ALL_STEPS(before, "fork beside the calls of other threads");
}

// The heap of a process grows and shrinks. Returns the number of failures.
static int change_heap(int who, uint32_t round) {
    long end = syscall(SYS_brk, 0), start = (end + PAGE - 1) / PAGE * PAGE;
    int failed = syscall(SYS_brk, start + 3 * PAGE) != start + 3 * PAGE;
    if (failed)
        return 1;
    failed += not_zero((void *)start, 0, 3);
    fill((void *)start, who, round, 0, 3);
    failed += wrong((void *)start, who, round, 0, 3);
    return failed + (syscall(SYS_brk, end) != end);
}

// A process of several that change their memory, and make processes.
static int process(int who) {
    int failed = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        failed += change_own(who, round) + change_heap(who, round);
        if (round % 20 != 19)
            continue;
        pid_t child = fork();
        if (child == 0) {
            char *arguments[] = {"/proc/self/exe", "1", "brief", 0};
            execv(arguments[0], arguments);
            _exit(1);
        }
        int status = 1;
        failed += waitpid(child, &status, 0) != child || status != 0;
    }
    return failed;
}

static void processes(void) {
    int before = test_failures;
    pid_t children[MOST];
    for (int index = 0; index < count; index++) {
        children[index] = fork();
        NEED(children[index] >= 0);
        if (children[index] == 0)
            _exit(process(index) != 0);
    }
    for (int index = 0; index < count; index++) {
        int status;
        STEP_EQUAL(waitpid(children[index], &status, 0), children[index]);
        STEP_EQUAL(status, 0);
    }
    ALL_STEPS(before, "processes that fork and execute");
}

// A process whose threads are all in calls is killed, or executes another program.
static void ends(void) {
    int before = test_failures;
    for (int round = 0; round < 8; round++) {
        int ready[2];
        NEED(pipe(ready) == 0);
        pid_t child = fork();
        NEED(child >= 0);
        if (child == 0) {
            pthread_t thread;
            stop = 0;
            for (intptr_t index = 0; index < count; index++)
                pthread_create(&thread, 0, change_always, (void *)index);
            write(ready[1], "", 1);
            for (int more = 0; round % 2 || more < 8; more++)
                change_own(MOST, more);
            char *arguments[] = {"/proc/self/exe", "1", "brief", 0};
            execv(arguments[0], arguments);
            _exit(1);
        }
        char byte;
        STEP_EQUAL(read(ready[0], &byte, 1), 1);
        close(ready[0]);
        close(ready[1]);
        for (int more = 0; more < 8; more++)
            STEP_EQUAL(change_own(0, more), 0);
        if (round % 2)
            kill(child, SIGKILL);
        int status;
        STEP_EQUAL(waitpid(child, &status, 0), child);
        STEP_EQUAL(status, round % 2 ? SIGKILL : 0);
    }
    ALL_STEPS(before, "ends of processes in the middle of calls");
}

int main(int number, char **arguments) {
    if (number > 2) {
        // The program that a process executes.
        int failed = 0;
        for (uint32_t round = 0; round < 4; round++)
            failed += change_own(0, round);
        return failed != 0;
    }
    test_start();
    if (number > 1)
        count = atoi(arguments[1]);
    NEED(count <= MOST);
    threads();
    forks();
    processes();
    ends();
    return test_end();
}
