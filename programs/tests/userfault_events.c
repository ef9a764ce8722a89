// userfaultfd: messages about forks, moves, dropped contents and unmapping; signals and kills of
// waiting threads; thread numbers, exact addresses, SIGBUS. Passes on Linux as root.

#include "userfault.h"

#include <sys/resource.h>

#define PAGES 64

static int fd;
static char *memory, *page_of_ones;

static void *fork_once(void *result) {
    pid_t child = fork();
    if (child == 0)
        _exit(memory[5 * PAGE] == 0 ? 7 : 8);
    int status = 0;
    NEED(waitpid(child, &status, 0) == child);
    *(int *)result = WEXITSTATUS(status);
    return 0;
}

static void *unmap(void *at) {
    STEP_EQUAL(munmap(at, 2 * PAGE), 0);
    return 0;
}

static volatile int number;
static void *discard(void *at) {
    number = syscall(SYS_gettid);
    STEP_EQUAL(madvise(at, 2 * PAGE, MADV_DONTNEED), 0);
    return 0;
}

static char *target;
static void *move(void *at) {
    void *there = mremap(at, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target);
    STEP(there == target);
    return 0;
}

static void *touch(void *at) {
    number = syscall(SYS_gettid);
    *(volatile char *)at;
    return 0;
}

// Whether /proc shows the thread, under its own number, in a sleep that no signal ends.
static int waits_for_good(int thread) {
    char path[64], text[4096], line[64];
    snprintf(path, sizeof path, "/proc/%d/status", thread);
    NEED(test_read_file(path, text, sizeof text) > 0);
    snprintf(line, sizeof line, "\nPid:\t%d\n", thread);
    return strstr(text, "State:\tD") && strstr(text, line);
}

// A message about a change, during which nothing can be filled.
static struct uf_message change(void *(*what)(void *), void *argument, pthread_t *thread) {
    NEED(pthread_create(thread, 0, what, argument) == 0);
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    NEED(poll(&polled, 1, 5000) == 1);
    EQUAL(uf_copy(fd, memory + 60 * PAGE, page_of_ones, PAGE, 0), -EAGAIN, "copy: while memory changes");
    EQUAL(uf_zero(fd, memory + 60 * PAGE, PAGE, 0), -EAGAIN, "zeropage: while memory changes");
    if (what == discard) {
        // On another CPU, the thread may still be on its way from the message to its sleep.
        while (!waits_for_good(number))
            sched_yield();
        CHECK(waits_for_good(number), "/proc of a thread that waits for a reader");
    }
    if (what == fork_once) {
        // Without a descriptor for the child's, the message stays.
        struct rlimit limit, none;
        NEED(getrlimit(RLIMIT_NOFILE, &limit) == 0);
        none = limit;
        none.rlim_cur = fd + 1;
        NEED(setrlimit(RLIMIT_NOFILE, &none) == 0);
        struct uf_message message;
        FAILS(read(fd, &message, sizeof message), EMFILE, "no descriptor is left");
        NEED(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        EQUAL(uf_zero(fd, memory + 60 * PAGE, PAGE, 0), -EAGAIN, "the fork still waits");
    }
    return uf_next(fd);
}

static volatile int alarms;
static void on_signal(int signal) {
    (void)signal;
    alarms++;
}

static sigjmp_buf back;
static void on_bus(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)info;
    (void)context;
    siglongjmp(back, 1);
}

int main(void) {
    test_start();
    memory = uf_map(PAGES * PAGE);
    target = uf_map(4 * PAGE);
    page_of_ones = uf_map(PAGE);
    memset(page_of_ones, 1, PAGE);
    fd = uf_open(O_NONBLOCK, EVENT_FORK | EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP | THREAD_ID);
    CHECK(fd >= 0, "a monitor");
    EQUAL(uf_register(fd, memory, PAGES * PAGE, MISSING), 0, "register");
    pthread_t thread;
    struct uf_message message;

    int status = 0;
    message = change(fork_once, &status, &thread);
    EQUAL(message.event, FORK, "a fork");
    int child = message.child;
    CHECK(child > fd, "the child's descriptor");
    CHECK(fcntl(child, F_GETFL) & O_NONBLOCK, "it inherits how reads wait");
    EQUAL(fcntl(child, F_GETFD), 0, "and what becomes of it in exec");
    fcntl(child, F_SETFL, 0);
    message = uf_next(child);
    EQUAL(message.event, FAULT, "a fault of the child");
    EQUAL(message.fault.address, (uintptr_t)memory + 5 * PAGE, "its address");
    EQUAL(uf_zero(child, memory + 5 * PAGE, PAGE, 0), (int64_t)PAGE, "zeroes for the child");
    pthread_join(thread, 0);
    EQUAL(status, 7, "the child has them");
    EQUAL(uf_zero(child, memory + 6 * PAGE, PAGE, 0), -ESRCH, "the child is gone");
    close(child);

    message = change(unmap, memory + 10 * PAGE, &thread);
    EQUAL(message.event, UNMAP, "an unmapping");
    EQUAL(message.range.start, (uintptr_t)memory + 10 * PAGE, "from here");
    EQUAL(message.range.end, (uintptr_t)memory + 12 * PAGE, "to here");
    pthread_join(thread, 0);

    EQUAL(uf_copy(fd, memory + 20 * PAGE, page_of_ones, PAGE, 0), (int64_t)PAGE, "a page");
    message = change(discard, memory + 20 * PAGE, &thread);
    EQUAL(message.event, REMOVE, "dropped contents");
    EQUAL(message.range.end - message.range.start, 2 * PAGE, "two pages");
    pthread_join(thread, 0);
    EQUAL(uf_copy(fd, memory + 20 * PAGE, page_of_ones, PAGE, 0), (int64_t)PAGE, "the page is gone");

    message = change(move, memory + 20 * PAGE, &thread);
    EQUAL(message.event, REMAP, "a move");
    EQUAL(message.remap.from, (uintptr_t)memory + 20 * PAGE, "from here");
    EQUAL(message.remap.to, (uintptr_t)target, "to here");
    EQUAL(message.remap.length, 4 * PAGE, "four pages");
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    NEED(poll(&polled, 1, 5000) == 1);
    EQUAL(uf_next(fd).event, UNMAP, "and the old place is unmapped");
    pthread_join(thread, 0);
    EQUAL(target[0], 1, "the page has moved");
    EQUAL(uf_copy(fd, target + PAGE, page_of_ones, PAGE, 0), (int64_t)PAGE, "what has moved is registered");

    NEED(pthread_create(&thread, 0, touch, memory + 30 * PAGE + 5) == 0);
    NEED(poll(&polled, 1, 5000) == 1);
    message = uf_next(fd);
    EQUAL(message.fault.address, (uintptr_t)memory + 30 * PAGE, "the address of the page");
    EQUAL(message.fault.thread, (uint32_t)number, "the number of the thread");
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGUSR1, &action, 0);
    pthread_kill(thread, SIGUSR1);
    NEED(poll(&polled, 1, 5000) == 1);
    EQUAL(uf_next(fd).event, FAULT, "after a signal it faults again");
    EQUAL(alarms, 1, "the handler ran");
    EQUAL(uf_zero(fd, memory + 30 * PAGE, PAGE, 0), (int64_t)PAGE, "zeroes");
    pthread_join(thread, 0);
    close(fd);

    // A child whose fault is not served can be killed.
    fd = uf_open(O_NONBLOCK, EXACT_ADDRESS);
    pid_t pid = fork();
    if (pid == 0) {
        fd = uf_open(0, 0);
        uf_register(fd, memory + 40 * PAGE, PAGE, MISSING);
        _exit(*(volatile char *)(memory + 40 * PAGE));
    }
    test_sleep(100);
    kill(pid, SIGKILL);
    NEED(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "who waits can be killed");

    EQUAL(uf_register(fd, memory + 40 * PAGE, PAGE, MISSING), 0, "register");
    NEED(pthread_create(&thread, 0, touch, memory + 40 * PAGE + 77) == 0);
    NEED(poll(&polled, 1, 0) >= 0);
    polled.fd = fd;
    NEED(poll(&polled, 1, 5000) == 1);
    EQUAL(uf_next(fd).fault.address, (uintptr_t)memory + 40 * PAGE + 77, "the exact address");
    close(fd);
    pthread_join(thread, 0);

    fd = uf_open(0, SIGBUS_FEATURE);
    EQUAL(uf_register(fd, memory + 41 * PAGE, PAGE, MISSING), 0, "register");
    struct sigaction bus = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO};
    sigaction(SIGBUS, &bus, 0);
    volatile int caught = 1;
    if (sigsetjmp(back, 1) == 0) {
        *(volatile char *)(memory + 41 * PAGE);
        caught = 0;
    }
    CHECK(caught, "SIGBUS");
    EQUAL(uf_copy(fd, memory + 41 * PAGE, page_of_ones, PAGE, 0), (int64_t)PAGE, "copy");
    EQUAL(memory[41 * PAGE], 1, "the page is there");
    return test_end();
}
