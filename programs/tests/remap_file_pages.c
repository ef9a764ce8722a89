// remap_file_pages: what a stretch of a shared mapping shows afterwards, and
// what is refused.

#include "test.h"

static int remap(void *at, size_t length, int protection, size_t page, int flags) {
    return (int)syscall(SYS_remap_file_pages, at, length, protection, page, flags);
}

int main(void) {
    test_start();
    int file = memfd_create("pages", 0);
    NEED(file >= 0 && ftruncate(file, 8 * PAGE) == 0);
    char *all = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    NEED(all != MAP_FAILED);
    for (int page = 0; page < 8; page++)
        all[page * PAGE] = 'a' + page;
    char *at = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    NEED(at != MAP_FAILED);

    WORKS(remap(at, PAGE, 0, 5, 0), "one page");
    CHECK(at[0] == 'f' && at[PAGE] == 'b' && at[3 * PAGE] == 'd', "shows another of the file");
    at[1] = '!';
    EQUAL(all[5 * PAGE + 1], '!', "which can be written");
    WORKS(remap(at + 2 * PAGE + 7, 2 * PAGE + 9, 0, 6, 0), "crooked arguments");
    CHECK(at[2 * PAGE] == 'g' && at[3 * PAGE] == 'h', "are rounded down");
    WORKS(remap(at + 2 * PAGE, PAGE, 0, 20, MAP_NONBLOCK), "pages behind the end of the file");
    EQUAL(LOADS(at + 2 * PAGE), SIGBUS, "are not there");
    WORKS(remap(at, 4 * PAGE, 0, 0, 0), "several mappings of one file");
    CHECK(at[0] == 'a' && at[2 * PAGE] == 'c', "become one");

    NEED(mprotect(at, PAGE, PROT_READ) == 0);
    FAILS(remap(at, 2 * PAGE, 0, 3, 0), EINVAL, "mappings that differ");
    WORKS(remap(at, PAGE, 0, 3, 0), "a constant mapping");
    CHECK(at[0] == 'd' && STORES(at) == SIGSEGV, "stays one");
    FAILS(remap(at, PAGE, PROT_READ, 1, 0), EINVAL, "a protection");
    FAILS(remap(at, 0, 0, 1, 0), EINVAL, "no length");
    FAILS(remap(at, PAGE - 1, 0, 1, 0), EINVAL, "less than a page");
    FAILS(remap(at, -PAGE, 0, 1, 0), EINVAL, "a range that wraps");
    FAILS(remap(at, PAGE, 0, -1, 0), EINVAL, "page numbers that wrap");
    NEED(munmap(at + PAGE, PAGE) == 0);
    FAILS(remap(at + PAGE, PAGE, 0, 1, 0), EINVAL, "nothing mapped");
    FAILS(remap(at, 3 * PAGE, 0, 1, 0), EINVAL, "a hole");
    EQUAL(at[0], 'd', "which changes nothing");

    char *private = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    FAILS(remap(private, PAGE, 0, 1, 0), EINVAL, "a private mapping");
    FAILS(remap(test_map(PAGE), PAGE, 0, 1, 0), EINVAL, "anonymous memory");
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int constant = open(path, O_RDONLY);
    char *readable = mmap(0, PAGE, PROT_READ, MAP_SHARED, constant, 0);
    NEED(constant >= 0 && readable != MAP_FAILED);
    FAILS(remap(readable, PAGE, 0, 1, 0), EINVAL, "a file opened to read");

    char *anonymous = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    anonymous[0] = 1;
    anonymous[PAGE] = 2;
    WORKS(remap(anonymous, PAGE, 0, 1, 0), "shared anonymous memory");
    anonymous[1] = 3;
    CHECK(anonymous[0] == 2 && anonymous[PAGE + 1] == 3, "one page twice");
    return test_end();
}
