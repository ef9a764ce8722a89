// disk: 16M
// starts: 1
// kernel-only: it needs the kernel's disk
//
// A file that was removed is known by a descriptor of its path: what is done with that does not meet
// the next file. A name that one file takes from another is always that of one of them. Of two threads
// that take away one name, the later one finds none.

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

static pthread_barrier_t together;
static int outcomes[2];

static void *rename_first(void *unused UNUSED) {
    pthread_barrier_wait(&together);
    outcomes[0] = rename("/disk/one", "/disk/first") == 0 ? 0 : errno;
    return 0;
}

static void *rename_second(void *unused UNUSED) {
    pthread_barrier_wait(&together);
    outcomes[1] = rename("/disk/one", "/disk/second") == 0 ? 0 : errno;
    return 0;
}

static void *remove_one(void *unused UNUSED) {
    pthread_barrier_wait(&together);
    outcomes[1] = unlink("/disk/one") == 0 ? 0 : errno;
    return 0;
}

// Two calls that take away one name: the first one has its effect, the other one none.
static void of_two_takers(void *(*other)(void *), const char *text) {
    int before = test_failures;
    for (int round = 0; round < ROUNDS; round++) {
        put("/disk/one", "content");
        pthread_t threads[2];
        NEED(pthread_barrier_init(&together, 0, 2) == 0);
        // Each of them comes first in some rounds.
        int turn = round % 2;
        NEED(pthread_create(&threads[turn], 0, turn ? other : rename_first, 0) == 0);
        NEED(pthread_create(&threads[!turn], 0, turn ? rename_first : other, 0) == 0);
        NEED(pthread_join(threads[0], 0) == 0 && pthread_join(threads[1], 0) == 0);
        int later = outcomes[0] == 0;
        STEP_EQUAL(outcomes[!later], 0);
        STEP_EQUAL(outcomes[later], ENOENT);
        STEP_EQUAL(access("/disk/one", F_OK), -1);
        STEP_EQUAL(unlink("/disk/first") == 0, later);
        STEP_EQUAL(unlink("/disk/second") == 0, !later && other == rename_second);
    }
    ALL_STEPS(before, text);
}

int main(void) {
    test_start();
    of_a_removed_file();
    of_renamed_files();
    of_two_takers(rename_second, "of two renames of one file, the later one finds none");
    of_two_takers(remove_one, "and so it is of a rename and an unlink");
    return test_end();
}
