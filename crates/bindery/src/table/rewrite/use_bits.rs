//! Clears bits that record use: accessed, dirty and soft-dirty. Clearing dirty for a save, or
//! soft-dirty, also removes the write permission, so that the next store faults.

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

/// The bits that the leaves lose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UseBits {
    /// Accessed (`MADV_COLD`).
    Accessed,
    /// Accessed and dirty. Content outside memory is dropped (`MADV_FREE`).
    AccessedAndDirty,
    /// Soft-dirty and the write permission (`clear_refs`).
    SoftDirty,
    /// Dirty and the write permission, before the content is saved.
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

    /// The change for a run of absent entries that starts with `first`.
    fn change_of_absent<A: Arch>(self, first: Entry) -> Change {
        match A::decode_absent(first) {
            Some(Absent::Swap { .. } | Absent::ProtNone { .. }) if self == Self::SoftDirty => {
                Change::AbsentBits { cleared: absent::SOFT_DIRTY, set: 0 }
            }
            // The content is not in memory, and swapping it in would be more work than providing a
            // new page.
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

/// Clears use bits in `range`. `concerns` is called for each run of one folio, possibly twice, with
/// the number of the run's pages, and returns whether the run's leaves lose the bits. `single` is
/// called first, for the frames of level-1 leaves: `true` means that the leaf loses the bits, and
/// `false` leaves the decision to `concerns`. Stale ranges enter the gather. Returns the number of
/// leaves in which one of the bits was set.
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
