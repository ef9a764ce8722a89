// ftruncate, truncate, fallocate with holes, SEEK_DATA and SEEK_HOLE, in
// /tmp, in /dev/shm and in a memfd; a file that lives on after unlink.

#include "test.h"

#ifndef FALLOC_FL_KEEP_SIZE
#define FALLOC_FL_KEEP_SIZE 1
#define FALLOC_FL_PUNCH_HOLE 2
#endif

static off_t size_of(int file) {
    struct stat status;
    NEED(fstat(file, &status) == 0);
    return status.st_size;
}

static int is(int file, off_t offset, size_t length, char value) {
    static char buffer[65536];
    if (pread(file, buffer, length, offset) != (ssize_t)length)
        return 0;
    for (size_t index = 0; index < length; index++)
        if (buffer[index] != value)
            return 0;
    return 1;
}

static void check(int file, const char *path) {
    static char data[16 * 4096];
    memset(data, 'd', sizeof data);
    NEED(file >= 0);
    WORKS(ftruncate(file, 100), "ftruncate grows");
    EQUAL(size_of(file), 100, "to the size asked for");
    CHECK(is(file, 0, 100, 0), "with zeros");
    STEP_EQUAL(pwrite(file, data, 5000, 0), 5000);
    WORKS(ftruncate(file, 10), "ftruncate shrinks");
    WORKS(ftruncate(file, 5000), "and grows again");
    CHECK(is(file, 0, 10, 'd') && is(file, 10, 4990, 0), "what was cut off is zero");
    FAILS(ftruncate(file, -1), EINVAL, "ftruncate to -1");
    FAILS(ftruncate(999, 0), EBADF, "ftruncate: bad descriptor");
    if (path) {
        WORKS(truncate(path, 123), "truncate by path");
        EQUAL(size_of(file), 123, "truncate: the size");
        int other = open(path, O_RDONLY);
        FAILS(ftruncate(other, 0), EINVAL, "ftruncate: not open for writing");
        close(other);
    }
    WORKS(ftruncate(file, 0), "ftruncate to nothing");
    WORKS(fallocate(file, 0, 0, 10 * PAGE), "fallocate");
    EQUAL(size_of(file), 10 * PAGE, "fallocate grows the file");
    CHECK(is(file, 0, 10 * PAGE, 0), "fallocate gives zeros");
    WORKS(fallocate(file, FALLOC_FL_KEEP_SIZE, 0, 12 * PAGE), "fallocate KEEP_SIZE");
    EQUAL(size_of(file), 10 * PAGE, "KEEP_SIZE keeps the size");
    STEP_EQUAL(pwrite(file, data, sizeof data, 0), sizeof data);
    struct stat before, after;
    fstat(file, &before);
    WORKS(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4 * PAGE, 4 * PAGE),
          "fallocate punches a hole");
    fstat(file, &after);
    CHECK(is(file, 0, 4 * PAGE, 'd') && is(file, 4 * PAGE, 4 * PAGE, 0) &&
              is(file, 8 * PAGE, 8 * PAGE, 'd'),
          "the hole and only the hole is zero");
    EQUAL(after.st_size, before.st_size, "a hole keeps the size");
    CHECK(after.st_blocks <= before.st_blocks, "a hole uses no more blocks");
    WORKS(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE / 2, PAGE),
          "fallocate punches a hole at odd places");
    CHECK(is(file, 0, PAGE / 2, 'd') && is(file, PAGE / 2, PAGE, 0) &&
              is(file, PAGE / 2 + PAGE, PAGE / 2, 'd'),
          "byte by byte");
    FAILS(fallocate(file, FALLOC_FL_PUNCH_HOLE, 0, PAGE), EOPNOTSUPP, "a hole needs KEEP_SIZE");
    FAILS(fallocate(file, 0, -1, PAGE), EINVAL, "fallocate at -1");
    FAILS(fallocate(file, 0, 0, 0), EINVAL, "fallocate of nothing");

    STEP_EQUAL(ftruncate(file, 0), 0);
    STEP_EQUAL(ftruncate(file, 64 * PAGE), 0);
    STEP_EQUAL(pwrite(file, data, PAGE, 32 * PAGE), PAGE);
    EQUAL(lseek(file, 0, SEEK_DATA), 32 * PAGE, "SEEK_DATA finds the data");
    EQUAL(lseek(file, 33 * PAGE - 5, SEEK_DATA), 33 * PAGE - 5, "SEEK_DATA inside data");
    EQUAL(lseek(file, 0, SEEK_HOLE), 0, "SEEK_HOLE in a hole");
    EQUAL(lseek(file, 32 * PAGE, SEEK_HOLE), 33 * PAGE, "SEEK_HOLE behind the data");
    FAILS(lseek(file, 33 * PAGE, SEEK_DATA), ENXIO, "SEEK_DATA where none follows");
    FAILS(lseek(file, 64 * PAGE, SEEK_HOLE), ENXIO, "SEEK_HOLE at the end");
    EQUAL(lseek(file, 64 * PAGE - 1, SEEK_HOLE), 64 * PAGE - 1, "SEEK_HOLE at the last byte");
}

int main(void) {
    test_start();
    static const char *paths[] = {"/tmp/file-size", "/dev/shm/file-size"};
    for (int index = 0; index < 2; index++) {
        test_print("in %s", paths[index]);
        int file = open(paths[index], O_RDWR | O_CREAT | O_TRUNC, 0600);
        check(file, paths[index]);
        STEP_EQUAL(pwrite(file, "still", 5, 0), 5);
        WORKS(unlink(paths[index]), "unlink while open");
        FAILS(open(paths[index], O_RDONLY), ENOENT, "the name is gone");
        struct stat status;
        fstat(file, &status);
        EQUAL(status.st_nlink, 0, "no link is left");
        char text[6] = "";
        STEP_EQUAL(pread(file, text, 5, 0), 5);
        CHECK(strcmp(text, "still") == 0, "the file lives on");
        char *mapping = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        CHECK(mapping != MAP_FAILED && strcmp(mapping, "still") == 0,
              "in a mapping even after close");
        munmap(mapping, PAGE);
    }
    test_print("in a memfd");
    int file = memfd_create("file-size", 0);
    check(file, 0);
    close(file);
    return test_end();
}
