// memory: 256M
// kernel-only: it needs a swap device that nobody else uses
//
// Shared memory in swap: memfds, files in /dev/shm, shared anonymous mappings
// and System V segments are paged out, and come back by every way to them.
// Passes on Linux with zram, as root and without other swap.

#include "settings.h"
#include "swap.h"

#include <sys/ipc.h>
#include <sys/sendfile.h>
#include <sys/shm.h>

#define FALLOC_FL_KEEP_SIZE 1
#define FALLOC_FL_PUNCH_HOLE 2
#define MIB ((size_t)1 << 20)
#define SIZE (2 * MIB)
#define DISK (32 * MIB)

static char text[200000];

static long meminfo(const char *name) {
    NEED(test_read_file("/proc/meminfo", text, sizeof text) > 0);
    char *line = strstr(text, name);
    return line ? atol(line + strlen(name) + 1) : -1;
}

// Of the whole machine, in KiB.
static long used(void) { return meminfo("SwapTotal") - meminfo("SwapFree"); }

static size_t resident(char *start, size_t size) {
    static unsigned char pages[SIZE / 4096];
    STEP_EQUAL(mincore(start, size, pages), 0);
    size_t count = 0;
    for (size_t at = 0; at < size / PAGE; at++)
        count += pages[at] & 1;
    return count;
}

// A third of the pages is zero, one is filled with one word, one is neither.
static uint64_t word(size_t at, uint64_t seed) {
    size_t page = at / 512;
    uint64_t words[] = {0, page ^ seed, at % 8 ? at : (at + seed) * 0x9E3779B97F4A7C15u};
    return words[page % 3];
}

static void fill(char *start, size_t size, uint64_t seed) {
    for (size_t at = 0; at < size / 8; at++)
        ((volatile uint64_t *)start)[at] = word(at, seed);
}

static int holds_from(const char *start, size_t first, size_t size, uint64_t seed) {
    for (size_t at = first / 8; at < (first + size) / 8; at++)
        if (((volatile const uint64_t *)start)[at] != word(at, seed))
            return 0;
    return 1;
}

static int holds(const char *start, size_t size, uint64_t seed) { return holds_from(start, 0, size, seed); }

static char *map(int file, int flags) {
    char *start = mmap(0, SIZE, PROT_READ | PROT_WRITE, flags, file, 0);
    NEED(start != MAP_FAILED);
    return start;
}

static void page_out(char *start, size_t size) {
    STEP_EQUAL(madvise(start, size, MADV_PAGEOUT), 0);
    STEP_EQUAL(resident(start, size), 0);
}

static int new_memory(void) {
    int file = memfd_create("swapped", 0);
    NEED(file >= 0);
    STEP_EQUAL(ftruncate(file, SIZE), 0);
    return file;
}

static uint64_t pagemap(const void *page) {
    uint64_t value = 1;
    int file = open("/proc/self/pagemap", O_RDONLY);
    STEP_EQUAL(pread(file, &value, 8, (uintptr_t)page / PAGE * 8), 8);
    close(file);
    return value;
}

static void out_and_in(int file, uint64_t seed, const char *what) {
    printf("# %s\n", what);
    STEP_EQUAL(ftruncate(file, SIZE), 0);
    char *memory = map(file, MAP_SHARED);
    fill(memory, SIZE, seed);
    struct stat before, after;
    STEP_EQUAL(fstat(file, &before), 0);
    long shared = meminfo("Shmem"), cached = meminfo("Cached");
    page_out(memory, SIZE);
    EQUAL(used(), SIZE / 1024, "all pages are out");
    // Linux counts with some pages of drift for each CPU.
    CHECK(labs(shared - meminfo("Shmem") - (long)(SIZE / 1024)) < 256, "Shmem");
    CHECK(labs(cached - meminfo("Cached") - (long)(SIZE / 1024)) < 256, "Cached");
    EQUAL(smaps(memory, "Swap"), SIZE / 1024, "smaps: Swap");
    EQUAL(smaps(memory, "SwapPss"), 0, "smaps: nobody knows whose");
    EQUAL(smaps(memory, "Rss"), 0, "smaps: Rss");
    EQUAL(pagemap(memory) >> 62, 0, "pagemap sees no entry");
    STEP_EQUAL(fstat(file, &after), 0);
    EQUAL(after.st_blocks, before.st_blocks, "st_blocks");
    EQUAL(lseek(file, PAGE, SEEK_DATA), PAGE, "SEEK_DATA");
    EQUAL(lseek(file, 0, SEEK_HOLE), SIZE, "SEEK_HOLE");
    CHECK(holds(memory, SIZE, seed), "contents come back");
    EQUAL(resident(memory, SIZE), SIZE / PAGE, "all pages are back");
    EQUAL(used(), 0, "and keep no slots");
    page_out(memory, SIZE);
    fill(memory, SIZE, seed + 1);
    CHECK(holds(memory, SIZE, seed + 1), "writes to swapped pages");
    page_out(memory, SIZE);
    STEP_EQUAL(munmap(memory, SIZE), 0);
    EQUAL(used(), SIZE / 1024, "what nobody maps stays out");
}

static void calls(void) {
    int file = new_memory(), other = new_memory();
    char *memory = map(file, MAP_SHARED), *copy = map(other, MAP_SHARED);
    static char buffer[SIZE];
    fill(memory, SIZE, 3);
    page_out(memory, SIZE);
    EQUAL(pread(file, buffer, SIZE, 0), SIZE, "read");
    CHECK(holds(buffer, SIZE, 3), "read: contents");
    STEP_EQUAL(munmap(memory, SIZE), 0);
    memory = map(file, MAP_SHARED);
    CHECK(holds(memory, SIZE, 3), "contents after that");
    page_out(memory, SIZE);
    fill(buffer, SIZE, 4);
    EQUAL(pwrite(file, buffer, 5 * PAGE + 8, 0), 5 * PAGE + 8, "write");
    CHECK(holds(memory, 5 * PAGE + 8, 4), "write: what was written");
    CHECK(holds_from(memory, 5 * PAGE + 8, SIZE - 5 * PAGE - 8, 3), "write: what was not");
    fill(memory, SIZE, 5);
    page_out(memory, SIZE);
    STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
    size_t sent = 0;
    for (ssize_t now; sent < SIZE && (now = sendfile(other, file, 0, SIZE - sent)) > 0;)
        sent += now;
    EQUAL(sent, SIZE, "sendfile");
    CHECK(holds(copy, SIZE, 5), "sendfile: contents");
    CHECK(holds(memory, SIZE, 5), "sendfile: the source");
    page_out(memory, SIZE);
    EQUAL(mlock(memory, SIZE), 0, "mlock");
    EQUAL(resident(memory, SIZE), SIZE / PAGE, "mlock: all pages are back");
    FAILS(madvise(memory, SIZE, MADV_PAGEOUT), EINVAL, "pageout of locked memory");
    STEP_EQUAL(munlock(memory, SIZE), 0);
    page_out(memory, SIZE);
    EQUAL(madvise(memory, SIZE, MADV_POPULATE_WRITE), 0, "populate");
    CHECK(holds(memory, SIZE, 5), "populate: contents");
    STEP_EQUAL(munmap(memory, SIZE), 0);
    STEP_EQUAL(munmap(copy, SIZE), 0);
    close(file);
    close(other);
    EQUAL(used(), 0, "calls: nothing is left in swap");
}

static void shrunk(void) {
    int file = new_memory();
    char *memory = map(file, MAP_SHARED);
    fill(memory, SIZE, 6);
    page_out(memory, SIZE);
    EQUAL(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, 8 * PAGE), 0, "a hole in what is out");
    EQUAL(used(), (SIZE - 8 * PAGE) / 1024, "its slots are free");
    EQUAL(memory[2 * PAGE + 5], 0, "it is zero");
    EQUAL(ftruncate(file, MIB + 12), 0, "a cut in the middle of a page");
    EQUAL(used() <= (long)((MIB - 8 * PAGE) / 1024), 1, "what was cut off is free");
    STEP_EQUAL(ftruncate(file, SIZE), 0);
    CHECK(holds_from(memory, 9 * PAGE, MIB - 9 * PAGE, 6), "what was left alone");
    EQUAL(((volatile uint64_t *)memory)[(MIB + 16) / 8], 0, "behind the cut");
    EQUAL(memory[MIB + PAGE + 5], 0, "behind its page");
    page_out(memory, MIB);
    close(file);
    STEP_EQUAL(munmap(memory, SIZE), 0);
    EQUAL(used(), 0, "the last holder frees the slots");
}

static void private_copies(void) {
    int file = new_memory();
    char *memory = map(file, MAP_SHARED), *own = map(file, MAP_PRIVATE);
    fill(memory, SIZE, 7);
    for (size_t at = 0; at < SIZE; at += 2 * PAGE)
        own[at] = 1;
    // Pages that only this process maps, once.
    page_out(memory, SIZE);
    int good = 1;
    for (size_t at = 0; at < SIZE; at += PAGE) {
        char expected = at / PAGE % 2 ? (char)word(at / 8, 7) : 1;
        good &= ((volatile char *)own)[at] == expected;
    }
    CHECK(good, "a private mapping of what is out");
    CHECK(holds(memory, SIZE, 7), "private: the shared pages");
    STEP_EQUAL(munmap(memory, SIZE), 0);
    STEP_EQUAL(munmap(own, SIZE), 0);
    close(file);
    EQUAL(used(), 0, "private: nothing is left in swap");
}

static void between_processes(void) {
    char *memory = map(-1, MAP_SHARED | MAP_ANONYMOUS);
    EXITS(0, "a child fills", { fill(memory, SIZE, 8); });
    CHECK(holds(memory, SIZE, 8), "its parent sees that");
    page_out(memory, SIZE);
    EXITS(0, "another child finds it, and writes", {
        STEP(holds(memory, SIZE, 8));
        fill(memory, SIZE / 2, 9);
    });
    CHECK(holds(memory, SIZE / 2, 9), "the parent sees it");
    CHECK(holds_from(memory, SIZE / 2, SIZE / 2, 8), "and the rest");
    STEP_EQUAL(munmap(memory, SIZE), 0);
    EQUAL(used(), 0, "processes: nothing is left in swap");
}

static void segments(void) {
    int id = shmget(IPC_PRIVATE, SIZE, IPC_CREAT | 0600);
    NEED(id >= 0);
    char *memory = shmat(id, 0, 0);
    NEED(memory != (char *)-1);
    STEP_EQUAL(shmctl(id, IPC_RMID, 0), 0);
    fill(memory, SIZE, 10);
    EQUAL(shmctl(id, SHM_LOCK, 0), 0, "SHM_LOCK");
    STEP_EQUAL(madvise(memory, SIZE, MADV_PAGEOUT), 0);
    EQUAL(resident(memory, SIZE), SIZE / PAGE, "a locked segment stays");
    STEP_EQUAL(shmctl(id, SHM_UNLOCK, 0), 0);
    page_out(memory, SIZE);
    struct shm_info information;
    STEP(shmctl(0, SHM_INFO, (void *)&information) >= 0);
    EQUAL(information.shm_swp, SIZE / PAGE, "SHM_INFO");
    EQUAL(shmctl(id, SHM_LOCK, 0), 0, "SHM_LOCK of what is out");
    CHECK(holds(memory, SIZE, 10), "segment: contents");
    STEP_EQUAL(shmdt(memory), 0);
    EQUAL(used(), 0, "segment: nothing is left in swap");
}

static void off(int file, uint64_t seed) {
    EQUAL(used(), SIZE / 1024, "a memfd is out that nobody maps");
    EQUAL(swap_end(), 0, "swapoff brings it back");
    char *memory = map(file, MAP_SHARED);
    EQUAL(resident(memory, SIZE), SIZE / PAGE, "it is in memory");
    CHECK(holds(memory, SIZE, seed), "swapoff: contents");
    STEP_EQUAL(munmap(memory, SIZE), 0);
}

int main(void) {
    test_start();
    NEED(swap_begin(DISK) == 0);
    int file = open("/dev/shm/swapped", O_RDWR | O_CREAT | O_EXCL, 0600);
    NEED(file >= 0);
    out_and_in(file, 11, "a file in /dev/shm");
    STEP_EQUAL(unlink("/dev/shm/swapped"), 0);
    close(file);
    EQUAL(used(), 0, "an unlinked file frees its slots");
    calls();
    shrunk();
    private_copies();
    between_processes();
    segments();
    file = new_memory();
    out_and_in(file, 1, "a memfd");
    off(file, 2);
    close(file);
    return test_end();
}
