// fork and vfork: what is shared and what is not.

#include "test.h"

static int value = 1;
static int calls;

static void count_call(void) { calls++; }

int main(void) {
    test_start();
    pid_t self = getpid();
    char *heap = malloc(100000);
    NEED(heap);
    memset(heap, 'a', 100000);

    EXITS(7, "fork: the child has its own memory", {
        value = 2;
        memset(heap, 'b', 100000);
        _exit(value == 2 && heap[99999] == 'b' ? 7 : 1);
    });
    CHECK(value == 1 && heap[0] == 'a' && heap[99999] == 'a', "fork: the parent's memory is kept");
    EXITS(0, "fork: the child has another pid and the right parent", {
        STEP(getpid() != self);
        STEP_EQUAL(getppid(), self);
    });
    pid_t child = CHILD(_exit(getpid() & 0x7f));
    EQUAL(WEXITSTATUS(test_wait(child)), child & 0x7f, "fork gives the child's pid");

    int pipes[2];
    NEED(pipe(pipes) == 0);
    child = CHILD({
        close(pipes[0]);
        STEP_EQUAL(write(pipes[1], "hello", 5), 5);
    });
    close(pipes[1]);
    char text[10] = "";
    EQUAL(read(pipes[0], text, 10), 5, "fork: descriptors are inherited");
    EQUAL(read(pipes[0], text, 10), 0, "fork: the child's descriptors are closed at its exit");
    close(pipes[0]);
    test_wait(child);

    int file = open("/tmp/fork-offset", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEED(file >= 0);
    EXITS(0, "fork: the child writes through an inherited descriptor",
          STEP_EQUAL(write(file, "12345", 5), 5));
    EQUAL(lseek(file, 0, SEEK_CUR), 5, "fork: the file offset is shared");
    close(file);
    unlink("/tmp/fork-offset");

    int before = test_failures;
    for (int round = 0; round < 50; round++) {
        child = fork();
        if (child == 0) {
            value += round;
            heap[round * PAGE % 100000] = 'c';
            _exit(value & 0x7f);
        }
        STEP_EQUAL(WEXITSTATUS(test_wait(child)), 1 + round);
    }
    ALL_STEPS(before, "fork: fifty children one after the other");

    pid_t children[20];
    for (int index = 0; index < 20; index++)
        children[index] = CHILD({
            for (int page = 0; page < 24; page++)
                heap[page * PAGE] = index;
            test_sleep(1);
            for (int page = 0; page < 24; page++)
                STEP_EQUAL(heap[page * PAGE], index);
        });
    before = test_failures;
    for (int index = 19; index >= 0; index--)
        STEP_EQUAL(test_wait(children[index]), 0);
    ALL_STEPS(before, "fork: twenty children at once, each with its own memory");

    EXITS(21, "fork: generations nest", {
        pid_t inner = CHILD({
            pid_t innermost = CHILD(_exit(20));
            _exit(WEXITSTATUS(test_wait(innermost)) + 1);
        });
        _exit(WEXITSTATUS(test_wait(inner)));
    });

    volatile int *shared = (volatile int *)&value;
    *shared = 10;
    child = vfork();
    if (child == 0) {
        *shared = 11;
        _exit(4);
    }
    EQUAL(*shared, 11, "vfork: the parent waits and shares the memory");
    EQUAL(WEXITSTATUS(test_wait(child)), 4, "vfork: the child exits");

    atexit(count_call);
    EXITS(5, "exit runs the handlers and flushes", {
        calls = 0;
        exit(5);
    });
    EQUAL(calls, 0, "the child's exit handlers do not run in the parent");
    free(heap);
    return test_end();
}
