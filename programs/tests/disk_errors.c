// disk: 16M
// option: disk-errors=2
// kernel-only: it needs the kernel's disk, of which each second store fails
//
// A disk with errors: fsync reports each error once to each open file, and the data stay in memory.

#include "test.h"

int main(void) {
    test_start();
    int file = open("/disk/errors", O_RDWR | O_CREAT | O_TRUNC, 0600);
    int again = open("/disk/errors", O_RDWR);
    NEED(file >= 0 && again >= 0);
    int failed = 0, well = 0;
    for (int round = 0; round < 8; round++) {
        char byte = (char)('a' + round), read = 0;
        NEED(pwrite(file, &byte, 1, 0) == 1);
        int saved = fsync(file);
        if (saved != 0) {
            CHECK(errno == EIO, "an error is EIO");
            EQUAL(fsync(again), -1, "another open file hears of it, too");
            fsync(file);
            fsync(again);
            failed++;
        } else {
            well++;
        }
        NEED(pread(again, &read, 1, 0) == 1);
        CHECK(read == byte, "the file has its content all the same");
    }
    CHECK(failed > 0 && well > 0, "some stores fail, and some do not");
    return test_end();
}
