//! The table root of programs in `TTBR0_EL1`, and TLB invalidation.
//!
//! All programs have address-space identifier 0, so loading another root invalidates every entry
//! that is not global. Only the kernel's own translations survive.

use core::arch::asm;
use core::sync::atomic::{AtomicBool, Ordering};

use aarch64_cpu::registers::{ID_AA64ISAR0_EL1, Readable};
use bindery::addr::Frame;
use bindery::platform::{Cpu, CpuSet, Invalidation, Tables};

use super::super::interrupt_counts::Reason;
use super::super::requests;
use super::per_cpu::cpu;
use super::{interrupts, page_tables};

/// Whether the CPU invalidates whole ranges (FEAT_TLBIRANGE).
static RANGES: AtomicBool = AtomicBool::new(false);

/// The maximum number of pages that are invalidated one by one without FEAT_TLBIRANGE; more would
/// be too slow.
const MOST_SINGLE: u64 = 64;

/// Reads the features of the CPU.
pub fn begin() {
    let tlb = ID_AA64ISAR0_EL1.get() >> 56 & 0xf;
    RANGES.store(tlb >= 2, Ordering::Relaxed);
}

/// Loads the tables of a program.
pub fn load_root(root: Frame) {
    load(u64::from(root.0) << 12);
}

/// Loads the tables of no program.
pub fn unload_root() {
    load(page_tables::physical(&raw const page_tables::NO_PROGRAM));
}

fn load(root: u64) {
    // SAFETY: a root that the core built, or the empty root. Between the first two steps the CPU
    // may still cache translations of the old tables, but the kernel accesses no program address.
    unsafe {
        asm!(
            "msr ttbr0_el1, {root}",
            "isb",
            "tlbi aside1, xzr",
            "dsb nsh",
            "isb",
            root = in(reg) root, options(nostack, preserves_flags)
        );
    }
}

/// Invalidates translations of programs on all CPUs. No CPU can have cached tables other than the
/// loaded ones, so the root does not matter.
#[inline]
pub fn invalidate(_root: Frame, what: &Invalidation) {
    let (start, end) = (what.range.start().0 >> 12, (what.range.end().0 + 0xfff) >> 12);
    // SAFETY: barriers. Walks after them see the writes before the call.
    unsafe { asm!("dsb ishst", options(nostack, preserves_flags)) };
    if what.range.len() <= what.stride {
        one(start, what.tables);
    } else {
        several(start, end, what);
    }
    // SAFETY: as above. Waits for all CPUs and makes this one walk the tables again.
    unsafe { asm!("dsb ish", "isb", options(nostack, preserves_flags)) };
}

/// Invalidates translations of programs on all CPUs, unless [`invalidate`] has done so, because the
/// caller's CPU is in the set, or no CPU is.
#[cold]
pub fn invalidate_on_others(root: Frame, cpus: &CpuSet, what: &Invalidation) {
    let is_in = |cpu| cpus.contains(Cpu(cpu));
    if !is_in(cpu()) && (0..=requests::others() as u16).any(is_in) {
        invalidate(root, what);
    }
}

/// Makes all accesses of the programs on other CPUs ordered: those before the call, and those after
/// it.
pub fn order_others() {
    let send = |cpu| interrupts::send_to(cpu, Reason::Order);
    requests::ask(cpu(), |_| true, send, order);
}

/// Answers the requests of other CPUs: a barrier.
#[inline]
pub fn answer() {
    let own = cpu();
    if requests::pending(own) {
        requests::answer(own, order);
    }
}

fn order() {
    // SAFETY: barriers.
    unsafe { asm!("dsb sy", "isb", options(nostack, preserves_flags)) };
}

/// As [`invalidate`], for addresses of a program or of the kernel. (The broadcast to other CPUs
/// costs no wait.)
pub fn invalidate_local(root: Frame, what: &Invalidation) {
    if what.range.start().0 >> 63 == 0 {
        invalidate(root, what);
    } else {
        invalidate_kernel(what);
    }
}

#[inline]
fn one(page: u64, tables: Tables) {
    // SAFETY: invalidating a translation costs only time. Bits 43:0 are the page, the address-space
    // identifier above them is 0; a program's page has no higher bits.
    unsafe {
        match tables {
            Tables::Unchanged => {
                asm!("tlbi vale1is, {}", in(reg) page, options(nostack, preserves_flags))
            }
            Tables::Changed => {
                asm!("tlbi vae1is, {}", in(reg) page, options(nostack, preserves_flags))
            }
        }
    }
}

fn several(start: u64, end: u64, what: &Invalidation) {
    if RANGES.load(Ordering::Relaxed)
        && let Some(operand) = range_operand(start, end - start)
    {
        // SAFETY: as in `one`. The names of these instructions are newer than the target's
        // baseline, so they are given by number: RVALE1IS and RVAE1IS.
        unsafe {
            match what.tables {
                Tables::Unchanged => {
                    asm!("sys #0, c8, c2, #5, {}", in(reg) operand,
                        options(nostack, preserves_flags));
                }
                Tables::Changed => {
                    asm!("sys #0, c8, c2, #1, {}", in(reg) operand,
                        options(nostack, preserves_flags));
                }
            }
        }
        return;
    }
    let stride = what.stride >> 12;
    if (end - start).div_ceil(stride) <= MOST_SINGLE {
        (start..end).step_by(stride as usize).for_each(|page| one(page, what.tables));
    } else {
        // SAFETY: as in `one`.
        unsafe { asm!("tlbi aside1is, xzr", options(nostack, preserves_flags)) };
    }
}

/// Invalidates translations of kernel addresses, which are global, on all CPUs.
pub fn invalidate_kernel(what: &Invalidation) {
    /// The address bits in the operands: those of a page, and those of a range's first page.
    const PAGE: u64 = (1 << 44) - 1;
    const RANGE: u64 = (1 << 37) - 1;
    let (start, end) = (what.range.start().0 >> 12, what.range.end().0 >> 12);
    let range = range_operand(start & RANGE, end - start);
    // SAFETY: dropping a translation changes only speed; barriers. RVAALE1IS and RVAAE1IS are given
    // by number, as above.
    unsafe {
        asm!("dsb ishst", options(nostack, preserves_flags));
        match (range.filter(|_| RANGES.load(Ordering::Relaxed)), what.tables) {
            (Some(operand), Tables::Unchanged) => {
                asm!("sys #0, c8, c2, #7, {}", in(reg) operand,
                        options(nostack, preserves_flags));
            }
            (Some(operand), Tables::Changed) => {
                asm!("sys #0, c8, c2, #3, {}", in(reg) operand,
                        options(nostack, preserves_flags));
            }
            (None, _) if end - start <= MOST_SINGLE => {
                for page in start..end {
                    let page = page & PAGE;
                    asm!("tlbi vaae1is, {}", in(reg) page, options(nostack, preserves_flags));
                }
            }
            (None, _) => asm!("tlbi vmalle1is", options(nostack, preserves_flags)),
        }
        asm!("dsb ish", "isb", options(nostack, preserves_flags));
    }
}

/// The operand of a range instruction that covers at least these pages; `None` if they are too
/// many.
///
/// A range is (NUM + 1) * 2^(5 * SCALE + 1) pages, NUM below 32 and SCALE below 4 (Arm ARM, "TLBI
/// RVAE1IS"): a coarser scale rounds up. Bits 36:0 are the page, 43:39 NUM, 45:44 SCALE, and 01 in
/// 47:46 says 4 KiB.
fn range_operand(start: u64, pages: u64) -> Option<u64> {
    (0..4).find_map(|scale: u64| {
        let number = pages.div_ceil(1 << (5 * scale + 1)) - 1;
        (number < 32).then_some(start | number << 39 | scale << 44 | 1 << 46)
    })
}

/// Makes entries that were written visible to the table walkers of all CPUs.
#[inline]
pub fn publish_entries() {
    // SAFETY: barriers.
    unsafe { asm!("dsb ishst", "isb", options(nostack, preserves_flags)) };
}
