// Branch target identification (PROT_BTI) on AArch64: an indirect branch into a
// guarded page must meet a landing pad. On a processor without it, only that it
// is refused.

#include "test.h"

#include <stddef.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <ucontext.h>

#define PROT_BTI_ALWAYS 0x10
enum { CODE = PROT_READ | PROT_EXEC, GUARDED = CODE | PROT_BTI_ALWAYS };

static void *map(int protection) {
    return mmap(0, PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void absence(void) {
    void *memory = map(PROT_READ | PROT_BTI_ALWAYS);
    CHECK(memory != MAP_FAILED, "mmap ignores it");
    FAILS(mprotect(memory, PAGE, PROT_READ | PROT_BTI_ALWAYS), EINVAL, "mprotect refuses it");
}

#if defined(__aarch64__)

enum {
    NOP = 0xd503201f,
    RET = 0xd65f03c0,
    BTI_C = 0xd503245f,
    BTI_J = 0xd503249f,
    PACIASP = 0xd503233f,
    AUTIASP = 0xd50323bf,
    BR_X9 = 0xd61f0120,
    BR_X16 = 0xd61f0200,
};

// Functions, by the word with which each begins. QEMU before 9.0 keeps its
// translation of a branch's target when the guard of the page changes, so a
// target that is refused in one state is used only in that state.
enum {
    PLAIN = 0,
    CALLED = 4,
    JUMPED = 8,
    SIGNED = 12,
    JUMPS_BY_9 = 16,
    JUMPS_BY_16 = 20,
    BEFORE = 24,
    BETWEEN = 28,
    AFTER = 32,
};

static const unsigned functions[] = {
    [PLAIN] = NOP, RET,
    [CALLED] = BTI_C, RET,
    [JUMPED] = BTI_J, RET,
    [SIGNED] = PACIASP, AUTIASP, RET,
    [JUMPS_BY_9] = BTI_C, BR_X9,
    [JUMPS_BY_16] = BTI_C, BR_X16,
    [BEFORE] = NOP, RET,
    [BETWEEN] = NOP, RET,
    [AFTER] = NOP, RET,
};

static unsigned *code;

static void call(int function) { ((void (*)(void))(code + function))(); }

static void jump(int function, int target) {
    __asm__ volatile("mov x9, %1\n mov x16, %1\n blr %0"
                     :
                     : "r"(code + function), "r"(code + target)
                     : "x9", "x16", "x30", "memory");
}

static void branch(int target) {
    __asm__ volatile("adr x30, 1f\n br %0\n 1:" : : "r"(code + target) : "x30", "memory");
}

static void protect(int protection) { NEED(mprotect(code, PAGE, protection) == 0); }

static void make_code(void) {
    code = map(PROT_READ | PROT_WRITE);
    NEED(code != MAP_FAILED);
    memcpy(code, functions, sizeof functions);
    __builtin___clear_cache((char *)code, (char *)code + sizeof functions);
}

static void branches(void) {
    protect(CODE);
    call(BEFORE), branch(BEFORE), jump(JUMPS_BY_16, BEFORE);
    CHECK(1, "branches into a page that is not guarded");
    protect(GUARDED);
    DIES(SIGILL, "a call of what is no landing pad", call(PLAIN));
    DIES(SIGILL, "a jump to what is no landing pad", branch(PLAIN));
    EXITS(0, "a call of BTI c", call(CALLED));
    DIES(SIGILL, "a call of BTI j", call(JUMPED));
    EXITS(0, "a call of PACIASP", call(SIGNED));
    EXITS(0, "a jump from outside to BTI c", branch(CALLED));
    DIES(SIGILL, "a jump by x9 to BTI c", jump(JUMPS_BY_9, CALLED));
    EXITS(0, "a jump by x9 to BTI j", jump(JUMPS_BY_9, JUMPED));
    DIES(SIGILL, "a jump by x9 to PACIASP", jump(JUMPS_BY_9, SIGNED));
    EXITS(0, "a jump by x16 to PACIASP", jump(JUMPS_BY_16, SIGNED));
    protect(CODE);
    call(BETWEEN);
    CHECK(1, "mprotect without it takes it away");
    protect(PROT_BTI_ALWAYS);
    DIES(SIGSEGV, "a call where nothing is allowed", call(CALLED));
    protect(GUARDED);
    DIES(SIGILL, "and again one of what is no landing pad", call(AFTER));
    call(CALLED);
}

static volatile struct {
    int code;
    void *address;
    unsigned type;
} seen;

static void ill(int signal, siginfo_t *info, void *context) {
    (void)signal;
    ucontext_t *user = context;
    seen.code = info->si_code;
    seen.address = info->si_addr;
    seen.type = user->uc_mcontext.pstate >> 10 & 3;
    // As if it had been a landing pad.
    user->uc_mcontext.pstate &= ~(3ul << 10);
}

static void signals(void) {
    struct sigaction action = {.sa_sigaction = ill, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGILL, &action, 0) == 0);
    call(PLAIN);
    EQUAL(seen.code, ILL_ILLOPC, "the code of SIGILL");
    CHECK(seen.address == code + PLAIN, "its address");
    EQUAL(seen.type, 2, "the type of the branch, a call");
    jump(JUMPS_BY_9, PLAIN);
    EQUAL(seen.type, 3, "and of a jump");
    signal(SIGILL, SIG_DFL);
    EXITS(0, "a handler that begins with a landing pad", {
        signal(SIGUSR1, (void (*)(int))(code + CALLED));
        raise(SIGUSR1);
        raise(SIGUSR1);
    });
    DIES(SIGILL, "a handler that does not", {
        signal(SIGUSR1, (void (*)(int))(code + PLAIN));
        raise(SIGUSR1);
    });
}

static int letters(const char *wanted) {
    static char text[1 << 16], start[40];
    NEED(test_read_file("/proc/self/smaps", text, sizeof text) > 0);
    snprintf(start, sizeof start, "%lx-", (unsigned long)code);
    char *line = strstr(text, start);
    line = line ? strstr(line, "VmFlags: ") : 0;
    NEED(line);
    *strchr(line, '\n') = 0;
    return strstr(line, wanted) != 0;
}

static void mappings(void) {
    CHECK(letters(" bt "), "smaps shows it");
    protect(CODE);
    CHECK(!letters(" bt "), "or not");
    FAILS(mprotect(code, PAGE, GUARDED | 0x40), EINVAL, "an unknown protection");
#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#endif
    EXITS(0, "where no code may be gained, code may become guarded", {
        NEED(prctl(PR_SET_MDWE, 1, 0, 0, 0) == 0);
        protect(GUARDED);
        call(CALLED);
        STEP_FAILS(mprotect(map(PROT_READ), PAGE, GUARDED), EACCES);
    });
    EXITS(0, "mmap with it", {
        unsigned *other = map(PROT_READ | PROT_WRITE | PROT_EXEC | PROT_BTI_ALWAYS);
        memcpy(other, functions, sizeof functions);
        __builtin___clear_cache((char *)other, (char *)other + sizeof functions);
        code = other;
        call(CALLED);
        STEP_DIES(SIGILL, "a call", call(PLAIN));
        STEP(letters(" bt "));
    });
}

// A program of one page that jumps to what is no landing pad, and ends with 42.
struct program {
    unsigned char ident[16];
    unsigned short type, machine;
    unsigned version;
    unsigned long entry, segments_at, sections_at;
    unsigned flags;
    unsigned short size, segment_size, segments, section_size, sections, names;
    struct {
        unsigned type, flags;
        unsigned long offset, address, physical, file_size, size, align;
    } segment[2];
    struct {
        unsigned name_size, size, kind;
        char name[4];
        struct {
            unsigned kind, size, value, padding;
        } property[2];
    } note;
    unsigned code[5];
};

#define PROGRAM 0x10000000ul

static const struct program plain = {
    .ident = "\177ELF\2\1\1",
    .type = 2,
    .machine = 183,
    .version = 1,
    .entry = PROGRAM + offsetof(struct program, code),
    .segments_at = offsetof(struct program, segment),
    .size = offsetof(struct program, segment),
    .segment_size = 56,
    .segments = 2,
    .segment =
        {
            {1, 5, 0, PROGRAM, PROGRAM, sizeof(struct program), sizeof(struct program), PAGE},
            {0x6474e553, 4, offsetof(struct program, note), 0, 0, 48, 48, 8},
        },
    .note = {4, 32, 5, "GNU", {{0xc0000000, 4, 1, 0}, {0xc0000001, 4, 0, 0}}},
    // adr x0, 1f; br x0; 1: mov x0, #42; mov x8, #93; svc #0
    .code = {0x10000040, 0xd61f0000, 0xd2800540, 0xd2800ba8, 0xd4000001},
};

static void run(const struct program *program) {
    int file = memfd_create("program", 0);
    NEED(write(file, program, sizeof *program) == sizeof *program);
    static char *none[] = {"program", 0};
    syscall(SYS_execveat, file, "", none, none + 1, AT_EMPTY_PATH);
    _exit(errno);
}

static void programs(void) {
    DIES(SIGILL, "a program that is marked is guarded", run(&plain));
    struct program other = plain;
    other.note.property[0].value = 2;
    EXITS(42, "one that is marked for something else is not", run(&other));
    other = plain;
    other.segment[1].type = 4;
    EXITS(42, "nor one without the segment", run(&other));
    other = plain;
    other.note.property[1].kind = 0xc0000000;
    EXITS(ENOEXEC, "properties out of order", run(&other));
    other = plain;
    other.note.property[0].size = 8;
    EXITS(ENOEXEC, "a property of the wrong size", run(&other));
    other = plain;
    other.note.size = 33;
    EXITS(ENOEXEC, "a note that is longer than its segment", run(&other));
    other = plain;
    other.note.name[0] = 'g';
    EXITS(ENOEXEC, "a note of somebody else's", run(&other));
}

static int has_it(void) { return getauxval(AT_HWCAP2) >> 17 & 1; }

static void presence(void) {
    make_code();
    branches();
    signals();
    mappings();
    programs();
}

#else

static int has_it(void) { return 0; }
static void presence(void) {}

#endif

int main(void) {
    test_start();
    if (has_it())
        presence();
    else
        absence();
    return test_end();
}
