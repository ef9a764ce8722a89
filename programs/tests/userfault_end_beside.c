// A process ends while an access of another one waits for the handler of a userfaultfd: with
// `--check`, all invariants hold then. Passes on Linux as root.

#include "userfault.h"

static char *memory;

static void *touch(void *unused UNUSED) {
    return (void *)(intptr_t)(memory[0] == 7);
}

int main(void) {
    test_start();
    int fd = uf_open(O_CLOEXEC, 0);
    memory = uf_map(PAGE);
    char *page = uf_map(PAGE);
    page[0] = 7;
    NEED(fd >= 0 && uf_register(fd, memory, PAGE, MISSING) == 0);
    pthread_t thread;
    NEED(pthread_create(&thread, 0, touch, 0) == 0);
    STEP_EQUAL(uf_next(fd).event, FAULT);
    EXITS(3, "a child ends meanwhile", _exit(3));
    STEP_EQUAL(uf_copy(fd, memory, page, PAGE, 0), (int64_t)PAGE);
    void *found;
    NEED(pthread_join(thread, &found) == 0);
    EQUAL((intptr_t)found, 1, "the access goes on");
    return test_end();
}
