// memory: 256M
//
// The huge zero page: what a first read maps where a huge page would fit,
// as /proc shows it, and what the first write and every call make of it.

#include "settings.h"

#define SIZE ((size_t)2 << 20)

enum { MMAP = 11, ANON = 12, THP = 22, ZERO_PAGE = 24 };

static char text[200000];

static long vmstat(const char *name) {
    NEED(test_read_file("/proc/vmstat", text, sizeof text) > 0);
    size_t length = strlen(name);
    for (char *at = text; *at; at = strchr(at, '\n') + 1)
        if (strncmp(at, name, length) == 0 && at[length] == ' ')
            return atol(at + length + 1);
    return -1;
}

static uint64_t word(const char *path, uint64_t number) {
    uint64_t value = ~0ULL;
    int file = open(path, O_RDONLY);
    STEP(file >= 0);
    STEP_EQUAL(pread(file, &value, 8, number * 8), 8);
    close(file);
    return value;
}

static uint64_t entry(const void *page) { return word("/proc/self/pagemap", (uintptr_t)page / PAGE); }

static uint64_t frame(const void *page) { return entry(page) & ((1ULL << 55) - 1); }

static int has(const void *page, int bit) { return word("/proc/kpageflags", frame(page)) >> bit & 1; }

// Untouched memory of its own mapping that wants huge pages.
static char *area(size_t count) {
    char *memory = test_map((count + 2) * SIZE);
    char *aligned = (char *)(((uintptr_t)memory + SIZE) & ~(uintptr_t)(SIZE - 1));
    STEP_EQUAL(munmap(memory, aligned - memory), 0);
    STEP_EQUAL(munmap(aligned + count * SIZE, memory + (count + 2) * SIZE - (aligned + count * SIZE)), 0);
    STEP_EQUAL(madvise(aligned, count * SIZE, MADV_HUGEPAGE), 0);
    return aligned;
}

static int all_zero(const char *from, size_t length) {
    for (size_t at = 0; at < length; at += PAGE)
        if (((volatile const char *)from)[at])
            return 0;
    return 1;
}

static int is_huge_zero(const void *page) { return has(page, ZERO_PAGE) && has(page, THP); }

static void reads_and_writes(void) {
    char *memory = area(2);
    CHECK(all_zero(memory, 2 * SIZE), "untouched memory reads as zeroes");
    CHECK(is_huge_zero(memory) && is_huge_zero(memory + SIZE - PAGE) && !has(memory, ANON) && !has(memory, MMAP),
          "kpageflags: a huge zero page");
    EQUAL(frame(memory + 5 * PAGE), frame(memory) + 5, "pagemap: each page has its frame");
    EQUAL(frame(memory + SIZE), frame(memory), "pagemap: both are the same");
    EQUAL(entry(memory) >> 62, 2, "pagemap: present");
    EQUAL(word("/proc/kpagecount", frame(memory)), 0, "kpagecount: mapped by nobody");
    unsigned char resident[1024];
    NEED(mincore(memory, 2 * SIZE, resident) == 0);
    CHECK(resident[0] && resident[700], "mincore: resident");
    EQUAL(smaps(memory, "Rss"), 0, "smaps: nothing is resident");
    EQUAL(smaps(memory, "AnonHugePages"), 0, "smaps: there is no huge page");
    long faults = vmstat("thp_fault_alloc");
    memory[17 * PAGE] = 1;
    EQUAL(vmstat("thp_fault_alloc"), faults + 1, "a write brings a huge page");
    EQUAL(smaps(memory, "AnonHugePages"), 2048, "smaps: a huge page");
    CHECK(has(memory, ANON) && has(memory, THP) && !has(memory, ZERO_PAGE), "kpageflags: it is anonymous");
    CHECK(memory[17 * PAGE] == 1 && all_zero(memory, 17 * PAGE) && all_zero(memory + 18 * PAGE, 2 * SIZE - 18 * PAGE),
          "it has the byte, and zeroes elsewhere");
    CHECK(is_huge_zero(memory + SIZE), "the other stays");
    EXITS(0, "a child reads it and writes it",
          STEP(memory[SIZE] == 0 && is_huge_zero(memory + SIZE));
          memory[SIZE + 9] = 5; STEP(memory[SIZE + 9] == 5 && !is_huge_zero(memory + SIZE)));
    CHECK(is_huge_zero(memory + SIZE) && memory[SIZE + 9] == 0, "its parent's is as it was");
    munmap(memory, 2 * SIZE);
}

static void calls(void) {
    char *memory = area(1);
    STEP(memory[0] == 0 && is_huge_zero(memory));
    STEP_EQUAL(mprotect(memory, SIZE, PROT_NONE), 0);
    STEP_EQUAL(mprotect(memory, SIZE, PROT_READ), 0);
    CHECK(is_huge_zero(memory), "mprotect of all: it stays");
    EQUAL(STORES(memory), SIGSEGV, "read-only: no write");
    STEP_EQUAL(mprotect(memory, 16 * PAGE, PROT_READ | PROT_WRITE), 0);
    memory[3 * PAGE] = 7;
    CHECK(memory[3 * PAGE] == 7 && all_zero(memory + 4 * PAGE, SIZE - 4 * PAGE), "mprotect of a part, and a write there");
    EQUAL(smaps(memory, "AnonHugePages"), 0, "it was cut: no huge page fits");
    EQUAL(smaps(memory, "Rss"), 4, "one page is resident");
    munmap(memory, SIZE);

    memory = area(1);
    char *there = area(1), *odd = area(2);
    STEP(memory[0] == 0 && is_huge_zero(memory));
    there = mremap(memory, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, there);
    NEED(there != MAP_FAILED);
    CHECK(is_huge_zero(there), "mremap: it moves whole");
    odd = mremap(there, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, odd + PAGE);
    NEED(odd != MAP_FAILED);
    CHECK(has(odd, ZERO_PAGE) && all_zero(odd, SIZE), "mremap by a page: it is cut");
    memset(odd, 3, SIZE);
    CHECK(odd[0] == 3 && odd[SIZE - 1] == 3, "and can be written");
    munmap(odd, SIZE);

    memory = area(1);
    STEP(memory[0] == 0 && is_huge_zero(memory));
    STEP_EQUAL(madvise(memory, PAGE, MADV_DONTNEED), 0);
    CHECK(!(entry(memory) >> 63) && has(memory + PAGE, ZERO_PAGE) && all_zero(memory, SIZE), "MADV_DONTNEED of a page");
    STEP_EQUAL(munmap(memory + 8 * PAGE, 8 * PAGE), 0);
    CHECK(all_zero(memory, 8 * PAGE) && all_zero(memory + 16 * PAGE, SIZE - 16 * PAGE), "munmap of a part");
    munmap(memory, SIZE);

    memory = area(1);
    STEP(memory[0] == 0 && is_huge_zero(memory));
    STEP_EQUAL(mlock(memory, SIZE), 0);
    EQUAL(smaps(memory, "AnonHugePages"), 2048, "mlock writes what may be written");
    munmap(memory, SIZE);
}

int main(void) {
    test_start();
    char before[8] = {0};
    int file = open(THP_ROOT "use_zero_page", O_RDONLY);
    NEED(file >= 0 && read(file, before, 2) == 2);
    close(file);
    EQUAL(before[0], '1', "use_zero_page: it is used");
    FAILS(write_thp("use_zero_page", "2"), EINVAL, "use_zero_page: another number is refused");
    FAILS(write_thp("use_zero_page", "yes"), EINVAL, "use_zero_page: a word is refused");
    NEED(test_read_file(THP_ROOT "enabled", text, sizeof text) > 0);
    int never = strstr(text, "[never]") != 0;
    if (never)
        STEP(write_thp("enabled", "madvise") > 0);
    reads_and_writes();
    calls();
    CHECK(vmstat("thp_zero_page_alloc") >= 1, "thp_zero_page_alloc: it was made");

    STEP_EQUAL(write_thp("use_zero_page", "0\n"), 2);
    NEED(test_read_file(THP_ROOT "use_zero_page", text, sizeof text) == 2);
    EQUAL(text[0], '0', "use_zero_page: what was written is read");
    char *memory = area(1);
    STEP(memory[0] == 0);
    CHECK(!(entry(memory + PAGE) >> 63) || has(memory, ANON), "use_zero_page 0: no huge zero page");
    munmap(memory, SIZE);
    STEP_EQUAL(write_thp("use_zero_page", before), 2);
    if (never)
        STEP(write_thp("enabled", "never") > 0);
    return test_end();
}
