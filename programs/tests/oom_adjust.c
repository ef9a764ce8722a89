// memory: 96M
// kernel-only: it uses all memory of the machine
//
// oom_score_adj: the process that is killed when memory runs out.

#include "settings.h"

#include <sched.h>

#define MIB (1l << 20)

static long setting(pid_t process, const char *name) {
    char path[64], text[64];
    snprintf(path, sizeof path, "/proc/%d/%s", process, name);
    return test_read_file(path, text, sizeof text) > 0 ? atol(text) : -9999;
}

static ssize_t set(pid_t process, const char *name, const char *value) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", process, name);
    return write_setting(path, value);
}

// A child that takes this amount of memory, reports that, and waits.
static pid_t holder(long size) {
    int ends[2];
    char ready;
    NEED(pipe(ends) == 0);
    pid_t child = CHILD({
        memset(test_map(size), 1, size);
        STEP_EQUAL(write(ends[1], "r", 1), 1);
        for (;;)
            pause();
    });
    NEED(read(ends[0], &ready, 1) == 1);
    close(ends[0]);
    close(ends[1]);
    return child;
}

// Whether the process lives.
static int lives(pid_t process) {
    return waitpid(process, 0, WNOHANG) == 0;
}

// Whether only the status of the process is left, for any parent.
static int has_ended(pid_t process) {
    char path[64], text[200], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    NEED(test_read_file(path, text, sizeof text) > 0);
    NEED(sscanf(text, "%*d (%*[^)]) %c", &state) == 1);
    return state == 'Z';
}

// A child that takes memory until a process is killed; it is spared.
static void use_up(pid_t one, pid_t other) {
    pid_t eater = CHILD({
        STEP_EQUAL(set(getpid(), "oom_score_adj", "-1000"), 5);
        char *memory = mmap(0, 512 * MIB, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        NEED(memory != MAP_FAILED);
        for (long at = 0; at < 512 * MIB; at += PAGE) {
            memory[at] = 1;
            if (at % (64 * PAGE) == 0 && (has_ended(one) || has_ended(other)))
                _exit(0);
        }
        _exit(1);
    });
    int status = test_wait(eater);
    STEP(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void end(pid_t process) {
    kill(process, SIGKILL);
    waitpid(process, 0, 0);
}

// A process that has a child by vfork all the time, whose number it reports.
static pid_t lender(volatile pid_t *borrower) {
    pid_t id = CHILD({
        for (;;) {
            pid_t child = vfork();
            if (child == 0) {
                *borrower = getpid();
                for (;;)
                    pause();
            }
            waitpid(child, 0, 0);
        }
    });
    while (*borrower == 0)
        test_sleep(1);
    return id;
}

// As `use_up`, while such a child is about to end whenever memory may run out.
static void use_up_beside(volatile pid_t *borrower, pid_t one, pid_t other) {
    pid_t eater = CHILD({
        STEP_EQUAL(set(getpid(), "oom_score_adj", "-1000"), 5);
        char *memory = mmap(0, 512 * MIB, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        NEED(memory != MAP_FAILED);
        for (long at = 0; at < 512 * MIB; at += PAGE) {
            if (at % (16 * PAGE) == 0) {
                if (has_ended(one) || has_ended(other))
                    _exit(0);
                sched_yield();
                kill(*borrower, SIGKILL);
            }
            memory[at] = 1;
        }
        _exit(1);
    });
    int status = test_wait(eater);
    STEP(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void child_of_child(void) {
    STEP_EQUAL(setting(getpid(), "oom_score_adj"), 300);
    char *arguments[] = {"/bin/program", "adjusted", 0};
    execv("/proc/self/exe", arguments);
    _exit(9);
}

int main(int count, char **arguments) {
    test_start();
    if (count > 1 && strcmp(arguments[1], "adjusted") == 0)
        _exit(setting(getpid(), "oom_score_adj") == 300 ? 0 : 8);

    pid_t self = getpid();
    EQUAL(setting(self, "oom_score_adj"), 0, "oom_score_adj begins with 0");
    EQUAL(set(self, "oom_score_adj", "300\n"), 4, "it is set");
    EQUAL(setting(self, "oom_score_adj"), 300, "and read back");
    FAILS(set(self, "oom_score_adj", "1001"), EINVAL, "nothing above 1000");
    FAILS(set(self, "oom_score_adj", "-1001"), EINVAL, "nothing below -1000");
    FAILS(set(self, "oom_score_adj", "much"), EINVAL, "nothing but a number");
    EQUAL(setting(self, "oom_score_adj"), 300, "what is refused changes nothing");
    EXITS(0, "a child inherits it, and execve keeps it", child_of_child());
    EQUAL(setting(self, "oom_adj"), 5, "oom_adj tells it on the scale of old");
    EQUAL(set(self, "oom_adj", "-17"), 3, "and sets it");
    EQUAL(setting(self, "oom_score_adj"), -1000, "-17 is -1000");
    FAILS(set(self, "oom_adj", "16"), EINVAL, "oom_adj ends at 15");
    FAILS(set(self, "oom_score", "1"), EINVAL, "oom_score cannot be written");
    STEP_EQUAL(set(self, "oom_score_adj", "0"), 1);

    pid_t small = holder(1 * MIB), large = holder(24 * MIB);
    long score = setting(small, "oom_score");
    CHECK(score >= 666 && score < 720, "oom_score of next to nothing");
    CHECK(setting(large, "oom_score") > score + 10, "oom_score rises with the memory");
    STEP_EQUAL(set(small, "oom_score_adj", "500"), 3);
    score = setting(small, "oom_score") - score;
    CHECK(score >= 332 && score <= 334, "oom_score rises with the adjustment");
    STEP_EQUAL(set(small, "oom_score_adj", "-1000"), 5);
    EQUAL(setting(small, "oom_score"), 0, "oom_score is 0 for one that is never killed");
    STEP_EQUAL(set(small, "oom_score_adj", "0"), 1);

    use_up(small, large);
    CHECK(lives(small) && !lives(large), "without adjustments the largest is killed");

    large = holder(24 * MIB);
    STEP_EQUAL(set(small, "oom_score_adj", "900"), 3);
    use_up(small, large);
    CHECK(!lives(small) && lives(large), "a small one that is adjusted goes first");

    small = holder(1 * MIB);
    STEP_EQUAL(set(large, "oom_score_adj", "-1000"), 5);
    use_up(small, large);
    CHECK(!lives(small) && lives(large), "-1000 is never killed, however large");
    end(large);

    volatile pid_t *borrower = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(borrower != MAP_FAILED);
    small = lender(borrower);
    large = holder(24 * MIB);
    use_up_beside(borrower, small, large);
    CHECK(lives(small) && !lives(large), "the end of a child by vfork does not end its parent");
    end(small);
    return test_end();
}
