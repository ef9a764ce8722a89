// Bad programs: descriptors without end, mappings without end, brk and
// mmap without end of address space. All are refused, none does harm.

#include "test.h"

#include <sys/resource.h>

int main(void) {
    test_start();
    EXITS(0, "descriptors", {
        struct rlimit limit;
        STEP_EQUAL(getrlimit(RLIMIT_NOFILE, &limit), 0);
        if (limit.rlim_cur > 1024) {
            limit.rlim_cur = 1024;
            STEP_EQUAL(setrlimit(RLIMIT_NOFILE, &limit), 0);
        }
        int count = 0;
        while (count < 5000 && open("/dev/null", O_RDONLY) >= 0)
            count++;
        CHECK(errno == EMFILE && count > 10 && count <= 1024, "open until EMFILE");
        int pipes[2];
        FAILS(pipe(pipes), EMFILE, "pipe: EMFILE");
        FAILS(dup(0), EMFILE, "dup: EMFILE");
        FAILS(memfd_create("x", 0), EMFILE, "memfd_create: EMFILE");
        FAILS(fcntl(0, F_DUPFD, 0), EMFILE, "fcntl F_DUPFD: EMFILE");
        FAILS(open("/tmp", O_RDONLY), EMFILE, "open: EMFILE");
        close(500 < count ? 500 : count);
        FAILS(pipe(pipes), EMFILE, "pipe with one free descriptor");
        CHECK(open("/dev/null", O_RDONLY) > 2, "the one free descriptor can be used");
        pid_t child = CHILD(STEP_FAILS(dup(0), EMFILE));
        STEP_EQUAL(test_wait(child), 0);
    });
    int file = open("/dev/null", O_RDONLY);
    WORKS(file, "the parent opens files");

    EXITS(0, "mappings", {
        int count = 0, before = test_failures;
        for (; count < 5000; count++) {
            char *memory = mmap(0, PAGE, count % 2 ? PROT_READ : PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            STEP(memory != MAP_FAILED);
            if (count % 2 == 0)
                memory[0] = 1;
        }
        ALL_STEPS(before, "5000 mappings that do not join");
        char *memory = mmap(0, 140000 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        STEP(memory != MAP_FAILED);
        count = 0;
        while (count < 70000 && mprotect(memory + 2 * count * PAGE, PAGE, PROT_READ) == 0)
            count++;
        CHECK(count < 70000 && errno == ENOMEM, "the number of mappings has a limit: ENOMEM");
        CHECK(count > 10000, "and the limit is not low");
        STEP_EQUAL(LOADS(memory), 0);
        STEP_EQUAL(LOADS(memory + PAGE), SIGSEGV);
        WORKS(munmap(memory, 140000 * PAGE), "munmap of them all");
        WORKS((long)mmap(0, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), "then mmap works again");
    });

    EXITS(0, "address space", {
        size_t total = 0, piece = (size_t)1 << 40;
        int before = test_failures;
        while (piece >= (size_t)1 << 30) {
            if (mmap(0, piece, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
                STEP_EQUAL(errno, ENOMEM);
                piece /= 2;
            } else {
                total += piece;
            }
            if (total > (size_t)1 << 56)
                break;
        }
        STEP(total > (size_t)1 << 36 && total <= (size_t)1 << 56);
        ALL_STEPS(before, "mmap until the address space is full");
        char *small = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (small != MAP_FAILED)
            small[0] = 1;
    });
    EXITS(0, "lengths that wrap", {
        char *memory = test_map(PAGE);
        STEP_FAILS(syscall(SYS_munmap, memory, (size_t)-(intptr_t)memory), EINVAL);
        STEP_FAILS(syscall(SYS_munmap, memory, -PAGE), EINVAL);
        STEP_FAILS(syscall(SYS_mprotect, memory, -PAGE, PROT_READ), ENOMEM);
        STEP_FAILS(syscall(SYS_madvise, memory, -PAGE, MADV_DONTNEED), EINVAL);
        STEP_FAILS(syscall(SYS_mmap, 0, -PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), ENOMEM);
        STEP_FAILS(syscall(SYS_mlock, memory, -PAGE), EINVAL);
        STEP(syscall(SYS_mremap, memory, PAGE, -PAGE, MREMAP_MAYMOVE) == -1);
        STEP(syscall(SYS_mincore, memory, -PAGE, memory) == -1);
        STEP(syscall(SYS_msync, memory, -PAGE, MS_SYNC) == -1);
        STEP_EQUAL(STORES(memory), 0);
    });
    char *memory = test_map(PAGE);
    memory[0] = 1;
    EQUAL(memory[0], 1, "the parent maps memory");
    return test_end();
}
