// mremap: grow, shrink, move, DONTUNMAP, shared and file mappings, errors.

#include "test.h"

static void fill(char *memory, int pages) {
    for (int page = 0; page < pages; page++)
        memset(memory + page * PAGE, 'a' + page % 26, PAGE);
}

static int filled(const char *memory, int pages) {
    for (int page = 0; page < pages; page++)
        if (memory[page * PAGE] != 'a' + page % 26 ||
            memory[page * PAGE + PAGE - 1] != 'a' + page % 26)
            return 0;
    return 1;
}

int main(void) {
    test_start();
    // A place with free space around it.
    char *space = test_map(4096 * PAGE);
    munmap(space, 4096 * PAGE);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, both = PROT_READ | PROT_WRITE;
    char *memory = mmap(space, 16 * PAGE, both, flags, -1, 0);
    NEED(memory == space);
    fill(memory, 16);

    EQUAL((long)mremap(memory, 16 * PAGE, 32 * PAGE, 0), (long)memory, "grows in place");
    CHECK(filled(memory, 16) && memory[20 * PAGE] == 0, "with its contents and zeros behind");
    EQUAL((long)mremap(memory, 32 * PAGE, 16 * PAGE, 0), (long)memory, "shrinks in place");
    EQUAL(LOADS(memory + 16 * PAGE), SIGSEGV, "what was cut off is gone");
    NEED(mmap(space + 16 * PAGE, PAGE, both, flags, -1, 0) != MAP_FAILED);
    FAILS((long)mremap(memory, 16 * PAGE, 32 * PAGE, 0), ENOMEM, "no room and no leave to move");
    char *moved = mremap(memory, 16 * PAGE, 32 * PAGE, MREMAP_MAYMOVE);
    CHECK((long)moved != -1 && moved != memory, "MREMAP_MAYMOVE moves");
    CHECK(filled(moved, 16) && moved[31 * PAGE] == 0, "with its contents");
    EQUAL(LOADS(memory), SIGSEGV, "the old place is empty");
    char *target = space + 1000 * PAGE;
    NEED(mmap(target, PAGE, both, flags, -1, 0) == target);
    EQUAL((long)mremap(moved, 16 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target),
          (long)target, "MREMAP_FIXED moves to a chosen place");
    CHECK(filled(target, 16), "with its contents");
    CHECK(LOADS(moved) == SIGSEGV && !LOADS(moved + 16 * PAGE), "the rest stays where it was");
    EXITS(0, "a child moves its copy", {
        char *there = mremap(target, 16 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, space);
        STEP(there == space && filled(space, 16));
        space[0] = 'z';
    });
    CHECK(filled(target, 16), "the parent's stays");

    char *twin = mremap(target, 16 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
    CHECK((long)twin != -1 && twin != target && filled(twin, 16), "MREMAP_DONTUNMAP moves the pages");
    CHECK(!LOADS(target) && target[0] == 0 && target[15 * PAGE] == 0, "and leaves an empty mapping");

    // 4 MiB at aligned places: whole tables may move.
    char *large = test_map(16 << 20);
    char *aligned = (char *)(((uintptr_t)large + (2 << 20)) & ~(uintptr_t)((2 << 20) - 1));
    fill(aligned, 1024);
    char *there = mremap(aligned, 4 << 20, 4 << 20, MREMAP_MAYMOVE | MREMAP_FIXED, aligned + (6 << 20));
    CHECK(there == aligned + (6 << 20) && filled(there, 1024), "4 MiB move");
    EQUAL(LOADS(aligned), SIGSEGV, "and leave nothing behind");
    there = mremap(there, 4 << 20, 4 << 20, MREMAP_MAYMOVE | MREMAP_FIXED, aligned + PAGE);
    CHECK(there == aligned + PAGE && filled(there, 1024), "4 MiB move to a crooked place");

    int file = memfd_create("mremap", 0);
    NEED(file >= 0 && ftruncate(file, 32 * PAGE) == 0);
    char *shared = mmap(0, 8 * PAGE, both, MAP_SHARED, file, 0);
    NEED(shared != MAP_FAILED);
    fill(shared, 8);
    char *more = mremap(shared, 8 * PAGE, 16 * PAGE, MREMAP_MAYMOVE);
    CHECK((long)more != -1 && filled(more, 8), "a file mapping grows");
    more[10 * PAGE] = 'k';
    char one;
    STEP_EQUAL(pread(file, &one, 1, 10 * PAGE), 1);
    EQUAL(one, 'k', "into the file");
    char *copy = mremap(more, 0, 8 * PAGE, MREMAP_MAYMOVE);
    CHECK((long)copy != -1 && filled(copy, 8) && filled(more, 8), "old length 0 makes a second mapping");
    copy[0] = 'y';
    EQUAL(more[0], 'y', "of the same pages");

    memory = test_map(4 * PAGE);
    FAILS((long)mremap(memory, PAGE, PAGE, 8), EINVAL, "unknown flags");
    FAILS((long)mremap(memory + 1, PAGE, PAGE, 0), EINVAL, "a crooked address");
    FAILS((long)mremap(memory, PAGE, 0, 0), EINVAL, "a new length of 0");
    FAILS((long)mremap(memory, 0, PAGE, MREMAP_MAYMOVE), EINVAL, "old length 0 of a private mapping");
    FAILS((long)mremap(memory, PAGE, PAGE, MREMAP_FIXED, space), EINVAL, "MREMAP_FIXED alone");
    FAILS((long)mremap(memory, 2 * PAGE, 2 * PAGE, MREMAP_FIXED | MREMAP_MAYMOVE, memory + PAGE),
          EINVAL, "overlapping places");
    FAILS((long)mremap(memory, PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP), EINVAL,
          "MREMAP_DONTUNMAP with another length");
    FAILS((long)mremap(test_wild(0x10000), PAGE, 2 * PAGE, MREMAP_MAYMOVE), EFAULT, "no mapping there");
    NEED(munmap(memory + 2 * PAGE, PAGE) == 0);
    FAILS((long)mremap(memory, 4 * PAGE, 8 * PAGE, MREMAP_MAYMOVE), EFAULT, "over a hole");
    return test_end();
}
