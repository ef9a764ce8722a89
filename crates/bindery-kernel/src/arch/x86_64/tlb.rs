//! The table root in CR3, and TLB invalidation.

use core::arch::asm;

use bindery::addr::Frame;
use bindery::platform::{Cpu, CpuSet, Invalidation};

use super::super::interrupt_counts::Reason;
use super::super::requests;
use super::interrupts;
use super::page_tables;
use super::per_cpu::cpu;

/// Loads a program's tables. The load drops all TLB entries that are not global.
#[inline]
pub fn load_root(root: Frame) {
    load(u64::from(root.0) << 12);
}

/// Loads the tables of no program.
pub fn unload_root() {
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
        // SAFETY: reloads the same root.
        unsafe {
            asm!("mov {root}, cr3", "mov cr3, {root}", root = out(reg) _,
                options(nostack, preserves_flags));
        }
    }
}

/// Flushes addresses of the kernel from the TLBs of all CPUs.
pub fn invalidate_kernel(what: &Invalidation) {
    if !invalidate_one_by_one(what) {
        forget_everything();
    }
    ask(Reason::Flush, |_| true);
}

/// Flushes this CPU's whole TLB, with global entries (Intel SDM volume 3A, section 4.10.4.1: a
/// change of `CR4.PGE`).
pub fn forget_everything() {
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

/// Counts the running CPU: from here on it takes part in flushes.
pub fn join() {
    requests::join();
    // Drops translations that it cached before it was counted.
    forget_everything();
}

/// Flushes the TLBs of the other CPUs of the set, and waits for them.
#[cold]
pub fn invalidate_on_others(_root: Frame, cpus: &CpuSet, _what: &Invalidation) {
    ask(Reason::Flush, |cpu| cpus.contains(Cpu(cpu)));
}

/// Makes all accesses of the programs on other CPUs ordered: those before the call, and those after
/// it.
pub fn order_others() {
    ask(Reason::Order, |_| true);
}

fn ask(reason: Reason, wanted: impl Fn(u16) -> bool) {
    requests::ask(cpu(), wanted, |cpu| interrupts::send_to(cpu, reason), forget_everything);
}

/// Answers the requests of other CPUs: flushes this CPU's TLB.
#[inline]
pub fn answer() {
    let own = cpu();
    if requests::pending(own) {
        requests::answer(own, forget_everything);
    }
}
