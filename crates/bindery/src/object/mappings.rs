//! Updates of an object's mappings when its pages are dropped or saved.

use crate::Memory;
use crate::addr::{PAGE_SHIFT, PageRange, VirtRange};
use crate::arch::Arch;
use crate::platform::Platform;
use crate::rmap::{HOLD, WalkLocking, WalkProgress, for_each_sight};
use crate::table::rewrite::use_bits::UseBits;
use crate::table::zap_except::{Exceptions, Spared};
use crate::vma::MappingFlags;

use super::ObjectState;
use super::invalidate::PagesMayGo;

/// The maximum number of tables that one part of a walk detaches from a VMA.
const TABLES: u64 = 512;

/// The treatment of the copies that private mappings have made of pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MappingCopies {
    /// The copies are dropped too: the object no longer has these pages.
    Dropped,
    /// The copies stay with the program.
    Kept,
}

/// Unmaps the pages everywhere. Guard pages stay, as on Linux.
pub(super) fn unmap<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    pages: PageRange,
    copies: MappingCopies,
    _: &PagesMayGo,
) {
    let walked = for_each_sight(memory, object, &[pages], WalkLocking::Wait, |sight, edit| {
        let private = !sight.vma.is_shared();
        let spared = match copies {
            MappingCopies::Kept if private => Spared::GuardsAndCopies,
            MappingCopies::Kept | MappingCopies::Dropped => Spared::Guards,
        };
        let guards = sight.vma.has(MappingFlags::MAYBE_GUARDS);
        let except = Exceptions { spared, protected: sight.vma.dropped_protection() };
        let piece = if except.allow_whole_tables(&sight.page_table) && !guards {
            TABLES << P::Arch::PMD.span().ilog2()
        } else {
            // Each entry is read.
            HOLD << PAGE_SHIFT
        };
        let Some(part) = sight.page_table.first_part(sight.range, piece, None) else {
            return WalkProgress { until: sight.range.end(), entries: 0 };
        };
        let zapped = edit.zap_sparing(part, except);
        // A huge leaf without its deposit is a broken invariant, which the auditor reports.
        debug_assert!(zapped.is_ok(), "a huge leaf has lost its deposit");
        WalkProgress { until: part.end(), entries: part.pages().min(HOLD) }
    });
    debug_assert!(walked.is_ok(), "it waits for locks");
}

/// Write-protects the pages of `ranges`, which are in ascending order without overlaps, in all
/// mappings, and flushes every TLB.
///
/// Complexity: one walk, as [`for_each_sight`], plus the entries of the pages.
pub(super) fn write_protect<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    ranges: &[PageRange],
    _: &PagesMayGo,
) {
    let walked = for_each_sight(memory, object, ranges, WalkLocking::Wait, |sight, edit| {
        if !sight.vma.is_shared() {
            return WalkProgress { until: sight.range.end(), entries: 0 };
        }
        let pages = sight.range.pages().min(HOLD);
        let end = sight.range.start().0 + (pages << PAGE_SHIFT);
        let part = VirtRange::raw(sight.range.start().0, end);
        let done = edit.clear_use(part, UseBits::Dirty, |_, _| true);
        debug_assert!(done.is_ok(), "a huge leaf has lost its deposit");
        WalkProgress { until: part.end(), entries: pages }
    });
    debug_assert!(walked.is_ok(), "it waits for locks");
}
