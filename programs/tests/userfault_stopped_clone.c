// A thread clones another one while its process stops: the new thread stops,
// too, and both go on afterwards. Passes on Linux as root.

#include "userfault.h"

#include <sched.h>

enum { STACK = 64 * 1024 };
enum { AS_THREAD = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM };

static volatile struct {
    int fd, turns, may_end;
} *shared;

static int count_turns(void *argument) {
    (void)argument;
    while (!shared->may_end)
        shared->turns++;
    syscall(SYS_exit, 0);
    return 0;
}

// Sleeps in clone until the page for the number of the new thread exists.
static int clone_another(void *page) {
    clone(count_turns, test_map(STACK) + STACK, AS_THREAD | CLONE_PARENT_SETTID, 0, page);
    syscall(SYS_exit, 0);
    return 0;
}

static int process(void *argument) {
    (void)argument;
    char *page = uf_map(PAGE);
    int fd = uf_open(O_CLOEXEC, UNPOPULATED);
    NEED(fd >= 0 && uf_register(fd, page, PAGE, MISSING) == 0);
    NEED(clone(clone_another, test_map(STACK) + STACK, AS_THREAD, page) > 0);
    shared->fd = fd;
    while (!shared->may_end)
        test_sleep(1);
    _exit(0);
}

int main(void) {
    test_start();
    shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED((void *)shared != MAP_FAILED);
    pid_t id = clone(process, test_map(STACK) + STACK, CLONE_FILES | SIGCHLD, 0);
    NEED(id > 0);
    while (shared->fd == 0)
        test_sleep(1);
    struct uf_message message = uf_next(shared->fd);
    EQUAL(message.event, FAULT, "a thread sleeps in clone");
    int status;
    STEP_EQUAL(kill(id, SIGSTOP), 0);
    test_sleep(100);
    uintptr_t page = message.fault.address & ~(PAGE - 1);
    STEP_EQUAL(uf_zero(shared->fd, (void *)page, PAGE, 0), (int64_t)PAGE);
    EQUAL(waitpid(id, &status, WUNTRACED), id, "its process stops");
    CHECK(WIFSTOPPED(status), "by the signal");
    int seen = shared->turns;
    test_sleep(200);
    EQUAL(shared->turns, seen, "the new thread does not run");
    STEP_EQUAL(kill(id, SIGCONT), 0);
    while (shared->turns == seen)
        test_sleep(1);
    shared->may_end = 1;
    EQUAL(waitpid(id, &status, 0), id, "it runs once the process goes on");
    EQUAL(status, 0, "which then ends");
    return test_end();
}
