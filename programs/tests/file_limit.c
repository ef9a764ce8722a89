// RLIMIT_FSIZE: a write beyond it is cut, and then refused with a signal.

#include "test.h"

#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/uio.h>

#ifndef MFD_ALLOW_SEALING
#define MFD_ALLOW_SEALING 2
#endif

enum { LIMIT = 5000 };

static volatile int signals;
static char bytes[9000];

static void count_signal(int signal) {
    (void)signal;
    signals++;
}

static void limit_to(rlim_t size) {
    struct rlimit limit = {size, RLIM_INFINITY};
    NEED(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

#define REFUSED(call, text)                  \
    do {                                     \
        signals = 0;                         \
        FAILS(call, EFBIG, text);            \
        STEP_EQUAL(signals, 1);              \
    } while (0)

#define GIVES(call, value, text)             \
    do {                                     \
        signals = 0;                         \
        EQUAL(call, value, text);            \
        STEP_EQUAL(signals, 0);              \
    } while (0)

static off_t size_of(int file) {
    struct stat status;
    NEED(fstat(file, &status) == 0);
    return status.st_size;
}

static void try(int file, const char *what) {
    test_print("%s:", what);
    limit_to(LIMIT);
    GIVES(write(file, bytes, 9000), LIMIT, "a write is cut");
    REFUSED(write(file, bytes, 1), "the next one is refused");
    GIVES(write(file, bytes, 0), 0, "nothing can still be written");
    GIVES(pwrite(file, bytes, 10, LIMIT - 5), 5, "pwrite is cut");
    REFUSED(pwrite(file, bytes, 10, LIMIT), "pwrite at the limit is refused");
    struct iovec both[] = {{bytes, 3}, {bytes, 7}};
    GIVES(pwritev(file, both, 2, LIMIT - 5), 5, "pwritev is cut inside of its second part");
    EQUAL(size_of(file), LIMIT, "the file has the limit's size");
    GIVES(ftruncate(file, LIMIT), 0, "ftruncate to the limit");
    REFUSED(ftruncate(file, LIMIT + 1), "ftruncate beyond");
    GIVES(ftruncate(file, 100), 0, "ftruncate to less");
    limit_to(8000);
    GIVES(ftruncate(file, 8000), 0, "a higher limit");
    limit_to(LIMIT);
    GIVES(ftruncate(file, 7000), 0, "a file beyond the limit can shrink");
    REFUSED(ftruncate(file, 7001), "and not grow");
    REFUSED(pwrite(file, bytes, 10, 6000), "what lies beyond the limit cannot be written");
    GIVES(pwrite(file, bytes, 10, 4000), 10, "what lies below can");
    limit_to(RLIM_INFINITY);
    GIVES(pwrite(file, bytes, 10, LIMIT), 10, "without a limit all is as before");
}

int main(void) {
    test_start();
    signal(SIGXFSZ, count_signal);
    int memory = syscall(SYS_memfd_create, "limited", MFD_ALLOW_SEALING);
    NEED(memory >= 0);
    try(memory, "a memfd");
    int file = open("/tmp/limited", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    unlink("/tmp/limited");
    try(file, "a file");

    limit_to(LIMIT);
    NEED(ftruncate(memory, 100) == 0);
    GIVES(fallocate(memory, 0, 0, LIMIT), 0, "fallocate up to the limit");
    REFUSED(fallocate(memory, 0, 0, LIMIT + 1), "fallocate beyond");
    REFUSED(fallocate(memory, FALLOC_FL_KEEP_SIZE, 0, 8000), "also where the size is kept");
    GIVES(fallocate(memory, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 0, 8000), 0,
          "a hole may reach beyond");
    signals = 0;
    FAILS(fallocate(memory, 0, 0, 0), EINVAL, "fallocate of nothing");
    FAILS(ftruncate(memory, -1), EINVAL, "a negative size");
    STEP_EQUAL(signals, 0);

    int source = syscall(SYS_memfd_create, "source", 0);
    limit_to(RLIM_INFINITY);
    NEED(write(source, bytes, 9000) == 9000);
    limit_to(LIMIT);
    loff_t from = 0, to = 4500;
    GIVES(syscall(SYS_copy_file_range, source, &from, memory, &to, 2000, 0), 500,
          "copy_file_range is cut");
    REFUSED(syscall(SYS_copy_file_range, source, &from, memory, &to, 2000, 0),
            "copy_file_range at the limit");
    off_t offset = 0;
    lseek(memory, 4000, SEEK_SET);
    EQUAL(sendfile(memory, source, &offset, 3000), 1000, "sendfile is cut");
    REFUSED(sendfile(memory, source, &offset, 3000), "sendfile at the limit");

    NEED(fcntl(memory, F_ADD_SEALS, F_SEAL_GROW) == 0);
    REFUSED(ftruncate(memory, 9000), "the limit comes before the seals");
    int reading = open("/proc/self/exe", O_RDONLY);
    signals = 0;
    FAILS(ftruncate(reading, 1 << 30), EINVAL, "a file that is open for reading");
    FAILS(pwrite(reading, bytes, 1, 9000), EBADF, "cannot be written");
    STEP_EQUAL(signals, 0);

    int ends[2];
    NEED(pipe(ends) == 0);
    limit_to(0);
    GIVES(write(ends[1], bytes, 100), 100, "a pipe has no limit");
    NEED(read(ends[0], bytes, 100) == 100 && write(ends[1], bytes, 9000) == 9000);
    limit_to(LIMIT);
    loff_t place = LIMIT - 1000;
    EQUAL(splice(ends[0], 0, source, &place, 9000, 0), 1000, "splice is cut");
    REFUSED(splice(ends[0], 0, source, &place, 9000, 0), "splice at the limit");
    EQUAL(read(ends[0], bytes, 9000), 8000, "the pipe keeps the rest");
    FAILS(splice(ends[0], 0, source, &place, 1, SPLICE_F_NONBLOCK), EAGAIN, "an empty pipe comes first");
    limit_to(RLIM_INFINITY);
    DIES(SIGXFSZ, "who does not catch the signal ends", {
        signal(SIGXFSZ, SIG_DFL);
        limit_to(10);
        _exit(ftruncate(source, 9999) == 0);
    });
    EXITS(0, "who ignores it sees the error", {
        signal(SIGXFSZ, SIG_IGN);
        limit_to(10);
        _exit(ftruncate(source, 9999) == -1 && errno == EFBIG ? 0 : 1);
    });
    return test_end();
}
