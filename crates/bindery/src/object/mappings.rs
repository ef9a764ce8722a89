//! What happens to the mappings of an object when its pages go or are saved.

use crate::Memory;
use crate::platform::Platform;
use crate::rmap::for_each_sight;
use crate::table::age::Forget;
use crate::table::spare::Spared;
use crate::tlb::Gather;

use super::ObjectState;

/// What becomes of the copies that private mappings have made of pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Copies {
    /// They go too: the object has no such pages any more.
    Dropped,
    /// They stay the program's own.
    Kept,
}

/// Unmaps `count` pages from `first` on everywhere. The object's gate is held for writing. Guards
/// stay, as on Linux.
pub(super) fn unmap<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    count: u64,
    copies: Copies,
) {
    for_each_sight(memory, object, first, count, |sight| {
        let mut gather = Gather::new();
        let private = !sight.vma.is_shared();
        let spared = match copies {
            Copies::Kept if private => Spared::GuardsAndCopies,
            _ => Spared::Guards,
        };
        let zapped = sight.table.zap_sparing(sight.range, spared, &mut gather);
        // A huge leaf without its reserve is a broken invariant, which the auditor reports.
        debug_assert!(zapped.is_ok(), "a huge leaf has lost its reserve");
        sight.table.finish(&mut gather);
    });
}

/// Takes the permission to write `count` pages from `first` on from all mappings, and makes every
/// TLB forget it. The object's gate is held for writing.
pub(super) fn write_protect<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    count: u64,
) {
    for_each_sight(memory, object, first, count, |sight| {
        if !sight.vma.is_shared() {
            return;
        }
        let mut gather = Gather::new();
        let done = sight.table.forget(sight.range, Forget::Dirty, &mut gather, |_, _| true);
        debug_assert!(done.is_ok(), "a huge leaf has lost its reserve");
        sight.table.finish(&mut gather);
    });
}
