//! Accesses of programs and of the kernel: load, store, fetch. Each access is made on the CPU of
//! the calling thread, page by page, through its MMU. If the MMU refuses an access of a program, a
//! fault handler is called and the access is retried; a refused kernel access fails.
//!
//! A translation to no memory leads to a bus without a device: loads read all ones, stores are
//! lost. (Only memory types for devices may lead there.)

use bindery::addr::{Frame, PAGE_SIZE, PhysAddr, VirtAddr};

use crate::machine::Machine;
use crate::memory::DirectMap;
use crate::mmu::{Access, AccessKind, MmuFault, Mode, Translation, Walk};
use crate::tlb::Refusal;
use crate::violation::Place;

/// The number of times that one page may fault in one access. A resolved fault recurs once if the
/// TLB holds an older entry, and whenever another CPU revokes the permission before the access uses
/// it. A CPU that only revokes permissions has been seen to revoke a page ten times in a row. The
/// bound is far higher; a fault handler that resolves nothing still reaches the bound.
const FAULTS_PER_PAGE: u32 = 500;

/// The place of a piece of an access in memory: a frame and an offset in it.
type At = (Frame, usize);

impl<A: Walk> Machine<A> {
    /// Translates like the calling thread's CPU in user mode, with all effects of an access
    /// (accessed, dirty, TLB) but without the access itself.
    pub fn translate(
        &self,
        root: Frame,
        addr: VirtAddr,
        access: AccessKind,
    ) -> Result<PhysAddr, MmuFault> {
        self.translate_as(Mode::User, root, addr, access)
    }

    /// Like [`Machine::translate`], in the kernel: pages of user mode are refused. If the address
    /// maps a device, not memory, returns the device's address.
    pub fn translate_kernel(
        &self,
        root: Frame,
        addr: VirtAddr,
        access: AccessKind,
    ) -> Result<PhysAddr, MmuFault> {
        self.translate_as(Mode::Kernel, root, addr, access)
    }

    fn translate_as(
        &self,
        mode: Mode,
        root: Frame,
        addr: VirtAddr,
        kind: AccessKind,
    ) -> Result<PhysAddr, MmuFault> {
        self.once(root, addr, Access { kind, mode }, |_, leaf| leaf.translate(addr.0))
    }

    /// Loads bytes in the kernel.
    ///
    /// # Errors
    /// The first fault; the bytes before it were read.
    pub fn read_kernel(&self, root: Frame, at: VirtAddr, into: &mut [u8]) -> Result<(), MmuFault> {
        self.read(Mode::Kernel, root, at, into, Err)
    }

    /// Stores bytes in the kernel.
    ///
    /// # Errors
    /// The first fault; the bytes before it were written.
    pub fn write_kernel(&self, root: Frame, at: VirtAddr, from: &[u8]) -> Result<(), MmuFault> {
        self.write(Mode::Kernel, root, at, from, Err)
    }

    /// Fetches the instruction at an address in the kernel.
    ///
    /// # Errors
    /// The fault.
    pub fn execute_kernel(&self, root: Frame, at: VirtAddr) -> Result<(), MmuFault> {
        self.translate_kernel(root, at, AccessKind::Execute).map(|_| ())
    }

    /// Loads bytes.
    pub fn read_user<E>(
        &self,
        root: Frame,
        at: VirtAddr,
        into: &mut [u8],
        on_fault: impl FnMut(MmuFault) -> Result<(), E>,
    ) -> Result<(), E> {
        self.read(Mode::User, root, at, into, on_fault)
    }

    fn read<E>(
        &self,
        mode: Mode,
        root: Frame,
        at: VirtAddr,
        into: &mut [u8],
        on_fault: impl FnMut(MmuFault) -> Result<(), E>,
    ) -> Result<(), E> {
        let len = into.len() as u64;
        let read = |direct_map: &DirectMap, at: Option<At>, done: usize, len: usize| {
            let into = &mut into[done..done + len];
            match at {
                Some((frame, offset)) => direct_map.read(frame, offset, into),
                None => into.fill(0xff),
            }
        };
        self.each_page(root, at, len, Access { kind: AccessKind::Read, mode }, on_fault, read)
    }

    /// Stores bytes.
    pub fn write_user<E>(
        &self,
        root: Frame,
        at: VirtAddr,
        from: &[u8],
        on_fault: impl FnMut(MmuFault) -> Result<(), E>,
    ) -> Result<(), E> {
        self.write(Mode::User, root, at, from, on_fault)
    }

    fn write<E>(
        &self,
        mode: Mode,
        root: Frame,
        at: VirtAddr,
        from: &[u8],
        on_fault: impl FnMut(MmuFault) -> Result<(), E>,
    ) -> Result<(), E> {
        let len = from.len() as u64;
        let write = |direct_map: &DirectMap, at: Option<At>, done: usize, len: usize| {
            if let Some((frame, offset)) = at {
                direct_map.write(frame, offset, &from[done..done + len]);
            }
        };
        self.each_page(root, at, len, Access { kind: AccessKind::Write, mode }, on_fault, write)
    }

    /// Stores one byte repeatedly.
    pub fn fill_user<E>(
        &self,
        root: Frame,
        at: VirtAddr,
        len: u64,
        byte: u8,
        on_fault: impl FnMut(MmuFault) -> Result<(), E>,
    ) -> Result<(), E> {
        let fill = |direct_map: &DirectMap, at: Option<At>, _: usize, len: usize| {
            if let Some((frame, offset)) = at {
                direct_map.fill(frame, offset, len, byte);
            }
        };
        let access = Access { kind: AccessKind::Write, mode: Mode::User };
        self.each_page(root, at, len, access, on_fault, fill)
    }

    /// Loads eight bytes; atomically if `at` is a multiple of 8.
    pub fn load_user<E>(
        &self,
        root: Frame,
        at: VirtAddr,
        on_fault: impl FnMut(MmuFault) -> Result<(), E>,
    ) -> Result<u64, E> {
        let mut bytes = [0; 8];
        self.read_user(root, at, &mut bytes, on_fault)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Stores eight bytes; atomically if `at` is a multiple of 8.
    pub fn store_user<E>(
        &self,
        root: Frame,
        at: VirtAddr,
        value: u64,
        on_fault: impl FnMut(MmuFault) -> Result<(), E>,
    ) -> Result<(), E> {
        self.write_user(root, at, &value.to_ne_bytes(), on_fault)
    }

    /// Fetches the instruction at an address.
    pub fn execute_user<E>(
        &self,
        root: Frame,
        at: VirtAddr,
        on_fault: impl FnMut(MmuFault) -> Result<(), E>,
    ) -> Result<(), E> {
        let access = Access { kind: AccessKind::Execute, mode: Mode::User };
        self.each_page(root, at, 1, access, on_fault, |_, _, _, _| {})
    }

    /// Splits an access at page boundaries and performs each piece. `work` gets the place in memory
    /// (`None` without memory), the number of bytes already transferred and the length of the
    /// piece.
    fn each_page<E>(
        &self,
        root: Frame,
        at: VirtAddr,
        len: u64,
        access: Access,
        mut on_fault: impl FnMut(MmuFault) -> Result<(), E>,
        mut work: impl FnMut(&DirectMap, Option<At>, usize, usize),
    ) -> Result<(), E> {
        let mut done = 0;
        while done < len {
            // An address beyond 2^64 wraps to 0, as in a register.
            let addr = VirtAddr(at.0.wrapping_add(done));
            let offset = addr.0 % PAGE_SIZE;
            let piece = (PAGE_SIZE - offset).min(len - done);
            let mut faults = 0;
            while let Err(fault) = self.once(root, addr, access, |direct_map, leaf| {
                let frame = Frame((leaf.translate(addr.0).0 / PAGE_SIZE) as u32);
                let memory = direct_map.holds(u64::from(frame.0), 1);
                let at = memory.then_some((frame, offset as usize));
                work(direct_map, at, done as usize, piece as usize);
            }) {
                faults += 1;
                assert!(
                    faults <= FAULTS_PER_PAGE,
                    "livelock: the fault handler says resolved and the MMU still faults: {fault:?}, root {root:?}, {:?}",
                    self.shared.seats.cpu()
                );
                on_fault(fault)?;
            }
            done += piece;
        }
        Ok(())
    }

    /// Compares memory with the content that a program's fetch sees.
    fn fetched(&self, root: Frame, addr: VirtAddr, leaf: &Translation) {
        let frame = leaf.translate(addr.0).0 / PAGE_SIZE;
        if self.direct_map.holds(frame, 1) {
            let place = Place { cpu: self.shared.seats.cpu(), root, addr: addr.0 };
            let at = (Frame(frame as u32), (addr.0 % PAGE_SIZE) as usize);
            self.shared.instructions.fetch(&self.direct_map, &self.shared.log, place, at);
        }
    }

    /// One access inside one page, in one step: the TLB stays locked until `work` is done.
    #[inline]
    fn once<R>(
        &self,
        root: Frame,
        addr: VirtAddr,
        access: Access,
        work: impl FnOnce(&DirectMap, &Translation) -> R,
    ) -> Result<R, MmuFault> {
        let occupied = self.shared.seats.occupy();
        let mut tlb = self.tlb(occupied.cpu()).lock();
        let mut translated = tlb.translate(self.world(), root, addr.0, access);
        if let Some(other) = self.broken().and_then(|broken| broken.passes_for(access))
            && translated.is_err()
        {
            translated = tlb.translate(self.world(), root, addr.0, other);
        }
        match translated {
            Ok(leaf) => {
                if access == (Access { kind: AccessKind::Execute, mode: Mode::User }) {
                    self.fetched(root, addr, &leaf);
                }
                Ok(work(&self.direct_map, &leaf))
            }
            Err(refusal) => {
                let present = refusal == Refusal::Denied;
                Err(MmuFault { addr, access: access.kind, present })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use bindery::addr::VirtRange;
    use bindery::arch::Tiny;
    use bindery::platform::{Cpu, CpuSet, Invalidation, Platform, Tables};

    use super::*;
    use crate::Config;
    use crate::tlb::TlbKind;

    /// A machine, and a root under which the page at 0 is writable.
    fn one_page(tlb: TlbKind) -> (Machine<Tiny>, Frame) {
        let machine = Machine::new(Config { cpus: 2, memory: 1 << 20, tlb, ..Config::default() });
        let (root, _) = machine.frames();
        for (level, flags) in [(0, 0b11), (1, 0b11), (2, 0b1_0101)] {
            let entry = machine.direct_map.word(root.plus(level), 0);
            entry.store(root.plus(level + 1).start().0 | flags, Ordering::Relaxed);
        }
        (machine, root)
    }

    #[test]
    fn an_invalidation_waits_for_the_running_access() {
        for tlb in [TlbKind::Strict, TlbKind::Plain] {
            let (machine, root) = one_page(tlb);
            let (begun, finished) = (Barrier::new(2), AtomicBool::new(false));
            let slow_store = |_: &DirectMap, _: &Translation| {
                begun.wait();
                // A thread that does not wait for this access has finished by then.
                (0..10_000).for_each(|_| thread::yield_now());
                finished.store(true, Ordering::SeqCst);
            };
            let access = Access { kind: AccessKind::Write, mode: Mode::User };
            let store = || machine.once(root, VirtAddr(0), access, slow_store);
            thread::scope(|scope| {
                scope.spawn(|| machine.on_cpu(Cpu(1), store).unwrap());
                begun.wait();
                let mut cpus = CpuSet::EMPTY;
                cpus.insert(Cpu(1));
                let range = VirtRange::from_len(VirtAddr(0), PAGE_SIZE).unwrap();
                let tables = Tables::Unchanged;
                machine.invalidate(root, &cpus, &Invalidation { range, stride: PAGE_SIZE, tables });
                assert!(finished.load(Ordering::SeqCst));
            });
        }
    }
}
