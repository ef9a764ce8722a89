// glibc's allocator with several threads: blocks of a byte to some hundred KiB, which grow and shrink, and pass from
// thread to thread, so that one frees what another has allocated. Each block keeps its content. The arguments are
// the number of steps of each thread, and of threads.

#include "answer.h"

#include <pthread.h>
#include <stdlib.h>

enum { MOST = 16, OWN = 2000, PASSED = 64 };

struct block {
    size_t length;
    uint64_t seed;
    unsigned char bytes[];
};

static long steps = 1000;
static struct block *passed[PASSED];
static uint64_t answers[MOST];

static unsigned char byte_of(const struct block *block, size_t at) { return block->seed >> at % 8 * 8; }

// The first and the last bytes, and one of each 512.
static size_t next(size_t at, size_t length) { return at < 16 || at + 16 >= length ? at + 1 : at + 512; }

static void fill(struct block *block, size_t from) {
    for (size_t at = from; at < block->length; at++)
        block->bytes[at] = byte_of(block, at);
}

static void check(const struct block *block, size_t length) {
    for (size_t at = 0; at < length; at = next(at, length))
        if (block->bytes[at] != byte_of(block, at)) {
            fprintf(stderr, "byte %zu of %zu is wrong\n", at, length);
            exit(1);
        }
}

static size_t length_of(uint64_t number) {
    size_t most = (size_t)1 << (number % 100 < 98 ? 4 + number / 100 % 9 : 13 + number / 100 % 6);
    return 1 + (number >> 32) % most;
}

static struct block *new_block(uint64_t *seed) {
    size_t length = length_of(answer_random(seed));
    struct block *block = malloc(sizeof *block + length);
    if (!block)
        exit(3);
    block->length = length;
    block->seed = answer_random(seed);
    fill(block, 0);
    return block;
}

static struct block *resized(struct block *block, size_t length) {
    size_t kept = length < block->length ? length : block->length;
    block = realloc(block, sizeof *block + length);
    if (!block)
        exit(3);
    check(block, kept);
    block->length = length;
    fill(block, kept);
    return block;
}

static void *work(void *argument) {
    int thread = (int)(intptr_t)argument;
    // The steps do not depend on what the other threads pass.
    uint64_t seed = 88172645463325252u * (thread + 1), contents = seed + 1, answer = ANSWER_BEGIN;
    struct block *own[OWN] = {0};
    for (long step = 0; step < steps; step++) {
        uint64_t number = answer_random(&seed);
        struct block **at = &own[number % OWN];
        number /= OWN;
        if (!*at) {
            *at = new_block(&contents);
        } else if (number % 8 < 4) {
            // Another thread's block, of whatever length, or none.
            check(*at, (*at)->length);
            *at = __atomic_exchange_n(&passed[number / 8 % PASSED], *at, __ATOMIC_ACQ_REL);
            if (*at)
                check(*at, (*at)->length);
        } else if (number % 8 < 6) {
            *at = resized(*at, length_of(number / 8));
        } else {
            check(*at, (*at)->length);
            free(*at);
            *at = 0;
        }
        answer = answer_bytes(answer, &number, sizeof number);
    }
    for (int at = 0; at < OWN; at++)
        if (own[at]) {
            check(own[at], own[at]->length);
            free(own[at]);
        }
    answers[thread] = answer;
    return 0;
}

int main(int argc, char **argv) {
    pthread_t started[MOST];
    int threads = 4;
    if (argc > 2)
        steps = atol(argv[1]), threads = atoi(argv[2]);
    if (threads < 1 || threads > MOST)
        return 2;
    for (intptr_t thread = 0; thread < threads; thread++)
        if (pthread_create(&started[thread], 0, work, (void *)thread) != 0)
            return 1;
    uint64_t answer = ANSWER_BEGIN;
    for (int thread = 0; thread < threads; thread++) {
        pthread_join(started[thread], 0);
        answer = answer_bytes(answer, &answers[thread], sizeof answers[thread]);
    }
    for (int at = 0; at < PASSED; at++)
        if (passed[at]) {
            check(passed[at], passed[at]->length);
            free(passed[at]);
        }
    answer_print(answer);
    return 0;
}
