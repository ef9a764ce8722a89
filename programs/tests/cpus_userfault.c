// Threads on several CPUs fault on pages that a userfaultfd serves, while handlers
// fill them by UFFDIO_COPY, UFFDIO_MOVE and UFFDIO_ZEROPAGE, lift write protection,
// and another thread drops and protects them. A fault never finds other content
// than its handler gave. The arguments are those of every storm.
//
// cpus: 2

#include "storm.h"
#include "userfault.h"

enum { PAGES = 64, HANDLERS = 2 };

static int fd, stop[2];
static char *memory;
static volatile uint64_t served;

// The second word of a page that a thread has written.
static uint64_t written(size_t page) { return ~(uint64_t)page; }

// The page is as its handler made it, and may have been written since.
static int is_right(size_t page) {
    volatile uint64_t *words = (uint64_t *)(memory + page * PAGE);
    uint64_t first = words[0], last = words[511];
    // Pages are dropped and served again between the two.
    return (first == 0 || first == storm_mark(0, 0, page)) &&
           (last == 0 || last == storm_mark(0, 0, page) || last == written(page));
}

static void *fault_always(void *argument) {
    intptr_t who = (intptr_t)argument, failed = 0;
    unsigned seed = 1 + who;
    while (!storm_over) {
        seed = seed * 1103515245 + 12345;
        size_t page = seed / 65536 % PAGES;
        failed += !is_right(page);
        if (seed / 8 % 2)
            *(volatile uint64_t *)(memory + page * PAGE + 511 * 8) = written(page);
    }
    return (void *)failed;
}

// The errors of a fill beside others: another one was first, or the memory changes.
static int is_beside(int64_t result) {
    return result == (int64_t)PAGE || result == -EEXIST || result == -EAGAIN;
}

static int serve(uint64_t address, char *source, unsigned way) {
    char *to = memory + ((address - (uintptr_t)memory) & -PAGE);
    size_t page = (to - memory) / PAGE;
    uint64_t *words = (uint64_t *)source;
    words[0] = words[511] = storm_mark(0, 0, page);
    int64_t result = way == 0   ? uf_copy(fd, to, source, PAGE, 0)
                     : way == 1 ? uf_move(fd, to, source, PAGE, 0)
                                : uf_zero(fd, to, PAGE, 0);
    if (!is_beside(result))
        test_print("FAIL way %u: %lld", way, (long long)result);
    // The fill that was first may have woken this fault before it waited.
    return !is_beside(result) + (result < 0 && uf_wake(fd, to, PAGE) != 0);
}

static void *handle(void *argument) {
    intptr_t failed = 0;
    unsigned way = (intptr_t)argument;
    char *source = test_map(PAGE);
    struct pollfd waits[2] = {{.fd = fd, .events = POLLIN}, {.fd = stop[0], .events = POLLIN}};
    for (;;) {
        NEED(poll(waits, 2, -1) > 0);
        struct uf_message message;
        if (read(fd, &message, sizeof message) == sizeof message) {
            NEED(message.event == FAULT);
            if (message.fault.flags & FLAG_PROTECTED) {
                char *at = (char *)(message.fault.address & -PAGE);
                int result = uf_protect(fd, at, PAGE, 0);
                failed += result != 0 && errno != EAGAIN && errno != ENOENT;
            } else {
                failed += serve(message.fault.address, source, way++ % 3);
            }
            served++;
        } else if (waits[1].revents) {
            break;
        }
    }
    munmap(source, PAGE);
    return (void *)failed;
}

static void drop(uint64_t round) {
    size_t first = round * 7 % PAGES, count = 1 + round % 9;
    if (first + count > PAGES)
        count = PAGES - first;
    STEP_EQUAL(madvise(memory + first * PAGE, count * PAGE, MADV_DONTNEED), 0);
    // Others may fault meanwhile: then the call asks to be made again.
    STEP(uf_protect(fd, memory + first * PAGE, count * PAGE, 1) == 0 || errno == EAGAIN);
}

static void protect(uint64_t round) {
    size_t first = round * 5 % (PAGES - 8);
    STEP(uf_protect(fd, memory + first * PAGE, 8 * PAGE, 1) == 0 || errno == EAGAIN);
    if (round % 8 == 0)
        drop(round / 8);
}

static void storm(void (*beside)(uint64_t round), const char *what) {
    pthread_t threads[STORM_MOST], handlers[HANDLERS];
    int before = test_failures;
    uint64_t round = 0;
    storm_begin();
    served = 0;
    NEED(pipe(stop) == 0);
    for (intptr_t index = 0; index < HANDLERS; index++)
        NEED(pthread_create(&handlers[index], 0, handle, (void *)index) == 0);
    storm_threads(threads, fault_always);
    do
        beside(round++);
    while (storm_goes_on() || served < 50);
    storm_join(threads);
    NEED(write(stop[1], "", 1) == 1);
    for (int index = 0; index < HANDLERS; index++) {
        void *failed;
        STEP_EQUAL(pthread_join(handlers[index], &failed), 0);
        STEP_EQUAL((intptr_t)failed, 0);
    }
    close(stop[0]);
    close(stop[1]);
    ALL_STEPS(before, what);
}

int main(int count, char **arguments) {
    storm_start(count, arguments);
    fd = uf_open(O_NONBLOCK, MOVES);
    NEED(fd >= 0);
    memory = test_map(PAGES * PAGE);
    NEED(uf_register(fd, memory, PAGES * PAGE, MISSING | PROTECTED) == 0);
    storm(drop, "handlers fill the pages that threads fault on");
    storm(protect, "and lift the protection of those that threads write");
    close(fd);
    return test_end();
}
