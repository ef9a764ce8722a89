//! Walking: all places where pages of an owner may be mapped.

use crate::Memory;
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::object::ObjectState;
use crate::platform::Platform;
use crate::space::index::Indexed;
use crate::space::vma::Vma;
use crate::table::PageTable;
#[cfg(any(test, feature = "testing"))]
use {
    super::group::Groups,
    crate::frame::{Folio, Owner},
    crate::table::ReadSection,
};

/// A stretch of an object or group, as one VMA sees it.
pub(crate) struct Sight<'a, 'm, P: Platform> {
    /// The tables in which it may be mapped.
    pub(crate) table: PageTable<'m, P>,
    /// The VMA; its bounds and offset stay as they are, its protection may change.
    pub(crate) vma: &'a Vma,
    /// Where the stretch stands there.
    pub(crate) range: VirtRange,
}

/// Calls `f` for each VMA that maps pages `first` to `first + count` of `object`, with the lock of
/// the object's list held; for parents before their children. Complexity: in the VMAs that map the object.
pub(crate) fn for_each_sight<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    first: u64,
    count: u64,
    mut f: impl FnMut(Sight<'_, 'm, P>),
) {
    object.mappers_gate.write(&memory.platform);
    for vma in object.mappers.iter() {
        show(memory, vma, first, count, &mut f);
    }
    object.mappers_gate.end_write();
}

/// What a walk for a folio of anonymous memory came to.
#[cfg(any(test, feature = "testing"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Walked {
    /// It has looked at so many VMAs.
    Visited(u64),
    /// The folio is not mapped, or is no anonymous one.
    NotMapped,
    /// The owner is being taken out of its family: the folio is busy.
    Busy,
}

/// Calls `f` for each VMA that may map pages of `folio`, with the family's gate held; for parents
/// before their children. The caller keeps the folio by a reference or a mapping, and holds its
/// lock, so that its owner stays. It holds no locks of tables, and is in no read section.
///
/// A caller that finds fewer entries than the folio has mappings takes the folio for busy: an
/// operation has detached a table and not yet counted down, or a fork has counted up and not yet
/// stored. The folio is not taken for unmapped.
///
/// How the owner is known to be a group, though nothing holds it yet:
/// 1. The walker enters a read section, and sees that the folio is mapped.
/// 2. A group goes a grace period after its VMAs' last pages were counted down, so the group that
///    the folio names lives at least until the section ends.
/// 3. The walker holds it, unless nobody does any more, and leaves the section: it waits for the
///    gate without one.
///
/// Complexity: in the VMAs of the owner and of the groups below.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn for_each_anonymous_sight<'m, P: Platform>(
    memory: &'m Memory<P>,
    folio: Folio,
    mut f: impl FnMut(Sight<'_, 'm, P>),
) -> Walked {
    let frames = &memory.frames;
    let (node, first) = {
        let _section = ReadSection::enter(&memory.platform);
        let (owner, first) = frames.owner(&memory.platform, folio);
        let Owner::Group(node) = owner else { return Walked::NotMapped };
        if frames.mappings(folio) == 0 {
            return Walked::NotMapped;
        }
        // SAFETY: the folio is mapped, so its group is freed after this section (2 above).
        if !unsafe { node.as_ref() }.try_hold() {
            return Walked::Busy;
        }
        (node, first)
    };
    // SAFETY: it is held now.
    let group = unsafe { node.as_ref() };
    let mut visited = 0;
    group.family_gate().together(&memory.platform, || {
        group.for_each_below(|group| {
            for vma in group.vmas.iter() {
                visited += 1;
                show(memory, vma, first, u64::from(folio.pages()), &mut f);
            }
        });
    });
    Groups::release(memory, node);
    Walked::Visited(visited)
}

/// Calls `f` if the VMA maps some of the pages `first` to `first + count`. It stands in a list whose
/// lock is held.
fn show<'m, P: Platform>(
    memory: &'m Memory<P>,
    vma: &Vma,
    first: u64,
    count: u64,
    f: &mut impl FnMut(Sight<'_, 'm, P>),
) {
    if let Some(range) = part_of(vma, first, count) {
        // SAFETY: the VMA stands in a list whose lock is held, and leaves it before its address
        // space is gone.
        let table = unsafe { PageTable::from_state(memory, vma.tree()) };
        f(Sight { table, vma, range });
    }
}

/// Where pages `first` to `first + count` stand in the VMA, as far as it reaches.
pub(crate) fn part_of(vma: &Vma, first: u64, count: u64) -> Option<VirtRange> {
    let offset = vma.page_offset();
    let pages = (vma.end() - vma.start()) >> PAGE_SHIFT;
    let begin = first.max(offset);
    let end = first.saturating_add(count).min(offset.saturating_add(pages));
    (begin < end).then(|| {
        let at = |page: u64| vma.start() + ((page - offset) << PAGE_SHIFT);
        VirtRange::raw(at(begin), at(end))
    })
}
