// memory: 256M
//
// /proc/kpageflags and kpagecount tell of the frames that pagemap names; and
// /proc/vmstat counts what happens to memory.

#include "test.h"

enum { LOCKED, UPTODATE = 3, DIRTY, SLAB = 7, BUDDY = 10, MMAP, ANON, SWAPBACKED = 14, HEAD, TAIL, NOPAGE = 20,
       THP = 22, ZERO_PAGE = 24, PGTABLE = 26 };

static int pagemap, flags_file, count_file;
static char text[20000];

static uint64_t word(int file, uint64_t number) {
    uint64_t value = ~0ULL;
    STEP_EQUAL(pread(file, &value, 8, number * 8), 8);
    return value;
}

static uint64_t frame(const void *page) { return word(pagemap, (uintptr_t)page / PAGE) & ((1ULL << 55) - 1); }

static uint64_t flags_of(const void *page) { return word(flags_file, frame(page)); }

static int has(uint64_t flags, int bit) { return flags >> bit & 1; }

static long vmstat(const char *name) {
    NEED(test_read_file("/proc/vmstat", text, sizeof text) > 0);
    size_t length = strlen(name);
    for (char *at = text; *at; at = strchr(at, '\n') + 1)
        if (strncmp(at, name, length) == 0 && at[length] == ' ')
            return atol(at + length + 1);
    return -1;
}

static void set_size(const char *value) {
    int file = open("/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled", O_WRONLY);
    STEP(write(file, value, strlen(value)) > 0);
    close(file);
}

static void frames(void) {
    char *page = test_map(2 * PAGE);
    page[0] = 1;
    uint64_t flags = flags_of(page);
    CHECK(has(flags, ANON) && has(flags, MMAP) && has(flags, SWAPBACKED) && !has(flags, HEAD) && !has(flags, THP),
          "kpageflags: an anonymous page");
    EQUAL(word(count_file, frame(page)), 1, "kpagecount: mapped once");
    int ends[2], back[2];
    NEED(pipe(ends) == 0 && pipe(back) == 0);
    pid_t child = CHILD({
        STEP_EQUAL(write(back[1], "", 1), 1);
        STEP_EQUAL(read(ends[0], text, 1), 1);
    });
    STEP_EQUAL(read(back[0], text, 1), 1);
    EQUAL(word(count_file, frame(page)), 2, "kpagecount: a child maps it too");
    STEP_EQUAL(write(ends[1], "", 1), 1);
    test_wait(child);
    EQUAL(word(count_file, frame(page)), 1, "kpagecount: the child is gone");

    CHECK(((volatile char *)page)[PAGE] == 0, "the second page reads as zero");
    flags = flags_of(page + PAGE);
    CHECK(has(flags, ZERO_PAGE) && !has(flags, ANON), "kpageflags: the zero page");
    uint64_t number = frame(page);
    STEP_EQUAL(munmap(page, 2 * PAGE), 0);
    flags = word(flags_file, number);
    CHECK(!has(flags, ANON) && !has(flags, MMAP), "kpageflags: unmapped, it is no anonymous page any more");

    char *shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    shared[0] = 1;
    flags = flags_of(shared);
    CHECK(!has(flags, ANON) && has(flags, MMAP) && has(flags, SWAPBACKED), "kpageflags: shared memory");

    set_size("always");
    char *large = mmap(0, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(large != MAP_FAILED);
    char *start = (char *)(((uintptr_t)large + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
    long before = vmstat("thp_fault_alloc");
    start[5 * PAGE] = 1;
    set_size("never");
    EQUAL(vmstat("thp_fault_alloc"), before + 1, "vmstat: thp_fault_alloc");
    flags = flags_of(start);
    CHECK(has(flags, HEAD) && has(flags, THP) && has(flags, ANON) && !has(flags, TAIL), "kpageflags: a folio's head");
    flags = flags_of(start + 7 * PAGE);
    CHECK(has(flags, TAIL) && has(flags, THP) && has(flags, ANON) && !has(flags, HEAD), "kpageflags: its tail");
    EQUAL(word(count_file, frame(start + 7 * PAGE)), 1, "kpagecount: a page of it");
    CHECK(vmstat("nr_anon_transparent_hugepages") >= 1, "vmstat: nr_anon_transparent_hugepages");
    before = vmstat("thp_split_pmd");
    STEP_EQUAL(mprotect(start, PAGE, PROT_READ), 0);
    EQUAL(vmstat("thp_split_pmd"), before + 1, "vmstat: thp_split_pmd");
    STEP_EQUAL(munmap(large, 4 << 20), 0);

    int seen[64] = {0};
    uint64_t words[512];
    ssize_t length;
    uint64_t all = 0;
    STEP_EQUAL(lseek(flags_file, 0, SEEK_SET), 0);
    while ((length = read(flags_file, words, sizeof words)) > 0)
        for (ssize_t index = 0; index < length / 8; index++, all++)
            for (int bit = 0; bit < 64; bit++)
                seen[bit] += has(words[index], bit);
    STEP_EQUAL(length, 0);
    CHECK(all >= 30000, "kpageflags: all frames");
    CHECK(seen[PGTABLE] > 0 && seen[SLAB] > 0 && seen[ZERO_PAGE] == 1, "some are tables and slabs, one is of zeroes");
    CHECK(seen[BUDDY] > 10000 && seen[BUDDY] < (int)all, "many are free");
    EQUAL(pread(flags_file, words, 8, all * 8), 0, "kpageflags: the end");
    EQUAL(pread(count_file, words, 8, all * 8), 0, "kpagecount: the same");
    EQUAL(pread(flags_file, words, 4096, all * 8 - 16), 16, "a read across it is short");
    FAILS(pread(flags_file, words, 8, 4), EINVAL, "not at a multiple of 8");
    FAILS(pread(flags_file, words, 12, 8), EINVAL, "not a multiple of 8");
    FAILS(pread(count_file, words, 4, 0), EINVAL, "kpagecount: the same");
    FAILS(pwrite(flags_file, words, 8, 0), EBADF, "no write");
    struct stat status;
    NEED(stat("/proc/kpagecount", &status) == 0);
    EQUAL(status.st_mode & 07777, 0400, "root may read");
}

static void counters(void) {
    int before = test_failures;
    NEED(test_read_file("/proc/vmstat", text, sizeof text) > 0);
    for (char *at = text; *at; at = strchr(at, '\n') + 1) {
        char name[64];
        unsigned long value;
        int length = 0;
        STEP(sscanf(at, "%63s %lu%n", name, &value, &length) == 2 && at[length] == '\n');
    }
    ALL_STEPS(before, "vmstat: names and numbers");
    const size_t pages = 1000;
    long faults = vmstat("pgfault"), anonymous = vmstat("nr_anon_pages"), free_pages = vmstat("nr_free_pages");
    long given = vmstat("pgalloc_normal"), returned = vmstat("pgfree"), shared = vmstat("nr_shmem");
    long tables = vmstat("nr_page_table_pages");
    CHECK(tables > 0, "nr_page_table_pages");
    char *memory = test_map(pages * PAGE);
    for (size_t page = 0; page < pages; page++)
        memory[page * PAGE] = 1;
    CHECK(vmstat("pgfault") >= faults + (long)pages, "pgfault: one for each first touch");
    CHECK(vmstat("nr_anon_pages") >= anonymous + (long)pages, "nr_anon_pages");
    CHECK(vmstat("nr_free_pages") <= free_pages - (long)pages, "nr_free_pages");
    CHECK(vmstat("pgalloc_normal") >= given + (long)pages, "pgalloc_normal");
    STEP_EQUAL(munmap(memory, pages * PAGE), 0);
    CHECK(vmstat("pgfree") >= returned + (long)pages, "pgfree");
    CHECK(vmstat("nr_anon_pages") < anonymous + 100, "nr_anon_pages: gone");
    memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(memory != MAP_FAILED);
    long mapped = vmstat("nr_mapped"), pages_of_files = vmstat("nr_file_pages");
    memset(memory, 1, pages * PAGE);
    EQUAL(vmstat("nr_shmem"), shared + (long)pages, "nr_shmem");
    CHECK(vmstat("nr_mapped") >= mapped + (long)pages, "nr_mapped");
    CHECK(vmstat("nr_file_pages") >= pages_of_files + (long)pages, "nr_file_pages: shared memory among them");
    STEP_EQUAL(munmap(memory, pages * PAGE), 0);
    memory = mmap((void *)0x200000000000, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    NEED(memory != MAP_FAILED);
    memset(memory, 1, 2 << 20);
    long collapsed = vmstat("thp_collapse_alloc");
    STEP_EQUAL(madvise(memory, 2 << 20, MADV_COLLAPSE), 0);
    EQUAL(vmstat("thp_collapse_alloc"), collapsed + 1, "thp_collapse_alloc");
    CHECK(vmstat("thp_zero_page_alloc") >= 0, "thp_zero_page_alloc");
}

int main(void) {
    test_start();
    pagemap = open("/proc/self/pagemap", O_RDONLY);
    flags_file = open("/proc/kpageflags", O_RDONLY);
    count_file = open("/proc/kpagecount", O_RDONLY);
    NEED(pagemap >= 0 && flags_file >= 0 && count_file >= 0);
    frames();
    counters();
    return test_end();
}
