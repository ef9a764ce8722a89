/*
 * A QEMU plugin that counts what a kernel executes between the marks of a user program.
 *
 *      -plugin count.so,out=FILE[,profile=FILE,phase=NUMBER,occurrence=N]
 *
 * out          gets a line for each occurrence of a phase, under a line with the columns' names
 * profile      gets a line for each of the kernel's instructions that was executed
 * phase        in this phase,
 * occurrence   when it occurred the Nth time (1): address and executions
 *
 * Each instruction is classified once, when QEMU translates it, and gets one addition for each
 * counter that it stands for. With one CPU and -icount the counts of a run repeat exactly. Phases
 * are not told apart by CPU: a workload marks them on one CPU at a time.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "classify.h"
#include "phases.h"
#include "profile.h"
#include "qemu_plugin.h"

EXPORTED int qemu_plugin_version = PLUGIN_API;

static FILE *output;
static bool is_x86_64;
static struct {
    /* NULL if none is wanted. */
    FILE *output;
    unsigned phase;
    uint64_t occurrence;
} profile = {.occurrence = 1};

#if PLUGIN_API == 1

/*
 * QEMU 7.2 confuses the directions of inline memory counters: one for loads counts stores, and one
 * for stores counts both.
 */
#define STORES_COUNTER LOADS
#define ALL_COUNTER STORES

static struct counts counts;

static void count_by(struct qemu_plugin_insn *instruction, enum counter counter, uint64_t by)
{
    qemu_plugin_register_vcpu_insn_exec_inline(instruction, QEMU_PLUGIN_INLINE_ADD_U64,
                                               &counts.of[counter], by);
}

static void count_accesses(struct qemu_plugin_insn *instruction)
{
    qemu_plugin_register_vcpu_mem_inline(instruction, QEMU_PLUGIN_MEM_R,
                                         QEMU_PLUGIN_INLINE_ADD_U64, &counts.of[STORES_COUNTER], 1);
    qemu_plugin_register_vcpu_mem_inline(instruction, QEMU_PLUGIN_MEM_W,
                                         QEMU_PLUGIN_INLINE_ADD_U64, &counts.of[ALL_COUNTER], 1);
}

static struct counts read_counts(void)
{
    struct counts now = counts;
    now.of[STORES] = counts.of[STORES_COUNTER];
    now.of[LOADS] = counts.of[ALL_COUNTER] - counts.of[STORES_COUNTER];
    return now;
}

static void read_bytes(const struct qemu_plugin_insn *instruction, uint8_t *bytes, size_t size)
{
    memcpy(bytes, qemu_plugin_insn_data(instruction), size);
}

#else

static struct qemu_plugin_scoreboard *scoreboard;

static qemu_plugin_u64 place_of(enum counter counter)
{
    return (qemu_plugin_u64){scoreboard, offsetof(struct counts, of) + counter * sizeof(uint64_t)};
}

static void count_by(struct qemu_plugin_insn *instruction, enum counter counter, uint64_t by)
{
    qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(instruction, QEMU_PLUGIN_INLINE_ADD_U64,
                                                        place_of(counter), by);
}

static void count_accesses(struct qemu_plugin_insn *instruction)
{
    qemu_plugin_register_vcpu_mem_inline_per_vcpu(instruction, QEMU_PLUGIN_MEM_R,
                                                  QEMU_PLUGIN_INLINE_ADD_U64, place_of(LOADS), 1);
    qemu_plugin_register_vcpu_mem_inline_per_vcpu(instruction, QEMU_PLUGIN_MEM_W,
                                                  QEMU_PLUGIN_INLINE_ADD_U64, place_of(STORES), 1);
}

static struct counts read_counts(void)
{
    struct counts now;
    for (int i = 0; i < COUNTER_COUNT; i++)
        now.of[i] = qemu_plugin_u64_sum(place_of(i));
    return now;
}

static void read_bytes(const struct qemu_plugin_insn *instruction, uint8_t *bytes, size_t size)
{
    qemu_plugin_insn_data(instruction, bytes, size);
}

#endif

static void count_execution(struct qemu_plugin_insn *instruction, enum counter counter)
{
    count_by(instruction, counter, 1);
}

/* Whether instructions executed now belong into the profile. */
static bool is_profiled_now(void)
{
    return phase_is_open(profile.phase) &&
           phase_occurrences(profile.phase) + 1 == profile.occurrence;
}

static void on_mark(unsigned int cpu, void *data)
{
    (void)cpu;
    struct counts now = read_counts();
    unsigned number = (unsigned)(uintptr_t)data;
    uint64_t occurrences = phases_mark(output, number, &now);
    if (!profile.output || number % PHASES != profile.phase)
        return;
    if (occurrences == profile.occurrence)
        profile_write(profile.output);
    else if (is_profiled_now())
        profile_clear();
}

static void on_profiled(unsigned int cpu, void *data)
{
    (void)cpu;
    struct profile_entry *entry = data;
    if (is_profiled_now())
        entry->executions++;
}

static struct meaning classify(const struct qemu_plugin_insn *instruction)
{
    uint8_t bytes[16] = {0};
    size_t size = qemu_plugin_insn_size(instruction);
    if (size > sizeof bytes)
        size = sizeof bytes;
    read_bytes(instruction, bytes, size);
    if (is_x86_64)
        return classify_x86_64(bytes, size);
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return classify_aarch64(word);
}

static void instrument(struct qemu_plugin_insn *instruction)
{
    struct meaning meaning = classify(instruction);
    uint64_t address = qemu_plugin_insn_vaddr(instruction);
    bool is_kernel = address >> 63;
    if (meaning.is_string)
        count_execution(instruction, is_kernel ? KERNEL_STRING : USER_STRING);
    else
        count_execution(instruction, is_kernel ? KERNEL : USER);
    if (is_kernel && !meaning.is_string)
        count_accesses(instruction);
    if (is_kernel && meaning.string_bytes > 0)
        count_by(instruction, STRING_BYTES, meaning.string_bytes);
    uint32_t events = is_kernel ? meaning.events : meaning.events & event(SYSTEM_CALLS);
    for (int i = 0; i < COUNTER_COUNT; i++)
        if (events & event(i))
            count_execution(instruction, i);
    if (meaning.mark != NO_MARK)
        qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_mark, QEMU_PLUGIN_CB_NO_REGS,
                                               (void *)(uintptr_t)meaning.mark);
    if (profile.output && is_kernel) {
        struct profile_entry *entry = profile_entry(address);
        if (entry)
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_profiled,
                                                   QEMU_PLUGIN_CB_NO_REGS, entry);
    }
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *block)
{
    (void)id;
    size_t count = qemu_plugin_tb_n_insns(block);
    for (size_t i = 0; i < count; i++)
        instrument(qemu_plugin_tb_get_insn(block, i));
}

/* The rest of an argument that begins with `key`, or NULL. */
static const char *value_of(const char *argument, const char *key)
{
    size_t length = strlen(key);
    return strncmp(argument, key, length) == 0 ? argument + length : NULL;
}

static FILE *create(const char *path)
{
    FILE *file = fopen(path, "w");
    if (!file)
        fprintf(stderr, "count: cannot write %s\n", path);
    return file;
}

static bool read_argument(const char *argument)
{
    const char *value;
    if ((value = value_of(argument, "out=")))
        return (output = create(value)) != NULL;
    if ((value = value_of(argument, "profile=")))
        return (profile.output = create(value)) != NULL;
    if ((value = value_of(argument, "phase="))) {
        profile.phase = (unsigned)strtoul(value, NULL, 10) % PHASES;
        return true;
    }
    if ((value = value_of(argument, "occurrence="))) {
        profile.occurrence = strtoull(value, NULL, 10);
        return true;
    }
    fprintf(stderr, "count: unknown argument %s\n", argument);
    return false;
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int count,
                                 char **arguments)
{
    if (strcmp(info->target_name, "x86_64") == 0)
        is_x86_64 = true;
    else if (strcmp(info->target_name, "aarch64") != 0) {
        fprintf(stderr, "count: instructions of %s are unknown\n", info->target_name);
        return 1;
    }
    for (int i = 0; i < count; i++)
        if (!read_argument(arguments[i]))
            return 1;
    if (!output) {
        fprintf(stderr, "count: out=FILE is missing\n");
        return 1;
    }
#if PLUGIN_API != 1
    scoreboard = qemu_plugin_scoreboard_new(sizeof(struct counts));
#endif
    phases_start(output);
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    return 0;
}
