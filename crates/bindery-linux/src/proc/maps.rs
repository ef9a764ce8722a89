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

/// Writes `/proc/self/maps`: one line for each mapping, in ascending order.
///
/// Context: may sleep. Complexity: n log n in the mappings.
///
/// # Errors
/// Only errors of `out`, which end the listing.
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

/// Writes the line of the first mapping that ends after `at`. Returns the end of that mapping, from
/// which the next call continues. Returns `None` and writes nothing if no mapping follows.
///
/// An embedder that stores this address with the open file and buffers the part of a line that did
/// not fit into a read never shows a torn line. Changes to mappings below the address do not shift
/// the reader's position.
///
/// Context: may sleep. Complexity: logarithmic in the mappings.
///
/// # Errors
/// Only errors of `out`, which end the line.
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

/// The properties of a mapping that its line shows. They are copied because the mapping may be
/// removed before the line is written.
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
        // Linux calls every mapping that overlaps the heap `[heap]`.
        let inside = mapping.range.start() < heap.end() && mapping.range.end() > heap.start();
        let place = if inside { MapsPosition::Heap } else { MapsPosition::Elsewhere };
        Self { mapping, backing: view.object().map(NameSource::of), place }
    }

    /// The device and inode of the mapping's file; all zero without a file.
    pub(super) fn file(&self, naming: &dyn Naming) -> FileId {
        match self.mapping.object.zip(self.backing) {
            Some((identity, backing)) => naming.file_id(identity, backing),
            None => FileId { major: 0, minor: 0, inode: 0 },
        }
    }

    /// The offset of the mapping in its file, in bytes; 0 without a file.
    pub(super) fn offset(&self) -> u64 {
        let of_file = self.mapping.object.map(|_| self.mapping.page_offset);
        of_file.unwrap_or(0).wrapping_shl(PAGE_SHIFT)
    }

    /// The last column of the line, if Linux shows one.
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

/// The name of a mapping.
#[derive(Clone, Copy)]
pub(super) enum Name {
    Known(&'static str),
    /// The path of an object, which [`Naming`] writes.
    Path(u64, NameSource),
}

/// Writes line feeds as `\012`, so that a file's name cannot forge a line.
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
