// disk: 16M
// option: disk-read-errors=3
// kernel-only: it needs the kernel's disk, of which each third read fails
//
// A disk whose reads fail now and then: a mapping's page is SIGBUS, read(2) is EIO or a short count,
// and populating is EFAULT. The next attempt asks the disk again, and no page holds anything but its
// content.

#include "test.h"

#define PAGE 4096
#define PAGES 64

static char bytes[PAGES * PAGE], into[PAGES * PAGE];

static char content_of(int page) {
    return (char)(page * 3 + 1);
}

// Evicts all pages.
static void drop(int file) {
    NEED(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0);
}

// Reads a page of the mapping until the disk does not fail. Returns the number of failures.
static int failures_of(const char *at, int page) {
    int failures = 0, signal;
    while ((signal = LOADS(at + (size_t)page * PAGE)) != 0) {
        NEED(signal == SIGBUS);
        NEED(++failures < 100);
    }
    NEED(at[(size_t)page * PAGE + 17] == content_of(page));
    return failures;
}

static void check_mapping(int file, int advice) {
    drop(file);
    const char *at = mmap(NULL, PAGES * PAGE, PROT_READ, MAP_SHARED, file, 0);
    NEED(at != MAP_FAILED && madvise((void *)at, PAGES * PAGE, advice) == 0);
    int failures = 0;
    for (int page = 0; page < PAGES; page++)
        failures += failures_of(at, page);
    // One request for each page, and each failed one once more: every third of all fails.
    if (advice == MADV_RANDOM)
        CHECK(failures >= PAGES / 3 - 1 && failures <= PAGES, "a third of the reads is SIGBUS");
    NEED(munmap((void *)at, PAGES * PAGE) == 0);
}

// Reads the file by calls of this length. Returns the number of failures.
static int failures_of_reads(int file, size_t length) {
    drop(file);
    int failures = 0, tries = 0;
    size_t done = 0;
    while (done < sizeof into) {
        NEED(++tries < 1000);
        size_t rest = sizeof into - done;
        ssize_t got = pread(file, into + done, rest < length ? rest : length, (off_t)done);
        if (got > 0) {
            done += (size_t)got;
            continue;
        }
        NEED(got == -1 && errno == EIO);
        failures++;
    }
    CHECK(memcmp(into, bytes, sizeof into) == 0, "all bytes are the file's");
    return failures;
}

static void check_reads(int file) {
    failures_of_reads(file, sizeof into);
    NEED(posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM) == 0);
    failures_of_reads(file, sizeof into);
    int failures = failures_of_reads(file, PAGE);
    CHECK(failures >= PAGES / 3 - 1 && failures <= PAGES, "a third of the reads is EIO");
}

static void check_populate(int file) {
    drop(file);
    char *at = mmap(NULL, PAGES * PAGE, PROT_READ, MAP_PRIVATE, file, 0);
    NEED(at != MAP_FAILED && madvise(at, PAGES * PAGE, MADV_RANDOM) == 0);
    int tries = 0;
    while (madvise(at, PAGES * PAGE, MADV_POPULATE_READ) != 0) {
        NEED(errno == EFAULT);
        NEED(++tries < 100);
    }
    CHECK(tries > 0, "populating fails where a read fails");
    CHECK(memcmp(at, bytes, sizeof bytes) == 0, "the pages are the file's");
    NEED(munmap(at, PAGES * PAGE) == 0);
}

// A write to part of a page reads the rest first.
static void check_partial_writes(int file) {
    drop(file);
    int failures = 0;
    for (int page = 0; page < PAGES; page += 2) {
        off_t offset = (off_t)page * PAGE + 100;
        int tries = 0;
        while (pwrite(file, "new", 3, offset) != 3) {
            NEED(errno == EIO);
            NEED(++tries < 100);
            failures++;
        }
        memcpy(bytes + offset, "new", 3);
    }
    CHECK(failures > 0, "a write to a part fails where a read fails");
    failures_of_reads(file, PAGE);
    EQUAL(fsync(file), 0, "the stores do not fail");
}

int main(void) {
    test_start();
    for (int at = 0; at < PAGES * PAGE; at++)
        bytes[at] = content_of(at / PAGE);
    int file = open("/disk/read_errors", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && write(file, bytes, sizeof bytes) == sizeof bytes && fsync(file) == 0);
    check_mapping(file, MADV_RANDOM);
    check_mapping(file, MADV_NORMAL);
    check_mapping(file, MADV_SEQUENTIAL);
    check_reads(file);
    check_populate(file);
    check_partial_writes(file);
    return test_end();
}
