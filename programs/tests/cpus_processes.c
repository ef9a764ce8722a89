// Processes on several CPUs: they fork, execute, end and wait at the same time.
// Threads that never call the kernel get signals, stop, and end with their
// process.
//
// cpus: 2

#include "test.h"

#include <pthread.h>
#include <sched.h>

enum { FAMILIES = 4, CHILDREN = 15 };

static volatile int begun, got, stop;

static void *spin(void *argument) {
    __atomic_fetch_add(&begun, 1, __ATOMIC_ACQ_REL);
    while (!stop)
        ;
    return argument;
}

static void note(int signal) {
    (void)signal;
    __atomic_fetch_add(&got, 1, __ATOMIC_ACQ_REL);
}

static int family(int number) {
    for (int child = 0; child < CHILDREN; child++) {
        pid_t id = fork();
        if (id == 0) {
            if (child % 3 == 0) {
                char *const arguments[] = {"self", "end", 0};
                execv("/proc/self/exe", arguments);
                _exit(99);
            }
            _exit(number + child);
        }
        int status, expected = child % 3 == 0 ? 42 : number + child;
        if (id < 0 || waitpid(id, &status, 0) != id || !WIFEXITED(status) ||
            WEXITSTATUS(status) != expected)
            return 1;
    }
    return 0;
}

static void families(void) {
    pid_t ids[FAMILIES];
    int before = test_failures;
    for (int number = 0; number < FAMILIES; number++) {
        ids[number] = fork();
        NEED(ids[number] >= 0);
        if (ids[number] == 0)
            _exit(family(number));
    }
    for (int number = 0; number < FAMILIES; number++) {
        int status;
        STEP_EQUAL(waitpid(ids[number], &status, 0), ids[number]);
        STEP_EQUAL(status, 0);
    }
    ALL_STEPS(before, "processes fork, execute and end side by side");
}

static void signals(void) {
    struct sigaction action = {.sa_handler = note};
    sigaction(SIGUSR1, &action, 0);
    pthread_t thread;
    NEED(pthread_create(&thread, 0, spin, 0) == 0);
    while (!begun)
        ;
    int before = test_failures;
    for (int round = 1; round <= 200; round++) {
        STEP_EQUAL(pthread_kill(thread, SIGUSR1), 0);
        while (__atomic_load_n(&got, __ATOMIC_ACQUIRE) < round)
            ;
    }
    ALL_STEPS(before, "a thread on another CPU gets each signal");
    stop = 1;
    EQUAL(pthread_join(thread, 0), 0, "and ends");
    stop = 0;
}

// The process ends, or becomes another program, while its threads run.
static void end_with_threads(int way) {
    begun = 0;
    pthread_t threads[3];
    for (int index = 0; index < 3; index++)
        if (pthread_create(&threads[index], 0, spin, 0))
            _exit(98);
    while (__atomic_load_n(&begun, __ATOMIC_ACQUIRE) < (way == 2 ? 1 : 3))
        sched_yield();
    char *const arguments[] = {"self", "end", 0};
    if (way == 0)
        execv("/proc/self/exe", arguments);
    if (way == 1)
        _exit(42);
    for (;;)
        pause();
}

static void ends(void) {
    int before = test_failures;
    for (int round = 0; round < 30; round++) {
        int way = round % 3, status;
        pid_t id = fork();
        NEED(id >= 0);
        if (id == 0)
            end_with_threads(way);
        if (way == 2) {
            sched_yield();
            STEP_EQUAL(kill(id, SIGSTOP), 0);
            STEP_EQUAL(waitpid(id, &status, WUNTRACED), id);
            STEP_EQUAL(WIFSTOPPED(status), 1);
            STEP_EQUAL(kill(id, SIGCONT), 0);
            STEP_EQUAL(kill(id, SIGKILL), 0);
        }
        STEP_EQUAL(waitpid(id, &status, 0), id);
        STEP_EQUAL(status, way == 2 ? SIGKILL : 42 << 8);
    }
    ALL_STEPS(before, "a process ends while its threads run on both CPUs");
}

static int run_forever(void *argument) {
    for (;;)
        __asm__ volatile("" ::: "memory");
    return argument == 0;
}

// A child that never enters the kernel, killed before or while it starts.
static void killed_at_once(void) {
    static char stack[64 * 1024] __attribute__((aligned(16)));
    int before = test_failures;
    for (int round = 0; round < 200; round++) {
        pid_t id = clone(run_forever, stack + sizeof stack, CLONE_VM | SIGCHLD, 0);
        NEED(id > 0);
        int status;
        STEP_EQUAL(kill(id, SIGKILL), 0);
        STEP_EQUAL(waitpid(id, &status, 0), id);
        STEP_EQUAL(status, SIGKILL);
    }
    ALL_STEPS(before, "a process that is killed at its start ends");
}

static volatile int turns;

static void *count_turns(void *argument) {
    while (!stop)
        turns++;
    return argument;
}

// A thread that waits for a busy CPU is moved to an idle one.
static void moved_while_ready(void) {
    cpu_set_t first, second, all;
    NEED(sched_getaffinity(0, sizeof all, &all) == 0);
    CPU_ZERO(&first);
    CPU_SET(0, &first);
    CPU_ZERO(&second);
    CPU_SET(1, &second);
    int before = test_failures;
    for (int round = 0; round < 20; round++) {
        pthread_t thread;
        turns = 0;
        NEED(sched_setaffinity(0, sizeof first, &first) == 0);
        NEED(pthread_create(&thread, 0, count_turns, 0) == 0);
        while (turns == 0)
            sched_yield();
        // Only one of the two runs, so the thread waits here.
        STEP_EQUAL(pthread_setaffinity_np(thread, sizeof second, &second), 0);
        for (int seen = turns; turns == seen;)
            ;
        stop = 1;
        STEP_EQUAL(pthread_join(thread, 0), 0);
        stop = 0;
    }
    NEED(sched_setaffinity(0, sizeof all, &all) == 0);
    ALL_STEPS(before, "a ready thread runs on the CPU that it may use now");
}

static void *compute(void *argument) {
    double value = (double)(intptr_t)argument;
    for (int round = 0; round < 2000; round++) {
        value = value * 1.000001 + 0.5;
        if (round % 100 == 0)
            sched_yield();
    }
    double expected = (double)(intptr_t)argument;
    for (int round = 0; round < 2000; round++)
        expected = expected * 1.000001 + 0.5;
    return (void *)(intptr_t)(value == expected);
}

int main(int count, char **arguments) {
    if (count > 1 && !strcmp(arguments[1], "end"))
        return 42;
    test_start();
    families();
    signals();
    ends();
    killed_at_once();
    moved_while_ready();
    pthread_t threads[6];
    int before = test_failures;
    for (int index = 0; index < 6; index++)
        NEED(pthread_create(&threads[index], 0, compute, (void *)(intptr_t)(index + 3)) == 0);
    for (int index = 0; index < 6; index++) {
        void *good;
        STEP_EQUAL(pthread_join(threads[index], &good), 0);
        STEP_EQUAL((intptr_t)good, 1);
    }
    ALL_STEPS(before, "threads keep their floating-point state on every CPU");
    return test_end();
}
