// The rules for single signals: which thread gets SIGPIPE, what becomes of stopped jobs without a
// shell, ignored stop signals, who may claim to be the kernel, and alternate stacks.

#include "test.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

static int ends[2];

struct writer {
    ssize_t (*write_to)(int);
    int takes;
};

// Writes to an end without a reader, in a thread of its own that blocks the signal.
static void *write_alone(void *argument) {
    const struct writer *how = argument;
    sigset_t set, pending;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    STEP_FAILS(how->write_to(ends[1]), EPIPE);
    sigpending(&pending);
    STEP(sigismember(&pending, SIGPIPE));
    if (how->takes) {
        siginfo_t info = {0};
        struct timespec now = {0, 0};
        STEP_EQUAL(sigtimedwait(&set, &info, &now), SIGPIPE);
        STEP(info.si_code == SI_USER && info.si_pid == getpid() && info.si_uid == getuid());
    }
    return 0;
}

static ssize_t write_one(int to) { return write(to, "x", 1); }
static ssize_t give_one(int to) {
    struct iovec one = {"x", 1};
    return vmsplice(to, &one, 1, 0);
}

static void broken_pipes(void) {
    static const struct {
        ssize_t (*write_to)(int);
        int is_socket;
        const char *text;
    } ways[] = {
        {write_one, 0, "a thread that writes to a pipe without a reader gets SIGPIPE alone"},
        {write_one, 1, "one that writes to a socket too"},
        {give_one, 0, "one that gives its memory to a pipe too"},
    };
    sigset_t set, pending;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    NEED(sigprocmask(SIG_BLOCK, &set, 0) == 0);
    for (int way = 0; way < 3; way++) {
        int before = test_failures;
        NEED((ways[way].is_socket ? socketpair(AF_UNIX, SOCK_STREAM, 0, ends) : pipe(ends)) == 0);
        close(ends[0]);
        for (int takes = 0; takes < 2; takes++) {
            struct writer how = {ways[way].write_to, takes};
            pthread_t thread;
            NEED(pthread_create(&thread, 0, write_alone, &how) == 0 && !pthread_join(thread, 0));
            sigpending(&pending);
            STEP(!sigismember(&pending, SIGPIPE));
        }
        close(ends[1]);
        ALL_STEPS(before, ways[way].text);
    }
    NEED(sigprocmask(SIG_UNBLOCK, &set, 0) == 0);
}

static void note(int signal) {
    char byte = signal == SIGHUP ? 'H' : 'C';
    (void)!write(ends[1], &byte, 1);
}

// A job stops; then its parent ends, which is the last that cares for it. `own_group` says whether
// the parent is in the job's group too.
static void stopped_job(int own_group, const char *text) {
    NEED(pipe(ends) == 0);
    pid_t *job = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(job != MAP_FAILED);
    pid_t parent = CHILD({
        if (own_group)
            setpgid(0, 0);
        pid_t child = fork();
        if (child == 0) {
            if (!own_group)
                setpgid(0, 0);
            signal(SIGHUP, note);
            signal(SIGCONT, note);
            raise(SIGSTOP);
            _exit(0);
        }
        int status;
        *job = child;
        STEP_EQUAL(waitpid(child, &status, WUNTRACED), child);
        STEP(WIFSTOPPED(status));
    });
    STEP_EQUAL(test_wait(parent), 0);
    struct pollfd news = {ends[0], POLLIN, 0};
    char got[2] = {0};
    int arrived = poll(&news, 1, 20000) == 1 && read(ends[0], got, 1) == 1 && read(ends[0], got + 1, 1) == 1;
    CHECK(arrived && got[0] + got[1] == 'H' + 'C', text);
    NEED(*job > 0);
    kill(*job, SIGKILL);
    while (waitpid(-1, 0, 0) > 0)
        ;
    close(ends[0]), close(ends[1]);
    munmap(job, PAGE);
}

static int is_pending(int signal) {
    sigset_t pending;
    sigpending(&pending);
    return sigismember(&pending, signal);
}

static void stop_signals(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTSTP);
    EXITS(0, "a pending stop signal that is ignored is discarded", {
        sigprocmask(SIG_BLOCK, &set, 0);
        raise(SIGTSTP);
        STEP(is_pending(SIGTSTP));
        signal(SIGTSTP, SIG_DFL);
        STEP(is_pending(SIGTSTP));
        signal(SIGTSTP, SIG_IGN);
        STEP(!is_pending(SIGTSTP));
    });
}

static long queue(pid_t process, pid_t thread, int code) {
    // The libraries do not agree on the names of its members.
    int info[32] = {SIGUSR1, 0, code, 0, getpid(), getuid()};
    return process ? syscall(SYS_rt_tgsigqueueinfo, process, thread, SIGUSR1, info)
                   : syscall(SYS_rt_sigqueueinfo, thread, SIGUSR1, info);
}

static void claims(void) {
    pid_t child = CHILD({ signal(SIGUSR1, SIG_IGN); pause(); });
    FAILS(queue(child, child, SI_USER), EPERM, "rt_tgsigqueueinfo: SI_USER to another process");
    FAILS(queue(child, child, -6), EPERM, "SI_TKILL too");
    FAILS(queue(0, child, SI_USER), EPERM, "rt_sigqueueinfo: SI_USER to another process");
    FAILS(queue(0, child, -6), EPERM, "SI_TKILL too, once more");
    FAILS(queue(-1, child, SI_USER), EINVAL, "rt_tgsigqueueinfo: a negative number");
    signal(SIGUSR1, SIG_IGN);
    WORKS(queue(getpid(), getpid(), SI_USER), "rt_tgsigqueueinfo: to itself all is allowed");
    WORKS(queue(0, getpid(), SI_USER), "rt_sigqueueinfo: the same");
    WORKS(queue(child, child, SI_QUEUE), "SI_QUEUE is allowed to others");
    kill(child, SIGKILL);
    test_wait(child);
}

enum { ALTERNATE = 16384, BELOW = 1 << 20 };

static volatile int depth;

static void nest(int signal) {
    if (++depth < 60)
        raise(signal);
}

static void stacks(void) {
    struct {
        void *base;
        int flags;
        size_t size;
    } stack = {test_wild(-1), SS_DISABLE, -1};
    WORKS(syscall(SYS_sigaltstack, &stack, 0), "SS_DISABLE ignores base and size");
    char *memory = test_map(BELOW + ALTERNATE);
#ifdef __aarch64__
    size_t minimum = 5120;
#else
    size_t minimum = 2048;
#endif
    stack.base = memory + BELOW;
    stack.flags = 0;
    stack.size = minimum - 1;
    FAILS(syscall(SYS_sigaltstack, &stack, 0), ENOMEM, "less than the smallest stack");
    stack.size = minimum;
    WORKS(syscall(SYS_sigaltstack, &stack, 0), "the smallest stack");
#ifdef __x86_64__
    DIES(SIGSEGV, "a frame that the alternate stack has no room for kills", {
        stack.size = ALTERNATE;
        STEP_EQUAL(syscall(SYS_sigaltstack, &stack, 0), 0);
        struct sigaction action = {.sa_handler = nest, .sa_flags = SA_ONSTACK | SA_NODEFER};
        sigaction(SIGUSR1, &action, 0);
        raise(SIGUSR1);
    });
#endif
    stack.flags = SS_DISABLE;
    NEED(syscall(SYS_sigaltstack, &stack, 0) == 0 && munmap(memory, BELOW + ALTERNATE) == 0);
}

int main(void) {
    test_start();
    broken_pipes();
    stop_signals();
    claims();
    stacks();
    stopped_job(0, "a stopped job without a parent that cares gets SIGHUP and SIGCONT");
    stopped_job(1, "so does one whose leader has ended");
    return test_end();
}
