// Waits with a signal mask of their own, and with a time that tells afterwards how much is left.

#include "test.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/select.h>

enum { LONG = 1000 };

static volatile int caught;
static void catch(int signal) { caught = signal; }

static int ends[2], epoll;
static sigset_t empty;
static struct timespec left;

static long wait_by_poll(size_t size, int events) {
    struct pollfd one = {ends[0], events, 0};
    return syscall(SYS_ppoll, &one, 1, &left, &empty, size);
}

static long wait_by_select(size_t size, int events) {
    struct {
        void *mask;
        size_t size;
    } mask = {&empty, size};
    fd_set set;
    FD_ZERO(&set);
    if (events)
        FD_SET(ends[0], &set);
    return syscall(SYS_pselect6, ends[0] + 1, &set, 0, 0, &left, &mask);
}

static long wait_by_epoll(size_t size, int events) {
    struct epoll_event event = {.events = events}, found;
    NEED(epoll_ctl(epoll, EPOLL_CTL_MOD, ends[0], &event) == 0);
    return syscall(SYS_epoll_pwait, epoll, &found, 1, (int)(left.tv_sec * 1000 + left.tv_nsec / 1000000),
                   &empty, size);
}

static int is_pending(void) {
    sigset_t pending;
    sigpending(&pending);
    return sigismember(&pending, SIGUSR1);
}

static int is_blocked(void) {
    sigset_t blocked;
    sigprocmask(SIG_BLOCK, 0, &blocked);
    return sigismember(&blocked, SIGUSR1);
}

static void one_way(const char *name, long (*wait)(size_t, int)) {
    test_print("%s:", name);
    caught = 0;
    raise(SIGUSR1);
    left = (struct timespec){LONG, 0};
    EQUAL(wait(8, POLLIN), 1, "what is ready comes before the signal");
    CHECK(is_pending() && is_blocked() && caught == 0, "which stays pending");
    FAILS(wait(4, POLLIN), EINVAL, "a mask of another size");
    CHECK(is_pending() && is_blocked() && caught == 0, "leaves the signal as well");
    left = (struct timespec){LONG, 0};
    FAILS(wait(8, 0), EINTR, "a wait ends with the signal");
    CHECK(!is_pending() && is_blocked() && caught == SIGUSR1, "which is handled");
    left = (struct timespec){0, 1000000};
    EQUAL(wait(8, 0), 0, "the end of the time");
    CHECK(is_blocked(), "puts the mask back");
}

static void is_less(const char *text) {
    CHECK(left.tv_sec < LONG && left.tv_sec >= LONG - TEST_SECONDS && left.tv_nsec >= 0 &&
              left.tv_nsec < 1000000000,
          text);
}

static void times(const char *name, long (*wait)(size_t, int)) {
    test_print("the time of %s:", name);
    raise(SIGUSR1);
    caught = 0;
    left = (struct timespec){0, 0};
    FAILS(wait(8, 0), EINTR, "a signal ends a wait of no time too");
    CHECK(!is_pending() && is_blocked() && caught == SIGUSR1, "and is handled");
    left = (struct timespec){LONG, 0};
    STEP_EQUAL(wait(8, POLLIN), 1);
    is_less("is less after something was ready");
    left = (struct timespec){0, 2000000};
    STEP_EQUAL(wait(8, 0), 0);
    CHECK(left.tv_sec == 0 && left.tv_nsec == 0, "nothing is left at its end");
    raise(SIGUSR1);
    left = (struct timespec){LONG, 0};
    STEP_FAILS(wait(8, 0), EINTR);
    is_less("is less after a signal");
}

int main(void) {
    test_start();
    struct sigaction action = {.sa_handler = catch};
    sigset_t blocked;
    sigemptyset(&empty);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    NEED(sigaction(SIGUSR1, &action, 0) == 0 && sigprocmask(SIG_BLOCK, &blocked, 0) == 0);
    NEED(pipe(ends) == 0 && write(ends[1], "x", 1) == 1);
    struct epoll_event event = {.events = EPOLLIN};
    epoll = epoll_create1(0);
    NEED(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &event) == 0);
    one_way("ppoll", wait_by_poll);
    one_way("pselect6", wait_by_select);
    one_way("epoll_pwait", wait_by_epoll);
    times("ppoll", wait_by_poll);
    times("pselect6", wait_by_select);

    struct timespec *fixed = mmap(0, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct pollfd one = {ends[0], POLLIN, 0};
    NEED(fixed != MAP_FAILED);
    EQUAL(syscall(SYS_ppoll, &one, 1, fixed, 0, 4), 1, "a time that cannot be written, no mask");
    NEED(mprotect(fixed, PAGE, PROT_READ | PROT_WRITE) == 0);
    fixed->tv_sec = 1;
    NEED(mprotect(fixed, PAGE, PROT_READ) == 0);
    EQUAL(syscall(SYS_ppoll, &one, 1, fixed, 0, 4), 1, "one that is not over either");
    EQUAL(fixed->tv_sec, 1, "is left as it was");
#ifdef SYS_select
    struct timeval time = {LONG, 0};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ends[0], &set);
    EQUAL(syscall(SYS_select, ends[0] + 1, &set, 0, 0, &time), 1, "select");
    CHECK(time.tv_sec < LONG && time.tv_sec >= LONG - TEST_SECONDS && time.tv_usec >= 0 &&
              time.tv_usec < 1000000,
          "tells the time that is left");
#endif
    return test_end();
}
