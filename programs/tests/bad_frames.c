// Bad programs: returns from signal handlers with forged frames. The process
// may die; it must not become the kernel, and the machine lives on.

#include "test.h"

#include <ucontext.h>

static void (*forge)(ucontext_t *user);

static void handler(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)info;
    forge(context);
}

// Takes a signal whose frame is forged, then tries what only a kernel may.
static int run(void (*how)(ucontext_t *user), int privileged) {
    return test_wait(CHILD({
        alarm(5);
        forge = how;
        struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
        sigaction(SIGUSR1, &action, 0);
        raise(SIGUSR1);
        if (privileged) {
#if defined(__x86_64__)
            __asm__ volatile("cli\n out %%al, $0xe9\n sti" ::"a"('!'));
#elif defined(__aarch64__)
            __asm__ volatile("mrs x0, ttbr0_el1\n msr daifset, #15" ::: "x0");
#endif
            _exit(77);
        }
    }));
}

static void survives(void (*how)(ucontext_t *user), const char *text) {
    int status = run(how, 0);
    CHECK(WIFSIGNALED(status) || WIFEXITED(status), text);
}

static void gains_nothing(void (*how)(ucontext_t *user), const char *text) {
    int status = run(how, 1);
    CHECK(WIFSIGNALED(status), text);
}

static void fill(ucontext_t *user) { memset(&user->uc_mcontext, 0xff, sizeof user->uc_mcontext); }
static void clear(ucontext_t *user) { memset(&user->uc_mcontext, 0, sizeof user->uc_mcontext); }
static void masks(ucontext_t *user) { memset(&user->uc_sigmask, 0xff, sizeof user->uc_sigmask); }
static void flags(ucontext_t *user) { user->uc_flags = -1; }
static void stack(ucontext_t *user) { memset(&user->uc_stack, 0xa5, sizeof user->uc_stack); }
static void nothing(ucontext_t *user) { (void)user; }

static uint64_t state = 88172645463325252u;
static void noise(ucontext_t *user) {
    unsigned char *bytes = (unsigned char *)&user->uc_mcontext;
    for (int count = 0; count < 40; count++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes[state % sizeof user->uc_mcontext] = state >> 32;
    }
}

#if defined(__x86_64__)
#define REGISTER(name) user->uc_mcontext.gregs[REG_##name]
static void kernel_code(ucontext_t *user) { REGISTER(CSGSFS) = (REGISTER(CSGSFS) & ~0xffffl) | 0x08; }
static void kernel_code_2(ucontext_t *user) { REGISTER(CSGSFS) = (REGISTER(CSGSFS) & ~0xffffl) | 0x10; }
static void no_code(ucontext_t *user) { REGISTER(CSGSFS) &= ~0xffffl; }
static void old_code(ucontext_t *user) { REGISTER(CSGSFS) = (REGISTER(CSGSFS) & ~0xffffl) | 0x23; }
static void kernel_stack_segment(ucontext_t *user) {
    REGISTER(CSGSFS) = (REGISTER(CSGSFS) & 0xffffffffffffl) | 0x18l << 48;
    user->uc_flags |= 4;
}
static void no_stack_segment(ucontext_t *user) {
    REGISTER(CSGSFS) &= 0xffffffffffffl;
    user->uc_flags |= 4;
}
static void rip_noncanonical(ucontext_t *user) { REGISTER(RIP) = 0x800000000000; }
static void rip_kernel(ucontext_t *user) { REGISTER(RIP) = (long)0xffffffff80100000; }
static void rsp_noncanonical(ucontext_t *user) { REGISTER(RSP) = (long)0x8000000000000000; }
static void rsp_kernel(ucontext_t *user) { REGISTER(RSP) = (long)0xffffffff80100000; }
static void privilege(ucontext_t *user) { REGISTER(EFL) |= 0x3000; }
static void no_interrupts(ucontext_t *user) { REGISTER(EFL) &= ~0x200l; }
static void all_flags(ucontext_t *user) { REGISTER(EFL) = -1; }
static void virtual_mode(ucontext_t *user) { REGISTER(EFL) |= 0x20000; }
static void nested_task(ucontext_t *user) { REGISTER(EFL) |= 0x4000; }
static void float_pointer(ucontext_t *user) { user->uc_mcontext.fpregs = test_wild(0xffff800000000000); }
static void float_unmapped(ucontext_t *user) { user->uc_mcontext.fpregs = test_wild(0x10); }
static void float_crooked(ucontext_t *user) {
    user->uc_mcontext.fpregs = (void *)((char *)user->uc_mcontext.fpregs + 1);
}
static void float_none(ucontext_t *user) { user->uc_mcontext.fpregs = 0; }
static void float_control(ucontext_t *user) { memset((char *)user->uc_mcontext.fpregs + 24, 0xff, 8); }
static void float_all(ucontext_t *user) { memset(user->uc_mcontext.fpregs, 0xff, 512); }
#elif defined(__aarch64__)
static void level_1(ucontext_t *user) { user->uc_mcontext.pstate = 0x3c5; }
static void level_1_thread(ucontext_t *user) { user->uc_mcontext.pstate |= 4; }
static void level_3(ucontext_t *user) { user->uc_mcontext.pstate |= 0xd; }
static void old_state(ucontext_t *user) { user->uc_mcontext.pstate |= 0x10; }
static void no_interrupts(ucontext_t *user) { user->uc_mcontext.pstate |= 0x3c0; }
static void all_state(ucontext_t *user) { user->uc_mcontext.pstate = -1ul; }
static void single_step(ucontext_t *user) { user->uc_mcontext.pstate |= 1ul << 21; }
static void illegal(ucontext_t *user) { user->uc_mcontext.pstate |= 1ul << 20; }
static void pc_kernel(ucontext_t *user) { user->uc_mcontext.pc = 0xffffffc008000000; }
static void pc_crooked(ucontext_t *user) { user->uc_mcontext.pc |= 1; }
static void sp_kernel(ucontext_t *user) { user->uc_mcontext.sp = 0xffffffc008000000; }
static void sp_crooked(ucontext_t *user) { user->uc_mcontext.sp |= 1; }
static void float_magic(ucontext_t *user) { user->uc_mcontext.__reserved[0] ^= 0xff; }
static void float_size(ucontext_t *user) { memset(user->uc_mcontext.__reserved + 4, 0xff, 4); }
static void float_control(ucontext_t *user) { memset(user->uc_mcontext.__reserved + 8, 0xff, 8); }
static void float_end(ucontext_t *user) { memset(user->uc_mcontext.__reserved + 528, 0xff, 1024); }
#endif

int main(void) {
    test_start();
    EQUAL(run(nothing, 0), 0, "a frame that is not forged");
    survives(fill, "all registers are ones");
    survives(clear, "all registers are zero");
    EQUAL(run(masks, 0), 0, "all signals are masked");
    survives(flags, "unknown flags");
    survives(stack, "another stack for signals");
#if defined(__x86_64__)
    gains_nothing(kernel_code, "selector 0x08 for code");
    gains_nothing(kernel_code_2, "selector 0x10 for code");
    gains_nothing(no_code, "selector 0 for code");
    survives(old_code, "selector 0x23 for code");
    gains_nothing(kernel_stack_segment, "selector 0x18 for the stack");
    survives(no_stack_segment, "selector 0 for the stack");
    survives(rip_noncanonical, "a non-canonical rip");
    survives(rip_kernel, "a kernel address in rip");
    survives(rsp_noncanonical, "a non-canonical rsp");
    survives(rsp_kernel, "a kernel address in rsp");
    gains_nothing(privilege, "IOPL 3");
    gains_nothing(no_interrupts, "the interrupt flag off");
    gains_nothing(all_flags, "all flags");
    gains_nothing(virtual_mode, "the virtual-8086 flag");
    gains_nothing(nested_task, "the nested-task flag");
    survives(float_pointer, "a kernel address for floating point");
    survives(float_unmapped, "an unmapped address for floating point");
    survives(float_crooked, "a crooked address for floating point");
    EQUAL(run(float_none, 0), 0, "no floating point in the frame");
    survives(float_control, "reserved bits in MXCSR");
    survives(float_all, "ones for all floating point");
#elif defined(__aarch64__)
    gains_nothing(level_1, "exception level 1 and no interrupts");
    gains_nothing(level_1_thread, "exception level 1");
    gains_nothing(level_3, "exception level 3");
    gains_nothing(old_state, "the 32-bit state");
    gains_nothing(no_interrupts, "no interrupts");
    gains_nothing(all_state, "all bits of PSTATE");
    gains_nothing(single_step, "the single-step bit");
    gains_nothing(illegal, "the illegal-state bit");
    survives(pc_kernel, "a kernel address in pc");
    survives(pc_crooked, "a crooked pc");
    survives(sp_kernel, "a kernel address in sp");
    survives(sp_crooked, "a crooked sp");
    survives(float_magic, "another magic for floating point");
    survives(float_size, "another size for floating point");
    survives(float_control, "ones in FPSR and FPCR");
    survives(float_end, "noise behind floating point");
#endif
    int before = test_failures;
    for (int round = 0; round < 200; round++) {
        int status = run(noise, 0);
        STEP(WIFSIGNALED(status) || WIFEXITED(status));
        state += round;
    }
    ALL_STEPS(before, "200 frames with noise");
    int status = test_wait(CHILD({ alarm(5); syscall(SYS_rt_sigreturn); }));
    CHECK(WIFSIGNALED(status) || WIFEXITED(status), "sigreturn without a frame");
    DIES(SIGSEGV, "sigreturn with a stack pointer to nowhere", {
#if defined(__x86_64__)
        __asm__ volatile("xor %%esp, %%esp\n syscall" ::"a"(SYS_rt_sigreturn) : "memory");
#elif defined(__aarch64__)
        __asm__ volatile("mov sp, %0\n mov x8, #139\n svc #0" ::"r"(0x1000ul) : "x8", "memory");
#endif
    });
    DIES(SIGSEGV, "sigreturn with a kernel address for the stack", {
#if defined(__x86_64__)
        __asm__ volatile("mov %1, %%rsp\n syscall" ::"a"(SYS_rt_sigreturn), "r"(0xffffffff80100000) : "memory");
#elif defined(__aarch64__)
        __asm__ volatile("mov sp, %0\n mov x8, #139\n svc #0" ::"r"(0xffffffc008000000) : "x8", "memory");
#endif
    });
    EXITS(3, "the machine works on", _exit(3));
    return test_end();
}
