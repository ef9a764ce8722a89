// Pipes between processes: both ends block and wake, much data goes through,
// several writers do not mix.

#include "test.h"

static char block[50000];

static volatile int caught;
static void catch(int signal) { caught = signal; }

int main(void) {
    test_start();
    int pipes[2], answer[2];
    char text[100];

    NEED(pipe(pipes) == 0);
    pid_t child = CHILD({
        test_sleep(20);
        STEP_EQUAL(write(pipes[1], "late", 4), 4);
    });
    EQUAL(read(pipes[0], text, 100), 4, "read waits for the writer");
    STEP_EQUAL(test_wait(child), 0);

    // Two megabytes: the writer fills the pipe again and again.
    NEED(pipe(answer) == 0);
    child = CHILD({
        unsigned long sum = 0;
        long total = 0;
        ssize_t count;
        close(pipes[1]);
        while ((count = read(pipes[0], block, 7777)) > 0) {
            for (ssize_t index = 0; index < count; index++)
                sum = sum * 31 + (unsigned char)block[index];
            total += count;
        }
        STEP_EQUAL(total, 40 * (long)sizeof block);
        STEP_EQUAL(write(answer[1], &sum, sizeof sum), sizeof sum);
    });
    unsigned long expected = 0, got = 0;
    int before = test_failures;
    for (int round = 0; round < 40; round++) {
        for (size_t index = 0; index < sizeof block; index++) {
            block[index] = round * 5 + index;
            expected = expected * 31 + (unsigned char)block[index];
        }
        STEP_EQUAL(write(pipes[1], block, sizeof block), sizeof block);
    }
    close(pipes[1]);
    close(pipes[0]);
    STEP_EQUAL(read(answer[0], &got, sizeof got), sizeof got);
    STEP_EQUAL(got, expected);
    STEP_EQUAL(test_wait(child), 0);
    ALL_STEPS(before, "two megabytes through a pipe");

    // Back and forth.
    NEED(pipe(pipes) == 0);
    child = CHILD({
        int number;
        close(pipes[1]);
        close(answer[0]);
        while (read(pipes[0], &number, sizeof number) == sizeof number) {
            number = number * 2 + 1;
            write(answer[1], &number, sizeof number);
        }
    });
    close(pipes[0]);
    before = test_failures;
    for (int round = 0; round < 300; round++) {
        int number = round;
        STEP_EQUAL(write(pipes[1], &number, sizeof number), sizeof number);
        STEP_EQUAL(read(answer[0], &number, sizeof number), sizeof number);
        STEP_EQUAL(number, round * 2 + 1);
    }
    close(pipes[1]);
    STEP_EQUAL(test_wait(child), 0);
    ALL_STEPS(before, "300 questions and answers between two processes");

    // Five writers: each record of 4096 bytes stays in one piece.
    NEED(pipe(pipes) == 0);
    pid_t writers[5];
    for (int writer = 0; writer < 5; writer++)
        writers[writer] = CHILD({
            memset(block, 'a' + writer, 4096);
            for (int round = 0; round < 20; round++)
                STEP_EQUAL(write(pipes[1], block, 4096), 4096);
        });
    close(pipes[1]);
    int records[5] = {0}, mixed = 0, filled = 0;
    for (;;) {
        ssize_t count = read(pipes[0], block + filled, 4096 - filled);
        if (count <= 0)
            break;
        filled += count;
        if (filled < 4096)
            continue;
        filled = 0;
        for (int index = 1; index < 4096; index++)
            mixed += block[index] != block[0];
        if (block[0] >= 'a' && block[0] < 'f')
            records[block[0] - 'a']++;
    }
    for (int writer = 0; writer < 5; writer++)
        STEP_EQUAL(test_wait(writers[writer]), 0);
    EQUAL(mixed, 0, "records of five writers do not mix");
    CHECK(records[0] == 20 && records[1] == 20 && records[2] == 20 && records[3] == 20 &&
              records[4] == 20,
          "and all arrive");
    close(pipes[0]);

    // A chain of five processes, each adds one to every byte.
    int first[2], last;
    NEED(pipe(first) == 0);
    last = first[0];
    before = test_failures;
    pid_t links[5];
    for (int link = 0; link < 5; link++) {
        NEED(pipe(pipes) == 0);
        links[link] = CHILD({
            close(first[1]);
            close(pipes[0]);
            ssize_t count;
            while ((count = read(last, text, 100)) > 0) {
                for (ssize_t index = 0; index < count; index++)
                    text[index]++;
                STEP_EQUAL(write(pipes[1], text, count), count);
            }
        });
        close(last);
        close(pipes[1]);
        last = pipes[0];
    }
    STEP_EQUAL(write(first[1], "ABC", 3), 3);
    STEP_EQUAL(read(last, text, 100), 3);
    STEP(memcmp(text, "FGH", 3) == 0);
    close(first[1]);
    STEP_EQUAL(read(last, text, 100), 0);
    for (int link = 0; link < 5; link++)
        STEP_EQUAL(test_wait(links[link]), 0);
    ALL_STEPS(before, "a chain of five processes");
    close(last);

    // The reader closes its end while the writer is blocked.
    NEED(pipe(pipes) == 0);
    child = CHILD({
        close(pipes[1]);
        test_sleep(30);
    });
    close(pipes[0]);
    signal(SIGPIPE, SIG_IGN);
    ssize_t count = 0, total = 0;
    while ((count = write(pipes[1], block, sizeof block)) > 0)
        total += count;
    CHECK(count == -1 && errno == EPIPE && total <= 65536 + (ssize_t)sizeof block,
          "a blocked writer fails when the reader goes");
    STEP_EQUAL(test_wait(child), 0);
    close(pipes[1]);

    // A signal ends a blocking read.
    struct sigaction action = {.sa_handler = catch};
    sigaction(SIGUSR1, &action, 0);
    NEED(pipe(pipes) == 0);
    pid_t self = getpid();
    child = CHILD({
        test_sleep(300);
        kill(self, SIGUSR1);
    });
    FAILS(read(pipes[0], text, 1), EINTR, "a signal ends a blocked read");
    EQUAL(caught, SIGUSR1, "after its handler");
    STEP_EQUAL(test_wait(child), 0);
    return test_end();
}
