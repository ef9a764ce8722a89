// An application's answer: one number that depends on each byte of its results.

#ifndef ANSWER_H
#define ANSWER_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define ANSWER_BEGIN 0xcbf29ce484222325u

// FNV-1a.
__attribute__((unused)) static uint64_t answer_bytes(uint64_t answer, const void *bytes, size_t length) {
    for (const unsigned char *at = bytes, *end = at + length; at < end; at++)
        answer = (answer ^ *at) * 0x100000001b3u;
    return answer;
}

__attribute__((unused)) static uint64_t answer_text(uint64_t answer, const char *text) {
    return answer_bytes(answer, text, strlen(text) + 1);
}

__attribute__((unused)) static void answer_print(uint64_t answer) {
    printf("answer %016llx\n", (unsigned long long)answer);
    fflush(stdout);
}

// A number that follows from the one before: xorshift.
__attribute__((unused)) static uint64_t answer_random(uint64_t *seed) {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    return *seed ^= *seed << 17;
}

#endif
