// Bad programs: wild jumps, execution of data, writes to code and constants.
// The right signal ends the process; its parent continues.

#include "test.h"

static const char constant[] = "constant";
static char data[64];

static void jump(uintptr_t address) { ((void (*)(void))test_wild(address))(); }

static void still_works(void) {
    char *memory = test_map(64 * PAGE);
    memset(memory, 7, 64 * PAGE);
    pid_t child = CHILD(STEP_EQUAL(memory[63 * PAGE], 7));
    STEP_EQUAL(test_wait(child), 0);
    munmap(memory, 64 * PAGE);
}

int main(void) {
    test_start();
    DIES(SIGSEGV, "a jump to 0", jump(0));
    DIES(SIGSEGV, "a jump to low memory", jump(0x1000));
    DIES(SIGSEGV, "a jump to nowhere", jump(0x123456789000));
    DIES(SIGSEGV, "a jump behind the end of user space", jump(0x7ffffffff000));
    DIES(SIGSEGV, "a jump to a kernel address", jump(0xffffffff80100000));
    DIES(SIGSEGV, "a jump to another kernel address", jump(0xffff800000200000));
    DIES(SIGSEGV, "a jump to a non-canonical address", jump(0x1234567812345678));
    DIES(SIGSEGV, "a jump to the last bytes of all", jump(0xfffffffffffffff0));
#if defined(__x86_64__)
    DIES(SIGSEGV, "a return to a non-canonical address",
         __asm__ volatile("movabs $0x800000000000, %%rax\n push %%rax\n ret" ::: "rax", "memory"));
    static const unsigned char code[] = {0xb8, 42, 0, 0, 0, 0xc3};
#elif defined(__aarch64__)
    DIES(SIGBUS, "a jump to a crooked address", jump((uintptr_t)main + 2));
    static const uint32_t code[] = {0x52800540, 0xd65f03c0};
#endif
    still_works();

    DIES(SIGSEGV, "execution of data", {
        memcpy(data, code, sizeof code);
        __builtin___clear_cache(data, data + sizeof code);
        jump((uintptr_t)data);
    });
    DIES(SIGSEGV, "execution of the stack", {
        char stack[64] __attribute__((aligned(16)));
        memcpy(stack, code, sizeof code);
        __builtin___clear_cache(stack, stack + sizeof code);
        jump((uintptr_t)stack);
    });
    DIES(SIGSEGV, "execution of the heap", {
        char *heap = malloc(64);
        memcpy(heap, code, sizeof code);
        __builtin___clear_cache(heap, heap + sizeof code);
        jump((uintptr_t)heap);
    });
#if defined(__x86_64__)
    // Elsewhere linkers put constants beside the code.
    DIES(SIGSEGV, "execution of constants", jump((uintptr_t)constant));
#endif
    char *page = mmap(0, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(page != MAP_FAILED);
    memcpy(page, code, sizeof code);
    __builtin___clear_cache(page, page + sizeof code);
    EQUAL(((int (*)(void))page)(), 42, "code in executable memory runs");
    NEED(mprotect(page, PAGE, PROT_READ) == 0);
    DIES(SIGSEGV, "but not after mprotect has taken PROT_EXEC away", jump((uintptr_t)page));
    NEED(mprotect(page, PAGE, PROT_READ | PROT_EXEC) == 0);
    EQUAL(((int (*)(void))page)(), 42, "and again when it is back");
    DIES(SIGSEGV, "a write to it", page[0] = 1);
    NEED(munmap(page, PAGE) == 0);
    DIES(SIGSEGV, "execution of memory that was unmapped", jump((uintptr_t)page));

    DIES(SIGSEGV, "a write to code", *(volatile char *)test_wild((uintptr_t)main) = 0);
    DIES(SIGSEGV, "a write to constants", *(volatile char *)test_wild((uintptr_t)constant) = 0);
    DIES(SIGSEGV, "a write to a kernel address", *(volatile char *)test_wild(0xffffffff80100000) = 0);
    DIES(SIGSEGV, "a load from a kernel address",
         (void)*(volatile char *)test_wild(0xffffffff80100000));
    DIES(SIGSEGV, "a load from a direct map's address",
         (void)*(volatile char *)test_wild(0xffff888000000000));
    FAILS(read(open("/dev/zero", O_RDONLY), test_wild((uintptr_t)main), 16), EFAULT,
          "nor does the kernel write to code");
    int before = test_failures;
    uint64_t state = 88172645463325252u;
    for (int round = 0; round < 64; round++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        uintptr_t address = state >> (round % 4 * 16) & ~3ul;
        // A jump to executable memory may have any effect.
        int status = test_wait(CHILD({
            alarm(5);
            jump(address);
        }));
        STEP(WIFSIGNALED(status) || WIFEXITED(status));
    }
    ALL_STEPS(before, "64 jumps to anywhere");
    before = test_failures;
    still_works();
    ALL_STEPS(before, "the parent works on");
    return test_end();
}
