// disk: 16M
// option: provoke=power-loss
// kernel-only: it needs the kernel's disk, and a machine whose power fails
//
// The time of a file's last change is on the disk when another file was synchronized: that of a
// write, of a truncation and of what was written through a mapping. The next start has it.

#include "disk.h"

#define PAST 1000

static char page[PAGE];

static long modified(const char *path) {
    struct stat status;
    NEED(stat(path, &status) == 0);
    return status.st_mtim.tv_sec;
}

// A file whose last change was long ago.
static int old_file(const char *path) {
    struct timespec past[2] = {{PAST, 0}, {PAST, 0}};
    int file = disk_open(path);
    NEED(write(file, page, PAGE) == PAGE && fsync(file) == 0);
    NEED(futimens(file, past) == 0 && fsync(file) == 0 && modified(path) == PAST);
    return file;
}

static void first_time(void) {
    disk_has_no_writer();
    old_file("/disk/old");
    int written = old_file("/disk/written"), cut = old_file("/disk/cut");
    int mapped = old_file("/disk/mapped"), other = old_file("/disk/other");
    NEED(pwrite(written, "x", 1, 0) == 1 && ftruncate(cut, 100) == 0);
    CHECK(modified("/disk/cut") > PAST, "a truncation is a change");
    char *map = disk_map(mapped, PAGE);
    char *still = mmap(0, PAGE, PROT_READ, MAP_SHARED, other, 0);
    NEED(still != MAP_FAILED);
    map[0] = 'm';
    EQUAL(msync(map, PAGE, MS_SYNC), 0, "a mapping is synchronized");
    CHECK(modified("/disk/mapped") > PAST, "which is a change of its file");
    EQUAL(msync(still, PAGE, MS_SYNC), 0, "and so is another one, which has no change");
    disk_power_fails();
}

int main(void) {
    test_start();
    if (access("/disk/other", F_OK) != 0) {
        first_time();
        return test_end();
    }
    EQUAL(modified("/disk/old"), PAST, "a file that is only read keeps its time");
    EQUAL(modified("/disk/other"), PAST, "and so does one that was only mapped");
    CHECK(modified("/disk/written") > PAST, "a write is on the disk");
    CHECK(modified("/disk/cut") > PAST, "and a truncation");
    CHECK(modified("/disk/mapped") > PAST, "and a write through a mapping");
    return test_end();
}
