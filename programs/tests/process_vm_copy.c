// process_vm_readv and process_vm_writev: what is copied, what is refused, and
// how much was copied before a place that cannot be touched.

#include "test.h"

#include <sched.h>
#include <sys/uio.h>

static char *shared;

static ssize_t reads(pid_t pid, struct iovec *local, unsigned long locals, struct iovec *remote,
                     unsigned long remotes, unsigned long flags) {
    return syscall(SYS_process_vm_readv, pid, local, locals, remote, remotes, flags);
}

static ssize_t writes(pid_t pid, struct iovec *local, unsigned long locals, struct iovec *remote,
                      unsigned long remotes, unsigned long flags) {
    return syscall(SYS_process_vm_writev, pid, local, locals, remote, remotes, flags);
}

static void refusals(void) {
    pid_t own = getpid();
    char *memory = test_map(4 * PAGE);
    struct iovec local = {memory, 100}, remote = {memory + PAGE, 100};
    static struct iovec many[1025];
    struct iovec negative = {memory, (size_t)-1};
    struct iovec outside = {(void *)(~0UL << 12), 100};
    struct iovec nothing = {memory, 0};
    FAILS(reads(own, &local, 1, &remote, 1, 1), EINVAL, "flags");
    FAILS(reads(own, &local, 1, &remote, 1, 1UL << 40), EINVAL, "flags beyond 32 bits");
    FAILS(reads(own, many, 1025, &remote, 1, 0), EINVAL, "too many local ranges");
    FAILS(reads(own, &local, 1, many, 1025, 0), EINVAL, "too many remote ranges");
    FAILS(reads(own, &negative, 1, &remote, 1, 0), EINVAL, "a negative local length");
    FAILS(reads(own, &local, 1, &negative, 1, 0), EINVAL, "a negative remote length");
    FAILS(reads(own, &outside, 1, &remote, 1, 0), EFAULT, "a local address of the kernel");
    FAILS(reads(own, &local, 1, &outside, 1, 0), EFAULT, "a remote address of the kernel");
    FAILS(reads(own, test_wild(8), 1, &remote, 1, 0), EFAULT, "a local array that is not there");
    FAILS(reads(own, &local, 1, test_wild(8), 1, 0), EFAULT, "a remote array that is not there");
    FAILS(reads(0, &local, 1, &remote, 1, 0), ESRCH, "process 0");
    FAILS(reads(-1, &local, 1, &remote, 1, 0), ESRCH, "a negative process");
    FAILS(reads(999999, &local, 1, &remote, 1, 0), ESRCH, "no such process");
    EQUAL(reads(own, &local, 0, &remote, 1, 0), 0, "no local range");
    EQUAL(reads(own, &local, 1, &remote, 0, 0), 0, "no remote range");
    EQUAL(reads(999999, &nothing, 1, &remote, 1, 0), 0, "nothing to copy to, and no process");
    EQUAL(reads(999999, &local, 1, &nothing, 1, 0), 0, "nothing to copy, and no process");
    EQUAL(reads(999999, &nothing, 1, test_wild(8), 1, 0), 0, "nothing to copy to, and no array");
    EQUAL(reads(own, &local, 1024, &remote, 0, 0) <= 0, 1, "as many local ranges as may be");
    pid_t ended = fork();
    if (ended == 0)
        _exit(0);
    siginfo_t info;
    NEED(waitid(P_PID, ended, &info, WEXITED | WNOWAIT) == 0);
    FAILS(reads(ended, &local, 1, &remote, 1, 0), ESRCH, "a process that has ended");
    test_wait(ended);
}

static void one_process(void) {
    char *memory = test_map(4 * PAGE);
    memset(memory, 'a', PAGE);
    memcpy(memory + 2 * PAGE - 3, "across", 6);
    struct iovec local[] = {{memory, 2}, {memory + 10, 0}, {memory + 20, 4}, {memory + 30, 9}};
    struct iovec remote[] = {{memory + 2 * PAGE - 3, 1}, {0, 0}, {memory + 2 * PAGE - 2, 5}};
    EQUAL(reads(getpid(), local, 4, remote, 3, 0), 6, "several ranges, as much as both have");
    CHECK(!memcmp(memory, "ac", 2) && !memcmp(memory + 20, "ross", 4) && memory[30] == 'a',
          "which are filled in order");
    EQUAL(writes(getpid(), local, 3, remote, 3, 0), 6, "and back");
    EQUAL(writes(gettid(), local, 1, remote, 3, 0), 2, "a process by its thread");
    // The arrays are read before anything is copied.
    struct iovec *own = (struct iovec *)(memory + 3 * PAGE);
    memset(memory, 0, PAGE);
    own[0] = (struct iovec){memory, 16};
    own[1] = (struct iovec){memory + 16, 16};
    struct iovec over = {own, 32};
    EQUAL(reads(getpid(), &over, 1, own, 2, 0), 32, "an array that is written over");
    CHECK(own[0].iov_base == 0 && own[1].iov_base == 0, "is what was read");
}

static void partial(void) {
    char *memory = test_map(8 * PAGE);
    NEED(munmap(memory + 2 * PAGE, PAGE) == 0);
    NEED(mprotect(memory + 4 * PAGE, PAGE, PROT_READ) == 0);
    NEED(mprotect(memory + 6 * PAGE, PAGE, PROT_NONE) == 0);
    pid_t own = getpid();
    struct iovec local = {memory, PAGE};
    struct iovec hole = {memory + 2 * PAGE - 100, 200};
    EQUAL(reads(own, &local, 1, &hole, 1, 0), 100, "read up to a hole");
    EQUAL(writes(own, &local, 1, &hole, 1, 0), 100, "written up to a hole");
    EQUAL(reads(own, &hole, 1, &local, 1, 0), 100, "read to where a hole begins");
    EQUAL(writes(own, &hole, 1, &local, 1, 0), 100, "written from where a hole begins");
    struct iovec constant = {memory + 4 * PAGE - 7, 100};
    EQUAL(reads(own, &local, 1, &constant, 1, 0), 100, "read of what may be read");
    EQUAL(writes(own, &local, 1, &constant, 1, 0), 7, "written up to what may not be");
    struct iovec none[] = {{memory, 5}, {memory + 6 * PAGE, 5}};
    EQUAL(reads(own, &local, 1, none, 2, 0), 5, "a second range that may not be read");
    FAILS(reads(own, &local, 1, none + 1, 1, 0), EFAULT, "a first one");
    FAILS(writes(own, none + 1, 1, &local, 1, 0), EFAULT, "a first one to write from");
}

static void two_processes(void) {
    shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    enum { LENGTH = 3 << 20 };
    char *memory = test_map(LENGTH), *back = test_map(LENGTH);
    for (size_t index = 0; index < LENGTH; index++)
        memory[index] = (char)(index * 7 + index / 4096);
    pid_t child = fork();
    if (child == 0) {
        memset(memory, 1, PAGE); // a page of its own; the others are its parent's
        shared[0] = 1;
        while (shared[0] == 1)
            sched_yield();
        int good = memory[PAGE] == 'w' && memory[PAGE + 4] == 'e';
        _exit(good ? 5 : 6);
    }
    while (shared[0] == 0)
        sched_yield();
    struct iovec local = {back, LENGTH}, remote = {memory, LENGTH};
    EQUAL(reads(child, &local, 1, &remote, 1, 0), LENGTH, "3 MiB of another process");
    CHECK(back[0] == 1 && back[PAGE - 1] == 1, "with what it has written");
    CHECK(!memcmp(back + PAGE, memory + PAGE, LENGTH - PAGE), "and what it shares until then");
    struct iovec word = {"write", 5}, place = {memory + PAGE, 5};
    EQUAL(writes(child, &word, 1, &place, 1, 0), 5, "written to another process");
    CHECK(memory[PAGE] == back[PAGE] && memory[PAGE] != 'w', "which alone has it");
    shared[0] = 2;
    int status = test_wait(child);
    EQUAL(WEXITSTATUS(status), 5, "and sees it");
}

int main(void) {
    test_start();
    refusals();
    one_process();
    partial();
    two_processes();
    return test_end();
}
