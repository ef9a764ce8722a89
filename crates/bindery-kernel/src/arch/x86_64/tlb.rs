//! The table root in CR3, and TLB invalidation.

use core::arch::asm;
use core::sync::atomic::{AtomicU32, Ordering};

use bindery::addr::Frame;
use bindery::platform::{Invalidation, MAX_CPUS};

use super::interrupts::{self, FORGET};
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

/// The number of running CPUs.
static UP: AtomicU32 = AtomicU32::new(0);

/// The number of flushes of kernel addresses on the other CPUs, and the last flush that each CPU,
/// by number, has completed.
static TIMES: AtomicU32 = AtomicU32::new(0);
static DONE: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];

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
    make_forget();
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

/// The number of CPUs besides the first.
pub fn others() -> u32 {
    UP.load(Ordering::Acquire)
}

/// Counts the running CPU: from here on it takes part in flushes.
pub fn join() {
    UP.fetch_add(1, Ordering::AcqRel);
    // Drops translations that it cached before it was counted.
    forget_everything();
}

/// Flushes the TLBs of the other CPUs and waits for them. The other CPUs are idle, so their
/// interrupts are enabled or about to be.
fn make_forget() {
    let up = UP.load(Ordering::Acquire) as usize;
    if up == 0 {
        return;
    }
    let time = TIMES.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
    interrupts::send_to_others(FORGET);
    for done in &DONE[1..=up] {
        while done.load(Ordering::Acquire) != time {
            core::hint::spin_loop();
        }
    }
}

/// The flush on another CPU.
pub fn forget() {
    let time = TIMES.load(Ordering::Acquire);
    forget_everything();
    DONE[usize::from(cpu())].store(time, Ordering::Release);
}
