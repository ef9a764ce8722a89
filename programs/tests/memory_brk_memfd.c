// brk, and memfd_create with its seals.

#include "test.h"

#ifndef F_ADD_SEALS
#define F_ADD_SEALS 1033
#define F_GET_SEALS 1034
#define F_SEAL_SEAL 1
#define F_SEAL_SHRINK 2
#define F_SEAL_GROW 4
#define F_SEAL_WRITE 8
#endif

static char *set_break(char *to) { return (char *)syscall(SYS_brk, to); }

int main(void) {
    test_start();
    const int both = PROT_READ | PROT_WRITE;
    // In a child: the allocator of this process may use the break itself.
    EXITS(0, "brk", {
        char *start = set_break(0);
        CHECK(start != 0 && (uintptr_t)start > 0x1000, "brk: 0 tells the break");
        char *base = (char *)(((uintptr_t)start + PAGE - 1) & ~(PAGE - 1));
        EQUAL((long)set_break(base + 5 * PAGE), (long)base + 5 * (long)PAGE, "brk: grows");
        CHECK(base[0] == 0 && base[5 * PAGE - 1] == 0, "brk: new memory is zero");
        memset(base, 'b', 5 * PAGE);
        EQUAL((long)set_break(base + 2 * PAGE), (long)base + 2 * (long)PAGE, "brk: shrinks");
        EQUAL(LOADS(base + 2 * PAGE), SIGSEGV, "brk: what was cut off is gone");
        EQUAL((long)set_break(base + 3 * PAGE + 5), (long)base + 3 * (long)PAGE + 5, "brk: any byte");
        CHECK(base[PAGE] == 'b' && base[2 * PAGE] == 0 && !STORES(base + 4 * PAGE - 1),
              "brk: the rest of the page is there");
        EQUAL((long)set_break(test_wild(0x10)), (long)base + 3 * (long)PAGE + 5, "brk: not below its start");
        EQUAL((long)set_break(test_wild(0x7ffffffff000)), (long)base + 3 * (long)PAGE + 5,
              "brk: not to the end of the world");
        char *block = mmap((char *)base + 64 * PAGE, PAGE, both,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        STEP(block == base + 64 * PAGE);
        EQUAL((long)set_break(base + 80 * PAGE), (long)base + 3 * (long)PAGE + 5,
              "brk: not over another mapping");
        pid_t child = CHILD({
            STEP_EQUAL((long)set_break(0), (long)base + 3 * (long)PAGE + 5);
            base[0] = 'c';
            STEP_EQUAL((long)set_break(base + 10 * PAGE), (long)base + 10 * (long)PAGE);
        });
        EQUAL(test_wait(child), 0, "brk: a child has its own");
        EQUAL(base[0], 'b', "brk: the parent's stays");
        EQUAL((long)set_break(0), (long)base + 3 * (long)PAGE + 5, "brk: and its length too");
    });

    int file = memfd_create("name", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    WORKS(file, "memfd_create");
    EQUAL(fcntl(file, F_GETFD), FD_CLOEXEC, "MFD_CLOEXEC");
    struct stat status;
    STEP_EQUAL(fstat(file, &status), 0);
    CHECK(S_ISREG(status.st_mode) && status.st_size == 0, "an empty file");
    char link[100] = "", path[40];
    snprintf(path, 40, "/proc/self/fd/%d", file);
    STEP(readlink(path, link, 99) > 0);
    CHECK(strcmp(link, "/memfd:name (deleted)") == 0, "its name");
    EQUAL(write(file, "hello", 5), 5, "write");
    char *mapping = mmap(0, 4 * PAGE, both, MAP_SHARED, file, 0);
    NEED(mapping != MAP_FAILED);
    CHECK(strcmp(mapping, "hello") == 0, "mmap shows it");
    EQUAL(LOADS(mapping + PAGE), SIGBUS, "behind its end is SIGBUS");
    WORKS(ftruncate(file, 4 * PAGE), "ftruncate");
    EQUAL(STORES(mapping + 3 * PAGE), 0, "now it is there");
    EXITS(0, "a child writes through the mapping", mapping[3 * PAGE] = 'c');
    char one;
    STEP_EQUAL(pread(file, &one, 1, 3 * PAGE), 1);
    EQUAL(one, 'c', "the file has it");

    EQUAL(fcntl(file, F_GET_SEALS), 0, "no seals yet");
    WORKS(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK), "F_SEAL_SHRINK");
    FAILS(ftruncate(file, PAGE), EPERM, "it does not shrink");
    WORKS(ftruncate(file, 5 * PAGE), "it grows");
    WORKS(fcntl(file, F_ADD_SEALS, F_SEAL_GROW), "F_SEAL_GROW");
    FAILS(ftruncate(file, 6 * PAGE), EPERM, "it does not grow");
    FAILS(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE), EBUSY, "F_SEAL_WRITE: a writable mapping is there");
    munmap(mapping, 4 * PAGE);
    WORKS(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE), "F_SEAL_WRITE");
    FAILS(pwrite(file, "x", 1, 0), EPERM, "it cannot be written");
    FAILS((long)mmap(0, PAGE, both, MAP_SHARED, file, 0), EPERM, "nor mapped shared and writable");
    char *readable = mmap(0, PAGE, PROT_READ, MAP_SHARED, file, 0);
    CHECK(readable != MAP_FAILED && readable[0] == 'h', "but mapped shared and readable");
    FAILS(mprotect(readable, PAGE, both), EACCES, "which stays so");
    WORKS(fcntl(file, F_ADD_SEALS, F_SEAL_SEAL), "F_SEAL_SEAL");
    FAILS(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE), EPERM, "no more seals");
    EQUAL(fcntl(file, F_GET_SEALS), F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE, "F_GET_SEALS");
    int plain = memfd_create("plain", 0);
    EQUAL(fcntl(plain, F_GET_SEALS), F_SEAL_SEAL, "without MFD_ALLOW_SEALING it is sealed against seals");
    FAILS(fcntl(plain, F_ADD_SEALS, F_SEAL_GROW), EPERM, "and takes none");
    FAILS(memfd_create("x", 0x4000), EINVAL, "memfd_create: unknown flags");
    FAILS(memfd_create(test_wild(8), 0), EFAULT, "memfd_create: a bad pointer");
    int ordinary = open("/dev/null", O_RDWR);
    FAILS(fcntl(ordinary, F_GET_SEALS), EINVAL, "no seals for other files");
    return test_end();
}
