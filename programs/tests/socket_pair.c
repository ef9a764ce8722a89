// Pairs of connected sockets: both directions, messages and bytes, non-blocking, end of file,
// SIGPIPE.

#include "test.h"

#include <poll.h>
#include <sys/socket.h>

static int sockets[2];
static char data[40000], back[40000];

static void open_pair(int type) {
    if (sockets[0])
        close(sockets[0]), close(sockets[1]);
    NEED(socketpair(AF_UNIX, type, 0, sockets) == 0);
}

static short ready(int descriptor) {
    struct pollfd asked = {.fd = descriptor, .events = POLLIN | POLLOUT};
    NEED(poll(&asked, 1, 0) >= 0);
    return asked.revents;
}

int main(void) {
    test_start();
    for (size_t index = 0; index < sizeof data; index++)
        data[index] = index * 13 + index / 5000;

    open_pair(SOCK_STREAM);
    EQUAL(write(sockets[0], "abc", 3), 3, "write");
    EQUAL(write(sockets[0], "defg", 4), 4, "write again");
    EQUAL(write(sockets[1], "12", 2), 2, "write the other way");
    EQUAL(read(sockets[1], back, 5), 5, "a stream knows no messages");
    CHECK(memcmp(back, "abcde", 5) == 0, "in order");
    EQUAL(read(sockets[1], back, 100), 2, "read is short");
    EQUAL(read(sockets[0], back, 100), 2, "read the other way");
    EQUAL(write(sockets[0], data, sizeof data), sizeof data, "write much");
    EQUAL(read(sockets[1], back, sizeof back), sizeof back, "read all of it");
    CHECK(memcmp(data, back, sizeof data) == 0, "byte by byte");
    struct stat status;
    STEP_EQUAL(fstat(sockets[0], &status), 0);
    CHECK(S_ISSOCK(status.st_mode), "fstat: a socket");
    FAILS(lseek(sockets[0], 0, SEEK_SET), ESPIPE, "lseek");

    open_pair(SOCK_SEQPACKET | SOCK_NONBLOCK);
    FAILS(read(sockets[1], back, 10), EAGAIN, "SOCK_NONBLOCK: nothing to read");
    EQUAL(ready(sockets[1]), POLLOUT, "poll: it can be written");
    STEP_EQUAL(write(sockets[0], "abc", 3), 3);
    STEP_EQUAL(write(sockets[0], "defg", 4), 4);
    EQUAL(ready(sockets[1]), POLLIN | POLLOUT, "poll: and read");
    EQUAL(read(sockets[1], back, 100), 3, "one read takes one message");
    EQUAL(read(sockets[1], back, 2), 2, "what does not fit");
    FAILS(read(sockets[1], back, 100), EAGAIN, "is lost");
    int sent = 0;
    while (sent < 1000 && write(sockets[0], data, 1000) == 1000)
        sent++;
    CHECK(sent > 1 && sent < 1000 && errno == EAGAIN, "a pair holds so much and no more");

    open_pair(SOCK_SEQPACKET | SOCK_CLOEXEC);
    EQUAL(fcntl(sockets[0], F_GETFD), FD_CLOEXEC, "SOCK_CLOEXEC");
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        close(sockets[0]);
        int count = read(sockets[1], back, 100);
        _exit(write(sockets[1], back, count) == count ? 0 : 1);
    }
    close(sockets[1]);
    STEP_EQUAL(write(sockets[0], "there", 5), 5);
    EQUAL(read(sockets[0], back, 100), 5, "there and back again, between processes");
    int ended;
    STEP_EQUAL(waitpid(child, &ended, 0), child);
    EQUAL(ended, 0, "the child is content");
    EQUAL(read(sockets[0], back, 100), 0, "end of file when the other end is gone");
    EQUAL(ready(sockets[0]) & POLLHUP, POLLHUP, "poll: POLLHUP");
    signal(SIGPIPE, SIG_IGN);
    FAILS(write(sockets[0], "x", 1), EPIPE, "nobody is there to read it");
    close(sockets[0]);
    sockets[0] = 0;

    open_pair(SOCK_STREAM);
    signal(SIGPIPE, SIG_DFL);
    DIES(SIGPIPE, "SIGPIPE", {
        close(sockets[1]);
        // The parent has that end still.
        NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
        close(sockets[1]);
        write(sockets[0], "x", 1);
    });
    FAILS(socketpair(-1, SOCK_STREAM, 0, sockets), EAFNOSUPPORT, "no such family");
    FAILS(socketpair(AF_UNIX, 77, 0, sockets), EINVAL, "no such type");
    FAILS(socketpair(AF_UNIX, SOCK_STREAM, 77, sockets), EPROTONOSUPPORT, "no such protocol");
    FAILS(socketpair(AF_UNIX, SOCK_STREAM, 0, test_wild(8)), EFAULT, "a bad pointer");
    return test_end();
}
