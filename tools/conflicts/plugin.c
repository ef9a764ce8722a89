/*
 * A QEMU plugin that finds the cache lines on which two operations conflict: both touch the line,
 * and at least one writes it.
 *
 *      qemu-x86_64 -plugin conflicts.so,out=FILE PROGRAM               operations of a program
 *      qemu-system-x86_64 -plugin conflicts.so,out=FILE -smp 2 ...     operations of a kernel
 *
 * A program marks a first operation on one thread, then a second one on another, never both at
 * once. programs/include/mark.h has the form of a mark, and `enum mark` below the numbers. Loads
 * and stores between the marks are recorded: of a program, those of the thread by virtual address;
 * of a machine, those of the kernel on the thread's CPU by physical address, since processes map
 * the same memory at different addresses. At the end of the second operation, `out` gets:
 *
 *      pair LINES LINES ATOMICS ATOMICS
 *      word ADDRESS READ WRITTEN READ WRITTEN
 *
 * A `pair` line has the lines that each operation touched, and its atomic instructions. A `word`
 * line follows for each word of 8 bytes in a line of conflict that an operation touched: the first
 * instruction of each operation that read it, and the first that wrote it, 0 if none did.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../count/classify.h"
#include "../count/qemu_plugin.h"
#include "lines.h"

EXPORTED int qemu_plugin_version = PLUGIN_API;

enum mark { BEGIN_FIRST = 1, BEGIN_SECOND, END_FIRST, END_SECOND };

#define NO_THREAD (-1)

struct operation {
    struct lines lines;
    uint64_t atomics;
};

static FILE *output;
static bool is_x86_64, is_machine;
static struct operation operations[2];
/* The operation under way, and its thread. The thread is stored last and cleared first: no other
   one uses `current`. */
static struct operation *current;
static _Atomic int thread = NO_THREAD;

static void fail(const char *why)
{
    fprintf(stderr, "conflicts: %s\n", why);
    exit(1);
}

static void report_line(const struct line *first, void *data)
{
    (void)data;
    const struct line *second = lines_find(&operations[1].lines, first->number);
    if (!second || !(line_is_written(first) || line_is_written(second)))
        return;
    for (uint64_t i = 0; i < WORDS_PER_LINE; i++) {
        struct word a = first->words[i], b = second->words[i];
        if (!(a.read_by || a.written_by || b.read_by || b.written_by))
            continue;
        uint64_t address = first->number << LINE_SHIFT | i << WORD_SHIFT;
        fprintf(output, "word %llx %llx %llx %llx %llx\n", (unsigned long long)address,
                (unsigned long long)a.read_by, (unsigned long long)a.written_by,
                (unsigned long long)b.read_by, (unsigned long long)b.written_by);
    }
}

static void report(void)
{
    struct operation *first = &operations[0], *second = &operations[1];
    fprintf(output, "pair %zu %zu %llu %llu\n", first->lines.count, second->lines.count,
            (unsigned long long)first->atomics, (unsigned long long)second->atomics);
    lines_each(&first->lines, report_line, NULL);
    if (fflush(output) != 0)
        fail("cannot write");
}

static void on_mark(unsigned cpu, void *data)
{
    switch ((enum mark)(uintptr_t)data) {
    case BEGIN_FIRST:
    case BEGIN_SECOND:
        current = &operations[(uintptr_t)data == BEGIN_SECOND];
        lines_clear(&current->lines);
        current->atomics = 0;
        atomic_store(&thread, (int)cpu);
        return;
    case END_FIRST:
        atomic_store(&thread, NO_THREAD);
        return;
    case END_SECOND:
        atomic_store(&thread, NO_THREAD);
        report();
        return;
    }
}

static void on_atomic(unsigned cpu, void *data)
{
    (void)data;
    if (atomic_load(&thread) == (int)cpu)
        current->atomics++;
}

static void on_access(unsigned cpu, qemu_plugin_meminfo_t access, uint64_t address, void *data)
{
    if (atomic_load(&thread) != (int)cpu)
        return;
    if (is_machine) {
        struct qemu_plugin_hwaddr *place = qemu_plugin_get_hwaddr(access, address);
        if (!place || qemu_plugin_hwaddr_is_io(place))
            return;
        address = qemu_plugin_hwaddr_phys_addr(place);
    }
    size_t size = (size_t)1 << qemu_plugin_mem_size_shift(access);
    bool is_store = qemu_plugin_mem_is_store(access);
    if (!lines_note(&current->lines, address, size, is_store, (uintptr_t)data))
        fail("an operation touches too many lines");
}

static struct meaning meaning_of(const struct qemu_plugin_insn *instruction)
{
    uint8_t bytes[16] = {0};
    size_t size = qemu_plugin_insn_size(instruction);
    if (size > sizeof bytes)
        size = sizeof bytes;
#if PLUGIN_API == 1
    memcpy(bytes, qemu_plugin_insn_data(instruction), size);
#else
    qemu_plugin_insn_data(instruction, bytes, size);
#endif
    if (is_x86_64)
        return classify_x86_64(bytes, size);
    return classify_aarch64(bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
                            (uint32_t)bytes[3] << 24);
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *block)
{
    (void)id;
    for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); i++) {
        struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, i);
        struct meaning meaning = meaning_of(instruction);
        if (meaning.mark >= BEGIN_FIRST && meaning.mark <= END_SECOND)
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_mark,
                                                   QEMU_PLUGIN_CB_NO_REGS,
                                                   (void *)(uintptr_t)meaning.mark);
        bool is_kernel = qemu_plugin_insn_vaddr(instruction) >> 63;
        if (is_machine && !is_kernel)
            continue;
        if (meaning.events & event(ATOMICS))
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_atomic,
                                                   QEMU_PLUGIN_CB_NO_REGS, NULL);
        qemu_plugin_register_vcpu_mem_cb(
            instruction, on_access, QEMU_PLUGIN_CB_NO_REGS, QEMU_PLUGIN_MEM_RW,
            (void *)(uintptr_t)qemu_plugin_insn_vaddr(instruction));
    }
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
                                 char **argv)
{
    is_x86_64 = strcmp(info->target_name, "x86_64") == 0;
    is_machine = info->system_emulation;
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "out=", 4) != 0) {
            fprintf(stderr, "conflicts: unknown argument %s\n", argv[i]);
            return -1;
        }
        output = fopen(argv[i] + 4, "w");
    }
    if (!output || !lines_new(&operations[0].lines) || !lines_new(&operations[1].lines)) {
        fprintf(stderr, "conflicts: out=FILE is missing or cannot be written\n");
        return -1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    return 0;
}
