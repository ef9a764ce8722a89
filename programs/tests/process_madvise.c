// process_madvise case by case: whom it is about, how many ranges, which
// advice, and how far it comes.

#include "test.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { MOST_RANGES = 1024, PAGES = 16, USER = 1000 };

static const int for_others[] = {MADV_COLD, MADV_PAGEOUT, MADV_WILLNEED, MADV_COLLAPSE};
static const int not_for_others[] = {
    MADV_NORMAL,        MADV_RANDOM,         MADV_SEQUENTIAL,    MADV_DONTNEED,      MADV_FREE,
    MADV_REMOVE,        MADV_DONTFORK,       MADV_DOFORK,        MADV_WIPEONFORK,    MADV_KEEPONFORK,
    MADV_HUGEPAGE,      MADV_NOHUGEPAGE,     MADV_DONTDUMP,      MADV_DODUMP,        24,
    MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE,  1000,
    -1,
};

static int self, other;
static char *memory;
static struct iovec ranges[MOST_RANGES + 1];

static long advise(int whom, const struct iovec *vector, size_t count, int advice, unsigned flags) {
    return syscall(SYS_process_madvise, whom, vector, count, advice, flags);
}

static void whom(pid_t child) {
    struct iovec range = {memory, PAGE};
    int file = open("/", O_RDONLY);
    FAILS(advise(-1, &range, 1, MADV_COLD, 0), EBADF, "no descriptor");
    FAILS(advise(999, &range, 1, MADV_COLD, 0), EBADF, "a descriptor that is not open");
    FAILS(advise(file, &range, 1, MADV_COLD, 0), EBADF, "a descriptor of something else");
    FAILS(advise(-1, &range, 1, MADV_COLD, 1), EINVAL, "flags are looked at first");
    FAILS(advise(-1, test_wild(8), 1, MADV_COLD, 0), EFAULT, "then the vector");
    FAILS(advise(-1, &range, 1, 1000, 0), EBADF, "then the process, then the advice");
    close(file);

    pid_t ended = CHILD(_exit(0));
    int handle = syscall(SYS_pidfd_open, ended, 0);
    NEED(handle >= 0);
    siginfo_t information;
    NEED(waitid(P_PID, ended, &information, WEXITED | WNOWAIT) == 0);
    FAILS(advise(handle, &range, 1, MADV_COLD, 0), ESRCH, "a process that has ended");
    FAILS(advise(handle, &range, 1, MADV_COLD, ~0u), EINVAL, "and flags");
    test_wait(ended);
    FAILS(advise(handle, &range, 1, MADV_COLD, 0), ESRCH, "and was waited for");
    close(handle);

    EXITS(0, "a user without CAP_SYS_NICE advises himself alone", {
        STEP_EQUAL(setgid(USER), 0);
        STEP_EQUAL(setuid(USER), 0);
        int own = syscall(SYS_pidfd_open, getpid(), 0);
        STEP_EQUAL(advise(own, &range, 1, MADV_COLD, 0), (long)PAGE);
        STEP_EQUAL(advise(own, &range, 1, MADV_DONTNEED, 0), (long)PAGE);
        STEP_EQUAL(prctl(PR_SET_DUMPABLE, 1), 0);
        pid_t mine = fork();
        if (mine == 0) {
            pause();
            _exit(0);
        }
        int theirs = syscall(SYS_pidfd_open, mine, 0);
        STEP_FAILS(advise(theirs, &range, 1, MADV_DONTNEED, 0), EINVAL);
        STEP_FAILS(advise(theirs, &range, 1, MADV_COLD, 0), EPERM);
        STEP_FAILS(advise(theirs, &range, 0, MADV_COLD, 0), EPERM);
        int roots = syscall(SYS_pidfd_open, child, 0);
        STEP_FAILS(advise(roots, &range, 1, MADV_DONTNEED, 0), EACCES);
        kill(mine, SIGKILL);
        waitpid(mine, 0, 0);
    });
}

static void how_many(void) {
    struct iovec none = {memory, 0};
    EQUAL(advise(self, 0, 0, MADV_COLD, 0), 0, "no ranges");
    EQUAL(advise(self, test_wild(8), 0, MADV_COLD, 0), 0, "no ranges at a bad pointer");
    EQUAL(advise(self, &none, 1, MADV_COLD, 0), 0, "a range of nothing");
    for (int index = 0; index <= MOST_RANGES; index++)
        ranges[index] = (struct iovec){memory + index % PAGES * PAGE, PAGE};
    EQUAL(advise(self, ranges, MOST_RANGES, MADV_COLD, 0), MOST_RANGES * PAGE, "1,024 ranges");
    EQUAL(advise(other, ranges, MOST_RANGES, MADV_COLD, 0), MOST_RANGES * PAGE,
          "1,024 ranges of a child");
    FAILS(advise(self, ranges, MOST_RANGES + 1, MADV_COLD, 0), EINVAL, "1,025 ranges");
    FAILS(advise(self, ranges, ~0ul, MADV_COLD, 0), EINVAL, "as many as a word can say");
    FAILS(advise(-1, ranges, MOST_RANGES + 1, MADV_COLD, 0), EINVAL, "and no process");
}

static void which_advice(void) {
    struct iovec range = {memory, PAGE};
    for (unsigned index = 0; index < sizeof for_others / sizeof *for_others; index++) {
        long done = advise(other, &range, 1, for_others[index], 0);
        // A single page cannot be collapsed.
        STEP(done == (long)PAGE || for_others[index] == MADV_COLLAPSE);
        STEP(done >= 0 || errno == EINVAL);
    }
    test_print("ok  advice for others");
    for (unsigned index = 0; index < sizeof not_for_others / sizeof *not_for_others; index++)
        STEP_FAILS(advise(other, &range, 1, not_for_others[index], 0), EINVAL);
    test_print("ok  advice that is not for others");

    memset(memory, 'm', PAGES * PAGE);
    EQUAL(advise(self, &range, 1, MADV_DONTNEED, 0), (long)PAGE, "MADV_DONTNEED of oneself");
    CHECK(memory[0] == 0 && memory[PAGE] == 'm', "frees what it is about");
    EQUAL(advise(self, &range, 1, MADV_DONTFORK, 0), (long)PAGE, "MADV_DONTFORK of oneself");
    EQUAL(advise(self, &range, 1, MADV_DOFORK, 0), (long)PAGE, "MADV_DOFORK of oneself");
    EQUAL(advise(self, &range, 1, MADV_POPULATE_WRITE, 0), (long)PAGE,
          "MADV_POPULATE_WRITE of oneself");
    EQUAL(advise(self, &range, 1, MADV_GUARD_INSTALL, 0), (long)PAGE,
          "MADV_GUARD_INSTALL of oneself");
    EQUAL(advise(self, &range, 1, MADV_GUARD_REMOVE, 0), (long)PAGE,
          "MADV_GUARD_REMOVE of oneself");
    FAILS(advise(self, &range, 1, 1000, 0), EINVAL, "no such advice");
    FAILS(advise(self, &range, 1, MADV_COLD, 1), EINVAL, "an unknown flag");
    FAILS(advise(self, &range, 1, MADV_COLD, 1u << 31), EINVAL, "the highest flag");
}

static void how_far(int whose, const char *text) {
    struct iovec *two = (struct iovec *)test_map(2 * PAGE);
    test_print("    %s", text);
    struct iovec hole = {memory + (PAGES + 1) * PAGE, PAGE};
    struct iovec skewed = {memory + 8, PAGE};
    struct iovec good = {memory, 2 * PAGE};
    struct iovec odd = {memory, PAGE + 1};
    FAILS(advise(whose, &hole, 1, MADV_COLD, 0), ENOMEM, "nothing is mapped there");
    FAILS(advise(whose, &skewed, 1, MADV_COLD, 0), EINVAL, "an unaligned address");
    EQUAL(advise(whose, &odd, 1, MADV_COLD, 0), (long)PAGE + 1, "an unaligned length");
    struct iovec some[4] = {good, odd, skewed, good};
    EQUAL(advise(whose, some, 4, MADV_COLD, 0), 3 * (long)PAGE + 1, "what was advised before");
    some[2] = hole;
    EQUAL(advise(whose, some, 4, MADV_COLD, 0), 3 * (long)PAGE + 1, "and before a hole");
    some[0] = hole;
    FAILS(advise(whose, some, 4, MADV_COLD, 0), ENOMEM, "a hole at first");
    some[0] = (struct iovec){memory, 0}, some[1] = (struct iovec){memory + 8, 0}, some[2] = good;
    EQUAL(advise(whose, some, 3, MADV_COLD, 0), 2 * (long)PAGE, "ranges of nothing before");

    some[0] = good, some[1] = (struct iovec){memory, ~0ul};
    FAILS(advise(whose, some, 2, MADV_COLD, 0), EINVAL, "a negative length");
    FAILS(advise(whose, some + 1, 1, MADV_COLD, 0), EINVAL, "alone, too");
    some[1] = (struct iovec){(void *)(1ul << 63), PAGE};
    FAILS(advise(whose, some, 2, MADV_COLD, 0), EFAULT, "an address of the kernel's");
    FAILS(advise(whose, some + 1, 1, MADV_COLD, 0), EFAULT, "alone, too");
    some[1] = (struct iovec){(void *)-PAGE, PAGE};
    FAILS(advise(whose, some, 2, MADV_COLD, 0), EFAULT, "the last page of all");

    // The last vector entry is half behind what is mapped, and then wholly.
    NEED(munmap((char *)two + PAGE, PAGE) == 0);
    struct iovec *last = (struct iovec *)((char *)two + PAGE) - 1;
    *last = good;
    EQUAL(advise(whose, last, 1, MADV_COLD, 0), 2 * (long)PAGE, "a vector at the end of a mapping");
    FAILS(advise(whose, last, 2, MADV_COLD, 0), EFAULT, "one that goes beyond it");
    char *half = (char *)last + 8;
    memcpy(half - 16, &good, sizeof good);
    FAILS(advise(whose, (struct iovec *)(half - 16), 2, MADV_COLD, 0), EFAULT, "or half");
    FAILS(advise(whose, (struct iovec *)half, 1, MADV_COLD, 0), EFAULT, "or half alone");
    munmap(two, PAGE);
}

int main(void) {
    test_start();
    memory = test_map((PAGES + 2) * PAGE);
    memset(memory, 'm', PAGES * PAGE);
    NEED(munmap(memory + (PAGES + 1) * PAGE, PAGE) == 0);
    pid_t child = CHILD(pause());
    self = syscall(SYS_pidfd_open, getpid(), 0);
    other = syscall(SYS_pidfd_open, child, 0);
    NEED(self >= 0 && other >= 0);
    whom(child);
    how_many();
    which_advice();
    how_far(self, "oneself:");
    how_far(other, "a child:");
    kill(child, SIGKILL);
    test_wait(child);
    return test_end();
}
