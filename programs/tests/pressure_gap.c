// memory: 64M
// clock: instructions
// kernel-only: it uses all memory of the machine
//
// Memory runs out, and a process is killed. A bystander that sleeps for ten
// milliseconds at a time never waits for long: work that frees memory gives
// the CPU away in between. Times are instructions, one nanosecond each.

#include "pressure.h"
#include "swap.h"

#include <sys/sysinfo.h>

#define LONGEST 50000000ull

static struct shared *shared;

static void pressure(const char *text, size_t length, int one_in) {
    memset((void *)shared, 0, sizeof *shared);
    pid_t sleeper = CHILD(pressure_sleeper(shared));
    shared->begins = 1;
    pid_t taker = CHILD(pressure_take(length, MAP_PRIVATE, one_in));
    int status = test_wait(taker);
    shared->begins = 0;
    shared->ends = 1;
    int slept = test_wait(sleeper);
    test_print("%s: %llu naps, the longest wait %llu us", text, (unsigned long long)shared->naps,
               (unsigned long long)shared->worst / 1000);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, text);
    CHECK(WIFEXITED(slept) && WEXITSTATUS(slept) == 0, "the bystander lives");
    CHECK(shared->naps > 0 && shared->worst <= LONGEST, "no wait is long");
    test_arm_watchdog();
}

int main(void) {
    test_start();
    struct sysinfo machine;
    NEED(sysinfo(&machine) == 0);
    size_t memory = machine.totalram;
    shared = pressure_shared();
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
