// Memory runs out on several CPUs at once. Each hog is killed, whether it is a
// process of several threads or one of several processes; the bystanders go on,
// and their contents are right. The arguments are those of every storm.
//
// cpus: 2
// memory: 64M
// kernel-only: it uses all memory of the machine

#include "storm.h"

enum { OWN = 64, MIB = 1 << 20 };

// Memory through which the processes communicate.
static struct shared {
    volatile int over;
    volatile uint64_t rounds[STORM_MOST];
} *shared;

// Changes its memory, and looks at it from a child, which has a copy or needs a new page.
static int bystander(int who) {
    char *own = test_map(OWN * PAGE);
    int wrong = 0;
    for (uint64_t round = 0; !shared->over; round++) {
        storm_fill(own, who, round, OWN);
        pid_t child = fork();
        if (child == 0) {
            int found = storm_wrong(own, who, round, OWN);
            storm_fill(own, who, round + 1, OWN);
            _exit(found + storm_wrong(own, who, round + 1, OWN) != 0);
        }
        // Without memory for a child there is none.
        wrong += child > 0 && test_wait(child) != 0;
        wrong += storm_wrong(own, who, round, OWN);
        if (round % 3 == 0)
            wrong += madvise(own, OWN * PAGE, MADV_DONTNEED) != 0;
        shared->rounds[who]++;
    }
    return wrong;
}

static void *eat(void *argument) {
    size_t piece = (intptr_t)argument % 2 ? MIB : 64 * PAGE;
    for (;;) {
        char *memory = mmap(0, piece, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            _exit(50);
        for (size_t at = 0; at < piece; at += PAGE)
            memory[at] = 1;
    }
    return 0;
}

// Other processes have the hog's memory as well, and die with it.
static int eat_beside(void *argument) {
    eat(argument);
    return 0;
}

static void threads(void) {
    pthread_t thread;
    for (intptr_t index = 1; index < storm_count; index++)
        pthread_create(&thread, 0, eat, (void *)index);
    eat(0);
}

static void sharers(void) {
    static char stacks[STORM_MOST][4 * PAGE] __attribute__((aligned(16)));
    for (intptr_t index = 1; index < storm_count; index++)
        clone(eat_beside, stacks[index] + sizeof *stacks, CLONE_VM, (void *)index);
    eat(0);
}

static void dies(void (*hog)(void), int number) {
    pid_t hogs[STORM_MOST];
    for (int index = 0; index < number; index++)
        hogs[index] = CHILD(hog());
    for (int index = 0; index < number; index++) {
        int status = test_wait(hogs[index]);
        STEP(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
}

static void alone(void) { eat((void *)1); }

static void storm(void (*hog)(void), int number, const char *what) {
    pid_t bystanders[STORM_MOST];
    int before = test_failures;
    storm_begin();
    memset(shared, 0, sizeof *shared);
    for (int who = 0; who < storm_count; who++)
        bystanders[who] = CHILD({ _exit(bystander(who) != 0); });
    do
        dies(hog, number);
    while (storm_goes_on());
    // They go on once memory is back.
    for (int who = 0; who < storm_count; who++)
        for (uint64_t rounds = shared->rounds[who]; shared->rounds[who] < rounds + 2;) {
            siginfo_t end = {};
            waitid(P_PID, bystanders[who], &end, WEXITED | WNOHANG | WNOWAIT);
            if (end.si_pid != 0) {
                test_print("bystander %d has ended with status %d", end.si_pid, end.si_status);
                break;
            }
            test_sleep(1);
        }
    shared->over = 1;
    for (int who = 0; who < storm_count; who++)
        STEP_EQUAL(test_wait(bystanders[who]), 0);
    ALL_STEPS(before, what);
}

int main(int count, char **arguments) {
    storm_start(count, arguments);
    shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    storm(threads, 1, "a hog of several threads is killed, and nothing else");
    storm(alone, storm_count, "hogs on each CPU are killed, and nothing else");
    storm(sharers, 1, "processes that share their memory are killed, and nothing else");
    return test_end();
}
