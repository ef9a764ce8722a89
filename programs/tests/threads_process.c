// Threads and their process: exit, exec, fork and signals with several
// threads, and raw clone.

#include "test.h"

#include <pthread.h>
#include <sched.h>

static volatile int running, handled_by;
static int pipes[2];

static void *spin(void *argument) {
    running++;
    for (;;)
        __asm__ volatile("" ::: "memory");
    return argument;
}

static void *nothing(void *argument) { return argument; }

static void *sleep_long(void *argument) {
    (void)argument;
    running++;
    test_sleep(50000);
    return 0;
}

static void *read_long(void *argument) {
    char one;
    (void)argument;
    running++;
    read(pipes[0], &one, 1);
    return 0;
}

static void *exit_process(void *argument) {
    exit((int)(intptr_t)argument);
}

static void *exec_process(void *argument) {
    char *list[] = {"name", "exec", argument, 0};
    char *none[] = {0};
    execve("/proc/self/exe", list, none);
    _exit(99);
}

static void *fork_in_thread(void *argument) {
    (void)argument;
    int status = test_wait(CHILD({
        STEP_EQUAL(syscall(SYS_gettid), getpid());
        pthread_t thread;
        STEP_EQUAL(pthread_create(&thread, 0, nothing, 0), 0);
        STEP_EQUAL(pthread_join(thread, 0), 0);
    }));
    return (void *)(intptr_t)status;
}

static void *crash(void *argument) {
    *(volatile int *)argument = 1;
    return 0;
}

static void *last_words(void *argument) {
    (void)argument;
    test_sleep(30);
    _exit(12);
}

static void start(void *(*function)(void *), void *argument) {
    pthread_t thread;
    NEED(pthread_create(&thread, 0, function, argument) == 0);
}

static void start_others(void) {
    start(spin, 0);
    start(sleep_long, 0);
    start(read_long, 0);
    while (running < 3)
        sched_yield();
}

static void note(int signal) {
    (void)signal;
    handled_by = syscall(SYS_gettid);
}

static volatile pid_t other;
static void *be_signaled(void *argument) {
    (void)argument;
    other = syscall(SYS_gettid);
    while (!handled_by)
        test_sleep(1);
    return 0;
}

// A thread without a libc: it writes a word and exits; the kernel clears its
// tid and wakes the waiter there.
static volatile int word, tid_place;
static int raw_thread(void *argument) {
    word = (int)(intptr_t)argument;
    syscall(SYS_exit, 0);
    return 0;
}

int main(int count, char **arguments) {
    test_start();
    if (count == 2) {
        start(nothing, 0);
        pthread_exit(0);
    }
    if (count > 2) {
        // After execve from a second thread: the pid stays, the tid is the pid.
        STEP_EQUAL(getpid(), atoi(arguments[2]));
        STEP_EQUAL(syscall(SYS_gettid), getpid());
        return test_end();
    }
    NEED(pipe(pipes) == 0);
    EXITS(3, "exit_group ends threads that spin, sleep and read", { start_others(); _exit(3); });
    EXITS(4, "exit from a second thread", {
        start_others();
        start(exit_process, (void *)4);
        pause();
    });
    DIES(SIGKILL, "SIGKILL ends all threads", { start_others(); kill(getpid(), SIGKILL); pause(); });
    DIES(SIGSEGV, "a fault of one thread ends all", {
        start_others();
        start(crash, test_wild(16));
        pause();
    });
    EXITS(12, "the first thread exits, the process lives on", {
        start(last_words, 0);
        pthread_exit(0);
    });
    // In a fresh program: musl's first thread cannot leave a forked process.
    EXITS(0, "the process ends with its last thread", {
        char *list[] = {"name", "last", 0};
        execve("/proc/self/exe", list, list + 2);
        _exit(99);
    });
    EXITS(0, "execve from the first of several threads", {
        char pid[20];
        snprintf(pid, 20, "%d", getpid());
        start_others();
        exec_process(pid);
    });
    EXITS(0, "execve from a second thread", {
        static char pid[20];
        snprintf(pid, 20, "%d", getpid());
        start_others();
        start(exec_process, pid);
        pause();
    });
    pthread_t thread;
    void *result = (void *)1;
    NEED(pthread_create(&thread, 0, fork_in_thread, 0) == 0);
    pthread_join(thread, &result);
    EQUAL((intptr_t)result, 0, "fork in a thread copies this thread alone");

    signal(SIGUSR1, note);
    NEED(pthread_create(&thread, 0, be_signaled, 0) == 0);
    while (!other)
        test_sleep(1);
    CHECK(other != getpid(), "a thread has a tid of its own");
    WORKS(syscall(SYS_tgkill, getpid(), other, SIGUSR1), "tgkill");
    pthread_join(thread, 0);
    EQUAL(handled_by, other, "the thread itself handles it");
    FAILS(syscall(SYS_tgkill, getpid(), 999999, SIGUSR1), ESRCH, "tgkill: no such thread");
    FAILS(syscall(SYS_tgkill, -1, other, SIGUSR1), EINVAL, "tgkill: a bad process");
    int before = test_failures, round = 0;
    while (syscall(SYS_tkill, other, 0) == 0 && round++ < 1000)
        test_sleep(1);
    STEP_FAILS(syscall(SYS_tkill, other, 0), ESRCH);
    ALL_STEPS(before, "the tid of an ended thread is gone");

    char *stack = test_map(64 * 1024);
    tid_place = -1;
    pid_t raw = clone(raw_thread, stack + 64 * 1024,
                      CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
                          CLONE_SYSVSEM | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID,
                      (void *)5, &tid_place, 0, &tid_place);
    CHECK(raw > 0, "raw clone makes a thread");
    while (tid_place != 0) {
        int seen = tid_place;
        if (seen != 0)
            test_futex(&tid_place, FUTEX_WAIT, seen, 0, 0, 0);
    }
    EQUAL(word, 5, "it runs, its tid is cleared and the waiter woken at its exit");
    FAILS(waitpid(raw, 0, __WALL), ECHILD, "a thread is no child");
    return test_end();
}
