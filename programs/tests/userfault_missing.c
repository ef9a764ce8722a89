// userfaultfd: missing pages of anonymous memory, copies, zeroes, wakes, both ways to get a
// descriptor, polls, errors. Passes on Linux as root.

#include "userfault.h"

#define PAGES 64

static int fd;
static char *memory, *source;

// Serves `count` faults with the page of `source` that has the same number.
static void *serve(void *count) {
    for (long left = (long)(intptr_t)count; left > 0; left--) {
        struct uf_message message = uf_next(fd);
        STEP_EQUAL(message.event, FAULT);
        size_t offset = (message.fault.address - (uintptr_t)memory) & ~(PAGE - 1);
        STEP_EQUAL(uf_copy(fd, memory + offset, source + offset, PAGE, 0), (int64_t)PAGE);
    }
    return 0;
}

static int served(long count, void (*touch)(void)) {
    pthread_t handler;
    NEED(pthread_create(&handler, 0, serve, (void *)(intptr_t)count) == 0);
    touch();
    pthread_join(handler, 0);
    return 1;
}

static void read_pages(void) {
    for (int page = 0; page < 8; page++)
        STEP_EQUAL(*(volatile char *)(memory + page * PAGE), page + 1);
}

static void write_pages(void) {
    for (int page = 8; page < 16; page++) {
        memory[page * PAGE + 1] = 99;
        STEP_EQUAL(memory[page * PAGE], page + 1);
        STEP_EQUAL(memory[page * PAGE + 1], 99);
    }
}

// The kernel's own copies wait for the handler, too.
static void through_pipe(void) {
    int ends[2];
    NEED(pipe(ends) == 0);
    STEP_EQUAL(write(ends[1], memory + 16 * PAGE, PAGE), (ssize_t)PAGE);
    STEP_EQUAL(read(ends[0], memory + 17 * PAGE, PAGE), (ssize_t)PAGE);
    STEP_EQUAL(memory[17 * PAGE], 17);
    close(ends[0]);
    close(ends[1]);
}

static int read_one(int from) {
    struct uf_message message;
    return read(from, &message, sizeof message);
}

static volatile int woken;
static void *touch_late(void *at) {
    woken = *(volatile char *)at + 1;
    return 0;
}

int main(void) {
    test_start();
    memory = uf_map(PAGES * PAGE);
    source = uf_map(PAGES * PAGE);
    for (int page = 0; page < PAGES; page++)
        memset(source + page * PAGE, page + 1, PAGE);

    FAILS(syscall(SYS_userfaultfd, 2), EINVAL, "userfaultfd: an unknown flag");
    fd = syscall(SYS_userfaultfd, O_CLOEXEC);
    CHECK(fd >= 0, "a userfaultfd");
    FAILS(uf_register(fd, memory, PAGE, MISSING), EINVAL, "before UFFDIO_API");
    FAILS(read_one(fd), EINVAL, "read: before UFFDIO_API");
    struct uf_api api = {.api = 0xAB};
    FAILS(ioctl(fd, UF_API, &api), EINVAL, "UFFDIO_API: another version");
    api = (struct uf_api){.api = 0xAA, .features = 1ull << 40};
    FAILS(ioctl(fd, UF_API, &api), EINVAL, "UFFDIO_API: an unknown feature");
    EQUAL(api.api, 0, "and the structure is zeroes");
    api = (struct uf_api){.api = 0xAA};
    EQUAL(ioctl(fd, UF_API, &api), 0, "UFFDIO_API");
    EQUAL(api.requests, 1ull << 63 | 3, "its requests");
    CHECK((api.features & (EVENT_FORK | THREAD_ID)) == (EVENT_FORK | THREAD_ID), "its features");
    FAILS(ioctl(fd, UF_API, &api), EINVAL, "UFFDIO_API: twice");

    FAILS(uf_register(fd, memory, PAGE, 0), EINVAL, "register: no mode");
    FAILS(uf_register(fd, memory, PAGE, 64), EINVAL, "register: an unknown mode");
    FAILS(uf_register(fd, memory + 1, PAGE, MISSING), EINVAL, "register: a crooked address");
    FAILS(uf_register(fd, memory, 0, MISSING), EINVAL, "register: no length");
    FAILS(uf_register(fd, memory, 1, MISSING), EINVAL, "register: a crooked length");
    FAILS(uf_register(fd, memory, -PAGE, MISSING), EINVAL, "register: a length that wraps");
    FAILS(uf_register(fd, memory, PAGE, MINOR), EINVAL, "register: minor faults of anonymous memory");
    struct uf_register request = {.range = {(uintptr_t)memory, PAGES * PAGE}, .mode = MISSING};
    EQUAL(ioctl(fd, UF_REGISTER, &request), 0, "register");
    CHECK((request.requests & 0x1c) == 0x1c, "wake, copy, zeropage");
    int other = uf_open(0, 0);
    FAILS(uf_register(other, memory, PAGE, MISSING), EBUSY, "register: another's");
    close(other);

    CHECK(served(8, read_pages), "reads are served");
    CHECK(served(8, write_pages), "writes are served");
    CHECK(served(2, through_pipe), "copies by the kernel are served");

    EQUAL(uf_copy(fd, memory, source, PAGE, 0), -EEXIST, "copy: something is there");
    EQUAL(uf_copy(fd, memory + 20 * PAGE, source, PAGE, 8), -EINVAL, "copy: an unknown mode");
    EQUAL(uf_copy(fd, memory + 20 * PAGE, source, 0, 0), -EINVAL, "copy: no length");
    EQUAL(uf_copy(fd, memory + 20 * PAGE, (void *)16, PAGE, 0), -EFAULT, "copy: a bad source");
    EQUAL(uf_copy(fd, source, source, PAGE, 0), -ENOENT, "copy: not registered");
    EQUAL(uf_copy(fd, memory + 22 * PAGE, source + 22 * PAGE, 4 * PAGE, 0), 4 * (int64_t)PAGE, "copy: four pages");
    EQUAL(uf_copy(fd, memory + 20 * PAGE, source, 4 * PAGE, 0), 2 * (int64_t)PAGE, "copy: as far as it goes");
    EQUAL(memory[23 * PAGE], 24, "and the page that was there stays");
    EQUAL(uf_zero(fd, memory + 26 * PAGE, 4 * PAGE, 0), 4 * (int64_t)PAGE, "zeropage");
    EQUAL(memory[28 * PAGE], 0, "zeroes");
    memory[28 * PAGE] = 7;
    EQUAL(memory[28 * PAGE] + memory[29 * PAGE], 7, "a page of its own");
    EQUAL(uf_zero(fd, memory + 26 * PAGE, PAGE, 0), -EEXIST, "zeropage: something is there");

    pthread_t late;
    NEED(pthread_create(&late, 0, touch_late, memory + 40 * PAGE) == 0);
    EQUAL(uf_next(fd).fault.address, (uintptr_t)memory + 40 * PAGE, "a fault");
    EQUAL(uf_copy(fd, memory + 40 * PAGE, source + 40 * PAGE, PAGE, 1), (int64_t)PAGE, "copy without a wake");
    test_sleep(20);
    EQUAL(woken, 0, "the fault waits");
    EQUAL(uf_wake(fd, memory, PAGES * PAGE), 0, "wake");
    pthread_join(late, 0);
    EQUAL(woken, 42, "the fault goes on");

    struct pollfd polled = {.fd = fd, .events = POLLIN};
    EQUAL(poll(&polled, 1, 0), 1, "poll: of a descriptor that waits");
    EQUAL(polled.revents, POLLERR, "is an error");
    fcntl(fd, F_SETFL, O_NONBLOCK);
    EQUAL(poll(&polled, 1, 0), 0, "poll: nothing yet");
    FAILS(read_one(fd), EAGAIN, "read: nothing yet");
    char small[16];
    FAILS(read(fd, small, sizeof small), EINVAL, "read: a short buffer");
    woken = 0;
    NEED(pthread_create(&late, 0, touch_late, memory + 41 * PAGE) == 0);
    EQUAL(poll(&polled, 1, 5000), 1, "poll: a fault");
    EQUAL(polled.revents, POLLIN, "is to be read");
    EQUAL(read_one(fd), 32, "read");
    EQUAL(uf_unregister(fd, memory + 40 * PAGE, 8 * PAGE), 0, "unregister");
    pthread_join(late, 0);
    EQUAL(woken, 1, "wakes who waits there");

    woken = 0;
    NEED(pthread_create(&late, 0, touch_late, memory + 50 * PAGE) == 0);
    EQUAL(poll(&polled, 1, 5000), 1, "a fault that nobody will serve");
    close(fd);
    pthread_join(late, 0);
    EQUAL(woken, 1, "close wakes who waits");

    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    CHECK(device >= 0, "/dev/userfaultfd");
    FAILS(ioctl(device, UF_API, &api), EINVAL, "the device knows one request");
    fd = ioctl(device, UF_NEW, O_NONBLOCK | USER_MODE_ONLY);
    CHECK(fd >= 0, "USERFAULTFD_IOC_NEW");
    api = (struct uf_api){.api = 0xAA};
    EQUAL(ioctl(fd, UF_API, &api), 0, "UFFDIO_API");
    EQUAL(uf_register(fd, memory + 50 * PAGE, 8 * PAGE, MISSING), 0, "register");
    int ends[2];
    NEED(pipe(ends) == 0);
    FAILS(write(ends[1], memory + 52 * PAGE, 1), EFAULT, "the kernel is not served");
    close(fd);
    close(device);
    return test_end();
}
