// memory: 64M
// clock: instructions
// kernel-only: it uses all memory of the machine
//
// Memory runs out, and a process is killed. A bystander that sleeps for ten
// milliseconds at a time never waits for long: work that frees memory gives
// the CPU away in between. So do work on a large object, and forks. Times
// are instructions, one nanosecond each.

#include "pressure.h"
#include "swap.h"

#include <fcntl.h>
#include <sys/sysinfo.h>

#define LONGEST 50000000ull

static struct shared *shared;

static pid_t watch(void) {
    memset((void *)shared, 0, sizeof *shared);
    pid_t sleeper = CHILD(pressure_sleeper(shared));
    shared->begins = 1;
    return sleeper;
}

static void end_watch(pid_t sleeper, const char *text) {
    // Until the wait has ended that has begun by now.
    struct timespec two = {0, 2 * NAP};
    nanosleep(&two, 0);
    shared->begins = 0;
    shared->ends = 1;
    int slept = test_wait(sleeper);
    test_print("%s: %llu naps, the longest wait %llu us", text, (unsigned long long)shared->naps,
               (unsigned long long)shared->worst / 1000);
    CHECK(WIFEXITED(slept) && WEXITSTATUS(slept) == 0, "the bystander lives");
    CHECK(shared->naps > 0 && shared->worst <= LONGEST, "no wait is long");
    test_arm_watchdog();
}

static void pressure(const char *text, size_t length, int one_in) {
    pid_t sleeper = watch();
    pid_t taker = CHILD(pressure_take(length, MAP_PRIVATE, one_in));
    int status = test_wait(taker);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, text);
    end_watch(sleeper, text);
}

// The last mapping, and the last name of a file: a large one is freed in
// pieces.
static void ends(size_t length) {
    pid_t sleeper = watch();
    pid_t taker = CHILD(pressure_take(length, MAP_SHARED, 512));
    int status = test_wait(taker);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "shared memory ends with its process");
    end_watch(sleeper, "the end of shared memory");

    int fd = open("/tmp/large", O_RDWR | O_CREAT, 0600);
    NEED(fd >= 0);
    sleeper = watch();
    STEP_EQUAL(posix_fallocate(fd, 0, length), 0);
    STEP_EQUAL(ftruncate(fd, length / 2), 0);
    STEP_EQUAL(unlink("/tmp/large"), 0);
    STEP_EQUAL(close(fd), 0);
    end_watch(sleeper, "the end of a file");
}

// The second finds all entries write-protected. The children end after the watch: an auditor may
// look at all of memory then.
static void forks(size_t length) {
    char *area = test_map(length);
    memset(area, 1, length);
    pid_t sleeper = watch(), children[2];
    for (int number = 0; number < 2; number++)
        children[number] = CHILD({
            struct timespec nap = {0, NAP};
            while (!shared->ends)
                nanosleep(&nap, 0);
        });
    end_watch(sleeper, "forks of a large process");
    for (int number = 0; number < 2; number++)
        test_wait(children[number]);
    STEP_EQUAL(munmap(area, length), 0);
}

int main(void) {
    test_start();
    struct sysinfo machine;
    NEED(sysinfo(&machine) == 0);
    size_t memory = machine.totalram;
    shared = pressure_shared();
    ends(memory * 2 / 5 & -MIB);
    forks(memory * 2 / 5 & -MIB);
    pressure("no swap", 2 * memory, 512);
    // A quarter of memory as slots: swap is full first.
    STEP_EQUAL(swap_begin(memory / 4 & -MIB), 0);
    pressure("swap is full", 2 * memory, 8);
    STEP_EQUAL(swap_end(), 0);
    // As many slots as memory has, and a store of an eighth: the store is full first.
    STEP_EQUAL(swap_setting("disksize", memory & -MIB), 0);
    STEP_EQUAL(swap_setting("mem_limit", memory / 8 & -MIB), 0);
    STEP_EQUAL(swap_make((memory & -MIB) / PAGE), 0);
    STEP_EQUAL(swapon(SWAP_DEVICE, 0), 0);
    pressure("the store is full", 2 * memory, 2);
    STEP_EQUAL(swap_end(), 0);
    return test_end();
}
