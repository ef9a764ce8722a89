// The pools of huge pages: their files in /sys, what else tells of them, and
// memfds on them. Not every kernel has any.

#include "test.h"

#include <dirent.h>

#define POOLS "/sys/kernel/mm/hugepages/"

enum { HUGETLB = 4, NOEXEC_SEAL = 8, EXEC = 16 };

// A size of huge pages, as the flags have it.
static unsigned size_flag(unsigned exponent) { return exponent << 26; }

static long number(const char *path) {
    char text[100];
    return test_read_file(path, text, sizeof text) > 0 ? atol(text) : -1;
}

// A file of the pool of pages of this size in kilobytes.
static long of_pool(long size, const char *name) {
    char path[100];
    snprintf(path, sizeof path, POOLS "hugepages-%ldkB/%s", size, name);
    return number(path);
}

static long meminfo(const char *name) {
    static char text[8000];
    NEED(test_read_file("/proc/meminfo", text, sizeof text) > 0);
    char *at = strstr(text, name);
    return at ? atol(at + strlen(name)) : -1;
}

static unsigned exponent_of(long size) {
    unsigned exponent = 10;
    while (size >> (exponent - 10) > 1)
        exponent++;
    return exponent;
}

// Gives a pool the number of pages that it has.
static void refill(long size, long pages) {
    char path[100], text[30];
    snprintf(path, sizeof path, POOLS "hugepages-%ldkB/nr_hugepages", size);
    int length = snprintf(text, sizeof text, "%ld\n", pages), file = open(path, O_WRONLY);
    if (file < 0) {
        // Not with the files of a container.
        STEP(errno == EROFS || geteuid() != 0);
        return;
    }
    // Linux fills no pool of the largest pages once it runs.
    STEP(write(file, text, length) == length || (errno == EINVAL && size > 1 << 16));
    STEP_FAILS(write(file, "many", 4), EINVAL);
    STEP_EQUAL(close(file), 0);
    STEP_EQUAL(of_pool(size, "nr_hugepages"), pages);
}

// Files and memfds of each pool. Says which exponents have one.
static unsigned long pools(void) {
    DIR *folder = opendir(POOLS);
    NEED(folder);
    unsigned long found = 0;
    int before = test_failures;
    for (struct dirent *entry; (entry = readdir(folder));) {
        if (entry->d_name[0] == '.')
            continue;
        long size = 0;
        STEP(sscanf(entry->d_name, "hugepages-%ldkB", &size) == 1);
        unsigned exponent = exponent_of(size);
        STEP(size == 1l << (exponent - 10) && size * 1024 > (long)PAGE);
        found |= 1ul << exponent;
        long pages = of_pool(size, "nr_hugepages"), unused = of_pool(size, "free_hugepages");
        STEP(pages >= 0 && unused >= 0 && unused <= pages);
        STEP(of_pool(size, "resv_hugepages") >= 0 && of_pool(size, "resv_hugepages") <= pages);
        STEP(of_pool(size, "surplus_hugepages") >= 0 && of_pool(size, "surplus_hugepages") <= pages);
        STEP(of_pool(size, "nr_overcommit_hugepages") >= 0);
        refill(size, pages);
        int file = memfd_create("x", HUGETLB | size_flag(exponent));
        STEP(file >= 0);
        if (pages == 0 && of_pool(size, "nr_overcommit_hugepages") == 0)
            STEP_FAILS((long)mmap(0, size << 10, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0), ENOMEM);
        STEP_EQUAL(close(file), 0);
    }
    closedir(folder);
    ALL_STEPS(before, "each pool has its files, and memfds, of which an empty one maps none");
    return found;
}

int main(void) {
    test_start();
    FAILS(memfd_create("x", size_flag(21)), EINVAL, "memfd_create: a size without MFD_HUGETLB");
    FAILS(memfd_create("x", HUGETLB | 0x4000), EINVAL, "memfd_create: unknown flags and MFD_HUGETLB");
    FAILS(memfd_create("x", HUGETLB | NOEXEC_SEAL | EXEC), EINVAL, "memfd_create: both and MFD_HUGETLB");
    FAILS(memfd_create(test_wild(8), HUGETLB | size_flag(13)), EFAULT, "memfd_create: the name is read before the size");
    if (access(POOLS, F_OK) != 0) {
        CHECK(memfd_create("x", HUGETLB) < 0, "memfd_create: MFD_HUGETLB without pools");
        return test_end();
    }
    unsigned long found = pools();
    long size = meminfo("Hugepagesize:"), pages = of_pool(size, "nr_hugepages");
    CHECK(pages >= 0, "one of the pools is what MFD_HUGETLB means alone");
    EQUAL(meminfo("HugePages_Total:"), pages, "meminfo: its pages");
    EQUAL(meminfo("HugePages_Free:"), of_pool(size, "free_hugepages"), "meminfo: those that are free");
    EQUAL(meminfo("HugePages_Rsvd:"), of_pool(size, "resv_hugepages"), "meminfo: those that are promised");
    EQUAL(meminfo("HugePages_Surp:"), of_pool(size, "surplus_hugepages"), "meminfo: those beyond the pool");
    EQUAL(number("/proc/sys/vm/nr_hugepages"), pages, "nr_hugepages");
    int file = memfd_create("x", HUGETLB | MFD_CLOEXEC);
    CHECK(file >= 0 && close(file) == 0, "memfd_create: pages of that size");
    int before = test_failures;
    for (unsigned exponent = 1; exponent < 64; exponent++)
        if (!(found >> exponent & 1))
            STEP_FAILS(memfd_create("x", HUGETLB | size_flag(exponent)), ENODEV);
    ALL_STEPS(before, "memfd_create: sizes without a pool");
    static char long_name[300];
    memset(long_name, 'n', sizeof long_name - 1);
    FAILS(memfd_create(long_name, HUGETLB), EINVAL, "memfd_create: a long name and MFD_HUGETLB");
    return test_end();
}
