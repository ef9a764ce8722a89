// Waiting for processes and for sets of descriptors: a pidfd becomes ready when
// its process ends, and epoll knows what a descriptor named when it was added.

#include "test.h"

#include <poll.h>
#include <sys/epoll.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

static void pidfd(void) {
    pid_t child = CHILD(test_sleep(200));
    int descriptor = syscall(SYS_pidfd_open, child, 0);
    NEED(descriptor >= 0);
    struct pollfd wanted = {descriptor, POLLIN, 0};
    EQUAL(poll(&wanted, 1, 0), 0, "pidfd: not ready while the process lives");
    long long before = test_now();
    EQUAL(poll(&wanted, 1, 20000), 1, "pidfd: ready when it has ended");
    CHECK(test_now() - before < 10000000000LL, "pidfd: the end wakes whoever polls");
    EQUAL(wanted.revents, POLLIN, "pidfd: POLLIN");
    EQUAL(waitpid(child, 0, WNOHANG), child, "pidfd: who was woken can wait for it at once");
    close(descriptor);
}

static void epoll(void) {
    int first[2], second[2];
    int set = epoll_create1(0);
    NEED(set >= 0 && pipe(first) == 0);
    int kept = dup(first[0]);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 1};
    EQUAL(epoll_ctl(set, EPOLL_CTL_ADD, first[0], &event), 0, "epoll: a pipe is added");
    FAILS(epoll_ctl(set, EPOLL_CTL_ADD, first[0], &event), EEXIST, "epoll: and not twice");
    close(first[0]);
    NEED(pipe(second) == 0);
    STEP_EQUAL(second[0], first[0]);
    event.data.u64 = 2;
    EQUAL(epoll_ctl(set, EPOLL_CTL_ADD, second[0], &event), 0,
          "epoll: a descriptor that names something else by now is added");
    STEP_EQUAL(write(second[1], "x", 1), 1);
    EQUAL(epoll_wait(set, &event, 1, 20000), 1, "epoll: one is ready");
    EQUAL(event.data.u64, 2, "epoll: the new one");
    event = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 3};
    EQUAL(epoll_ctl(set, EPOLL_CTL_MOD, second[0], &event), 0, "epoll: once only");
    EQUAL(epoll_wait(set, &event, 1, 0), 1, "epoll: that once");
    close(second[1]);
    EQUAL(epoll_wait(set, &event, 1, 0), 0, "epoll: and no more, the other end's closing among it");
    struct pollfd wanted = {set, POLLIN, 0};
    EQUAL(poll(&wanted, 1, 0), 0, "epoll: nor is the set itself ready");
    close(kept);
    NEED(pipe(second) == 0);
    event = (struct epoll_event){.events = 0, .data.u64 = 4};
    EQUAL(epoll_ctl(set, EPOLL_CTL_ADD, second[0], &event), 0, "epoll: a pipe with no event");
    STEP_EQUAL(write(second[1], "x", 1), 1);
    EQUAL(epoll_wait(set, &event, 1, 0), 0, "epoll: it is not reported as readable");
    close(second[1]);
    EQUAL(epoll_wait(set, &event, 1, 0), 1, "epoll: but when the other end is closed");
    EQUAL(event.events, EPOLLHUP, "epoll: EPOLLHUP");
    EQUAL(poll(&wanted, 1, 0), 1, "epoll: the set itself is ready");
    close(second[0]);
    close(set);
}

static int is_hung_up(int file) {
    struct pollfd wanted = {file, POLLIN, 0};
    STEP(poll(&wanted, 1, 0) >= 0);
    return wanted.revents;
}

// The end of a named pipe's writers is told to the readers that have seen one.
static void named_pipe(void) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/poll-%d", getpid());
    NEED(mkfifo(path, 0600) == 0);
    int early = open(path, O_RDONLY | O_NONBLOCK);
    EQUAL(is_hung_up(early), 0, "a named pipe: not hung up before any writer came");
    int writer = open(path, O_WRONLY);
    NEED(early >= 0 && writer >= 0);
    EQUAL(is_hung_up(early), 0, "nor with a writer");
    close(writer);
    EQUAL(is_hung_up(early), POLLHUP, "but after it");
    int later = open(path, O_RDONLY | O_NONBLOCK);
    EQUAL(is_hung_up(later), 0, "a later reader has not seen one");
    EQUAL(is_hung_up(early), POLLHUP, "though the earlier one has");
    close(later);
    close(early);
    unlink(path);
}

int main(void) {
    test_start();
    pidfd();
    epoll();
    named_pipe();
    return test_end();
}
