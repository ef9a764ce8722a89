// memory: 48M
// clock: instructions
// kernel-only: it uses all memory of the machine
//
// Processes take more memory than the machine has, of every kind, with swap
// that is large, full, full of incompressible pages, and being turned off. At
// the same time, bystanders sleep, write to a file and fork: none is killed,
// all continue, and their results are right.

#include "pressure.h"
#include "swap.h"

#include <sys/prctl.h>
#include <sys/sysinfo.h>

static struct shared *shared;
static size_t memory;

static void writer(void) {
    int file = open("/tmp/bystander", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    while (!shared->ends) {
        uint32_t number = shared->writes;
        // The memory that is kept for faults is not for files: a write may be refused, and changes nothing.
        if (pwrite(file, &number, sizeof number, 0) == sizeof number) {
            uint32_t found = 0;
            STEP(pread(file, &found, sizeof found, 0) == sizeof found && found == number);
            shared->writes++;
        }
        test_sleep(5);
    }
}

static void forker(void) {
    volatile int own = 1;
    while (!shared->ends) {
        pid_t child = fork();
        if (child == 0) {
            own = 2;
            _exit(own + 5);
        }
        // Without memory for a child there is none.
        if (child > 0) {
            int status = test_wait(child);
            STEP(WIFEXITED(status) && WEXITSTATUS(status) == 7 && own == 1);
            shared->forks++;
        }
        test_sleep(5);
    }
}

static void locked(void) {
    char *area = mmap(0, 2 * memory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(area != MAP_FAILED);
    for (size_t at = 0; at < 2 * memory; at += MIB)
        if (mlock(area + at, MIB) != 0)
            _exit(0);
}

static void file(void) {
    static char bytes[64 << 10];
    int file = open("/tmp/hog", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    uint64_t seed = 1;
    for (size_t at = 0; at < 2 * memory; at += sizeof bytes) {
        pressure_fill((uint64_t *)bytes, &seed, 1);
        if (write(file, bytes, sizeof bytes) < 0)
            break;
    }
    close(file);
    unlink("/tmp/hog");
}

// A quarter of memory, which six children copy.
static void family(void) {
    char *area = test_map(memory / 4);
    memset(area, 1, memory / 4);
    pid_t children[6];
    for (int number = 0; number < 6; number++)
        children[number] = CHILD({
            // They belong to the hog, and end with it.
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (size_t at = 0; at < memory / 4; at += PAGE)
                (*(volatile uint64_t *)(area + at))++;
        });
    for (int number = 0; number < 6; number++)
        if (children[number] > 0)
            test_wait(children[number]);
    for (size_t at = 0; at < memory / 4; at += PAGE)
        STEP_EQUAL(area[at], 1);
}

static void compressible(void) { pressure_take(3 * memory, MAP_PRIVATE, 128); }
static void incompressible(void) { pressure_take(2 * memory, MAP_PRIVATE, 1); }
static void shared_pages(void) { pressure_take(2 * memory, MAP_SHARED, 8); }

static void zeroes(void) {
    char *area = mmap(0, 3 * memory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(area != MAP_FAILED);
    for (size_t at = 0; at < 3 * memory; at += PAGE)
        *(volatile char *)(area + at) = 0;
}

// Killed while it swaps.
static void killed(void) {
    pid_t taker = CHILD(pressure_take(3 * memory, MAP_PRIVATE, 8));
    struct sysinfo now;
    do {
        test_sleep(1);
        NEED(sysinfo(&now) == 0);
    } while (now.totalswap == now.freeswap && waitpid(taker, 0, WNOHANG) == 0);
    kill(taker, SIGKILL);
    waitpid(taker, 0, 0);
}

// A hog may be killed, and nothing else may.
static void among_bystanders(const char *text, void (*hog)(void)) {
    memset((void *)shared, 0, sizeof *shared);
    pid_t bystanders[] = {CHILD(pressure_sleeper(shared)), CHILD(writer()), CHILD(forker())};
    shared->begins = 1;
    int status = test_wait(CHILD(hog()));
    int killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    CHECK(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0), text);
    // They continue after it has ended.
    uint64_t naps = shared->naps, writes = shared->writes, forks = shared->forks;
    test_sleep(100);
    STEP(shared->naps > naps && shared->writes > writes && shared->forks > forks);
    test_print("    %s: %llu naps, the longest wait %llu us", killed ? "killed" : "ended",
               (unsigned long long)naps, (unsigned long long)shared->worst / 1000);
    shared->ends = 1;
    for (int number = 0; number < 3; number++) {
        int end = test_wait(bystanders[number]);
        STEP(WIFEXITED(end) && WEXITSTATUS(end) == 0);
    }
    test_arm_watchdog();
}

static void hogs(const char *swap) {
    static const struct {
        const char *name;
        void (*hog)(void);
    } all[] = {
        {"compressible", compressible}, {"incompressible", incompressible}, {"zeroes", zeroes},
        {"shared", shared_pages},       {"locked", locked},                 {"a file", file},
        {"a family", family},
    };
    for (size_t number = 0; number < sizeof all / sizeof *all; number++) {
        char text[100];
        snprintf(text, sizeof text, "%s: %s", swap, all[number].name);
        among_bystanders(text, all[number].hog);
    }
}

int main(void) {
    test_start();
    struct sysinfo machine;
    NEED(sysinfo(&machine) == 0);
    memory = machine.totalram & -MIB;
    shared = pressure_shared();
    hogs("no swap");
    STEP_EQUAL(swap_begin(memory / 8), 0);
    hogs("few slots");
    STEP_EQUAL(swap_end(), 0);
    STEP_EQUAL(swap_setting("disksize", 4 * memory), 0);
    STEP_EQUAL(swap_setting("mem_limit", memory / 8), 0);
    STEP_EQUAL(swap_make(4 * memory / PAGE), 0);
    STEP_EQUAL(swapon(SWAP_DEVICE, 0), 0);
    hogs("a small store");
    among_bystanders("killed while it swaps", killed);
    // Off under load: a program is killed, or the call refuses, and comes to an end either way.
    pid_t taker = CHILD(pressure_take(3 * memory, MAP_PRIVATE, 128));
    test_sleep(20);
    int refused = swapoff(SWAP_DEVICE) != 0;
    STEP(!refused || errno == ENOMEM);
    kill(taker, SIGKILL);
    test_wait(taker);
    STEP_EQUAL(refused ? swapoff(SWAP_DEVICE) : 0, 0);
    STEP_EQUAL(swap_setting("reset", 1), 0);
    EXITS(0, "the memory is back", memset(test_map(memory / 2), 1, memory / 2));
    return test_end();
}
