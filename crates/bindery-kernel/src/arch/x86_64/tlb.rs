//! The table root in CR3, and TLB invalidation.

use core::arch::{asm, naked_asm};

use bindery::addr::Frame;
use bindery::platform::{Cpu, CpuSet, Invalidation};
use bindery_parts::{LocalTlb, OnCpu};

use super::super::interrupt_counts::Reason;
use super::super::shootdowns;
use super::interrupts;
use super::page_tables;

/// The TLB of the calling CPU, and the reason for which it interrupts others.
struct Tlb(Reason);

static FLUSH: Tlb = Tlb(Reason::Flush);
static ORDER: Tlb = Tlb(Reason::Order);

impl LocalTlb for Tlb {
    fn send(&self, cpu: Cpu) {
        // The registers of the local APIC are not cached, so the store to them comes after all
        // earlier ones.
        interrupts::send_to(cpu.0, self.0);
    }

    fn invalidate(&self, root: Frame, what: &Invalidation) {
        invalidate(root, what);
    }

    fn invalidate_kernel(&self, what: &Invalidation) {
        if !invalidate_one_by_one(what) {
            forget_everything();
        }
    }

    fn flush_all(&self) {
        forget_everything();
    }

    fn order(&self) {
        // A write of a control register serializes (Intel SDM volume 3A, "Serializing
        // Instructions").
        reload();
    }

    fn relax(&self) {
        super::pause();
    }
}

#[inline]
fn here() -> OnCpu<'static, 'static, Tlb> {
    shootdowns::here(&FLUSH)
}

/// Loads a program's tables. The load drops all TLB entries that are not global.
pub fn load_root(root: Frame) {
    here().run(root, |_| load(u64::from(root.0) << 12));
}

/// Loads the tables of no program.
pub fn unload_root() {
    here().leave(load_own_root);
}

/// Loads the kernel's root on a CPU that has loaded no program's, and may not have its number yet.
pub(super) fn load_own_root() {
    load(page_tables::root());
}

#[inline]
fn load(root: u64) {
    // SAFETY: every root has the kernel in its upper half.
    unsafe { asm!("mov cr3, {}", in(reg) root, options(nostack, preserves_flags)) };
}

/// As [`invalidate`], because INVLPG affects only this CPU and also drops global entries.
pub fn invalidate_local(root: Frame, what: &Invalidation) {
    invalidate(root, what);
}

/// The maximum number of addresses that are invalidated one by one; a longer range flushes
/// everything.
const FEW: u64 = 8;

/// Invalidates entries of this CPU's TLB. Each single invalidation also drops all cached
/// intermediate entries.
#[inline]
pub fn invalidate(_root: Frame, what: &Invalidation) {
    if !invalidate_one_by_one(what) {
        reload();
    }
}

#[inline]
fn reload() {
    // SAFETY: loads the same root.
    unsafe {
        asm!("mov {root}, cr3", "mov cr3, {root}", root = out(reg) _,
            options(nostack, preserves_flags));
    }
}

/// Flushes addresses of the kernel from the TLBs of all CPUs.
pub fn invalidate_kernel(what: &Invalidation) {
    here().invalidate_kernel(what);
}

/// Flushes this CPU's whole TLB, with global entries (Intel SDM volume 3A, section 4.10.4.1: a
/// change of `CR4.PGE`).
fn forget_everything() {
    const GLOBAL_PAGES: u64 = 1 << 7;
    // SAFETY: the bit decides which entries survive a load of CR3, and it has its old value
    // afterwards.
    unsafe {
        asm!("mov {value}, cr4", "xor {value}, {bit}", "mov cr4, {value}", "xor {value}, {bit}",
            "mov cr4, {value}", value = out(reg) _, bit = const GLOBAL_PAGES, options(nostack));
    }
}

/// Invalidates address by address, including global translations, if the addresses are few.
/// Otherwise invalidates nothing and returns `false`.
#[inline]
fn invalidate_one_by_one(what: &Invalidation) -> bool {
    let stride = what.stride;
    let mut at = what.range.start().0 & !(stride - 1);
    let end = what.range.end().0;
    if end - at > stride * FEW {
        return false;
    }
    loop {
        // SAFETY: the CPU reads an invalidated entry again.
        unsafe { asm!("invlpg [{}]", in(reg) at, options(nostack, preserves_flags)) };
        at += stride;
        if at >= end {
            return true;
        }
    }
}

/// No operation: table walkers see writes in program order, at once.
#[inline]
pub fn publish_entries() {}

/// Flushes the TLB of the running CPU, which from here on takes part in shootdowns.
pub fn begin() {
    here().online();
}

/// As [`begin`], on a CPU other than the first.
pub fn join() {
    begin();
    shootdowns::join();
}

/// Invalidates entries of the TLBs of several CPUs, and waits for them.
#[cold]
pub fn shoot_down(root: Frame, cpus: &CpuSet, what: &Invalidation) {
    here().invalidate(root, cpus, what);
}

/// Makes all accesses of the programs on other CPUs ordered: those before the call, and those after
/// it.
pub fn order_others() {
    shootdowns::here(&ORDER).order_others();
}

/// Answers the requests of other CPUs.
pub fn answer() {
    here().serve();
}

/// As [`answer`], for the wait of a lock in code that is worth each register: the call changes none,
/// so that code saves none for it.
#[inline]
pub fn answer_apart() {
    // SAFETY: a call that changes only flags and memory. The kernel's code has no red zone.
    unsafe { asm!("call {}", sym answer_and_keep_registers) };
}

/// The registers that a function may change, except vector registers, which the kernel's code does
/// not use.
#[unsafe(naked)]
extern "C" fn answer_and_keep_registers() {
    extern "C" fn answer_here() {
        answer();
    }
    naked_asm!(
        "push rbp", "mov rbp, rsp",
        "push rax", "push rcx", "push rdx", "push rsi", "push rdi",
        "push r8", "push r9", "push r10", "push r11",
        "and rsp, -16",
        "call {}",
        "lea rsp, [rbp - 72]",
        "pop r11", "pop r10", "pop r9", "pop r8",
        "pop rdi", "pop rsi", "pop rdx", "pop rcx", "pop rax",
        "pop rbp", "ret",
        sym answer_here,
    )
}
