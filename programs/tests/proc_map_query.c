// ioctl(PROCMAP_QUERY) of /proc/self/maps: the same as the text, as numbers.

#include "test.h"

#include <sys/ioctl.h>

struct query {
    uint64_t size, flags, address, start, end, permissions, page_size, offset, inode;
    uint32_t major, minor, name_size, id_size;
    uint64_t name, id;
};

enum { READABLE = 1, WRITABLE = 2, EXECUTABLE = 4, SHARED = 8, OR_NEXT = 16, OF_FILE = 32 };

#define QUERY _IOWR('f', 17, struct query)

static char text[100000], name[4096];

static int ask(int file, struct query *query, uint64_t address, uint64_t flags) {
    *query = (struct query){.size = sizeof *query, .flags = flags, .address = address};
    query->name = (uintptr_t)name;
    query->name_size = sizeof name;
    return ioctl(file, QUERY, query);
}

int main(void) {
    test_start();
    int maps = open("/proc/self/maps", O_RDONLY);
    NEED(maps >= 0);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    char *memory = mmap((void *)0x100000000000, 16 * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    NEED(memory != MAP_FAILED && munmap(memory + 4 * PAGE, 4 * PAGE) == 0);
    int file = open("/tmp/a file", O_RDWR | O_CREAT, 0600);
    NEED(file >= 0 && ftruncate(file, 8 * PAGE) == 0);
    char *shared = mmap(memory + 32 * PAGE, 2 * PAGE, PROT_READ, MAP_SHARED | MAP_FIXED, file, 3 * PAGE);
    NEED(shared != MAP_FAILED);
    struct query query;

    // Before anything else is asked, so that both are of one moment.
    memset(text, 0, sizeof text);
    NEED(test_read_file("/proc/self/maps", text, sizeof text) > 0);
    int before = test_failures, lines = 0;
    uint64_t next = 0;
    for (char *at = text; *at; at = strchr(at, '\n') + 1, lines++) {
        unsigned long start, end, offset, inode;
        unsigned major, minor;
        char permissions[5], path[300] = "";
        STEP(sscanf(at, "%lx-%lx %4s %lx %x:%x %lu%*[ ]%299[^\n]", &start, &end, permissions, &offset, &major, &minor,
                    &inode, path) >= 7);
        if (strstr(path, "vsyscall"))
            continue;
        STEP_EQUAL(ask(maps, &query, next, OR_NEXT), 0);
        STEP(query.start == start && query.end == end && query.offset == offset && query.inode == inode &&
             query.major == major && query.minor == minor && query.page_size == PAGE);
        uint64_t expected = (permissions[0] == 'r') * READABLE | (permissions[1] == 'w') * WRITABLE |
                            (permissions[2] == 'x') * EXECUTABLE | (permissions[3] == 's') * SHARED;
        STEP_EQUAL(query.permissions, expected);
        STEP_EQUAL(query.name_size, path[0] ? strlen(path) + 1 : 0);
        STEP(!path[0] || strcmp(path, name) == 0);
        STEP_EQUAL(query.id_size, 0);
        next = end;
    }
    CHECK(lines > 5, "some lines");
    ALL_STEPS(before, "what is told is what the text has");
    FAILS(ask(maps, &query, ~0UL - PAGE, OR_NEXT), ENOENT, "behind all mappings");
    FAILS(ask(maps, &query, (uintptr_t)memory + 5 * PAGE, 0), ENOENT, "in a gap");
    EQUAL(ask(maps, &query, (uintptr_t)memory + 5 * PAGE, OR_NEXT), 0, "in a gap: the next one");
    EQUAL(query.start, (uintptr_t)memory + 8 * PAGE, "which begins behind it");
    EQUAL(ask(maps, &query, (uintptr_t)memory + 3 * PAGE + 7, 0), 0, "around an address");
    EQUAL(query.end, (uintptr_t)memory + 4 * PAGE, "up to its end");
    FAILS(ask(maps, &query, (uintptr_t)memory, SHARED), ENOENT, "one that is shared: not this");
    EQUAL(ask(maps, &query, (uintptr_t)memory, OR_NEXT | SHARED | READABLE), 0, "the next one that is shared");
    EQUAL(query.start, (uintptr_t)shared, "which is the file");
    EQUAL(query.offset, 3 * PAGE, "with its offset");
    CHECK(strcmp(name, "/tmp/a file") == 0 && query.name_size == 12, "and its name");
    FAILS(ask(maps, &query, (uintptr_t)shared, WRITABLE), ENOENT, "one that can be written: not this");
    EQUAL(ask(maps, &query, (uintptr_t)memory, OR_NEXT | OF_FILE), 0, "the next one of a file");
    EQUAL(query.start, (uintptr_t)shared, "which is the same");
    FAILS(ask(maps, &query, (uintptr_t)memory, 64), EINVAL, "an unknown flag");

    query = (struct query){.size = sizeof query, .address = (uintptr_t)shared};
    EQUAL(ioctl(maps, QUERY, &query), 0, "without a name");
    query.name_size = 12;
    FAILS(ioctl(maps, QUERY, &query), EINVAL, "a size and no buffer");
    query = (struct query){.size = sizeof query, .address = (uintptr_t)shared, .name = (uintptr_t)name};
    FAILS(ioctl(maps, QUERY, &query), EINVAL, "a buffer and no size");
    query.name_size = 11;
    FAILS(ioctl(maps, QUERY, &query), ENAMETOOLONG, "a buffer that is too short");
    query.name_size = 12;
    EQUAL(ioctl(maps, QUERY, &query), 0, "one that is just long enough");
    query.name = (uintptr_t)test_wild(8);
    FAILS(ioctl(maps, QUERY, &query), EFAULT, "a bad buffer");
    query = (struct query){.size = sizeof query, .address = (uintptr_t)shared, .id_size = 8};
    FAILS(ioctl(maps, QUERY, &query), EINVAL, "a size of the build ID and no buffer");

    char *page = test_map(2 * PAGE);
    NEED(munmap(page + PAGE, PAGE) == 0);
    struct query *old = (struct query *)(page + PAGE - 40);
    // The size, the flags, the address, and where the mapping is.
    *(uint64_t *)old = 40, old->flags = 0, old->address = (uintptr_t)shared;
    EQUAL(ioctl(maps, QUERY, old), 0, "an older structure");
    EQUAL(old->end, (uintptr_t)shared + 2 * PAGE, "has what it has room for");
    old = (struct query *)(page + PAGE - 16);
    old->size = 16;
    FAILS(ioctl(maps, QUERY, old), EINVAL, "too short a structure");
    old->size = 24;
    FAILS(ioctl(maps, QUERY, old), EFAULT, "one that is not there");
    FAILS(ioctl(maps, QUERY, page + PAGE), EFAULT, "none at all");
    struct { struct query known; uint64_t more[2]; } newer = {.known = {.address = (uintptr_t)shared}};
    newer.known.size = sizeof newer;
    EQUAL(ioctl(maps, QUERY, &newer), 0, "a newer structure, with nothing in what is new");
    newer.more[1] = 1;
    FAILS(ioctl(maps, QUERY, &newer), E2BIG, "with something in it");
    newer.known.size = PAGE + 1;
    FAILS(ioctl(maps, QUERY, &newer), E2BIG, "one that is longer than a page");
    FAILS(ioctl(maps, _IO('f', 18), &query), ENOTTY, "another request");
    int status = open("/proc/self/status", O_RDONLY);
    query = (struct query){.size = sizeof query, .address = (uintptr_t)shared};
    FAILS(ioctl(status, QUERY, &query), ENOTTY, "another file");

    int ends[2];
    NEED(pipe(ends) == 0);
    pid_t child = CHILD({ STEP_EQUAL(read(ends[0], text, 1), 1); });
    snprintf(name, sizeof name, "/proc/%d/maps", child);
    int others = open(name, O_RDONLY);
    EQUAL(ask(others, &query, (uintptr_t)shared, 0), 0, "of a child");
    STEP_EQUAL(write(ends[1], "", 1), 1);
    test_wait(child);
    FAILS(ask(others, &query, (uintptr_t)shared, 0), ESRCH, "of a child that is gone");
    unlink("/tmp/a file");
    return test_end();
}
