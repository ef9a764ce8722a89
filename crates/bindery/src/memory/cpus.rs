//! CPU hotplug: [`Memory::cpu_online`] creates the records of a CPU, and [`Memory::cpu_offline`]
//! returns the resources that the CPU caches.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

use crossbeam_utils::CachePadded;

use super::Memory;
use crate::addr::{Frame, Order, PAGE_SIZE};
use crate::commit::Credit;
use crate::cpu::{CpuTable, SLOTS_SIZE};
use crate::deferred::{self, LockedQueue};
use crate::error::Error;
use crate::frame::meta::{MetaKind, state_of};
use crate::frame::{AllocateFor, Frames, Front, Magazines};
use crate::platform::{Cpu, MAX_CPUS, Platform};
use crate::swap::{self, StorePart, SwapPart};
use crate::sync::Mutex;

/// The parts of the CPUs' records that belong to the layers above the allocator.
pub(crate) struct Cpus<P: Platform> {
    /// Held while a CPU is brought online or taken offline.
    change: Mutex<P::SpinLock, ()>,
    records: CpuTable<CpuRecord<P>>,
    /// The number of CPUs that are online.
    online: AtomicU32,
}

/// The record of one CPU for the layers above the allocator.
pub(crate) struct CpuRecord<P: Platform> {
    is_online: AtomicBool,
    /// The items that calls on this CPU have unlinked and that wait for a grace period.
    pub(crate) deferred: CachePadded<LockedQueue<P>>,
    pub(super) credit: Credit,
    pub(crate) swap: CachePadded<SwapPart>,
}

impl<P: Platform> CpuRecord<P> {
    fn new(cpu: Cpu) -> Self {
        Self {
            is_online: AtomicBool::new(false),
            deferred: CachePadded::new(LockedQueue::new()),
            credit: Credit::default(),
            swap: CachePadded::new(SwapPart::new(cpu)),
        }
    }
}

/// All records of one CPU, in one block of frames.
#[repr(C)]
struct CpuBlock<P: Platform> {
    front: CachePadded<Front<P>>,
    magazines: Magazines<P>,
    record: CachePadded<CpuRecord<P>>,
    store: CachePadded<StorePart<P>>,
}

/// The order of the smallest block of frames that holds `bytes` bytes.
const fn order_of(bytes: usize) -> Order {
    Order(bytes.div_ceil(PAGE_SIZE as usize).next_power_of_two().ilog2() as u8)
}

impl<P: Platform> CpuBlock<P> {
    /// The block has at most 2^`ORDER` frames.
    const ORDER: Order = {
        assert!(size_of::<Self>() <= 32 << 10, "the records of a CPU are too large");
        order_of(size_of::<Self>())
    };

    fn new(cpu: Cpu) -> Self {
        Self {
            front: CachePadded::new(Front::new()),
            magazines: Magazines::new(),
            record: CachePadded::new(CpuRecord::new(cpu)),
            store: CachePadded::new(StorePart::new(cpu)),
        }
    }
}

impl<P: Platform> Cpus<P> {
    pub(super) const fn new() -> Self {
        Self { change: Mutex::new(()), records: CpuTable::new(), online: AtomicU32::new(0) }
    }

    /// The record of the running CPU, if it was ever online. May be stale.
    #[inline]
    pub(crate) fn own(&self, platform: &P) -> Option<&CpuRecord<P>> {
        self.records.of(|| platform.cpu())
    }

    /// The records of all CPUs that were ever online, in the order of their numbers.
    pub(crate) fn records(&self) -> impl Iterator<Item = &CpuRecord<P>> {
        self.records.iter()
    }

    /// Whether no other CPU can be in a read section that began before the call. The caller is in
    /// no read section.
    ///
    /// 1. The caller unlinks a VMA and executes a fence.
    /// 2. It reads that only its own CPU is online.
    /// 3. A CPU that comes online later executes a fence before its first read section, so no
    ///    section of it finds the VMA.
    #[inline]
    pub(crate) fn no_other_reads(&self, platform: &P) -> bool {
        if !self.records.has_slots() {
            return false;
        }
        fence(Ordering::SeqCst);
        // Acquire: the last read sections of CPUs that were taken offline have ended.
        self.own(platform).is_some_and(|record| record.is_online.load(Ordering::Relaxed))
            && self.online.load(Ordering::Acquire) == 1
    }

    /// The number of CPUs that are online.
    fn online(&self) -> u32 {
        self.online.load(Ordering::Relaxed)
    }
}

/// Makes a CPU of `memory` cache resources for itself.
fn bring_online<P: Platform>(memory: &Memory<P>, cpu: Cpu) -> Result<(), Error> {
    if usize::from(cpu.0) >= MAX_CPUS {
        return Err(Error::Invalid);
    }
    let cpus = &memory.cpus;
    let _change = cpus.change.lock();
    let record = match cpus.records.get(cpu) {
        Some(record) => record,
        // SAFETY: 1. tested above; 2. it is held.
        None => unsafe { make_records(memory, cpu) }.ok_or(Error::OutOfMemory)?,
    };
    if record.is_online.swap(true, Ordering::Relaxed) {
        return Err(Error::Busy);
    }
    deferred::adopt(memory, record);
    swap::adopt(memory, &record.swap);
    let before = cpus.online.fetch_add(1, Ordering::Relaxed);
    memory.frames.share_fronts(before + 1);
    // A CPU that has unlinked a VMA executes a fence and then reads the number of online CPUs.
    // Either it reads the new number, or a read section of the new CPU does not find the VMA.
    fence(Ordering::SeqCst);
    Ok(())
}

/// Returns to `memory` the resources that a CPU caches.
fn take_offline<P: Platform>(memory: &Memory<P>, cpu: Cpu) -> Result<(), Error> {
    let cpus = &memory.cpus;
    let _change = cpus.change.lock();
    let record = cpus.records.get(cpu).ok_or(Error::Invalid)?;
    if !record.is_online.swap(false, Ordering::Relaxed) {
        return Err(Error::Invalid);
    }
    // Release: a CPU that reads the new number may free records that the last read sections have
    // read.
    let before = cpus.online.fetch_sub(1, Ordering::Release);
    let others = || cpus.records().filter(|record| record.is_online.load(Ordering::Relaxed));
    deferred::hand_over(memory, record, others().next());
    memory.commitment().collect(&record.credit);
    swap::hand_over(memory, &record.swap, others().map(|other| &*other.swap));
    memory.frames.share_fronts(before - 1);
    memory.frames.empty_front(cpu);
    memory.slabs().for_each(|slab| slab.empty_magazine(&memory.frames, cpu));
    Ok(())
}

/// Creates the records of a CPU that has none.
///
/// # Safety
/// 1. `cpu` is below [`MAX_CPUS`].
/// 2. The caller holds the lock for all changes of CPUs.
unsafe fn make_records<P: Platform>(memory: &Memory<P>, cpu: Cpu) -> Option<&CpuRecord<P>> {
    let (fronts, magazines) = (memory.frames.fronts(), memory.frames.magazines());
    let (records, store) = (&memory.cpus.records, memory.swap.store.parts());
    if !records.has_slots() {
        const ORDER: Order = order_of(4 * SLOTS_SIZE);
        let slots = take_frames(&memory.frames, ORDER)?;
        memory.platform().zero(slots, ORDER.pages());
        let slots = memory.platform().direct_map(slots);
        // SAFETY: 1. the frames were just allocated and zeroed, are consecutive in the direct map
        // and aligned, are never freed, and have room for four tables; 2. the caller's
        // obligation 2.
        unsafe {
            fronts.give_slots(slots);
            magazines.give_slots(slots.add(SLOTS_SIZE));
            records.give_slots(slots.add(2 * SLOTS_SIZE));
            store.give_slots(slots.add(3 * SLOTS_SIZE));
        }
    }
    let block = take_frames(&memory.frames, CpuBlock::<P>::ORDER)?;
    let block = memory.platform().direct_map(block).cast::<CpuBlock<P>>();
    // SAFETY: the frames were just allocated, are consecutive in the direct map and aligned to a
    // page, and have room for a block (`CpuBlock::ORDER`). The block is never freed.
    let block = unsafe {
        block.write(CpuBlock::new(cpu));
        block.as_ref()
    };
    // SAFETY: 1. the block was just written, and is never freed; 2. the tables have slots, and the
    // caller's obligation 1; 3. the caller's obligation 2.
    unsafe {
        fronts.enter(cpu, NonNull::from(&*block.front));
        magazines.enter(cpu, NonNull::from(&block.magazines));
        store.enter(cpu, NonNull::from(&*block.store));
        records.enter(cpu, NonNull::from(&*block.record));
    }
    memory.deferred.share_limit(&memory.cpus);
    Some(&block.record)
}

/// Allocates frames for records, which are never freed.
fn take_frames<P: Platform>(frames: &Frames<P>, order: Order) -> Option<Frame> {
    let first = frames.allocate(order, AllocateFor::Use)?;
    frames.meta(first).state.store(state_of(MetaKind::Cpu, order), Ordering::Relaxed);
    Some(first)
}

impl<P: Platform> Memory<P> {
    /// Announces a CPU: from now on it caches free frames and other frequently used resources, so
    /// that calls on different CPUs share fewer cache lines. A machine with one CPU need not call
    /// it. If one CPU is online, every CPU that enters a read section must be online (obligation 4
    /// of [`Platform`]).
    ///
    /// The records take at most 32 KiB for each CPU, and 8 KiB for all. They are kept for reuse
    /// when the CPU is taken offline. The compressor of a CPU that compresses pages uses another 32
    /// KiB until the CPU is taken offline.
    ///
    /// Called on any CPU before the first read section of `cpu`.
    ///
    /// Context: spins. Complexity: constant.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: `cpu` is [`MAX_CPUS`] or above.
    /// - [`Error::Busy`]: `cpu` is already online.
    /// - [`Error::OutOfMemory`]: no frames are free for its records. The CPU stays offline.
    ///
    /// ```
    /// use bindery::platform::Cpu;
    /// use bindery::{Error, Memory, Platform};
    ///
    /// /// On the boot CPU, before it starts the others.
    /// fn start_cpus<P: Platform>(memory: &Memory<P>, count: u16) -> Result<(), Error> {
    ///     (0..count).try_for_each(|cpu| memory.cpu_online(Cpu(cpu)))
    /// }
    /// ```
    pub fn cpu_online(&self, cpu: Cpu) -> Result<(), Error> {
        bring_online(self, cpu)
    }

    /// Returns the resources that a CPU caches, so that other CPUs can use them. `cpu` has left its
    /// last read section and enters none until [`Memory::cpu_online`].
    ///
    /// Called on any CPU.
    ///
    /// Context: spins. Complexity: linear in the cached resources, whose number is bounded, and in
    /// the clusters of swap slots that CPUs own.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the CPU is not online.
    ///
    /// ```
    /// use bindery::platform::Cpu;
    /// use bindery::{Error, Memory, Platform};
    ///
    /// fn unplug<P: Platform>(memory: &Memory<P>, cpu: Cpu) -> Result<(), Error> {
    ///     // The scheduler has moved all threads away, and has stopped the CPU.
    ///     memory.cpu_offline(cpu)
    /// }
    /// ```
    pub fn cpu_offline(&self, cpu: Cpu) -> Result<(), Error> {
        take_offline(self, cpu)
    }

    /// The number of CPUs that are online; 0 before the first [`Memory::cpu_online`].
    ///
    /// Context: any.
    pub fn online_cpus(&self) -> u32 {
        self.cpus.online()
    }
}
