// ioctl(PAGEMAP_SCAN) of /proc/self/pagemap: regions by category, limits, and pages that are
// protected as they are reported, beside a thread that writes them. Passes on Linux as root.

#include "userfault.h"

#define PAGES 64

struct scan {
    uint64_t size, flags, start, end, walk_end, room, length, pages;
    uint64_t inverted, required, any_of, reported;
};
struct region {
    uint64_t start, end, categories;
};
#define SCAN _IOWR('f', 16, struct scan)

enum { PROTECTABLE = 1, WRITTEN = 2, PRESENT = 8, SWAPPED = 16, ZERO = 32 };
enum { PROTECT = 1, REFUSE = 2 };

static int pagemap;
static char *memory;
static struct region found[PAGES];
static struct scan last;

// How many regions there are, or an errno below 0.
static int scan(struct scan asked) {
    asked.size = sizeof asked;
    asked.start = (uintptr_t)memory;
    asked.end = (uintptr_t)memory + PAGES * PAGE;
    last = asked;
    int count = ioctl(pagemap, SCAN, &last);
    return count < 0 ? -errno : count;
}

static int written(uint64_t flags) {
    return scan((struct scan){.flags = flags, .room = (uintptr_t)found, .length = PAGES,
                              .required = WRITTEN, .reported = WRITTEN | PRESENT});
}

static uint64_t page_of(uint64_t address) { return (address - (uintptr_t)memory) / PAGE; }

static volatile int stop;

static void *count_up(void *unused) {
    (void)unused;
    while (!stop)
        for (int page = 0; page < 16 && !stop; page++)
            memory[page * PAGE]++;
    return 0;
}

// Copies what was written since the last scan.
static void save(char *copy) {
    int count = written(PROTECT);
    for (int region = 0; region < count; region++)
        for (uint64_t page = page_of(found[region].start); page < page_of(found[region].end); page++)
            copy[page] = memory[page * PAGE];
}

// A copy that is kept up to date beside a thread that writes has all that it has written.
static int stale_pages(void) {
    static char copy[PAGES];
    int stale = 0;
    for (int page = 0; page < PAGES; page++)
        copy[page] = memory[page * PAGE];
    for (int times = 0; times < 20; times++) {
        pthread_t thread;
        stop = 0;
        NEED(pthread_create(&thread, 0, count_up, 0) == 0);
        for (int round = 0; round < 50; round++)
            save(copy);
        stop = 1;
        pthread_join(thread, 0);
        save(copy);
        for (int page = 0; page < 16; page++)
            stale += copy[page] != memory[page * PAGE];
    }
    return stale;
}

int main(void) {
    test_start();
    pagemap = open("/proc/self/pagemap", O_RDONLY);
    NEED(pagemap >= 0);
    memory = uf_map(PAGES * PAGE);
    int fd = uf_open(0, ASYNC | UNPOPULATED);
    EQUAL(uf_register(fd, memory, PAGES * PAGE, PROTECTED), 0, "register");
    EQUAL(uf_protect(fd, memory, PAGES * PAGE, 1), 0, "protect");
    EQUAL(written(0), 0, "nothing is written");
    memory[2 * PAGE] = memory[3 * PAGE] = memory[9 * PAGE] = 1;
    EQUAL(written(PROTECT | REFUSE), 2, "two stretches are written");
    EQUAL(page_of(found[0].start), 2, "the first begins here");
    EQUAL(page_of(found[0].end), 4, "it ends here");
    EQUAL(found[1].categories, WRITTEN | PRESENT, "what it is");
    EQUAL(page_of(last.walk_end), PAGES, "the end");
    EQUAL(written(0), 0, "they are protected again");
    memory[3 * PAGE] = memory[9 * PAGE] = memory[20 * PAGE] = 2;
    struct scan limited = {.room = (uintptr_t)found, .length = 1, .required = WRITTEN, .reported = WRITTEN};
    EQUAL(scan(limited), 1, "room for one region");
    EQUAL(page_of(last.walk_end), 9, "it ends at the next");
    limited.length = 3;
    limited.pages = 2;
    EQUAL(scan(limited), 2, "two pages at the most");
    EQUAL(page_of(last.walk_end), 20, "it ends at the third");
    EQUAL(scan((struct scan){.flags = PROTECT, .pages = 1, .required = WRITTEN}), 0, "protect without a report");
    EQUAL(written(0), 0, "all of them");

    volatile char zero = memory[40 * PAGE];
    (void)zero;
    struct scan zeroes = {.room = (uintptr_t)found, .length = 8, .required = ZERO, .reported = ZERO | PROTECTABLE};
    EQUAL(scan(zeroes), 1, "the zero page");
    EQUAL(found[0].categories, ZERO | PROTECTABLE, "what it is");
    struct scan markers = {.room = (uintptr_t)found, .length = 8, .inverted = PRESENT,
                           .required = PRESENT | SWAPPED, .reported = SWAPPED};
    CHECK(scan(markers) >= 3, "markers, and no pages");

    EQUAL(scan((struct scan){.flags = 4}), -EINVAL, "an unknown flag");
    EQUAL(scan((struct scan){.required = 1 << 20}), -EINVAL, "an unknown category");
    EQUAL(scan((struct scan){.length = 1}), -EINVAL, "room that is nowhere");
    memory[5 * PAGE] = 1;
    struct scan bad = {.room = 8, .length = 1, .required = WRITTEN};
    EQUAL(scan(bad), -EFAULT, "room that cannot be written");
    EQUAL(uf_unregister(fd, memory + 60 * PAGE, PAGE), 0, "unregister a page");
    EQUAL(written(REFUSE), -EPERM, "not all can be protected");

    EQUAL(stale_pages(), 0, "no write is missed");
    return test_end();
}
