//! The boot self-test: whether the machine is set up as the page tables need it.
//!
//! A control bit that is wrong shows up late and far away. With `EFER.NXE` clear, bit 63 of an
//! x86-64 entry is reserved: the kernel faults for ever at the first page that is not executable.
//! With `CR0.WP` clear, the kernel writes through read-only entries, and a page that two processes
//! share changes in both. [`machine`] maps a few pages, changes their protection, makes accesses
//! that must succeed or fault, and names the bit.
//!
//! ```text
//! kernel area   rw-  load, store succeed; fetch faults          user page  rw-  plain load faults
//!               r--  store faults                                          rw-  user copy succeeds
//!               r-x  fetch succeeds                                        r-x  kernel fetch faults
//!               rwx  fetch succeeds                                        r--  user copy faults
//!               --x  load faults (RISC-V)                  cleared A, D    rw-  user copy succeeds
//! ```
//!
//! What accesses cannot show (`CR4.PGE`, `CR4.PCIDE`, memory types) is compared with the registers,
//! where [`Accesses::register`] can read them.

use core::fmt;

use arrayvec::ArrayVec;

use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, PhysAddr, VirtAddr, VirtRange};
use crate::arch::{self, Arch, ControlBit, MemoryType, Permissions, Register, Severity, Symptom};
use crate::error::{Error, FaultError};
use crate::kernel_map::{
    KernelMapError, Pieces, Resolution, UnmapTime, VmallocOptions, VmapOptions,
};
use crate::platform::Platform;
use crate::space::{Access, AddressSpace, Advice, MapRequest, Protection};
use crate::{KernelMap, Memory};

/// Why an access was not made, as the processor reported it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum AccessFault {
    /// There is no translation (x86-64: bit 0 of the error code clear; AArch64: Translation fault).
    NotMapped,
    /// The translation does not allow the access (AArch64: Permission fault).
    Denied,
    /// An entry has a reserved bit set (x86-64: bit 3 of the error code).
    ReservedBit,
    /// The accessed bit is clear (AArch64: Access flag fault).
    AccessFlag,
    /// A page fault that does not say why (RISC-V).
    Unknown,
}

impl fmt::Display for AccessFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMapped => "no translation",
            Self::Denied => "permission denied",
            Self::ReservedBit => "a reserved bit is set in an entry",
            Self::AccessFlag => "the accessed bit is clear",
            Self::Unknown => "a page fault",
        })
    }
}

/// With what rights the kernel accesses memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum AccessBy {
    /// An ordinary access of the kernel.
    Kernel,
    /// An access to memory of user mode on purpose, as the embedder's user copies make it (x86-64:
    /// between `stac` and `clac`; AArch64: with PAN clear, or by `ldtr` and `sttr`; RISC-V: with
    /// SUM set). The page must be aligned to the access; protection keys must allow it.
    UserCopy,
}

/// Makes single accesses for [`machine`], and catches their faults.
///
/// Each function makes one access in kernel mode on the CPU of the caller. A fault is reported as
/// it comes: the fault handler must not ask [`AddressSpace::fault`] or [`KernelMap::resolve`] about
/// it. A kernel has that handler already, where it copies from and to user memory.
///
/// # Context
/// Context: may sleep. The functions are called without locks of the core.
pub trait Accesses {
    /// Loads eight bytes from an aligned address.
    ///
    /// # Errors
    /// The fault.
    fn read(&mut self, at: VirtAddr, by: AccessBy) -> Result<u64, AccessFault>;

    /// Stores eight bytes to an aligned address.
    ///
    /// # Errors
    /// The fault.
    fn write(&mut self, at: VirtAddr, value: u64, by: AccessBy) -> Result<(), AccessFault>;

    /// Calls [`Accesses::code`] at `at`, where the self-test has written it. Synchronizes the
    /// instruction cache before, where the processor needs that.
    ///
    /// # Errors
    /// The fault of the fetch.
    fn execute(&mut self, at: VirtAddr) -> Result<(), AccessFault>;

    /// Instructions that return to their caller at once, wherever they are (x86-64, RISC-V and
    /// AArch64: `ret`). At most 64 bytes; what is longer is cut.
    fn code(&self) -> &[u8];

    /// A control register of the CPU; `None` if it cannot be read, which skips its rules.
    fn register(&mut self, _register: Register) -> Option<u64> {
        None
    }
}

/// What [`machine`] found wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MachineError {
    /// A control bit has the wrong value.
    ControlBit {
        /// The bit.
        bit: ControlBit,
        /// What it did.
        symptom: Symptom,
    },
    /// Something happened that no control bit explains: an invalidation that did nothing
    /// ([`Symptom::StaleWritten`]), a direct map that shows other memory
    /// ([`Symptom::OtherFrame`]), a root that is not loaded.
    Unexplained {
        /// What happened.
        symptom: Symptom,
        /// The fault, if that was it.
        fault: Option<AccessFault>,
    },
    /// The kernel map refused a call of the self-test.
    KernelMap(KernelMapError),
    /// The address space refused a call of the self-test.
    Space(Error),
    /// The address space refused a fault of the self-test.
    Fault(FaultError),
}

impl fmt::Display for MachineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ControlBit { bit, symptom } => write!(f, "{bit}: {symptom}"),
            Self::Unexplained { symptom, fault } => {
                write!(f, "{symptom}")?;
                if let Some(fault) = fault {
                    write!(f, ": {fault}")?;
                }
                match symptom {
                    Symptom::StaleWritten => f.write_str("; the invalidation did nothing"),
                    Symptom::OtherFrame => f.write_str("; is the right root loaded?"),
                    _ => Ok(()),
                }
            }
            Self::KernelMap(error) => write!(f, "the kernel map refused the self-test: {error}"),
            Self::Space(error) => write!(f, "the address space refused the self-test: {error}"),
            Self::Fault(error) => write!(f, "a fault of the self-test was refused: {error}"),
        }
    }
}

impl core::error::Error for MachineError {}

impl From<KernelMapError> for MachineError {
    fn from(error: KernelMapError) -> Self {
        Self::KernelMap(error)
    }
}

impl From<Error> for MachineError {
    fn from(error: Error) -> Self {
        Self::Space(error)
    }
}

impl From<FaultError> for MachineError {
    fn from(error: FaultError) -> Self {
        Self::Fault(error)
    }
}

/// Findings that a report keeps: more than any architecture has.
const MOST_FINDINGS: usize = 8;

/// What a self-test that found nothing broken has to say: control bits without which all works, but
/// slower or with less protection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineReport {
    findings: ArrayVec<(ControlBit, Severity), MOST_FINDINGS>,
}

impl MachineReport {
    /// The control bits that have the wrong value, and what that costs.
    ///
    /// Context: any.
    pub fn findings(&self) -> impl Iterator<Item = (ControlBit, Severity)> + '_ {
        self.findings.iter().copied()
    }

    fn add(&mut self, bit: ControlBit, severity: Severity) {
        if !self.findings.iter().any(|(known, _)| known.name == bit.name) {
            // More than fit would be a defect of the tables of rules; none is lost silently in
            // tests.
            debug_assert!(!self.findings.is_full(), "too many findings");
            let _ = self.findings.try_push((bit, severity));
        }
    }
}

/// Tests the CPU of the caller: maps, protects and touches pages of the kernel's in `map`, and of
/// user mode in `space`, and names the control bit that is wrong. Either may be `None`, which skips
/// its part. All is unmapped again.
///
/// Called once on each CPU, at boot, before the first program: after [`KernelMap`] is made and
/// loaded, and with `space` loaded on the CPU ([`AddressSpace::enter`]). Nothing else uses `space`
/// meanwhile. Takes about 20 frames.
///
/// Context: may sleep.
///
/// # Errors
/// The first control bit whose value breaks something; see [`MachineError`].
pub fn machine<P: Platform>(
    map: Option<&KernelMap<'_, P>>,
    space: Option<&AddressSpace<'_, P>>,
    accesses: &mut impl Accesses,
) -> Result<MachineReport, MachineError> {
    let mut test = Test { accesses, report: MachineReport::default() };
    let mut keys = 1;
    if let Some(map) = map {
        test.kernel(map)?;
        keys = map.memory().platform.protection_keys();
    }
    if let Some(space) = space {
        test.user(space)?;
        keys = space.memory().platform.protection_keys();
    }
    test.registers::<P::Arch>(keys)?;
    Ok(test.report)
}

/// A page of a kernel area that is given back at the end.
struct Area<'t, 'm, P: Platform> {
    map: &'t KernelMap<'m, P>,
    at: VirtAddr,
    size: u64,
}

impl<'t, 'm, P: Platform> Area<'t, 'm, P> {
    fn new(
        map: &'t KernelMap<'m, P>,
        size: u64,
        permissions: Permissions,
        pieces: Pieces,
    ) -> Result<Self, MachineError> {
        let options =
            VmallocOptions { align: size, permissions, pieces, ..VmallocOptions::default() };
        Ok(Self { map, at: map.vmalloc(size, &options)?, size })
    }

    fn protect(&self, permissions: Permissions) -> Result<(), MachineError> {
        let range = VirtRange::raw(self.at.0, self.at.0 + self.size);
        // SAFETY: 1. made in `new`; 2. the test accesses it by the MMU, and expects faults; 3.
        // nobody else knows it.
        Ok(unsafe { self.map.protect(range, permissions) }?)
    }

    /// Where a page of the area is in memory.
    fn physical(&self, page: u64) -> Result<PhysAddr, MachineError> {
        let at = self.at.offset(page << PAGE_SHIFT);
        Ok(self.map.physical(at).ok_or(KernelMapError::NotAnArea(at))?)
    }

    /// Writes to a page of the area by the direct map.
    fn fill(&self, page: u64, bytes: &[u8]) -> Result<(), MachineError> {
        fill(self.map.memory(), self.physical(page)?, bytes);
        Ok(())
    }
}

impl<P: Platform> Drop for Area<'_, '_, P> {
    fn drop(&mut self) {
        // SAFETY: 1. made in `new`; 2. and 3. nobody else knows it, and the test is over.
        let _ = unsafe { self.map.vfree(self.at) };
    }
}

fn frame_of(at: PhysAddr) -> Frame {
    Frame((at.0 >> PAGE_SHIFT) as u32)
}

/// Writes to a frame of an area of the self-test's own.
fn fill<P: Platform>(memory: &Memory<P>, to: PhysAddr, bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(PAGE_SIZE as usize)];
    let to = memory.platform.direct_map(frame_of(to));
    // SAFETY: the frame belongs to an area of the self-test, which nobody else knows, and the arena
    // shows all of it.
    unsafe { memory.platform.write_bytes(to, bytes) };
}

/// Reads the first word of a frame of an area of the self-test's own.
fn first_word<P: Platform>(memory: &Memory<P>, from: PhysAddr) -> u64 {
    let mut bytes = [0; 8];
    let from = memory.platform.direct_map(frame_of(from));
    // SAFETY: as in `fill`.
    unsafe { memory.platform.read_bytes(from, &mut bytes) };
    u64::from_ne_bytes(bytes)
}

/// A mapping of one page that is unmapped at the end.
struct UserPage<'t, 'm, P: Platform> {
    space: &'t AddressSpace<'m, P>,
    at: VirtAddr,
}

impl<'t, 'm, P: Platform> UserPage<'t, 'm, P> {
    /// A page that is there, with `protection`.
    fn new(
        space: &'t AddressSpace<'m, P>,
        protection: Protection,
        touched: Access,
    ) -> Result<Self, MachineError> {
        let request = MapRequest { length: PAGE_SIZE, protection, ..MapRequest::default() };
        let page = Self { space, at: space.mmap(&request)? };
        space.fault(page.at, touched)?;
        Ok(page)
    }

    fn protect(&self, protection: Protection) -> Result<(), MachineError> {
        Ok(self.space.mprotect(self.at, PAGE_SIZE, protection)?)
    }
}

impl<P: Platform> Drop for UserPage<'_, '_, P> {
    fn drop(&mut self) {
        // It is a mapping that was made here; out of memory cannot come of a whole one.
        let _ = self.space.munmap(self.at, PAGE_SIZE);
    }
}

/// Two values that are told apart from zeroes and from each other.
const FIRST: u64 = 0x6269_6e64_6572_7931;
const SECOND: u64 = 0x6269_6e64_6572_7932;

/// The longest code that is tried.
const MOST_CODE: usize = 64;

const READ: Permissions = Permissions::READ;
const WRITE: Permissions = Permissions::WRITE;
const EXECUTE: Permissions = Permissions::EXECUTE;

struct Test<'t, A> {
    accesses: &'t mut A,
    report: MachineReport,
}

impl<A: Accesses> Test<'_, A> {
    /// Something was seen: names the bit, or notes it where all works nevertheless.
    fn seen<F: Arch>(
        &mut self,
        symptom: Symptom,
        fault: Option<AccessFault>,
    ) -> Result<(), MachineError> {
        match F::control_bit(symptom) {
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

    /// Makes an access of the kernel; a second time, where the processor may remember that nothing
    /// was mapped.
    fn twice<P: Platform, T>(
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

    fn load<P: Platform>(
        &mut self,
        map: &KernelMap<'_, P>,
        at: VirtAddr,
    ) -> Result<u64, AccessFault> {
        self.twice(map, at, READ, |accesses| accesses.read(at, AccessBy::Kernel))
    }

    fn store<P: Platform>(
        &mut self,
        map: &KernelMap<'_, P>,
        at: VirtAddr,
        value: u64,
    ) -> Result<(), AccessFault> {
        self.twice(map, at, WRITE, |accesses| accesses.write(at, value, AccessBy::Kernel))
    }

    fn fetch<P: Platform>(
        &mut self,
        map: &KernelMap<'_, P>,
        at: VirtAddr,
    ) -> Result<(), AccessFault> {
        self.twice(map, at, EXECUTE, |accesses| accesses.execute(at))
    }

    fn kernel<P: Platform>(&mut self, map: &KernelMap<'_, P>) -> Result<(), MachineError> {
        let area = Area::new(map, PAGE_SIZE, READ | WRITE, Pieces::Base)?;
        self.data(&area)?;
        self.read_only(&area)?;
        self.code_of_kernel(&area)?;
        self.contiguous(map)?;
        self.memory_types(&area)
    }

    /// A page that is writable and not executable.
    fn data<P: Platform>(&mut self, area: &Area<'_, '_, P>) -> Result<(), MachineError> {
        let (map, at) = (area.map, area.at);
        let written = self.store(map, at, FIRST).and_then(|()| self.load(map, at));
        match written {
            Ok(FIRST) if first_word(map.memory(), area.physical(0)?) == FIRST => {}
            Ok(_) => self.seen::<P::Arch>(Symptom::OtherFrame, None)?,
            Err(fault) => self.seen::<P::Arch>(Symptom::DataFaulted, Some(fault))?,
        }
        area.fill(0, &self.code())?;
        if self.fetch(map, at).is_ok() {
            self.seen::<P::Arch>(Symptom::DataExecuted, None)?;
        }
        Ok(())
    }

    /// A page that was never writable, and one that was until now.
    fn read_only<P: Platform>(&mut self, area: &Area<'_, '_, P>) -> Result<(), MachineError> {
        let never = Area::new(area.map, PAGE_SIZE, READ, Pieces::Base)?;
        if self.store(area.map, never.at, SECOND).is_ok() {
            self.seen::<P::Arch>(Symptom::ReadOnlyWritten, None)?;
        }
        // The TLB has the translation: it allows stores.
        let _ = self.store(area.map, area.at, FIRST);
        area.protect(READ)?;
        if self.store(area.map, area.at, SECOND).is_ok() {
            self.seen::<P::Arch>(Symptom::StaleWritten, None)?;
        }
        Ok(())
    }

    fn code_of_kernel<P: Platform>(&mut self, area: &Area<'_, '_, P>) -> Result<(), MachineError> {
        let (map, at) = (area.map, area.at);
        area.fill(0, &self.code())?;
        area.protect(READ | EXECUTE)?;
        if let Err(fault) = self.fetch(map, at) {
            self.seen::<P::Arch>(Symptom::CodeFaulted, Some(fault))?;
        }
        area.protect(READ | WRITE | EXECUTE)?;
        if let Err(fault) = self.fetch(map, at) {
            self.seen::<P::Arch>(Symptom::WritableCodeFaulted, Some(fault))?;
        }
        if !arch::implied::<P::Arch>(EXECUTE).contains(READ) {
            area.protect(EXECUTE)?;
            if self.load(map, at).is_ok() {
                self.seen::<P::Arch>(Symptom::ExecuteOnlyRead, None)?;
            }
        }
        area.protect(READ | WRITE)
    }

    /// Memory in one contiguous run, of which each page is read.
    fn contiguous<P: Platform>(&mut self, map: &KernelMap<'_, P>) -> Result<(), MachineError> {
        let pages = u64::from(P::Arch::CONTIG_ENTRIES);
        if pages == 1 {
            return Ok(());
        }
        let area = Area::new(map, pages << PAGE_SHIFT, READ | WRITE, Pieces::Largest)?;
        for page in 0..pages {
            area.fill(page, &(FIRST + page).to_ne_bytes())?;
        }
        for page in 0..pages {
            match self.load(map, area.at.offset(page << PAGE_SHIFT)) {
                Ok(value) if value == FIRST + page => {}
                Ok(_) => self.seen::<P::Arch>(Symptom::ContiguousFaulted, None)?,
                Err(fault) => self.seen::<P::Arch>(Symptom::ContiguousFaulted, Some(fault))?,
            }
        }
        Ok(())
    }

    /// The same frame as memory of another type, where a control bit switches types on. (Elsewhere
    /// the two types of one frame would have to agree.)
    fn memory_types<P: Platform>(&mut self, area: &Area<'_, '_, P>) -> Result<(), MachineError> {
        if P::Arch::control_bit(Symptom::MemoryTypeFaulted).is_none() {
            return Ok(());
        }
        let options = VmapOptions { memory: MemoryType::WriteCombining, ..VmapOptions::default() };
        let at = area.map.vmap(&[frame_of(area.physical(0)?)], &options)?;
        let loaded = self.load(area.map, at);
        // SAFETY: 1. made above; 2. the accesses are over.
        unsafe { area.map.vunmap(at, UnmapTime::Now) }?;
        match loaded {
            Ok(_) => Ok(()),
            Err(fault) => self.seen::<P::Arch>(Symptom::MemoryTypeFaulted, Some(fault)),
        }
    }

    fn user<P: Platform>(&mut self, space: &AddressSpace<'_, P>) -> Result<(), MachineError> {
        let writable = Protection::READ | Protection::WRITE;
        let page = UserPage::new(space, writable, Access::Write)?;
        let at = page.at;
        if self.accesses.read(at, AccessBy::Kernel).is_ok() {
            self.seen::<P::Arch>(Symptom::UserPageRead, None)?;
        }
        let written = self.accesses.write(at, FIRST, AccessBy::UserCopy);
        match written.and_then(|()| self.accesses.read(at, AccessBy::UserCopy)) {
            Ok(FIRST) => {}
            Ok(_) => self.seen::<P::Arch>(Symptom::OtherFrame, None)?,
            Err(fault) => self.seen::<P::Arch>(Symptom::UserCopyFaulted, Some(fault))?,
        }
        page.protect(Protection::READ)?;
        if self.accesses.write(at, SECOND, AccessBy::UserCopy).is_ok() {
            self.seen::<P::Arch>(Symptom::StaleWritten, None)?;
        }
        page.protect(writable)?;
        space.write_user(at, &self.code())?;
        page.protect(Protection::READ | Protection::EXECUTE)?;
        if self.accesses.execute(at).is_ok() {
            self.seen::<P::Arch>(Symptom::UserPageExecuted, None)?;
        }
        self.recorded(space)?;
        let never = UserPage::new(space, Protection::READ, Access::Read)?;
        if self.accesses.write(never.at, SECOND, AccessBy::UserCopy).is_ok() {
            self.seen::<P::Arch>(Symptom::ReadOnlyWritten, None)?;
        }
        Ok(())
    }

    /// A page whose entry says that it was neither used nor written.
    fn recorded<P: Platform>(&mut self, space: &AddressSpace<'_, P>) -> Result<(), MachineError> {
        let page = UserPage::new(space, Protection::READ | Protection::WRITE, Access::Write)?;
        space.madvise(page.at, PAGE_SIZE, Advice::Free)?;
        if let Err(fault) = self.accesses.read(page.at, AccessBy::UserCopy) {
            self.seen::<P::Arch>(Symptom::AccessedFaulted, Some(fault))?;
            space.fault(page.at, Access::Read)?;
        }
        if let Err(fault) = self.accesses.write(page.at, SECOND, AccessBy::UserCopy) {
            self.seen::<P::Arch>(Symptom::DirtyFaulted, Some(fault))?;
        }
        Ok(())
    }

    fn registers<F: Arch>(&mut self, keys: u8) -> Result<(), MachineError> {
        for rule in F::REGISTERS {
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
                severity => self.report.add(bit, severity),
            }
        }
        Ok(())
    }
}
