// mmap and munmap: anonymous, hints, fixed, file mappings shared and private,
// MAP_SHARED across fork, and the errors.

#include "test.h"

static const int anonymous = MAP_PRIVATE | MAP_ANONYMOUS;

int main(void) {
    test_start();
    const int both = PROT_READ | PROT_WRITE;
    char *memory = mmap(0, 10 * PAGE, both, anonymous, -1, 0);
    WORKS((long)memory, "mmap: anonymous memory");
    int sum = 0;
    for (size_t index = 0; index < 10 * PAGE; index++)
        sum |= memory[index];
    EQUAL(sum, 0, "mmap: it is zero");
    EQUAL((uintptr_t)memory % PAGE, 0, "mmap: it is aligned");
    WORKS(munmap(memory + 3 * PAGE, 2 * PAGE), "munmap: the middle");
    CHECK(!LOADS(memory + 3 * PAGE - 1) && LOADS(memory + 3 * PAGE) == SIGSEGV &&
              LOADS(memory + 5 * PAGE - 1) == SIGSEGV && !LOADS(memory + 5 * PAGE),
          "munmap: the middle and only the middle is gone");
    WORKS(munmap(memory, 10 * PAGE), "munmap: over a hole");
    WORKS(munmap(memory, 10 * PAGE), "munmap: nothing at all");
    FAILS(munmap(memory + 1, PAGE), EINVAL, "munmap: a crooked address");
    FAILS(munmap(memory, 0), EINVAL, "munmap: no length");
    char *one = mmap(0, 1, both, anonymous, -1, 0);
    CHECK(!STORES(one + PAGE - 1), "mmap: a length of 1 gives a page");

    char *hint = test_wild(0x200000000000 - 0x10000000);
    char *place = mmap(hint, PAGE, both, anonymous, -1, 0);
    EQUAL((uintptr_t)place, (uintptr_t)hint, "mmap: a free hint is taken");
    place[0] = 'h';
    char *other = mmap(hint, PAGE, both, anonymous, -1, 0);
    CHECK(other != hint && (long)other != -1, "mmap: a hint in use is not");
    EQUAL((long)mmap(hint, PAGE, both, anonymous | MAP_FIXED, -1, 0), (long)hint, "MAP_FIXED replaces");
    EQUAL(hint[0], 0, "MAP_FIXED: new memory is there");
    FAILS((long)mmap(hint, PAGE, both, anonymous | MAP_FIXED_NOREPLACE, -1, 0), EEXIST,
          "MAP_FIXED_NOREPLACE: in use");
    EQUAL((long)mmap(hint + PAGE, PAGE, both, anonymous | MAP_FIXED_NOREPLACE, -1, 0),
          (long)hint + (long)PAGE, "MAP_FIXED_NOREPLACE: free");
    FAILS((long)mmap(hint + 1, PAGE, both, anonymous | MAP_FIXED, -1, 0), EINVAL,
          "MAP_FIXED: a crooked address");
    FAILS((long)mmap(0, 0, both, anonymous, -1, 0), EINVAL, "mmap: no length");
    FAILS((long)mmap(0, PAGE, both, MAP_ANONYMOUS, -1, 0), EINVAL, "mmap: neither shared nor private");
    FAILS((long)mmap(0, PAGE, both, MAP_PRIVATE, 999, 0), EBADF, "mmap: bad descriptor");
    FAILS((long)mmap(0, (size_t)1 << 62, both, anonymous, -1, 0), ENOMEM, "mmap: larger than the world");
    FAILS((long)mmap(test_wild(0x7ffffffffffff000), PAGE, both, anonymous | MAP_FIXED, -1, 0), ENOMEM,
          "MAP_FIXED: behind the end of user space");

    const char *path = "/tmp/memory-mmap";
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    STEP_EQUAL(pwrite(file, "page zero", 9, 0), 9);
    STEP_EQUAL(pwrite(file, "page two", 8, 2 * PAGE), 8);
    char *shared = mmap(0, 3 * PAGE, both, MAP_SHARED, file, 0);
    char *private = mmap(0, 3 * PAGE, both, MAP_PRIVATE, file, 0);
    char *part = mmap(0, PAGE, PROT_READ, MAP_SHARED, file, 2 * PAGE);
    NEED(shared != MAP_FAILED && private != MAP_FAILED && part != MAP_FAILED);
    CHECK(strcmp(shared, "page zero") == 0 && strcmp(private, "page zero") == 0, "a file mapping shows the file");
    CHECK(strcmp(part, "page two") == 0, "from its offset on");
    STEP_EQUAL(pwrite(file, "PAGE", 4, 0), 4);
    CHECK(memcmp(shared, "PAGE zero", 9) == 0, "a file mapping sees what is written to the file");
    CHECK(memcmp(private, "PAGE zero", 9) == 0, "a private one too, before its first store");
    memcpy(shared + 2 * PAGE, "SHARED", 6);
    char text[10] = "";
    STEP_EQUAL(pread(file, text, 6, 2 * PAGE), 6);
    CHECK(strcmp(text, "SHARED") == 0, "the file sees what is stored in a shared mapping");
    CHECK(memcmp(part, "SHARED", 6) == 0, "and so does another mapping");
    memcpy(private, "mine", 4);
    STEP_EQUAL(pread(file, text, 4, 0), 4);
    CHECK(memcmp(text, "PAGE", 4) == 0 && memcmp(private, "mine zero", 9) == 0,
          "a store to a private mapping stays there");
    STEP_EQUAL(pwrite(file, "xxxx", 4, 0), 4);
    CHECK(memcmp(private, "mine", 4) == 0, "which no longer sees the file there");
    EQUAL(STORES(part), SIGSEGV, "a read-only mapping cannot be written");
    EQUAL(shared[2 * PAGE + 100], 0, "the rest of the last page is zero");
    EXITS(0, "a child writes a shared file mapping and its private copy", {
        shared[PAGE] = 'c';
        private[PAGE] = 'd';
    });
    CHECK(shared[PAGE] == 'c' && private[PAGE] == 'c', "the parent sees the shared store alone");
    FAILS((long)mmap(0, PAGE, both, MAP_SHARED, file, 1), EINVAL, "mmap: a crooked offset");
    int readable = open(path, O_RDONLY);
    FAILS((long)mmap(0, PAGE, both, MAP_SHARED, readable, 0), EACCES, "shared and writable needs a writable file");
    char *copy = mmap(0, PAGE, both, MAP_PRIVATE, readable, 0);
    CHECK(copy != MAP_FAILED && !STORES(copy), "private and writable needs a readable one");
    char *fixed = mmap(0, PAGE, PROT_READ, MAP_SHARED, readable, 0);
    FAILS(mprotect(fixed, PAGE, both), EACCES, "nor does mprotect make it writable");
    int writable = open(path, O_WRONLY);
    FAILS((long)mmap(0, PAGE, PROT_WRITE, MAP_SHARED, writable, 0), EACCES, "a write-only file cannot be mapped");
    int directory = open("/tmp", O_RDONLY);
    FAILS((long)mmap(0, PAGE, PROT_READ, MAP_SHARED, directory, 0), ENODEV, "nor a directory");
    close(file);
    unlink(path);
    CHECK(shared[PAGE] == 'c', "a mapping outlives close and unlink");

    // The program itself, from the initial file system.
    int self = open("/proc/self/exe", O_RDONLY);
    NEED(self >= 0);
    char *program = mmap(0, PAGE, PROT_READ, MAP_PRIVATE, self, 0);
    NEED(program != MAP_FAILED);
    CHECK(memcmp(program, "\177ELF", 4) == 0, "a mapping of the program's own file");

    volatile int *counter = mmap(0, PAGE, both, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED((void *)counter != MAP_FAILED);
    int before = test_failures;
    for (int round = 0; round < 10; round++)
        STEP_EQUAL(test_wait(CHILD((*counter)++)), 0);
    STEP_EQUAL(*counter, 10);
    ALL_STEPS(before, "shared anonymous memory across fork");
    char *populated = mmap(0, 64 * PAGE, both, anonymous | MAP_POPULATE, -1, 0);
    unsigned char present[64];
    STEP_EQUAL(mincore(populated, 64 * PAGE, present), 0);
    sum = 0;
    for (int index = 0; index < 64; index++)
        sum += present[index] & 1;
    EQUAL(sum, 64, "MAP_POPULATE brings the pages in");
    char *reserved = mmap(0, (size_t)1 << 33, both, anonymous | MAP_NORESERVE, -1, 0);
    CHECK(reserved != MAP_FAILED && !STORES(reserved + ((size_t)1 << 32)), "MAP_NORESERVE: 8 GiB of address space");
    munmap(reserved, (size_t)1 << 33);
    char *down = mmap(0, PAGE, both, anonymous | MAP_GROWSDOWN, -1, 0);
    CHECK(down != MAP_FAILED && !STORES(down) && !STORES(down - 1), "MAP_GROWSDOWN grows");
    // A function that gives 42.
#if defined(__x86_64__)
    static const uint8_t code[] = {0xb8, 42, 0, 0, 0, 0xc3};
#else
    static const uint32_t code[] = {0x52800540, 0xd65f03c0};
#endif
    char *page = mmap(0, PAGE, both | PROT_EXEC, anonymous, -1, 0);
    NEED(page != MAP_FAILED);
    memcpy(page, code, sizeof code);
    __builtin___clear_cache(page, page + sizeof code);
    EQUAL(((int (*)(void))page)(), 42, "PROT_EXEC: code that the program has written runs");
    return test_end();
}
