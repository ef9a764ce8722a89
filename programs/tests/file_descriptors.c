// dup, dup2, dup3, fcntl, ioctl on what is no terminal, close_range.

#include "test.h"

#include <sys/ioctl.h>
#include <termios.h>

int main(void) {
    test_start();
    int file = open("/tmp/file-descriptors", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    int other = dup(file);
    CHECK(other > file, "dup gives another descriptor");
    STEP_EQUAL(write(file, "abc", 3), 3);
    EQUAL(lseek(other, 0, SEEK_CUR), 3, "dup: the offset is shared");
    EQUAL(close(file), 0, "dup: one is closed");
    EQUAL(write(other, "d", 1), 1, "dup: the other works on");
    file = dup2(other, 77);
    EQUAL(file, 77, "dup2 to a chosen number");
    EQUAL(dup2(77, 77), 77, "dup2 to itself");
    FAILS(dup3(77, 77, 0), EINVAL, "dup3 to itself");
    EQUAL(dup3(77, 78, O_CLOEXEC), 78, "dup3");
    EQUAL(fcntl(78, F_GETFD), FD_CLOEXEC, "dup3 sets O_CLOEXEC");
    EQUAL(fcntl(77, F_GETFD), 0, "dup2 does not");
    int pipes[2];
    NEED(pipe(pipes) == 0);
    EQUAL(dup2(pipes[1], 78), 78, "dup2 over an open descriptor");
    close(pipes[1]);
    char text[10];
    STEP_EQUAL(write(78, "x", 1), 1);
    STEP_EQUAL(read(pipes[0], text, 10), 1);
    close(78);
    EQUAL(read(pipes[0], text, 10), 0, "dup: the pipe ends with the last descriptor");
    FAILS(dup(999), EBADF, "dup: bad descriptor");
    FAILS(dup2(999, 5), EBADF, "dup2: bad descriptor");
    FAILS(dup2(77, -1), EBADF, "dup2: to -1");
    FAILS(dup2(77, 100000000), EBADF, "dup2: behind the limit");
    FAILS(syscall(SYS_dup3, 77, 79, 1), EINVAL, "dup3: unknown flags");

    int high = fcntl(77, F_DUPFD, 100);
    EQUAL(high, 100, "fcntl F_DUPFD: the lowest from a number on");
    int next = fcntl(77, F_DUPFD_CLOEXEC, 100);
    EQUAL(next, 101, "fcntl F_DUPFD_CLOEXEC: the next one");
    EQUAL(fcntl(next, F_GETFD), FD_CLOEXEC, "fcntl F_DUPFD_CLOEXEC: the flag");
    WORKS(fcntl(next, F_SETFD, 0), "fcntl F_SETFD");
    EQUAL(fcntl(next, F_GETFD), 0, "fcntl F_SETFD: the flag is off");
    FAILS(fcntl(77, F_DUPFD, -1), EINVAL, "fcntl F_DUPFD: from -1");
    EQUAL(fcntl(77, F_GETFL) & (O_ACCMODE | O_APPEND | O_NONBLOCK), O_RDWR, "fcntl F_GETFL");
    WORKS(fcntl(77, F_SETFL, O_APPEND | O_NONBLOCK), "fcntl F_SETFL");
    EQUAL(fcntl(high, F_GETFL) & (O_ACCMODE | O_APPEND | O_NONBLOCK),
          O_RDWR | O_APPEND | O_NONBLOCK, "fcntl F_SETFL: shared with the copies");
    lseek(77, 0, SEEK_SET);
    STEP_EQUAL(write(77, "end", 3), 3);
    EQUAL(lseek(77, 0, SEEK_CUR), 7, "fcntl F_SETFL: O_APPEND works");
    FAILS(fcntl(999, F_GETFL), EBADF, "fcntl: bad descriptor");
    FAILS(fcntl(77, 9999), EINVAL, "fcntl: unknown command");
    close(high);
    close(next);

    struct winsize size;
    struct termios terminal;
    FAILS(ioctl(77, TIOCGWINSZ, &size), ENOTTY, "ioctl TIOCGWINSZ: a file");
    FAILS(ioctl(77, TCGETS, &terminal), ENOTTY, "ioctl TCGETS: a file");
    FAILS(ioctl(pipes[0], TCGETS, &terminal), ENOTTY, "ioctl TCGETS: a pipe");
    EQUAL(isatty(77), 0, "isatty: a file");
    FAILS(ioctl(77, 0x12345678, 0), ENOTTY, "ioctl: unknown request");
    FAILS(ioctl(999, TCGETS, &terminal), EBADF, "ioctl: bad descriptor");
    int null = open("/dev/null", O_RDWR);
    FAILS(ioctl(null, TCGETS, &terminal), ENOTTY, "ioctl TCGETS: /dev/null");
    int count = -1;
    int ends[2];
    NEED(pipe(ends) == 0);
    STEP_EQUAL(write(ends[1], "12345", 5), 5);
    WORKS(ioctl(ends[0], FIONREAD, &count), "ioctl FIONREAD: a pipe");
    EQUAL(count, 5, "ioctl FIONREAD: what is in it");

    int first = dup2(77, 200);
    STEP_EQUAL(dup2(77, 205), 205);
    STEP_EQUAL(dup2(77, 210), 210);
    WORKS(syscall(436, first, 209, 0), "close_range");
    STEP_FAILS(fcntl(200, F_GETFD), EBADF);
    STEP_FAILS(fcntl(205, F_GETFD), EBADF);
    CHECK(fcntl(210, F_GETFD) >= 0, "close_range closes its range only");
    FAILS(syscall(436, 9, 8, 0), EINVAL, "close_range: the wrong way round");
    EXITS(0, "a child closes its own copies", {
        STEP_EQUAL(close(77), 0);
        STEP_FAILS(fcntl(77, F_GETFD), EBADF);
    });
    CHECK(fcntl(77, F_GETFD) >= 0, "and not the parent's");
    unlink("/tmp/file-descriptors");
    return test_end();
}
