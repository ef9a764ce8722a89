// /proc/self/maps, smaps and status read in pieces: whole lines whatever is
// mapped and unmapped in between, and the same text whatever the size of the
// pieces.

#include "test.h"

#include <pthread.h>

enum { MANY = 300 };

static char whole[400000], pieces[400000];

// So many mappings that do not join, from there on: every second page.
static char *many(uintptr_t start, int count) {
    char *memory = mmap((void *)start, 2 * count * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    NEED(memory != MAP_FAILED);
    for (int index = 0; index < count; index++)
        STEP_EQUAL(mprotect(memory + 2 * index * PAGE, PAGE, PROT_READ), 0);
    return memory;
}

// The text in pieces of a size, from the current position on.
static size_t read_pieces(int file, size_t size) {
    size_t length = 0;
    ssize_t count;
    while ((count = read(file, pieces + length, size)) > 0)
        length += count;
    STEP_EQUAL(count, 0);
    pieces[length] = 0;
    return length;
}

// Whether a text is made of whole lines of mappings, none of which begins below
// the end of the one before it. Counts those from `start` to `end`.
static int lines_of(const char *text, uintptr_t start, uintptr_t end) {
    unsigned long last = 0;
    int found = 0;
    for (const char *at = text; *at; at = strchr(at, '\n') + 1) {
        unsigned long from, to, offset, inode;
        unsigned major, minor;
        char permissions[5];
        int length = 0;
        if (sscanf(at, "%lx-%lx %4s %lx %x:%x %lu%n", &from, &to, permissions, &offset, &major, &minor, &inode,
                   &length) != 7 ||
            from < last || to <= from || strlen(permissions) != 4 || !strchr(at, '\n'))
            return -1;
        found += from >= start && to <= end;
        last = to;
    }
    return found;
}

static volatile int stop;

// Maps and unmaps in front of everything else.
static void *disturb(void *memory) {
    for (int turn = 0; !stop; turn++) {
        char *at = (char *)memory + turn % 7 * 2 * PAGE;
        STEP(mmap(at, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
        STEP_EQUAL(munmap(at, PAGE), 0);
    }
    return 0;
}

static void sizes(const char *path, const char *text) {
    int before = test_failures;
    NEED(test_read_file(path, whole, sizeof whole) > 0);
    int file = open(path, O_RDONLY);
    static const size_t sizes[] = {1, 61, 1024, 4096, 100000};
    for (int index = 0; index < 5; index++) {
        STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
        STEP_EQUAL(read_pieces(file, sizes[index]), strlen(whole));
        STEP(strcmp(pieces, whole) == 0);
    }
    close(file);
    ALL_STEPS(before, text);
}

int main(void) {
    test_start();
    const uintptr_t low = 0x100000000000, high = 0x200000000000;
    char *first = many(low, 8), *second = many(high, MANY / 2);
    // A test for the text: what both buffers take is mapped before it is looked at.
    memset(whole, 1, sizeof whole);
    memset(pieces, 1, sizeof pieces);
    sizes("/proc/self/maps", "maps: the same in pieces of each size");
    sizes("/proc/self/smaps", "smaps: the same in pieces of each size");
    NEED(test_read_file("/proc/self/maps", whole, sizeof whole) > 0);
    EQUAL(lines_of(whole, high, high + MANY * PAGE), MANY, "maps: a line for each mapping");

    int file = open("/proc/self/maps", O_RDONLY);
    int before = test_failures;
    size_t length = strlen(whole);
    for (size_t at = 0; at < length; at += 977) {
        ssize_t count = pread(file, pieces, 100, at);
        STEP_EQUAL(count, length - at < 100 ? length - at : 100);
        STEP(count > 0 && memcmp(pieces, whole + at, count) == 0);
    }
    ALL_STEPS(before, "maps: pread at any place");
    EQUAL(lseek(file, 5000, SEEK_SET), 5000, "maps: lseek");
    read_pieces(file, 1000);
    CHECK(strcmp(pieces, whole + 5000) == 0, "maps: and on from there");
    EQUAL(read(file, pieces, 100), 0, "maps: the end");
    FAILS(lseek(file, 0, SEEK_END), EINVAL, "maps: no place is counted from the end");
    EQUAL(lseek(file, 1 << 30, SEEK_SET), 1 << 30, "maps: lseek behind the end");
    EQUAL(read(file, pieces, 100), 0, "maps: there is nothing");
    STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
    CHECK(read(file, pieces, sizeof pieces) < (ssize_t)length, "maps: one read makes a page or so");

    // The reader is in the middle of a line when the mappings before it are
    // unmapped.
    STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
    char *line = strstr(whole, "20000000a000-");
    NEED(line);
    size_t middle = line - whole + 5;
    STEP_EQUAL(read(file, pieces, middle), middle);
    STEP_EQUAL(munmap(first, 3 * PAGE), 0);
    size_t rest = 0;
    ssize_t count;
    while ((count = read(file, pieces + middle + rest, 1024)) > 0)
        rest += count;
    pieces[middle + rest] = 0;
    EQUAL(lines_of(pieces, high, high + MANY * PAGE), MANY, "maps: no line is torn when mappings before it go");
    CHECK(strncmp(pieces + middle, whole + middle, 500) == 0, "maps: and the reader goes on where it was");

    // Mappings ahead of the reader are shown as they are when it reaches them.
    NEED(test_read_file("/proc/self/maps", whole, sizeof whole) > 0);
    STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
    middle = strstr(whole, "200000000000-") - whole + 3;
    STEP_EQUAL(read(file, pieces, middle), middle);
    STEP_EQUAL(munmap(second + 100 * PAGE, 10 * PAGE), 0);
    rest = 0;
    while ((count = read(file, pieces + middle + rest, 1)) > 0)
        rest += count;
    pieces[middle + rest] = 0;
    EQUAL(lines_of(pieces, high, high + MANY * PAGE), MANY - 10, "maps: what goes ahead of the reader is not shown");

    pthread_t thread;
    before = test_failures;
    NEED(pthread_create(&thread, 0, disturb, first) == 0);
    for (int round = 0; round < 20; round++) {
        STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
        read_pieces(file, 1 + round * 37);
        STEP_EQUAL(lines_of(pieces, high, high + MANY * PAGE), MANY - 10);
    }
    stop = 1;
    pthread_join(thread, 0);
    ALL_STEPS(before, "maps: whole lines while another thread maps and unmaps");
    close(file);

    file = open("/proc/self/status", O_RDONLY);
    STEP_EQUAL(read(file, pieces, 10), 10);
    memset(mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, 1 << 20);
    length = 10;
    while ((count = read(file, pieces + length, 7)) > 0)
        length += count;
    pieces[length] = 0;
    long size = 0, resident = 0;
    CHECK(sscanf(strstr(pieces, "VmSize:"), "VmSize: %ld", &size) == 1 &&
              sscanf(strstr(pieces, "VmRSS:"), "VmRSS: %ld", &resident) == 1 && resident <= size,
          "status: of one moment");
    long now = 0;
    NEED(test_read_file("/proc/self/status", whole, sizeof whole) > 0);
    sscanf(strstr(whole, "VmSize:"), "VmSize: %ld", &now);
    EQUAL(now, size + 1024, "status: that of its first read");
    close(file);

    int ends[2];
    NEED(pipe(ends) == 0);
    pid_t child = CHILD({ STEP_EQUAL(read(ends[0], pieces, 1), 1); });
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/maps", child);
    file = open(path, O_RDONLY);
    CHECK(read(file, pieces, 100) == 100, "maps of a child");
    STEP_EQUAL(write(ends[1], "", 1), 1);
    siginfo_t information;
    STEP_EQUAL(waitid(P_PID, child, &information, WEXITED | WNOWAIT), 0);
    // Mappings made before its end may still be read.
    while ((count = read(file, pieces, 4096)) > 0)
        ;
    EQUAL(count, 0, "maps of a dead child: nothing more");
    EQUAL(pread(file, pieces, 100, 0), 0, "maps of a dead child: nothing");
    test_wait(child);
    FAILS(pread(file, pieces, 100, 0), ESRCH, "maps of a child that is gone");
    return test_end();
}
