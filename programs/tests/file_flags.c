// preadv2 and pwritev2: the offset, the position, and each flag on each kind of
// file.

#include "test.h"

#include <sys/uio.h>

enum { HIPRI = 1, DSYNC = 2, SYNC = 4, NOWAIT = 8, APPEND = 16, NOAPPEND = 32, UNKNOWN = 1 << 20 };

static char bytes[100] = "abcdefgh";

static long get(int file, size_t count, long offset, int flags) {
    struct iovec to[2] = {{bytes + 50, count / 2}, {bytes + 50 + count / 2, count - count / 2}};
    memset(bytes + 50, 0, 50);
    return syscall(SYS_preadv2, file, to, 2L, offset, 0L, flags);
}

static long put(int file, const char *text, long offset, int flags) {
    size_t count = strlen(text);
    struct iovec from[2] = {{(char *)text, count / 2},
                            {(char *)text + count / 2, count - count / 2}};
    return syscall(SYS_pwritev2, file, from, 2L, offset, 0L, flags);
}

static int holds(int file, const char *text) {
    char found[100] = {0};
    ssize_t count = pread(file, found, 99, 0);
    return count == (ssize_t)strlen(text) && strcmp(found, text) == 0;
}

static off_t position(int file) { return lseek(file, 0, SEEK_CUR); }

int main(void) {
    test_start();
    int file = syscall(SYS_memfd_create, "flags", 0);
    NEED(file >= 0);
    EQUAL(put(file, "0123456789", 0, 0), 10, "pwritev2 at an offset");
    EQUAL(position(file), 0, "leaves the position");
    EQUAL(put(file, "ab", -1, 0), 2, "pwritev2 at -1");
    EQUAL(position(file), 2, "moves the position");
    CHECK(holds(file, "ab23456789"), "and writes there");
    EQUAL(get(file, 3, 4, 0), 3, "preadv2 at an offset");
    CHECK(strcmp(bytes + 50, "456") == 0 && position(file) == 2, "leaves the position");
    EQUAL(get(file, 3, -1, 0), 3, "preadv2 at -1");
    CHECK(strcmp(bytes + 50, "234") == 0 && position(file) == 5, "moves the position");
    FAILS(get(file, 3, -2, 0), EINVAL, "another negative offset");
    FAILS(put(file, "x", -2, 0), EINVAL, "for writing too");
    EQUAL(put(file, "end", 1L << 32, 0), 3, "an offset beyond 32 bits");
    struct stat status;
    fstat(file, &status);
    EQUAL(status.st_size, (1LL << 32) + 3, "counts in full");
    struct iovec one = {bytes + 50, 1};
    EQUAL(syscall(SYS_preadv2, file, &one, 1L, 3L, 5L, 0), 1,
          "an offset has one register, whatever the next holds");
    EQUAL(bytes[50], '3', "and counts");
    NEED(ftruncate(file, 10) == 0);

    EQUAL(put(file, "E", 3, APPEND), 1, "RWF_APPEND");
    CHECK(holds(file, "ab23456789E"), "writes at the end");
    lseek(file, 1, SEEK_SET);
    EQUAL(put(file, "F", -1, APPEND), 1, "RWF_APPEND at -1");
    EQUAL(position(file), 12, "moves the position behind the end");
    NEED(fcntl(file, F_SETFL, O_APPEND) == 0);
    EQUAL(put(file, "G", 0, 0), 1, "a file opened for appending");
    CHECK(holds(file, "ab23456789EFG"), "is appended to at any offset");
    EQUAL(put(file, "X", 0, NOAPPEND), 1, "unless RWF_NOAPPEND is given");
    CHECK(holds(file, "Xb23456789EFG"), "which writes at the offset");
    lseek(file, 1, SEEK_SET);
    EQUAL(put(file, "Y", -1, NOAPPEND), 1, "RWF_NOAPPEND at -1");
    CHECK(holds(file, "XY23456789EFG") && position(file) == 2, "writes at the position");
    FAILS(put(file, "Z", 0, APPEND | NOAPPEND), EINVAL, "both contradict each other");
    FAILS(get(file, 1, 0, APPEND | NOAPPEND), EINVAL, "for reading too");

    int before = test_failures;
    int fine[] = {HIPRI, DSYNC, SYNC, APPEND, NOAPPEND, HIPRI | DSYNC | SYNC};
    for (unsigned index = 0; index < sizeof fine / sizeof *fine; index++) {
        STEP_EQUAL(put(file, "aa", 0, fine[index]), 2);
        STEP_EQUAL(get(file, 2, 0, fine[index]), 2);
    }
    ALL_STEPS(before, "RWF_HIPRI, RWF_DSYNC and RWF_SYNC are taken");
    FAILS(put(file, "aa", 0, NOWAIT), EOPNOTSUPP, "a memfd does not know RWF_NOWAIT");
    FAILS(get(file, 2, 0, NOWAIT), EOPNOTSUPP, "for reading too");
    FAILS(put(file, "aa", 0, UNKNOWN), EOPNOTSUPP, "an unknown flag");
    FAILS(get(file, 2, 0, UNKNOWN), EOPNOTSUPP, "for reading too");
    EQUAL(get(file, 0, 0, UNKNOWN), 0, "reading nothing is not looked at");

    int ends[2];
    NEED(pipe(ends) == 0);
    FAILS(put(ends[1], "aa", 0, 0), ESPIPE, "a pipe has no offsets");
    FAILS(get(ends[0], 2, 0, 0), ESPIPE, "for reading either");
    FAILS(get(ends[0], 2, -2, UNKNOWN), EINVAL, "whose sign is looked at first");
    EQUAL(put(ends[1], "aa", -1, NOWAIT), 2, "a pipe knows RWF_NOWAIT");
    EQUAL(get(ends[0], 2, -1, NOWAIT), 2, "and reads what is there");
    FAILS(get(ends[0], 2, -1, NOWAIT), EAGAIN, "without waiting for more");
    while (put(ends[1], "full", -1, NOWAIT) > 0)
        ;
    EQUAL(errno, EAGAIN, "nor for room");

    int zero = open("/dev/zero", O_RDWR);
    EQUAL(get(zero, 2, -1, NOWAIT), 2, "so does a device");
    int maps = open("/proc/self/maps", O_RDONLY);
    EQUAL(get(maps, 2, -1, HIPRI), 2, "a file of /proc knows RWF_HIPRI");
    FAILS(get(maps, 2, -1, SYNC), EOPNOTSUPP, "and no other flag");
    FAILS(put(maps, "aa", -1, 0), EBADF, "and is not written");
    FAILS(get(-1, 2, 0, 0), EBADF, "no descriptor");
    return test_end();
}
