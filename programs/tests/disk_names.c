// disk: 16M
// starts: 1
// kernel-only: it needs the kernel's disk
//
// A file that was removed is known by a descriptor of its path: what is done with that does not meet
// the next file. A name that one file takes from another is always that of one of them.

#include "test.h"

#include <pthread.h>

#define ROUNDS 60
#define READERS 3

static void put(const char *path, const char *text) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text) && close(file) == 0);
}

static void of_a_removed_file(void) {
    struct stat first, status;
    put("/disk/first", "first");
    NEED(stat("/disk/first", &first) == 0);
    int known = open("/disk/first", O_PATH);
    NEED(known >= 0 && unlink("/disk/first") == 0);
    put("/disk/second", "second file");
    NEED(fstat(known, &status) == 0);
    EQUAL(status.st_nlink, 0, "a removed file has no name");
    EQUAL(status.st_size, 0, "nor the size of the next one");
    NEED(stat("/disk/second", &status) == 0);
    CHECK(status.st_ino != first.st_ino, "which has another number");
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", known);
    FAILS(open(path, O_RDWR), ESTALE, "it cannot be opened");
    chmod(path, 0644);
    NEED(stat("/disk/second", &status) == 0);
    EQUAL(status.st_mode & 0777, 0600, "its mode is not that of the next one");
    NEED(close(known) == 0);
    put("/disk/third", "third");
    NEED(stat("/disk/third", &status) == 0);
    EQUAL(status.st_ino, first.st_ino, "its number is used again after the last descriptor");
}

static volatile int ends, strange, seen;

static void *open_always(void *unused UNUSED) {
    while (!ends) {
        char byte = 0;
        int file = open("/disk/target", O_RDONLY);
        if (file < 0 || read(file, &byte, 1) != 1 || byte != 't')
            strange++;
        close(file);
        seen++;
        sched_yield();
    }
    return 0;
}

static void of_renamed_files(void) {
    put("/disk/target", "target");
    pthread_t readers[READERS];
    for (int reader = 0; reader < READERS; reader++)
        NEED(pthread_create(&readers[reader], 0, open_always, 0) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        put("/disk/source", "taker");
        NEED(rename("/disk/source", "/disk/target") == 0);
    }
    ends = 1;
    for (int reader = 0; reader < READERS; reader++)
        NEED(pthread_join(readers[reader], 0) == 0);
    CHECK(seen > ROUNDS, "a name is opened while files take it");
    EQUAL(strange, 0, "and each time it is that of a file");
}

int main(void) {
    test_start();
    of_a_removed_file();
    of_renamed_files();
    return test_end();
}
