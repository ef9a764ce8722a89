// memory: 96M
// kernel-only: it uses all memory of the machine
//
// The out-of-memory killer counts what a process has in swap.

#include "test.h"
#include "swap.h"

#define MIB ((size_t)1 << 20)
#define SWAPPED (24 * MIB)
#define ON_FAULT 1 // MLOCK_ONFAULT, which not every libc has
#define RESIDENT (8 * MIB)

// A number in a file of the process, behind the label.
static long number(pid_t process, const char *name, const char *label) {
    char path[64], text[4000];
    snprintf(path, sizeof path, "/proc/%d/%s", process, name);
    NEED(test_read_file(path, text, sizeof text) > 0);
    const char *at = strstr(text, label);
    NEED(at);
    return atol(at + strlen(label));
}

// Whether only the status of the process is left.
static int has_ended(pid_t process) {
    char path[64], text[200], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    NEED(test_read_file(path, text, sizeof text) > 0);
    NEED(sscanf(text, "%*d (%*[^)]) %c", &state) == 1);
    return state == 'Z';
}

// Fills half of each page with numbers that do not compress.
static void fill(char *memory, size_t size) {
    uint64_t state = 88172645463325252u;
    for (size_t page = 0; page < size; page += PAGE)
        for (size_t at = 0; at < PAGE / 2; at += 8) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            *(uint64_t *)(memory + page + at) = state;
        }
}

// A child with this amount of memory. It pages the memory out or locks it on request, then
// waits.
struct holder {
    pid_t process;
    int answers, orders;
};

static struct holder holder(size_t size, int is_swapped) {
    int down[2], up[2];
    NEED(pipe(down) == 0 && pipe(up) == 0);
    pid_t child = CHILD({
        char byte;
        char *memory = test_map(size);
        fill(memory, size);
        STEP_EQUAL(write(up[1], "r", 1), 1);
        NEED(read(down[0], &byte, 1) == 1);
        if (is_swapped)
            STEP_EQUAL(madvise(memory, size, MADV_PAGEOUT), 0);
        else
            STEP_EQUAL(mlock(memory, size), 0);
        STEP_EQUAL(write(up[1], "r", 1), 1);
        for (;;)
            pause();
    });
    close(down[0]);
    close(up[1]);
    return (struct holder){child, up[0], down[1]};
}

static void await(struct holder *child) {
    char byte;
    NEED(read(child->answers, &byte, 1) == 1);
}

// A child that locks memory until one of the processes is killed; it is spared.
static void use_up(pid_t one, pid_t other) {
    pid_t eater = CHILD({
        int file = open("/proc/self/oom_score_adj", O_WRONLY);
        NEED(file >= 0 && write(file, "-1000", 5) == 5);
        STEP_EQUAL(mlockall(MCL_CURRENT), 0);
        char *memory = mmap(0, 512 * MIB, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        NEED(memory != MAP_FAILED);
        STEP_EQUAL(syscall(SYS_mlock2, memory, 512 * MIB, ON_FAULT), 0);
        for (size_t at = 0; at < 512 * MIB; at += PAGE) {
            memory[at] = 1;
            if (at % (16 * PAGE) == 0 && (has_ended(one) || has_ended(other)))
                _exit(test_failures != 0);
        }
        _exit(1);
    });
    int status = test_wait(eater);
    STEP(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    test_start();
    long small = number(getpid(), "oom_score", "");
    EQUAL(swap_begin(96 * MIB), 0, "swap is on");
    struct holder large = holder(SWAPPED, 1), locked = holder(RESIDENT, 0);
    await(&large);
    await(&locked);
    long before = number(large.process, "oom_score", "");
    NEED(write(large.orders, "g", 1) == 1);
    await(&large);
    long swapped = number(large.process, "status", "VmSwap:");
    CHECK(swapped >= (long)(SWAPPED / 1024) * 9 / 10, "most of its memory is in swap");
    long after = number(large.process, "oom_score", "");
    CHECK(before > small + 40, "oom_score of a large process");
    CHECK(after >= before - 2 && after <= before + 2, "oom_score counts swap");
    NEED(write(locked.orders, "g", 1) == 1);
    await(&locked);
    use_up(large.process, locked.process);
    CHECK(has_ended(large.process) && !has_ended(locked.process),
          "the larger process is killed, though it is in swap");
    kill(locked.process, SIGKILL);
    kill(large.process, SIGKILL);
    test_wait(locked.process);
    test_wait(large.process);
    EQUAL(swap_end(), 0, "swap is off");
    return test_end();
}
