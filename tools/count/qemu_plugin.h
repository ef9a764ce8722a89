/*
 * The part of QEMU's plugin interface that this plugin needs, declared from its documentation, so
 * that it is built without QEMU's headers: https://www.qemu.org/docs/master/devel/tcg-plugins.html
 *
 * PLUGIN_API is the version of the interface to build for: 1 (QEMU up to 8.1) or 4 (QEMU 9.2 and
 * later, as long as they accept it). QEMU refuses a plugin whose version it does not support.
 */
#ifndef BINDERY_QEMU_PLUGIN_H
#define BINDERY_QEMU_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if PLUGIN_API != 1 && PLUGIN_API != 4
#error "compile with -DPLUGIN_API=1 or -DPLUGIN_API=4"
#endif

#define EXPORTED __attribute__((visibility("default")))

typedef uint64_t qemu_plugin_id_t;

typedef struct {
    const char *target_name;
    struct {
        int min;
        int cur;
    } version;
    bool system_emulation;
    struct {
        int smp_vcpus;
        int max_vcpus;
    } system;
} qemu_info_t;

struct qemu_plugin_tb;
struct qemu_plugin_insn;

enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
enum qemu_plugin_mem_rw { QEMU_PLUGIN_MEM_R = 1, QEMU_PLUGIN_MEM_W = 2, QEMU_PLUGIN_MEM_RW = 3 };
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };

typedef void translation_callback(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void execution_callback(unsigned int cpu, void *data);

/* One access to memory. */
typedef uint32_t qemu_plugin_meminfo_t;
typedef void memory_callback(unsigned int cpu, qemu_plugin_meminfo_t, uint64_t address, void *data);

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, translation_callback *);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, execution_callback *,
                                            enum qemu_plugin_cb_flags, void *data);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *, memory_callback *,
                                      enum qemu_plugin_cb_flags, enum qemu_plugin_mem_rw,
                                      void *data);
bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t);
/* The place of the last access in the machine's memory; NULL for a program without a machine. */
struct qemu_plugin_hwaddr;
struct qemu_plugin_hwaddr *qemu_plugin_get_hwaddr(qemu_plugin_meminfo_t, uint64_t address);
bool qemu_plugin_hwaddr_is_io(const struct qemu_plugin_hwaddr *);
uint64_t qemu_plugin_hwaddr_phys_addr(const struct qemu_plugin_hwaddr *);
unsigned int qemu_plugin_mem_size_shift(qemu_plugin_meminfo_t);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t index);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);

#if PLUGIN_API == 1

const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *, enum qemu_plugin_op,
                                                void *counter, uint64_t amount);
void qemu_plugin_register_vcpu_mem_inline(struct qemu_plugin_insn *, enum qemu_plugin_mem_rw,
                                          enum qemu_plugin_op, void *counter, uint64_t amount);

#else

/* A scoreboard is an array with one element for each CPU; a counter is a place in the element. */
struct qemu_plugin_scoreboard;
typedef struct {
    struct qemu_plugin_scoreboard *score;
    size_t offset;
} qemu_plugin_u64;

size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *, void *bytes, size_t size);
struct qemu_plugin_scoreboard *qemu_plugin_scoreboard_new(size_t element_size);
uint64_t qemu_plugin_u64_sum(qemu_plugin_u64);
void qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(struct qemu_plugin_insn *,
                                                         enum qemu_plugin_op, qemu_plugin_u64,
                                                         uint64_t amount);
void qemu_plugin_register_vcpu_mem_inline_per_vcpu(struct qemu_plugin_insn *,
                                                   enum qemu_plugin_mem_rw, enum qemu_plugin_op,
                                                   qemu_plugin_u64, uint64_t amount);

#endif

#endif
