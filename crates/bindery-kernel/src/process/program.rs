//! Loads an ELF program into an address space.
//!
//! Addresses are deliberately not randomized, so the same program has the same addresses each time
//! (Linux: `personality(ADDR_NO_RANDOMIZE)`).
//!
//! ```text
//! 0x5555_5555_4000  a position-independent program (AArch64: 0xaaaa_aaaa_0000)
//!                   the heap behind its last segment
//!                   mappings, downwards from some way below the stack
//!                   the stack, downwards from 64 KiB below the end
//! USER_END          AArch64: just below, a page for the return from signal handlers
//! ```

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use bindery::addr::VirtAddr;
use bindery::arch::Arch;
use bindery::{
    AddressSpace, Error, FileAccess, MapFlags, MapObject, MapRequest, Operation, Place, Protection,
    SpaceOptions,
};
use elf::abi::{
    ET_DYN, ET_EXEC, PF_R, PF_W, PF_X, PT_GNU_PROPERTY, PT_GNU_STACK, PT_INTERP, PT_LOAD,
};
use elf::endian::LittleEndian;
use elf::file::{Class, FileHeader, parse_ident};
use elf::segment::{ProgramHeader, SegmentTable};
use linux_raw_sys::auxvec::{
    AT_BASE, AT_CLKTCK, AT_EGID, AT_ENTRY, AT_EUID, AT_EXECFN, AT_FLAGS, AT_GID, AT_HWCAP,
    AT_HWCAP2, AT_MINSIGSTKSZ, AT_NULL, AT_PAGESZ, AT_PHDR, AT_PHENT, AT_PHNUM, AT_PLATFORM,
    AT_RANDOM, AT_SECURE, AT_UID,
};
use linux_raw_sys::general::RLIMIT_STACK;

use crate::arch::{
    EntryFormat, PLATFORM_NAME, branch_target_identification, hardware_capabilities,
};
use crate::errno::Errno;
use crate::files::Program;
use crate::heap;
use crate::memory::{Space, memory};
use crate::user;

use super::facts::ProgramFacts;
use super::limits::Limits;
use super::properties;
use super::{Capability, Credentials, credentials};
use super::{random, table};

const PAGE: u64 = 4096;

#[cfg(target_arch = "x86_64")]
mod layout {
    pub const MACHINE: u16 = elf::abi::EM_X86_64;
    pub const FREE_PROGRAM: u64 = 0x5555_5555_4000;
    pub const SIGNAL_RETURN: Option<[u8; 8]> = None;
    pub const SIGNAL_STACK: u64 = 3632;
}

#[cfg(target_arch = "aarch64")]
mod layout {
    pub const MACHINE: u16 = elf::abi::EM_AARCH64;
    pub const FREE_PROGRAM: u64 = 0xaaaa_aaaa_0000;
    pub const SIGNAL_RETURN: Option<[u8; 8]> = Some(crate::arch::signal::TRAMPOLINE);
    pub const SIGNAL_STACK: u64 = 4720;
}

/// Unmapped bytes above the stack, so that an access beyond its upper end faults.
const ABOVE_STACK: u64 = 0x1_0000;

const STACK_END: u64 = EntryFormat::USER_END - ABOVE_STACK;

/// The address of the instructions that return from a signal handler, for C libraries that leave
/// them to the kernel.
pub(super) const SIGNAL_RETURN: u64 =
    if layout::SIGNAL_RETURN.is_some() { EntryFormat::USER_END - PAGE } else { 0 };

/// The initially mapped size of the stack, in addition to the program's strings.
const FIRST_STACK: u64 = 128 << 10;

/// Strings, each with its zero byte.
#[derive(Default)]
pub(super) struct Texts {
    bytes: Vec<u8>,
    count: usize,
}

/// The maximum size of a program's strings in bytes, whatever its stack.
const MAXIMUM_WORDS: u64 = 1 << 20;

impl Texts {
    /// Appends a string.
    ///
    /// # Errors
    /// `E2BIG`, `ENOMEM`.
    pub(super) fn push(&mut self, text: &[u8]) -> Result<(), Errno> {
        if self.size() + text.len() as u64 > MAXIMUM_WORDS {
            return Err(Errno::E2BIG);
        }
        let length = self.bytes.len() + text.len() + 1;
        if length > self.bytes.capacity() {
            // The growth doubles the block, so there are few.
            let wanted = length.max(2 * self.bytes.capacity());
            heap::room(wanted)?;
            self.bytes.reserve_exact(wanted - self.bytes.len());
        }
        self.bytes.extend_from_slice(text);
        self.bytes.push(0);
        self.count += 1;
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The strings of `first`, then all of these strings except the first, which are the arguments
    /// of an interpreter (`#!`).
    pub(super) fn behind(&self, first: &[&[u8]]) -> Result<Self, Errno> {
        let mut texts = Self::default();
        for text in first.iter().copied().chain(self.iter().skip(1)) {
            texts.push(text)?;
        }
        Ok(texts)
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.split(|byte| *byte == 0).take(self.count)
    }

    /// Their size on a stack, including their addresses.
    fn size(&self) -> u64 {
        (self.bytes.len() + 8 * self.count) as u64
    }

    /// The address of each string, if the first is at `at`.
    fn addresses(&self, mut at: u64) -> impl Iterator<Item = u64> {
        self.iter().map(move |text| {
            let this = at;
            at += text.len() as u64 + 1;
            this
        })
    }
}

/// The arguments with which a program starts.
pub(super) struct Words {
    pub path: Vec<u8>,
    pub arguments: Texts,
    pub environment: Texts,
}

/// A program that is ready to start.
pub(super) struct Loaded {
    /// The user that runs it.
    pub who: Credentials,
    pub space: Arc<Space>,
    pub entry: u64,
    pub stack_pointer: u64,
    pub facts: ProgramFacts,
    /// Whether other processes of the user may inspect the process.
    pub is_dumpable: bool,
}

fn refused(error: Error) -> Errno {
    Errno::from(error.errno(Operation::Mmap))
}

/// Loads a program into a new address space, with the settings of the caller's address space.
///
/// # Errors
/// `ENOEXEC`, `E2BIG`, `ENOMEM`.
pub(super) fn load(
    program: &Program,
    words: &Words,
    limits: &Limits,
    caller: Option<&Space>,
) -> Result<Loaded, Errno> {
    let who = credentials().at_exec(program.set_user, program.set_group);
    let stack_limit = limits.get(RLIMIT_STACK).current;
    let size = words.arguments.size() + words.environment.size();
    if size > (stack_limit / 4).max(32 * PAGE) {
        return Err(Errno::E2BIG);
    }
    let (header, segments) = read_headers(program)?;
    // As on Linux, the stack and a gap get between 128 MiB and five sixths of the address space.
    let gap = stack_limit.saturating_add(1 << 20).clamp(128 << 20, STACK_END / 6 * 5);
    let options = SpaceOptions {
        // As on Linux with vm.mmap_min_addr of 0, any address may be mapped.
        minimum_address: VirtAddr(0),
        search_top: Some(VirtAddr((STACK_END - gap) & !(PAGE - 1))),
        maximum_mappings: table::maximum_mappings(),
    };
    let space = table::known(AddressSpace::new(memory(), options).map_err(refused)?)?;
    limits.apply(&space, who.can(Capability::LockMemory));
    if let Some(caller) = caller {
        space.inherit_settings(caller);
    }
    let shift = place(&header, &segments)?;
    let code = code_protection(program, &segments)?;
    let mut facts = ProgramFacts { path: program.path.clone(), ..ProgramFacts::default() };
    let mut end = 0;
    for segment in segments.iter().filter(|segment| segment.p_type == PT_LOAD) {
        let range = map_segment(&space, program, segment, shift, code)?;
        end = end.max(range.end);
        if segment.p_flags & PF_X != 0 && facts.code.is_empty() {
            facts.code = range;
        }
    }
    space.set_break_start(VirtAddr(end.next_multiple_of(PAGE)));
    if let Some(code) = layout::SIGNAL_RETURN {
        map_signal_return(&space, &code)?;
    }
    let executable_stack = segments
        .iter()
        .any(|segment| segment.p_type == PT_GNU_STACK && segment.p_flags & PF_X != 0);
    let mut protection = Protection::READ | Protection::WRITE;
    protection.set(Protection::EXECUTE, executable_stack);
    let length = (size + words.path.len() as u64 + FIRST_STACK).next_multiple_of(PAGE);
    let request = MapRequest {
        length,
        protection,
        place: Place::FixedNoReplace(VirtAddr(STACK_END - length)),
        flags: MapFlags::GROWS_DOWN | MapFlags::STACK,
        ..MapRequest::default()
    };
    space.mmap(&request).map_err(refused)?;
    let entry = header.e_entry.wrapping_add(shift);
    let program_headers = address_of_headers(&header, &segments).wrapping_add(shift);
    let stack_pointer = write_stack(
        &space,
        words,
        &mut facts,
        &[
            (AT_PHDR, program_headers),
            (AT_PHENT, u64::from(header.e_phentsize)),
            (AT_PHNUM, u64::from(header.e_phnum)),
            (AT_ENTRY, entry),
            (AT_UID, who.user.real.into()),
            (AT_EUID, who.user.effective.into()),
            (AT_GID, who.group.real.into()),
            (AT_EGID, who.group.effective.into()),
            (AT_SECURE, who.is_secure().into()),
        ],
    )?;
    let is_dumpable = program.is_readable && !who.is_secure();
    Ok(Loaded { space, entry, stack_pointer, facts, is_dumpable, who })
}

/// Reads and checks the header of a file.
fn read_headers(
    program: &Program,
) -> Result<(FileHeader<LittleEndian>, Vec<ProgramHeader>), Errno> {
    let mut start = [0; 64];
    read_exactly(program, 0, &mut start)?;
    let not_ours = |_| Errno::ENOEXEC;
    let ident = parse_ident::<LittleEndian>(&start[..16]).map_err(not_ours)?;
    let header = FileHeader::parse_tail(ident, &start[16..]).map_err(not_ours)?;
    let size = usize::from(header.e_phnum) * usize::from(header.e_phentsize);
    if header.class != Class::ELF64
        || header.e_machine != layout::MACHINE
        || header.e_type != ET_EXEC && header.e_type != ET_DYN
        || header.e_phentsize != 56
        || size == 0
        || size as u64 > PAGE
    {
        return Err(Errno::ENOEXEC);
    }
    let mut table = alloc::vec![0; size];
    read_exactly(program, header.e_phoff, &mut table)?;
    let segments: Vec<_> = SegmentTable::new(LittleEndian, Class::ELF64, &table).iter().collect();
    // The kernel does not run programs that require a dynamic loader.
    if segments.iter().any(|segment| segment.p_type == PT_INTERP) {
        return Err(Errno::ENOEXEC);
    }
    Ok((header, segments))
}

fn read_exactly(program: &Program, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
    let read = program.object.read(offset, into).map_err(|_| Errno::EIO)?;
    if read == into.len() { Ok(()) } else { Err(Errno::ENOEXEC) }
}

/// The distance between the addresses in the file and those in memory: 0, or the load address of a
/// position-independent program.
fn place(header: &FileHeader<LittleEndian>, segments: &[ProgramHeader]) -> Result<u64, Errno> {
    let loads = || segments.iter().filter(|segment| segment.p_type == PT_LOAD);
    let lowest = loads().map(|segment| segment.p_vaddr).min().ok_or(Errno::ENOEXEC)?;
    for segment in loads() {
        let end =
            segment.p_vaddr.checked_add(segment.p_memsz).and_then(|end| end.checked_add(PAGE));
        let file_end = segment.p_offset.checked_add(segment.p_filesz);
        let congruent = segment.p_vaddr % PAGE == segment.p_offset % PAGE;
        let too_high = end.is_none_or(|end| end > STACK_END);
        if too_high || file_end.is_none() || !congruent || segment.p_filesz > segment.p_memsz {
            return Err(Errno::ENOEXEC);
        }
    }
    if header.e_type == ET_EXEC {
        return Ok(0);
    }
    let aligned = loads().map(|segment| segment.p_align).max().unwrap_or(PAGE).clamp(PAGE, 1 << 30);
    let base = layout::FREE_PROGRAM.next_multiple_of(aligned.next_power_of_two());
    Ok(base.wrapping_sub(lowest & !(PAGE - 1)))
}

/// The protection of the program's code: guarded if all its branch targets are landing pads.
fn code_protection(program: &Program, segments: &[ProgramHeader]) -> Result<Protection, Errno> {
    let mut protection = Protection::EXECUTE;
    let note = segments.iter().find(|segment| segment.p_type == PT_GNU_PROPERTY);
    if let Some(note) = note.filter(|_| branch_target_identification()) {
        if note.p_filesz > properties::LONGEST {
            return Err(Errno::ENOEXEC);
        }
        let mut bytes = alloc::vec![0; note.p_filesz as usize];
        read_exactly(program, note.p_offset, &mut bytes)?;
        protection.set(Protection::BTI, properties::has_landing_pads(&bytes)?);
    }
    Ok(protection)
}

/// Maps a segment. Returns its addresses.
fn map_segment(
    space: &Space,
    program: &Program,
    segment: &ProgramHeader,
    shift: u64,
    code: Protection,
) -> Result<Range<u64>, Errno> {
    let start = segment.p_vaddr.wrapping_add(shift);
    let (end, file_end) = (start.checked_add(segment.p_memsz), start.checked_add(segment.p_filesz));
    let (Some(end), Some(file_end)) = (end, file_end) else { return Err(Errno::ENOEXEC) };
    let mut protection = Protection::empty();
    protection.set(Protection::READ, segment.p_flags & PF_R != 0);
    protection.set(Protection::WRITE, segment.p_flags & PF_W != 0);
    protection.set(code, segment.p_flags & PF_X != 0);
    let request = |from: u64, to: u64| MapRequest {
        length: to - from,
        protection,
        place: Place::FixedNoReplace(VirtAddr(from)),
        ..MapRequest::default()
    };
    let first_page = start & !(PAGE - 1);
    let mut mapped_to = first_page;
    if segment.p_filesz > 0 {
        mapped_to = file_end.next_multiple_of(PAGE);
        let offset = segment.p_offset & !(PAGE - 1);
        let source = MapObject { object: &program.object, offset, access: FileAccess::READ };
        space.mmap_object(&request(first_page, mapped_to), &source).map_err(refused)?;
        // The rest of the page belongs to other parts of the file, and must read as zeroes.
        if segment.p_flags & PF_W != 0 && end > file_end {
            let zeroes = [0; PAGE as usize];
            let rest = (mapped_to - file_end) as usize;
            user::write_bytes_of(space, file_end, &zeroes[..rest])?;
        }
    }
    let last_page = end.next_multiple_of(PAGE);
    if last_page > mapped_to {
        space.mmap(&request(mapped_to, last_page)).map_err(refused)?;
    }
    Ok(start..end)
}

/// The address of the program's own headers, in the segment that contains that part of the file.
fn address_of_headers(header: &FileHeader<LittleEndian>, segments: &[ProgramHeader]) -> u64 {
    let holds = |segment: &&ProgramHeader| {
        let inside = header.e_phoff.wrapping_sub(segment.p_offset);
        segment.p_type == PT_LOAD && header.e_phoff >= segment.p_offset && inside < segment.p_filesz
    };
    segments
        .iter()
        .find(holds)
        .map_or(0, |segment| segment.p_vaddr + (header.e_phoff - segment.p_offset))
}

fn map_signal_return(space: &Space, code: &[u8]) -> Result<(), Errno> {
    let request = MapRequest {
        length: PAGE,
        protection: Protection::READ | Protection::WRITE,
        place: Place::FixedNoReplace(VirtAddr(SIGNAL_RETURN)),
        ..MapRequest::default()
    };
    space.mmap(&request).map_err(refused)?;
    user::write_bytes_of(space, SIGNAL_RETURN, code)?;
    // Handlers return here by `RET`, which needs no landing pad.
    let mut code = Protection::READ | Protection::EXECUTE;
    code.set(Protection::BTI, branch_target_identification());
    space.mprotect(VirtAddr(SIGNAL_RETURN), PAGE, code).map_err(refused)
}

/// Writes the initial stack of a program: the strings, and the auxiliary vector about itself and
/// the machine. Returns the stack pointer.
///
/// ```text
/// sp ->  argc | argv, 0 | envp, 0 | auxiliary vector, 0 | random bytes | platform |
///        arguments' texts | environment's texts | path | 0    <- STACK_END
/// ```
fn write_stack(
    space: &Space,
    words: &Words,
    facts: &mut ProgramFacts,
    own: &[(u32, u64)],
) -> Result<u64, Errno> {
    let mut at = STACK_END - 8;
    let mut put = |bytes: &[u8], zeroes: u64| {
        at -= bytes.len() as u64 + zeroes;
        user::write_bytes_of(space, at, bytes).map(|()| at)
    };
    let path = put(&words.path, 1)?;
    let environment = put(&words.environment.bytes, 0)?;
    let arguments = put(&words.arguments.bytes, 0)?;
    let platform = put(PLATFORM_NAME.as_bytes(), 1)?;
    let mut bytes = [0; 16];
    random::fill(&mut bytes);
    let random = put(&bytes, 0)?;
    facts.arguments = arguments..environment;
    facts.environment = environment..path;

    let capabilities = hardware_capabilities();
    let of_machine = [
        (AT_PAGESZ, PAGE),
        (AT_BASE, 0),
        (AT_FLAGS, 0),
        (AT_CLKTCK, 100),
        (AT_HWCAP, capabilities[0]),
        (AT_HWCAP2, capabilities[1]),
        (AT_MINSIGSTKSZ, layout::SIGNAL_STACK),
        (AT_PLATFORM, platform),
        (AT_RANDOM, random),
        (AT_EXECFN, path),
        (AT_NULL, 0),
    ];
    let texts = [(&words.arguments, arguments), (&words.environment, environment)];
    let entries = own.iter().chain(&of_machine);
    let count = 3 + texts[0].0.count + texts[1].0.count + 2 * entries.clone().count();
    let stack_pointer = (random - 8 * count as u64) & !15;
    let addresses = texts.into_iter().flat_map(|(texts, at)| texts.addresses(at).chain([0]));
    let entries = entries.flat_map(|(kind, value)| [u64::from(*kind), *value]);
    let vector = [words.arguments.count as u64].into_iter().chain(addresses).chain(entries);
    write_words(space, stack_pointer, vector)?;
    facts.stack = stack_pointer;
    Ok(stack_pointer)
}

/// Writes consecutive words to a program's memory. The words need no memory of the kernel, because
/// a program may start with very many strings.
fn write_words(space: &Space, mut at: u64, words: impl Iterator<Item = u64>) -> Result<(), Errno> {
    let mut piece = [0; 1024];
    let mut filled = 0;
    for word in words {
        piece[filled..filled + 8].copy_from_slice(&word.to_le_bytes());
        filled += 8;
        if filled == piece.len() {
            user::write_bytes_of(space, at, &piece)?;
            at += filled as u64;
            filled = 0;
        }
    }
    user::write_bytes_of(space, at, &piece[..filled])
}
