// userfaultfd: the effect of closing its descriptor on waiting threads, and descriptors of other
// files. Passes on Linux as root.

#include "userfault.h"

#include <sched.h>

#define PAGES 16

static char *memory;
static volatile int waiting;

// Touches a page; the first byte that it finds.
static void *touch(void *at) {
    __atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
    return (void *)(intptr_t)(*(volatile char *)at + 1);
}

// The kernel's own copy waits.
static void *write_page(void *at) {
    int ends[2];
    NEED(pipe(ends) == 0);
    __atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
    intptr_t written = write(ends[1], at, PAGE);
    close(ends[0]);
    close(ends[1]);
    return (void *)written;
}

static void *unmap_page(void *at) {
    __atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
    return (void *)(intptr_t)(munmap(at, PAGE) + 1);
}

static void *fork_once(void *unused UNUSED) {
    __atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
    // A table of its own would keep the descriptor open.
    pid_t child = syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
    // Nobody serves the child's memory either.
    if (child == 0)
        _exit(memory[10 * PAGE] != 0);
    int status = -1;
    waitpid(child, &status, 0);
    return (void *)(intptr_t)(status + 1);
}

static pthread_t start(void *(*work)(void *), void *argument) {
    pthread_t thread;
    NEED(pthread_create(&thread, 0, work, argument) == 0);
    return thread;
}

static intptr_t result(pthread_t thread) {
    void *value;
    NEED(pthread_join(thread, &value) == 0);
    return (intptr_t)value;
}

static int open_and_register(uint64_t features) {
    waiting = 0;
    memory = uf_map(PAGES * PAGE);
    int fd = uf_open(O_CLOEXEC, features);
    NEED(fd >= 0 && uf_register(fd, memory, PAGES * PAGE, MISSING) == 0);
    return fd;
}

// Waits until `count` threads are on their way, and then asleep.
static void until(int count) {
    while (waiting < count)
        test_sleep(1);
    test_sleep(50);
}

static void closing(void) {
    int fd = open_and_register(EVENT_UNMAP);
    pthread_t threads[] = {start(touch, memory), start(touch, memory + PAGE),
                           start(write_page, memory + 2 * PAGE), start(unmap_page, memory + 15 * PAGE)};
    until(4);
    // One message is read, and its fault not served.
    EQUAL(uf_next(fd).event, FAULT, "a fault");
    EQUAL(close(fd), 0, "close with three faults and an event");
    EQUAL(result(threads[0]), 1, "a fault goes on, and finds zeroes");
    EQUAL(result(threads[1]), 1, "another one");
    EQUAL(result(threads[2]), (intptr_t)PAGE, "a system call goes on");
    EQUAL(result(threads[3]), 1, "a change goes on");
    memory[5 * PAGE] = 1;
    CHECK(memory[5 * PAGE] == 1, "nobody waits any more");
}

static void closing_beside_a_fork(void) {
    int fd = open_and_register(EVENT_FORK);
    pthread_t forks = start(fork_once, 0), faults = start(touch, memory);
    until(2);
    close(fd);
    EQUAL(result(forks), 1, "a fork whose message nobody has read goes on");
    EQUAL(result(faults), 1, "and a fault beside it");
}

// The handler is another process, with the only descriptor.
static void dying(void) {
    int fd = open_and_register(0), ready[2];
    NEED(pipe(ready) == 0);
    char *pages = uf_map(2 * PAGE);
    pages[0] = 7;
    pid_t handler = fork();
    if (handler == 0) {
        char go;
        NEED(read(ready[0], &go, 1) == 1);
        struct uf_message message = uf_next(fd);
        char *at = (char *)(uintptr_t)(message.fault.address & ~(PAGE - 1));
        NEED(uf_copy(fd, at, pages, PAGE, 0) == (int64_t)PAGE);
        // As on Linux, only their own process can move pages.
        NEED(uf_move(fd, memory + 8 * PAGE, pages, PAGE, 0) == -EINVAL);
        uf_next(fd);
        _exit(0);
    }
    close(fd);
    pthread_t threads[] = {start(touch, memory), start(touch, memory + PAGE), start(touch, memory + 2 * PAGE)};
    until(3);
    NEED(write(ready[1], "", 1) == 1);
    int status = -1;
    waitpid(handler, &status, 0);
    EQUAL(status, 0, "a handler serves one fault, reads another, and dies");
    intptr_t sum = result(threads[0]) + result(threads[1]) + result(threads[2]);
    EQUAL(sum, 8 + 1 + 1, "all three go on");
}

static void no_descriptors(void) {
    int fd = open_and_register(0), other = uf_open(O_CLOEXEC, 0), ends[2];
    NEED(other >= 0 && pipe(ends) == 0);
    char *source = uf_map(4 * PAGE);
    source[0] = 1;
    // As on Linux, that may be any of the process's.
    EQUAL(uf_copy(other, memory + PAGE, source, PAGE, 0), (int64_t)PAGE, "copy: memory of another userfaultfd");
    EQUAL(uf_zero(other, memory + 2 * PAGE, PAGE, 0), (int64_t)PAGE, "zeroes: memory of another userfaultfd");
    EQUAL(uf_copy(other, source + PAGE, source, PAGE, 0), -ENOENT, "copy: memory of none");
    struct uf_register both = {.range = {(uintptr_t)memory + 8 * PAGE, PAGE}, .mode = MISSING | PROTECTED};
    STEP_EQUAL(ioctl(fd, UF_REGISTER, &both), 0);
    EQUAL(uf_protect(other, memory + 8 * PAGE, PAGE, 1), 0, "protect: memory of another userfaultfd");
    FAILS(uf_protect(other, source, PAGE, 1), ENOENT, "protect: memory of none");
    EQUAL(uf_move(other, memory, source, PAGE, 0), -EINVAL, "move: memory of another userfaultfd");
    FAILS(uf_register(other, memory, PAGE, MISSING), EBUSY, "register: memory of another userfaultfd");
    FAILS(ioctl(fd, UF_COPY, 8), EFAULT, "a structure that is nowhere");
    FAILS(ioctl(fd, UF_NEW, 0), EINVAL, "an unknown request");
    EQUAL(uf_copy(ends[0], memory, source, PAGE, 0), -ENOTTY, "copy by a pipe");
    EQUAL(uf_move(ends[0], memory, source, PAGE, 0), -ENOTTY, "move by a pipe");
    close(fd);
    close(other);
    EQUAL(uf_copy(fd, memory, source, PAGE, 0), -EBADF, "copy by a closed descriptor");
    EQUAL(uf_zero(fd, memory, PAGE, 0), -EBADF, "zeroes by a closed descriptor");
    EQUAL(uf_move(fd, memory, source, PAGE, 0), -EBADF, "move by a closed descriptor");
    FAILS(uf_wake(fd, memory, PAGE), EBADF, "wake by a closed descriptor");
    CHECK(memory[0] == 0 && source[0] == 1, "nothing has changed");
}

int main(void) {
    test_start();
    closing();
    closing_beside_a_fork();
    dying();
    no_descriptors();
    return test_end();
}
