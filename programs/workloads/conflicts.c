// cpus: 2
/*
 * Pairs of operations for the plugin under tools/conflicts: the same operation on CPU 0 and then on
 * CPU 1, never both at once, by two threads of this process, and by two processes.
 *
 *      start 0, start 1, { before 0, before 1, RUN 0, RUN 1, after 0, after 1 } ..., end 0, end 1
 *
 * Only RUN is between marks. Prints a line for each operation, in the order in which they run:
 *
 *      conflicts: threads mmap, fixed: 60
 *
 * --rounds N   the repetitions of each operation (60)
 */
#define _GNU_SOURCE
#include "mark.h"
#include "workload.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* The marks that tools/conflicts/plugin.c knows. */
enum { BEGIN_FIRST = 1, BEGIN_SECOND, END_FIRST, END_SECOND };

#define MOST_ROUNDS 60
/* The piece that most operations use, away from a page that keeps its table. */
#define PIECE (64 * KIB)
/* Addresses that both sides use. */
#define COMMON ((char *)0x300000000000)
#define COMMON_SIZE (8 * MIB)
#define TABLE (2 * MIB)

struct side {
    unsigned number;
    /* What the last operation has returned. */
    char *result;
    pid_t child;
};

typedef void step(struct side *side, unsigned long round);

struct operation {
    const char *name;
    /* NULL for nothing. `start` and `end` run once. */
    step *start, *before, *run, *after, *end;
    int needs_processes;
};

static unsigned long rounds;
static int has_processes;
static int file;
/* Whose turn it is, in memory that processes share. */
static volatile unsigned *turn;

static char *own(const struct side *side)
{
    return (char *)(0x100000000000 + side->number * 64 * GIB);
}

static char *piece(const struct side *side)
{
    return own(side) + 128 * KIB;
}

static void need(long result, const char *what)
{
    if (result < 0)
        FAIL("%s: errno %d", what, errno);
}

static void map(char *at, size_t size)
{
    map_at((uintptr_t)at, size, MAP_FIXED);
}

static void touch_page(char *at)
{
    touch(at, BASE_PAGE);
}

static void map_file(struct side *side)
{
    char *at = mmap(own(side), 4 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    if (at == MAP_FAILED)
        FAIL("mmap of a file: errno %d", errno);
    /* The last page of the first table. */
    touch_page(at + TABLE - BASE_PAGE);
}

static int is_in_charge(const struct side *side)
{
    return has_processes || side->number == 0;
}

static void unmap_own(struct side *side, unsigned long round)
{
    (void)round;
    need(munmap(own(side), GIB), "munmap");
}

static void map_own(struct side *side, size_t size)
{
    map(own(side), size);
    touch_page(own(side) + size - BASE_PAGE);
}

static void map_table(struct side *side, unsigned long round)
{
    (void)round;
    map_own(side, TABLE);
}

static void map_tables(struct side *side, unsigned long round)
{
    (void)round;
    map_own(side, 64 * TABLE);
}

static void map_common(struct side *side, unsigned long round)
{
    (void)round;
    if (!is_in_charge(side))
        return;
    map(COMMON, COMMON_SIZE);
    touch_page(COMMON + TABLE - BASE_PAGE);
    touch_page(COMMON + 2 * TABLE - BASE_PAGE);
}

static void unmap_common(struct side *side, unsigned long round)
{
    (void)round;
    if (is_in_charge(side))
        need(munmap(COMMON, COMMON_SIZE), "munmap");
}

static void map_full_file(struct side *side, unsigned long round)
{
    (void)round;
    if (side->number == 0)
        for (size_t at = 0; at < 4 * MIB; at += BASE_PAGE)
            need(pwrite(file, "x", 1, (off_t)at), "pwrite");
    map_file(side);
}

static void map_empty_file(struct side *side, unsigned long round)
{
    (void)round;
    if (side->number == 0) {
        need(ftruncate(file, 0), "ftruncate");
        need(ftruncate(file, 4 * MIB), "ftruncate");
    }
    map_file(side);
}

static void keep_table(struct side *side, unsigned long round)
{
    (void)round;
    map(own(side), BASE_PAGE);
    touch_page(own(side));
}

static void map_piece(struct side *side, unsigned long round)
{
    (void)round;
    map(piece(side), PIECE);
}

static void fill_piece(struct side *side, unsigned long round)
{
    map_piece(side, round);
    touch(piece(side), PIECE);
}

static void unmap_piece(struct side *side, unsigned long round)
{
    (void)round;
    need(munmap(piece(side), PIECE), "munmap");
}

static void map_20(struct side *side, unsigned long round)
{
    (void)round;
    for (int number = 0; number < 20; number++) {
        map(own(side) + number * 4 * MIB, PIECE);
        touch(own(side) + number * 4 * MIB, PIECE);
    }
}

/* The operations. */

static void nothing(struct side *side, unsigned long round)
{
    (void)side, (void)round;
    syscall(SYS_getpid);
}

static void touch_own(struct side *side, unsigned long round)
{
    touch_page(own(side) + round * BASE_PAGE);
}

static void touch_new_table(struct side *side, unsigned long round)
{
    touch_page(own(side) + round * TABLE);
}

static void touch_one_vma(struct side *side, unsigned long round)
{
    touch_page(COMMON + side->number * TABLE + round * BASE_PAGE);
}

static void touch_far(struct side *side, unsigned long round)
{
    touch_page(COMMON + side->number * MIB + round * BASE_PAGE);
}

static void touch_near(struct side *side, unsigned long round)
{
    touch_page(COMMON + (2 * round + side->number) * BASE_PAGE);
}

static void read_own(struct side *side, unsigned long round)
{
    (void)*(volatile char *)(own(side) + round * BASE_PAGE);
}

static void touch_in_turn(struct side *side, unsigned long round)
{
    touch_page(own(side) + (2 * round + side->number) * BASE_PAGE);
}

static void touch_own_part(struct side *side, unsigned long round)
{
    touch_page(own(side) + side->number * MIB + round * BASE_PAGE);
}

#define ADVISE(name, advice)                                                                       \
    static void name(struct side *side, unsigned long round)                                       \
    {                                                                                              \
        (void)round;                                                                               \
        need(madvise(piece(side), PIECE, advice), "madvise");                                      \
    }
ADVISE(drop, MADV_DONTNEED)
ADVISE(give_up, MADV_FREE)
ADVISE(cool, 20 /* MADV_COLD */)
ADVISE(populate, 23 /* MADV_POPULATE_WRITE */)

static void ask_resident(struct side *side, unsigned long round)
{
    unsigned char resident[PIECE / BASE_PAGE];
    (void)round;
    need(mincore(piece(side), PIECE, resident), "mincore");
}

static void map_anywhere(struct side *side, unsigned long round)
{
    (void)round;
    side->result = map_at(0, PIECE, 0);
}

static void unmap_result(struct side *side, unsigned long round)
{
    (void)round;
    need(munmap(side->result, PIECE), "munmap");
}

static void map_touch_unmap(struct side *side, unsigned long round)
{
    fill_piece(side, round);
    unmap_piece(side, round);
}

static void protect(struct side *side, unsigned long round)
{
    (void)round;
    need(mprotect(piece(side), PIECE, PROT_READ), "mprotect");
}

static char *moved(const struct side *side)
{
    return piece(side) + 256 * KIB;
}

static void move(struct side *side, unsigned long round)
{
    (void)round;
    if (mremap(piece(side), PIECE, PIECE, MREMAP_MAYMOVE | MREMAP_FIXED, moved(side)) == MAP_FAILED)
        FAIL("mremap: errno %d", errno);
}

static void unmap_moved(struct side *side, unsigned long round)
{
    (void)round;
    need(munmap(moved(side), PIECE), "munmap");
}

static void ask_break(struct side *side, unsigned long round)
{
    (void)round;
    side->result = (char *)syscall(SYS_brk, 0);
}

/* Each side extends the heap beyond the end that the other one has set. */
static void extend_break(struct side *side, unsigned long round)
{
    (void)round;
    unsigned long pieces = has_processes ? 1 : side->number + 1;
    char *wanted = side->result + pieces * PIECE;
    if ((char *)syscall(SYS_brk, wanted) != wanted)
        FAIL("brk: not extended");
}

static void reset_break(struct side *side, unsigned long round)
{
    (void)round;
    syscall(SYS_brk, side->result);
}

/* Without the C library's own work. */
static void copy(struct side *side, unsigned long round)
{
    (void)round;
    side->child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (side->child == 0)
        _exit(0);
    need(side->child, "fork");
}

static void wait_for_child(struct side *side, unsigned long round)
{
    (void)round;
    int status = -1;
    if (waitpid(side->child, &status, 0) != side->child || status != 0)
        FAIL("a child: errno %d, status %d", errno, status);
}

#define ON_FILLED_PIECE(name, run)                                                                 \
    {                                                                                              \
        name, keep_table, fill_piece, run, unmap_piece, unmap_own, 0                               \
    }

static const struct operation operations[] = {
    {"nothing", NULL, NULL, nothing, NULL, NULL, 0},
    {"first touch, own VMA", map_table, NULL, touch_own, NULL, unmap_own, 0},
    {"first touch, new table", map_tables, NULL, touch_new_table, NULL, unmap_own, 0},
    {"first touch, one VMA", map_common, NULL, touch_one_vma, NULL, unmap_common, 0},
    {"first touch, one table, far", map_common, NULL, touch_far, NULL, unmap_common, 0},
    {"first touch, one table, near", map_common, NULL, touch_near, NULL, unmap_common, 0},
    {"first read, zero page", map_table, NULL, read_own, NULL, unmap_own, 0},
    {"memfd page, present", map_full_file, NULL, touch_in_turn, NULL, unmap_own, 0},
    {"memfd page, new", map_empty_file, NULL, touch_own_part, NULL, unmap_own, 0},
    ON_FILLED_PIECE("madvise, DONTNEED", drop),
    ON_FILLED_PIECE("madvise, FREE", give_up),
    ON_FILLED_PIECE("madvise, COLD", cool),
    {"madvise, POPULATE_WRITE", keep_table, map_piece, populate, unmap_piece, unmap_own, 0},
    ON_FILLED_PIECE("mincore", ask_resident),
    {"mmap, fixed", keep_table, NULL, map_piece, unmap_piece, unmap_own, 0},
    {"mmap, anywhere", NULL, NULL, map_anywhere, unmap_result, NULL, 0},
    {"munmap, resident", keep_table, fill_piece, unmap_piece, NULL, unmap_own, 0},
    {"munmap, untouched", keep_table, map_piece, unmap_piece, NULL, unmap_own, 0},
    {"mmap, touch, munmap", keep_table, NULL, map_touch_unmap, NULL, unmap_own, 0},
    ON_FILLED_PIECE("mprotect", protect),
    {"mremap", keep_table, fill_piece, move, unmap_moved, unmap_own, 0},
    {"brk", NULL, ask_break, extend_break, reset_break, NULL, 0},
    {"fork, nearly empty", NULL, NULL, copy, wait_for_child, NULL, 1},
    {"fork, 20 VMAs, 320 pages", map_20, NULL, copy, wait_for_child, unmap_own, 1},
};
#define OPERATIONS (sizeof operations / sizeof *operations)

/* Lets the other side take its step, and returns when this side is to take the next one. */
static void pass_on(const struct side *side)
{
    *turn = 1 - side->number;
    while (*turn != side->number) {
        /* An emulator that runs one CPU at a time goes on with the next one. */
#if defined(__x86_64__)
        __asm__ volatile("pause");
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

static void take(step *one, struct side *side, unsigned long round)
{
    if (one)
        one(side, round);
    pass_on(side);
}

static void run_operation(const struct operation *operation, struct side *side)
{
    take(operation->start, side, 0);
    for (unsigned long round = 0; round < rounds; round++) {
        take(operation->before, side, round);
        if (side->number == 0) {
            MARK(BEGIN_FIRST);
            operation->run(side, round);
            MARK(END_FIRST);
        } else {
            MARK(BEGIN_SECOND);
            operation->run(side, round);
            MARK(END_SECOND);
        }
        pass_on(side);
        take(operation->after, side, round);
    }
    take(operation->end, side, 0);
}

static void run_all(struct side *side)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(side->number, &set);
    need(sched_setaffinity(0, sizeof set, &set), "sched_setaffinity");
    for (size_t i = 0; i < OPERATIONS; i++) {
        if (operations[i].needs_processes && !has_processes)
            continue;
        run_operation(&operations[i], side);
        if (side->number == 0)
            say("conflicts: %s %s: %lu\n", has_processes ? "processes" : "threads",
                operations[i].name, rounds);
    }
    /* The other side may still wait for its last turn. */
    *turn = 1 - side->number;
}

/* Begins when the first side has passed on for the first time. */
static void *second(void *data)
{
    struct side side = {.number = 1};
    while (*turn != 1)
        sched_yield();
    run_all(&side);
    return data;
}

static void run_threads(void)
{
    struct side side = {.number = 0};
    pthread_t thread;
    *turn = 0;
    if (pthread_create(&thread, NULL, second, NULL) != 0)
        FAIL("no thread");
    run_all(&side);
    pthread_join(thread, NULL);
}

static void run_processes(void)
{
    struct side side = {.number = 0};
    has_processes = 1;
    *turn = 0;
    side.child = fork();
    if (side.child == 0) {
        second(NULL);
        _exit(0);
    }
    pid_t child = side.child;
    run_all(&side);
    side.child = child;
    wait_for_child(&side, 0);
}

int main(int count, char **words)
{
    rounds = option(count, words, "--rounds", MOST_ROUNDS);
    if (rounds == 0 || rounds > MOST_ROUNDS)
        FAIL("--rounds is from 1 to %d", MOST_ROUNDS);
    turn = mmap(NULL, BASE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    file = memfd_create("pages", 0);
    if (turn == MAP_FAILED || file < 0 || ftruncate(file, 4 * MIB) != 0)
        FAIL("no memory to share: errno %d", errno);
    /* A kernel may start the first program before its last CPU. */
    while (sysconf(_SC_NPROCESSORS_ONLN) < 2)
        sched_yield();
    run_threads();
    run_processes();
    return 0;
}
