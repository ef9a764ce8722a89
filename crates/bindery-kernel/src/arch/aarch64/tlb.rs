//! The table root of programs in `TTBR0_EL1`, and TLB invalidation.
//!
//! All programs have address-space identifier 0, so loading another root invalidates every entry
//! that is not global. Only the kernel's own translations survive.

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicBool, Ordering};

use aarch64_cpu::registers::{ID_AA64ISAR0_EL1, Readable};
use bindery::addr::Frame;
use bindery::platform::{Cpu, CpuSet, Invalidation, Tables};
use bindery_parts::{LocalTlb, OnCpu};

use super::super::interrupt_counts::Reason;
use super::super::shootdowns;
use super::{interrupts, page_tables};

/// Whether the CPU invalidates whole ranges (FEAT_TLBIRANGE).
static RANGES: AtomicBool = AtomicBool::new(false);

/// The maximum number of pages that are invalidated one by one without FEAT_TLBIRANGE; more would
/// be too slow.
const MOST_SINGLE: u64 = 64;

/// Reads the features of the first CPU, which from here on answers requests.
pub fn begin() {
    let tlb = ID_AA64ISAR0_EL1.get() >> 56 & 0xf;
    RANGES.store(tlb >= 2, Ordering::Relaxed);
    here().online();
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

/// Invalidates translations of programs on all CPUs, unless no CPU is in the set.
#[cold]
pub fn shoot_down(root: Frame, cpus: &CpuSet, what: &Invalidation) {
    if !cpus.is_empty() {
        invalidate(root, what);
    }
}

/// The TLB of the calling CPU, for requests of CPUs to each other. The hardware invalidates without
/// requests, so all of them are about the order of accesses.
struct Tlb;

impl LocalTlb for Tlb {
    fn send(&self, cpu: Cpu) {
        interrupts::send_to(cpu.0, Reason::Order);
    }

    fn invalidate(&self, root: Frame, what: &Invalidation) {
        invalidate(root, what);
    }

    fn invalidate_kernel(&self, what: &Invalidation) {
        invalidate_kernel(what);
    }

    fn flush_all(&self) {
        // SAFETY: dropping translations changes only speed; barriers.
        unsafe { asm!("tlbi vmalle1", "dsb nsh", "isb", options(nostack, preserves_flags)) };
    }

    fn order(&self) {
        // SAFETY: barriers.
        unsafe { asm!("dsb sy", "isb", options(nostack, preserves_flags)) };
    }

    fn relax(&self) {
        super::pause();
    }
}

#[inline]
fn here() -> OnCpu<'static, 'static, Tlb> {
    shootdowns::here(&Tlb)
}

/// Counts the running CPU among those that answer requests.
pub fn join() {
    here().online();
    shootdowns::join();
}

/// Makes all accesses of the programs on other CPUs ordered: those before the call, and those after
/// it.
pub fn order_others() {
    here().order_others();
}

/// Answers the requests of other CPUs.
pub fn answer() {
    here().serve();
}

/// As [`answer`], for the wait of a lock in code that is worth each register: the call changes only
/// the link register, so that code saves no other for it.
#[inline]
pub fn answer_apart() {
    // SAFETY: a call that changes only flags, memory and the link register.
    unsafe { asm!("bl {}", sym answer_and_keep_registers, out("x30") _) };
}

/// The registers that a function may change, except vector registers, which the kernel's code does
/// not use.
#[unsafe(naked)]
extern "C" fn answer_and_keep_registers() {
    extern "C" fn answer_here() {
        answer();
    }
    naked_asm!(
        "stp x29, x30, [sp, #-176]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]", "stp x8, x9, [sp, #80]", "stp x10, x11, [sp, #96]",
        "stp x12, x13, [sp, #112]", "stp x14, x15, [sp, #128]", "stp x16, x17, [sp, #144]",
        "str x18, [sp, #160]",
        "bl {}",
        "ldr x18, [sp, #160]",
        "ldp x16, x17, [sp, #144]", "ldp x14, x15, [sp, #128]", "ldp x12, x13, [sp, #112]",
        "ldp x10, x11, [sp, #96]", "ldp x8, x9, [sp, #80]", "ldp x6, x7, [sp, #64]",
        "ldp x4, x5, [sp, #48]", "ldp x2, x3, [sp, #32]", "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #176",
        "ret",
        sym answer_here,
    )
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
