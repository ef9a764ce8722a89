//! `mprotect`: leaves get other permissions, become `PROT_NONE` entries, or become leaves again.

use crate::addr::{Frame, VirtRange};
use crate::arch::{Absent, AbsentFormat, Arch, Entry, Equal, Level, Permissions, ProtectionKey};
use crate::memory::Memory;
use crate::platform::Platform;

use super::super::edit::Edit;
use super::super::leaf::user_attributes;
use super::super::run::{Run, What};
use super::{Change, NoMemory, PageTable, ask_each_folio, rewrite};

/// The pages that may become writable immediately, if the mapping allows stores. The next store to
/// any other page faults, and the fault makes the page writable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Writable {
    /// Exclusive pages, in a mapping of private memory.
    Exclusive,
    /// All pages, in a mapping of shared memory.
    All,
    /// No pages: the first store must fault so that it is recorded.
    Noticed,
}

/// The permissions of a mapping's leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EntryPolicy {
    /// The permissions of the mapping.
    pub(crate) permissions: Permissions,
    /// The protection key of the mapping.
    pub(crate) key: ProtectionKey,
    /// The pages that may become writable immediately.
    pub(crate) writable: Writable,
    /// Whether only soft-dirty pages may become writable, because the first store to each page is
    /// watched.
    pub(crate) watched: Watched,
}

/// Whether the first store to a page is recorded by soft-dirty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Watched {
    /// Not recorded: the whole mapping counts as soft-dirty.
    No,
    /// A store to a page that is not soft-dirty must fault.
    SoftDirty,
}

/// Sets every page in `range` to the permissions of `policy`. Stale ranges enter the gather. The
/// caller excludes faults from the range.
pub(in crate::table) fn protect<P: Platform>(
    edit: &mut Edit<'_, '_, P>,
    range: VirtRange,
    policy: &EntryPolicy,
) -> Result<(), NoMemory> {
    let page_table = edit.table();
    let decide = |run: &mut Run<P::Arch>| decide(page_table, run, policy);
    rewrite(edit, range, agreement(policy), decide).map(|_| ())
}

/// The attributes in which the leaves of a run agree.
#[inline(always)]
pub(super) fn agreement(policy: &EntryPolicy) -> Equal {
    let mut equal = match policy.watched {
        Watched::No => Equal::WRITABLE,
        Watched::SoftDirty => Equal::WRITABLE | Equal::SOFT_DIRTY,
    };
    // Memory that becomes executable is synchronized folio by folio.
    equal.set(Equal::ANY_FRAMES, !policy.permissions.contains(Permissions::EXECUTE));
    equal
}

/// The change for a run, which may be shortened.
#[inline(always)]
pub(super) fn decide<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &mut Run<P::Arch>,
    policy: &EntryPolicy,
) -> Change {
    let allows = policy.permissions.intersects(Permissions::ACCESS);
    match run.what {
        What::Leaf(_) if !allows => Change::Hide,
        What::Leaf(first) => permit(page_table, run, first, policy),
        What::Absent(first) if allows => reveal(page_table.memory, run, first, policy),
        What::Absent(_) | What::Empty | What::Table(_) => Change::Keep,
    }
}

/// The change for a run of leaves that agree with `first`. Shortens the run to leaves that agree in
/// whether they may become writable.
#[inline(always)]
fn permit<P: Platform>(
    page_table: &PageTable<'_, P>,
    run: &mut Run<P::Arch>,
    first: Entry,
    policy: &EntryPolicy,
) -> Change {
    let attributes = P::Arch::attributes(first);
    let noticed =
        attributes.userfault || policy.watched == Watched::SoftDirty && !attributes.soft_dirty;
    let mut allowed = policy.permissions;
    if allowed.contains(Permissions::WRITE) {
        let writable = !noticed
            && match policy.writable {
                Writable::Exclusive if run.node.level == Level::PTE => {
                    are_exclusive(page_table, run)
                }
                Writable::Exclusive | Writable::All | Writable::Noticed => {
                    is_writable(page_table.memory, run, P::Arch::frame(first), policy)
                }
            };
        allowed.set(Permissions::WRITE, writable);
    }
    Change::Permit(user_attributes(allowed, policy.key))
}

/// The change for a run of absent entries. Only `PROT_NONE` entries become leaves. Shortens the run
/// as [`permit`] does.
#[inline(always)]
fn reveal<P: Platform>(
    memory: &Memory<P>,
    run: &mut Run<P::Arch>,
    first: Entry,
    policy: &EntryPolicy,
) -> Change {
    let Some(Absent::ProtNone { frame, userfault, .. }) = P::Arch::decode_absent(first) else {
        return Change::Keep;
    };
    // Soft-dirty may differ within the run, so a page whose stores are watched becomes writable
    // only at the store.
    let writable = is_writable(memory, run, frame, policy)
        && !userfault
        && policy.watched == Watched::No
        && policy.permissions.contains(Permissions::WRITE);
    let mut allowed = policy.permissions;
    allowed.set(Permissions::WRITE, writable);
    Change::Reveal(user_attributes(allowed, policy.key))
}

/// Whether the pages of the run, from the frame `first` on, may become writable. Shortens the run
/// to the pages with the same answer. Zero pages have no owner.
#[inline(always)]
fn is_writable<P: Platform>(
    memory: &Memory<P>,
    run: &mut Run<P::Arch>,
    first: Frame,
    policy: &EntryPolicy,
) -> bool {
    match policy.writable {
        Writable::Exclusive => {}
        Writable::All => return true,
        Writable::Noticed => return false,
    }
    let Some(folio) = memory.frames.folio_of(first) else { return false };
    let pages = run.pages();
    let found = memory.frames.folio(folio).exclusive().run(first.0 - folio.head.0, pages);
    if run.node.level > Level::PTE {
        // A leaf cannot be writable in part, so the whole leaf must be exclusive.
        return found.exclusive && found.count == pages;
    }
    run.count = found.count;
    found.exclusive
}

/// Whether the pages of the run of level-1 leaves are exclusive. Shortens the run to the pages with
/// the same answer. Zero pages have no owner.
#[inline(always)]
fn are_exclusive<P: Platform>(page_table: &PageTable<'_, P>, run: &mut Run<P::Arch>) -> bool {
    let frames = &page_table.memory.frames;
    ask_each_folio(page_table, run, |part| match part.folio {
        None => (false, part.count),
        Some(folio) => {
            let number = part.first.0 - folio.head.0;
            let found = frames.folio(folio).exclusive().run(number, part.count);
            (found.exclusive, found.count.max(1))
        }
    })
}
