// disk: 80M
// kernel-only: it needs the kernel's disk
/*
 * A file of the disk is read from beginning to end, none of whose pages is in memory: in order and
 * at random, by read(2) and through a mapping. Prints the requests that reach the disk.
 *
 *      in order    read  |64 KiB|64 KiB|...       mapping  page, page, page, ...
 *      at random   read  a page at a time         mapping  page, page, page, ...
 *
 * --mib N      the size of the file (64)
 * --verify     checks the content, and that readahead keeps the requests few
 */
#define _GNU_SOURCE
#include "mark.h"
#include "workload.h"

#include <fcntl.h>

#define PATH "/disk/cold"
#define PIECE (64 * KIB)
/* Pages of a window of readahead. */
#define WINDOW 32

static unsigned long size, pages;
static int file;
static unsigned char buffer[PIECE];
static uint32_t *order;
static int verifies;

static unsigned char byte_of(unsigned long page)
{
    return (unsigned char)(page * 7 + page / 256);
}

static void make(void)
{
    file = open(PATH, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0)
        FAIL("%s: errno %d", PATH, errno);
    for (unsigned long page = 0; page < pages; page++) {
        memset(buffer, byte_of(page), BASE_PAGE);
        if (write(file, buffer, BASE_PAGE) != (ssize_t)BASE_PAGE)
            FAIL("write: errno %d", errno);
    }
    if (fsync(file) != 0)
        FAIL("fsync: errno %d", errno);
    order = malloc(pages * sizeof *order);
    if (order == NULL)
        FAIL("no memory for the order");
    uint64_t seed = 1;
    for (uint32_t at = 0; at < pages; at++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        uint32_t other = (uint32_t)(seed % (at + 1));
        order[at] = order[other];
        order[other] = at;
    }
}

/* The requests for reads so far, and the pages that they have brought. */
static void reads(unsigned long *requests, unsigned long *brought)
{
    char text[256];
    int stats = open("/proc/diskstats", O_RDONLY);
    ssize_t length = stats < 0 ? -1 : read(stats, text, sizeof text - 1);
    close(stats);
    text[length > 0 ? length : 0] = '\0';
    char *at = strstr(text, "vda ");
    if (at == NULL || sscanf(at, "vda %lu %*u %lu", requests, brought) != 2)
        FAIL("/proc/diskstats shows no disk");
    *brought /= BASE_PAGE / 512;
}

static void check(unsigned long page, unsigned char found)
{
    if (verifies && found != byte_of(page))
        FAIL("page %lu holds %d", page, found);
}

static void read_in_order(void)
{
    for (unsigned long at = 0; at < size; at += PIECE) {
        if (pread(file, buffer, PIECE, (off_t)at) != (ssize_t)PIECE)
            FAIL("read: errno %d", errno);
        check(at / BASE_PAGE, buffer[0]);
    }
}

static void read_at_random(void)
{
    for (unsigned long at = 0; at < pages; at++) {
        if (pread(file, buffer, BASE_PAGE, (off_t)(order[at] * BASE_PAGE)) != (ssize_t)BASE_PAGE)
            FAIL("read: errno %d", errno);
        check(order[at], buffer[0]);
    }
}

static volatile unsigned char *map;

static void map_in_order(void)
{
    for (unsigned long page = 0; page < pages; page++)
        check(page, map[page * BASE_PAGE]);
}

static void map_at_random(void)
{
    for (unsigned long at = 0; at < pages; at++)
        check(order[at], map[order[at] * BASE_PAGE]);
}

/* The beginning of a run: no page is in memory. */
static void begin(unsigned long *requests, unsigned long *brought)
{
    if (posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) != 0)
        FAIL("posix_fadvise: errno %d", errno);
    map = mmap(NULL, size, PROT_READ, MAP_SHARED, file, 0);
    if (map == MAP_FAILED)
        FAIL("mmap: errno %d", errno);
    reads(requests, brought);
}

static void end(const char *name, unsigned long requests, unsigned long brought, unsigned long most)
{
    unsigned long requests_now, brought_now;
    reads(&requests_now, &brought_now);
    munmap((void *)map, size);
    requests = requests_now - requests;
    brought = brought_now - brought;
    say("cold_reads: %s: %lu requests for %lu pages\n", name, requests, brought);
    if (verifies && (brought < pages || brought > pages + pages / 8 || requests > most))
        FAIL("%s: at most %lu requests, for %lu pages", name, most, pages);
}

#define RUN(phase, name, most, call)                                                               \
    do {                                                                                           \
        unsigned long requests, brought;                                                           \
        begin(&requests, &brought);                                                                \
        MARK_BEGIN(phase);                                                                         \
        call();                                                                                    \
        MARK_END(phase);                                                                           \
        end(name, requests, brought, most);                                                        \
    } while (0)

int main(int count, char **words)
{
    size = option(count, words, "--mib", 64) * MIB;
    pages = size / BASE_PAGE;
    verifies = flag(count, words, "--verify");
    make();
    unsigned long few = pages / WINDOW + 8;
    RUN(PHASE_COLD_READ, "read in order", few, read_in_order);
    RUN(PHASE_COLD_READ_RANDOM, "read at random", pages, read_at_random);
    RUN(PHASE_COLD_MAP, "mapped in order", few, map_in_order);
    RUN(PHASE_COLD_MAP_RANDOM, "mapped at random", pages, map_at_random);
    return 0;
}
