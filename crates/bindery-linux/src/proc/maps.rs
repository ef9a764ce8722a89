//! `/proc/self/maps`: a line for each mapping.
//!
//! ```text
//! start        end          perm offset   dev   inode                      path
//! 7f1000000000-7f1000021000 rw-s 00002000 00:01 1027                       /memfd:pixels (deleted)
//! ```

use core::fmt::{self, Write};

use bindery::addr::{PAGE_SHIFT, VirtAddr};
use bindery::{AddressSpace, Mapping, MappingView, Platform};

use super::line::Columns;
use super::naming::{FileId, NameSource, Naming};

/// Writes what `/proc/self/maps` shows: a line for each mapping, in rising order.
///
/// Context: may sleep. Complexity: logarithmic in the mappings, for each of them.
///
/// # Errors
/// Those of `out` alone; nothing more is written then.
pub fn maps<P: Platform>(
    space: &AddressSpace<'_, P>,
    naming: &dyn Naming,
    out: &mut dyn Write,
) -> fmt::Result {
    let mut at = VirtAddr(0);
    while let Some(next) = maps_entry(space, naming, at, out)? {
        at = next;
    }
    Ok(())
}

/// Writes one line of [`maps()`], that of the first mapping that ends after `at`, and returns
/// where it ends: what a reader has to remember to go on. `None` if there is no such mapping;
/// nothing is written then.
///
/// A reader who is handed whole lines so, and keeps what did not fit, never sees a torn line, and
/// the mappings before his place may come and go without moving it.
///
/// Context: may sleep. Complexity: logarithmic in the mappings.
///
/// # Errors
/// Those of `out` alone; nothing more is written then.
pub fn maps_entry<P: Platform>(
    space: &AddressSpace<'_, P>,
    naming: &dyn Naming,
    at: VirtAddr,
    out: &mut dyn Write,
) -> Result<Option<VirtAddr>, fmt::Error> {
    let Some(shown) = space.view_mapping(at, |view| Shown::of(space, view)) else {
        return Ok(None);
    };
    shown.write_line(naming, out)?;
    Ok(Some(shown.mapping.range.end()))
}

/// What is known of a mapping when its line is written and the mapping may be gone.
#[derive(Clone, Copy)]
pub(super) struct Shown {
    pub(super) mapping: Mapping,
    backing: Option<NameSource>,
    place: MapsPosition,
}

/// Whether a mapping is the program's heap.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MapsPosition {
    Heap,
    Elsewhere,
}

impl Shown {
    pub(super) fn of<P: Platform>(
        space: &AddressSpace<'_, P>,
        view: &MappingView<'_, '_, P>,
    ) -> Self {
        let heap = space.heap();
        let mapping = view.mapping();
        // As Linux: whatever of the heap lies in it.
        let inside = mapping.range.start() < heap.end() && mapping.range.end() > heap.start();
        let place = if inside { MapsPosition::Heap } else { MapsPosition::Elsewhere };
        Self { mapping, backing: view.object().map(NameSource::of), place }
    }

    /// Where the file of the mapping lives; no file has the number 0.
    pub(super) fn file(&self, naming: &dyn Naming) -> FileId {
        match self.mapping.object.zip(self.backing) {
            Some((identity, backing)) => naming.file_id(identity, backing),
            None => FileId { major: 0, minor: 0, inode: 0 },
        }
    }

    /// Where the mapping begins in its file, in bytes.
    pub(super) fn offset(&self) -> u64 {
        let of_file = self.mapping.object.map(|_| self.mapping.page_offset);
        of_file.unwrap_or(0).wrapping_shl(PAGE_SHIFT)
    }

    /// What Linux calls the mapping, if it calls it anything.
    pub(super) fn name(&self, naming: &dyn Naming) -> Option<Name> {
        if let Some((identity, backing)) = self.mapping.object.zip(self.backing) {
            return Some(Name::Path(identity, backing));
        }
        let range = self.mapping.range;
        let around = |stack: VirtAddr| range.start() <= stack && range.end() >= stack;
        if self.place == MapsPosition::Heap {
            Some(Name::Known("[heap]"))
        } else if naming.stack().is_some_and(around) {
            Some(Name::Known("[stack]"))
        } else {
            None
        }
    }

    pub(super) fn write_line(&self, naming: &dyn Naming, out: &mut dyn Write) -> fmt::Result {
        let Mapping { range, flags, .. } = self.mapping;
        let mut line = Columns::of_mapping(range, flags, self.offset(), self.file(naming));
        let name = self.name(naming);
        match name {
            None => {}
            Some(Name::Known(name)) => {
                line.pad_to_path();
                line.push(name);
            }
            Some(Name::Path(identity, backing)) => {
                line.pad_to_path();
                line.write_to(out)?;
                naming.write_path(identity, backing, &mut Escaped(&mut *out))?;
                return out.write_char('\n');
            }
        }
        line.push("\n");
        line.write_to(out)
    }
}

/// What a mapping is called.
#[derive(Clone, Copy)]
pub(super) enum Name {
    Known(&'static str),
    /// By the path of an object, which the embedder knows.
    Path(u64, NameSource),
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
