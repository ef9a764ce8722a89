// disk: 16M
// option: disk-errors=2
// kernel-only: it needs the kernel's disk, of which each second store fails
//
// msync reports a failed store of a mapping's pages, once for each open file: also one that another
// process's fsync has met, and none that fsync of this file has reported.

#include "test.h"

#define PAGE 4096

static int in_child(int file) {
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        // An opening of its own.
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
        int own = open(path, O_RDWR);
        _exit(own < 0 ? 2 : fsync(own) != 0);
    }
    int status;
    NEED(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) < 2);
    return WEXITSTATUS(status);
}

int main(void) {
    test_start();
    int file = open("/disk/mapped", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && ftruncate(file, PAGE) == 0);
    char *map = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    NEED(map != MAP_FAILED);
    int own = 0, foreign = 0, well = 0;
    for (int round = 0; round < 16; round++) {
        map[0]++;
        if (round % 2 == 0) {
            if (msync(map, PAGE, MS_SYNC) == 0) {
                well++;
                continue;
            }
            own++;
        } else {
            if (in_child(file) == 0) {
                well++;
                continue;
            }
            foreign++;
            // Its page is stored at the second attempt.
            EQUAL(msync(map, PAGE, MS_SYNC), -1, "msync reports what another fsync has met");
        }
        CHECK(errno == EIO, "the error is EIO");
        while (msync(map, PAGE, MS_SYNC) != 0)
            map[0]++;
        EQUAL(msync(map, PAGE, MS_SYNC), 0, "an error is reported once");
        EQUAL(fsync(file), 0, "to msync or to fsync");
    }
    CHECK(own > 0 && foreign > 0 && well > 0, "some stores fail in each process");
    return test_end();
}
