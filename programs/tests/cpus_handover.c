// Two threads hand a word to each other without any system call, so that both
// run at the same time. One CPU would need a time slice for each handover, which
// takes longer than the watchdog waits.
// The argument is the machine's number of CPUs, 2 by default.
//
// cpus: 2
// kernel-only: it expects exactly this number of CPUs

#include "test.h"

#include <pthread.h>
#include <sched.h>

enum { ROUNDS = 5000 };

static volatile int word;
static int seen_elsewhere;

static int processor(void) {
    unsigned number = 99;
    syscall(SYS_getcpu, &number, 0, 0);
    return (int)number;
}

static int bind_to(int number) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(number, &set);
    return sched_setaffinity(0, sizeof set, &set);
}

static void *answer(void *argument) {
    for (int round = 0; round < ROUNDS; round++) {
        while (__atomic_load_n(&word, __ATOMIC_ACQUIRE) != 2 * round + 1)
            ;
        __atomic_store_n(&word, 2 * round + 2, __ATOMIC_RELEASE);
    }
    return argument;
}

static void *spin_bound(void *argument) {
    int number = (int)(intptr_t)argument;
    STEP_EQUAL(bind_to(number), 0);
    STEP_EQUAL(processor(), number);
    __atomic_fetch_add(&seen_elsewhere, 1, __ATOMIC_ACQ_REL);
    // Both are on their CPUs at the same time.
    while (__atomic_load_n(&seen_elsewhere, __ATOMIC_ACQUIRE) % 2 != 0)
        ;
    STEP_EQUAL(processor(), number);
    return 0;
}

static volatile int is_bound, stops;

static void *spin_on_first(void *unused UNUSED) {
    STEP_EQUAL(bind_to(0), 0);
    is_bound = 1;
    while (!stops)
        ;
    return 0;
}

// A thread that may run on both CPUs shares the first one with a thread that may not.
static void leave_for_idle(void) {
    cpu_set_t both;
    CPU_ZERO(&both);
    CPU_SET(0, &both);
    CPU_SET(1, &both);
    pthread_t bound;
    NEED(pthread_create(&bound, 0, spin_on_first, 0) == 0);
    while (!is_bound)
        sched_yield();
    STEP_EQUAL(bind_to(0), 0);
    STEP_EQUAL(sched_setaffinity(0, sizeof both, &both), 0);
    // The other CPU idles, and nothing but the threads' turns on this one can tell it of work.
    int yields = 0;
    while (processor() == 0 && yields < 100)
        yields += sched_yield() == 0;
    CHECK(processor() == 1, "a thread whose CPU is wanted goes to an idle one");
    stops = 1;
    NEED(pthread_join(bound, 0) == 0);
}

static int lines_with(const char *path, const char *start) {
    char text[4096];
    int file = open(path, O_RDONLY);
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length < 0 ? 0 : length] = 0;
    int count = 0;
    for (char *at = text; (at = strstr(at, start)); at++)
        count += at == text || at[-1] == '\n';
    return count;
}

int main(int count, char **arguments) {
    test_start();
    int cpus = count > 1 ? atoi(arguments[1]) : 2;
    pthread_t thread, other;
    NEED(pthread_create(&thread, 0, answer, 0) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        __atomic_store_n(&word, 2 * round + 1, __ATOMIC_RELEASE);
        while (__atomic_load_n(&word, __ATOMIC_ACQUIRE) != 2 * round + 2)
            ;
    }
    EQUAL(pthread_join(thread, 0), 0, "two threads run at the same time");

    // The others begin to run programs after the first has begun with this one.
    while (sysconf(_SC_NPROCESSORS_ONLN) < cpus)
        sched_yield();
    cpu_set_t set;
    char online[20];
    snprintf(online, sizeof online, "0-%d\n", cpus - 1);
    EQUAL(sched_getaffinity(0, sizeof set, &set), 0, "sched_getaffinity");
    EQUAL(CPU_COUNT(&set), cpus, "all CPUs are allowed");
    EQUAL(lines_with("/proc/stat", "cpu"), cpus + 1, "/proc/stat has a line for each CPU");
    EQUAL(lines_with("/proc/cpuinfo", "processor"), cpus, "and so has /proc/cpuinfo");
    EQUAL(lines_with("/sys/devices/system/cpu/online", online), 1, "all are online");

    int before = test_failures;
    for (int round = 0; round < 50; round++) {
        int first = round % 2;
        NEED(pthread_create(&thread, 0, spin_bound, (void *)(intptr_t)first) == 0);
        NEED(pthread_create(&other, 0, spin_bound, (void *)(intptr_t)!first) == 0);
        STEP_EQUAL(pthread_join(thread, 0), 0);
        STEP_EQUAL(pthread_join(other, 0), 0);
    }
    ALL_STEPS(before, "threads run on the CPUs that they ask for");

    leave_for_idle();

    EQUAL(bind_to(1), 0, "bound to the second CPU");
    EQUAL(processor(), 1, "the thread is there at once");
    pid_t child = fork();
    if (child == 0)
        _exit(processor());
    int status;
    NEED(waitpid(child, &status, 0) == child);
    EQUAL(WEXITSTATUS(status), 1, "a child inherits the set");
    CPU_ZERO(&set);
    CPU_SET(7, &set);
    FAILS(sched_setaffinity(0, sizeof set, &set), EINVAL, "a set without a CPU that is online");
    return test_end();
}
