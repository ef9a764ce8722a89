// mkdir, rmdir, getdents64 of small and large directories, getcwd, chdir.

#include "test.h"

#include <dirent.h>

struct entry {
    uint64_t inode;
    int64_t offset;
    uint16_t length;
    uint8_t type;
    char name[];
};

enum { MANY = 500 };

int main(void) {
    test_start();
    const char *root = "/tmp/file-directory";
    char path[200], buffer[8192];
    // A rest of an earlier run that failed.
    for (int index = 0; index < MANY; index++) {
        snprintf(path, sizeof path, "%s/entry-%d", root, index);
        unlink(path);
    }
    rmdir(root);
    WORKS(mkdir(root, 0750), "mkdir");
    FAILS(mkdir(root, 0750), EEXIST, "mkdir: exists");
    FAILS(mkdir("/tmp/none/x", 0700), ENOENT, "mkdir: no parent");
    FAILS(mkdir("/", 0700), EEXIST, "mkdir: the root");
    struct stat status, parent;
    STEP_EQUAL(stat(root, &status), 0);
    EQUAL(status.st_mode, S_IFDIR | 0750, "mkdir: kind and mode");
    FAILS(unlink(root), EISDIR, "unlink: a directory");
    FAILS(rmdir("/tmp/none"), ENOENT, "rmdir: not there");
    FAILS(rmdir("/dev/null"), ENOTDIR, "rmdir: a file");

    int directory = open(root, O_RDONLY | O_DIRECTORY);
    NEED(directory >= 0);
    long length = syscall(SYS_getdents64, directory, buffer, sizeof buffer);
    int dot = 0, dots = 0, others = 0;
    for (long at = 0; at < length;) {
        struct entry *entry = (struct entry *)(buffer + at);
        dot += strcmp(entry->name, ".") == 0 && entry->type == DT_DIR;
        dots += strcmp(entry->name, "..") == 0 && entry->type == DT_DIR;
        others += entry->name[0] != '.';
        at += entry->length;
    }
    CHECK(dot == 1 && dots == 1 && others == 0, "getdents64: an empty directory has . and ..");
    EQUAL(syscall(SYS_getdents64, directory, buffer, sizeof buffer), 0, "getdents64: the end");
    FAILS(syscall(SYS_getdents64, 999, buffer, 100), EBADF, "getdents64: bad descriptor");
    int file = open("/dev/null", O_RDONLY);
    FAILS(syscall(SYS_getdents64, file, buffer, 100), ENOTDIR, "getdents64: a file");
    close(file);
    lseek(directory, 0, SEEK_SET);
    FAILS(syscall(SYS_getdents64, directory, buffer, 5), EINVAL, "getdents64: a tiny buffer");

    for (int index = 0; index < MANY; index++) {
        snprintf(path, sizeof path, "entry-%d", index);
        file = openat(directory, path, O_CREAT | O_WRONLY, 0600);
        STEP(file >= 0);
        close(file);
    }
    // Small reads: each entry comes once, however the buffer cuts.
    static char seen[MANY];
    int calls = 0, doubled = 0, found = 0;
    lseek(directory, 0, SEEK_SET);
    while ((length = syscall(SYS_getdents64, directory, buffer, 200)) > 0) {
        calls++;
        for (long at = 0; at < length;) {
            struct entry *entry = (struct entry *)(buffer + at);
            int number;
            if (sscanf(entry->name, "entry-%d", &number) == 1 && number >= 0 && number < MANY) {
                doubled += seen[number]++;
                found++;
                STEP(entry->type == DT_REG);
            }
            at += entry->length;
        }
    }
    CHECK(calls > 50 && length == 0, "getdents64: a large directory comes in pieces");
    EQUAL(found, MANY, "getdents64: all entries");
    EQUAL(doubled, 0, "getdents64: each entry once");

    // Deleting while reading, as `rm -r` does.
    DIR *stream = opendir(root);
    NEED(stream);
    struct dirent *item;
    int removed = 0;
    while ((item = readdir(stream)))
        if (item->d_name[0] != '.')
            removed += unlinkat(directory, item->d_name, 0) == 0;
    closedir(stream);
    EQUAL(removed, MANY, "readdir: deleting while reading reaches all");

    WORKS(mkdirat(directory, "sub", 0700), "mkdirat");
    FAILS(rmdir(root), ENOTEMPTY, "rmdir: not empty");
    STEP_EQUAL(stat(root, &status), 0);
    EQUAL(status.st_nlink >= 1, 1, "a directory has links");
    WORKS(chdir(root), "chdir");
    CHECK(getcwd(path, sizeof path) && strcmp(path, root) == 0, "getcwd after chdir");
    WORKS(chdir("sub"), "chdir relative");
    CHECK(getcwd(path, sizeof path) && strcmp(path, "/tmp/file-directory/sub") == 0,
          "getcwd after a relative chdir");
    FAILS(syscall(SYS_getcwd, path, 5), ERANGE, "getcwd: a small buffer");
    STEP_EQUAL(stat("..", &parent), 0);
    EQUAL(parent.st_ino, status.st_ino, ".. is the parent");
    file = open("here", O_CREAT | O_WRONLY, 0600);
    WORKS(file, "open: a relative path makes a file in the directory");
    close(file);
    WORKS(access("/tmp/file-directory/sub/here", F_OK), "and it is there");
    WORKS(unlink("../sub/here"), "unlink by a relative path");
    WORKS(fchdir(directory), "fchdir");
    CHECK(getcwd(path, sizeof path) && strcmp(path, root) == 0, "getcwd after fchdir");
    FAILS(chdir("/dev/null"), ENOTDIR, "chdir: a file");
    FAILS(chdir("/nowhere"), ENOENT, "chdir: nothing");
    FAILS(fchdir(999), EBADF, "fchdir: bad descriptor");
    WORKS(chdir("/.."), "chdir: .. of the root");
    CHECK(getcwd(path, sizeof path) && strcmp(path, "/") == 0, "is the root");
    WORKS(unlinkat(directory, "sub", AT_REMOVEDIR), "unlinkat AT_REMOVEDIR");
    FAILS(unlinkat(directory, "sub", AT_REMOVEDIR), ENOENT, "unlinkat: gone");
    WORKS(rmdir(root), "rmdir");
    FAILS(openat(directory, "x", O_CREAT | O_WRONLY, 0600), ENOENT,
          "openat: no file in a removed directory");
    close(directory);
    return test_end();
}
