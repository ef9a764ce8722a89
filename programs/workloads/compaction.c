/*
 * A concurrent compactor: the live objects of a heap move together, one range after the other,
 * while two threads read and write them at their new addresses. A thread that accesses an absent
 * page waits, and the compactor serves its range first.
 *
 *      old   | a . b . . | c . d . | ...       every second object is dead
 *                 gather |
 *      buffer          | a b c d |
 *             MOVE, COPY |
 *      new           | a b c d | ...           registered for missing pages
 *
 * MOVE takes the buffer's pages themselves. So each range needs another buffer: one of the old heap
 * that has no live objects any more (recycled), or untouched memory (fresh). COPY uses the same
 * buffer always. The rest of the old heap is freed by MADV_DONTNEED as soon as no buffer is needed
 * there (recycled), or kept (fresh).
 *
 * --mib N       the size of the old heap (32)
 * --accesses N  how many objects each thread reads and writes (4096)
 * --piece N     the size of ranges in KiB: 4, 64 or 2048 (all)
 * --verify      says that contents are right; each object is checked anyway
 */
#define _GNU_SOURCE
#include "mark.h"
#include "userfault.h"
#include "workload.h"

#define OLD ((char *)(64 * GIB * 256))
#define NEW (OLD + 64 * GIB)
#define BUFFER (OLD + 128 * GIB)

enum { THREADS = 2, LEAST = 64, SIZES = 15, HOLES = 2 };

enum manner { COPY_RECYCLED, MOVE_RECYCLED, COPY_FRESH, MOVE_FRESH, MANNERS };

struct object {
    uint64_t number;
    /* In bytes, this included. */
    uint32_t size;
    /* Writes by each thread. */
    uint32_t writes[THREADS];
    uint64_t words[];
};

/* The old and the new place of live object `number`. */
struct place {
    char *from, *to;
};

static int context;
static size_t heap, piece, accesses, live, ranges;
static enum manner manner;
static struct place *places;
/* The first object of each new range; whether it is served; how many objects an old range still has. */
static size_t *firsts;
static char *served;
static uint32_t *left;
/* Buffers that are free. */
static char **buffers;
static size_t free_buffers, most_buffers;
static size_t written[THREADS];

static int is_move(void)
{
    return manner == MOVE_RECYCLED || manner == MOVE_FRESH;
}

static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 31) * 0x7fb5d329728ea185u;
    value = (value ^ value >> 27) * 0x81dadef4bc2dd44du;
    return value ^ value >> 33;
}

static size_t size_of(size_t number)
{
    return LEAST + mix(number) % SIZES * 64;
}

/* The start of an object of this size after `at`: none lies across pages. */
static char *fit(char *at, size_t size)
{
    size_t room = BASE_PAGE - ((uintptr_t)at & (BASE_PAGE - 1));
    return size <= room ? at : at + room;
}

static void write_object(char *at, uint64_t number, size_t size)
{
    struct object *object = (struct object *)at;
    *object = (struct object){.number = number, .size = (uint32_t)size};
    for (size_t word = 0; word < (size - sizeof *object) / 8; word++)
        object->words[word] = expected_word(word, number);
}

static void check_object(size_t number, int whole)
{
    const struct object *object = (const struct object *)places[number].to;
    size_t words = (size_of(number) - sizeof *object) / 8;
    if (object->number != number || object->size != size_of(number))
        FAIL("object %zu is %llu, of %u bytes", number, (unsigned long long)object->number, object->size);
    for (size_t word = whole ? 0 : words - 1; word < words; word++)
        if (object->words[word] != expected_word(word, number))
            FAIL("object %zu has another word %zu", number, word);
}

/* The old heap: live objects and dead ones by turns, and the places of the live ones. */
static void fill_heap(void)
{
    char *from = OLD, *to = NEW, *end = OLD + heap;
    live = 0;
    memset(OLD, 0xdd, heap);
    for (size_t number = 0;; number++) {
        size_t size = size_of(number);
        from = fit(from, size);
        if (from + size > end)
            break;
        write_object(from, number, size);
        to = fit(to, size);
        places[live++] = (struct place){from, to};
        left[(from - OLD) / piece]++;
        to += size;
        from += size;
        size = size_of(~number);
        from = fit(from, size);
        if (from + size > end)
            break;
        write_object(from, ~(uint64_t)0, size);
        from += size;
    }
    ranges = ((size_t)(to - NEW) + piece - 1) / piece;
    for (size_t range = 0, number = 0; range <= ranges; range++) {
        while (number < live && places[number].to < NEW + range * piece)
            number++;
        firsts[range] = number;
    }
}

/* Brings the buffer's content to the new range. The pages behind the last object may be missing. */
static void deliver(char *buffer, size_t range)
{
    for (size_t at = 0; at < piece;) {
        char *to = NEW + range * piece + at;
        int64_t done = is_move() ? uf_move(context, to, buffer + at, piece - at, HOLES)
                                 : uf_copy(context, to, buffer + at, piece - at, 0);
        if (done <= 0 && done != -EAGAIN)
            FAIL("range %zu: %lld", range, (long long)done);
        if (done > 0)
            at += (size_t)done;
    }
}

/* The objects of an old range have moved: another range is gathered there, or it is freed. */
static void empty(size_t range)
{
    char *start = OLD + range * piece;
    if (manner == MOVE_RECYCLED && free_buffers < most_buffers)
        buffers[free_buffers++] = start;
    else if (manner <= MOVE_RECYCLED && madvise(start, piece, MADV_DONTNEED) != 0)
        FAIL("MADV_DONTNEED: errno %d", errno);
}

static void serve(size_t range)
{
    if (served[range])
        return;
    if (is_move() && free_buffers == 0)
        FAIL("no buffer is free");
    char *buffer = is_move() ? buffers[--free_buffers] : BUFFER;
    for (size_t number = firsts[range]; number < firsts[range + 1]; number++) {
        struct place *place = &places[number];
        memcpy(buffer + (place->to - (NEW + range * piece)), place->from, size_of(number));
        size_t old = (size_t)(place->from - OLD) / piece;
        if (--left[old] == 0)
            empty(old);
    }
    deliver(buffer, range);
    served[range] = 1;
}

static void serve_faults(void)
{
    struct uf_message message;
    while (read(context, &message, sizeof message) == sizeof message) {
        if (message.event != FAULT)
            FAIL("event %d instead of a fault", message.event);
        serve((message.fault.address - (uintptr_t)NEW) / piece);
    }
}

static void compact(void)
{
    for (size_t range = 0; range < ranges; range++) {
        serve_faults();
        serve(range);
    }
}

/* Reads and writes objects of all the heap. */
static void *use(void *argument)
{
    size_t thread = (size_t)(uintptr_t)argument;
    for (size_t access = 0; access < accesses; access++) {
        size_t number = mix(access * THREADS + thread) % live;
        check_object(number, 0);
        ((struct object *)places[number].to)->writes[thread]++;
        written[thread]++;
    }
    return NULL;
}

static void work(void)
{
    pthread_t threads[THREADS];
    for (size_t thread = 0; thread < THREADS; thread++)
        if (pthread_create(&threads[thread], NULL, use, (void *)(uintptr_t)thread) != 0)
            FAIL("pthread_create");
    compact();
    for (size_t thread = 0; thread < THREADS; thread++)
        pthread_join(threads[thread], NULL);
}

#define PHASE(number)                                                                              \
    do {                                                                                           \
        MARK_BEGIN(number);                                                                        \
        work();                                                                                    \
        MARK_END(number);                                                                          \
    } while (0)

/* The number of a phase is part of an instruction. */
#define PHASES(first)                                                                              \
    do {                                                                                           \
        if (manner == COPY_RECYCLED)                                                               \
            PHASE(first);                                                                          \
        else if (manner == MOVE_RECYCLED)                                                          \
            PHASE((first) + 1);                                                                    \
        else if (manner == COPY_FRESH)                                                             \
            PHASE((first) + 2);                                                                    \
        else                                                                                       \
            PHASE((first) + 3);                                                                    \
    } while (0)

static void measure(void)
{
    if (piece == BASE_PAGE)
        PHASES(PHASE_COMPACT_BY_4K);
    else if (piece == 64 * KIB)
        PHASES(PHASE_COMPACT_BY_64K);
    else
        PHASES(PHASE_COMPACT_BY_2M);
}

static void check_all(void)
{
    size_t expected = 0, found = 0;
    for (size_t thread = 0; thread < THREADS; thread++)
        expected += written[thread];
    for (size_t number = 0; number < live; number++) {
        check_object(number, 1);
        for (size_t thread = 0; thread < THREADS; thread++)
            found += ((struct object *)places[number].to)->writes[thread];
    }
    if (found != expected || expected != THREADS * accesses)
        FAIL("%zu of %zu writes are there", found, expected);
}

/* The ranges that the compactor begins with: one in each old range can wait for another. */
static void prepare_buffers(void)
{
    free_buffers = 0;
    size_t count = !is_move() ? 1 : manner == MOVE_FRESH ? ranges : ranges / 2 + 2;
    map_at((uintptr_t)BUFFER, count * piece, MAP_FIXED);
    if (manner != MOVE_FRESH)
        memset(BUFFER, 0, count * piece);
    for (size_t buffer = count; is_move() && buffer > 0; buffer--)
        buffers[free_buffers++] = BUFFER + (buffer - 1) * piece;
    most_buffers = free_buffers;
}

static void run(void)
{
    memset(served, 0, heap / BASE_PAGE);
    memset(left, 0, heap / BASE_PAGE * sizeof *left);
    memset(written, 0, sizeof written);
    map_at((uintptr_t)OLD, heap, MAP_FIXED);
    map_at((uintptr_t)NEW, heap, MAP_FIXED);
    fill_heap();
    prepare_buffers();
    if (uf_register(context, NEW, heap, MISSING) != 0)
        FAIL("UFFDIO_REGISTER: errno %d", errno);
    measure();
    check_all();
    if (munmap(OLD, heap) != 0 || munmap(NEW, heap) != 0 || munmap(BUFFER, heap) != 0)
        FAIL("munmap: errno %d", errno);
}

int main(int count, char **words)
{
    heap = option(count, words, "--mib", 32) * MIB;
    accesses = option(count, words, "--accesses", 4096);
    unsigned long only = option(count, words, "--piece", 0) * KIB;
    if (heap < 8 * MIB || heap % (2 * MIB) != 0) {
        say("--mib must be even, and at least 8\n");
        return 2;
    }
    context = uf_open(O_CLOEXEC | O_NONBLOCK, MOVES);
    if (context < 0)
        FAIL("no userfaultfd: errno %d", errno);
    places = (struct place *)map_at(0, heap / LEAST * sizeof *places, 0);
    firsts = (size_t *)map_at(0, (heap / BASE_PAGE + 2) * sizeof *firsts, 0);
    served = map_at(0, heap / BASE_PAGE, 0);
    left = (uint32_t *)map_at(0, heap / BASE_PAGE * sizeof *left, 0);
    buffers = (char **)map_at(0, 2 * heap / BASE_PAGE * sizeof *buffers, 0);
    static const size_t pieces[] = {BASE_PAGE, 64 * KIB, 2 * MIB};
    for (size_t at = 0; at < sizeof pieces / sizeof *pieces; at++) {
        piece = pieces[at];
        for (manner = 0; manner < MANNERS && (only == 0 || only == piece); manner++)
            run();
    }
    if (flag(count, words, "--verify"))
        say("compaction: contents are right\n");
    return 0;
}
