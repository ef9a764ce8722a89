//! [`CpuTable`]: one record for each CPU that has ever been online.
//!
//! CPUs that write to the same cache line wait for each other. So data that calls write often but
//! do not share between CPUs is in a record for each CPU: free frames, free objects, credit, items
//! that wait for a grace period. `docs/concurrency.md` lists this data.
//!
//! # Stale numbers
//! A thread that was preempted after [`Platform::cpu`] may use the record of another CPU, even one
//! that is now offline. This is harmless: each record in a table is guarded by a spin lock or
//! changed by read-modify-write instructions, and lives as long as the memory. The only cost is one
//! shared access to a cache line.
//!
//! # Machines without records
//! [`Memory::cpu_online`] creates the records. Before its first call the table is empty, a look-up
//! costs one load and one branch, and all CPUs use the shared state.
//!
//! [`Platform::cpu`]: crate::Platform::cpu
//! [`Memory::cpu_online`]: crate::Memory::cpu_online

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use crate::platform::{Cpu, MAX_CPUS};

/// The records of one type. A record is never removed.
pub(crate) struct CpuTable<T> {
    /// [`MAX_CPUS`] pointers, or null if the table has no memory yet.
    slots: AtomicPtr<AtomicPtr<T>>,
    /// One more than the highest number with a record.
    end: AtomicU32,
    records: PhantomData<T>,
}

/// The size of one table's pointers, in bytes.
pub(crate) const SLOTS_SIZE: usize = MAX_CPUS * size_of::<AtomicPtr<()>>();

#[allow(dead_code, reason = "each part of a CPU uses some")]
impl<T: Sync> CpuTable<T> {
    /// A table without records.
    pub(crate) const fn new() -> Self {
        Self {
            slots: AtomicPtr::new(ptr::null_mut()),
            end: AtomicU32::new(0),
            records: PhantomData,
        }
    }

    /// Whether the table has memory for its pointers.
    #[inline]
    pub(crate) fn has_slots(&self) -> bool {
        !self.slots.load(Relaxed).is_null()
    }

    /// Sets the memory for the table's pointers.
    ///
    /// # Safety
    /// 1. The [`SLOTS_SIZE`] bytes at `slots` are zero, aligned for a pointer, and used only by
    ///    this table while it lives.
    /// 2. The table has no memory yet, and no other thread sets it.
    pub(crate) unsafe fn give_slots(&self, slots: NonNull<u8>) {
        self.slots.store(slots.cast().as_ptr(), Release);
    }

    /// Inserts the record of `cpu`.
    ///
    /// # Safety
    /// 1. The record is initialized and is neither moved nor freed while the table lives.
    /// 2. The table has slots, and `cpu` is below [`MAX_CPUS`].
    /// 3. No other thread inserts a record.
    pub(crate) unsafe fn enter(&self, cpu: Cpu, record: NonNull<T>) {
        let slots = self.slots.load(Acquire);
        // SAFETY: the slots have room for `MAX_CPUS` pointers (2; `give_slots`, 1).
        let slot = unsafe { &*slots.add(usize::from(cpu.0)) };
        slot.store(record.as_ptr(), Release);
        self.end.fetch_max(u32::from(cpu.0) + 1, Release);
    }

    /// The record of `cpu`, if it was ever online. Constant time.
    #[inline]
    pub(crate) fn get(&self, cpu: Cpu) -> Option<&T> {
        let slots = NonNull::new(self.slots.load(Acquire))?;
        let cpu = usize::from(cpu.0);
        if cpu >= MAX_CPUS {
            return None;
        }
        // SAFETY: the slots have room for `MAX_CPUS` pointers, and were zero before any record was
        // inserted (`give_slots`, 1).
        let slot = unsafe { slots.add(cpu).as_ref() };
        // SAFETY: an inserted record is initialized and lives as long as the table (`enter`, 1); it
        // is reached only through shared references.
        unsafe { slot.load(Acquire).as_ref() }
    }

    /// Like [`CpuTable::get`], for the CPU that `cpu` returns. Without records, `cpu` is not
    /// called.
    #[inline]
    pub(crate) fn of(&self, cpu: impl FnOnce() -> Cpu) -> Option<&T> {
        if self.has_slots() { self.get(cpu()) } else { None }
    }

    /// The records of all CPUs that were ever online, in the order of their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        let end = self.end.load(Acquire) as u16;
        (0..end).filter_map(|cpu| self.get(Cpu(cpu)))
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicU64;
    use std::boxed::Box;
    use std::vec::Vec;

    use super::*;

    fn slots() -> NonNull<u8> {
        NonNull::from(Box::leak(Box::new([0_u64; MAX_CPUS]))).cast()
    }

    #[test]
    fn a_record_is_found_by_its_number_only() {
        let table = CpuTable::<AtomicU64>::new();
        assert!(table.of(|| panic!("no record needs a number")).is_none());
        assert!(table.get(Cpu(0)).is_none() && table.iter().next().is_none());
        // SAFETY: 1. the slots are leaked and zero; 2. this is the only thread.
        unsafe { table.give_slots(slots()) };
        assert!(table.get(Cpu(3)).is_none());
        for cpu in [3, 0, 255] {
            let record = Box::leak(Box::new(AtomicU64::new(u64::from(cpu))));
            // SAFETY: 1. the record is leaked; 2. the table has slots, and 255 is the last number;
            // 3. this is the only thread.
            unsafe { table.enter(Cpu(cpu), NonNull::from(record)) };
        }
        let number = |record: &AtomicU64| record.load(Relaxed);
        assert_eq!(table.get(Cpu(3)).map(number), Some(3));
        assert_eq!(table.of(|| Cpu(255)).map(number), Some(255));
        assert!(table.get(Cpu(2)).is_none() && table.get(Cpu(256)).is_none());
        assert_eq!(table.iter().map(number).collect::<Vec<_>>(), [0, 3, 255]);
    }
}
