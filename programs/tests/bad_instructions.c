// Bad programs: privileged, undefined and trapping instructions, and system
// calls with garbage in the registers.

#include "test.h"

#define CODE(...) __asm__ volatile(__VA_ARGS__)

// The machine must live on; the process may do what it likes.
#define ANYHOW(text, ...) survives(CHILD({ alarm(5); __VA_ARGS__; }), text)

static void survives(pid_t child, const char *text) {
    int status = test_wait(child);
    CHECK(WIFSIGNALED(status) || WIFEXITED(status), text);
}

int main(void) {
    test_start();
#if defined(__x86_64__)
    DIES(SIGSEGV, "hlt", CODE("hlt"));
    DIES(SIGSEGV, "cli", CODE("cli"));
    DIES(SIGSEGV, "sti", CODE("sti"));
    DIES(SIGSEGV, "mov to cr3", CODE("mov %0, %%cr3" ::"r"(0ul)));
    DIES(SIGSEGV, "mov to cr0", CODE("mov %0, %%cr0" ::"r"(0ul)));
    DIES(SIGSEGV, "mov from cr3", CODE("mov %%cr3, %%rax" ::: "rax"));
    DIES(SIGSEGV, "mov to dr7", CODE("mov %0, %%dr7" ::"r"(0ul)));
    DIES(SIGSEGV, "wrmsr", CODE("wrmsr" ::"a"(0), "d"(0), "c"(0xc0000080)));
    DIES(SIGSEGV, "rdmsr", CODE("rdmsr" ::"c"(0xc0000080) : "rax", "rdx"));
    DIES(SIGSEGV, "out to the machine's exit", CODE("out %%al, $0xf4" ::"a"(0)));
    DIES(SIGSEGV, "out to the serial port", CODE("out %%al, %%dx" ::"a"('!'), "d"(0x3f8)));
    DIES(SIGSEGV, "out to the control channel", CODE("out %%al, $0xe9" ::"a"('!')));
    DIES(SIGSEGV, "in", CODE("in $0x60, %%al" ::: "rax"));
    static char table[16];
    DIES(SIGSEGV, "lgdt", CODE("lgdt %0" ::"m"(table)));
    DIES(SIGSEGV, "lidt", CODE("lidt %0" ::"m"(table)));
    DIES(SIGSEGV, "ltr", CODE("ltr %%ax" ::"a"(0x28)));
    DIES(SIGSEGV, "invlpg", CODE("invlpg %0" ::"m"(table)));
    DIES(SIGSEGV, "clts", CODE("clts"));
    DIES(SIGSEGV, "wbinvd", CODE("wbinvd"));
    DIES(SIGSEGV, "swapgs", CODE("swapgs"));
    DIES(SIGSEGV, "sysretq", CODE("sysretq" ::"c"(0)));
    // The emulator takes some of these differently than a processor does.
    ANYHOW("iretq to kernel selectors",
         CODE("push $0x10\n push %%rsp\n pushf\n push $0x8\n lea 1f(%%rip), %%rax\n push %%rax\n iretq\n 1:" ::: "rax"));
    ANYHOW("icebp", CODE(".byte 0xf1"));
    DIES(SIGSEGV, "a kernel selector in ss", CODE("mov %0, %%ss" ::"r"(0x10)));
    DIES(SIGSEGV, "a kernel selector in ds", CODE("mov %0, %%ds" ::"r"(0x10)));
    DIES(SIGSEGV, "int 14", CODE("int $14"));
    DIES(SIGSEGV, "int 8", CODE("int $8"));
    DIES(SIGSEGV, "int 32", CODE("int $32"));
    DIES(SIGSEGV, "int 255", CODE("int $255"));
    DIES(SIGILL, "ud2", CODE("ud2"));
    DIES(SIGTRAP, "int3", CODE("int3"));
    DIES(SIGFPE, "division by zero", CODE("idivl %1" ::"a"(1), "r"(0), "d"(0) : "cc"));
    DIES(SIGFPE, "division that overflows", CODE("idivl %1" ::"a"(0x80000000), "r"(-1), "d"(-1) : "cc"));
    DIES(SIGTRAP, "the single-step flag", CODE("pushf\n orl $0x100, (%%rsp)\n popf\n nop\n nop" ::: "memory", "cc"));
    DIES(SIGTRAP, "the single-step flag and a system call",
         CODE("pushf\n orl $0x100, (%%rsp)\n popf\n syscall\n nop" ::"a"(SYS_getppid) : "rcx", "r11", "memory", "cc"));
    EXITS(0, "popf does not change IOPL or the interrupt flag",
          CODE("pushf\n andl $~0x200, (%%rsp)\n orl $0x3000, (%%rsp)\n popf" ::: "memory", "cc");
          unsigned long flags;
          CODE("pushf\n pop %0" : "=r"(flags));
          STEP_EQUAL(flags & 0x3200, 0x200));
    ANYHOW("int 0x80", CODE("int $0x80" ::"a"(999)));
    ANYHOW("sysenter", CODE("sysenter"));
    ANYHOW("int 4", CODE("int $4"));
    ANYHOW("the nested-task flag and a system call",
           CODE("pushf\n orl $0x4000, (%%rsp)\n popf\n syscall" ::"a"(SYS_getppid) : "rcx", "r11", "memory", "cc"));
    ANYHOW("the alignment-check flag", CODE("pushf\n orl $0x40000, (%%rsp)\n popf" ::: "memory", "cc"); getppid());
    ANYHOW("the direction flag and calls", CODE("std\n syscall" ::"a"(SYS_getppid) : "rcx", "r11", "cc"); getppid());
    ANYHOW("a jump into 32-bit code", CODE("push $0x23\n lea 1f(%%rip), %%rax\n push %%rax\n lretq\n 1: nop\n hlt" ::: "rax", "memory"));
    long result, expected = getpid();
    CODE("mov %%rsp, %%r12\n mov %2, %%rsp\n syscall\n mov %%r12, %%rsp"
         : "=a"(result) : "a"(SYS_getpid), "r"(0x8000000000000000ul) : "rcx", "r11", "r12", "memory");
    EQUAL(result, expected, "a system call with a non-canonical stack pointer");
    CODE("mov %%rsp, %%r12\n xor %%esp, %%esp\n syscall\n mov %%r12, %%rsp"
         : "=a"(result) : "a"(SYS_getpid) : "rcx", "r11", "r12", "memory");
    EQUAL(result, expected, "a system call with a stack pointer of 0");
    CODE("mov %%rsp, %%r12\n mov %0, %%rsp\n mov $2000000, %%ecx\n 1: pause\n dec %%ecx\n jnz 1b\n mov %%r12, %%rsp"
         ::"r"(0x8000000000000000ul) : "rcx", "r12", "memory", "cc");
    CHECK(getpid() == expected, "interrupts with a non-canonical stack pointer");
    char *last = mmap(test_wild(0x7fffffffe000), PAGE, PROT_READ | PROT_WRITE | PROT_EXEC,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (last != MAP_FAILED) {
        memcpy(last + PAGE - 2, "\x0f\x05", 2);
        DIES(SIGSEGV, "a system call by the last instruction of user space",
             CODE("jmp *%0" ::"r"(last + PAGE - 2), "a"(SYS_getppid)));
    }
    // With five levels of tables user space goes on there.
    if (mmap(test_wild(0x800000000000), PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        FAILS((long)mmap(test_wild(0x7ffffffff000), PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
              ENOMEM, "the page behind it cannot be mapped");
#elif defined(__aarch64__)
    DIES(SIGILL, "msr ttbr0_el1", CODE("msr ttbr0_el1, xzr"));
    DIES(SIGILL, "mrs ttbr0_el1", CODE("mrs x0, ttbr0_el1" ::: "x0"));
    DIES(SIGILL, "msr sctlr_el1", CODE("msr sctlr_el1, xzr"));
    DIES(SIGILL, "msr vbar_el1", CODE("msr vbar_el1, xzr"));
    DIES(SIGILL, "msr daifset", CODE("msr daifset, #15"));
    DIES(SIGILL, "msr spsel", CODE("msr spsel, #1"));
    DIES(SIGILL, "tlbi vmalle1", CODE("tlbi vmalle1"));
    DIES(SIGILL, "at s1e1r", CODE("at s1e1r, x0"));
    DIES(SIGILL, "ic iallu", CODE("ic iallu"));
    DIES(SIGILL, "dc isw", CODE("dc isw, x0"));
    DIES(SIGILL, "hvc", CODE("hvc #0"));
    DIES(SIGILL, "smc", CODE(".inst 0xd4000003"));
    DIES(SIGILL, "eret", CODE("eret"));
    DIES(SIGILL, "hlt: semihosting from a program", CODE("mov w0, #0x18\n mov x1, #0\n hlt #0xf000" ::: "x0", "x1"));
    DIES(SIGILL, "udf", CODE("udf #0"));
    DIES(SIGILL, "an undefined instruction", CODE(".inst 0xffffffff"));
    DIES(SIGTRAP, "brk", CODE("brk #0"));
    DIES(SIGSEGV, "dc zva to a kernel address", CODE("dc zva, %0" ::"r"(0xffffffc000000000)));
    ANYHOW("dc civac to a kernel address", CODE("dc civac, %0" ::"r"(0xffffffc000000000)));
    ANYHOW("wfi", CODE("wfi"));
    ANYHOW("wfe and yield", CODE("sevl\n wfe\n yield"));
    ANYHOW("a stack pointer that is not aligned", CODE("mov x9, sp\n add x9, x9, #8\n mov sp, x9\n ldr x0, [sp]" ::: "x0", "x9"));
    ANYHOW("svc with another number", CODE("mov x8, #172\n svc #77" ::: "x0", "x8"));
    register long number __asm__("x8") = SYS_getpid;
    register long result __asm__("x0");
    CODE("mov x12, sp\n mov x13, #1\n mov sp, x13\n svc #0\n mov sp, x12" : "=r"(result) : "r"(number) : "x12", "x13", "memory");
    EQUAL(result, getpid(), "a system call with a wild stack pointer");
#endif
    int before = test_failures;
    uint64_t state = 0x2545f4914f6cdd1d;
    for (int round = 0; round < 100; round++) {
        uint64_t words[8];
        for (int index = 0; index < 8; index++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            words[index] = state;
        }
        // Random bytes as code: the child may even come back.
        char *code = mmap(0, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        NEED(code != MAP_FAILED);
        memcpy(code, words, sizeof words);
        __builtin___clear_cache(code, code + 64);
        int status = test_wait(CHILD({
            alarm(2);
            close(1);
            ((void (*)(void))code)();
        }));
        STEP(WIFSIGNALED(status) || WIFEXITED(status));
        munmap(code, PAGE);
    }
    ALL_STEPS(before, "a hundred programs of random bytes");
    EXITS(3, "the machine works on", _exit(3));
    return test_end();
}
