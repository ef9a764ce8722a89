// userfaultfd: shared memory: missing pages, present pages that are not mapped, write-protection;
// and poisoned pages. Passes on Linux as root.

#include "userfault.h"

#define PAGES 32
#define UF_CONTINUE _IOWR(0xAA, 7, struct uf_zero)
#define UF_POISON _IOWR(0xAA, 8, struct uf_zero)

static int fd;
static char *memory, *alias, *page_of_ones;

static void *touch(void *at) { return (void *)(intptr_t)(*(volatile char *)at + 1); }

static void *write_one(void *at) {
    *(volatile char *)at = 9;
    return 0;
}

static int64_t ask(unsigned long request, void *at, size_t length, uint64_t mode) {
    struct uf_zero asked = {{(uintptr_t)at, length}, mode, 12345};
    int result = ioctl(fd, request, &asked);
    return result == 0 || asked.done != 12345 ? asked.done : -errno;
}

static sigjmp_buf back;
static void on_bus(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)info;
    (void)context;
    siglongjmp(back, 1);
}

int main(void) {
    test_start();
    pthread_t thread;
    void *seen;
    int file = memfd_create("shared", 0);
    NEED(file >= 0 && ftruncate(file, PAGES * PAGE) == 0);
    memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    alias = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    page_of_ones = uf_map(PAGE);
    memset(page_of_ones, 1, PAGE);

    fd = uf_open(0, 0);
    EQUAL(uf_register(fd, memory, PAGES * PAGE, MISSING), 0, "register");
    NEED(pthread_create(&thread, 0, touch, memory + 2 * PAGE) == 0);
    EQUAL(uf_next(fd).fault.flags, 0, "a missing page");
    EQUAL(uf_copy(fd, memory + 2 * PAGE, page_of_ones, PAGE, 0), (int64_t)PAGE, "copy");
    pthread_join(thread, &seen);
    EQUAL((intptr_t)seen, 2, "the fault goes on");
    EQUAL(alias[2 * PAGE], 1, "the page is everybody's");
    alias[3 * PAGE] = 5;
    EQUAL(memory[3 * PAGE], 5, "what is there is no message");
    EQUAL(uf_copy(fd, memory + 3 * PAGE, page_of_ones, PAGE, 0), -EEXIST, "copy: something is there");
    EQUAL(uf_zero(fd, memory + 4 * PAGE, 2 * PAGE, 0), 2 * (int64_t)PAGE, "zeropage");
    EQUAL(memory[5 * PAGE], 0, "zeroes");
    close(fd);

    fd = uf_open(0, 0);
    munmap(memory, PAGES * PAGE);
    memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    memset(alias, 7, 16 * PAGE);
    EQUAL(uf_register(fd, memory, PAGES * PAGE, MINOR), 0, "register for minor faults");
    NEED(pthread_create(&thread, 0, touch, memory + 2 * PAGE) == 0);
    EQUAL(uf_next(fd).fault.flags, 4, "a minor fault");
    alias[2 * PAGE] = 8;
    EQUAL(ask(UF_CONTINUE, memory + 2 * PAGE, PAGE, 0), (int64_t)PAGE, "continue");
    pthread_join(thread, &seen);
    EQUAL((intptr_t)seen, 9, "the fault goes on");
    EQUAL(ask(UF_CONTINUE, memory + 2 * PAGE, PAGE, 0), -EEXIST, "continue: it is mapped");
    EQUAL(ask(UF_CONTINUE, memory + 10 * PAGE, 8 * PAGE, 0), 6 * (int64_t)PAGE, "continue: as far as it goes");
    EQUAL(ask(UF_CONTINUE, memory + 16 * PAGE, PAGE, 0), -EFAULT, "continue: there is nothing");
    EQUAL(ask(UF_CONTINUE, memory + 16 * PAGE, PAGE, 4), -EINVAL, "continue: an unknown mode");
    close(fd);

    fd = uf_open(0, 0);
    EQUAL(uf_register(fd, memory, PAGES * PAGE, PROTECTED), 0, "register for write-protection");
    EQUAL(uf_protect(fd, memory, 4 * PAGE, 1), 0, "protect");
    EQUAL(madvise(memory, 4 * PAGE, MADV_DONTNEED), 0, "the mappings of the pages go");
    EQUAL(memory[PAGE], 7, "reads go on");
    for (int page = 1; page < 3; page++) {
        NEED(pthread_create(&thread, 0, write_one, memory + page * PAGE) == 0);
        EQUAL(uf_next(fd).fault.flags, FLAG_WRITE | FLAG_PROTECTED, "a write waits");
        EQUAL(uf_protect(fd, memory + page * PAGE, PAGE, 0), 0, "lift");
        pthread_join(thread, 0);
        EQUAL(alias[page * PAGE], 9, "it is written");
    }
    close(fd);

    fd = uf_open(0, 0);
    char *heap = uf_map(PAGES * PAGE);
    EQUAL(uf_register(fd, heap, PAGES * PAGE, MISSING), 0, "register");
    EQUAL(ask(UF_POISON, heap, 2 * PAGE, 0), 2 * (int64_t)PAGE, "poison");
    EQUAL(ask(UF_POISON, heap + PAGE, PAGE, 0), -EEXIST, "poison: twice");
    EQUAL(ask(UF_POISON, heap + 8 * PAGE, PAGE, 8), -EINVAL, "poison: an unknown mode");
    struct sigaction bus = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO};
    sigaction(SIGBUS, &bus, 0);
    volatile int caught = 1;
    if (sigsetjmp(back, 1) == 0) {
        *(volatile char *)heap;
        caught = 0;
    }
    CHECK(caught, "SIGBUS");
    close(fd);
    return test_end();
}
