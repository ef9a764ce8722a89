//! `ioctl(PROCMAP_QUERY)` on `/proc/self/maps`: one mapping, as numbers instead of a line.

use core::fmt::{self, Write};
use core::mem::offset_of;

use linux_raw_sys::general::{procmap_query as Query, procmap_query_flags as Flags};

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, Errno, MappingFlags, Platform};

use super::maps::{Name, Shown};
use super::naming::Naming;

/// The size in bytes of the structure that this version supports. A caller's structure may be older
/// and shorter, or newer and longer.
const SIZE: usize = size_of::<Query>();

/// The minimum size in bytes of a query: its size, flags and address.
const LEAST: usize = offset_of!(Query, query_addr) + 8;

/// The maximum size of a name in bytes, with its final zero (`PATH_MAX`).
const NAME_MAX: u64 = 4096;

/// The permissions that a query can require, and the mapping flags for them.
const PERMISSIONS: [(Flags, MappingFlags); 4] = [
    (Flags::PROCMAP_QUERY_VMA_READABLE, MappingFlags::READ),
    (Flags::PROCMAP_QUERY_VMA_WRITABLE, MappingFlags::WRITE),
    (Flags::PROCMAP_QUERY_VMA_EXECUTABLE, MappingFlags::EXECUTE),
    (Flags::PROCMAP_QUERY_VMA_SHARED, MappingFlags::SHARED),
];

/// All flags of a query.
const KNOWN: u64 = 0x3f;

/// The structure in memory. Fields that the caller's version lacks are zero.
struct Fields([u8; SIZE]);

impl Fields {
    fn get(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[offset..offset + 8]);
        u64::from_le_bytes(bytes)
    }

    fn get_short(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[offset..offset + 4]);
        u32::from_le_bytes(bytes)
    }

    fn set(&mut self, offset: usize, value: u64) {
        self.0[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
    }

    fn set_short(&mut self, offset: usize, value: u32) {
        self.0[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    }
}

/// The memory of the caller of a query. [`AddressSpace`] implements this trait with a page-table
/// walk for each access. A kernel can provide a faster implementation for the running program, with
/// instructions that access user addresses.
///
/// # Context
/// Context: may sleep. The functions are called without locks of the core.
pub trait CallerMemory {
    /// Reads `into.len()` bytes at `at`. May sleep.
    ///
    /// # Errors
    /// [`Errno::EFAULT`] if the program itself could not read at this address.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Errno>;

    /// Writes `from` to `at`. May sleep.
    ///
    /// # Errors
    /// [`Errno::EFAULT`] if the program itself could not write at this address.
    fn write(&self, at: u64, from: &[u8]) -> Result<(), Errno>;
}

impl<P: Platform> CallerMemory for AddressSpace<'_, P> {
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.read_user(VirtAddr(at), into).map_err(|_| Errno::EFAULT)
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.write_user(VirtAddr(at), from).map_err(|_| Errno::EFAULT)
    }
}

/// Answers the query (`struct procmap_query`) at `argument` in the memory of `caller`. The query
/// asks for a mapping of `space`, the process whose `maps` was opened; `None` if that process has
/// released its memory. Reports every file as one without a build ID. Linux has had this request
/// since 6.11.
///
/// Context: may sleep. Complexity: logarithmic in the mappings, for each skipped mapping.
///
/// # Errors
/// [`Errno::EFAULT`] if the caller's memory cannot be read or written; [`Errno::E2BIG`] for a
/// longer structure with unknown fields that are not zero; [`Errno::EINVAL`] for a structure that
/// is too short, unknown flags, or a buffer without a size; [`Errno::ESRCH`] without a `space`;
/// [`Errno::ENOENT`] if no mapping fits; [`Errno::ENAMETOOLONG`] if the name does not fit.
pub fn procmap_query<P: Platform>(
    space: Option<&AddressSpace<'_, P>>,
    caller: &impl CallerMemory,
    argument: u64,
    naming: &dyn Naming,
) -> Result<(), Errno> {
    let (mut fields, size) = read(caller, argument)?;
    let flags = fields.get(offset_of!(Query, query_flags));
    let [name_size, id_size] = [offset_of!(Query, vma_name_size), offset_of!(Query, build_id_size)]
        .map(|offset| fields.get_short(offset));
    let [name_at, id_at] = [offset_of!(Query, vma_name_addr), offset_of!(Query, build_id_addr)]
        .map(|offset| fields.get(offset));
    if flags & !KNOWN != 0 || (name_size == 0) != (name_at == 0) || (id_size == 0) != (id_at == 0) {
        return Err(Errno::EINVAL);
    }
    let space = space.ok_or(Errno::ESRCH)?;
    let address = VirtAddr(fields.get(offset_of!(Query, query_addr)));
    let found = find(space, address, flags).ok_or(Errno::ENOENT)?;
    tell(&found, naming, &mut fields);
    let mut written = 0;
    if name_size > 0
        && let Some(name) = found.name(naming)
    {
        let room = u64::from(name_size).min(NAME_MAX);
        let mut length = Length(1);
        // `Length` never fails. If `naming` does, the name ends there.
        let _ = write_name(name, naming, &mut length);
        if length.0 > room {
            return Err(Errno::ENAMETOOLONG);
        }
        let mut text = UserText { caller, at: name_at, left: room - 1, faulted: false };
        let _ = write_name(name, naming, &mut text);
        let end = caller.write(text.at, &[0]);
        if text.faulted || end.is_err() {
            return Err(Errno::EFAULT);
        }
        written = text.at - name_at + 1;
    }
    fields.set_short(offset_of!(Query, vma_name_size), written as u32);
    fields.set_short(offset_of!(Query, build_id_size), 0);
    caller.write(argument, &fields.0[..size])
}

/// Reads the structure. Also returns the number of bytes that both sides know.
fn read(caller: &impl CallerMemory, argument: u64) -> Result<(Fields, usize), Errno> {
    let mut size = [0; 8];
    caller.read(argument, &mut size)?;
    let size = u64::from_le_bytes(size);
    if size > PAGE_SIZE {
        return Err(Errno::E2BIG);
    }
    let size = size as usize;
    if size < LEAST {
        return Err(Errno::EINVAL);
    }
    // Unknown fields must be zero.
    let mut rest = [0; 32];
    for start in (SIZE..size).step_by(rest.len()) {
        let rest = &mut rest[..(size - start).min(32)];
        let at = argument.checked_add(start as u64).ok_or(Errno::EFAULT)?;
        caller.read(at, rest)?;
        if rest.iter().any(|byte| *byte != 0) {
            return Err(Errno::E2BIG);
        }
    }
    let mut fields = Fields([0; SIZE]);
    let known = size.min(SIZE);
    caller.read(argument, &mut fields.0[..known])?;
    Ok((fields, known))
}

/// The mapping that contains `address` and has the properties that `flags` require. Otherwise, if
/// `flags` allow it, the first such mapping above.
fn find<P: Platform>(space: &AddressSpace<'_, P>, address: VirtAddr, flags: u64) -> Option<Shown> {
    let asks = |flag: Flags| flags & u64::from(flag as u32) != 0;
    let mut wanted = MappingFlags::empty();
    for (flag, permission) in PERMISSIONS {
        wanted.set(permission, asks(flag));
    }
    let or_next = asks(Flags::PROCMAP_QUERY_COVERING_OR_NEXT_VMA);
    let mut at = address;
    loop {
        let found = space.view_mapping(at, |view| Shown::of(space, view))?;
        let mapping = &found.mapping;
        let of_file = mapping.object.is_some() || !asks(Flags::PROCMAP_QUERY_FILE_BACKED_VMA);
        let fits = of_file && mapping.flags.contains(wanted);
        if fits && (or_next || mapping.range.start() <= address) {
            return Some(found);
        }
        if !or_next {
            return None;
        }
        at = mapping.range.end();
    }
}

/// Fills in the fields of a mapping, except its name.
fn tell(found: &Shown, naming: &dyn Naming, fields: &mut Fields) {
    let (mapping, file) = (&found.mapping, found.file(naming));
    let mut flags = 0;
    for (flag, permission) in PERMISSIONS {
        if mapping.flags.contains(permission) {
            flags |= u64::from(flag as u32);
        }
    }
    fields.set(offset_of!(Query, vma_start), mapping.range.start().0);
    fields.set(offset_of!(Query, vma_end), mapping.range.end().0);
    fields.set(offset_of!(Query, vma_flags), flags);
    fields.set(offset_of!(Query, vma_page_size), PAGE_SIZE);
    fields.set(offset_of!(Query, vma_offset), found.offset());
    fields.set(offset_of!(Query, inode), file.inode);
    fields.set_short(offset_of!(Query, dev_major), file.major);
    fields.set_short(offset_of!(Query, dev_minor), file.minor);
}

fn write_name(name: Name, naming: &dyn Naming, out: &mut dyn Write) -> fmt::Result {
    match name {
        Name::Known(name) => out.write_str(name),
        Name::Path(identity, backing) => naming.write_path(identity, backing, out),
    }
}

/// Counts the bytes of a text.
struct Length(u64);

impl Write for Length {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 += text.len() as u64;
        Ok(())
    }
}

/// A text in a program's memory. A name that has grown since it was measured is truncated.
struct UserText<'a, M: CallerMemory> {
    caller: &'a M,
    at: u64,
    left: u64,
    faulted: bool,
}

impl<M: CallerMemory> Write for UserText<'_, M> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let count = self.left.min(text.len() as u64);
        if self.caller.write(self.at, &text.as_bytes()[..count as usize]).is_err() {
            self.faulted = true;
            return Err(fmt::Error);
        }
        self.at += count;
        self.left -= count;
        Ok(())
    }
}
