// memory: 64M
// kernel-only: it uses all memory of the machine
//
// Bad programs: calls that need a page of the program when no memory is free. A
// process is killed, and none waits forever.

#include "test.h"

#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/sysinfo.h>
#include <termios.h>

static unsigned long free_pages(void) {
    struct sysinfo information;
    NEED(sysinfo(&information) == 0);
    return information.freeram / PAGE;
}

static char *area(size_t length) {
    char *memory = mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(memory != MAP_FAILED);
    madvise(memory, length, MADV_NOHUGEPAGE);
    return memory;
}

// A process that takes memory must not outlive the one that started it, which may be killed for want of
// memory: the next scenario would wait for memory that does not come back.
static void end_with_parent(pid_t parent) {
    NEED(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
    if (getppid() != parent)
        _exit(0);
}

// Touches pages of `memory` from `*used` on until no more than `left` are free.
static void leave(char *memory, size_t *used, unsigned long left) {
    while (free_pages() > left)
        memory[PAGE * (*used)++] = 1;
}

// The number of a new thread is written to memory that the parent shares with
// it copy-on-write: that takes a page.
static void clone_with_number(void) {
    volatile int *number = (volatile int *)test_map(PAGE);
    *number = 1;
    size_t used = 0;
    char *memory = area((free_pages() + 1000) * PAGE);
    leave(memory, &used, 180);
    for (int round = 0; round < 1200; round++) {
        pid_t child = syscall(SYS_clone, SIGCHLD | 0x01000000 /* CLONE_CHILD_SETTID */, 0, 0, number, 0);
        // It must not outlive this process, which may be the one that is killed: as a copy of it, it
        // would keep all the memory.
        if (child == 0)
            _exit(0);
        if (child > 0)
            test_wait(child);
        memory[PAGE * used++] = 1;
    }
}

// A process that looks at the console is the largest, and shall be killed,
// while another is in the middle of a call about the console.
static void console(void) {
    unsigned long pages = free_pages();
    pid_t self = getpid();
    pid_t large = CHILD({
        end_with_parent(self);
        size_t used = 0;
        leave(area(pages * PAGE), &used, pages / 3);
        struct pollfd keyboard = {0, POLLIN, 0};
        for (;;)
            poll(&keyboard, 1, 1);
    });
    while (free_pages() > pages / 2)
        test_sleep(10);
    size_t used = 0;
    char *settings = area(256 * PAGE);
    leave(area(pages * PAGE), &used, 60);
    for (int at = 0; at < 256; at++)
        ioctl(0, TCGETS, settings + at * PAGE);
    kill(large, SIGKILL);
    test_wait(large);
}

// A process that waits for the position of a file that another reads into
// memory that is not there.
static void shared_position(void) {
    unsigned long pages = free_pages();
    // Longer than what the reader has memory for, and not by much: if the large process is killed,
    // the reader goes on to the end of the file, and an emulator writes 30 MiB of zeroes a second.
    int file = memfd_create("position", 0);
    NEED(file >= 0 && ftruncate(file, 2 * pages * PAGE) == 0);
    pid_t self = getpid();
    pid_t large = CHILD({
        end_with_parent(self);
        size_t used = 0;
        char *memory = area(pages * PAGE);
        leave(memory, &used, pages / 2);
        for (;;)
            if (lseek(file, 0, SEEK_SET) < 0 || read(file, memory, 1) < 0)
                _exit(0);
    });
    // The memory of earlier processes may be freed late: not all of half need be
    // taken.
    while (free_pages() > pages / 2 + pages / 8)
        test_sleep(10);
    pid_t reader = CHILD({
        end_with_parent(self);
        char *memory = area(pages * PAGE);
        for (;;)
            if (read(file, memory, pages * PAGE) <= 0)
                _exit(0);
    });
    test_wait(reader);
    kill(large, SIGKILL);
    test_wait(large);
    close(file);
}

// Pages in advance, when there are just enough.
static void populate(void) {
    pid_t self = getpid();
    pid_t idle = CHILD({
        end_with_parent(self);
        for (;;)
            pause();
    });
    size_t used = 0;
    leave(area(free_pages() * PAGE), &used, 50);
    char *one = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    STEP(one != MAP_FAILED);
    STEP_EQUAL(waitpid(idle, 0, WNOHANG), 0);
    kill(idle, SIGKILL);
    STEP(WIFSIGNALED(test_wait(idle)));
}

// The child may be the one that is killed; no process may hang.
static void comes_back(pid_t child, const char *text) {
    int status = test_wait(child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0) ||
              (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL),
          text);
    test_arm_watchdog();
}

int main(void) {
    test_start();
    comes_back(CHILD(clone_with_number()), "clone that writes a number");
    comes_back(CHILD(console()), "a call about the console");
    comes_back(CHILD(shared_position()), "a read at a position that others wait for");
    EXITS(0, "populate kills nobody when there is enough", populate());
    EXITS(0, "the memory is back", memset(test_map(16 << 20), 1, 16 << 20));
    return test_end();
}
