// memory: 256M
//
// khugepaged: large folios are made of small ones in the background, within
// what can be set.

#include "settings.h"

#include <sys/shm.h>

#define SIZE (2l << 20)
#define PAGES 512

static char text[200000];

static long number(const char *name) {
    char path[200];
    snprintf(path, sizeof path, THP_ROOT "%s", name);
    return test_read_file(path, text, 100) > 0 ? atol(text) : -1;
}

// The files that the test changes, and what they held.
static const char *files[] = {
    "enabled",
    "shmem_enabled",
    "defrag",
    "hugepages-2048kB/enabled",
    "hugepages-2048kB/shmem_enabled",
    "khugepaged/defrag",
    "khugepaged/max_ptes_none",
    "khugepaged/max_ptes_shared",
    "khugepaged/max_ptes_swap",
    "khugepaged/pages_to_scan",
    "khugepaged/alloc_sleep_millisecs",
    "khugepaged/scan_sleep_millisecs",
};
enum { FILES = sizeof files / sizeof *files };
static char saved[FILES][100];

static void save(void) {
    char path[200];
    for (int index = 0; index < FILES; index++) {
        snprintf(path, sizeof path, THP_ROOT "%s", files[index]);
        if (test_read_file(path, text, 200) <= 0)
            continue;
        char *open = strchr(text, '[');
        STEP_EQUAL(sscanf(open ? open + 1 : text, "%99[^]\n]", saved[index]), 1);
    }
}

static void restore(void) {
    for (int index = 0; index < FILES; index++)
        if (saved[index][0])
            STEP(write_thp(files[index], saved[index]) > 0);
}

// 2 MiB at a multiple of that, in a mapping of its own.
static char *region(int flags) {
    char *whole = mmap(0, 2 * SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(whole != MAP_FAILED);
    char *memory = (char *)(((uintptr_t)whole + SIZE - 1) & ~(uintptr_t)(SIZE - 1));
    NEED(mmap(memory, SIZE, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
    return memory;
}

// Small pages, of which every `step`th is present.
static char *small_pages(int step) {
    char *memory = region(MAP_PRIVATE);
    NEED(madvise(memory, SIZE, MADV_NOHUGEPAGE) == 0);
    for (int page = 0; page < PAGES; page += step)
        memory[page * PAGE] = page % 251 + 1;
    return memory;
}

static int intact(const char *memory, int step) {
    for (int page = 0; page < PAGES; page++)
        if (memory[page * PAGE] != (char)(page % step ? 0 : page % 251 + 1))
            return 0;
    return 1;
}

// Waits until all memory was looked at twice more, so that nothing that could be
// done is left.
static void wait_for_scans(void) {
    long before = number("khugepaged/full_scans");
    for (int tries = 0; tries < 1000 && number("khugepaged/full_scans") < before + 3; tries++)
        test_sleep(10);
    STEP(number("khugepaged/full_scans") >= before + 3);
}

static void ranges(void) {
    static const char *pages[] = {"max_ptes_none", "max_ptes_swap", "max_ptes_shared"};
    char name[100];
    int before = test_failures;
    for (int index = 0; index < 3; index++) {
        snprintf(name, sizeof name, "khugepaged/%s", pages[index]);
        STEP(write_thp(name, "0") == 1 && number(name) == 0);
        STEP(write_thp(name, "511\n") == 4 && number(name) == 511);
        STEP_FAILS(write_thp(name, "512"), EINVAL);
        STEP_FAILS(write_thp(name, "-1"), EINVAL);
        STEP_FAILS(write_thp(name, "many"), EINVAL);
        STEP_EQUAL(number(name), 511);
    }
    ALL_STEPS(before, "max_ptes_*: 0 to 511");
    FAILS(write_thp("khugepaged/pages_to_scan", "0"), EINVAL, "pages_to_scan: 0 is refused");
    FAILS(write_thp("khugepaged/defrag", "2"), EINVAL, "defrag: 0 or 1");
    FAILS(write_thp("khugepaged/scan_sleep_millisecs", "4294967296"), EINVAL, "scan_sleep_millisecs: 32 bits");
    FAILS(write_thp("khugepaged/scan_sleep_millisecs", "1 0"), EINVAL, "scan_sleep_millisecs: one number");
    FAILS(write_thp("khugepaged/full_scans", "1"), EACCES, "full_scans cannot be written");
    FAILS(write_thp("khugepaged/pages_collapsed", "1"), EACCES, "pages_collapsed cannot be written");
}

int main(void) {
    test_start();
    save();
    ranges();

    STEP(write_thp("enabled", "madvise") > 0 && write_thp("hugepages-2048kB/enabled", "inherit") > 0);
    STEP(write_thp("defrag", "always") > 0 && write_thp("khugepaged/defrag", "1") > 0);
    STEP(write_thp("khugepaged/pages_to_scan", "100000") > 0);
    STEP(write_thp("khugepaged/alloc_sleep_millisecs", "10") > 0);
    STEP(write_thp("khugepaged/max_ptes_none", "511") > 0 && write_thp("khugepaged/max_ptes_shared", "256") > 0);
    STEP(write_thp("khugepaged/scan_sleep_millisecs", "10") > 0);

    char *memory = small_pages(1);
    EQUAL(smaps(memory, "AnonHugePages"), 0, "small pages at first");
    long collapsed = number("khugepaged/pages_collapsed");
    STEP_EQUAL(madvise(memory, SIZE, MADV_HUGEPAGE), 0);
    wait_for_scans();
    EQUAL(smaps(memory, "AnonHugePages"), SIZE / 1024, "one large folio is made of them");
    CHECK(number("khugepaged/pages_collapsed") > collapsed, "pages_collapsed counts it");
    CHECK(intact(memory, 1), "with the same contents");
    munmap(memory, SIZE);

    memory = small_pages(1);
    wait_for_scans();
    EQUAL(smaps(memory, "AnonHugePages"), 0, "nothing is made where the program does not want it");
    munmap(memory, SIZE);

    STEP(write_thp("khugepaged/max_ptes_none", "255") > 0);
    memory = small_pages(2);
    STEP_EQUAL(madvise(memory, SIZE, MADV_HUGEPAGE), 0);
    wait_for_scans();
    EQUAL(smaps(memory, "AnonHugePages"), 0, "max_ptes_none: too many pages are missing");
    STEP(write_thp("khugepaged/max_ptes_none", "256") > 0);
    wait_for_scans();
    EQUAL(smaps(memory, "AnonHugePages"), SIZE / 1024, "max_ptes_none: as many may be");
    CHECK(intact(memory, 2), "what was missing is zero");
    munmap(memory, SIZE);

    STEP(write_thp("khugepaged/max_ptes_shared", "255") > 0);
    memory = small_pages(1);
    pid_t child = CHILD({
        for (int page = 0; page < PAGES / 2; page++)
            memory[page * PAGE] = 1;
        for (;;)
            pause();
    });
    // The child has written its half when it sleeps.
    for (int tries = 0; tries < 500; tries++) {
        char path[64], state = 0;
        snprintf(path, sizeof path, "/proc/%d/stat", child);
        if (test_read_file(path, text, 1000) > 0 && sscanf(text, "%*d (%*[^)]) %c", &state) == 1 && state == 'S')
            break;
        test_sleep(10);
    }
    STEP_EQUAL(madvise(memory, SIZE, MADV_HUGEPAGE), 0);
    wait_for_scans();
    EQUAL(smaps(memory, "AnonHugePages"), 0, "max_ptes_shared: too many are the child's too");
    STEP(write_thp("khugepaged/max_ptes_shared", "256") > 0);
    wait_for_scans();
    EQUAL(smaps(memory, "AnonHugePages"), SIZE / 1024, "max_ptes_shared: as many may be");
    CHECK(intact(memory, 1), "with the same contents");
    kill(child, SIGKILL);
    waitpid(child, 0, 0);
    munmap(memory, SIZE);

    STEP(write_thp("khugepaged/scan_sleep_millisecs", "600000") > 0);
    test_sleep(50);
    memory = small_pages(1);
    STEP_EQUAL(madvise(memory, SIZE, MADV_HUGEPAGE), 0);
    long scans = number("khugepaged/full_scans");
    test_sleep(200);
    CHECK(number("khugepaged/full_scans") <= scans + 1 && smaps(memory, "AnonHugePages") == 0,
          "scan_sleep_millisecs: nothing happens while it sleeps");
    STEP(write_thp("khugepaged/scan_sleep_millisecs", "10") > 0);
    wait_for_scans();
    EQUAL(smaps(memory, "AnonHugePages"), SIZE / 1024, "a shorter sleep counts at once");
    munmap(memory, SIZE);

    STEP(write_thp("enabled", "never") > 0);
    scans = number("khugepaged/full_scans");
    test_sleep(200);
    CHECK(number("khugepaged/full_scans") <= scans + 1, "never: it does not look");
    restore();
    return test_end();
}
