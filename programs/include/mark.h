/*
 * Marks: where a phase of a workload begins and ends.
 *
 * A mark is one instruction that changes nothing on any machine: on x86-64 a long NOP whose 32-bit
 * displacement carries a number, on AArch64 a move of a 16-bit number to the zero register. A kernel
 * cannot tell a marked program from another; the QEMU plugin under tools/count knows the encodings
 * and counts what the machine executes between the two marks of a phase. A kernel that works for
 * itself (system 5) has the marks in its own code.
 *
 *      x86-64    nopl 0x4D41nnnn(%rax,%rax,1)      0f 1f 84 00 nn nn 41 4d
 *      AArch64   movz xzr, #0x5nnn
 *
 *      nnn       bit 11: the phase ends (else it begins); bits 0 to 10: the phase
 */
#ifndef BINDERY_MARK_H
#define BINDERY_MARK_H

#define MARK_ENDS 0x800

#if defined(__x86_64__)
#define MARK(number)                                                                               \
    __asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00\n\t.long %c0" ::"i"(0x4D410000 | (number))      \
                     : "memory")
#elif defined(__aarch64__)
#define MARK(number) __asm__ volatile("movz xzr, #%c0" ::"i"(0x5000 | (number)) : "memory")
#else
#error "no mark is defined for this architecture"
#endif

/* The phase must be a constant: it is part of the instruction. */
#define MARK_BEGIN(phase) MARK(phase)
#define MARK_END(phase) MARK(MARK_ENDS | (phase))

/*
 * Phases. `bindery compare` has the same numbers in crates/bindery-cli/src/compare/rows.rs.
 * Reserved: 80 to 95 for system 5.
 */
enum phase {
    /* System 1. The whole loop, and each of its calls. */
    PHASE_LOOP = 1,
    PHASE_MMAP = 2,
    PHASE_FIRST_TOUCH = 3,
    PHASE_MREMAP = 4,
    PHASE_MUNMAP = 5,

    /* System 2. */
    PHASE_MOVE_BY_1G = 16,
    PHASE_MOVE_BY_2M = 17,
    PHASE_MOVE_OFF_64K = 18,
    PHASE_MOVE_OFF_4K = 19,
    PHASE_POPULATE_1G = 20,
    PHASE_MUNMAP_1G = 21,

    /* System 3: zero pages, and pages that have to be compressed. */
    PHASE_PAGEOUT = 32,
    PHASE_SWAP_IN = 33,
    PHASE_MUNMAP_SWAPPED = 34,
    PHASE_PAGEOUT_RANDOM = 35,
    PHASE_SWAP_IN_RANDOM = 36,
    PHASE_MUNMAP_SWAPPED_RANDOM = 37,

    /* System 4: 16 MiB for a userfaultfd, in one call, in smaller ones, and fault by fault. */
    PHASE_MOVE_PAGES_WHOLE = 48,
    PHASE_MOVE_PAGES_BY_64K = 49,
    PHASE_MOVE_PAGES_BY_4K = 50,
    PHASE_COPY_PAGES_WHOLE = 51,
    PHASE_COPY_PAGES_BY_64K = 52,
    PHASE_COPY_PAGES_BY_4K = 53,
    PHASE_RELEASE = 54,
    PHASE_FAULTS_MOVE = 55,
    PHASE_FAULTS_COPY = 56,

    /* System 5: 1 MiB for the kernel itself, or 16 MiB where it says so. */
    PHASE_VMALLOC = 64,
    PHASE_VFREE = 65,
    PHASE_VMALLOC_HUGE = 66,
    PHASE_VFREE_HUGE = 67,
    PHASE_VMAP = 68,
    PHASE_VUNMAP = 69,
    PHASE_VMAP_ORDER_4 = 70,
    PHASE_VUNMAP_ORDER_4 = 71,
    PHASE_VMAP_ORDER_8 = 72,
    PHASE_VUNMAP_ORDER_8 = 73,
    PHASE_IOREMAP = 74,
    PHASE_IOUNMAP = 75,
    PHASE_IOREMAP_OFF_64K = 76,
    PHASE_IOUNMAP_OFF_64K = 77,
    PHASE_VMALLOC_HUGE_16M = 78,
    PHASE_VFREE_HUGE_16M = 79,

    /* Files of /proc about a process' memory. */
    PHASE_MAPS = 96,
    PHASE_MAPS_IN_PIECES = 97,
    PHASE_SMAPS = 98,
    PHASE_STATM = 99,
    PHASE_MAP_QUERY = 100,

    /* Copies between a program and what it has open. */
    PHASE_READ_MEMFD = 112,
    PHASE_WRITE_MEMFD = 113,
    PHASE_READ_TMPFS = 114,
    PHASE_WRITE_TMPFS = 115,
    PHASE_WRITE_NEW = 116,
    PHASE_READ_PAGE = 117,
    PHASE_WRITE_PAGE = 118,
    PHASE_READ_BYTE = 119,
    PHASE_WRITE_BYTE = 120,
    PHASE_PIPE_PAGE = 121,
    PHASE_PIPE_64K = 122,
    PHASE_PIPE_BYTE = 123,

    /* Compaction, in ranges of each size: COPY and MOVE with pages recycled, the same with fresh ones. */
    PHASE_COMPACT_BY_4K = 128,
    PHASE_COMPACT_BY_64K = 132,
    PHASE_COMPACT_BY_2M = 136,

    /* A child writes 1 MiB, or 16 MiB, after a fork. */
    PHASE_CHILD_WRITES_PART = 144,
    PHASE_CHILD_WRITES_ALL = 145,

    /* A step of the workload random, whichever. */
    PHASE_STEP = 160,

    /* A file of the disk is read, none of whose pages is in memory: in order and at random. */
    PHASE_COLD_READ = 176,
    PHASE_COLD_READ_RANDOM = 177,
    PHASE_COLD_MAP = 178,
    PHASE_COLD_MAP_RANDOM = 179,

    /* Added to a phase of system 1 when the destination is not congruent with the source. */
    PHASE_OFFSET = 256,
};

#endif
