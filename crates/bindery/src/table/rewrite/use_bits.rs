//! Bits that record use are cleared: accessed, dirty, soft-dirty, and with the last two the
//! permission to write, so that the next store faults.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, VirtRange};
use crate::arch::{
    self, Absent, AbsentFormat, Arch, Attributes, Entry, EntryIndex, Equal, Level, Marker, absent,
};
use crate::folio::Folio;
use crate::platform::Platform;

use super::super::PageTable;
use super::super::edit::Edit;
use super::super::run::{Run, What};
use super::{Change, FolioPart, NoMemory, ask_each_folio, rewrite};

/// The bits that leaves lose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UseBits {
    /// Accessed (`MADV_COLD`).
    Accessed,
    /// Accessed and dirty. Content that is not in memory is dropped (`MADV_FREE`).
    AccessedAndDirty,
    /// Soft-dirty, and the permission to write (`clear_refs`).
    SoftDirty,
    /// Dirty, and the permission to write: before the content is saved.
    Dirty,
}

impl UseBits {
    /// The attributes without these bits.
    #[inline]
    pub(super) fn cleared_from(self, old: Attributes) -> Attributes {
        let mut new = old;
        match self {
            Self::Accessed => new.accessed = false,
            Self::AccessedAndDirty => (new.accessed, new.dirty) = (false, false),
            Self::SoftDirty => {
                new.soft_dirty = false;
                new.permissions -= arch::Permissions::WRITE;
            }
            Self::Dirty => {
                new.dirty = false;
                new.permissions -= arch::Permissions::WRITE;
            }
        }
        new
    }

    /// The change of a run of absent entries that begins with `first`.
    fn change_of_absent<A: Arch>(self, first: Entry) -> Change {
        match A::decode_absent(first) {
            Some(Absent::Swap { .. } | Absent::ProtNone { .. }) if self == Self::SoftDirty => {
                Change::AbsentBits { cleared: absent::SOFT_DIRTY, set: 0 }
            }
            // The content is not in memory: swapping it in is more work than a new page.
            Some(Absent::Swap { .. } | Absent::Marker(Marker::Poison))
                if self == Self::AccessedAndDirty =>
            {
                Change::Release
            }
            Some(Absent::Swap { .. } | Absent::ProtNone { .. } | Absent::Marker(_)) | None => {
                Change::Keep
            }
        }
    }
}

/// Clears bits of use in `range`. `concerns` is asked about each run of one folio, with the number
/// of its pages, perhaps twice, and says whether its leaves lose them. `single` is asked first
/// about the frames of level-1 leaves: `true` if the leaf loses them, `false` leaves it to
/// `concerns`. Stale ranges are in the gather. Returns how many leaves had such a bit.
#[inline]
pub(in crate::table) fn clear_use<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    bits: UseBits,
    single: impl Fn(Frame) -> bool,
    mut concerns: impl FnMut(Option<Folio>, u32) -> bool,
) -> Result<u64, NoMemory> {
    let page_table = edit.table();
    rewrite(edit, range, Equal::ANY_FRAMES, |run| match run.what {
        What::Leaf(first) => {
            let concerned = if run.node.level == Level::PTE {
                let singles = leading_singles(page_table, run, &single);
                if singles > 0 {
                    run.count = singles;
                    return Change::ClearUse(bits);
                }
                let ask = |part: &FolioPart| (concerns(part.folio, part.count), part.count);
                ask_each_folio(page_table, run, ask)
            } else {
                let folio = page_table.memory.frames.folio_of(P::Arch::frame(first));
                concerns(folio, run.pages())
            };
            if concerned { Change::ClearUse(bits) } else { Change::Keep }
        }
        What::Absent(first) => bits.change_of_absent::<P::Arch>(first),
        What::Empty | What::Table(_) => Change::Keep,
    })
}

/// The number of leaves at the front of a run of level-1 leaves for which `single` is true.
#[inline(always)]
fn leading_singles<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &Run<P::Arch>,
    single: &impl Fn(Frame) -> bool,
) -> u32 {
    let indexes = run.index.stretch(run.count);
    let leaves = page_table.entries_of(run).iter().zip(indexes);
    let is_single = |(slot, index): &(&AtomicU64, EntryIndex)| {
        let leaf = P::Arch::clear_contig(Entry(slot.load(Ordering::Relaxed)), *index);
        single(P::Arch::frame(leaf))
    };
    leaves.take_while(is_single).count() as u32
}
