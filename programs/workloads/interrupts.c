// cpus: 4
/*
 * The interrupts that changes of a process' memory send to the other CPUs, while its threads run
 * there in the program, and after they have run there and sleep. Prints what /proc/interrupts
 * counts.
 *
 *      CPU 0       changes mappings, again and again
 *      CPU 1..3    runs:  a loop without system calls         slept:  a read that waits
 *
 * --rounds N   the changes of each kind (64)
 * --verify     checks that no change flushes the TLB of a CPU without need
 */
#define _GNU_SOURCE
#include "workload.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <time.h>

#define SIZE (16 * BASE_PAGE)
#define MOST_CPUS 4

enum kind { FLUSH, CALL, LOOK, KINDS };
struct counts {
    unsigned long of[KINDS];
};

static unsigned long rounds;
static int verifies;
static unsigned cpus;
static int runs;
static volatile int stop;
static volatile int arrived[MOST_CPUS];
static int pipe_ends[2];
static char *memory;

static void stay_on(unsigned cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        FAIL("sched_setaffinity to CPU %u: errno %d", cpu, errno);
}

/* The line `NAME: count of CPU 0, count of CPU 1, ...`, summed up; 0 without such a line. */
static unsigned long sum_of(const char *text, const char *name)
{
    const char *line = strstr(text, name);
    unsigned long sum = 0;
    for (char *at = line == NULL ? NULL : (char *)line + strlen(name); at != NULL;) {
        char *end;
        unsigned long count = strtoul(at, &end, 10);
        if (end == at)
            break;
        sum += count;
        at = end;
    }
    return sum;
}

static struct counts read_counts(void)
{
    static char text[1 << 16];
    int file = open("/proc/interrupts", O_RDONLY);
    size_t length = 0;
    ssize_t more;
    while (file >= 0 && (more = read(file, text + length, sizeof text - 1 - length)) > 0)
        length += (size_t)more;
    close(file);
    text[length] = '\0';
    if (strstr(text, "Rescheduling interrupts") == NULL)
        FAIL("/proc/interrupts shows no interrupts between CPUs");
    struct counts counts = {{
        [FLUSH] = sum_of(text, "TLB:"),
        [CALL] = sum_of(text, "CAL:") + sum_of(text, "IPI1:"),
        [LOOK] = sum_of(text, "RES:") + sum_of(text, "IPI0:"),
    }};
    return counts;
}

/* An emulator that runs one CPU at a time goes on with the next one. */
static void let_others_run(void)
{
#if defined(__x86_64__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Longer than a kernel takes for what it has put off. */
static void rest(void)
{
    struct timespec time = {0, 2000000};
    nanosleep(&time, NULL);
}

static void *stay(void *argument)
{
    char byte;
    unsigned cpu = (unsigned)(uintptr_t)argument;
    stay_on(cpu);
    arrived[cpu] = 1;
    if (runs) {
        for (unsigned round = 0; !stop; round++) {
            if (round % 64 == 0)
                let_others_run();
        }
    } else if (read(pipe_ends[0], &byte, 1) != 1) {
        FAIL("read of a pipe: errno %d", errno);
    }
    return NULL;
}

static pthread_t threads[MOST_CPUS];

static void start_threads(void)
{
    stop = 0;
    if (pipe(pipe_ends) != 0)
        FAIL("pipe: errno %d", errno);
    for (unsigned cpu = 1; cpu < cpus; cpu++) {
        arrived[cpu] = 0;
        if (pthread_create(&threads[cpu], NULL, stay, (void *)(uintptr_t)cpu) != 0)
            FAIL("no thread for CPU %u", cpu);
    }
    for (unsigned cpu = 1; cpu < cpus; cpu++)
        while (!arrived[cpu])
            rest();
    // A thread that sleeps does so only after its arrival.
    for (unsigned turn = 0; turn < (runs ? 1 : 50); turn++)
        rest();
}

static void end_threads(void)
{
    stop = 1;
    for (unsigned cpu = 1; cpu < cpus; cpu++)
        if (write(pipe_ends[1], "", 1) != 1)
            FAIL("write to a pipe: errno %d", errno);
    for (unsigned cpu = 1; cpu < cpus; cpu++)
        pthread_join(threads[cpu], NULL);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
}

static struct counts total;

#define COUNTED(call)                                                                              \
    do {                                                                                           \
        struct counts before = read_counts();                                                      \
        call;                                                                                      \
        struct counts after = read_counts();                                                       \
        for (int kind = 0; kind < KINDS; kind++)                                                   \
            total.of[kind] += after.of[kind] - before.of[kind];                                    \
    } while (0)

static void need(int result, const char *what)
{
    if (result != 0)
        FAIL("%s: errno %d", what, errno);
}

static void unmap(void)
{
    char *start = map_at(0, SIZE, 0);
    touch(start, SIZE);
    COUNTED(need(munmap(start, SIZE), "munmap"));
}

static void protect(void)
{
    touch(memory, SIZE);
    COUNTED(need(mprotect(memory, SIZE, PROT_READ), "mprotect"));
    need(mprotect(memory, SIZE, PROT_READ | PROT_WRITE), "mprotect");
}

static void drop(void)
{
    touch(memory, SIZE);
    COUNTED(need(madvise(memory, SIZE, MADV_DONTNEED), "MADV_DONTNEED"));
}

static void copy(void)
{
    pid_t child = -1;
    touch(memory, SIZE);
    COUNTED(child = fork());
    if (child == 0)
        _exit(0);
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        FAIL("fork: errno %d, status %d", errno, status);
}

/* A process with threads on all CPUs ends. */
static void end(void)
{
    int ready[2], go[2], status = -1;
    char byte;
    if (pipe(ready) != 0 || pipe(go) != 0)
        FAIL("pipe: errno %d", errno);
    pid_t child = fork();
    if (child == 0) {
        start_threads();
        touch(memory, SIZE);
        if (write(ready[1], "", 1) != 1 || read(go[0], &byte, 1) != 1)
            _exit(1);
        _exit(0);
    }
    if (child < 0 || read(ready[0], &byte, 1) != 1)
        FAIL("a child did not begin: errno %d", errno);
    rest();
    COUNTED(if (write(go[1], "", 1) != 1 || waitpid(child, &status, 0) != child || status != 0)
                FAIL("a child did not end: errno %d, status %d", errno, status));
    for (int side = 0; side < 2; side++) {
        close(ready[side]);
        close(go[side]);
    }
}

/* The flush of a fork, and those of pages that the parent writes before they are counted. */
#define PAGES_COPIED 4
/* The kernel may flush its own addresses once. */
#define OF_THE_KERNEL (MOST_CPUS - 1)

static void report(const char *name, void (*change)(void), unsigned long done)
{
    unsigned long flushes = total.of[FLUSH], others = total.of[CALL] + total.of[LOOK];
    /* Linux on x86-64 flushes by a call of a function, and counts it as both. */
    if (total.of[CALL] >= flushes)
        others -= flushes;
    say("interrupts: %s, %u CPUs, %s: %lu flushes and %lu others in %lu\n", name, cpus,
        runs ? "running" : "slept", flushes, others, done);
    unsigned long needed = runs ? (cpus - 1) * done : 0;
    if (change == copy)
        needed *= PAGES_COPIED;
    if (verifies && flushes > needed + OF_THE_KERNEL)
        FAIL("%s: %lu flushes on other CPUs, of which %lu are needed", name, flushes, needed);
}

static void measure(const char *name, void (*change)(void), unsigned long times)
{
    change();
    memset(&total, 0, sizeof total);
    for (unsigned long round = 0; round < times; round++)
        change();
    report(name, change, times);
}

static void measure_all(unsigned number, int state)
{
    cpus = number;
    runs = state;
    start_threads();
    measure("munmap", unmap, rounds);
    measure("mprotect", protect, rounds);
    measure("DONTNEED", drop, rounds);
    measure("fork", copy, rounds);
    end_threads();
    measure("exit", end, rounds / 8 + 1);
}

int main(int count, char **words)
{
    rounds = option(count, words, "--rounds", 64);
    verifies = flag(count, words, "--verify");
    /* A kernel may start the first program before its last CPU. */
    while (sysconf(_SC_NPROCESSORS_ONLN) < MOST_CPUS)
        rest();
    stay_on(0);
    memory = map_at(0, SIZE, 0);
    measure_all(1, 1);
    for (unsigned number = 2; number <= MOST_CPUS; number *= 2)
        for (int state = 1; state >= 0; state--)
            measure_all(number, state);
    return 0;
}
