// memory: 256M
// kernel-only: it needs a swap device that nobody else uses
//
// Swap on compressed memory: the device, swapon and swapoff, paged-out memory
// comes back, and /proc reports it in between. Passes on Linux with zram, as
// root and without other swap.

#include "settings.h"
#include "swap.h"

#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <sys/time.h>

#define MIB ((size_t)1 << 20)
#define SIZE (4 * MIB)
#define DISK (32 * MIB)

enum { SIZE_IN_SECTORS = 0x1260 };

static char text[200000];

static long field(const char *path, const char *name) {
    NEED(test_read_file(path, text, sizeof text) > 0);
    size_t length = strlen(name);
    for (char *at = text; at && *at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : 0)
        if (strncmp(at, name, length) == 0 && (at[length] == ':' || at[length] == ' '))
            return atol(at + length + 1);
    return -1;
}

static long meminfo(const char *name) { return field("/proc/meminfo", name); }
static long vmstat(const char *name) { return field("/proc/vmstat", name); }
static long status(const char *name) { return field("/proc/self/status", name); }

static uint64_t entry(const void *page) {
    uint64_t value = 0;
    int file = open("/proc/self/pagemap", O_RDONLY);
    STEP_EQUAL(pread(file, &value, 8, (uintptr_t)page / PAGE * 8), 8);
    close(file);
    return value;
}

static int is_swapped(const void *page) { return (entry(page) >> 62 & 3) == 1; }

static size_t resident(char *start, size_t size) {
    static unsigned char pages[SIZE / 4096];
    STEP_EQUAL(mincore(start, size, pages), 0);
    size_t count = 0;
    for (size_t at = 0; at < size / PAGE; at++)
        count += pages[at] & 1;
    return count;
}

// A third of the pages is zero, one is filled with one word, one is neither.
static uint64_t word(size_t page, size_t at, uint64_t seed) {
    switch (page % 3) {
    case 0:
        return 0;
    case 1:
        return page ^ seed;
    default:
        return at % 8 ? at : (page * 512 + at + seed) * 0x9E3779B97F4A7C15u;
    }
}

static void fill(char *start, size_t size, uint64_t seed) {
    for (size_t at = 0; at < size / 8; at++)
        ((volatile uint64_t *)start)[at] = word(at / 512, at % 512, seed);
}

static int holds(const char *start, size_t size, uint64_t seed) {
    for (size_t at = 0; at < size / 8; at++)
        if (((volatile const uint64_t *)start)[at] != word(at / 512, at % 512, seed))
            return 0;
    return 1;
}

static char *filled(size_t size, uint64_t seed) {
    char *memory = test_map(size);
    fill(memory, size, seed);
    return memory;
}

static void page_out(char *start, size_t size) {
    STEP_EQUAL(madvise(start, size, MADV_PAGEOUT), 0);
    STEP_EQUAL(resident(start, size), 0);
}

static void device(void) {
    struct stat information;
    STEP_EQUAL(stat(SWAP_DEVICE, &information), 0);
    CHECK(S_ISBLK(information.st_mode), "the device holds blocks");
    FAILS(swapon(SWAP_DEVICE, 0), EINVAL, "swapon of a device without a size");
    FAILS(swap_setting("disksize", 0), EINVAL, "a size of nothing");
    STEP_EQUAL(swap_setting("disksize", DISK), 0);
    FAILS(swap_setting("disksize", DISK), EBUSY, "a size is given once");
    int file = open(SWAP_DEVICE, O_RDWR);
    EQUAL(lseek(file, 0, SEEK_END), DISK, "the device ends there");
    unsigned long sectors = 0;
    STEP_EQUAL(ioctl(file, SIZE_IN_SECTORS, &sectors), 0);
    EQUAL(sectors, DISK / 512, "its size in sectors");
    FAILS(swap_setting("reset", 1), EBUSY, "reset of an open device");
    close(file);
    FAILS(swapon(SWAP_DEVICE, 0), EINVAL, "swapon without a header");
    STEP_EQUAL(swap_make(DISK / PAGE + 1), 0);
    FAILS(swapon(SWAP_DEVICE, 0), EINVAL, "swapon of more than there is");
    STEP_EQUAL(swap_make(1), 0);
    FAILS(swapon(SWAP_DEVICE, 0), EINVAL, "swapon of an area without pages");
    STEP_EQUAL(swap_make(DISK / PAGE), 0);
}

static void refusals(void) {
    FAILS(swapon(SWAP_DEVICE, 0x100000), EINVAL, "swapon: unknown flags");
    FAILS(swapon("/no/such", 0), ENOENT, "swapon of nothing");
    FAILS(swapon("/dev/null", 0), EINVAL, "swapon of another device");
    FAILS(swapon("/tmp", 0), EISDIR, "swapon of a directory");
    FAILS(swapon(test_wild(8), 0), EFAULT, "swapon of a bad path");
    FAILS(swapoff(SWAP_DEVICE), EINVAL, "swapoff of what is off");
    FAILS(swapoff("/no/such"), ENOENT, "swapoff of nothing");
    EXITS(0, "other users may do neither", {
        STEP_EQUAL(setuid(1000), 0);
        STEP_FAILS(swapon(SWAP_DEVICE, 0), EPERM);
        STEP_FAILS(swapoff(SWAP_DEVICE), EPERM);
    });
}

static void areas(void) {
    EQUAL(swapon(SWAP_DEVICE, SWAP_FLAG_PREFER | 5), 0, "swapon with a priority");
    FAILS(swapon(SWAP_DEVICE, 0), EBUSY, "swapon twice");
    FAILS(open(SWAP_DEVICE, O_RDWR | O_EXCL), EBUSY, "the device is in use");
    FAILS(swap_setting("reset", 1), EBUSY, "reset of a swap area");
    char name[100], kind[100];
    long size, used, priority;
    NEED(test_read_file("/proc/swaps", text, sizeof text) > 0);
    char *line = strchr(text, '\n') + 1;
    STEP_EQUAL(sscanf(line, "%99s %99s %ld %ld %ld", name, kind, &size, &used, &priority), 5);
    CHECK(!strcmp(name, SWAP_DEVICE) && !strcmp(kind, "partition") && size == (long)(DISK - PAGE) / 1024 &&
              used == 0 && priority == 5,
          "/proc/swaps");
    EQUAL(meminfo("SwapTotal"), (DISK - PAGE) / 1024, "SwapTotal");
    EQUAL(meminfo("SwapFree"), (DISK - PAGE) / 1024, "SwapFree");
    struct sysinfo information;
    STEP_EQUAL(sysinfo(&information), 0);
    CHECK(information.totalswap * information.mem_unit == DISK - PAGE &&
              information.freeswap == information.totalswap,
          "sysinfo");
    EQUAL(swapoff(SWAP_DEVICE), 0, "swapoff of an empty area");
    FAILS(swapoff(SWAP_DEVICE), EINVAL, "swapoff twice");
    EQUAL(meminfo("SwapTotal"), 0, "no swap is left");
}

static long major_faults(void) {
    struct rusage usage;
    STEP_EQUAL(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_majflt;
}

static void out_and_in(void) {
    STEP_EQUAL(swapon(SWAP_DEVICE, 0), 0);
    char *memory = filled(SIZE, 1);
    long out = vmstat("pswpout"), in = vmstat("pswpin"), major = vmstat("pgmajfault");
    long own = major_faults();
    int before = test_failures;
    page_out(memory, SIZE);
    ALL_STEPS(before, "pageout: nothing stays");
    CHECK(is_swapped(memory) && is_swapped(memory + SIZE - PAGE), "pagemap: swapped");
    EQUAL(status("VmSwap"), SIZE / 1024, "VmSwap");
    EQUAL(smaps(memory, "Swap"), SIZE / 1024, "smaps: Swap");
    EQUAL(smaps(memory, "SwapPss"), SIZE / 1024, "smaps: SwapPss");
    EQUAL(smaps(memory, "Rss"), 0, "smaps: Rss");
    EQUAL(meminfo("SwapTotal") - meminfo("SwapFree"), SIZE / 1024, "SwapFree");
    // Linux counts zero pages apart.
    CHECK(vmstat("pswpout") - out >= (long)(SIZE / PAGE / 2), "pswpout");
    CHECK(holds(memory, SIZE, 1), "contents come back");
    EQUAL(resident(memory, SIZE), SIZE / PAGE, "all pages are back");
    CHECK(vmstat("pswpin") - in >= (long)(SIZE / PAGE / 2), "pswpin");
    // Of any number of pages that the system reads at once.
    CHECK(vmstat("pgmajfault") > major, "pgmajfault");
    CHECK(major_faults() > own, "getrusage: ru_majflt");
    EQUAL(status("VmSwap"), 0, "VmSwap: nothing is out");
    page_out(memory, SIZE);
    fill(memory, SIZE, 2);
    CHECK(holds(memory, SIZE, 2), "writes to swapped pages");
    page_out(memory, SIZE);
    CHECK(holds(memory, SIZE, 2), "out and in again");
    STEP_EQUAL(munmap(memory, SIZE), 0);
    EQUAL(meminfo("SwapFree"), meminfo("SwapTotal"), "nothing is left in swap");
}

static void forked(void) {
    char *memory = filled(SIZE, 3);
    page_out(memory, SIZE);
    int ends[2], back[2];
    char byte = 0;
    NEED(pipe(ends) == 0 && pipe(back) == 0);
    pid_t child = CHILD({
        STEP(holds(memory, SIZE / 2, 3));
        fill(memory, SIZE / 2, 4);
        STEP_EQUAL(write(back[1], "", 1), 1);
        STEP_EQUAL(read(ends[0], &byte, 1), 1);
        STEP(holds(memory, SIZE / 2, 4));
    });
    STEP_EQUAL(read(back[0], &byte, 1), 1);
    EQUAL(smaps(memory, "SwapPss") < smaps(memory, "Swap"), 1, "fork: swap is shared");
    CHECK(holds(memory, SIZE, 3), "fork: the parent keeps its contents");
    fill(memory, SIZE / 2, 5);
    STEP_EQUAL(write(ends[1], "", 1), 1);
    EQUAL(test_wait(child), 0, "fork: the child keeps its own");
    CHECK(holds(memory, SIZE / 2, 5), "fork: after the child has ended");
    // Pages that both have go out as well, or stay.
    child = CHILD({ STEP(holds(memory, SIZE / 2, 5)); });
    STEP_EQUAL(madvise(memory, SIZE, MADV_PAGEOUT), 0);
    EQUAL(test_wait(child), 0, "fork: pageout of shared pages");
    CHECK(holds(memory, SIZE / 2, 5), "fork: contents after that");
    STEP_EQUAL(munmap(memory, SIZE), 0);
    EQUAL(meminfo("SwapFree"), meminfo("SwapTotal"), "fork: nothing is left in swap");
}

static void changed(void) {
    char *memory = filled(SIZE, 6), *there = test_map(2 * SIZE);
    page_out(memory, SIZE);
    STEP_EQUAL(munmap(memory + PAGE, 7 * PAGE), 0);
    STEP_EQUAL(meminfo("SwapTotal") - meminfo("SwapFree"), SIZE / 1024 - 28);
    char *moved = mremap(memory + MIB, MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, there + PAGE);
    CHECK(moved == there + PAGE && is_swapped(moved), "mremap moves what is out");
    int good = 1;
    for (size_t at = 0; at < MIB / 8; at++)
        good &= ((volatile uint64_t *)moved)[at] == word(MIB / PAGE + at / 512, at % 512, 6);
    CHECK(good, "mremap: contents");
    STEP_EQUAL(mprotect(memory + 2 * MIB, MIB, PROT_READ), 0);
    CHECK(LOADS(memory + 2 * MIB) == 0 && STORES(memory + 2 * MIB) == SIGSEGV, "mprotect of what is out");
    STEP_EQUAL(madvise(memory + 3 * MIB, MIB, MADV_DONTNEED), 0);
    CHECK(!is_swapped(memory + 3 * MIB) && memory[3 * MIB + 2 * PAGE] == 0, "MADV_DONTNEED of what is out");
    EQUAL(((volatile uint64_t *)memory)[0], 0, "what was left alone");
    STEP_EQUAL(munmap(memory, SIZE), 0);
    STEP_EQUAL(munmap(there, 2 * SIZE), 0);
    EQUAL(meminfo("SwapFree"), meminfo("SwapTotal"), "changes: nothing is left in swap");
}

static void off(void) {
    char *memory = filled(SIZE, 7);
    page_out(memory, SIZE);
    int ends[2], back[2];
    char byte = 0;
    NEED(pipe(ends) == 0 && pipe(back) == 0);
    pid_t child = CHILD({
        fill(memory, MIB, 8);
        page_out(memory, MIB);
        STEP_EQUAL(write(back[1], "", 1), 1);
        STEP_EQUAL(read(ends[0], &byte, 1), 1);
        STEP_EQUAL(status("VmSwap"), 0);
        STEP(holds(memory, MIB, 8));
    });
    STEP_EQUAL(read(back[0], &byte, 1), 1);
    EQUAL(swapoff(SWAP_DEVICE), 0, "swapoff with pages of two processes");
    EQUAL(status("VmSwap"), 0, "swapoff: all is back");
    STEP_EQUAL(write(ends[1], "", 1), 1);
    EQUAL(test_wait(child), 0, "swapoff: the child's contents");
    CHECK(holds(memory, SIZE, 7), "swapoff: contents");
    STEP_EQUAL(munmap(memory, SIZE), 0);
}

// A process that has pages in swap, and children that start and end at the same
// time.
static void come_and_go(uint64_t seed, int ready, int go) {
    char byte = 0, *memory = filled(MIB, seed);
    page_out(memory, MIB);
    STEP_EQUAL(write(ready, "", 1), 1);
    STEP_EQUAL(read(go, &byte, 1), 1);
    for (int round = 0; round < 8; round++) {
        pid_t child = CHILD({
            if (round % 2)
                STEP(holds(memory, MIB / 4, seed));
        });
        // If the area is off already, they stay.
        STEP_EQUAL(madvise(memory + MIB / 2, MIB / 2, MADV_PAGEOUT), 0);
        STEP_EQUAL(test_wait(child), 0);
    }
    STEP(holds(memory, MIB, seed));
}

static void off_beside_others(void) {
    enum { OTHERS = 3 };
    pid_t others[OTHERS];
    char byte = 0;
    int ready[2], go[2];
    STEP_EQUAL(swapon(SWAP_DEVICE, 0), 0);
    NEED(pipe(ready) == 0 && pipe(go) == 0);
    for (int number = 0; number < OTHERS; number++)
        others[number] = CHILD({ come_and_go(11 + number, ready[1], go[0]); });
    for (int number = 0; number < OTHERS; number++)
        STEP_EQUAL(read(ready[0], &byte, 1), 1);
    char *memory = filled(SIZE, 10);
    page_out(memory, SIZE);
    STEP_EQUAL(write(go[1], "123", OTHERS), OTHERS);
    EQUAL(swapoff(SWAP_DEVICE), 0, "swapoff beside forks and exits");
    EQUAL(status("VmSwap"), 0, "swapoff beside them: all is back");
    for (int number = 0; number < OTHERS; number++)
        STEP_EQUAL(test_wait(others[number]), 0);
    CHECK(holds(memory, SIZE, 10), "swapoff beside them: contents");
    STEP_EQUAL(munmap(memory, SIZE), 0);
}

static void on_alarm(int signal) { (void)signal; }

// A signal ends it where it comes in time: then the area is used as before.
static void off_with_signals(void) {
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval soon = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    STEP_EQUAL(swapon(SWAP_DEVICE, 0), 0);
    char *memory = filled(SIZE, 20);
    page_out(memory, SIZE);
    STEP_EQUAL(sigaction(SIGALRM, &action, 0), 0);
    STEP_EQUAL(setitimer(ITIMER_REAL, &soon, 0), 0);
    int outcome = swapoff(SWAP_DEVICE), problem = errno;
    STEP_EQUAL(setitimer(ITIMER_REAL, &never, 0), 0);
    CHECK(outcome == 0 || problem == EINTR, "swapoff with signals");
    if (outcome != 0) {
        STEP_EQUAL(meminfo("SwapTotal"), (DISK - PAGE) / 1024);
        page_out(memory, SIZE);
        STEP_EQUAL(swapoff(SWAP_DEVICE), 0);
    }
    CHECK(holds(memory, SIZE, 20), "swapoff with signals: contents");
    STEP_EQUAL(munmap(memory, SIZE), 0);
}

static void full(void) {
    STEP_EQUAL(swap_make(65), 0);
    STEP_EQUAL(swapon(SWAP_DEVICE, 0), 0);
    char *memory = filled(SIZE, 9);
    EQUAL(madvise(memory, SIZE, MADV_PAGEOUT), 0, "pageout to a small area");
    CHECK(status("VmSwap") > 0 && status("VmSwap") <= 64 * 4, "a part is out");
    CHECK(holds(memory, SIZE, 9), "a small area: contents");
    STEP_EQUAL(munmap(memory, SIZE), 0);
    EQUAL(swap_end(), 0, "reset");
    FAILS(swapon(SWAP_DEVICE, 0), EINVAL, "a device that was reset has no header");
}

int main(void) {
    test_start();
    device();
    refusals();
    areas();
    out_and_in();
    forked();
    changed();
    off();
    off_beside_others();
    off_with_signals();
    full();
    return test_end();
}
