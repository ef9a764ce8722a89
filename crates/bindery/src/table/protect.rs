//! `mprotect` on entries: rewrites runs in place, and turns them into `PROT_NONE` entries and back.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Frame, VirtRange};
use crate::arch::{
    Absent, AbsentFormat, Arch, Attributes, Entry, EntryIndex, Equal, Level, Permissions,
    ProtectionKey, Write,
};
use crate::platform::Platform;
use crate::tlb::Gather;

use super::cursor::{Chunks, Cursor};
use super::leaf::user_attributes;
use super::locking::Depth;
use super::run::{self, Run, Slots, What};
use super::{NoMemory, PageTable};

/// Which pages may become writable at once, where the mapping allows stores. The others do so with
/// the next store, which faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Writable {
    /// Those that nobody else maps: private memory.
    Exclusive,
    /// All: shared memory.
    All,
    /// None: the first store has to be noticed.
    Noticed,
}

/// What the leaves of a mapping say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EntryPolicy {
    /// What the mapping allows.
    pub(crate) permissions: Permissions,
    /// Its protection key.
    pub(crate) key: ProtectionKey,
    /// Which pages may become writable at once.
    pub(crate) writable: Writable,
    /// Whether only pages that are soft-dirty may: somebody watches for the first store to each.
    pub(crate) watched: Watched,
}

/// Whether soft-dirty is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Watched {
    /// All of the mapping counts as soft-dirty anyway.
    No,
    /// A store to a page that is not soft-dirty has to be noticed.
    SoftDirty,
}

impl<P: Platform> PageTable<'_, P> {
    /// Gives every page in `range` the permissions of `policy`. What is stale afterwards is in the
    /// gather. The caller keeps faults out of the range.
    pub(crate) fn protect(
        &self,
        range: VirtRange,
        policy: &EntryPolicy,
        gather: &mut Gather,
    ) -> Result<(), NoMemory> {
        let mut chunks = Chunks::of(range);
        while let Some(mut cursor) = chunks.next(self, Depth::Floor(Level::PTE), Some(&*gather)) {
            protect_locked(&mut cursor, policy, gather)?;
        }
        Ok(())
    }
}

fn protect_locked<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    policy: &EntryPolicy,
    gather: &mut Gather,
) -> Result<(), NoMemory> {
    let equal = match policy.watched {
        Watched::No => Equal::WRITABLE,
        Watched::SoftDirty => Equal::WRITABLE | Equal::SOFT_DIRTY,
    };
    let allows = policy.permissions.intersects(Permissions::ACCESS);
    while let Some(run) = cursor.next_run(equal)? {
        match run.what {
            What::Empty | What::Table(_) => {}
            What::Leaf(_) if !allows => make_prot_none(cursor, &run, gather),
            What::Leaf(first) => protect_leaves(cursor, run, first, policy, gather),
            What::Absent(_) if allows => restore_leaves(cursor, &run, policy),
            What::Absent(_) => {}
        }
    }
    Ok(())
}

/// Entries of a run, from the first on.
struct WritablePart {
    /// Whether they may become writable.
    writable: bool,
    count: u32,
}

/// How many of the run's entries, from the first on, are alike in whether they may become writable,
/// and whether they may. Zero pages have no owner.
fn writable_part<P: Platform>(
    cursor: &Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    first: Frame,
    policy: &EntryPolicy,
) -> WritablePart {
    let memory = cursor.page_table.memory;
    let whole = |writable| WritablePart { writable, count: run.count };
    match policy.writable {
        Writable::Exclusive => {}
        Writable::All => return whole(true),
        Writable::Noticed => return whole(false),
    }
    let Some(folio) = memory.frames.folio_of(first) else { return whole(false) };
    let pages = run.pages();
    let found = memory.frames.exclusive_run(folio, first.0 - folio.head.0, pages);
    if run.node.level > Level::PTE {
        // One leaf cannot be writable in part: it is writable where all of it is exclusive.
        return whole(found.exclusive && found.count == pages);
    }
    WritablePart { writable: found.exclusive, count: found.count }
}

/// Rewrites the leaves of `run`, in parts of equal exclusivity where that matters.
fn protect_leaves<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    mut run: Run<P::Arch>,
    mut first: Entry,
    policy: &EntryPolicy,
    gather: &mut Gather,
) {
    loop {
        let attributes = P::Arch::attributes(first);
        let noticed =
            attributes.userfault || policy.watched == Watched::SoftDirty && !attributes.soft_dirty;
        let WritablePart { writable, count: alike } =
            if policy.permissions.contains(Permissions::WRITE) && !noticed {
                writable_part(cursor, &run, P::Arch::frame(first), policy)
            } else {
                WritablePart { writable: false, count: run.count }
            };
        let mut allowed = policy.permissions;
        allowed.set(Permissions::WRITE, writable);
        let part = Run { count: alike, ..run };
        rewrite(cursor, &part, first, user_attributes(allowed, policy.key), gather);
        if alike == run.count {
            return;
        }
        first = Entry(first.0.wrapping_add(P::Arch::STEP.wrapping_mul(u64::from(alike))));
        run = run.rest(alike);
    }
}

/// Gives the leaves of `run`, which agree with `first`, the permissions and the key of `new`. What
/// is stale afterwards is in the gather.
fn rewrite<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    first: Entry,
    new: Attributes,
    gather: &mut Gather,
) {
    let frame = P::Arch::frame(first);
    let old = P::Arch::attributes(first);
    // What an architecture cannot express is implied, so compare what the entries say.
    let template = |Attributes { permissions, key, .. }: Attributes| {
        let attributes = Attributes { permissions, key, ..Attributes::default() };
        P::Arch::page_entry(frame, run.node.level, attributes)
    };
    let (before, after) = (template(old), template(new));
    if before == after {
        return;
    }
    // Those that were executable before were synchronized then.
    cursor.page_table.memory.before_execution_of(new.permissions - old.permissions, frame);
    let writable = new.permissions.contains(Permissions::WRITE);
    let difference = P::Arch::write_protect(before).0 ^ P::Arch::write_protect(after).0;
    let change = |entry: Entry| {
        let entry = Entry(entry.0 ^ difference);
        if writable {
            P::Arch::make_writable(entry, Write::Later)
        } else {
            P::Arch::write_protect(entry)
        }
    };
    if P::Arch::CONTIG_ENTRIES > 1 && run.node.level == Level::PTE {
        // A part may cut contiguous runs that the run did not.
        cursor.unfold_edges(run);
    }
    // Entries of a contiguous run must agree in all but accessed and dirty, so the contiguous run
    // is broken first. Losing only the permission to write is safe in place: until the flush either
    // answer is right.
    if (difference != 0 || writable) && has_contig(cursor, run) {
        break_and_make(cursor, run, change);
        return;
    }
    let narrower = is_narrower::<P::Arch>(before, after);
    if narrower {
        cursor.page_table.mark_pending(run.node.table, gather, &mut cursor.counts);
    }
    rewrite_in_place(cursor, run, change);
    if narrower {
        gather.stale(run.range(), run.node.level);
    } else {
        // Entries only allow more: a TLB that remembers less raises a fault, which looks again.
        cursor.counts.invalidations_saved += 1;
    }
}

/// Whether an entry of `run` is in a contiguous run.
fn has_contig<P: Platform>(cursor: &Cursor<'_, '_, P>, run: &Run<P::Arch>) -> bool {
    let is_contig = |slot: &AtomicU64| P::Arch::is_contig(Entry(slot.load(Ordering::Relaxed)));
    run.node.level == Level::PTE && cursor.page_table.slots_of(run).iter().any(is_contig)
}

/// Whether `new` refuses an access that `old` allows, so that a TLB must forget `old`. A key change
/// counts as narrowing: each thread has its own rights. So does gaining or losing BTI.
fn is_narrower<A: Arch>(old: Entry, new: Entry) -> bool {
    let (old, new) = (A::attributes(old), A::attributes(new));
    let gains_bti = A::BTI && (new.permissions - old.permissions).contains(Permissions::BTI);
    !new.permissions.contains(old.permissions) || new.key != old.key || gains_bti
}

/// Applies `change` to each entry of `run`, which stays valid throughout.
fn rewrite_in_place<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    change: impl Fn(Entry) -> Entry,
) {
    let page_table = cursor.page_table;
    for slot in page_table.slots_of(run) {
        let entry = Entry(slot.load(Ordering::Relaxed));
        debug_assert!(
            !P::Arch::needs_break(entry, change(entry), run.node.level),
            "a change in place that the architecture wants broken first"
        );
        P::Arch::replace_entry(slot, entry, &change);
    }
    cursor.counts.entries_read += u64::from(run.count);
    cursor.counts.entries_written += u64::from(run.count);
}

/// Clears the run, invalidates it, and writes what `change` makes of each entry.
fn break_and_make<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    change: impl Fn(Entry) -> Entry,
) {
    let page_table = cursor.page_table;
    let entries = page_table.slots_of(run);
    // Suspended: without the valid bit the MMU sees nothing, and the entry remembers the rest.
    for slot in entries {
        slot.fetch_and(!P::Arch::PRESENT, Ordering::Relaxed);
    }
    page_table.invalidate_now(run.range(), Level::PTE, &mut cursor.counts);
    for slot in entries {
        let entry = Entry(slot.load(Ordering::Relaxed) | P::Arch::PRESENT);
        slot.store(change(entry).0, Ordering::Relaxed);
    }
    cursor.counts.entries_read += 2 * u64::from(run.count);
    cursor.counts.entries_written += 2 * u64::from(run.count);
}

/// Makes `PROT_NONE` leaves of the run.
fn make_prot_none<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    gather: &mut Gather,
) {
    let page_table = cursor.page_table;
    let slots = page_table.slots(run.node.table);
    page_table.mark_pending(run.node.table, gather, &mut cursor.counts);
    let mut gathered = None;
    for index in run.index.stretch(run.count) {
        let slot = &slots[index.slot()];
        let raw = Entry(slot.load(Ordering::Relaxed));
        if run.node.level > Level::PTE {
            P::Arch::replace_entry(slot, raw, prot_none::<P::Arch>);
            continue;
        }
        if P::Arch::is_contig(raw) && index.offset_in(P::Arch::CONTIG_ENTRIES) == 0 {
            gathered = Some(suspend_contig::<P::Arch>(slots, index));
        } else if !P::Arch::is_contig(raw) {
            gathered = None;
        }
        P::Arch::replace_entry(slot, Entry(slot.load(Ordering::Relaxed)), |entry| {
            let entry = Entry(entry.0 | P::Arch::PRESENT);
            let entry = P::Arch::clear_contig(entry, index);
            prot_none::<P::Arch>(gathered.map_or(entry, |all| P::Arch::gather(entry, all)))
        });
    }
    cursor.counts.entries_read += u64::from(run.count);
    cursor.counts.entries_written += u64::from(run.count);
    gather.stale(run.range(), run.node.level);
}

/// Takes the valid bit from all entries of a contiguous run, and only then gathers accessed and
/// dirty: while one entry is valid, the MMU may set them there for any page of the contiguous run.
fn suspend_contig<A: Arch>(slots: &[AtomicU64], index: EntryIndex) -> Entry {
    for slot in &slots[index.slots(A::CONTIG_ENTRIES)] {
        slot.fetch_and(!A::PRESENT, Ordering::Relaxed);
    }
    A::match_leaves(slots, index, A::CONTIG_ENTRIES, Equal::empty(), A::STEP, A::PRESENT).1
}

/// The `PROT_NONE` form of a leaf without it.
fn prot_none<A: Arch>(leaf: Entry) -> Entry {
    A::encode_prot_none(A::frame(leaf), A::attributes(leaf))
}

/// Makes leaves of the run's `PROT_NONE` ones, and contiguous runs where alignment allows; other
/// absent entries stay as they are. Nothing has to be broken: what was `PROT_NONE` is in no TLB.
fn restore_leaves<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    policy: &EntryPolicy,
) {
    let mut run = *run;
    while run.count > 0 {
        let slots = cursor.page_table.slots(run.node.table);
        let prot_none = P::Arch::decode_absent(run::load(slots, run.index));
        let Some(Absent::ProtNone { frame, userfault, .. }) = prot_none else { return };
        let WritablePart { writable, count: alike } = writable_part(cursor, &run, frame, policy);
        // Soft-dirty may differ within the run, so who watches it waits for the store.
        let writable = writable && !userfault && policy.watched == Watched::No;
        let mut restored = user_attributes(policy.permissions, policy.key);
        restored
            .permissions
            .set(Permissions::WRITE, writable && policy.permissions.contains(Permissions::WRITE));
        cursor.page_table.memory.before_execution_of(restored.permissions, frame);
        restore_part(cursor, &run, alike, restored);
        run = run.rest(alike);
    }
}

fn restore_part<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    count: u32,
    restored: Attributes,
) {
    let slots = cursor.page_table.slots(run.node.table);
    let level = run.node.level;
    let end = run.index + count;
    let mut contig_end = EntryIndex::FIRST;
    for index in run.index.stretch(count) {
        let slot = &slots[index.slot()];
        let entry = Entry(slot.load(Ordering::Relaxed));
        let Some(Absent::ProtNone { frame, accessed, dirty, soft_dirty, userfault }) =
            P::Arch::decode_absent(entry)
        else {
            continue;
        };
        let attributes = Attributes { accessed, dirty, soft_dirty, userfault, ..restored };
        let leaf = P::Arch::page_entry(frame, level, attributes);
        if level == Level::PTE
            && P::Arch::may_fold(leaf, index)
            && end - index >= P::Arch::CONTIG_ENTRIES
        {
            contig_end = index + P::Arch::CONTIG_ENTRIES;
        }
        let leaf = if index < contig_end { P::Arch::set_contig(leaf, index) } else { leaf };
        slot.store(leaf.0, Ordering::Relaxed);
    }
    cursor.counts.entries_read += u64::from(count);
    cursor.counts.entries_written += u64::from(count);
}
