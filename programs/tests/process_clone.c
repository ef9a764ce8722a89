// Raw clone: flags by which processes share what they have, and the places
// where tids are written.

#include "test.h"

#include <sched.h>
#include <sys/prctl.h>

#define STACK (64 * 1024)

static volatile int shared;
static int pipes[2];
static pid_t noted;

static int store(void *argument) {
    shared = (int)(intptr_t)argument;
    return 6;
}

static int close_pipe(void *argument) {
    (void)argument;
    return close(pipes[0]) == 0 ? 0 : 1;
}

static int change_directory(void *argument) {
    (void)argument;
    return chdir("/dev") == 0 ? 0 : 1;
}

static int ignore_signal(void *argument) {
    (void)argument;
    return signal(SIGUSR1, SIG_IGN) == SIG_ERR;
}

static int say_parent(void *argument) {
    (void)argument;
    noted = getppid();
    return 0;
}

static int say_tid(void *argument) {
    return *(pid_t *)argument == syscall(SYS_gettid) ? 0 : 1;
}

static int spin(void *argument) {
    for (;;)
        __asm__ volatile("" ::: "memory");
    return argument == 0;
}

static int run(int (*function)(void *), int flags, void *argument) {
    char *stack = test_map(STACK);
    pid_t child = clone(function, stack + STACK, flags | SIGCHLD, argument);
    NEED(child > 0);
    int status = test_wait(child);
    munmap(stack, STACK);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The word at this address is cleared at the end of a thread, if another one
// could see that in its own memory.
static volatile pid_t *word_of_end;

static int end_with_word(void *argument) {
    (void)argument;
    syscall(SYS_set_tid_address, word_of_end);
    return 0;
}

static void words_of_ends(void) {
    word_of_end = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(word_of_end != MAP_FAILED);
    *word_of_end = 77;
    STEP_EQUAL(run(end_with_word, 0, 0), 0);
    EQUAL(*word_of_end, 77, "the last user of a memory leaves the word of its end");
    STEP_EQUAL(run(end_with_word, CLONE_VM, 0), 0);
    EQUAL(*word_of_end, 0, "a user of shared memory clears it");
}

int main(void) {
    test_start();
    words_of_ends();
    EQUAL(run(store, 0, (void *)5), 6, "clone without CLONE_VM: runs");
    EQUAL(shared, 0, "clone without CLONE_VM: memory is not shared");
    EQUAL(run(store, CLONE_VM, (void *)5), 6, "clone with CLONE_VM: runs");
    EQUAL(shared, 5, "clone with CLONE_VM: memory is shared");
    EQUAL(run(store, CLONE_VM | CLONE_VFORK, (void *)9), 6, "clone with CLONE_VFORK: runs");
    EQUAL(shared, 9, "clone with CLONE_VFORK: memory is shared");

    NEED(pipe(pipes) == 0);
    STEP_EQUAL(run(close_pipe, 0, 0), 0);
    CHECK(fcntl(pipes[0], F_GETFD) >= 0, "without CLONE_FILES: descriptors are copied");
    STEP_EQUAL(run(close_pipe, CLONE_FILES, 0), 0);
    FAILS(fcntl(pipes[0], F_GETFD), EBADF, "with CLONE_FILES: descriptors are shared");
    close(pipes[1]);

    char directory[100];
    NEED(chdir("/tmp") == 0);
    STEP_EQUAL(run(change_directory, 0, 0), 0);
    CHECK(strcmp(getcwd(directory, 100), "/tmp") == 0, "without CLONE_FS: the directory is kept");
    STEP_EQUAL(run(change_directory, CLONE_FS, 0), 0);
    CHECK(strcmp(getcwd(directory, 100), "/dev") == 0, "with CLONE_FS: the directory is shared");

    struct sigaction action;
    STEP_EQUAL(run(ignore_signal, CLONE_VM, 0), 0);
    sigaction(SIGUSR1, 0, &action);
    CHECK(action.sa_handler == SIG_DFL, "without CLONE_SIGHAND: handlers are copied");
    STEP_EQUAL(run(ignore_signal, CLONE_VM | CLONE_SIGHAND, 0), 0);
    sigaction(SIGUSR1, 0, &action);
    CHECK(action.sa_handler == SIG_IGN, "with CLONE_SIGHAND: handlers are shared");

    STEP_EQUAL(run(say_parent, CLONE_VM, 0), 0);
    EQUAL(noted, getpid(), "the parent is the caller");
    pid_t parent = getppid();
    STEP_EQUAL(run(say_parent, CLONE_VM, 0), 0);
    if (getpid() != 1) {
        char *stack = test_map(STACK);
        pid_t sibling = clone(say_parent, stack + STACK, CLONE_VM | CLONE_PARENT | SIGCHLD, 0);
        for (int round = 0; round < 1000 && noted != parent; round++)
            test_sleep(1);
        EQUAL(noted, parent, "CLONE_PARENT: the caller's parent");
        FAILS(waitpid(sibling, 0, 0), ECHILD, "CLONE_PARENT: no child of the caller");
    }

    volatile pid_t written = 0, cleared = 0;
    char *stack = test_map(STACK);
    pid_t child = clone(say_tid, stack + STACK,
                        CLONE_VM | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD,
                        (void *)&written, &written, 0, &cleared);
    NEED(child > 0);
    EQUAL(written, child, "CLONE_PARENT_SETTID writes the tid");
    EXITS(0, "the child of a fork is a process", {
        pid_t inner = CHILD(_exit(0));
        STEP_EQUAL(test_wait(inner), 0);
    });
    EQUAL(WEXITSTATUS(test_wait(child)), 0, "the child finds its tid there");
    static volatile pid_t place;
    place = 1234;
    child = clone(say_tid, stack + STACK, CLONE_CHILD_SETTID | SIGCHLD, (void *)&place, 0, 0, &place);
    EQUAL(WEXITSTATUS(test_wait(child)), 0, "CLONE_CHILD_SETTID writes the tid in the child");
    EQUAL(place, 1234, "and not in the parent, whose memory is another");

    // In shared memory it never faults, so it enters the kernel only when that interrupts it.
    child = clone(spin, stack + STACK, CLONE_VM | SIGCHLD, 0);
    NEED(child > 0);
    STEP_EQUAL(kill(child, SIGKILL), 0);
    EQUAL(test_wait(child), SIGKILL, "a child is killed before it runs");

    child = clone(store, stack + STACK, CLONE_VM, (void *)3);
    NEED(child > 0);
    FAILS(waitpid(child, 0, 0), ECHILD, "a child without a signal is not for plain wait");
    EQUAL(waitpid(child, 0, __WALL), child, "but for __WALL");
    static const int signals[] = {65, 128, 255};
    for (int index = 0; index < 3; index++) {
        child = clone(store, stack + STACK, CLONE_VM | signals[index], (void *)3);
        CHECK(child > 0, "a number that is no signal");
        STEP_FAILS(waitpid(child, 0, 0), ECHILD);
        EQUAL(waitpid(child, 0, __WCLONE), child, "tells nothing, and __WCLONE finds the child");
    }
    FAILS(clone(store, stack + STACK, CLONE_SIGHAND | SIGCHLD, 0), EINVAL,
          "CLONE_SIGHAND needs CLONE_VM");
    FAILS(clone(store, stack + STACK, CLONE_THREAD | CLONE_VM | SIGCHLD, 0), EINVAL,
          "CLONE_THREAD needs CLONE_SIGHAND");
    FAILS(syscall(SYS_clone, CLONE_FS | CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0), EINVAL,
          "CLONE_FS and CLONE_NEWNS exclude each other");
    return test_end();
}
