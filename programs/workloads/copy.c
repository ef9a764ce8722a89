/*
 * Bytes between a program and its open files: files in memory and pipes, in large pieces, in pages
 * and in single bytes. Each is a phase; the memory of both sides exists beforehand, except in the
 * file that is written anew.
 *
 *      program   [ buffer, 1 MiB ]
 *                  |  ^         |  ^          |  ^
 *                write read   write read    write read
 *                  v  |         v  |          v  |
 *                [ memfd ]    [ /tmp ]      [ pipe ]
 *
 * --rounds N   how often each phase of 1 MiB is run (10); the small ones 20 times as often
 * --verify     checks what is copied instead
 */
#define _GNU_SOURCE
#include "mark.h"
#include "workload.h"

#include <fcntl.h>

#define SIZE MIB
#define PATH "/tmp/copied"

static char *buffer;

static void moved(const char *what, ssize_t count, size_t wanted)
{
    if (count != (ssize_t)wanted)
        FAIL("%s of %zu bytes: %zd, errno %d", what, wanted, count, errno);
}

/* A file of SIZE bytes in memory. */
static int memory_file(void)
{
    int file = memfd_create("copied", 0);
    if (file < 0)
        FAIL("memfd_create: errno %d", errno);
    moved("write", pwrite(file, buffer, SIZE, 0), SIZE);
    return file;
}

static int temporary_file(void)
{
    int file = open(PATH, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0)
        FAIL("%s: errno %d", PATH, errno);
    moved("write", pwrite(file, buffer, SIZE, 0), SIZE);
    return file;
}

static void make_pipe(int ends[2])
{
    if (pipe(ends) != 0)
        FAIL("pipe: errno %d", errno);
}

#define REPEAT(rounds, phase, what, wanted, call)                                                  \
    for (unsigned long round = 0; round < (rounds); round++) {                                     \
        MARK_BEGIN(phase);                                                                         \
        ssize_t count = call;                                                                      \
        MARK_END(phase);                                                                           \
        moved(what, count, wanted);                                                                \
    }

#define REPEAT_PIPE(rounds, phase, ends, size)                                                     \
    for (unsigned long round = 0; round < (rounds); round++) {                                     \
        MARK_BEGIN(phase);                                                                         \
        ssize_t written = write(ends[1], buffer, size);                                            \
        ssize_t read_back = read(ends[0], buffer, size);                                           \
        MARK_END(phase);                                                                           \
        moved("write to a pipe", written, size);                                                   \
        moved("read from a pipe", read_back, size);                                                \
    }

static void measure(unsigned long rounds)
{
    int memory = memory_file(), temporary = temporary_file(), ends[2];
    unsigned long small = rounds * 20;
    make_pipe(ends);
    REPEAT(rounds, PHASE_READ_MEMFD, "pread", SIZE, pread(memory, buffer, SIZE, 0))
    REPEAT(rounds, PHASE_WRITE_MEMFD, "pwrite", SIZE, pwrite(memory, buffer, SIZE, 0))
    REPEAT(rounds, PHASE_READ_TMPFS, "pread", SIZE, pread(temporary, buffer, SIZE, 0))
    REPEAT(rounds, PHASE_WRITE_TMPFS, "pwrite", SIZE, pwrite(temporary, buffer, SIZE, 0))
    for (unsigned long round = 0; round < rounds; round++) {
        if (ftruncate(temporary, 0) != 0)
            FAIL("ftruncate: errno %d", errno);
        MARK_BEGIN(PHASE_WRITE_NEW);
        ssize_t count = pwrite(temporary, buffer, SIZE, 0);
        MARK_END(PHASE_WRITE_NEW);
        moved("pwrite", count, SIZE);
    }
    REPEAT(small, PHASE_READ_PAGE, "pread", BASE_PAGE, pread(memory, buffer, BASE_PAGE, BASE_PAGE))
    REPEAT(small, PHASE_WRITE_PAGE, "pwrite", BASE_PAGE,
           pwrite(memory, buffer, BASE_PAGE, BASE_PAGE))
    REPEAT(small, PHASE_READ_BYTE, "pread", 1, pread(memory, buffer, 1, BASE_PAGE))
    REPEAT(small, PHASE_WRITE_BYTE, "pwrite", 1, pwrite(memory, buffer, 1, BASE_PAGE))
    REPEAT_PIPE(small, PHASE_PIPE_PAGE, ends, BASE_PAGE)
    REPEAT_PIPE(small, PHASE_PIPE_64K, ends, 64 * KIB)
    REPEAT_PIPE(small, PHASE_PIPE_BYTE, ends, 1)
}

static void verify(void)
{
    int files[] = {memory_file(), temporary_file()}, ends[2];
    make_pipe(ends);
    for (uint64_t seed = 1; seed <= 4; seed++) {
        int file = files[seed % 2];
        fill(buffer, SIZE, 8, seed);
        moved("pwrite", pwrite(file, buffer, SIZE, 0), SIZE);
        memset(buffer, 0, SIZE);
        moved("pread", pread(file, buffer, SIZE, 0), SIZE);
        check_filled(buffer, SIZE, 8, seed);
        fill(buffer, 64 * KIB, 8, seed);
        moved("write to a pipe", write(ends[1], buffer, 64 * KIB), 64 * KIB);
        memset(buffer, 0, 64 * KIB);
        moved("read from a pipe", read(ends[0], buffer, 64 * KIB), 64 * KIB);
        check_filled(buffer, 64 * KIB, 8, seed);
    }
    say("copy: what is copied is right\n");
}

int main(int count, char **words)
{
    buffer = map_at(0, SIZE, 0);
    touch(buffer, SIZE);
    if (flag(count, words, "--verify"))
        verify();
    else
        measure(option(count, words, "--rounds", 10));
    return unlink(PATH);
}
