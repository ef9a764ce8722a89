// disk: 384M
// memory: 40M
// option: silent-file=yes
// kernel-only: it needs the kernel's disk and a file whose device is silent
//
// A file of more than four times the memory, written, sorted on the disk and read again, while the
// writer of another file waits for a device that never answers. The second start finds it sorted.

#include <sys/ioctl.h>
#include <sys/wait.h>

#include "test.h"

#define RECORD 256
#define CHUNK (2u << 20)
#define RUNS 81
#define RECORDS (CHUNK / RECORD)
#define TOTAL ((uint64_t)RUNS * RECORDS)
#define SILENT_FAIL 0x5f00

struct record {
    uint64_t key;
    char rest[RECORD - 8];
};

static struct record chunk[RECORDS];
static struct record heads[RUNS][16];

static uint64_t key_of(uint64_t number) { return number * 0x9e3779b97f4a7c15u; }

static int by_key(const void *a, const void *b) {
    uint64_t left = ((const struct record *)a)->key, right = ((const struct record *)b)->key;
    return left < right ? -1 : left > right;
}

static void write_all(int file, const void *from, size_t size) {
    for (const char *at = from; size > 0;) {
        ssize_t done = write(file, at, size);
        NEED(done > 0);
        at += done;
        size -= (size_t)done;
    }
}

static void write_runs(void) {
    int file = open("/disk/runs", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    for (uint64_t run = 0; run < RUNS; run++) {
        for (uint64_t at = 0; at < RECORDS; at++)
            chunk[at].key = key_of(run * RECORDS + at);
        qsort(chunk, RECORDS, sizeof chunk[0], by_key);
        write_all(file, chunk, sizeof chunk);
        test_arm_watchdog();
    }
    EQUAL(fsync(file), 0, "the runs are stored");
    close(file);
}

static void merge_runs(void) {
    int from = open("/disk/runs", O_RDONLY), to = open("/disk/sorted.new", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    NEED(from >= 0 && to >= 0);
    uint32_t taken[RUNS] = {0};
    for (int run = 0; run < RUNS; run++)
        NEED(pread(from, heads[run], sizeof heads[0], (off_t)run * CHUNK) == sizeof heads[0]);
    uint32_t in_chunk = 0;
    for (uint64_t number = 0; number < TOTAL; number++) {
        int least = -1;
        for (int run = 0; run < RUNS; run++)
            if (taken[run] < RECORDS &&
                (least < 0 || heads[run][taken[run] % 16].key < heads[least][taken[least] % 16].key))
                least = run;
        chunk[in_chunk++] = heads[least][taken[least] % 16];
        if (++taken[least] % 16 == 0 && taken[least] < RECORDS) {
            off_t at = (off_t)least * CHUNK + (off_t)taken[least] * RECORD;
            NEED(pread(from, heads[least], sizeof heads[0], at) == sizeof heads[0]);
        }
        if (in_chunk == RECORDS) {
            write_all(to, chunk, sizeof chunk);
            test_arm_watchdog();
            in_chunk = 0;
        }
    }
    EQUAL(fsync(to), 0, "the sorted file is stored");
    EQUAL(rename("/disk/sorted.new", "/disk/sorted"), 0, "it gets its name");
    EQUAL(unlink("/disk/runs"), 0, "the runs are removed");
    close(from);
    close(to);
}

static void check_sorted(void) {
    int file = open("/disk/sorted", O_RDONLY);
    NEED(file >= 0);
    uint64_t last = 0, sum = 0, count = 0, expected = 0;
    int rises = 1;
    for (ssize_t size; (size = read(file, chunk, sizeof chunk)) > 0;)
        for (size_t at = 0; at < (size_t)size / RECORD; at++, count++) {
            rises &= chunk[at].key >= last;
            last = chunk[at].key;
            sum += last;
        }
    for (uint64_t number = 0; number < TOTAL; number++)
        expected += key_of(number);
    CHECK(rises && count == TOTAL && sum == expected, "the file has all records, sorted");
    close(file);
}

int main(void) {
    test_start();
    int silent = open("/dev/silent", O_RDWR);
    NEED(silent >= 0);
    pid_t writer = fork();
    NEED(writer >= 0);
    if (writer == 0) {
        // More than may be dirty: it waits for the device.
        for (int page = 0; page < 4096; page++)
            if (pwrite(silent, "x", 1, (off_t)page * 4096) != 1)
                _exit(errno == EIO && page >= 32 ? 0 : 1);
        _exit(2);
    }
    if (access("/disk/sorted", F_OK) != 0) {
        write_runs();
        merge_runs();
        test_arm_watchdog();
    }
    check_sorted();
    int status;
    EQUAL(waitpid(writer, &status, WNOHANG), 0, "the writer of the silent file still waits");
    EQUAL(ioctl(silent, SILENT_FAIL), 0, "the device fails its stores");
    NEED(waitpid(writer, &status, 0) == writer);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the writer hears of it");
    return test_end();
}
