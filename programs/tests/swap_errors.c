// memory: 64M
// clock: instructions
// option: swap-errors=16
// kernel-only: its swap device fails one transfer in 16
//
// A swap device with errors. A page that cannot be written stays in memory. A
// page that cannot be read is SIGBUS for the access that needs it, and EFAULT
// for a call; all others are right. A process that touches no such page
// continues, and so does one that has locked its memory.

#include "pressure.h"
#include "swap.h"

#define SIZE (8 * MIB)
#define PAGES (SIZE / PAGE)

static volatile struct counts {
    int right, lost;
} *counts;

static uint64_t content(size_t page) { return page * 0x9e3779b97f4a7c15u | 1; }

// Two words, so that no page repeats only one word.
static char *filled(size_t size) {
    char *area = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(area != MAP_FAILED);
    for (size_t page = 0; page < size / PAGE; page++) {
        uint64_t *words = (uint64_t *)(area + page * PAGE);
        struct test_fault fault = test_access(words, STORE);
        // When memory is short, this page may have been swapped out and lost.
        if (fault.signal)
            continue;
        words[0] = content(page);
        words[1] = page;
    }
    return area;
}

// Counts the pages that are right, and those that are lost; there is nothing else.
static struct counts look(char *area, size_t size) {
    struct counts found = {0, 0};
    for (size_t page = 0; page < size / PAGE; page++) {
        uint64_t *words = (uint64_t *)(area + page * PAGE);
        struct test_fault fault = test_access(words, LOAD);
        if (fault.signal == 0) {
            STEP(words[0] == content(page) && words[1] == page);
            found.right++;
        } else {
            STEP(fault.signal == SIGBUS && fault.code == BUS_ADRERR && fault.address == (void *)words);
            found.lost++;
        }
    }
    return found;
}

static size_t resident(char *area) {
    static unsigned char pages[PAGES];
    STEP_EQUAL(mincore(area, SIZE, pages), 0);
    size_t count = 0;
    for (size_t page = 0; page < PAGES; page++)
        count += pages[page] & 1;
    return count;
}

// Reads all pages, without a handler.
static void touch(char *area) {
    for (size_t page = 0; page < PAGES; page++)
        (void)*(volatile char *)(area + page * PAGE);
}

// Writes all pages to a pipe's end, page by page: `EFAULT` for those that are lost.
static void write_out(char *area) {
    int file = open("/dev/null", O_WRONLY), ends[2];
    NEED(file >= 0 && pipe(ends) == 0);
    static char copy[PAGE];
    int lost = 0;
    for (size_t page = 0; page < PAGES; page++) {
        ssize_t written = write(ends[1], area + page * PAGE, PAGE);
        if (written < 0) {
            STEP(errno == EFAULT);
            lost++;
        } else {
            STEP(written == PAGE && read(ends[0], copy, PAGE) == PAGE);
            STEP(*(uint64_t *)copy == content(page));
        }
    }
    counts->lost = lost;
}

int main(void) {
    test_start();
    struct shared *shared = pressure_shared();
    counts = (struct counts *)pressure_shared();
    NEED(swap_begin(32 * MIB) == 0);
    pid_t bystander = CHILD({
        NEED(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
        pressure_sleeper(shared);
    });

    char *area = filled(SIZE);
    STEP_EQUAL(madvise(area, SIZE, MADV_PAGEOUT), 0);
    size_t stayed = resident(area);
    CHECK(stayed > 0 && stayed <= PAGES / 8, "what could not be written stays in memory");
    pid_t without = CHILD(touch(area)), calls = CHILD(write_out(area));
    pid_t reader = CHILD({
        struct counts found = look(area, SIZE);
        *counts = found;
        _exit(found.lost == 0);
    });
    int status = test_wait(without);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS, "a lost page is SIGBUS");
    status = test_wait(calls);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "EFAULT for a call, and nothing else is wrong");
    status = test_wait(reader);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "SIGBUS at the page; all others are right");
    struct counts found = look(area, SIZE);
    CHECK(found.right + found.lost == PAGES && found.lost > 0 && found.lost <= PAGES / 8,
          "the parent finds what the children did");
    STEP_EQUAL(madvise(area, SIZE, MADV_DONTNEED), 0);
    CHECK(area[0] == 0 && area[SIZE - 1] == 0, "pages that are given back are fresh");
    munmap(area, SIZE);

    // This process must not lose a page of its own: waitpid(2) stores the status to its stack.
    NEED(mlockall(MCL_CURRENT) == 0);
    uint64_t naps = shared->naps;
    pid_t hog = CHILD({
        char *large = filled(64 * MIB);
        struct counts seen = look(large, 64 * MIB);
        _exit(seen.right == 0);
    });
    shared->begins = 1;
    status = test_wait(hog);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0) || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL),
          "more than there is memory for: each page is right or lost");
    CHECK(shared->naps > naps, "the bystander lives");
    shared->ends = 1;
    status = test_wait(bystander);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "and ends as it wants to");
    // The process's own pages in the area may be lost.
    STEP(swap_end() == 0 || errno == EIO);
    return test_end();
}
