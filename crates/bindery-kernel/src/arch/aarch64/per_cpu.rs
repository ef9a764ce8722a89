//! The state of each CPU: the address of its record, in `TPIDR_EL1`.

use core::sync::atomic::Ordering;

use aarch64_cpu::registers::{Readable, TPIDR_EL1, Writeable};

use super::super::cpu_record::CpuRecord;

/// The record of the first CPU.
pub static FIRST: CpuRecord = CpuRecord::new(0);

/// Gives the calling CPU its record.
pub fn begin(record: &'static CpuRecord) {
    TPIDR_EL1.set(core::ptr::from_ref(record).expose_provenance() as u64);
}

/// The record of the calling CPU. After a sleep the caller may run on another CPU.
#[inline]
pub fn this_cpu() -> &'static CpuRecord {
    let record = core::ptr::with_exposed_provenance::<CpuRecord>(TPIDR_EL1.get() as usize);
    // SAFETY: `begin` has put the address of a record there that lives forever.
    unsafe { &*record }
}

/// The number of the calling CPU.
#[inline]
pub fn cpu() -> u16 {
    this_cpu().number as u16
}

/// The running thread, as [`CpuRecord::running`] has it.
#[inline]
pub fn running() -> *mut () {
    this_cpu().running.load(Ordering::Relaxed)
}

/// The loaded address space, as [`CpuRecord::space`] has it.
#[inline]
pub fn loaded_space() -> *mut () {
    this_cpu().space.load(Ordering::Relaxed)
}

/// No operation: the CPU retains SP_EL1, so an exception enters the kernel on the stack that it
/// left.
#[inline]
pub fn set_kernel_stack(_top: *mut u8) {}
