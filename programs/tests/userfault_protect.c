// userfaultfd: write-protection of anonymous memory, pages that are moved, and what pagemap says.
// Passes on Linux as root.

#include "userfault.h"

#define PAGES 64

static int fd;
static char *memory, *other;

static uint64_t entry(const void *at) {
    uint64_t value = 0;
    int file = open("/proc/self/pagemap", O_RDONLY);
    STEP_EQUAL(pread(file, &value, 8, (uintptr_t)at / PAGE * 8), 8);
    close(file);
    return value;
}

static int is_protected(const void *at) { return entry(at) >> 57 & 1; }

static void *write_one(void *at) {
    *(volatile char *)at = 9;
    return 0;
}

// A write that waits until it is served.
static struct uf_message blocked(void *at, pthread_t *thread) {
    NEED(pthread_create(thread, 0, write_one, at) == 0);
    return uf_next(fd);
}

int main(void) {
    test_start();
    pthread_t thread;
    struct uf_message message;
    memory = uf_map(PAGES * PAGE);
    other = uf_map(PAGES * PAGE);
    memset(memory, 1, 16 * PAGE);
    memset(other, 2, 32 * PAGE);
    fd = uf_open(0, 0);
    EQUAL(uf_register(fd, memory, PAGES * PAGE, PROTECTED), 0, "register");
    FAILS(uf_protect(fd, memory, PAGE, 3), EINVAL, "protect: both flags");
    FAILS(uf_protect(fd, memory, PAGE, 4), EINVAL, "protect: an unknown flag");
    FAILS(uf_protect(fd, memory + 1, PAGE, 1), EINVAL, "protect: a crooked address");
    FAILS(uf_protect(fd, other, PAGE, 1), ENOENT, "protect: not registered");
    EQUAL(uf_protect(fd, memory, 8 * PAGE, 1), 0, "protect");
    CHECK(is_protected(memory) && is_protected(memory + 7 * PAGE), "pagemap says so");
    CHECK(!is_protected(memory + 8 * PAGE), "and not more");
    EQUAL(memory[3 * PAGE], 1, "reads go on");
    message = blocked(memory + 3 * PAGE, &thread);
    EQUAL(message.event, FAULT, "a write is a message");
    EQUAL(message.fault.flags, FLAG_WRITE | FLAG_PROTECTED, "of a protected page");
    EQUAL(message.fault.address, (uintptr_t)memory + 3 * PAGE, "with its address");
    EQUAL(memory[3 * PAGE], 1, "nothing is written");
    EQUAL(uf_protect(fd, memory + 3 * PAGE, PAGE, 0), 0, "lift");
    pthread_join(thread, 0);
    EQUAL(memory[3 * PAGE], 9, "it is written");
    CHECK(!is_protected(memory + 3 * PAGE) && is_protected(memory + 4 * PAGE), "that page alone");

    // A child has nothing of it.
    pid_t pid = fork();
    if (pid == 0) {
        memory[4 * PAGE] = 5;
        _exit(is_protected(memory + 5 * PAGE));
    }
    int status = 0;
    NEED(waitpid(pid, &status, 0) == pid);
    EQUAL(status, 0, "a child is not protected");
    message = blocked(memory + 4 * PAGE, &thread);
    EQUAL(message.fault.flags, FLAG_WRITE | FLAG_PROTECTED, "the parent is still");
    EQUAL(uf_protect(fd, memory + 4 * PAGE, PAGE, 0), 0, "lift");
    pthread_join(thread, 0);
    EQUAL(memory[4 * PAGE], 9, "it is written");

    // mprotect keeps it.
    EQUAL(mprotect(memory, 16 * PAGE, PROT_READ), 0, "mprotect");
    EQUAL(mprotect(memory, 16 * PAGE, PROT_READ | PROT_WRITE), 0, "and back");
    CHECK(is_protected(memory + 5 * PAGE), "it is still protected");
    message = blocked(memory + 5 * PAGE, &thread);
    EQUAL(uf_unregister(fd, memory, 16 * PAGE), 0, "unregister");
    EQUAL(uf_wake(fd, memory, 16 * PAGE), 0, "wake");
    pthread_join(thread, 0);
    EQUAL(memory[5 * PAGE], 9, "who waits goes on");
    CHECK(!is_protected(memory + 6 * PAGE), "nothing is protected any more");
    memory[6 * PAGE] = 3;
    EQUAL(memory[6 * PAGE], 3, "and can be written");
    close(fd);

    // Copies that are protected, and moves of pages that no child shares any more.
    memset(other, 2, 32 * PAGE);
    fd = uf_open(0, 0);
    char *heap = uf_map(PAGES * PAGE);
    EQUAL(uf_register(fd, heap, PAGES * PAGE, MISSING | PROTECTED), 0, "register");
    EQUAL(uf_copy(fd, heap, other, 4 * PAGE, 2), 4 * (int64_t)PAGE, "a protected copy");
    CHECK(is_protected(heap) && is_protected(heap + 3 * PAGE), "is protected");
    EQUAL(heap[PAGE], 2, "and has the bytes");
    message = blocked(heap + PAGE, &thread);
    EQUAL(message.fault.flags, FLAG_WRITE | FLAG_PROTECTED, "a write to it");
    EQUAL(uf_protect(fd, heap, 4 * PAGE, 0), 0, "lift");
    pthread_join(thread, 0);
    EQUAL(heap[PAGE], 9, "it is written");

    EQUAL(uf_move(fd, heap + 8 * PAGE, other + 8 * PAGE, 8 * PAGE, 0), 8 * (int64_t)PAGE, "move");
    EQUAL(heap[15 * PAGE], 2, "the pages are here");
    EQUAL(other[15 * PAGE], 0, "and there no more");
    EQUAL(uf_move(fd, heap + 8 * PAGE, other + 16 * PAGE, PAGE, 0), -EEXIST, "move: something is there");
    EQUAL(uf_move(fd, heap + 20 * PAGE, other + 8 * PAGE + 0, PAGE, 8), -EINVAL, "move: an unknown mode");
    EQUAL(uf_move(fd, other + 8 * PAGE, other + 16 * PAGE, PAGE, 0), -EINVAL, "move: not registered");
    EQUAL(uf_move(fd, heap + 20 * PAGE, other + 40 * PAGE, PAGE, 0), -ENOENT, "move: a hole");
    EQUAL(uf_move(fd, heap + 20 * PAGE, other + 40 * PAGE, PAGE, 2), (int64_t)PAGE, "move: holes are allowed");
    message = blocked(heap + 30 * PAGE, &thread);
    EQUAL(message.fault.flags, FLAG_WRITE, "a missing page");
    EQUAL(uf_move(fd, heap + 30 * PAGE, other + 30 * PAGE, PAGE, 0), (int64_t)PAGE, "is moved to");
    pthread_join(thread, 0);
    EQUAL(heap[30 * PAGE] + heap[30 * PAGE + 1], 11, "and written");
    close(fd);

    // Writes send no messages; absent pages count.
    fd = uf_open(0, ASYNC);
    char *watched = uf_map(PAGES * PAGE);
    memset(watched, 1, 4 * PAGE);
    EQUAL(uf_register(fd, watched, PAGES * PAGE, PROTECTED), 0, "register");
    EQUAL(uf_protect(fd, watched, 8 * PAGE, 1), 0, "protect");
    CHECK(is_protected(watched) && is_protected(watched + 7 * PAGE), "all of it");
    watched[PAGE] = 2;
    watched[6 * PAGE] = 2;
    CHECK(!is_protected(watched + PAGE) && !is_protected(watched + 6 * PAGE), "writes lift it");
    CHECK(is_protected(watched) && is_protected(watched + 5 * PAGE), "of their pages alone");
    EQUAL(watched[5 * PAGE], 0, "a read");
    CHECK(is_protected(watched + 5 * PAGE), "does not");
    close(fd);
    return test_end();
}
