// A signal of the process is meant for a thread that blocks it for one call
// before it sees the signal: another thread gets it. Passes on Linux as root.

#include "userfault.h"

static volatile int caught_by;
static int fd, pipes[2];
static char *mask_page;

static void note(int signal) {
    (void)signal;
    caught_by = syscall(SYS_gettid);
}

static void *send_and_serve(void *unused UNUSED) {
    EQUAL(uf_next(fd).event, FAULT, "the first thread reads its mask");
    STEP_EQUAL(kill(getpid(), SIGUSR1), 0);
    char *mask = uf_map(PAGE);
    *(uint64_t *)mask = 1ull << (SIGUSR1 - 1);
    STEP_EQUAL(uf_copy(fd, mask_page, mask, PAGE, 0), (int64_t)PAGE);
    for (int round = 0; round < 5000 && !caught_by; round++)
        test_sleep(1);
    EQUAL(caught_by, syscall(SYS_gettid), "the second thread handles the signal");
    STEP_EQUAL(write(pipes[1], "x", 1), 1);
    return 0;
}

int main(void) {
    test_start();
    struct sigaction action = {.sa_handler = note, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, 0);
    NEED(pipe(pipes) == 0);
    mask_page = uf_map(PAGE);
    fd = uf_open(O_CLOEXEC, UNPOPULATED);
    NEED(fd >= 0 && uf_register(fd, mask_page, PAGE, MISSING) == 0);
    pthread_t thread;
    NEED(pthread_create(&thread, 0, send_and_serve, 0) == 0);
    struct pollfd end = {.fd = pipes[0], .events = POLLIN};
    EQUAL(syscall(SYS_ppoll, &end, 1, 0, mask_page, 8), 1, "while the first one sleeps");
    NEED(pthread_join(thread, 0) == 0);
    return test_end();
}
