// disk: 32M
// memory: 64M
// option: provoke=power-loss
// kernel-only: it needs the kernel's disk, and a machine whose power fails
//
// The kernel's thread stores dirty pages before a writer reaches the limit, a tenth of memory: those
// above half of it at once, and all at an interval. Then the power fails. The next start has what
// the thread stored, although no program asked for it.

#include "disk.h"

#define INTERVAL "/proc/sys/vm/dirty_writeback_centisecs"

static char piece[16 * PAGE];

// A line of meminfo, in pages.
static long pages(const char *name) {
    static char text[8000];
    NEED(test_read_file("/proc/meminfo", text, sizeof text) > 0);
    char *at = strstr(text, name);
    NEED(at);
    return atol(at + strlen(name) + 1) / 4;
}

static int falls_to(long dirty) {
    for (int turn = 0; turn < 500; turn++) {
        if (pages("\nDirty") <= dirty)
            return 1;
        test_sleep(10);
    }
    return 0;
}

static void first_time(void) {
    long limit = pages("MemTotal") / 10;
    EQUAL(write_setting(INTERVAL, "0"), 1, "no interval: only the mark counts");
    int file = disk_open("/disk/written");
    for (long page = 0; page < limit / 8 * 3; page += 16)
        NEED(write(file, piece, sizeof piece) == sizeof piece);
    test_sleep(200);
    CHECK(pages("\nDirty") > limit / 4, "below half of the limit nothing is stored");
    for (long page = 0; page < limit / 8 * 3; page += 16)
        NEED(write(file, piece, sizeof piece) == sizeof piece);
    CHECK(falls_to(limit / 2), "above half of the limit pages are stored");

    file = disk_open("/disk/mapped");
    NEED(ftruncate(file, sizeof piece) == 0);
    char *map = disk_map(file, sizeof piece);
    memset(map, 'm', sizeof piece);
    FAILS(write_setting(INTERVAL, "-1"), EINVAL, "no interval is negative");
    EQUAL(write_setting(INTERVAL, "5"), 1, "an interval is set");
    CHECK(falls_to(0), "all pages are stored after it");
    // The blocks of the files follow their pages.
    for (int turn = 0; turn < 30; turn++)
        test_sleep(100);
    disk_power_fails();
}

int main(void) {
    test_start();
    if (access("/disk/mapped", F_OK) != 0) {
        memset(piece, 'w', sizeof piece);
        first_time();
        return test_end();
    }
    char text[16];
    NEED(test_read_file(INTERVAL, text, sizeof text) > 0);
    EQUAL(atol(text), 500, "the interval is Linux's");
    struct stat status;
    NEED(stat("/disk/written", &status) == 0);
    long written = pages("MemTotal") / 10 / 8 * 3 * 2;
    CHECK(status.st_size >= written * (long)PAGE, "a file has its size");
    int file = disk_open("/disk/mapped");
    CHECK(read(file, piece, sizeof piece) == sizeof piece && piece[0] == 'm' &&
              piece[sizeof piece - 1] == 'm',
          "and another the content that was written through a mapping");
    return test_end();
}
