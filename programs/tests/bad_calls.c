// kernel-only: random system calls as root would harm the host
//
// Bad programs: every system call number with arguments by chance, in
// children. A child may die; the machine and the parent work on.

#include "test.h"

static uint64_t state;

static uint64_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

// Calls that make copies of the random caller, or end what is not theirs.
static int left_out(long number) {
    static const long numbers[] = {
        SYS_clone, SYS_exit, SYS_exit_group, SYS_kill, SYS_tkill, SYS_tgkill,
        SYS_rt_sigqueueinfo, SYS_rt_tgsigqueueinfo, SYS_reboot, 435,
#if defined(__x86_64__)
        SYS_fork, SYS_vfork,
#endif
    };
    for (size_t index = 0; index < sizeof numbers / sizeof *numbers; index++)
        if (numbers[index] == number)
            return 1;
    return 0;
}

static char *memory;

static unsigned long argument(void) {
    static const unsigned long known[] = {
        0, 1, 2, 3, 5, 7, 8, 16, 64, 4095, 4096, 8192, 0x200000, 0x40000000, -1ul, -2ul, -4096ul,
        -100ul, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fffffffffffffff, 0x8000000000000000,
        0x7ffffffff000, 0x800000000000, 0xffff800000000000, 0xffffffff80000000, 0x10000, 0x123456789000,
    };
    switch (next() % 4) {
    case 0:
        return known[next() % (sizeof known / sizeof *known)];
    case 1:
        return (unsigned long)memory + next() % 16 * 4096;
    case 2:
        return (unsigned long)memory + next() % (16 * 4096);
    default:
        return next() % 3 ? next() % 10 : next();
    }
}

static void quiet(int signal) { (void)signal; }

// Blocking calls are ended by a timer again and again.
static void call_by_chance(int count, long only) {
    struct sigaction action = {.sa_handler = quiet};
    sigaction(SIGALRM, &action, 0);
    unsigned long timer[4] = {0, 3000, 0, 3000};
    memory = test_map(16 * PAGE);
    for (int index = 0; index < 16; index++)
        memory[index * PAGE + index * 8] = index;
    close(0);
    close(1);
    close(2);
    open("/dev/zero", O_RDWR);
    open("/dev/null", O_RDWR);
    open("/dev/null", O_RDWR);
    open("/tmp/bad-calls", O_RDWR | O_CREAT, 0600);
    memfd_create("bad-calls", 0);
    int pipes[2];
    if (pipe(pipes) != 0)
        _exit(9);
    for (int round = 0; round < count; round++) {
        long number = only >= 0 ? only : (long)(next() % 480);
        if (left_out(number))
            continue;
        syscall(SYS_setitimer, 0, timer, 0);
        syscall(number, argument(), argument(), argument(), argument(), argument(), argument());
    }
}

static int run(int count, long only) {
    pid_t child = CHILD(call_by_chance(count, only));
    // A child that hangs in a call that no signal ends, or that has masked
    // the timer, is killed.
    for (int round = 0; round < 120; round++) {
        int status;
        if (waitpid(child, &status, WNOHANG) == child)
            return WIFEXITED(status) || WIFSIGNALED(status);
        test_sleep(round < 20 ? 1 : 10);
    }
    kill(child, SIGKILL);
    int status = test_wait(child);
    return WIFEXITED(status) || WIFSIGNALED(status);
}

int main(void) {
    test_start();
    int before = test_failures;
    alarm(0);
    for (long number = 0; number < 470; number++) {
        state = 0x9e3779b97f4a7c15 + number * 7919;
        alarm(TEST_SECONDS);
        STEP(run(10, number));
    }
    ALL_STEPS(before, "each call ten times");
    before = test_failures;
    for (int round = 0; round < 40; round++) {
        state = 0x2545f4914f6cdd1d + round * 104729;
        alarm(TEST_SECONDS);
        STEP(run(100, -1));
    }
    ALL_STEPS(before, "40 children with 100 calls each");
    unlink("/tmp/bad-calls");
    char *mapping = test_map(64 * PAGE);
    memset(mapping, 5, 64 * PAGE);
    EXITS(5, "the machine works on", _exit(mapping[64 * PAGE - 1]));
    return test_end();
}
