// Pipes: order, sizes, limits, non-blocking, end of file, SIGPIPE.

#include "test.h"

static int pipes[2];
static char data[200000], back[200000];

static void open_pipe(int flags) {
    if (pipes[0])
        close(pipes[0]), close(pipes[1]);
    NEED(pipe2(pipes, flags) == 0);
}

static volatile int caught;
static void catch(int signal) { caught = signal; }

int main(void) {
    test_start();
    for (size_t index = 0; index < sizeof data; index++)
        data[index] = index * 13 + index / 5000;

    open_pipe(0);
    EQUAL(write(pipes[1], "abc", 3), 3, "write");
    EQUAL(write(pipes[1], "defg", 4), 4, "write again");
    EQUAL(read(pipes[0], back, 5), 5, "read a part");
    CHECK(memcmp(back, "abcde", 5) == 0, "in order");
    EQUAL(read(pipes[0], back, 100), 2, "read is short");
    FAILS(write(pipes[0], "x", 1), EBADF, "write to the reading end");
    FAILS(read(pipes[1], back, 1), EBADF, "read from the writing end");
    EQUAL(write(pipes[1], data, 0), 0, "write nothing");
    STEP_EQUAL(write(pipes[1], "x", 1), 1);
    close(pipes[1]);
    EQUAL(read(pipes[0], back, 10), 1, "the rest is read after the writer is gone");
    EQUAL(read(pipes[0], back, 10), 0, "then the end of file");
    EQUAL(read(pipes[0], back, 10), 0, "again and again");
    close(pipes[0]);
    pipes[0] = 0;

    open_pipe(O_NONBLOCK);
    FAILS(read(pipes[0], back, 10), EAGAIN, "O_NONBLOCK: read from an empty pipe");
    // The host may hold pipes of an ordinary user small; root's are 64 KiB.
    ssize_t capacity = fcntl(pipes[1], F_GETPIPE_SZ);
    EQUAL(capacity, 65536, "F_GETPIPE_SZ: a pipe holds 64 KiB");
    EQUAL(write(pipes[1], data, sizeof data), 65536, "O_NONBLOCK: write fills the pipe");
    FAILS(write(pipes[1], data, 1), EAGAIN, "O_NONBLOCK: write to a full pipe");
    EQUAL(read(pipes[0], back, sizeof back), 65536, "read all of it");
    CHECK(memcmp(data, back, 65536) == 0, "byte by byte");
    int before = test_failures;
    for (int round = 0; round < 16; round++)
        STEP_EQUAL(write(pipes[1], data, 4096), 4096);
    STEP_FAILS(write(pipes[1], data, 1), EAGAIN);
    STEP_EQUAL(read(pipes[0], back, 4096), 4096);
    STEP_EQUAL(write(pipes[1], data, 4096), 4096);
    STEP_FAILS(write(pipes[1], data, 4096), EAGAIN);
    STEP_EQUAL(read(pipes[0], back, 100), 100);
    STEP_FAILS(write(pipes[1], data, 4096), EAGAIN);
    ALL_STEPS(before, "up to 4096 bytes are written whole or not at all");
    STEP_EQUAL(fcntl(pipes[0], F_GETFL) & O_NONBLOCK, O_NONBLOCK);
    WORKS(fcntl(pipes[0], F_SETFL, 0), "F_SETFL takes O_NONBLOCK away");
    EQUAL(fcntl(pipes[1], F_GETFL) & O_NONBLOCK, O_NONBLOCK, "from one end only");

    open_pipe(O_CLOEXEC);
    EQUAL(fcntl(pipes[0], F_GETFD), FD_CLOEXEC, "pipe2 O_CLOEXEC: the reading end");
    EQUAL(fcntl(pipes[1], F_GETFD), FD_CLOEXEC, "pipe2 O_CLOEXEC: the writing end");
    FAILS(pipe2(pipes, 1), EINVAL, "pipe2: unknown flags");
    FAILS(pipe(test_wild(8)), EFAULT, "pipe: a bad pointer");

    open_pipe(0);
    DIES(SIGPIPE, "writing without a reader raises SIGPIPE", {
        close(pipes[0]);
        STEP_EQUAL(write(pipes[1], "x", 1), 1);
        // The parent has the reading end still: not yet.
        close(pipes[1]);
        NEED(pipe(pipes) == 0);
        close(pipes[0]);
        write(pipes[1], "x", 1);
    });
    signal(SIGPIPE, catch);
    close(pipes[0]);
    FAILS(write(pipes[1], "x", 1), EPIPE, "and fails with EPIPE");
    EQUAL(caught, SIGPIPE, "a handler sees SIGPIPE");
    signal(SIGPIPE, SIG_IGN);
    FAILS(write(pipes[1], "x", 1), EPIPE, "EPIPE with SIGPIPE ignored");
    close(pipes[1]);
    pipes[0] = 0;

    open_pipe(0);
    FAILS(write(pipes[1], test_wild(8), 10), EFAULT, "write from a bad pointer");
    STEP_EQUAL(write(pipes[1], "abc", 3), 3);
    FAILS(read(pipes[0], test_wild(8), 3), EFAULT, "read to a bad pointer");
    struct stat status;
    STEP_EQUAL(fstat(pipes[0], &status), 0);
    EQUAL(status.st_size, 0, "a pipe has no size");
    FAILS(ftruncate(pipes[1], 0), EINVAL, "a pipe cannot be truncated");
    FAILS((long)mmap(0, PAGE, PROT_READ, MAP_SHARED, pipes[0], 0), ENODEV, "a pipe cannot be mapped");
    return test_end();
}
