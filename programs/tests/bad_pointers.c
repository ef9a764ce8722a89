// Bad programs: wild pointers to every call that takes one. Each gives EFAULT
// (or the error that Linux gives), none gives a crash, none writes where it
// must not.

#include "test.h"

#include <poll.h>
#include <sched.h>
#include <sys/resource.h>

// The place of the wild pointer in a call's arguments.
#define P 0x5eed5eed5eedul

enum {
    READS = 0,      // The kernel reads there: read-only memory is good.
    WRITES = 1,     // The kernel writes there: read-only memory is bad too.
    NULL_GOOD = 2,  // A null pointer means something.
    NO_ERROR = 4,   // The error is lost, as in Linux: the call may succeed.
    ANY_ERROR = 8,  // Linux looks at other things first for some pointers.
};

struct call {
    const char *name;
    long number;
    unsigned long arguments[6];
    int kind;
};

static char good[4096] __attribute__((aligned(4096)));
static const char program[] = "/tmp/bad-program";
static int zero, file, pipes[2], directory;

#define CALL(name, kind, ...) {#name, SYS_##name, {__VA_ARGS__}, kind}
#define GOOD ((unsigned long)good)
#define PROGRAM ((unsigned long)program)
#define CWD ((unsigned long)AT_FDCWD)

static int check(const struct call *call) {
    static char *read_only, *none;
    if (!read_only) {
        read_only = mmap(0, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        none = mmap(0, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    unsigned long pointers[] = {
        0,                  0x10,               0x10000,
        0x123456789000,     0x7ffffffff000 - 4, 0x7ffffffff000,
        0x800000000000,     0x1000000000000,    0x8000000000000000,
        0xffff800000000000, 0xffff888000001000, 0xffffffff80000000,
        0xfffffffffffff000, 0xfffffffffffffff8, (unsigned long)none,
        (unsigned long)read_only,
    };
    enum { COUNT = sizeof pointers / sizeof *pointers };
    int wrong = 0;
    for (int index = 0; index < COUNT; index++) {
        unsigned long a[6];
        if (index == 0 && call->kind & NULL_GOOD)
            continue;
        if (index == COUNT - 1 && !(call->kind & WRITES))
            continue;
        for (int position = 0; position < 6; position++)
            a[position] = call->arguments[position] == P ? pointers[index] : call->arguments[position];
        errno = 0;
        long result = syscall(call->number, a[0], a[1], a[2], a[3], a[4], a[5]);
        int accepted = result == -1 ? errno == EFAULT || call->kind & ANY_ERROR
                                    : (call->kind & NO_ERROR) != 0;
        if (!accepted) {
            wrong++;
            test_print("FAIL %s:%d: %s with pointer 0x%lx: expected EFAULT, got %ld, errno %d (%s)",
                       __FILE__, __LINE__, call->name, pointers[index], result, errno, strerror(errno));
        }
    }
    return wrong;
}

int main(void) {
    test_start();
    signal(SIGUSR1, SIG_IGN);
    unlink("/tmp/bad-pointers");
    zero = open("/dev/zero", O_RDWR);
    file = open("/tmp/bad-pointers", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(zero >= 0 && file >= 0 && pipe(pipes) == 0 && write(pipes[1], "0123456789", 10) == 10);
    NEED(write(file, good, 4096) == 4096);
    directory = open("/tmp", O_RDONLY | O_DIRECTORY);
    // A file that may be executed but is no program: should a wild pointer be
    // taken, this program is not replaced.
    int other = open(program, O_WRONLY | O_CREAT | O_TRUNC, 0700);
    NEED(other >= 0 && write(other, good, 16) == 16);
    close(other);
    unsigned long Z = zero, F = file, R = pipes[0], W = pipes[1], D = directory;
    const struct call calls[] = {
        CALL(read, WRITES, Z, P, 100), CALL(read, WRITES, R, P, 5), CALL(pread64, WRITES, F, P, 100, 0),
        CALL(write, READS, F, P, 100), CALL(write, READS, W, P, 100), CALL(pwrite64, READS, F, P, 100, 0),
        CALL(readv, READS, Z, P, 1), CALL(writev, READS, F, P, 1), CALL(preadv, READS, F, P, 1, 0),
        CALL(pwritev, READS, F, P, 1, 0), CALL(getdents64, WRITES, D, P, 1000),
        CALL(sendfile, WRITES | NULL_GOOD, F, Z, P, 10), CALL(fstat, WRITES, F, P),
        CALL(newfstatat, READS, CWD, P, GOOD, 0), CALL(newfstatat, WRITES, CWD, GOOD, P, 0),
        CALL(statx, READS, CWD, P, 0, 0x7ff, GOOD + 256), CALL(statx, WRITES, CWD, GOOD, 0, 0x7ff, P),
        CALL(statfs, READS, P, GOOD + 256), CALL(statfs, WRITES, GOOD, P), CALL(fstatfs, WRITES, F, P),
        CALL(openat, READS, CWD, P, O_RDONLY, 0), CALL(faccessat, READS, CWD, P, 0),
        CALL(truncate, READS, P, 0), CALL(chdir, READS, P), CALL(getcwd, WRITES, P, 100),
        CALL(mkdirat, READS, CWD, P, 0700), CALL(unlinkat, READS, CWD, P, 0),
        CALL(linkat, READS, CWD, P, CWD, GOOD, 0), CALL(linkat, READS, CWD, GOOD, CWD, P, 0),
        CALL(symlinkat, READS, P, CWD, GOOD), CALL(symlinkat, READS, GOOD, CWD, P),
        CALL(readlinkat, READS, CWD, P, GOOD + 256, 100), CALL(fchmodat, READS, CWD, P, 0600),
        CALL(fchownat, READS, CWD, P, 0, 0, 0), CALL(utimensat, READS | NULL_GOOD, CWD, GOOD, P, 0),
        CALL(utimensat, READS | NULL_GOOD, CWD, P, 0, 0), CALL(renameat2, READS, CWD, P, CWD, GOOD, 0),
        CALL(renameat2, READS, CWD, GOOD, CWD, P, 0), CALL(pipe2, WRITES, P, 0),
        CALL(ppoll, READS, P, 1, 0, 0, 0), CALL(ppoll, READS | NULL_GOOD, GOOD, 0, P, 0, 0),
        CALL(ppoll, READS | NULL_GOOD, GOOD, 0, GOOD + 1024, P, 8),
        CALL(pselect6, WRITES | NULL_GOOD, 10, P, 0, 0, GOOD + 1024, 0),
        CALL(pselect6, READS | NULL_GOOD, 0, 0, 0, 0, P, 0),
        CALL(ioctl, WRITES, R, 0x541b, P), CALL(memfd_create, READS, P, 0),
        CALL(execve, READS, P, GOOD + 512, GOOD + 512), CALL(execve, READS | NULL_GOOD, PROGRAM, P, GOOD + 512),
        CALL(execve, READS | NULL_GOOD, PROGRAM, GOOD + 512, P),
        CALL(rt_sigaction, READS | NULL_GOOD, SIGUSR1, P, 0, 8),
        CALL(rt_sigaction, WRITES | NULL_GOOD, SIGUSR1, 0, P, 8),
        CALL(rt_sigprocmask, READS | NULL_GOOD, SIG_BLOCK, P, 0, 8),
        CALL(rt_sigprocmask, WRITES | NULL_GOOD, SIG_BLOCK, 0, P, 8),
        CALL(rt_sigpending, WRITES, P, 8), CALL(rt_sigsuspend, READS, P, 8),
        CALL(rt_sigtimedwait, READS, P, 0, GOOD, 8), CALL(rt_sigtimedwait, READS | NULL_GOOD, GOOD, 0, P, 8),
        CALL(rt_sigqueueinfo, READS, (unsigned long)getpid(), SIGUSR1, P),
        CALL(sigaltstack, READS | NULL_GOOD, P, 0), CALL(sigaltstack, WRITES | NULL_GOOD, 0, P),
        CALL(nanosleep, READS, P, 0), CALL(clock_nanosleep, READS, CLOCK_MONOTONIC, 0, P, 0),
        CALL(clock_gettime, WRITES, CLOCK_MONOTONIC, P), CALL(clock_getres, WRITES | NULL_GOOD, 1, P),
        CALL(gettimeofday, WRITES | NULL_GOOD, P, 0), CALL(times, WRITES | NULL_GOOD, P),
        CALL(getitimer, WRITES, 0, P), CALL(setitimer, READS | NULL_GOOD, 1, P, 0),
        CALL(getrusage, WRITES, 0, P), CALL(prlimit64, WRITES | NULL_GOOD, 0, RLIMIT_CORE, 0, P),
        CALL(prlimit64, READS | NULL_GOOD, 0, RLIMIT_CORE, P, 0), CALL(uname, WRITES, P),
        CALL(sysinfo, WRITES, P), CALL(getrandom, WRITES, P, 16, 0),
        CALL(sched_getaffinity, WRITES, 0, 128, P), CALL(getcpu, WRITES | NULL_GOOD, P, 0, 0),
        CALL(futex, READS | ANY_ERROR, P, FUTEX_WAIT, 0, 0, 0, 0),
        CALL(futex, READS | NULL_GOOD, GOOD + 1024, FUTEX_WAIT, 1, P, 0, 0),
        CALL(mincore, WRITES, GOOD, 4096, P), CALL(prctl, READS, 15, P, 0, 0, 0),
        CALL(prctl, WRITES, 16, P, 0, 0, 0), CALL(wait4, NO_ERROR | ANY_ERROR, -1ul, P, WNOHANG, 0),
        CALL(set_robust_list, NO_ERROR, P, 24), CALL(set_tid_address, NO_ERROR, P),
        CALL(getgroups, NO_ERROR | ANY_ERROR, 10, P), CALL(process_madvise, ANY_ERROR, F, P, 1, 20, 0),
#if defined(__x86_64__)
        CALL(open, READS, P, 0, 0), CALL(stat, READS, P, GOOD + 256), CALL(stat, WRITES, GOOD, P),
        CALL(lstat, READS, P, GOOD + 256), CALL(access, READS, P, 0), CALL(pipe, WRITES, P),
        CALL(poll, READS, P, 1, 0), CALL(rename, READS, P, GOOD), CALL(mkdir, READS, P, 0700),
        CALL(rmdir, READS, P), CALL(creat, READS, P, 0600), CALL(unlink, READS, P),
        CALL(symlink, READS, GOOD, P), CALL(readlink, READS, P, GOOD + 256, 100),
        CALL(chmod, READS, P, 0600), CALL(time, WRITES | NULL_GOOD, P),
        CALL(arch_prctl, WRITES, 0x1003, P),
#endif
    };
    strcpy(good, "/tmp/bad-pointers");
    int count = sizeof calls / sizeof *calls, wrong = 0;
    for (int index = 0; index < count; index++)
        wrong += check(&calls[index]);
    // The list heads that the calls above have set are wild still.
    syscall(SYS_set_robust_list, good + 2048, 24);
    test_failures += wrong;
    CHECK(wrong == 0, "no call but gives EFAULT for 16 wild pointers");
    test_print("    %d calls", count);

    char *memory = test_map(2 * PAGE);
    STEP_EQUAL(mprotect(memory + PAGE, PAGE, PROT_NONE), 0);
    memset(memory, 'x', PAGE);
    FAILS(open(memory + PAGE - 10, O_RDONLY), EFAULT, "a path that runs into a hole");
    FAILS(syscall(SYS_fstat, file, memory + PAGE - 8), EFAULT, "a structure across the end of a mapping");
    FAILS(syscall(SYS_pipe2, memory + PAGE - 4, 0), EFAULT, "pipe2 across the end of a mapping");
    int next = dup(0);
    close(next);
    FAILS(syscall(SYS_pipe2, memory + PAGE - 4, 0), EFAULT, "pipe2 again");
    EQUAL(dup(0), next, "and it leaks no descriptors");
    CHECK(syscall(SYS_read, zero, memory, -1ul) == -1, "a length that wraps: read");
    CHECK(syscall(SYS_write, file, memory, -1ul) == -1, "a length that wraps: write");
    unsigned long pieces[4] = {(unsigned long)memory, 100, 0xffff800000000000, 100};
    long result = syscall(SYS_writev, file, pieces, 2);
    CHECK(result == 100 || (result == -1 && errno == EFAULT), "writev: the second piece is wild");
    EQUAL(syscall(SYS_read, zero, memory, 0), 0, "no length");
    pid_t child = CHILD(_exit(3));
    FAILS(waitpid(child, test_wild(0xffff800000000000), 0), EFAULT, "wait with a wild place for the status");
    DIES(SIGKILL, "a death with a wild place for the tid", {
        syscall(SYS_set_tid_address, 0xffff800000000000);
        kill(getpid(), SIGKILL);
    });
    EXITS(0, "an exit with a wild place for the tid", syscall(SYS_set_tid_address, 0xffff800000000000));
    EXITS(0, "an exit with a wild robust list", syscall(SYS_set_robust_list, 0xffff800000000000, 24));
    unlink("/tmp/bad-pointers");
    unlink(program);
    EXITS(4, "the process works on", _exit(4));
    return test_end();
}
