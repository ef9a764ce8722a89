//! `/proc/self/maps`: a line for each mapping.
//!
//! ```text
//! start        end          perm offset   dev   inode                      path
//! 7f1000000000-7f1000021000 rw-s 00002000 00:01 1027                       /memfd:pixels (deleted)
//! ```

use core::fmt::{self, Write};

use crate::addr::{PAGE_SHIFT, VirtAddr, VirtRange};
use crate::platform::Platform;
use crate::space::vma::Vma;
use crate::space::{AddressSpace, Mapping, MappingFlags};

use super::naming::{Backing, FileId, Naming};

/// Bytes of a line before its path, with the space in front of it. As Linux's: enough for 64-bit
/// addresses and offset.
const PATH_COLUMN: usize = 73;

/// Writes what `/proc/self/maps` shows: a line for each mapping, in rising order.
///
/// # Errors
/// Those of `out` alone; nothing more is written then.
///
/// Complexity: logarithmic in the mappings, for each of them.
pub fn maps<P: Platform>(
    space: &AddressSpace<'_, P>,
    naming: &dyn Naming,
    out: &mut dyn Write,
) -> fmt::Result {
    let mut at = VirtAddr(0);
    while let Some(shown) = space.look_behind(at, |vma| Shown::of(space, vma)) {
        shown.write_line(naming, out)?;
        at = shown.mapping.range.end();
    }
    Ok(())
}

/// What is known of a mapping when its line is written and the mapping may be gone.
#[derive(Clone, Copy)]
pub(super) struct Shown {
    pub(super) mapping: Mapping,
    backing: Option<Backing>,
    place: Place,
}

/// Whether a mapping is the program's heap.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Heap,
    Elsewhere,
}

impl Shown {
    /// The address space's mutex is held.
    pub(super) fn of<P: Platform>(space: &AddressSpace<'_, P>, vma: &Vma) -> Self {
        let (start, end) = space.heap();
        let mapping = Mapping::of(vma);
        // As Linux: whatever of the heap lies in it.
        let heap = mapping.range.start().0 < end && mapping.range.end().0 > start;
        let place = if heap { Place::Heap } else { Place::Elsewhere };
        Self { mapping, backing: vma.object().map(Backing::of), place }
    }

    pub(super) fn write_line(&self, naming: &dyn Naming, out: &mut dyn Write) -> fmt::Result {
        let mapping = &self.mapping;
        let mut line = Line { out, written: 0 };
        let Some((identity, backing)) = mapping.object.zip(self.backing) else {
            let anonymous = FileId { major: 0, minor: 0, inode: 0 };
            line.write_columns(mapping.range, mapping.flags, 0, anonymous)?;
            let range = mapping.range;
            let around = |stack: VirtAddr| range.start() <= stack && range.end() >= stack;
            if self.place == Place::Heap {
                line.write_name("[heap]")?;
            } else if naming.stack().is_some_and(around) {
                line.write_name("[stack]")?;
            }
            return line.end();
        };
        let offset = mapping.page_offset.wrapping_shl(PAGE_SHIFT);
        let file = naming.file_id(identity, backing);
        line.write_columns(mapping.range, mapping.flags, offset, file)?;
        line.pad()?;
        naming.write_path(identity, backing, &mut Escaped(&mut *line.out))?;
        line.end()
    }
}

/// A line that is being written; paths begin at the same column in all of them.
pub(super) struct Line<'a> {
    out: &'a mut dyn Write,
    written: usize,
}

impl<'a> Line<'a> {
    pub(super) fn new(out: &'a mut dyn Write) -> Self {
        Self { out, written: 0 }
    }

    /// Everything before the path; `offset` is in bytes.
    pub(super) fn write_columns(
        &mut self,
        range: VirtRange,
        flags: MappingFlags,
        offset: u64,
        file: FileId,
    ) -> fmt::Result {
        let letter = |flag: MappingFlags, letter: char| {
            if flags.contains(flag) { letter } else { '-' }
        };
        let read = letter(MappingFlags::READ, 'r');
        let write = letter(MappingFlags::WRITE, 'w');
        let execute = letter(MappingFlags::EXECUTE, 'x');
        let sharing = if flags.contains(MappingFlags::SHARED) { 's' } else { 'p' };
        let (start, end) = (range.start().0, range.end().0);
        let FileId { major, minor, inode } = file;
        write!(self, "{start:08x}-{end:08x} {read}{write}{execute}{sharing} {offset:08x} ")?;
        write!(self, "{major:02x}:{minor:02x} {inode} ")
    }

    /// Goes to where paths begin.
    fn pad(&mut self) -> fmt::Result {
        // One space at least, however long the columns are.
        let missing = PATH_COLUMN.saturating_sub(self.written).max(1);
        write!(self, "{:missing$}", "")
    }

    pub(super) fn write_name(&mut self, name: &str) -> fmt::Result {
        self.pad()?;
        self.write_str(name)
    }

    pub(super) fn end(&mut self) -> fmt::Result {
        self.write_char('\n')
    }
}

impl Write for Line<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.written += text.len();
        self.out.write_str(text)
    }
}

/// Shows line feeds as an octal number, so that a file's name cannot pretend to be a line.
struct Escaped<'a>(&'a mut dyn Write);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut lines = text.split('\n');
        self.0.write_str(lines.next().unwrap_or_default())?;
        lines.try_for_each(|line| {
            self.0.write_str("\\012")?;
            self.0.write_str(line)
        })
    }
}
