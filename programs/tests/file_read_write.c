// read, write, pread, pwrite, readv, writev, lseek, sendfile and their limits.

#include "test.h"

#include <sys/sendfile.h>
#include <sys/uio.h>

#define LENGTH 300000

int main(void) {
    test_start();
    const char *path = "/tmp/file-read-write";
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    char *pattern = malloc(LENGTH), *back = calloc(1, LENGTH);
    NEED(pattern && back);
    for (int index = 0; index < LENGTH; index++)
        pattern[index] = index * 7 + index / 4096;

    EQUAL(write(file, pattern, LENGTH), LENGTH, "write: 300000 bytes");
    EQUAL(lseek(file, 0, SEEK_CUR), LENGTH, "write moves the offset");
    EQUAL(read(file, back, 10), 0, "read at the end gives 0");
    EQUAL(lseek(file, 0, SEEK_SET), 0, "lseek to the start");
    EQUAL(read(file, back, LENGTH), LENGTH, "read: 300000 bytes");
    CHECK(memcmp(pattern, back, LENGTH) == 0, "read gives what was written");
    EQUAL(lseek(file, -10, SEEK_END), LENGTH - 10, "lseek from the end");
    EQUAL(read(file, back, 100), 10, "read is short at the end");
    EQUAL(lseek(file, 5, SEEK_SET), 5, "lseek to an odd place");
    EQUAL(lseek(file, -3, SEEK_CUR), 2, "lseek relative");
    FAILS(lseek(file, -3, SEEK_CUR), EINVAL, "lseek before the start");
    FAILS(lseek(file, 0, 77), EINVAL, "lseek: unknown whence");
    FAILS(lseek(999, 0, SEEK_SET), EBADF, "lseek: bad descriptor");

    EQUAL(pread(file, back, 5000, 4093), 5000, "pread across pages");
    CHECK(memcmp(back, pattern + 4093, 5000) == 0, "pread gives the right bytes");
    EQUAL(lseek(file, 0, SEEK_CUR), 2, "pread keeps the offset");
    EQUAL(pwrite(file, "PATCH", 5, 8190), 5, "pwrite across pages");
    memcpy(pattern + 8190, "PATCH", 5);
    EQUAL(pread(file, back, LENGTH, 0), LENGTH, "pread of all");
    CHECK(memcmp(pattern, back, LENGTH) == 0, "pwrite writes where it must only");
    FAILS(pread(file, back, 5, -1), EINVAL, "pread at -1");
    FAILS(pwrite(file, back, 5, -1), EINVAL, "pwrite at -1");
    EQUAL(pread(file, back, 5, LENGTH + 1000), 0, "pread behind the end");
    EQUAL(pread(file, back, 0, 0), 0, "pread of nothing");
    EQUAL(write(file, back, 0), 0, "write of nothing");

    lseek(file, 100, SEEK_SET);
    struct iovec out[3] = {{"abc", 3}, {"", 0}, {"defgh", 5}};
    EQUAL(writev(file, out, 3), 8, "writev");
    char one[4] = "", two[10] = "";
    struct iovec in[2] = {{one, 3}, {two, 5}};
    lseek(file, 100, SEEK_SET);
    EQUAL(readv(file, in, 2), 8, "readv");
    CHECK(strcmp(one, "abc") == 0 && strcmp(two, "defgh") == 0, "readv fills in order");
    EQUAL(preadv(file, in, 2, 101), 8, "preadv");
    CHECK(strcmp(one, "bcd") == 0, "preadv reads at its place");
    EQUAL(pwritev(file, out, 3, 200), 8, "pwritev");
    FAILS(syscall(SYS_readv, file, in, -1), EINVAL, "readv: a negative count");
    FAILS(syscall(SYS_readv, file, in, 1025), EINVAL, "readv: more than 1024 pieces");
    EQUAL(readv(file, in, 0), 0, "readv: no pieces");
    struct iovec negative[1] = {{one, (size_t)-1}};
    FAILS(readv(file, negative, 1), EINVAL, "readv: a negative length");

    FAILS(read(file, test_wild(8), 10), EFAULT, "read to a bad pointer");
    FAILS(write(file, test_wild(8), 10), EFAULT, "write from a bad pointer");
    char *edge = test_map(2 * PAGE);
    munmap(edge + PAGE, PAGE);
    memset(edge, 'e', PAGE);
    lseek(file, 0, SEEK_SET);
    ssize_t count = write(file, edge + PAGE - 10, 20);
    CHECK(count == 10 || (count == -1 && errno == EFAULT), "write stops at the end of a mapping");
    lseek(file, 0, SEEK_SET);
    count = read(file, edge + PAGE - 10, 20);
    CHECK(count == 10 || (count == -1 && errno == EFAULT), "read stops at the end of a mapping");

    STEP_EQUAL(ftruncate(file, 0), 0);
    EQUAL(pwrite(file, "end", 3, 1000000), 3, "write far behind the end");
    struct stat status;
    fstat(file, &status);
    EQUAL(status.st_size, 1000003, "the file grows");
    memset(back, 1, 1000);
    EQUAL(pread(file, back, 1000, 500000), 1000, "the gap can be read");
    int sum = 0;
    for (int index = 0; index < 1000; index++)
        sum |= back[index];
    EQUAL(sum, 0, "the gap reads as zeros");

    int target = open("/tmp/file-send", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(target >= 0);
    STEP_EQUAL(ftruncate(file, 0), 0);
    STEP_EQUAL(pwrite(file, pattern, LENGTH, 0), LENGTH);
    off_t offset = 5;
    EQUAL(sendfile(target, file, &offset, 100000), 100000, "sendfile from file to file");
    EQUAL(offset, 100005, "sendfile moves the given offset");
    EQUAL(pread(target, back, LENGTH, 0), 100000, "sendfile: the target's length");
    CHECK(memcmp(back, pattern + 5, 100000) == 0, "sendfile copies the bytes");
    lseek(file, LENGTH - 4, SEEK_SET);
    EQUAL(sendfile(target, file, 0, 100), 4, "sendfile stops at the end");
    EQUAL(lseek(file, 0, SEEK_CUR), LENGTH, "sendfile without offset moves the file's");
    int appended = open("/tmp/appended", O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0600);
    NEED(appended >= 0 && write(appended, "first", 5) == 5);
    offset = 0;
    FAILS(sendfile(appended, file, &offset, 5), EINVAL, "sendfile to a file that is appended to");
    loff_t from = 0, to = 0;
    FAILS(copy_file_range(file, &from, appended, &to, 5, 0), EBADF, "copy_file_range to such a file");
    EQUAL(pread(appended, back, 10, 0), 5, "nothing was copied");
    CHECK(memcmp(back, "first", 5) == 0, "over what is there");
    close(appended);
    unlink("/tmp/appended");
    FAILS(copy_file_range(file, &from, target, &to, 5, 1), EINVAL, "copy_file_range: unknown flags");
    to = 4;
    FAILS(copy_file_range(file, &from, file, &to, 5, 0), EINVAL, "copy_file_range: overlapping ranges");
    to = 5;
    EQUAL(copy_file_range(file, &from, file, &to, 5, 0), 5, "copy_file_range within a file");
    STEP_EQUAL(pread(file, back, 10, 0), 10);
    CHECK(memcmp(back, pattern, 5) == 0 && memcmp(back + 5, pattern, 5) == 0, "copies the bytes");
    STEP_EQUAL(pwrite(file, pattern, 10, 0), 10);
    int pipes[2];
    NEED(pipe(pipes) == 0);
    offset = 0;
    EQUAL(sendfile(pipes[1], file, &offset, 5000), 5000, "sendfile to a pipe");
    STEP_EQUAL(read(pipes[0], back, 5000), 5000);
    CHECK(memcmp(back, pattern, 5000) == 0, "sendfile to a pipe copies the bytes");
    FAILS(lseek(pipes[0], 0, SEEK_CUR), ESPIPE, "lseek: a pipe");
    FAILS(pread(pipes[0], back, 1, 0), ESPIPE, "pread: a pipe");
    WORKS(fsync(file), "fsync");
    WORKS(fdatasync(file), "fdatasync");
    FAILS(fsync(pipes[0]), EINVAL, "fsync: a pipe");
    FAILS(fsync(999), EBADF, "fsync: bad descriptor");
    int all = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    WORKS(sync_file_range(file, 0, 0, all), "sync_file_range");
    WORKS(sync_file_range(file, 1 << 20, 1, 0), "sync_file_range: behind the end, without a flag");
    FAILS(sync_file_range(file, 0, 1, 8), EINVAL, "sync_file_range: unknown flags");
    FAILS(sync_file_range(file, -1, 1, all), EINVAL, "sync_file_range: an offset below 0");
    FAILS(sync_file_range(file, 1, INT64_MAX, all), EINVAL, "sync_file_range: an end beyond all files");
    FAILS(sync_file_range(file, 1, -1, all), EINVAL, "sync_file_range: an end before the start");
    FAILS(sync_file_range(pipes[0], 0, 1, all), ESPIPE, "sync_file_range: a pipe");
    FAILS(sync_file_range(999, 0, 1, 8), EBADF, "sync_file_range: bad descriptor");

    char *mapping = mmap(0, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, target, 0);
    NEED(mapping != MAP_FAILED);
    STEP_EQUAL(ftruncate(target, LENGTH), 0);
    EQUAL(pread(file, mapping, LENGTH, 0), LENGTH, "read of one file into a mapping of another");
    EQUAL(pread(target, back, LENGTH, 0), LENGTH, "and it is in the other file");
    CHECK(memcmp(back, pattern, LENGTH) == 0, "byte by byte");
    EQUAL(pwrite(target, mapping, 10000, 20000), 10000, "write of a file's mapping to itself");
    CHECK(memcmp(mapping + 20000, pattern, 10000) == 0, "is seen in the mapping");
    close(target);
    close(file);
    unlink(path);
    unlink("/tmp/file-send");
    return test_end();
}
