// Threads with descriptors or a directory of their own, unshare, and what
// execve and close_range make of what is shared.

#include "test.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

enum { STACK = 64 * 1024, CLOSE_UNSHARE = 2, CLOSE_CLOEXEC = 4 };
enum { AS_THREAD = CLONE_VM | CLONE_SIGHAND | CLONE_THREAD };

static int file;

static volatile pid_t thread_id;
static volatile int thread_result;

static int begin(void *argument) {
    thread_result = ((int (*)(void *))(uintptr_t)argument)(0);
    syscall(SYS_exit, 0);
    return 0;
}

// Runs a function in a thread that shares what the flags say; gives its result.
static int run(int (*function)(void *), int flags) {
    char *stack = test_map(STACK);
    thread_id = -1;
    thread_result = -1;
    NEED(clone(begin, stack + STACK, flags | CLONE_CHILD_CLEARTID, (void *)(uintptr_t)function, 0, 0,
               &thread_id) > 0);
    for (int round = 0; round < 5000 && thread_id != 0; round++)
        test_sleep(1);
    STEP_EQUAL(thread_id, 0);
    munmap(stack, STACK);
    return thread_result;
}

// The same for a process.
static int run_process(int (*function)(void *), int flags) {
    char *stack = test_map(STACK);
    int status = test_wait(clone(function, stack + STACK, flags | SIGCHLD, 0));
    munmap(stack, STACK);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int is_open(int descriptor) { return syscall(SYS_fcntl, descriptor, F_GETFD) >= 0; }

static int close_it(void *argument) {
    (void)argument;
    return syscall(SYS_close, file);
}

static int open_another(void *argument) {
    (void)argument;
    return syscall(SYS_dup, 1);
}

static int go_to_dev(void *argument) {
    (void)argument;
    syscall(SYS_umask, 0070);
    return syscall(SYS_chdir, "/dev");
}

static int unshare_and_close(void *argument) {
    (void)argument;
    return syscall(SYS_unshare, CLONE_FILES) == 0 && close_it(0) == 0 && !is_open(file) ? 0 : 1;
}

static int unshare_and_go(void *argument) {
    (void)argument;
    return syscall(SYS_unshare, CLONE_FS) == 0 && go_to_dev(0) == 0 ? 0 : 1;
}

static int close_all_but_three(void *argument) {
    (void)argument;
    return syscall(SYS_close_range, 3, ~0U, CLOSE_UNSHARE) == 0 && !is_open(file) ? 0 : 1;
}

static int mark_all(void *argument) {
    (void)argument;
    return syscall(SYS_close_range, 3, ~0U, CLOSE_UNSHARE | CLOSE_CLOEXEC) == 0 &&
                   syscall(SYS_fcntl, file, F_GETFD) == FD_CLOEXEC
               ? 0
               : 1;
}

static int unshare_memory(void *argument) {
    (void)argument;
    return syscall(SYS_unshare, CLONE_VM) == -1 && syscall(SYS_unshare, CLONE_SIGHAND) == -1 &&
                   syscall(SYS_unshare, CLONE_THREAD) == -1
               ? 0
               : 1;
}

static int execute(void *argument) {
    (void)argument;
    execl("/proc/self/exe", "threads_files", "executed", (char *)0);
    return 99;
}

static int execute_in_thread(void *argument) {
    (void)argument;
    run(execute, AS_THREAD | CLONE_FS);
    return 98;
}

static int have_few(void *argument) {
    (void)argument;
    struct rlimit limit = {3, 100};
    setrlimit(RLIMIT_NOFILE, &limit);
    return dup(1) == -1 && errno == EMFILE ? 0 : 1;
}

static int is_in(const char *wanted) {
    char directory[200];
    return getcwd(directory, sizeof directory) && strcmp(directory, wanted) == 0;
}

int main(int count, char **arguments) {
    (void)arguments;
    if (count > 1) {
        // The table that the parent shared with us is only ours now.
        for (int descriptor = 3; descriptor < 100; descriptor++)
            close(descriptor);
        return is_in("/tmp") ? 0 : 1;
    }
    test_start();
    file = dup(1);
    NEED(file >= 0 && chdir("/tmp") == 0);
    umask(022);

    EQUAL(run(close_it, AS_THREAD | CLONE_FS), 0, "a thread without CLONE_FILES: closes");
    CHECK(is_open(file), "its own descriptor");
    int other = run(open_another, AS_THREAD | CLONE_FS);
    CHECK(other > file && !is_open(other), "what it opens is its own");
    other = run(open_another, AS_THREAD | CLONE_FS | CLONE_FILES);
    CHECK(is_open(other), "with CLONE_FILES it is shared");
    close(other);
    EQUAL(run(go_to_dev, AS_THREAD | CLONE_FILES), 0, "a thread without CLONE_FS: changes");
    CHECK(is_in("/tmp") && umask(022) == 022, "its own directory and umask");
    EQUAL(run(go_to_dev, AS_THREAD | CLONE_FILES | CLONE_FS), 0, "with CLONE_FS: changes");
    CHECK(is_in("/dev") && umask(022) == 0070, "those of all");
    NEED(chdir("/tmp") == 0);
    EQUAL(run(close_it, AS_THREAD), 0, "a thread that shares neither");
    CHECK(is_open(file), "keeps both apart");

    EQUAL(run(unshare_and_close, AS_THREAD | CLONE_FILES | CLONE_FS), 0, "unshare(CLONE_FILES)");
    CHECK(is_open(file), "parts a thread from the others");
    EQUAL(run(unshare_and_go, AS_THREAD | CLONE_FILES | CLONE_FS), 0, "unshare(CLONE_FS)");
    CHECK(is_in("/tmp") && umask(022) == 022, "does so too");
    EQUAL(run_process(unshare_and_close, CLONE_FILES), 0, "unshare(CLONE_FILES) in a process");
    CHECK(is_open(file), "parts it from its parent");
    EQUAL(run_process(unshare_and_go, CLONE_FS), 0, "unshare(CLONE_FS) in a process");
    CHECK(is_in("/tmp"), "does so too");
    WORKS(unshare(0), "unshare of nothing");
    WORKS(unshare(CLONE_FILES | CLONE_FS), "unshare of what nobody else has");
    CHECK(is_open(file), "changes nothing");
    WORKS(unshare(CLONE_VM | CLONE_SIGHAND | CLONE_THREAD), "one thread shares no memory");
    FAILS(unshare(CLONE_SETTLS), EINVAL, "what unshare does not know");
    EQUAL(run(unshare_memory, AS_THREAD | CLONE_FILES | CLONE_FS), 0,
          "one of two threads cannot leave");
    EQUAL(run_process(unshare_memory, CLONE_VM | CLONE_SIGHAND), 1,
          "a process that shares its memory may unshare its only thread");

    EQUAL(run(close_all_but_three, AS_THREAD | CLONE_FILES | CLONE_FS), 0,
          "close_range with CLOSE_RANGE_UNSHARE");
    CHECK(is_open(file), "closes what is the thread's own");
    EQUAL(run_process(mark_all, CLONE_FILES), 0, "and with CLOSE_RANGE_CLOEXEC");
    EQUAL(fcntl(file, F_GETFD), 0, "marks it");
    FAILS(syscall(SYS_close_range, 5, 4, CLOSE_UNSHARE), EINVAL, "the wrong way round");

    EQUAL(run_process(execute, CLONE_FILES | CLONE_FS), 0, "execve");
    CHECK(is_open(file), "leaves the descriptors to whoever shared them");
    EQUAL(run_process(execute_in_thread, CLONE_FILES | CLONE_FS), 0, "execve in another thread");
    CHECK(is_open(file), "does so too");

    pid_t child = CHILD({
        close(file);
        NEED(chdir("/") == 0);
    });
    STEP_EQUAL(test_wait(child), 0);
    CHECK(is_open(file) && is_in("/tmp"), "fork copies both");

    struct rlimit limit = {file + 2, 100};
    EXITS(0, "each process has its own limit of shared descriptors", {
        STEP(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        STEP_EQUAL(run_process(have_few, CLONE_FILES), 0);
        STEP(dup(1) == file + 1);
    });
    return test_end();
}
