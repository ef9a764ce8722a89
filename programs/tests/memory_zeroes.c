// mmap of /dev/zero: memory that keeps to the rules of files.

#include "test.h"

static void *map(int protection, int flags, int file, off_t offset) {
    return mmap(0, 2 * PAGE, protection, flags, file, offset);
}

int main(void) {
    test_start();
    const int both = PROT_READ | PROT_WRITE;
    int reading = open("/dev/zero", O_RDONLY), writing = open("/dev/zero", O_WRONLY), file = open("/dev/zero", O_RDWR);
    NEED(reading >= 0 && writing >= 0 && file >= 0);
    char *memory = map(PROT_READ, MAP_SHARED, reading, 0);
    CHECK(memory != MAP_FAILED && memory[0] == 0 && memory[PAGE] == 0, "opened for reading: zeroes");
    FAILS(mprotect(memory, PAGE, both), EACCES, "opened for reading: shared memory cannot be made writable");
    EQUAL(mprotect(memory, PAGE, PROT_READ | PROT_EXEC), 0, "opened for reading: it can be made executable");
    FAILS(map(both, MAP_SHARED, reading, 0), EACCES, "opened for reading: nothing shared that can be written");
    memory = map(PROT_READ, MAP_PRIVATE, reading, 0);
    CHECK(memory != MAP_FAILED && mprotect(memory, PAGE, both) == 0, "opened for reading: private memory can");
    memory[0] = 1;
    memory = map(PROT_READ, MAP_SHARED, reading, 16 * PAGE);
    CHECK(memory != MAP_FAILED && LOADS(memory) == 0, "opened for reading: it has no end");
    FAILS(map(PROT_READ, MAP_SHARED, writing, 0), EACCES, "opened for writing: nothing shared");
    FAILS(map(PROT_READ, MAP_PRIVATE, writing, 0), EACCES, "opened for writing: nothing private");
    FAILS(map(both, MAP_PRIVATE | MAP_GROWSDOWN, file, 0), EINVAL, "no stack");

    memory = map(PROT_READ, MAP_SHARED, file, 0);
    CHECK(memory != MAP_FAILED && mprotect(memory, PAGE, both) == 0, "opened for both: it can be made writable");
    EXITS(0, "opened for both: a child shares it", memory[5] = 7);
    EQUAL(memory[5], 7, "and its parent sees what it wrote");
    char *other = map(both, MAP_SHARED, file, 0);
    CHECK(other != MAP_FAILED && other[5] == 0, "opened for both: each mapping has memory of its own");
    other = map(both, MAP_SHARED, file, PAGE);
    CHECK(other != MAP_FAILED && LOADS(other) == 0, "opened for both, from a page on: one page less");
    EQUAL(LOADS(other + PAGE), SIGBUS, "and its end");
    return test_end();
}
