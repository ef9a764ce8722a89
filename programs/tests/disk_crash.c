// disk: 16M
// starts: 43
// option: provoke=power-loss
// kernel-only: it needs the kernel's disk, and a machine whose power fails
//
// The power fails at each point of an fsync, a rename, an unlink and a truncation, of a new file under
// the name that another has left, and of an fsync of the directory: before its first
// write to the disk, before its second, and so on. Then the device loses each of these writes from
// its cache, and keeps those behind it, up to the next flush or the end of the call. Each time the
// next start finds the old state or the new one.

#include "disk.h"

#define OLD (3 * PAGE)
#define NEW (5 * PAGE + 100)
#define CUT 5000
#define END (OLD - 1000)
#define STRETCHES 320

static char bytes[NEW + PAGE];

static void make(const char *path, char byte, size_t size) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    memset(bytes, byte, size);
    NEED(file >= 0 && write(file, bytes, size) == (ssize_t)size && fsync(file) == 0);
    NEED(close(file) == 0);
}

// The size of a file; -1 if there is none.
static long read_all(const char *path) {
    memset(bytes, 0, sizeof bytes);
    int file = open(path, O_RDONLY);
    if (file < 0)
        return -1;
    ssize_t count = read(file, bytes, sizeof bytes);
    NEED(close(file) == 0);
    return count;
}

static int is_all(char byte, size_t from, size_t to) {
    for (size_t at = from; at < to; at++)
        if (bytes[at] != byte)
            return 0;
    return 1;
}

static int is_whole(const char *path, char byte, size_t size) {
    return read_all(path) == (long)size && is_all(byte, 0, size);
}

static void make_grown(void) { make("/disk/grown", 'o', OLD); }

static void grow(void) {
    int file = open("/disk/grown", O_RDWR);
    memset(bytes, 'n', sizeof bytes);
    NEED(file >= 0 && pwrite(file, bytes, NEW - OLD, OLD) == NEW - OLD && fsync(file) == 0);
}

static void check_grown(void) {
    long size = read_all("/disk/grown");
    CHECK(is_all('o', 0, OLD), "fsync: what was stored before is there");
    CHECK(size == OLD || (size == NEW && is_all('n', OLD, NEW)), "fsync: all of the rest, or none");
}

static void make_named(void) {
    make("/disk/source", 's', OLD);
    make("/disk/target", 't', PAGE);
}

static void rename_over(void) { NEED(rename("/disk/source", "/disk/target") == 0); }

static void check_named(void) {
    int is_new = is_whole("/disk/target", 's', OLD) && read_all("/disk/source") == -1;
    CHECK(is_new || (is_whole("/disk/target", 't', PAGE) && is_whole("/disk/source", 's', OLD)),
          "rename: both files have their names, or one has that of the other");
}

static void make_removed(void) { make("/disk/removed", 'r', OLD); }

static void remove_it(void) { NEED(unlink("/disk/removed") == 0); }

static void check_removed(void) {
    CHECK(read_all("/disk/removed") == -1 || is_whole("/disk/removed", 'r', OLD),
          "unlink: the file is whole or gone");
}

static void make_cut(void) { make("/disk/cut", 'c', OLD); }

static void cut(void) { NEED(truncate("/disk/cut", CUT) == 0); }

// The file stays open: its close would write its block again.
static void cut_end(void) {
    int file = open("/disk/cut", O_RDWR);
    NEED(file >= 0 && ftruncate(file, END) == 0);
}

static void check_cut_to(long size) {
    CHECK(is_whole("/disk/cut", 'c', OLD) || is_whole("/disk/cut", 'c', size),
          "truncate: the file is whole or cut");
    if (read_all("/disk/cut") == size) {
        NEED(truncate("/disk/cut", OLD) == 0);
        CHECK(read_all("/disk/cut") == OLD && is_all(0, size, OLD), "truncate: the rest is gone");
    }
}

static void check_cut(void) { check_cut_to(CUT); }

static void check_cut_end(void) { check_cut_to(END); }

// A file in more stretches than its block has room for.
static void scatter(int from, int to) {
    int file = open("/disk/scattered", O_RDWR | O_CREAT, 0600);
    memset(bytes, 'w', PAGE);
    NEED(file >= 0);
    for (int page = from; page < to; page++)
        NEED(pwrite(file, bytes, PAGE, (off_t)page * 2 * PAGE) == PAGE);
    NEED(fsync(file) == 0 && close(file) == 0);
}

static void make_scattered(void) { scatter(0, STRETCHES); }

static void scatter_more(void) { scatter(STRETCHES, STRETCHES + 2); }

static void check_scattered(void) {
    int file = open("/disk/scattered", O_RDONLY);
    struct stat status;
    NEED(file >= 0 && fstat(file, &status) == 0);
    long pages = status.st_size / PAGE / 2 + 1;
    CHECK(pages == STRETCHES || pages == STRETCHES + 2, "fsync: all new stretches, or none");
    int whole = 1;
    for (long page = 0; page < pages; page++)
        whole &= pread(file, bytes, PAGE, page * 2 * PAGE) == PAGE && is_all('w', 0, PAGE);
    CHECK(whole, "fsync: each stretch has its content");
    NEED(close(file) == 0 && unlink("/disk/scattered") == 0);
}

// A log, and the new one under its name.
static void make_log(void) { make("/disk/log", 'l', OLD); }

static void rotate_log(void) {
    NEED(rename("/disk/log", "/disk/log.1") == 0);
    NEED(open("/disk/log", O_RDWR | O_CREAT, 0600) >= 0);
}

static void check_log(void) {
    CHECK(is_whole("/disk/log", 'l', OLD) || is_whole("/disk/log.1", 'l', OLD),
          "rename and create: the old file has one of its names");
    unlink("/disk/log");
    unlink("/disk/log.1");
}

// Whether the device loses a write of the change.
static int is_losing;

static void make_moved(void) { make("/disk/moved", 'm', OLD); }

static void move_it(void) {
    int directory = open("/disk", O_RDONLY | O_DIRECTORY);
    NEED(directory >= 0 && rename("/disk/moved", "/disk/there") == 0 && fsync(directory) == 0);
    CHECK(!is_losing, "fsync of a directory: the device is to keep what was written before");
}

static void check_moved(void) {
    CHECK(is_whole("/disk/moved", 'm', OLD) || is_whole("/disk/there", 'm', OLD),
          "fsync of a directory: the file has one of its names");
    unlink("/disk/there");
}

static const struct {
    void (*make)(void), (*change)(void), (*check)(void);
    // The writes of the change, at least.
    int writes;
} changes[] = {
    {make_grown, grow, check_grown, 3},
    {make_named, rename_over, check_named, 2},
    {make_removed, remove_it, check_removed, 1},
    {make_cut, cut, check_cut, 2},
    {make_cut, cut_end, check_cut_end, 2},
    {make_scattered, scatter_more, check_scattered, 4},
    {make_log, rotate_log, check_log, 2},
    {make_moved, move_it, check_moved, 1},
};

#define CHANGES (int)(sizeof changes / sizeof *changes)

// The change of a start, and its point: before a change or behind a write of it, and then a write
// that is lost.
static int point_of(int start, int *change) {
    for (*change = 0; *change < CHANGES; ++*change) {
        if (start <= 2 * changes[*change].writes)
            return start;
        start -= 2 * changes[*change].writes + 1;
    }
    return -1;
}

int main(void) {
    test_start();
    int start = read_all("/disk/start") <= 0 ? 0 : bytes[0];
    int change;
    if (start > 0) {
        NEED(point_of(start - 1, &change) >= 0);
        changes[change].check();
    }
    int point = point_of(start, &change);
    if (point >= 0 && test_failures == 0) {
        changes[change].make();
        make("/disk/start", (char)(start + 1), 1);
        disk_has_no_writer();
        int writes = changes[change].writes;
        if (point <= writes)
            disk_power_fails_before(point + 1);
        else
            disk_loses(point - writes);
        is_losing = point > writes;
        changes[change].change();
        // The change had no more writes, or no flush behind the lost one.
        disk_power_fails();
    }
    return test_end();
}
