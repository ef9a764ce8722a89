// /sys/kernel/mm/ksm: equal pages are not merged unless that is turned on, but
// programs may ask for it.

#include "settings.h"

#define KSM "/sys/kernel/mm/ksm/"

static long number(const char *name) {
    char path[100], text[100];
    snprintf(path, sizeof path, KSM "%s", name);
    return test_read_file(path, text, sizeof text) > 0 ? atol(text) : -1;
}

int main(void) {
    test_start();
    char *memory = test_map(4 * PAGE);
    memset(memory, 'k', 4 * PAGE);
    if (access(KSM, F_OK) != 0) {
        FAILS(madvise(memory, 4 * PAGE, MADV_MERGEABLE), EINVAL, "no advice without the files");
        return test_end();
    }
    WORKS(madvise(memory, 4 * PAGE, MADV_MERGEABLE), "MADV_MERGEABLE");
    WORKS(madvise(memory, 4 * PAGE, MADV_UNMERGEABLE), "MADV_UNMERGEABLE");
    static const char *counters[] = {"full_scans", "pages_shared", "pages_sharing", "pages_unshared",
                                     "pages_volatile", "pages_skipped", "ksm_zero_pages",
                                     "stable_node_chains", "stable_node_dups"};
    int before = test_failures;
    for (unsigned index = 0; index < sizeof counters / sizeof *counters; index++) {
        STEP(number(counters[index]) >= 0);
        char path[100];
        snprintf(path, sizeof path, KSM "%s", counters[index]);
        struct stat status;
        STEP(stat(path, &status) == 0 && (status.st_mode & 0777) == 0444);
    }
    ALL_STEPS(before, "counters, which can only be read");
    CHECK(number("pages_to_scan") > 0 && number("sleep_millisecs") >= 0 && number("max_page_sharing") > 1,
          "settings of the scan");
    CHECK(number("use_zero_pages") == 0 || number("use_zero_pages") == 1, "use_zero_pages is a switch");
    long run = number("run");
    CHECK(run >= 0 && run <= 2, "run is 0, 1 or 2");
    int file = open(KSM "run", O_RDWR);
    if (file < 0)
        return test_end();
    FAILS(write(file, "3", 1), EINVAL, "run: 0 to 2");
    FAILS(write(file, "on", 2), EINVAL, "run: a number");
    EQUAL(number("run"), run, "which changes nothing");
    EQUAL(write(file, "2\n", 2), 2, "run: 2");
    EQUAL(number("run"), 2, "is shown");
    CHECK(number("pages_shared") == 0 && number("pages_sharing") == 0 && number("pages_unshared") == 0,
          "and nothing is merged any more");
    EQUAL(write(file, "0", 1), 1, "run: 0");
    EQUAL(number("run"), 0, "is shown too");
    char as_before[] = {'0' + run};
    EQUAL(write(file, as_before, 1), 1, "run: as it was");
    EQUAL(number("run"), run, "which is shown");
    return test_end();
}
