// disk: 16M
// kernel-only: it needs the kernel's disk
//
// Files of the disk: written, synchronized, mapped, cut, renamed and removed. The machine is
// started twice with the same disk. The second time the files are as the first time left them.

#include <sys/statfs.h>

#include "test.h"

#define SIZE (600 * 1024 + 100)

static unsigned char byte_of(size_t at) { return (unsigned char)(at * 7 + at / 4096); }

static int holds(const unsigned char *bytes, size_t from, size_t to) {
    for (size_t at = from; at < to; at++)
        if (bytes[at] != byte_of(at))
            return 0;
    return 1;
}

static unsigned char bytes[SIZE + 4096];

static int a_pipe(void) {
    static int ends[2];
    NEED(ends[0] != 0 || pipe(ends) == 0);
    return ends[0];
}

static int is_whole(const char *path, size_t size) {
    int file = open(path, O_RDONLY);
    NEED(file >= 0);
    ssize_t count = read(file, bytes, sizeof bytes);
    close(file);
    return count == (ssize_t)size && holds(bytes, 0, size);
}

static void first_time(void) {
    for (size_t at = 0; at < SIZE; at++)
        bytes[at] = byte_of(at);
    int file = open("/disk/new", O_RDWR | O_CREAT | O_EXCL, 0640);
    NEED(file >= 0);
    NEED(write(file, bytes, SIZE) == SIZE);
    EQUAL(fsync(file), 0, "a file is synchronized");
    EQUAL(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0, "its pages are dropped");
    memset(bytes, 0, sizeof bytes);
    CHECK(is_whole("/disk/new", SIZE), "and read again from the disk");
    struct stat status;
    NEED(fstat(file, &status) == 0);
    CHECK(status.st_size == SIZE && status.st_blocks >= SIZE / 512, "it has its size and its blocks");

    unsigned char *map = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    unsigned char *own = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    NEED(map != MAP_FAILED && own != MAP_FAILED);
    CHECK(holds(map, 0, SIZE), "a mapping shows it");
    own[5000] ^= 1;
    map[SIZE] = 99; // Behind the end, which is not kept.
    map[70000] ^= 0xff;
    EQUAL(msync(map, SIZE, MS_SYNC), 0, "a mapping is synchronized");
    map[70000] ^= 0xff;
    CHECK(own[5000] != byte_of(5000) && map[5000] == byte_of(5000), "a private page is private");
    EQUAL(fdatasync(file), 0, "and so are its data");
    munmap(map, SIZE);
    munmap(own, SIZE);

    EQUAL(ftruncate(file, 100001), 0, "a file is cut");
    EQUAL(ftruncate(file, 110000), 0, "and grows again");
    EQUAL(fsync(file), 0, "and is synchronized");
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    NEED(pread(file, bytes, sizeof bytes, 0) == 110000);
    int zeroes = 1;
    for (size_t at = 100001; at < 110000; at++)
        zeroes &= bytes[at] == 0;
    CHECK(holds(bytes, 0, 100001) && zeroes, "the rest is zeroes");
    EQUAL(posix_fadvise(file, 0, -1, POSIX_FADV_NORMAL), EINVAL, "no length is negative");
    EQUAL(posix_fadvise(file, 0, 0, 99), EINVAL, "nor is any advice unknown");
    EQUAL(ftruncate(file, 100001), 0, "and is cut again");
    close(file);

    int other = open("/disk/kept", O_WRONLY | O_CREAT, 0600);
    NEED(other >= 0 && write(other, "old", 3) == 3 && close(other) == 0);
    EQUAL(rename("/disk/new", "/disk/kept"), 0, "a file takes the name of another");
    FAILS(access("/disk/new", F_OK), ENOENT, "and loses its own");

    int gone = open("/disk/gone", O_RDWR | O_CREAT, 0600);
    NEED(gone >= 0 && write(gone, "gone", 4) == 4);
    EQUAL(unlink("/disk/gone"), 0, "an open file loses its name");
    NEED(fsync(gone) == 0 && pread(gone, bytes, 10, 0) == 4);
    CHECK(memcmp(bytes, "gone", 4) == 0, "and stays as long as it is open");
    close(gone);
    EQUAL(posix_fadvise(a_pipe(), 0, 0, POSIX_FADV_NORMAL), ESPIPE, "a pipe takes no advice");
    struct statfs volume;
    NEED(statfs("/disk", &volume) == 0);
    CHECK(volume.f_blocks > volume.f_bfree && volume.f_bfree > 0, "the disk has a size");
    FAILS(mkdir("/disk/folder", 0700), EPERM, "the disk has one directory");
    FAILS(rename("/disk/kept", "/tmp/kept"), EXDEV, "no file leaves it by its name");
    sync();
}

int main(void) {
    test_start();
    if (access("/disk/kept", F_OK) != 0)
        first_time();
    CHECK(is_whole("/disk/kept", 100001), "a file is what it was");
    struct stat status;
    NEED(stat("/disk/kept", &status) == 0);
    EQUAL(status.st_mode & 07777, 0640, "and has its permissions");
    FAILS(access("/disk/gone", F_OK), ENOENT, "one that was removed is gone");
    return test_end();
}
