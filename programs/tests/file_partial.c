// Transfers whose memory ends half-way: what could be moved counts.

#include "test.h"

#include <sys/uio.h>

int main(void) {
    test_start();
    char *memory = test_map(2 * PAGE);
    NEED(munmap(memory + PAGE, PAGE) == 0);
    memset(memory, 1, PAGE);
    int file = open("/tmp/file-partial", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && ftruncate(file, 2 * PAGE) == 0);
    EQUAL(pwrite(file, memory, 2 * PAGE, 0), PAGE, "pwrite: up to the hole");
    EQUAL(pread(file, memory, 2 * PAGE, 0), PAGE, "pread: up to the hole");
    FAILS(pwrite(file, memory + PAGE, PAGE, 0), EFAULT, "pwrite: nothing but a hole");
    FAILS(pread(file, memory + PAGE, PAGE, 0), EFAULT, "pread: nothing but a hole");
    STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
    EQUAL(write(file, memory, 2 * PAGE), PAGE, "write: up to the hole");
    EQUAL(lseek(file, 0, SEEK_CUR), PAGE, "write: the position is behind what was written");

    int ends[2];
    NEED(pipe(ends) == 0);
    EQUAL(write(ends[1], memory, 2 * PAGE), PAGE, "a pipe: up to the hole");
    FAILS(read(ends[0], memory + PAGE, 10), EFAULT, "a pipe: nothing is read into a hole");
    EQUAL(read(ends[0], memory, PAGE), PAGE, "a pipe: and nothing was lost by it");

    struct iovec pieces[2] = {{memory, 100}, {memory + PAGE, 100}};
    EQUAL(pwritev(file, pieces, 2, 0), 100, "pwritev: the pieces before the hole");
    FAILS(syscall(SYS_pwrite64, file, memory, -1ul, 0), EFAULT, "a length beyond all addresses moves nothing");
    pieces[1].iov_len = -1ul;
    FAILS(pwritev(file, pieces, 2, 0), EINVAL, "pwritev: a length that is negative");
    unlink("/tmp/file-partial");
    return test_end();
}
