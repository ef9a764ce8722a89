// memfd_secret: memory that only the program itself can read. Its creation, size
// and mappings, and the refused accesses.

#include "test.h"

#include <sys/resource.h>
#include <sys/uio.h>

#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif

static int secret(unsigned flags) { return (int)syscall(SYS_memfd_secret, flags); }

static void *map(int file, size_t length) {
    return mmap(0, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
}

int main(void) {
    test_start();
    FAILS(secret(FD_CLOEXEC), EINVAL, "FD_CLOEXEC is none of the flags");
    FAILS(secret(MFD_ALLOW_SEALING), EINVAL, "nor are those of memfd_create");
    int closed = secret(O_CLOEXEC);
    EQUAL(fcntl(closed, F_GETFD), FD_CLOEXEC, "O_CLOEXEC is");
    int file = secret(0);
    NEED(file >= 0);
    EQUAL(fcntl(file, F_GETFD), 0, "kept by execve without");
    EQUAL(fcntl(file, F_GETFL) & O_ACCMODE, O_RDWR, "opened to read and write");
    struct stat status;
    CHECK(fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0,
          "an empty file");

    char byte = 1;
    WORKS(ftruncate(file, 3 * PAGE), "it is given a size");
    FAILS(ftruncate(file, 3 * PAGE), EINVAL, "once");
    FAILS(ftruncate(file, 0), EINVAL, "and for all");
    FAILS(read(file, &byte, 1), EINVAL, "read");
    FAILS(write(file, &byte, 1), EINVAL, "write");
    FAILS(pread(file, &byte, 1, 0), ESPIPE, "pread");
    FAILS(pwrite(file, &byte, 1, 0), ESPIPE, "pwrite");
    FAILS(lseek(file, 0, SEEK_SET), ESPIPE, "lseek");
    FAILS(fallocate(file, 0, 0, PAGE), EOPNOTSUPP, "fallocate");
    FAILS(fcntl(file, F_ADD_SEALS, F_SEAL_GROW), EINVAL, "F_ADD_SEALS");
    FAILS(fcntl(file, F_GET_SEALS), EINVAL, "F_GET_SEALS");
    FAILS(mmap(0, PAGE, PROT_READ, MAP_PRIVATE, file, 0) == MAP_FAILED ? -1 : 0, EINVAL,
          "a private mapping");

    char *at = map(file, 4 * PAGE);
    NEED(at != MAP_FAILED);
    strcpy(at, "secret");
    char *again = map(file, PAGE);
    CHECK(again != MAP_FAILED && !strcmp(again, "secret"), "mapped twice");
    EQUAL(LOADS(at + 2 * PAGE), 0, "the last page");
    EQUAL(LOADS(at + 3 * PAGE), SIGBUS, "behind the end");
    FAILS(madvise(at, PAGE, MADV_DONTNEED), EINVAL, "MADV_DONTNEED: it is locked");
    WORKS(munlock(at, PAGE), "munlock");
    FAILS(madvise(at, PAGE, MADV_DONTNEED), EINVAL, "changes nothing");
    FAILS(madvise(at, PAGE, MADV_POPULATE_READ), EINVAL, "MADV_POPULATE_READ");
    FAILS(mlock(at, PAGE), ENOMEM, "mlock");

    // Copies that the program asks for are its own accesses.
    int pipes[2];
    NEED(pipe(pipes) == 0);
    EQUAL(write(pipes[1], at, 6), 6, "written to a pipe");
    EQUAL(read(pipes[0], at + PAGE, 6), 6, "read from a pipe");
    CHECK(!memcmp(at + PAGE, "secret", 6), "as it was");

    char own[6] = "other";
    struct iovec local = {own, 6}, remote = {at, 6};
    FAILS(syscall(SYS_process_vm_readv, getpid(), &local, 1, &remote, 1, 0), EFAULT,
          "process_vm_readv");
    FAILS(syscall(SYS_process_vm_writev, getpid(), &local, 1, &remote, 1, 0), EFAULT,
          "process_vm_writev");
    EQUAL(syscall(SYS_process_vm_readv, getpid(), &remote, 1, &local, 1, 0), 6, "to it");
    CHECK(!strcmp(at, "other") && !strcmp(again, "other"), "is its own access");
    int memory = open("/proc/self/mem", O_RDWR);
    NEED(memory >= 0);
    FAILS(pread(memory, own, 6, (off_t)(uintptr_t)at), EIO, "/proc/self/mem: read");
    FAILS(pwrite(memory, own, 6, (off_t)(uintptr_t)at), EIO, "/proc/self/mem: write");

    static char text[200000];
    char line[60], *found;
    NEED(test_read_file("/proc/self/smaps", text, sizeof text) > 0);
    snprintf(line, sizeof line, "\n%lx-", (long)at);
    found = strstr(text, line);
    char *flags = found ? strstr(found, "VmFlags:") : 0;
    char *end = flags ? strchr(flags, '\n') : 0;
    CHECK(end && strstr(found, "/secretmem (deleted)\n") < flags, "smaps names it");
    if (end)
        *end = 0;
    CHECK(end && strstr(flags, " sh ") && strstr(flags, " lo ") && strstr(flags, " dd "),
          "and shows that it is shared, locked and never dumped");

    EXITS(0, "a child has it too", {
        CHECK(!strcmp(at, "other"), "and reads it");
        at[0] = 'O';
    });
    EQUAL(at[0], 'O', "and writes it");

    pid_t child = fork();
    if (child == 0) {
        // Without the privilege to lock as much as one likes.
        struct rlimit limit = {2 * PAGE, 2 * PAGE};
        if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0)
            _exit(1);
        int fresh = secret(0);
        if (fresh < 0 || ftruncate(fresh, 4 * PAGE) != 0)
            _exit(2);
        void *large = map(fresh, 4 * PAGE);
        // Root may lock without limit.
        _exit(large == MAP_FAILED && errno == EAGAIN ? 0 : large != MAP_FAILED ? 0 : 3);
    }
    EQUAL(test_wait(child), 0, "the limit of locked memory");
    return test_end();
}
