/*
 * A process reads what the kernel tells of its memory: /proc/self/maps and smaps whole, statm again
 * and again, and one mapping after the other by ioctl(PROCMAP_QUERY). Each is a phase.
 *
 *      64 GiB
 *      | page | page | page | page | ...     each a mapping: every second one is read-only, and
 *        rw-    r--    rw-    r--            has a page in memory, as all have for smaps
 *
 * --rounds N   how often each phase is run (10); statm and the query 20 times as often
 * --verify     checks what is read instead
 */
#define _GNU_SOURCE
#include "mark.h"
#include "workload.h"

#include <fcntl.h>
#include <sys/ioctl.h>

#define START (64 * GIB)
#define MANY 30000UL
#define SOME 2000UL
#define TOUCHED 1000UL

/* The memory for statm, and the part of it that is mapped and unmapped between two reads. */
#define RESIDENT (16 * MIB)
#define PART (64 * KIB)

struct query {
    uint64_t size, flags, address, start, end, permissions, page_size, offset, inode;
    uint32_t major, minor, name_size, id_size;
    uint64_t name, id;
};

#define QUERY _IOWR('f', 17, struct query)

static char buffer[64 * KIB];

/* Maps `count` pages, each a mapping of its own. */
static void map_many(unsigned long count, int touched)
{
    char *start = map_at(START, count * BASE_PAGE, MAP_FIXED);
    if (touched)
        touch(start, count * BASE_PAGE);
    for (unsigned long page = 1; page < count; page += 2)
        if (mprotect(start + page * BASE_PAGE, BASE_PAGE, PROT_READ) != 0)
            FAIL("mprotect of page %lu: errno %d", page, errno);
}

static void unmap_many(unsigned long count)
{
    if (munmap((void *)START, count * BASE_PAGE) != 0)
        FAIL("munmap: errno %d", errno);
}

static int opened(const char *path)
{
    int file = open(path, O_RDONLY);
    if (file < 0)
        FAIL("%s: errno %d", path, errno);
    return file;
}

static void rewind_file(int file)
{
    if (lseek(file, 0, SEEK_SET) != 0)
        FAIL("lseek: errno %d", errno);
}

/* Reads the file to its end in pieces of a size, and says how many lines it has. */
static unsigned long read_lines(int file, size_t size)
{
    unsigned long lines = 0;
    for (;;) {
        ssize_t length = read(file, buffer, size);
        if (length < 0)
            FAIL("read: errno %d", errno);
        if (length == 0)
            return lines;
        for (ssize_t at = 0; at < length; at++)
            lines += buffer[at] == '\n';
    }
}

/* Reads the file to its end in pieces of a size. */
static void read_all(int file, size_t size)
{
    while (read(file, buffer, size) > 0)
        ;
}

static unsigned long resident_pages(int statm)
{
    unsigned long total, resident;
    ssize_t length = pread(statm, buffer, sizeof buffer - 1, 0);
    if (length <= 0)
        FAIL("statm: errno %d", errno);
    buffer[length] = '\0';
    if (sscanf(buffer, "%lu %lu", &total, &resident) != 2)
        FAIL("statm is %s", buffer);
    return resident;
}

static void change(char *memory, unsigned long round)
{
    char *part = memory + round * PART % RESIDENT;
    if (madvise(part, PART, MADV_DONTNEED) != 0)
        FAIL("madvise: errno %d", errno);
    touch(part, PART);
}

static struct query query_of(unsigned long page)
{
    return (struct query){.size = sizeof(struct query), .address = START + page * BASE_PAGE};
}

static void measure(unsigned long rounds)
{
    int maps = opened("/proc/self/maps"), smaps = opened("/proc/self/smaps");
    int statm = opened("/proc/self/statm");

    map_many(MANY, 0);
    for (unsigned long round = 0; round < rounds; round++) {
        rewind_file(maps);
        MARK_BEGIN(PHASE_MAPS);
        read_all(maps, sizeof buffer);
        MARK_END(PHASE_MAPS);
    }
    for (unsigned long round = 0; round < rounds * 20; round++) {
        struct query query = query_of(round * 7919 % MANY);
        MARK_BEGIN(PHASE_MAP_QUERY);
        int result = ioctl(maps, QUERY, &query);
        MARK_END(PHASE_MAP_QUERY);
        if (result != 0)
            FAIL("query: errno %d", errno);
    }
    unmap_many(MANY);

    map_many(SOME, 0);
    for (unsigned long round = 0; round < rounds; round++) {
        rewind_file(maps);
        MARK_BEGIN(PHASE_MAPS_IN_PIECES);
        read_all(maps, KIB);
        MARK_END(PHASE_MAPS_IN_PIECES);
    }
    unmap_many(SOME);

    map_many(TOUCHED, 1);
    for (unsigned long round = 0; round < rounds; round++) {
        rewind_file(smaps);
        MARK_BEGIN(PHASE_SMAPS);
        read_all(smaps, sizeof buffer);
        MARK_END(PHASE_SMAPS);
    }
    unmap_many(TOUCHED);

    char *memory = map_at(START, RESIDENT, MAP_FIXED);
    touch(memory, RESIDENT);
    for (unsigned long round = 0; round < rounds * 20; round++) {
        change(memory, round);
        MARK_BEGIN(PHASE_STATM);
        ssize_t length = pread(statm, buffer, KIB, 0);
        MARK_END(PHASE_STATM);
        if (length <= 0)
            FAIL("statm: errno %d", errno);
    }
}

static void verify(void)
{
    int maps = opened("/proc/self/maps"), smaps = opened("/proc/self/smaps");
    int statm = opened("/proc/self/statm");
    unsigned long before = read_lines(maps, sizeof buffer);
    static const size_t sizes[] = {sizeof buffer, KIB, 61};
    map_many(MANY, 0);
    for (int index = 0; index < 3; index++) {
        rewind_file(maps);
        unsigned long lines = read_lines(maps, sizes[index]);
        if (lines != before + MANY)
            FAIL("%lu lines in pieces of %zu, not %lu", lines, sizes[index], before + MANY);
    }
    for (unsigned long page = 0; page < MANY; page += 999) {
        struct query query = query_of(page);
        if (ioctl(maps, QUERY, &query) != 0)
            FAIL("query of page %lu: errno %d", page, errno);
        uint64_t permissions = page % 2 == 0 ? 3 : 1;
        if (query.start != START + page * BASE_PAGE || query.end != query.start + BASE_PAGE ||
            query.permissions != permissions)
            FAIL("query of page %lu: %#llx to %#llx", page, (unsigned long long)query.start,
                 (unsigned long long)query.end);
    }
    unmap_many(MANY);

    rewind_file(smaps);
    unsigned long lines = read_lines(smaps, sizeof buffer);
    map_many(TOUCHED, 1);
    rewind_file(smaps);
    unsigned long more = read_lines(smaps, sizeof buffer) - lines;
    if (more < 20 * TOUCHED || more % TOUCHED != 0)
        FAIL("%lu lines for %lu mappings", more, TOUCHED);
    unmap_many(TOUCHED);

    unsigned long empty = resident_pages(statm);
    char *memory = map_at(START, RESIDENT, MAP_FIXED);
    touch(memory, RESIDENT);
    for (unsigned long round = 0; round < 32; round++) {
        change(memory, round);
        unsigned long resident = resident_pages(statm);
        if (resident < empty + RESIDENT / BASE_PAGE || resident > empty + RESIDENT / BASE_PAGE + 16)
            FAIL("%lu pages are resident, and %lu were before", resident, empty);
    }
    say("proc: what is told is right\n");
}

int main(int count, char **words)
{
    if (flag(count, words, "--verify"))
        verify();
    else
        measure(option(count, words, "--rounds", 10));
    return 0;
}
