// memory: 40M
// kernel-only: it uses all memory of the machine
//
// Writers to a file system that has room, on a machine whose memory is in use
// and whose swap is nearly empty: they wait until pages have gone to swap, and
// only the file system's own limit is ENOSPC.

#include "test.h"
#include "swap.h"

#define MIB ((size_t)1 << 20)
#define DISK (400 * MIB)
#define LARGE (56 * MIB)
#define SNAPSHOT (6 * MIB)

static char block[65536];

static uint64_t word(size_t page) { return (page + 1) * 0x9E3779B97F4A7C15u; }

static void touch(char *memory, size_t size) {
    for (size_t page = 0; page < size / PAGE; page++)
        *(volatile uint64_t *)(memory + page * PAGE) = word(page);
}

static int create(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    return file;
}

// All of it, or the error.
static int write_all(int file, const char *from, size_t size) {
    while (size > 0) {
        ssize_t count = write(file, from, size);
        if (count < 0)
            return errno;
        from += count;
        size -= count;
    }
    return 0;
}

// Uses more memory than the machine has, until a message ends it.
static pid_t presses(int *tell) {
    int ready[2], done[2];
    NEED(pipe(ready) == 0 && pipe(done) == 0 && fcntl(done[0], F_SETFL, O_NONBLOCK) == 0);
    pid_t child = CHILD({
        char *memory = test_map(LARGE);
        char end;
        for (int round = 0; read(done[0], &end, 1) != 1; round++) {
            touch(memory, LARGE);
            if (round == 0)
                STEP_EQUAL(write(ready[1], "x", 1), 1);
        }
    });
    char one;
    STEP_EQUAL(read(ready[0], &one, 1), 1);
    close(ready[0]);
    close(ready[1]);
    close(done[0]);
    *tell = done[1];
    return child;
}

// Four bytes to each of many files.
static void bystander(void) {
    int refused = 0;
    for (int number = 0; number < 200; number++) {
        char path[32];
        snprintf(path, sizeof path, "/tmp/small%d", number % 40);
        int file = create(path);
        if (write(file, "four", 4) != 4)
            refused++;
        close(file);
    }
    EQUAL(refused, 0, "four bytes to each of 200 files");
    for (int number = 0; number < 40; number++) {
        char path[32];
        snprintf(path, sizeof path, "/tmp/small%d", number);
        STEP_EQUAL(unlink(path), 0);
    }
}

// A process forks, and its copy saves what it has, while the process changes it.
static void snapshots(void) {
    char *memory = test_map(SNAPSHOT);
    for (int round = 0; round < 3; round++) {
        touch(memory, SNAPSHOT);
        EXITS(0, "a snapshot", {
            int file = create("/tmp/snapshot");
            STEP_EQUAL(write_all(file, memory, SNAPSHOT), 0);
            size_t wrong = 0;
            for (size_t page = 0; page < SNAPSHOT / PAGE; page++) {
                uint64_t found = 0;
                wrong += pread(file, &found, 8, page * PAGE) != 8 || found != word(page);
            }
            STEP_EQUAL(wrong, 0);
        });
        STEP_EQUAL(unlink("/tmp/snapshot"), 0);
    }
    STEP_EQUAL(munmap(memory, SNAPSHOT), 0);
}

static void limit(void) {
    int file = create("/tmp/allocated");
    EQUAL(fallocate(file, 0, 0, 4 * MIB), 0, "fallocate of 4 MiB");
    STEP_EQUAL(ftruncate(file, 0), 0);
    size_t written = 0;
    int error = 0;
    while (written < 64 * MIB && (error = write_all(file, block, sizeof block)) == 0)
        written += sizeof block;
    EQUAL(error, ENOSPC, "the file system's limit is ENOSPC");
    CHECK(written > 12 * MIB, "where half of memory is reached");
    close(file);
    STEP_EQUAL(unlink("/tmp/allocated"), 0);
}

int main(void) {
    test_start();
    memset(block, 'f', sizeof block);
    STEP_EQUAL(swap_begin(DISK), 0);
    int tell;
    pid_t child = presses(&tell);
    bystander();
    snapshots();
    limit();
    STEP_EQUAL(write(tell, "x", 1), 1);
    EQUAL(test_wait(child), 0, "nobody was killed");
    return test_end();
}
