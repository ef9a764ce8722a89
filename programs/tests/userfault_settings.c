// userfaultfd: its fdinfo, and the permission to make one under
// vm.unprivileged_userfaultfd. Passes on Linux as root.

#include "userfault.h"

#define SETTING "/proc/sys/vm/unprivileged_userfaultfd"

static char *memory;

static void *touch(void *at) {
    *(volatile char *)at;
    return 0;
}

// Puts the file's text into `text`.
static const char *text_of(const char *path) {
    static char text[1024];
    int file = open(path, O_RDONLY);
    NEED(file >= 0);
    ssize_t length = read(file, text, sizeof text - 1);
    NEED(length >= 0);
    text[length] = 0;
    close(file);
    return text;
}

static const char *told_of(int fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    return text_of(path);
}

static void set(const char *value) {
    int file = open(SETTING, O_WRONLY);
    NEED(file >= 0 && write(file, value, 1) == 1);
    close(file);
}

// The errno of userfaultfd(2) for a process without privileges, or 0.
static int refusal(int flags) {
    pid_t child = fork();
    if (child == 0) {
        NEED(setgid(12345) == 0 && setuid(12345) == 0);
        _exit(syscall(SYS_userfaultfd, flags) < 0 ? errno : 0);
    }
    int status;
    NEED(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

int main(void) {
    test_start();
    memory = uf_map(4 * PAGE);
    int half = syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uf_api *api = (struct uf_api *)uf_map(PAGE);
    api->api = 0xAA;
    NEED(mprotect(api, PAGE, PROT_READ) == 0);
    FAILS(ioctl(half, UF_API, api), EFAULT, "UFFDIO_API without a place for its answer");
    NEED(mprotect(api, PAGE, PROT_READ | PROT_WRITE) == 0);
    api->api = 0xAA;
    EQUAL(ioctl(half, UF_API, api), 0, "is made once more");
    close(half);

    int fd = uf_open(O_CLOEXEC, UNPOPULATED);
    EQUAL(uf_register(fd, memory, 4 * PAGE, MISSING), 0, "register");
    const char *text = told_of(fd);
    CHECK(strstr(text, "\nflags:\t02000000\n") != 0, "its flags");
    CHECK(strstr(text, "\npending:\t0\ntotal:\t0\nAPI:\taa:80002000:80000000000001ff\n") != 0, "nobody waits");
    pthread_t first, second;
    NEED(pthread_create(&first, 0, touch, memory) == 0);
    EQUAL(uf_next(fd).event, FAULT, "a fault");
    NEED(pthread_create(&second, 0, touch, memory + PAGE) == 0);
    int waits = 0;
    for (int tries = 0; tries < 1000 && !waits; tries++) {
        test_sleep(1);
        waits = strstr(told_of(fd), "\npending:\t1\ntotal:\t2\n") != 0;
    }
    CHECK(waits, "two wait, one of them unread");
    EQUAL(uf_zero(fd, memory, 2 * PAGE, 0), 2 * (int64_t)PAGE, "zeroes");
    pthread_join(first, 0);
    pthread_join(second, 0);
    CHECK(strstr(told_of(fd), "\npending:\t0\ntotal:\t0\n") != 0, "nobody waits any more");
    close(fd);

    EQUAL(strcmp(text_of(SETTING), "0\n"), 0, "the setting");
    EQUAL(refusal(0), EPERM, "faults of the kernel need a privilege");
    EQUAL(refusal(USER_MODE_ONLY), 0, "faults of programs do not");
    set("1");
    EQUAL(strcmp(text_of(SETTING), "1\n"), 0, "it is set");
    EQUAL(refusal(0), 0, "now nothing needs one");
    set("0");
    EQUAL(refusal(0), EPERM, "and again");
    int file = open(SETTING, O_WRONLY);
    FAILS(write(file, "2", 1), EINVAL, "no other value");
    return test_end();
}
