// memory: 64M
// kernel-only: it eats all memory of the machine
//
// Bad programs: memory without end. SIGKILL ends the largest process, the
// others continue, and the memory is freed.

#include "test.h"

static long meminfo(const char *field) {
    char text[4000];
    NEED(test_read_file("/proc/meminfo", text, sizeof text) > 0);
    const char *line = strstr(text, field);
    NEED(line);
    return atol(line + strlen(field));
}

static long free_kib(void) { return meminfo("MemFree:"); }

static void eat(size_t piece) {
    for (;;) {
        char *memory = mmap(0, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            _exit(50);
        for (size_t offset = 0; offset < piece; offset += PAGE)
            memory[offset] = 1;
    }
}

static void recovered(const char *text) {
    char *memory = mmap(0, 16 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int good = memory != MAP_FAILED;
    if (good) {
        memset(memory, 1, 16 << 20);
        munmap(memory, 16 << 20);
    }
    CHECK(good, text);
}

int main(void) {
    test_start();
    long start = free_kib();
    CHECK(start > 20000, "there is memory to begin with");
    DIES(SIGKILL, "a process that eats all memory in pieces of 1 MiB", eat(1 << 20));
    recovered("its memory is back");
    DIES(SIGKILL, "a process that eats all memory in one piece", eat((size_t)1 << 30));
    DIES(SIGKILL, "a process that eats all memory page by page", {
        for (;;)
            test_map(PAGE)[0] = 1;
    });
    recovered("its memory is back again");
    DIES(SIGKILL, "a process that eats page tables", {
        char *memory = mmap(0, (size_t)1 << 42, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        NEED(memory != MAP_FAILED);
        madvise(memory, (size_t)1 << 42, MADV_NOHUGEPAGE);
        for (size_t offset = 0;; offset += 2 << 20)
            memory[offset] = 1;
    });
    recovered("the tables are back");
    DIES(SIGKILL, "a process that populates more than there is",
         for (;;) mmap(0, 8 << 20, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | MAP_NORESERVE, -1, 0));
    recovered("and again");

    test_arm_watchdog();
    // A small process continues while the largest is killed.
    int ready[2];
    NEED(pipe(ready) == 0);
    pid_t large = CHILD({
        while (free_kib() > 10000)
            memset(test_map(1 << 20), 1, 1 << 20);
        STEP_EQUAL(write(ready[1], "x", 1), 1);
        for (;;)
            pause();
    });
    char one;
    STEP_EQUAL(read(ready[0], &one, 1), 1);
    EXITS(0, "a small process gets its memory", {
        char *memory = test_map(16 << 20);
        memset(memory, 2, 16 << 20);
        STEP_EQUAL(memory[(16 << 20) - 1], 2);
    });
    int status = test_wait(large);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "the largest dies of SIGKILL");

    // Memory that no kill frees: files. The writer is refused.
    int file = open("/tmp/eats-memory", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    static char block[65536];
    memset(block, 'f', sizeof block);
    long written = 0;
    ssize_t count;
    const long total = meminfo("MemTotal:") * 1024;
    while (written < 2 * total && (count = write(file, block, sizeof block)) > 0)
        written += count;
    CHECK(written > 4 << 20 && written < total && (errno == ENOSPC || errno == ENOMEM),
          "a file that fills the memory is refused");
    close(file);
    STEP_EQUAL(unlink("/tmp/eats-memory"), 0);
    recovered("unlink gives the memory back");
    int before = test_failures;
    for (int round = 0; round < 5; round++)
        STEP_DIES(SIGKILL, "again and again", eat(4 << 20));
    ALL_STEPS(before, "five more, one after the other");
    STEP_EQUAL(test_wait(CHILD({
        pid_t pair[2];
        for (int index = 0; index < 2; index++)
            pair[index] = CHILD(eat(1 << 20));
        STEP_EQUAL(WTERMSIG(test_wait(pair[0])), SIGKILL);
        STEP_EQUAL(WTERMSIG(test_wait(pair[1])), SIGKILL);
    })), 0);
    recovered("two at once: both die, the rest goes on");
    CHECK(free_kib() > start / 4 * 3, "no memory is lost");
    return test_end();
}
