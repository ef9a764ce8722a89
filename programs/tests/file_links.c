// rename, link, symlink, readlink, and paths through links.

#include "test.h"

static int write_text(const char *path, const char *text) {
    int file = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    if (file < 0)
        return -1;
    ssize_t count = write(file, text, strlen(text));
    close(file);
    return count == (ssize_t)strlen(text) ? 0 : -1;
}

static int has_text(const char *path, const char *text) {
    char buffer[100];
    return test_read_file(path, buffer, sizeof buffer) >= 0 && strcmp(buffer, text) == 0;
}

int main(void) {
    test_start();
    const char *names[] = {"a", "b", "loop", "loop2", "symbolic", "dangling", "d1/x", "d2/x", "d2/d1/x"};
    mkdir("/tmp/file-links", 0700);
    NEED(chdir("/tmp/file-links") == 0);
    for (size_t index = 0; index < sizeof names / sizeof *names; index++)
        unlink(names[index]);
    rmdir("d2/d1");
    rmdir("d1");
    rmdir("d2");
    struct stat one, two;
    char text[100];

    STEP_EQUAL(write_text("a", "first"), 0);
    WORKS(link("a", "b"), "link");
    stat("a", &one);
    stat("b", &two);
    CHECK(one.st_ino == two.st_ino && one.st_nlink == 2, "both names are one file");
    STEP_EQUAL(write_text("b", "through b"), 0);
    CHECK(has_text("a", "through b"), "what is written by one name is read by the other");
    FAILS(link("a", "b"), EEXIST, "link: exists");
    FAILS(link("none", "c"), ENOENT, "link: no such file");
    FAILS(link("/tmp", "c"), EPERM, "link: a directory");
    WORKS(unlink("a"), "unlink one name");
    CHECK(has_text("b", "through b"), "the other stays");
    stat("b", &two);
    EQUAL(two.st_nlink, 1, "one link is left");

    WORKS(rename("b", "a"), "rename");
    CHECK(has_text("a", "through b"), "the file has its new name");
    FAILS(access("b", F_OK), ENOENT, "the old name is gone");
    STEP_EQUAL(write_text("b", "other"), 0);
    int file = open("b", O_RDONLY);
    WORKS(rename("a", "b"), "rename over a file");
    CHECK(has_text("b", "through b"), "the target is replaced");
    STEP_EQUAL(read(file, text, 100), 5);
    CHECK(memcmp(text, "other", 5) == 0, "who has the replaced file open keeps it");
    close(file);
    FAILS(rename("none", "c"), ENOENT, "rename: no such file");
    WORKS(rename("b", "b"), "rename to itself");
    STEP_EQUAL(mkdir("d1", 0700), 0);
    STEP_EQUAL(mkdir("d2", 0700), 0);
    FAILS(rename("b", "d1"), EISDIR, "rename: a file over a directory");
    FAILS(rename("d1", "b"), ENOTDIR, "rename: a directory over a file");
    STEP_EQUAL(write_text("d1/x", "x"), 0);
    FAILS(rename("d2", "d1"), ENOTEMPTY, "rename: over a directory that is not empty");
    FAILS(rename("d1", "d1/y"), EINVAL, "rename: a directory into itself");
    WORKS(rename("d1", "d2/d1"), "rename: a directory into another");
    CHECK(has_text("d2/d1/x", "x"), "its files come along");
    NEED(chdir("d2/d1") == 0);
    CHECK(getcwd(text, 100) && strcmp(text, "/tmp/file-links/d2/d1") == 0, "getcwd after the rename");
    STEP_EQUAL(stat("..", &one), 0);
    STEP_EQUAL(stat("/tmp/file-links/d2", &two), 0);
    EQUAL(one.st_ino, two.st_ino, ".. is the new parent");
    NEED(chdir("/tmp/file-links") == 0);
    WORKS(rename("d2/d1/x", "d2/x"), "rename: between directories");
    CHECK(has_text("d2/x", "x"), "and it is there");
    int directory = open("d2", O_RDONLY | O_DIRECTORY);
    WORKS(renameat(directory, "x", directory, "y"), "renameat");
    WORKS(syscall(SYS_renameat2, directory, "y", directory, "x", 0), "renameat2");
    STEP_EQUAL(write_text("d2/z", "z"), 0);
    FAILS(syscall(SYS_renameat2, directory, "z", directory, "x", 1), EEXIST,
          "renameat2: RENAME_NOREPLACE");
    unlink("d2/z");

    WORKS(symlink("b", "symbolic"), "symlink");
    EQUAL(readlink("symbolic", text, 100), 1, "readlink gives the length");
    CHECK(text[0] == 'b', "and the target");
    CHECK(has_text("symbolic", "through b"), "open follows the link");
    lstat("symbolic", &one);
    stat("symbolic", &two);
    CHECK(S_ISLNK(one.st_mode) && S_ISREG(two.st_mode), "lstat does not follow, stat does");
    EQUAL(one.st_size, 1, "a link's size is its target's length");
    FAILS(symlink("b", "symbolic"), EEXIST, "symlink: exists");
    FAILS(symlink("", "c"), ENOENT, "symlink: an empty target");
    FAILS(readlink("b", text, 100), EINVAL, "readlink: a file");
    FAILS(readlink("none", text, 100), ENOENT, "readlink: nothing");
    FAILS(open("symbolic", O_RDONLY | O_NOFOLLOW), ELOOP, "open: O_NOFOLLOW");
    WORKS(symlink("nowhere", "dangling"), "a link to nothing");
    FAILS(open("dangling", O_RDONLY), ENOENT, "open: a link to nothing");
    STEP_EQUAL(symlink("loop2", "loop"), 0);
    STEP_EQUAL(symlink("loop", "loop2"), 0);
    FAILS(open("loop", O_RDONLY), ELOOP, "open: links in a circle");
    FAILS(stat("loop/x", &one), ELOOP, "stat: through links in a circle");
    WORKS(unlink("symbolic"), "unlink a link");
    CHECK(has_text("b", "through b"), "its target stays");
    STEP_EQUAL(symlink("/tmp/file-links/d2", "symbolic"), 0);
    CHECK(has_text("symbolic/x", "x"), "a path through an absolute link");
    WORKS(chdir("symbolic"), "chdir through a link");
    CHECK(getcwd(text, 100) && strcmp(text, "/tmp/file-links/d2") == 0, "getcwd has no links");
    NEED(chdir("/tmp/file-links") == 0);
    EQUAL(readlinkat(AT_FDCWD, "symbolic", text, 4), 4, "readlink cuts at the buffer's end");
    WORKS(symlinkat("d2", AT_FDCWD, "loop3"), "symlinkat");
    unlink("loop3");
    WORKS(linkat(AT_FDCWD, "b", directory, "c", 0), "linkat");
    WORKS(unlinkat(directory, "c", 0), "unlinkat");
    close(directory);

    unlink("d2/x");
    for (size_t index = 0; index < sizeof names / sizeof *names; index++)
        unlink(names[index]);
    STEP_EQUAL(rmdir("d2/d1"), 0);
    STEP_EQUAL(rmdir("d2"), 0);
    NEED(chdir("/") == 0);
    STEP_EQUAL(rmdir("/tmp/file-links"), 0);
    return test_end();
}
