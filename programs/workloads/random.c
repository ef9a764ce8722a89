/*
 * Runs steps from a file: memory calls, accesses, forks. Each step is a phase. `bindery compare
 * random` writes the file; both kernels run the same program with the same file.
 *
 *      usage: random FILE
 *             random --verify      a few steps of its own, whose results and contents are checked
 *
 * A line of the file is a step: a process, an operation, and up to six numbers.
 *
 *      process 0   | step 0 | step 1 (fork) |          | step 3 | ...
 *      process 1                            | step 2   |
 *
 * Steps run one after the other, in the order of the file. A process that finds a step of another
 * one wakes it and sleeps: so on every kernel the same process makes the same call at the same
 * moment, and each phase contains only one step.
 *
 * At the end the results are printed: 0 or a number of the call's own, -errno, or -(1000 + signal)
 * of an access that a signal ended.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "mark.h"
#include "workload.h"

#define STEPS 1024
#define PROCESSES 4
#define FILES 8
#define FILE_BYTES (256 * KIB)

/* Definitions that the cross compilers' headers may lack. */
#ifndef SYS_userfaultfd
#ifdef __x86_64__
#define SYS_userfaultfd 323
#else
#define SYS_userfaultfd 282
#endif
#endif
#ifndef SYS_memfd_create
#ifdef __x86_64__
#define SYS_memfd_create 319
#else
#define SYS_memfd_create 279
#endif
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#define USER_MODE_ONLY 1
#define FEATURE_SIGBUS (1 << 7)
#define UF_API 0xc018aa3f
#define UF_REGISTER 0xc020aa00
#define UF_UNREGISTER 0x8010aa01
#define UF_COPY 0xc028aa03
#define UF_ZEROPAGE 0xc020aa04
#define UF_MOVE 0xc028aa05
#define UF_WRITEPROTECT 0xc018aa06

struct step {
    unsigned process;
    char operation;
    unsigned long of[6];
};

/* Seen by all processes. */
static struct shared {
    volatile int at;
    volatile long results[STEPS];
} *shared;

static struct step steps[STEPS];
static int count;
static unsigned me;
static int batons[PROCESSES][2];
static int ready[2];
static pid_t children[PROCESSES];
static int files[FILES];
static int userfault = -1;
static sigjmp_buf interrupted;
static unsigned char residence[64 * KIB];

static void on_signal(int number)
{
    siglongjmp(interrupted, number);
}

static uint64_t mix(uint64_t value)
{
    value = (value ^ (value >> 31)) * 0x7fb5d329728ea185;
    value = (value ^ (value >> 27)) * 0x81dadef4bc2dd44d;
    return value ^ (value >> 33);
}

/* A page of text, of pointers beside small numbers, of random words, or of zeroes: of eight pages in a
 * row three, three, one and one. */
static void write_mixed_page(volatile uint64_t *word)
{
    static const char words[16][8] = {"the ", "page ", "swap ", "of ", "table\n", "a ", "kernel ",
                                      "and ", "fault ", "in ", "lock ", "entry ", "is ", "has ",
                                      "memory ", "to "};
    uint64_t number = (uintptr_t)word / BASE_PAGE;
    volatile char *text = (volatile char *)word;
    uint64_t chosen = 0;
    size_t at = 0;
    switch (number % 8) {
    case 0 ... 2:
        for (size_t i = 0; at < BASE_PAGE; i++) {
            chosen = i % 16 ? chosen >> 4 : mix(number * BASE_PAGE + i);
            for (const char *from = words[chosen % 16]; *from && at < BASE_PAGE; from++)
                text[at++] = *from;
        }
        break;
    case 3 ... 5:
        for (int i = 0; i < 512; i++) {
            uint64_t random = mix((uintptr_t)(word + i));
            uint64_t small = i % 4 == 1 ? random % 256 : 0;
            word[i] = i % 2 == 0 ? 0x7f1234000000 + random % 0x40000 * 16 : small;
        }
        break;
    case 6:
        for (int i = 0; i < 512; i++)
            word[i] = mix((uintptr_t)(word + i));
        break;
    default:
        for (int i = 0; i < 512; i++)
            word[i] = 0;
    }
}

/* One word in every `stride` bytes; or pages whose content is like that of programs: every eighth
 * word is random, the others repeat; or pages of several kinds. */
static long write_memory(char *start, size_t length, size_t stride, unsigned long content)
{
    for (size_t at = 0; at < length; at += stride) {
        volatile uint64_t *word = (volatile uint64_t *)(start + at);
        if (content == 0)
            *word = 0;
        else if (content == 1)
            *word = mix((uintptr_t)word);
        else if (content == 3)
            write_mixed_page(word);
        else
            for (int i = 0; i < 512; i++)
                word[i] = i % 8 == 0 ? mix((uintptr_t)(word + i)) : 0x2020646e61206568;
    }
    return 0;
}

static long read_memory(const char *start, size_t length, size_t stride)
{
    for (size_t at = 0; at < length; at += stride)
        (void)*(volatile const char *)(start + at);
    return 0;
}

/* Whether write_memory has written these words: 0, or the number of the first wrong one and 1. */
static long check_memory(const char *start, size_t length, size_t stride)
{
    for (size_t at = 0; at < length; at += stride) {
        const volatile uint64_t *word = (const volatile uint64_t *)(start + at);
        if (*word != mix((uintptr_t)word))
            return (long)(at / stride) + 1;
    }
    return 0;
}

static long failed(long result)
{
    return result == -1 ? -errno : result;
}

/* So many mappings of a page, `stride` bytes apart. */
static long map_many(char *at, size_t number, size_t stride)
{
    for (size_t i = 0; i < number; i++)
        if (mmap(at + i * stride, BASE_PAGE, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
            return -errno;
    return 0;
}

/* Advice for a range, by calls of `piece` bytes. */
static long advise_in_pieces(char *at, size_t length, int advice, size_t piece)
{
    for (size_t done = 0; done < length; done += piece)
        if (madvise(at + done, piece, advice) != 0)
            return -errno;
    return 0;
}

/* A call that returns an address or MAP_FAILED. */
static long mapped(void *address)
{
    return address == MAP_FAILED ? -errno : 0;
}

static long open_userfault(void)
{
    userfault = (int)syscall(SYS_userfaultfd, O_CLOEXEC | USER_MODE_ONLY);
    if (userfault < 0)
        return -errno;
    uint64_t api[3] = {0xaa, FEATURE_SIGBUS, 0};
    return failed(ioctl(userfault, UF_API, api));
}

static long userfault_call(char operation, const unsigned long *of)
{
    if (operation == 'O') {
        long opened = userfault < 0 ? open_userfault() : 0;
        uint64_t request[4] = {of[0], of[1], of[2], 0};
        return opened < 0 ? opened : failed(ioctl(userfault, UF_REGISTER, request));
    }
    uint64_t range[5] = {of[0], of[1], of[2], 0, 0};
    if (operation == 'Q')
        return failed(ioctl(userfault, UF_UNREGISTER, range));
    if (operation == 'Z') {
        range[2] = 0;
        return failed(ioctl(userfault, UF_ZEROPAGE, range));
    }
    if (operation == 'E')
        return failed(ioctl(userfault, UF_WRITEPROTECT, range));
    /* COPY and MOVE: to, from, length, mode. */
    uint64_t request[5] = {of[0], of[2], of[1], 0, 0};
    return failed(ioctl(userfault, operation == 'Y' ? UF_COPY : UF_MOVE, request));
}

/* Touches what this program itself needs, so that no step has a fault of it. */
static void warm_up(void)
{
    extern const char __executable_start[], etext[];
    uintptr_t start = (uintptr_t)__executable_start & -BASE_PAGE;
    size_t length = ((uintptr_t)etext - start + BASE_PAGE - 1) & -BASE_PAGE;
    if (madvise((void *)start, length, MADV_POPULATE_READ) != 0)
        FAIL("MADV_POPULATE_READ of the program: errno %d", errno);
    memset(residence, 1, sizeof residence);
    (void)shared->at;
    for (int i = 0; i < STEPS; i += 64)
        (void)shared->results[i];
}

static void take_part(void);

static long start_child(unsigned child)
{
    pid_t pid = fork();
    if (pid < 0)
        return -errno;
    if (pid == 0) {
        /* Never leaves the parent's phase: that is over when the parent's call returns. */
        me = child;
        /* The parent's serves the parent's memory. */
        userfault = -1;
        warm_up();
        if (write(ready[1], "r", 1) != 1)
            _exit(3);
        take_part();
    }
    children[child] = pid;
    return 0;
}

static void pass_to(unsigned process, char order)
{
    if (write(batons[process][1], &order, 1) != 1)
        _exit(3);
}

static long end_child(unsigned child)
{
    int status;
    pass_to(child, 'x');
    if (waitpid(children[child], &status, 0) != children[child])
        return -errno;
    return status;
}

static long perform(const struct step *step)
{
    const unsigned long *of = step->of;
    char *at = (char *)of[0];
    switch (step->operation) {
    case 'M': /* address, length, protection, flags, file + 1, offset */
        return mapped(mmap(at, of[1], (int)of[2], (int)of[3], of[4] ? files[of[4] - 1] : -1,
                           (off_t)of[5]));
    case 'U':
        return failed(munmap(at, of[1]));
    case 'P':
        return failed(mprotect(at, of[1], (int)of[2]));
    case 'R': /* address, old length, new length, flags, new address */
        return mapped(mremap(at, of[1], of[2], (int)of[3], (void *)of[4]));
    case 'A':
        return failed(madvise(at, of[1], (int)of[2]));
    case 'G': /* address, length, advice, bytes of a call */
        return advise_in_pieces(at, of[1], (int)of[2], of[3]);
    case 'W':
        return write_memory(at, of[1], of[2], of[3]);
    case 'D':
        return read_memory(at, of[1], of[2]);
    case 'J':
        return check_memory(at, of[1], of[2]);
    case 'F':
        return start_child((unsigned)of[0]);
    case 'X':
        return end_child((unsigned)of[0]);
    case 'K': /* file, size */
        files[of[0]] = (int)syscall(SYS_memfd_create, "random", 0);
        return files[of[0]] < 0 ? -errno : failed(ftruncate(files[of[0]], (off_t)of[1]));
    case 'T':
        return failed(ftruncate(files[of[0]], (off_t)of[1]));
    case 'H': /* file, offset, length: a hole */
        return failed(fallocate(files[of[0]], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                (off_t)of[1], (off_t)of[2]));
    case 'B': /* address, count, distance */
        return map_many(at, of[1], of[2]);
    case 'C':
        return syscall(SYS_getppid) < 0 ? -errno : 0;
    case 'I':
        return failed(mincore(at, of[1], residence));
    case 'S':
        return failed(msync(at, of[1], (int)of[2]));
    case 'L':
        return failed(mlock(at, of[1]));
    case 'N':
        return failed(munlock(at, of[1]));
    default:
        return userfault_call(step->operation, of);
    }
}

static __attribute__((noinline)) long run(const struct step *step)
{
    int number = sigsetjmp(interrupted, 1);
    volatile long result = -1000 - number;
    if (number == 0) {
        MARK_BEGIN(PHASE_STEP);
        result = perform(step);
    }
    MARK_END(PHASE_STEP);
    /* Before the next step: a child that starts would be counted in it. */
    char order;
    if (step->operation == 'F' && result == 0 && read(ready[0], &order, 1) != 1)
        _exit(3);
    return result;
}

/* For --verify: a child that writes changes nothing for its parent, whether pages are in memory or in
 * swap. */
static char verified[] = "0 M 0x1000000000 0x100000 3 0x32 0 0\n"
                         "0 W 0x1000000000 0x100000 0x1000 1\n"
                         "0 F 1\n"
                         "1 J 0x1000000000 0x100000 0x1000\n"
                         "1 W 0x1000000000 0x80000 0x1000 0\n"
                         "0 J 0x1000000000 0x100000 0x1000\n"
                         "1 J 0x1000080000 0x80000 0x1000\n"
                         "0 X 1\n"
                         "0 P 0x1000000000 0x100000 1\n"
                         "0 J 0x1000000000 0x100000 0x1000\n"
                         "0 A 0x1000000000 0x80000 4\n"
                         "0 J 0x1000080000 0x80000 0x1000\n"
                         "0 U 0x1000000000 0x100000\n";
static int verify;

static void finish(void)
{
    for (int i = 0; verify && i < count; i++)
        if (shared->results[i] != 0)
            FAIL("step %d: %ld", i, shared->results[i]);
    if (verify) {
        say("random: contents are right after %d steps\n", count);
        _exit(0);
    }
    say("compare: results");
    for (int i = 0; i < count; i++)
        say(" %ld", shared->results[i]);
    say("\n");
    _exit(0);
}

/* Runs this process' steps, and sleeps while others run theirs. */
static void take_part(void)
{
    for (;;) {
        char order;
        if (read(batons[me][0], &order, 1) != 1 || order == 'x')
            _exit(0);
        while (shared->at < count && steps[shared->at].process == me) {
            int at = shared->at;
            shared->results[at] = run(&steps[at]);
            shared->at = at + 1;
        }
        if (shared->at < count)
            pass_to(steps[shared->at].process, 'g');
        else if (me == 0)
            finish();
        else
            pass_to(0, 'g');
    }
}

static char *read_file(const char *name)
{
    static char text[FILE_BYTES];
    int file = open(name, O_RDONLY);
    if (file < 0)
        FAIL("open %s: errno %d", name, errno);
    size_t length = 0;
    for (;;) {
        ssize_t got = read(file, text + length, sizeof text - 1 - length);
        if (got < 0)
            FAIL("read %s: errno %d", name, errno);
        if (got == 0)
            break;
        length += (size_t)got;
    }
    close(file);
    return text;
}

static void read_steps(const char *name, char *text)
{
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (count == STEPS)
            FAIL("%s has more than %d steps", name, STEPS);
        struct step *step = &steps[count++];
        char *rest;
        step->process = (unsigned)strtoul(line, &rest, 0);
        while (*rest == ' ')
            rest++;
        step->operation = *rest ? *rest++ : 0;
        for (int i = 0; i < 6; i++)
            step->of[i] = strtoul(rest, &rest, 0);
        if (step->process >= PROCESSES || !step->operation)
            FAIL("%s: line %d is no step", name, count);
    }
}

int main(int words, char **word)
{
    if (words != 2) {
        say("usage: random FILE\n");
        return 2;
    }
    verify = flag(words, word, "--verify");
    read_steps(word[1], verify ? verified : read_file(word[1]));
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        FAIL("mmap: errno %d", errno);
    memset(shared, 0, sizeof *shared);
    warm_up();
    struct sigaction action = {.sa_handler = on_signal};
    if (sigaction(SIGSEGV, &action, NULL) != 0 || sigaction(SIGBUS, &action, NULL) != 0)
        FAIL("sigaction: errno %d", errno);
    if (pipe(ready) != 0)
        FAIL("pipe: errno %d", errno);
    for (int i = 0; i < PROCESSES; i++)
        if (pipe(batons[i]) != 0)
            FAIL("pipe: errno %d", errno);
    pass_to(0, 'g');
    take_part();
}
