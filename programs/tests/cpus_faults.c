// Threads on several CPUs fault at the same time: on pages of their own and on
// the same ones, on copies after fork, on pages of a memfd and of a file of the
// disk. Another thread drops, protects and unmaps beside them. No content is lost.
// The argument is the number of threads, 2 by default.
//
// cpus: 2
// disk: 16M
// kernel-only: it needs the kernel's disk

#include "test.h"

#include <pthread.h>

enum { PAGES = 48, ROUNDS = 9, MOST_THREADS = 8, WORDS = PAGE / 4 };

typedef uint32_t Page[WORDS];

static Page *pages, *copies;
static uint32_t thread_count = 2;
static volatile uint32_t stop;
static pthread_barrier_t barrier;

// The rounds of the threads and of main: each has the turn between two barriers.
static void meet(void) { pthread_barrier_wait(&barrier); }

static Page *map(size_t count, int flags, int file) {
    int prot = PROT_READ | PROT_WRITE;
    void *at = mmap(0, count * PAGE, prot, flags | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
    NEED(at != MAP_FAILED);
    return at;
}

static uint32_t mark(uint32_t round, uint32_t thread, uint32_t page) {
    return round << 16 | thread << 12 | page;
}

// Writes a word of each page, every other thread from behind.
static void write_words(Page *at, uint32_t round, uint32_t thread) {
    for (uint32_t index = 0; index < PAGES; index++) {
        uint32_t page = thread % 2 ? PAGES - 1 - index : index;
        at[page][thread] = mark(round, thread, page);
    }
}

static int wrong_words(Page *at, uint32_t round, uint32_t thread) {
    int wrong = 0;
    for (uint32_t page = 0; page < PAGES; page++)
        wrong += at[page][thread] != mark(round, thread, page);
    return wrong;
}

static int wrong_pages(Page *at, uint32_t round) {
    int wrong = 0;
    for (uint32_t thread = 0; thread < thread_count; thread++)
        wrong += wrong_words(at, round, thread);
    return wrong;
}

// All write all pages in each round, and see what all have written.
static void *write_together(void *argument) {
    uint32_t thread = (uint32_t)(intptr_t)argument;
    int wrong = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        meet();
        write_words(pages, round, thread);
        wrong += wrong_words(pages, round, thread);
        meet();
        wrong += wrong_pages(pages, round);
        meet();
    }
    return (void *)(intptr_t)wrong;
}

// Runs the threads, and `between` at the end of each round, when they wait.
static void run(void *(*thread)(void *), void (*between)(uint32_t round), const char *what) {
    pthread_t threads[MOST_THREADS];
    int before = test_failures;
    NEED(pthread_barrier_init(&barrier, 0, thread_count + 1) == 0);
    for (uintptr_t index = 0; index < thread_count; index++)
        NEED(pthread_create(&threads[index], 0, thread, (void *)index) == 0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        meet();
        meet();
        between(round);
        meet();
    }
    for (uint32_t index = 0; index < thread_count; index++) {
        void *wrong;
        STEP_EQUAL(pthread_join(threads[index], &wrong), 0);
        STEP_EQUAL((intptr_t)wrong, 0);
    }
    pthread_barrier_destroy(&barrier);
    ALL_STEPS(before, what);
}

// Beside the threads' second look at the pages, which changes none.
static void look(uint32_t round) { STEP_EQUAL(wrong_pages(pages, round), 0); }

static void *in_turn(void *argument) {
    uint32_t thread = (uint32_t)(intptr_t)argument;
    int wrong = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        meet();
        write_words(pages, round, thread);
        meet();
        // main has the turn.
        meet();
    }
    return (void *)(intptr_t)wrong;
}

// All pages are missing again in the next round.
static void drop(uint32_t round) {
    STEP_EQUAL(wrong_pages(pages, round), 0);
    STEP_EQUAL(madvise(pages, PAGES * PAGE, MADV_DONTNEED), 0);
    STEP_EQUAL(pages[round % PAGES][0], 0);
}

static int file;

static void read_file(uint32_t round) {
    static Page found;
    uint32_t page = round * 7 % PAGES;
    STEP_EQUAL(pread(file, found, PAGE, page * PAGE), PAGE);
    for (uint32_t thread = 0; thread < thread_count; thread++)
        STEP_EQUAL(found[thread], mark(round, thread, page));
}

// The pages of the file leave memory, or only the mapping, and are read again.
static void store(uint32_t round) {
    read_file(round);
    STEP_EQUAL(madvise(pages, PAGES * PAGE, MADV_DONTNEED), 0);
    if (round % 3 == 0) {
        STEP_EQUAL(fsync(file), 0);
        STEP_EQUAL(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
    }
    STEP_EQUAL(wrong_pages(pages, round), 0);
    STEP_EQUAL(madvise(pages, PAGES * PAGE, MADV_DONTNEED), 0);
}

// The threads write while a child, which has the same pages, reads and writes its own.
static void *write_after_fork(void *argument) {
    uint32_t thread = (uint32_t)(intptr_t)argument;
    int wrong = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        meet();
        write_words(copies, round, thread);
        wrong += wrong_words(copies, round, thread);
        meet();
        meet();
    }
    return (void *)(intptr_t)wrong;
}

static void copy(void) {
    pthread_t threads[MOST_THREADS];
    int before = test_failures;
    NEED(pthread_barrier_init(&barrier, 0, thread_count + 1) == 0);
    for (uintptr_t index = 0; index < thread_count; index++)
        NEED(pthread_create(&threads[index], 0, write_after_fork, (void *)index) == 0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t thread = 0; thread < thread_count; thread++)
            write_words(copies, ROUNDS + round, thread);
        pid_t child = fork();
        NEED(child >= 0);
        if (child == 0) {
            int wrong = wrong_pages(copies, ROUNDS + round);
            write_words(copies, 2 * ROUNDS + round, 0);
            wrong += wrong_words(copies, 2 * ROUNDS + round, 0);
            wrong += wrong_words(copies, ROUNDS + round, 1);
            _exit(wrong != 0);
        }
        meet();
        meet();
        STEP_EQUAL(wrong_pages(copies, round), 0);
        int status;
        STEP_EQUAL(waitpid(child, &status, 0), child);
        STEP_EQUAL(status, 0);
        meet();
    }
    for (uint32_t index = 0; index < thread_count; index++) {
        void *wrong;
        STEP_EQUAL(pthread_join(threads[index], &wrong), 0);
        STEP_EQUAL((intptr_t)wrong, 0);
    }
    pthread_barrier_destroy(&barrier);
    ALL_STEPS(before, "each process has its own copies");
}

// Reads a private mapping of the file, and writes pages of its own, until the end.
static void *fault_always(void *argument) {
    uint32_t thread = (uint32_t)(intptr_t)argument;
    int wrong = 0;
    for (uint32_t round = 0; !stop; round++) {
        for (uint32_t page = 0; page < PAGES; page++)
            wrong += pages[page][MOST_THREADS] != mark(0, MOST_THREADS, page);
        Page *own = map(PAGES, MAP_PRIVATE, -1);
        write_words(own, round, thread);
        wrong += madvise(own[PAGES / 2], PAGES / 2 * PAGE, MADV_DONTNEED) != 0;
        for (uint32_t page = 0; page < PAGES; page++)
            wrong += own[page][thread] != (page < PAGES / 2 ? mark(round, thread, page) : 0);
        wrong += munmap(own, PAGES * PAGE) != 0;
    }
    return (void *)(intptr_t)wrong;
}

// Changes the mapping that the threads read, and the one behind it.
static void change(void) {
    pthread_t threads[MOST_THREADS];
    int before = test_failures;
    pages = map(2 * PAGES, MAP_PRIVATE, file);
    for (uintptr_t index = 0; index < thread_count; index++)
        NEED(pthread_create(&threads[index], 0, fault_always, (void *)index) == 0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        Page *behind = pages + PAGES;
        int prot = round % 2 ? PROT_READ | PROT_WRITE : PROT_READ;
        STEP_EQUAL(mprotect(pages[round % PAGES], PAGE * (PAGES - round % PAGES), prot), 0);
        STEP_EQUAL(madvise(pages, PAGES * PAGE, MADV_DONTNEED), 0);
        void *again = mmap(behind, PAGES * PAGE, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_FIXED, file, PAGES * PAGE);
        STEP_EQUAL(again == behind, 1);
        write_words(behind, round, 0);
        STEP_EQUAL(wrong_words(behind, round, 0), 0);
    }
    stop = 1;
    for (uint32_t index = 0; index < thread_count; index++) {
        void *wrong;
        STEP_EQUAL(pthread_join(threads[index], &wrong), 0);
        STEP_EQUAL((intptr_t)wrong, 0);
    }
    ALL_STEPS(before, "faults beside mprotect, mmap and MADV_DONTNEED");
}

static int sized_file(int descriptor) {
    NEED(descriptor >= 0);
    NEED(ftruncate(descriptor, 2 * PAGES * PAGE) == 0);
    return descriptor;
}

int main(int count, char **arguments) {
    test_start();
    if (count > 1)
        thread_count = atoi(arguments[1]);
    NEED(thread_count <= MOST_THREADS);
    pages = map(PAGES, MAP_PRIVATE, -1);
    run(in_turn, drop, "threads make the same pages");
    run(write_together, look, "and see each other's words");
    copies = pages;
    copy();

    file = sized_file(memfd_create("pages", 0));
    pages = map(PAGES, MAP_SHARED, file);
    run(in_turn, read_file, "pages of a memfd");
    file = sized_file(open("/disk/pages", O_RDWR | O_CREAT, 0600));
    pages = map(PAGES, MAP_SHARED, file);
    run(in_turn, store, "pages of a file of the disk");
    for (uint32_t page = 0; page < PAGES; page++)
        pages[page][MOST_THREADS] = mark(0, MOST_THREADS, page);
    change();
    return test_end();
}
