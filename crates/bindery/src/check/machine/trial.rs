//! The accesses of the self-test, one function for each property that an access can reveal.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::marker::PhantomData;

use arrayvec::ArrayVec;

use crate::KernelMap;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use crate::arch::{Arch, MemoryType, Permissions, Severity, Symptom};
use crate::kernel_map::{Pieces, Resolution, UnmapTime, VmapOptions};
use crate::platform::Platform;
use crate::space::{Access, AddressSpace, Advice, Protection};

use super::pages::{TestArea, UserPage, first_word, frame_of};
use super::{AccessBy, AccessFault, Accesses, MachineError, MachineReport};

/// Two different nonzero values.
const FIRST: u64 = 0x6269_6e64_6572_7931;
const SECOND: u64 = 0x6269_6e64_6572_7932;

/// The maximum length of the tested code.
const MOST_CODE: usize = 64;

const READ: Permissions = Permissions::READ;
const WRITE: Permissions = Permissions::WRITE;
const EXECUTE: Permissions = Permissions::EXECUTE;

pub(super) struct Trial<'t, A, P> {
    accesses: &'t mut A,
    pub(super) report: MachineReport,
    platform: PhantomData<fn() -> P>,
}

impl<'t, A: Accesses, P: Platform> Trial<'t, A, P> {
    pub(super) fn new(accesses: &'t mut A) -> Self {
        Self { accesses, report: MachineReport::default(), platform: PhantomData }
    }

    /// Handles a symptom: returns the bit as an error, or records it if the machine works
    /// nevertheless.
    fn seen(&mut self, symptom: Symptom, fault: Option<AccessFault>) -> Result<(), MachineError> {
        match P::Arch::control_bit(symptom) {
            Some((bit, severity @ (Severity::Slow | Severity::Unprotected))) => {
                self.report.add(bit, severity);
                Ok(())
            }
            Some((bit, _)) => Err(MachineError::ControlBit { bit, symptom }),
            None => Err(MachineError::Unexplained { symptom, fault }),
        }
    }

    fn code(&self) -> ArrayVec<u8, MOST_CODE> {
        self.accesses.code().iter().copied().take(MOST_CODE).collect()
    }

    /// Accesses memory as the kernel. Retries if the processor may have cached an invalid entry.
    fn twice<T>(
        &mut self,
        map: &KernelMap<'_, P>,
        at: VirtAddr,
        needed: Permissions,
        access: impl Fn(&mut A) -> Result<T, AccessFault>,
    ) -> Result<T, AccessFault> {
        access(self.accesses).or_else(|fault| match map.resolve(at, needed) {
            Resolution::Retry => access(self.accesses),
            Resolution::Denied | Resolution::NotMapped => Err(fault),
        })
    }

    fn load(&mut self, map: &KernelMap<'_, P>, at: VirtAddr) -> Result<u64, AccessFault> {
        self.twice(map, at, READ, |accesses| accesses.read(at, AccessBy::Kernel))
    }

    fn store(
        &mut self,
        map: &KernelMap<'_, P>,
        at: VirtAddr,
        value: u64,
    ) -> Result<(), AccessFault> {
        self.twice(map, at, WRITE, |accesses| accesses.write(at, value, AccessBy::Kernel))
    }

    fn fetch(&mut self, map: &KernelMap<'_, P>, at: VirtAddr) -> Result<(), AccessFault> {
        self.twice(map, at, EXECUTE, |accesses| accesses.execute(at))
    }

    pub(super) fn kernel(&mut self, map: &KernelMap<'_, P>) -> Result<(), MachineError> {
        let area = TestArea::new(map, PAGE_SIZE, READ | WRITE, Pieces::Base)?;
        self.data(&area)?;
        self.read_only(&area)?;
        self.code_of_kernel(&area)?;
        self.contiguous(map)?;
        self.memory_types(&area)
    }

    /// Tests a writable page that is not executable.
    fn data(&mut self, area: &TestArea<'_, '_, P>) -> Result<(), MachineError> {
        let (map, at) = (area.map, area.at);
        let written = self.store(map, at, FIRST).and_then(|()| self.load(map, at));
        match written {
            Ok(FIRST) if first_word(map.memory(), area.physical(0)?) == FIRST => {}
            Ok(_) => self.seen(Symptom::OtherFrame, None)?,
            Err(fault) => self.seen(Symptom::DataFaulted, Some(fault))?,
        }
        area.fill(0, &self.code())?;
        if self.fetch(map, at).is_ok() {
            self.seen(Symptom::DataExecuted, None)?;
        }
        Ok(())
    }

    /// Tests a page that was never writable and a page that is no longer writable.
    fn read_only(&mut self, area: &TestArea<'_, '_, P>) -> Result<(), MachineError> {
        let never = TestArea::new(area.map, PAGE_SIZE, READ, Pieces::Base)?;
        if self.store(area.map, never.at, SECOND).is_ok() {
            self.seen(Symptom::ReadOnlyWritten, None)?;
        }
        // The TLB has a translation that allows stores.
        let _ = self.store(area.map, area.at, FIRST);
        area.protect(READ)?;
        if self.store(area.map, area.at, SECOND).is_ok() {
            self.seen(Symptom::StaleWritten, None)?;
        }
        Ok(())
    }

    fn code_of_kernel(&mut self, area: &TestArea<'_, '_, P>) -> Result<(), MachineError> {
        let (map, at) = (area.map, area.at);
        area.fill(0, &self.code())?;
        area.protect(READ | EXECUTE)?;
        if let Err(fault) = self.fetch(map, at) {
            self.seen(Symptom::CodeFaulted, Some(fault))?;
        }
        area.protect(READ | WRITE | EXECUTE)?;
        if let Err(fault) = self.fetch(map, at) {
            self.seen(Symptom::WritableCodeFaulted, Some(fault))?;
        }
        if !P::Arch::implied(EXECUTE).contains(READ) {
            area.protect(EXECUTE)?;
            if self.load(map, at).is_ok() {
                self.seen(Symptom::ExecuteOnlyRead, None)?;
            }
        }
        area.protect(READ | WRITE)
    }

    /// Reads each page of memory mapped in one contiguous run.
    fn contiguous(&mut self, map: &KernelMap<'_, P>) -> Result<(), MachineError> {
        let pages = u64::from(P::Arch::CONTIG_ENTRIES);
        if pages == 1 {
            return Ok(());
        }
        let area = TestArea::new(map, pages << PAGE_SHIFT, READ | WRITE, Pieces::Largest)?;
        for page in 0..pages {
            area.fill(page, &(FIRST + page).to_ne_bytes())?;
        }
        for page in 0..pages {
            match self.load(map, area.at.offset(page << PAGE_SHIFT)) {
                Ok(value) if value == FIRST + page => {}
                Ok(_) => self.seen(Symptom::ContiguousFaulted, None)?,
                Err(fault) => self.seen(Symptom::ContiguousFaulted, Some(fault))?,
            }
        }
        Ok(())
    }

    /// Tests one frame under two memory types, if a control bit enables types. (On other machines,
    /// both types of a frame would have to agree.)
    fn memory_types(&mut self, area: &TestArea<'_, '_, P>) -> Result<(), MachineError> {
        if P::Arch::control_bit(Symptom::MemoryTypeFaulted).is_none() {
            return Ok(());
        }
        let options = VmapOptions { memory: MemoryType::WriteCombining, ..VmapOptions::default() };
        let at = area.map.vmap(&[frame_of(area.physical(0)?)], &options)?;
        let loaded = self.load(area.map, at);
        // SAFETY: 1. allocated above; 2. the accesses are over.
        unsafe { area.map.vunmap(at, UnmapTime::Now) }?;
        match loaded {
            Ok(_) => Ok(()),
            Err(fault) => self.seen(Symptom::MemoryTypeFaulted, Some(fault)),
        }
    }

    pub(super) fn user(&mut self, space: &AddressSpace<'_, P>) -> Result<(), MachineError> {
        let writable = Protection::READ | Protection::WRITE;
        let page = UserPage::new(space, writable, Access::Write)?;
        let at = page.at;
        if self.accesses.read(at, AccessBy::Kernel).is_ok() {
            self.seen(Symptom::UserPageRead, None)?;
        }
        let written = self.accesses.write(at, FIRST, AccessBy::UserCopy);
        match written.and_then(|()| self.accesses.read(at, AccessBy::UserCopy)) {
            Ok(FIRST) => {}
            Ok(_) => self.seen(Symptom::OtherFrame, None)?,
            Err(fault) => self.seen(Symptom::UserCopyFaulted, Some(fault))?,
        }
        page.protect(Protection::READ)?;
        if self.accesses.write(at, SECOND, AccessBy::UserCopy).is_ok() {
            self.seen(Symptom::StaleWritten, None)?;
        }
        page.protect(writable)?;
        space.write_user(at, &self.code())?;
        page.protect(Protection::READ | Protection::EXECUTE)?;
        if self.accesses.execute(at).is_ok() {
            self.seen(Symptom::UserPageExecuted, None)?;
        }
        self.recorded(space)?;
        let never = UserPage::new(space, Protection::READ, Access::Read)?;
        if self.accesses.write(never.at, SECOND, AccessBy::UserCopy).is_ok() {
            self.seen(Symptom::ReadOnlyWritten, None)?;
        }
        Ok(())
    }

    /// Tests a page with clear accessed and dirty bits.
    fn recorded(&mut self, space: &AddressSpace<'_, P>) -> Result<(), MachineError> {
        let page = UserPage::new(space, Protection::READ | Protection::WRITE, Access::Write)?;
        space.madvise(page.at, PAGE_SIZE, Advice::Free)?;
        if let Err(fault) = self.accesses.read(page.at, AccessBy::UserCopy) {
            self.seen(Symptom::AccessedFaulted, Some(fault))?;
            space.fault(page.at, Access::Read)?;
        }
        if let Err(fault) = self.accesses.write(page.at, SECOND, AccessBy::UserCopy) {
            self.seen(Symptom::DirtyFaulted, Some(fault))?;
        }
        Ok(())
    }

    pub(super) fn registers(&mut self, keys: u8) -> Result<(), MachineError> {
        for rule in P::Arch::REGISTERS {
            let Some(value) = self.accesses.register(rule.register) else { continue };
            if value & rule.mask == rule.value {
                continue;
            }
            let (bit, symptom) = (rule.bit, Symptom::Register);
            match rule.severity {
                Severity::Broken => return Err(MachineError::ControlBit { bit, symptom }),
                Severity::BrokenWithKeys if keys > 1 => {
                    return Err(MachineError::ControlBit { bit, symptom });
                }
                Severity::BrokenWithKeys => {}
                severity @ (Severity::Slow | Severity::Unprotected) => {
                    self.report.add(bit, severity);
                }
            }
        }
        Ok(())
    }
}
