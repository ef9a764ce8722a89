// A call that cannot report the number of a descriptor that it has made closes that descriptor,
// but not a file that another thread has since opened at the number. Passes on Linux as root.

#include "userfault.h"

#include <sched.h>
#include <sys/socket.h>

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x1000
#endif

static intptr_t make_pipe(void *numbers) {
    return syscall(SYS_pipe2, numbers, 0);
}

static intptr_t make_sockets(void *numbers) {
    return syscall(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, numbers);
}

static intptr_t make_child(void *number) {
    intptr_t child = syscall(SYS_clone, CLONE_PIDFD | SIGCHLD, 0, number, 0, 0);
    if (child == 0)
        _exit(0);
    return child;
}

static intptr_t (*make)(void *);

static void *refused(void *numbers) {
    intptr_t result = make(numbers);
    return (void *)(intptr_t)(result == -1 ? errno : 0);
}

static void leaves_others(intptr_t (*call)(void *), int descriptors, const char *text) {
    int fd = uf_open(O_CLOEXEC, 0);
    char *numbers = uf_map(PAGE);
    NEED(fd >= 0 && uf_register(fd, numbers, PAGE, MISSING) == 0);
    int first = dup(0);
    NEED(close(first) == 0);
    make = call;
    pthread_t thread;
    NEED(pthread_create(&thread, 0, refused, numbers) == 0);
    // The numbers have no page: the call waits with its descriptors made.
    STEP_EQUAL(uf_next(fd).event, FAULT);
    // Linux has not opened them yet, and refuses.
    close(first);
    int other = open("/dev/null", O_RDONLY);
    STEP(other >= 0);
    STEP_EQUAL(munmap(numbers, PAGE), 0);
    STEP_EQUAL(uf_wake(fd, numbers, PAGE), 0);
    void *error;
    NEED(pthread_join(thread, &error) == 0);
    EQUAL((intptr_t)error, EFAULT, text);
    EQUAL(fcntl(other, F_GETFD), 0, "what another thread has opened stays");
    for (int number = first; number < first + descriptors; number++)
        if (number != other)
            STEP_FAILS(fcntl(number, F_GETFD), EBADF);
    close(other);
    close(fd);
}

int main(void) {
    test_start();
    leaves_others(make_pipe, 2, "pipe2");
    leaves_others(make_sockets, 2, "socketpair");
    leaves_others(make_child, 1, "clone with CLONE_PIDFD");
    return test_end();
}
