// eventfd, poll, ppoll, select: what is ready, timeouts, wake-ups, masks.

#include "test.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/select.h>

static volatile int caught;
static void catch(int signal) { caught = signal; }

static int events(int descriptor, int wanted) {
    struct pollfd entry = {descriptor, wanted, 0};
    STEP(poll(&entry, 1, 0) >= 0);
    return entry.revents;
}

int main(void) {
    test_start();
    uint64_t value = 0;
    int event = eventfd(0, EFD_NONBLOCK);
    WORKS(event, "eventfd");
    FAILS(read(event, &value, 8), EAGAIN, "eventfd: nothing to read");
    value = 5;
    EQUAL(write(event, &value, 8), 8, "eventfd: write");
    value = 7;
    STEP_EQUAL(write(event, &value, 8), 8);
    EQUAL(events(event, POLLIN | POLLOUT), POLLIN | POLLOUT, "eventfd: readable and writable");
    EQUAL(read(event, &value, 8), 8, "eventfd: read");
    EQUAL(value, 12, "eventfd: the sum");
    EQUAL(events(event, POLLIN | POLLOUT), POLLOUT, "eventfd: writable only");
    FAILS(read(event, &value, 4), EINVAL, "eventfd: a short read");
    value = UINT64_MAX;
    FAILS(write(event, &value, 8), EINVAL, "eventfd: the largest value");
    value = UINT64_MAX - 1;
    STEP_EQUAL(write(event, &value, 8), 8);
    value = 1;
    FAILS(write(event, &value, 8), EAGAIN, "eventfd: full");
    EQUAL(events(event, POLLIN | POLLOUT), POLLIN, "eventfd: full is not writable");
    close(event);
    event = eventfd(3, EFD_SEMAPHORE | EFD_CLOEXEC);
    EQUAL(fcntl(event, F_GETFD), FD_CLOEXEC, "eventfd: EFD_CLOEXEC");
    STEP_EQUAL(read(event, &value, 8), 8);
    EQUAL(value, 1, "eventfd: EFD_SEMAPHORE takes one");
    close(event);
    FAILS(syscall(SYS_eventfd2, 0, 0x40), EINVAL, "eventfd: unknown flags");
    event = eventfd(0, 0);
    pid_t child = CHILD({
        test_sleep(20);
        value = 9;
        STEP_EQUAL(write(event, &value, 8), 8);
    });
    EQUAL(read(event, &value, 8), 8, "eventfd: read waits");
    EQUAL(value, 9, "eventfd: for another process");
    STEP_EQUAL(test_wait(child), 0);

    int pipes[2];
    char text[10];
    NEED(pipe(pipes) == 0);
    EQUAL(events(pipes[0], POLLIN), 0, "poll: an empty pipe");
    EQUAL(events(pipes[1], POLLOUT), POLLOUT, "poll: room in a pipe");
    STEP_EQUAL(write(pipes[1], "x", 1), 1);
    EQUAL(events(pipes[0], POLLIN), POLLIN, "poll: data in a pipe");
    EQUAL(events(999, POLLIN), POLLNVAL, "poll: bad descriptor");
    int file = open("/tmp", O_RDONLY);
    EQUAL(events(file, POLLIN), POLLIN, "poll: a file is always ready");
    close(file);
    struct pollfd three[3] = {{pipes[0], POLLIN, 0}, {-1, POLLIN, 99}, {pipes[1], POLLOUT, 0}};
    EQUAL(poll(three, 3, -1), 2, "poll counts the ready ones");
    EQUAL(three[1].revents, 0, "poll leaves out a negative descriptor");
    STEP_EQUAL(read(pipes[0], text, 10), 1);
    long long start = test_now();
    EQUAL(poll(three, 1, 30), 0, "poll: timeout");
    CHECK(test_now() - start >= 29000000, "poll: the time is over");
    child = CHILD({
        test_sleep(20);
        STEP_EQUAL(write(pipes[1], "x", 1), 1);
    });
    EQUAL(poll(three, 1, -1), 1, "poll waits for data");
    STEP_EQUAL(test_wait(child), 0);
    STEP_EQUAL(read(pipes[0], text, 10), 1);
    close(pipes[1]);
    EQUAL(events(pipes[0], POLLIN), POLLHUP, "poll: the writer is gone");
    close(pipes[0]);
    NEED(pipe(pipes) == 0);
    close(pipes[0]);
    EQUAL(events(pipes[1], POLLOUT), POLLOUT | POLLERR, "poll: the reader is gone");
    close(pipes[1]);
    FAILS(poll(test_wild(8), 1, 0), EFAULT, "poll: a bad pointer");
    EQUAL(poll(0, 0, 1), 0, "poll of nothing sleeps");

    NEED(pipe(pipes) == 0);
    struct sigaction action = {.sa_handler = catch};
    sigaction(SIGUSR1, &action, 0);
    sigset_t blocked, empty;
    sigemptyset(&empty);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    sigprocmask(SIG_BLOCK, &blocked, 0);
    raise(SIGUSR1);
    struct pollfd one = {pipes[0], POLLIN, 0};
    struct timespec rest = {0, 10000000};
    EQUAL(ppoll(&one, 1, &rest, 0), 0, "ppoll: timeout");
    EQUAL(caught, 0, "the signal is blocked");
    rest.tv_sec = 20;
    FAILS(ppoll(&one, 1, &rest, &empty), EINTR, "ppoll with a mask lets the signal in");
    EQUAL(caught, SIGUSR1, "its handler has run");
    sigprocmask(SIG_BLOCK, 0, &empty);
    CHECK(sigismember(&empty, SIGUSR1), "the mask is back");

    fd_set readable, writable;
    FD_ZERO(&readable);
    FD_ZERO(&writable);
    FD_SET(pipes[0], &readable);
    FD_SET(pipes[1], &writable);
    struct timeval time = {5, 0};
    EQUAL(select(pipes[1] + 1, &readable, &writable, 0, &time), 1, "select: one is ready");
    CHECK(!FD_ISSET(pipes[0], &readable) && FD_ISSET(pipes[1], &writable), "select: the right one");
    FD_SET(pipes[0], &readable);
    time = (struct timeval){0, 20000};
    EQUAL(select(pipes[0] + 1, &readable, 0, 0, &time), 0, "select: timeout");
    CHECK(!FD_ISSET(pipes[0], &readable), "select: nothing is ready");
    FD_SET(pipes[0], &readable);
    STEP_EQUAL(write(pipes[1], "x", 1), 1);
    EQUAL(select(pipes[0] + 1, &readable, 0, 0, 0), 1, "select without a timeout");
    FD_SET(60, &readable);
    FAILS(select(61, &readable, 0, 0, &time), EBADF, "select: bad descriptor");
    time = (struct timeval){0, 5000};
    EQUAL(select(0, 0, 0, 0, &time), 0, "select of nothing sleeps");
    return test_end();
}
