// splice, tee and vmsplice: the moved and the kept data, and the refused calls.

#include "test.h"

#include <sys/uio.h>

static int one[2], other[2];
static char data[200000], back[200000];

static void fresh(int flags) {
    for (int index = 0; index < 2; index++) {
        if (one[index])
            close(one[index]), close(other[index]);
    }
    NEED(pipe2(one, flags) == 0 && pipe2(other, flags) == 0);
}

static int file_of(const char *text) {
    int file = open("splice.txt", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text));
    NEED(lseek(file, 0, SEEK_SET) == 0);
    return file;
}

static void files(void) {
    fresh(0);
    int file = file_of("0123456789");
    loff_t offset = 3;
    EQUAL(splice(file, &offset, one[1], 0, 4, 0), 4, "file to pipe, at an offset");
    CHECK(offset == 7 && lseek(file, 0, SEEK_CUR) == 0, "which moves, and the position does not");
    EQUAL(read(one[0], back, 100), 4, "the pipe has it");
    CHECK(!memcmp(back, "3456", 4), "as it was");
    EQUAL(splice(file, 0, one[1], 0, 100, SPLICE_F_MOVE | SPLICE_F_MORE), 10,
          "file to pipe, at the position");
    EQUAL(lseek(file, 0, SEEK_CUR), 10, "which moves");
    EQUAL(splice(file, 0, one[1], 0, 100, 0), 0, "the end of the file");
    offset = 20;
    EQUAL(splice(one[0], 0, file, &offset, 6, 0), 6, "pipe to file, at an offset");
    EQUAL(splice(one[0], 0, file, 0, 100, 0), 4, "pipe to file: what there is");
    EQUAL(pread(file, back, 100, 0), 26, "the file is longer");
    CHECK(!memcmp(back + 10, "6789", 4) && !memcmp(back + 20, "012345", 6), "by both");
    FAILS(splice(one[0], 0, file, 0, 1, SPLICE_F_NONBLOCK), EAGAIN, "an empty pipe");
    close(one[1]);
    EQUAL(splice(one[0], 0, file, 0, 1, 0), 0, "that nobody writes to");
    one[1] = dup(other[1]);
    close(file);
}

static void refusals(void) {
    fresh(0);
    int file = file_of("text"), folder = open("/", O_RDONLY);
    loff_t offset = 0, negative = -1;
    FAILS(splice(file, 0, one[1], 0, 1, 16), EINVAL, "splice: flags");
    EQUAL(splice(-1, 0, -1, 0, 0, 16), 0, "splice: nothing");
    FAILS(splice(-1, 0, one[1], 0, 1, 0), EBADF, "splice: no source");
    FAILS(splice(file, 0, -1, 0, 1, 0), EBADF, "splice: no target");
    FAILS(splice(file, 0, file, 0, 1, 0), EINVAL, "splice: no pipe");
    FAILS(splice(one[1], 0, file, 0, 1, 0), EBADF, "splice: the wrong end");
    FAILS(splice(file, 0, one[0], 0, 1, 0), EBADF, "splice: the other wrong end");
    FAILS(splice(one[0], &offset, file, 0, 1, 0), ESPIPE, "splice: the offset of a pipe");
    FAILS(splice(file, 0, one[1], &offset, 1, 0), ESPIPE, "splice: of the target");
    FAILS(splice(file, &negative, one[1], 0, 1, 0), EINVAL, "splice: a negative offset");
    FAILS(splice(file, test_wild(8), one[1], 0, 1, 0), EFAULT, "splice: no offset");
    FAILS(splice(one[0], 0, one[1], 0, 1, 0), EINVAL, "splice: a pipe to itself");
    FAILS(splice(folder, 0, one[1], 0, 1, 0), EINVAL, "splice: a folder");
    int append = open("splice.txt", O_WRONLY | O_APPEND);
    NEED(write(one[1], "x", 1) == 1);
    FAILS(splice(one[0], 0, append, 0, 1, 0), EINVAL, "splice: a file opened to append");
    offset = 0;
    FAILS(syscall(SYS_copy_file_range, one[0], 0, file, &offset, 1, 0), EINVAL, "copy_file_range: a pipe");
    FAILS(syscall(SYS_copy_file_range, file, &offset, one[1], 0, 1, 0), EINVAL, "copy_file_range: to a pipe");
    FAILS(syscall(SYS_copy_file_range, folder, 0, file, 0, 1, 0), EISDIR, "copy_file_range: a folder");
    FAILS(tee(one[0], one[1], 1, 0), EINVAL, "tee: a pipe to itself");
    FAILS(tee(file, other[1], 1, 0), EINVAL, "tee: a file");
    FAILS(tee(one[0], other[1], 1, 16), EINVAL, "tee: flags");
    FAILS(tee(one[1], other[1], 1, 0), EBADF, "tee: the wrong end");
    EQUAL(tee(-1, -1, 0, 0), 0, "tee: nothing");
    struct iovec range = {data, 1}, wild = {test_wild(8), 1};
    FAILS(vmsplice(file, &range, 1, 0), EBADF, "vmsplice: a file");
    FAILS(vmsplice(-1, &range, 1, 0), EBADF, "vmsplice: nothing");
    FAILS(vmsplice(one[1], &range, 1, 16), EINVAL, "vmsplice: flags");
    FAILS(vmsplice(one[1], &range, 1025, 0), EINVAL, "vmsplice: too many ranges");
    FAILS(vmsplice(one[1], &wild, 1, 0), EFAULT, "vmsplice: memory that is not there");
    EQUAL(vmsplice(one[1], &range, 0, 0), 0, "vmsplice: no range");
    signal(SIGPIPE, SIG_IGN);
    close(other[0]);
    FAILS(splice(one[0], 0, other[1], 0, 1, 0), EPIPE, "splice: a pipe that nobody reads");
    FAILS(tee(one[0], other[1], 1, 0), EPIPE, "tee: the same");
    FAILS(vmsplice(other[1], &range, 1, 0), EPIPE, "vmsplice: the same");
    EQUAL(read(one[0], back, 10), 1, "and nothing was lost");
    other[0] = dup(one[0]);
    close(file), close(folder), close(append);
}

static void pipes(void) {
    fresh(0);
    NEED(write(one[1], "abcdefgh", 8) == 8);
    EQUAL(tee(one[0], other[1], 5, 0), 5, "tee");
    EQUAL(splice(one[0], 0, other[1], 0, 3, 0), 3, "splice between pipes");
    EQUAL(read(other[0], back, 100), 8, "the other has both");
    CHECK(!memcmp(back, "abcdeabc", 8), "in order");
    EQUAL(read(one[0], back, 100), 5, "the one has the rest");
    CHECK(!memcmp(back, "defgh", 5), "as it was");
    FAILS(tee(one[0], other[1], 1, SPLICE_F_NONBLOCK), EAGAIN, "tee: an empty pipe");
    FAILS(splice(one[0], 0, other[1], 0, 1, SPLICE_F_NONBLOCK), EAGAIN, "splice: the same");
    pid_t child = fork();
    if (child == 0) {
        test_sleep(50);
        _exit(write(one[1], "late", 4) == 4 ? 0 : 1);
    }
    EQUAL(splice(one[0], 0, other[1], 0, 100, 0), 4, "splice waits for bytes");
    test_wait(child);
}

static void memory(void) {
    fresh(0);
    for (size_t index = 0; index < sizeof data; index++)
        data[index] = (char)(index * 13 + index / 5000);
    struct iovec ranges[] = {{data, 100}, {data + 100, 0}, {data + 100, 3 * PAGE}};
    EQUAL(vmsplice(one[1], ranges, 3, SPLICE_F_GIFT), 100 + 3 * PAGE, "memory to a pipe");
    struct iovec into[] = {{back, 50}, {back + 50, sizeof back - 50}};
    EQUAL(vmsplice(one[0], into, 2, 0), 100 + 3 * PAGE, "a pipe to memory");
    CHECK(!memcmp(data, back, 100 + 3 * PAGE), "as it was");
    FAILS(vmsplice(one[0], into, 2, SPLICE_F_NONBLOCK), EAGAIN, "vmsplice: an empty pipe");
    char *aligned = test_map(32 * PAGE);
    struct iovec large = {aligned, 32 * PAGE};
    EQUAL(vmsplice(one[1], &large, 1, 0), 16 * PAGE, "as much as there is room for");
    FAILS(vmsplice(one[1], &large, 1, SPLICE_F_NONBLOCK), EAGAIN, "and no more");
    NEED(munmap(aligned + PAGE, PAGE) == 0);
    fresh(0);
    large.iov_len = 2 * PAGE;
    EQUAL(vmsplice(one[1], &large, 1, 0), PAGE, "up to a hole");
    // A reader in another process gets the pages that were given to a pipe.
    fresh(0);
    char *page = test_map(PAGE);
    strcpy(page, "before");
    pid_t child = fork();
    if (child == 0) {
        struct iovec range = {page, PAGE};
        if (vmsplice(one[1], &range, 1, 0) != (ssize_t)PAGE || munmap(page, PAGE) != 0)
            _exit(1);
        if (write(other[1], "x", 1) != 1)
            _exit(2);
        _exit(0);
    }
    char byte;
    NEED(read(other[0], &byte, 1) == 1);
    memset(page, 'n', PAGE);
    EQUAL(read(one[0], back, PAGE), PAGE, "a page of a child");
    CHECK(!strcmp(back, "before"), "does not show what its parent writes");
    EQUAL(test_wait(child), 0, "the child is content");
    int secret = (int)syscall(447, 0);
    if (secret >= 0) {
        NEED(ftruncate(secret, PAGE) == 0);
        char *hidden = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0);
        NEED(hidden != MAP_FAILED);
        hidden[0] = 1;
        struct iovec range = {hidden, 1};
        FAILS(vmsplice(one[1], &range, 1, 0), EFAULT, "secret memory");
    }
}

int main(void) {
    test_start();
    NEED(chdir("/tmp") == 0);
    files();
    refusals();
    pipes();
    memory();
    unlink("splice.txt");
    return test_end();
}
