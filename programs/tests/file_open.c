// open and its flags, access, permissions, close.

#include "test.h"

int main(void) {
    test_start();
    const char *path = "/tmp/file-open";
    unlink(path);
    struct stat status;
    char text[20] = "";

    FAILS(open(path, O_RDONLY), ENOENT, "open: no such file");
    int file = open(path, O_RDWR | O_CREAT | O_EXCL, 0640);
    WORKS(file, "open: O_CREAT|O_EXCL makes a file");
    STEP_EQUAL(fstat(file, &status), 0);
    EQUAL(status.st_mode & 07777, 0640, "open: the mode is kept");
    EQUAL(status.st_size, 0, "open: a new file is empty");
    FAILS(open(path, O_RDWR | O_CREAT | O_EXCL, 0640), EEXIST, "open: O_EXCL and an old file");
    STEP_EQUAL(write(file, "0123456789", 10), 10);
    close(file);
    FAILS(close(file), EBADF, "close: a closed descriptor");
    FAILS(close(-1), EBADF, "close: descriptor -1");

    file = open(path, O_RDONLY | O_CREAT, 0600);
    EQUAL(read(file, text, 20), 10, "open: O_CREAT keeps an old file");
    FAILS(write(file, "x", 1), EBADF, "write: not open for writing");
    EQUAL(fcntl(file, F_GETFL) & O_ACCMODE, O_RDONLY, "fcntl: F_GETFL gives the mode");
    close(file);
    file = open(path, O_WRONLY);
    FAILS(read(file, text, 20), EBADF, "read: not open for reading");
    close(file);
    file = open(path, O_WRONLY | O_APPEND);
    lseek(file, 0, SEEK_SET);
    EQUAL(write(file, "ab", 2), 2, "open: O_APPEND writes");
    EQUAL(lseek(file, 0, SEEK_CUR), 12, "open: O_APPEND writes at the end");
    close(file);
    file = open(path, O_RDWR | O_TRUNC);
    EQUAL(lseek(file, 0, SEEK_END), 0, "open: O_TRUNC empties the file");
    STEP_EQUAL(write(file, "abc", 3), 3);
    close(file);
    file = open(path, O_RDONLY | O_TRUNC);
    EQUAL(lseek(file, 0, SEEK_END), 0, "open: O_TRUNC does, even for reading");
    close(file);

    FAILS(open(path, O_RDONLY | O_DIRECTORY), ENOTDIR, "open: O_DIRECTORY and a file");
    FAILS(open("/tmp", O_WRONLY), EISDIR, "open: a directory for writing");
    FAILS(open("/tmp/file-open/x", O_RDONLY), ENOTDIR, "open: a path through a file");
    FAILS(open("/tmp/file-open/", O_RDONLY), ENOTDIR, "open: a slash behind a file");
    FAILS(open("/nowhere/x", O_WRONLY | O_CREAT, 0600), ENOENT, "open: no such directory");
    FAILS(open("", O_RDONLY), ENOENT, "open: an empty path");
    static char longest[5000];
    memset(longest, 'x', 4999);
    longest[0] = '/';
    FAILS(open(longest, O_RDONLY), ENAMETOOLONG, "open: a path of 5000 bytes");
    longest[300] = 0;
    FAILS(open(longest, O_RDONLY), ENAMETOOLONG, "open: a name of 299 bytes");
    longest[256] = 0;
    FAILS(open(longest, O_RDONLY), ENOENT, "open: a name of 255 bytes is not too long");

    file = open(path, O_RDONLY | O_CLOEXEC);
    EQUAL(fcntl(file, F_GETFD), FD_CLOEXEC, "open: O_CLOEXEC");
    close(file);
    int directory = open("/tmp", O_RDONLY | O_DIRECTORY);
    WORKS(directory, "open: a directory");
    FAILS(read(directory, text, 20), EISDIR, "read: a directory");
    file = openat(directory, "file-open", O_RDONLY);
    WORKS(file, "openat: relative to a directory");
    int other = openat(file, "/tmp/file-open", O_RDONLY);
    WORKS(other, "openat: an absolute path");
    close(other);
    FAILS(openat(file, "x", O_RDONLY), ENOTDIR, "openat: relative to a file");
    FAILS(openat(999, "x", O_RDONLY), EBADF, "openat: a bad descriptor");
    other = open("/tmp/../tmp/./file-open", O_RDONLY);
    WORKS(other, "open: . and .. in a path");
    close(other);
    other = open("//tmp//file-open", O_RDONLY);
    WORKS(other, "open: doubled slashes");
    close(other);
    close(directory);

    int lowest = dup(file);
    close(lowest);
    other = open(path, O_RDONLY);
    EQUAL(other, lowest, "open: the lowest free descriptor");
    close(other);
    file = (close(file), open(path, O_PATH));
    WORKS(file, "open: O_PATH");
    FAILS(read(file, text, 1), EBADF, "read: an O_PATH descriptor");
    WORKS(fstat(file, &status), "fstat: an O_PATH descriptor");
    close(file);

    mode_t mask = umask(027);
    file = open("/tmp/file-mask", O_CREAT | O_RDWR, 0666);
    STEP_EQUAL(fstat(file, &status), 0);
    EQUAL(status.st_mode & 07777, 0640, "open: the umask is taken away");
    close(file);
    unlink("/tmp/file-mask");
    umask(mask);
    file = open("/tmp/file-readonly", O_CREAT | O_RDWR, 0444);
    EQUAL(write(file, "x", 1), 1, "open: a new read-only file can be written through its descriptor");
    close(file);
    unlink("/tmp/file-readonly");

    WORKS(access(path, F_OK), "access: exists");
    WORKS(access(path, R_OK | W_OK), "access: root reads and writes");
    FAILS(access(path, X_OK), EACCES, "access: not executable, even for root");
    FAILS(access("/nowhere", F_OK), ENOENT, "access: no such file");
    FAILS(access(path, 16), EINVAL, "access: unknown mode");
    WORKS(chmod(path, 0755), "chmod");
    WORKS(access(path, X_OK), "access: executable after chmod");
    WORKS(faccessat(AT_FDCWD, path, R_OK, 0), "faccessat");
    WORKS(fchmodat(AT_FDCWD, path, 0600, 0), "fchmodat");
    STEP_EQUAL(stat(path, &status), 0);
    EQUAL(status.st_mode, S_IFREG | 0600, "fchmodat: the new mode");
    WORKS(chown(path, 0, 0), "chown to root");
    int anonymous = open("/tmp", O_TMPFILE | O_RDWR, 0600);
    if (anonymous >= 0) {
        EQUAL(write(anonymous, "x", 1), 1, "open: O_TMPFILE");
        close(anonymous);
    } else {
        CHECK(errno == EOPNOTSUPP || errno == EISDIR, "open: O_TMPFILE is refused properly");
    }
    file = creat(path, 0600);
    WORKS(file, "creat");
    close(file);
    WORKS(unlink(path), "unlink");
    return test_end();
}
