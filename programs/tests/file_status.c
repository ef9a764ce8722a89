// stat, fstat, lstat, fstatat, statx, statfs, times.

#include "test.h"

#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>

int main(void) {
    test_start();
    const char *path = "/tmp/file-status";
    unlink(path);
    int file = open(path, O_RDWR | O_CREAT, 0604);
    NEED(file >= 0);
    static char data[10000];
    memset(data, 'x', sizeof data);
    STEP_EQUAL(write(file, data, sizeof data), sizeof data);
    fsync(file);
    struct stat one, two;
    WORKS(fstat(file, &one), "fstat");
    WORKS(stat(path, &two), "stat");
    CHECK(one.st_ino == two.st_ino && one.st_dev == two.st_dev && one.st_ino != 0,
          "stat and fstat agree on the file");
    EQUAL(one.st_mode, S_IFREG | 0604, "the mode");
    EQUAL(one.st_size, 10000, "the size");
    EQUAL(one.st_nlink, 1, "the links");
    CHECK(one.st_uid == 0 && one.st_gid == 0, "the owner");
    CHECK(one.st_blksize >= 512, "the block size");
    CHECK(one.st_blocks >= 10000 / 512 && one.st_blocks < 1000, "the blocks");
    WORKS(fstatat(AT_FDCWD, path, &two, AT_SYMLINK_NOFOLLOW), "fstatat");
    EQUAL(two.st_ino, one.st_ino, "fstatat finds the file");
    WORKS(fstatat(file, "", &two, AT_EMPTY_PATH), "fstatat AT_EMPTY_PATH");
    EQUAL(two.st_ino, one.st_ino, "AT_EMPTY_PATH is the descriptor itself");
    FAILS(fstatat(file, "", &two, 0), ENOENT, "fstatat: an empty path");
    FAILS(fstatat(AT_FDCWD, path, &two, 0x40000000), EINVAL, "fstatat: unknown flags");
    FAILS(stat("/nowhere", &one), ENOENT, "stat: nothing");
    FAILS(stat("/dev/null/x", &one), ENOTDIR, "stat: through a file");
    FAILS(fstat(999, &one), EBADF, "fstat: bad descriptor");

    STEP_EQUAL(stat("/", &one), 0);
    CHECK(S_ISDIR(one.st_mode), "the root is a directory");
    STEP_EQUAL(stat("/dev/null", &one), 0);
    CHECK(S_ISCHR(one.st_mode) && major(one.st_rdev) == 1 && minor(one.st_rdev) == 3,
          "/dev/null is character device 1:3");
    STEP_EQUAL(stat("/dev/zero", &one), 0);
    CHECK(S_ISCHR(one.st_mode) && major(one.st_rdev) == 1 && minor(one.st_rdev) == 5,
          "/dev/zero is character device 1:5");
    STEP_EQUAL(stat("/dev/shm", &one), 0);
    CHECK(S_ISDIR(one.st_mode), "/dev/shm is a directory");
    STEP_EQUAL(stat("/proc/self/status", &one), 0);
    CHECK(S_ISREG(one.st_mode), "/proc/self/status is a file");
    int pipes[2];
    NEED(pipe(pipes) == 0);
    STEP_EQUAL(fstat(pipes[0], &one), 0);
    CHECK(S_ISFIFO(one.st_mode), "a pipe is a FIFO");

    // Not every libc declares the structure: a place of 256 bytes, read at the
    // documented offsets.
    static uint32_t extended[64];
    EQUAL(syscall(SYS_statx, AT_FDCWD, path, 0, 0x7ff, extended), 0, "statx");
    CHECK((extended[0] & 0x7ff) >= 0x7ff - 0x20 - 0x40, "statx: the mask has the basics");
    EQUAL(extended[4], 1, "statx: the links");
    EQUAL(((uint16_t *)extended)[14], S_IFREG | 0604, "statx: the mode");
    uint64_t inode, size;
    memcpy(&inode, extended + 8, 8);
    memcpy(&size, extended + 10, 8);
    EQUAL(inode, two.st_ino, "statx: the inode");
    EQUAL(size, 10000, "statx: the size");
    EQUAL(syscall(SYS_statx, file, "", AT_EMPTY_PATH, 0x7ff, extended), 0, "statx AT_EMPTY_PATH");
    FAILS(syscall(SYS_statx, AT_FDCWD, "/nowhere", 0, 0x7ff, extended), ENOENT, "statx: nothing");

    struct timespec times[2] = {{1000000000, 0}, {1100000000, 0}};
    WORKS(utimensat(AT_FDCWD, path, times, 0), "utimensat");
    STEP_EQUAL(stat(path, &one), 0);
    CHECK(one.st_atime == 1000000000 && one.st_mtime == 1100000000, "the times are kept");
    STEP_EQUAL(pwrite(file, "y", 1, 0), 1);
    STEP_EQUAL(fstat(file, &one), 0);
    CHECK(one.st_mtime != 1100000000, "write sets the time of change");
    WORKS(futimens(file, 0), "futimens to now");

    static const char *places[] = {"/", "/tmp", "/dev/shm", "/proc", "/sys"};
    static const long magics[] = {0, 0, 0x01021994, 0x9fa0, 0x62656572};
    int before = test_failures;
    for (int index = 0; index < 5; index++) {
        struct statfs space;
        memset(&space, 0, sizeof space);
        STEP_EQUAL(statfs(places[index], &space), 0);
        STEP(space.f_bsize > 0 && space.f_namelen >= 255);
        STEP(space.f_bfree <= space.f_blocks);
        if (magics[index])
            STEP_EQUAL(space.f_type, magics[index]);
    }
    ALL_STEPS(before, "statfs of all places");
    struct statfs space;
    WORKS(fstatfs(file, &space), "fstatfs");
    struct statvfs portable;
    WORKS(statvfs("/tmp", &portable), "statvfs");
    FAILS(statfs("/nowhere", &space), ENOENT, "statfs: nothing");
    FAILS(fstatfs(999, &space), EBADF, "fstatfs: bad descriptor");
    sync();
    unlink(path);
    return test_end();
}
