// Renaming where the way to a folder is not what it was when it was opened.

#include "test.h"

#define UP "/tmp/file-rename"

int main(void) {
    test_start();
    NEED(mkdir(UP, 0700) == 0 && chdir(UP) == 0);
    NEED(mkdir("x", 0700) == 0 && mkdir("x/y", 0700) == 0 && mkdir("z", 0700) == 0);
    int inner = open("x/y", O_RDONLY | O_DIRECTORY);
    NEED(inner >= 0);
    EQUAL(rename("x/y", "z/y"), 0, "a folder is moved");
    FAILS(renameat(AT_FDCWD, "z", inner, "z"), EINVAL, "a folder does not go into itself");
    CHECK(access("z/y", F_OK) == 0, "and nothing is lost");
    FAILS(renameat(AT_FDCWD, "z", inner, "z/deeper"), ENOENT, "nor below what is not there");

    NEED(mkdir("gone", 0700) == 0);
    int gone = open("gone", O_RDONLY | O_DIRECTORY);
    int file = open("file", O_RDWR | O_CREAT, 0600);
    NEED(gone >= 0 && file >= 0 && rmdir("gone") == 0);
    FAILS(renameat(AT_FDCWD, "file", gone, "file"), ENOENT, "nothing goes into a folder that was removed");
    CHECK(access("file", F_OK) == 0, "and the file stays");
    FAILS(mkdirat(gone, "new", 0700), ENOENT, "nothing is made there either");

    unlink("file");
    rmdir("z/y");
    rmdir("z");
    rmdir("x");
    NEED(chdir("/") == 0);
    EQUAL(rmdir(UP), 0, "all folders can be removed again");
    return test_end();
}
