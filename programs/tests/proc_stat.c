// /proc/stat: each CPU's time, idle or not, switches and new processes. And
// /proc/interrupts: an idle CPU that a timer wakes needs no other.
//
// cpus: 2
// kernel-only: other programs of the host use its CPUs

#include "test.h"

#include <pthread.h>
#include <sched.h>

// The times are in hundredths of a second.
struct machine {
    unsigned long busy[3], idle[3], switches, processes, running;
};

// The numbers of the machine, of CPU 0 and of CPU 1.
static struct machine look(void) {
    static char text[4000];
    struct machine found = {0};
    NEED(test_read_file("/proc/stat", text, sizeof text) > 0);
    const char *const names[] = {"cpu ", "cpu0 ", "cpu1 "};
    for (int cpu = 0; cpu < 3; cpu++) {
        const char *at = strstr(text, names[cpu]);
        unsigned long nice, system;
        NEED(at && sscanf(at + strlen(names[cpu]), "%lu %lu %lu %lu", &found.busy[cpu], &nice, &system,
                          &found.idle[cpu]) == 4);
        found.busy[cpu] += nice + system;
    }
    const char *at = strstr(text, "\nctxt "), *made = strstr(text, "\nprocesses ");
    const char *running = strstr(text, "\nprocs_running ");
    NEED(at && made && running && strstr(text, "\nbtime "));
    found.switches = strtoul(at + 6, 0, 10);
    found.processes = strtoul(made + 11, 0, 10);
    found.running = strtoul(running + 15, 0, 10);
    return found;
}

static int bind_to(int number) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(number, &set);
    return sched_setaffinity(0, sizeof set, &set);
}

static volatile int spins, stop;

static void *spin(void *argument) {
    STEP_EQUAL(bind_to(0), 0);
    spins = 1;
    while (!stop)
        ;
    return argument;
}

// The interrupts by which CPUs have called each other for ready threads.
static unsigned long calls(void) {
    static char text[2000];
    unsigned long first, second;
    NEED(test_read_file("/proc/interrupts", text, sizeof text) > 0);
    const char *at = strstr(text, "RES:");
    at = at ? at : strstr(text, "IPI0:");
    NEED(at && sscanf(strchr(at, ':') + 1, "%lu %lu", &first, &second) == 2);
    return first + second;
}

// The CPU that the timer wakes runs the thread, and the other one sleeps on.
static void sleep_alone(void) {
    cpu_set_t both;
    CPU_ZERO(&both);
    CPU_SET(0, &both);
    CPU_SET(1, &both);
    NEED(sched_setaffinity(0, sizeof both, &both) == 0);
    unsigned long before = calls();
    for (int round = 0; round < 50; round++)
        test_sleep(2);
    CHECK(calls() - before < 10, "the end of a sleep calls no other CPU");
}

int main(void) {
    test_start();
    while (sysconf(_SC_NPROCESSORS_ONLN) < 2)
        sched_yield();
    NEED(bind_to(1) == 0);
    pthread_t thread;
    NEED(pthread_create(&thread, 0, spin, 0) == 0);
    while (!spins)
        sched_yield();
    struct machine before = look(), now;
    do {
        test_sleep(10);
        now = look();
    } while (now.idle[2] < before.idle[2] + 10);
    EQUAL(now.idle[1], before.idle[1], "a CPU that runs a program does not idle");
    CHECK(now.busy[1] >= before.busy[1] + 9, "its time is its program's");
    // Each number is rounded down by itself: ten hundredths in one line may be nine in their sum.
    CHECK(now.idle[0] >= before.idle[0] + 9 && now.busy[0] >= before.busy[0] + 9, "the first line has all");
    CHECK(now.running == 2, "two threads run");
    CHECK(now.switches > before.switches + 1, "each sleep is a switch");
    stop = 1;
    NEED(pthread_join(thread, 0) == 0);

    before = look();
    for (int child = 0; child < 5; child++)
        STEP_EQUAL(test_wait(CHILD(;)), 0);
    EQUAL(look().processes, before.processes + 5, "each process is counted");
    sleep_alone();
    double uptime, idle;
    static char text[100];
    NEED(test_read_file("/proc/uptime", text, sizeof text) > 0);
    CHECK(sscanf(text, "%lf %lf", &uptime, &idle) == 2 && idle > 0 && idle < 2 * uptime, "uptime: the CPUs' idle time");
    return test_end();
}
