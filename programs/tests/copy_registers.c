// A transfer leaves the vector registers as they are, however the kernel
// copies: also where the memory has to be brought in on the way, or is missing.

#include "test.h"

static unsigned char before[8][16] __attribute__((aligned(16))), after[8][16] __attribute__((aligned(16)));

// read(2) between loads and stores of eight vector registers.
static long read_with_registers(int file, void *to, size_t length) {
#if defined(__x86_64__)
    long result = SYS_read;
    __asm__ volatile(
        "movaps (%[before]), %%xmm0; movaps 16(%[before]), %%xmm1; movaps 32(%[before]), %%xmm2\n\t"
        "movaps 48(%[before]), %%xmm3; movaps 64(%[before]), %%xmm4; movaps 80(%[before]), %%xmm5\n\t"
        "movaps 96(%[before]), %%xmm6; movaps 112(%[before]), %%xmm7\n\t"
        "syscall\n\t"
        "movaps %%xmm0, (%[after]); movaps %%xmm1, 16(%[after]); movaps %%xmm2, 32(%[after])\n\t"
        "movaps %%xmm3, 48(%[after]); movaps %%xmm4, 64(%[after]); movaps %%xmm5, 80(%[after])\n\t"
        "movaps %%xmm6, 96(%[after]); movaps %%xmm7, 112(%[after])"
        : "+a"(result)
        : "D"((long)file), "S"(to), "d"(length), [before] "r"(before), [after] "r"(after)
        : "rcx", "r11", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
    return result;
#else
    register long result __asm__("x0") = file;
    register void *second __asm__("x1") = to;
    register size_t third __asm__("x2") = length;
    register long number __asm__("x8") = SYS_read;
    __asm__ volatile(
        "ld1 {v0.16b, v1.16b, v2.16b, v3.16b}, [%[before]]\n\t"
        "ld1 {v4.16b, v5.16b, v6.16b, v7.16b}, [%[behind]]\n\t"
        "svc #0\n\t"
        "st1 {v0.16b, v1.16b, v2.16b, v3.16b}, [%[after]]\n\t"
        "st1 {v4.16b, v5.16b, v6.16b, v7.16b}, [%[rest]]"
        : "+r"(result)
        : "r"(second), "r"(third), "r"(number), [before] "r"(before), [behind] "r"(before + 4),
          [after] "r"(after), [rest] "r"(after + 4)
        : "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7");
    return result;
#endif
}

int main(void) {
    test_start();
    for (size_t at = 0; at < sizeof before; at++)
        before[at / 16][at % 16] = (unsigned char)(at * 5 + 1);
    int file = (int)syscall(SYS_memfd_create, "registers", 0);
    NEED(file >= 0 && ftruncate(file, 16 * PAGE) == 0);
    char *memory = test_map(16 * PAGE), *hole = test_map(4 * PAGE);
    NEED(munmap(hole + 2 * PAGE, PAGE) == 0);
    static const size_t lengths[] = {1, 16, 255, 256, 300, 4096, 5000, 8 * 4096};
    int failures = test_failures;
    for (size_t index = 0; index < sizeof lengths / sizeof *lengths; index++) {
        memset(after, 0, sizeof after);
        STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
        STEP_EQUAL(read_with_registers(file, memory + 3, lengths[index]), (long)lengths[index]);
        STEP(memcmp(before, after, sizeof before) == 0);
        STEP_EQUAL(lseek(file, 0, SEEK_SET), 0);
        memset(after, 0, sizeof after);
        size_t distance = lengths[index] % PAGE + 1;
        STEP_EQUAL(read_with_registers(file, hole + 2 * PAGE - distance, 3 * PAGE), (long)distance);
        STEP(memcmp(before, after, sizeof before) == 0);
    }
    ALL_STEPS(failures, "vector registers survive transfers");
    return test_end();
}
