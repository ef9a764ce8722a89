/*
 * System 4: touched memory comes to a range that a userfaultfd serves, by UFFDIO_MOVE and by
 * UFFDIO_COPY: in one call, in calls of 64 KiB, in calls of one page, and page by page by a thread
 * that serves faults. Each is a phase.
 *
 *      source, touched  ---- MOVE or COPY ---->  destination, registered for missing pages
 *
 * Both are congruent modulo 1 GiB, so whole tables can move.
 *
 * --mib N      how much memory (16)
 * --rounds N   how often (3)
 * --verify     checks every word, and that moved pages are gone from the source
 */
#define _GNU_SOURCE
#include "mark.h"
#include "userfault.h"
#include "workload.h"

#define SOURCE ((char *)(64 * GIB * 256))
#define DESTINATION (SOURCE + 64 * GIB)

/* The numbers of phases are parts of instructions. */
#define PHASE(number, statement)                                                                   \
    do {                                                                                           \
        MARK_BEGIN(number);                                                                        \
        statement;                                                                                 \
        MARK_END(number);                                                                          \
    } while (0)

typedef int64_t (*fill_call)(int, size_t offset, size_t size);

static int context;
static size_t size;
static int verify;

static int64_t copy(int fd, size_t offset, size_t length)
{
    return uf_copy(fd, DESTINATION + offset, SOURCE + offset, length, 0);
}

static int64_t move(int fd, size_t offset, size_t length)
{
    return uf_move(fd, DESTINATION + offset, SOURCE + offset, length, 0);
}

/* A call that has done a part is repeated for the rest. */
static void fill_range(fill_call call, size_t offset, size_t length)
{
    while (length > 0) {
        int64_t done = call(context, offset, length);
        if (done <= 0 && done != -EAGAIN)
            FAIL("%#zx bytes at %#zx: %lld", length, offset, (long long)done);
        if (done > 0) {
            offset += (size_t)done;
            length -= (size_t)done;
        }
    }
}

static void fill_in_pieces(fill_call call, size_t piece)
{
    for (size_t at = 0; at < size; at += piece)
        fill_range(call, at, piece);
}

static size_t stride(void)
{
    return verify ? sizeof(uint64_t) : BASE_PAGE;
}

static void prepare(uint64_t seed)
{
    map_at((uintptr_t)SOURCE, size, MAP_FIXED);
    map_at((uintptr_t)DESTINATION, size, MAP_FIXED);
    fill(SOURCE, size, stride(), seed);
    if (uf_register(context, DESTINATION, size, MISSING) != 0)
        FAIL("UFFDIO_REGISTER: errno %d", errno);
}

static void finish(uint64_t seed, fill_call call)
{
    check_filled(DESTINATION, size, stride(), seed);
    unsigned char resident[16] = {0};
    if (verify && call == move && mincore(SOURCE, sizeof resident * BASE_PAGE, resident) == 0)
        for (size_t page = 0; page < sizeof resident; page++)
            if (resident[page] & 1)
                FAIL("page %zu is still at the source", page);
    if (munmap(SOURCE, size) != 0 || munmap(DESTINATION, size) != 0)
        FAIL("munmap: errno %d", errno);
}

/* Serves each page once. */
static void *serve(void *served_by)
{
    fill_call call = *(fill_call *)served_by;
    for (size_t left = size; left > 0; left -= BASE_PAGE) {
        struct uf_message message = uf_next(context);
        if (message.event != FAULT)
            FAIL("event %d instead of a fault", message.event);
        size_t offset = (message.fault.address & ~(BASE_PAGE - 1)) - (uintptr_t)DESTINATION;
        fill_range(call, offset, BASE_PAGE);
    }
    return NULL;
}

static void read_pages(volatile char *start)
{
    for (size_t at = 0; at < size; at += BASE_PAGE)
        (void)start[at];
}

static void faults(fill_call call, uint64_t seed)
{
    prepare(seed);
    pthread_t handler;
    if (pthread_create(&handler, NULL, serve, &call) != 0)
        FAIL("pthread_create");
    if (call == move)
        PHASE(PHASE_FAULTS_MOVE, read_pages(DESTINATION));
    else
        PHASE(PHASE_FAULTS_COPY, read_pages(DESTINATION));
    pthread_join(handler, NULL);
    finish(seed, call);
}

static void moves(uint64_t seed)
{
    prepare(seed);
    PHASE(PHASE_MOVE_PAGES_WHOLE, fill_range(move, 0, size));
    finish(seed, move);
    prepare(seed);
    PHASE(PHASE_MOVE_PAGES_BY_64K, fill_in_pieces(move, 64 * KIB));
    finish(seed, move);
    prepare(seed);
    PHASE(PHASE_MOVE_PAGES_BY_4K, fill_in_pieces(move, BASE_PAGE));
    finish(seed, move);
}

static void copies(uint64_t seed)
{
    prepare(seed);
    PHASE(PHASE_COPY_PAGES_WHOLE, fill_range(copy, 0, size));
    PHASE(PHASE_RELEASE, madvise(SOURCE, size, MADV_DONTNEED));
    finish(seed, copy);
    prepare(seed);
    PHASE(PHASE_COPY_PAGES_BY_64K, fill_in_pieces(copy, 64 * KIB));
    finish(seed, copy);
    prepare(seed);
    PHASE(PHASE_COPY_PAGES_BY_4K, fill_in_pieces(copy, BASE_PAGE));
    finish(seed, copy);
}

int main(int count, char **words)
{
    size = option(count, words, "--mib", 16) * MIB;
    unsigned long rounds = option(count, words, "--rounds", 3);
    verify = flag(count, words, "--verify");
    if (size == 0) {
        say("--mib must not be 0\n");
        return 2;
    }
    context = uf_open(O_CLOEXEC, MOVES);
    if (context < 0)
        FAIL("no userfaultfd: errno %d", errno);
    for (unsigned long round = 1; round <= rounds; round++) {
        moves(round);
        copies(round);
        faults(move, round);
        faults(copy, round);
    }
    if (test_failures != 0)
        FAIL("a message could not be read");
    if (verify)
        say("system4: contents are right after %lu rounds\n", rounds);
    return 0;
}
