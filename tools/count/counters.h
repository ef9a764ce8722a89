/*
 * The counters. The names are the columns of the plugin's output.
 *
 * All but the first four and the system calls are counted only in the kernel. An instruction is the
 * kernel's if bit 63 of its address is set: a kernel whose code lies in the lower half is not seen.
 */
#ifndef BINDERY_COUNTERS_H
#define BINDERY_COUNTERS_H

#include <stdint.h>

/*
 * A string instruction (x86-64 `rep`, AArch64 DC ZVA, CPY and SET) does the work of a whole loop, so
 * its iterations are counted apart from instructions, and its loads and stores are left out.
 */
#define COUNTERS(COUNTER)                                                                          \
    COUNTER(KERNEL, "kernel")                                                                      \
    COUNTER(USER, "user")                                                                          \
    COUNTER(KERNEL_STRING, "kernel_string")                                                        \
    COUNTER(USER_STRING, "user_string")                                                            \
    COUNTER(LOADS, "loads")                                                                        \
    COUNTER(STORES, "stores")                                                                      \
    COUNTER(ATOMICS, "atomics")                                                                    \
    COUNTER(BARRIERS, "barriers")                                                                  \
    COUNTER(INVALIDATE_PAGE, "invalidate_page")                                                    \
    COUNTER(INVALIDATE_RANGE, "invalidate_range")                                                  \
    COUNTER(INVALIDATE_SPACE, "invalidate_space")                                                  \
    COUNTER(INVALIDATE_ALL, "invalidate_all")                                                      \
    COUNTER(ROOT_WRITES, "root_writes") /* CR3, TTBR0_EL1, TTBR1_EL1 */                            \
    COUNTER(REGISTER_WRITES, "register_writes") /* other system registers */                       \
    COUNTER(SYSTEM_CALLS, "system_calls")                                                          \
    COUNTER(EXCEPTION_RETURNS, "exception_returns")                                                \
    COUNTER(HALTS, "halts")                                                                        \
    COUNTER(STRING_BYTES, "kernel_string_bytes") /* that the kernel's string instructions move */

enum counter {
#define COUNTER(name, column) name,
    COUNTERS(COUNTER)
#undef COUNTER
    COUNTER_COUNT
};

struct counts {
    uint64_t of[COUNTER_COUNT];
};

#endif
