//! Changes of leaves, and of absent entries that stay absent or become leaves, run by run.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::Permissions;
use crate::arch::{
    Absent, AbsentFormat, Arch, Attributes, Entry, EntryIndex, Level, Write, absent,
};
use crate::memory::before_execution_of;
use crate::platform::Platform;

use super::super::cursor::Cursor;
use super::super::narrowing::is_narrower;
use super::super::run::{Run, What};
use super::super::span::Span;
use super::use_bits::UseBits;

/// Clears bits that record the use of a run's leaves. Returns the number of leaves in which one of
/// the bits was set.
#[inline(always)]
pub(super) fn clear_use<P: Platform>(
    span: &mut Span<'_, '_, P>,
    run: &Run<P::Arch>,
    bits: UseBits,
) -> u64 {
    let level = run.node.level;
    match bits {
        // The most frequent change, which affects every folio that reclaim examines: one bit,
        // wherever the leaf is.
        UseBits::Accessed => narrow_changed(span, run, |raw, _| P::Arch::mark_unused(raw)),
        UseBits::AccessedAndDirty => {
            narrow_changed(span, run, |raw, _| P::Arch::mark_clean(P::Arch::mark_unused(raw)))
        }
        UseBits::SoftDirty | UseBits::Dirty => narrow_changed(span, run, |raw, index| {
            let contig = level == Level::PTE && P::Arch::is_contig(raw);
            let leaf = if level == Level::PTE { P::Arch::clear_contig(raw, index) } else { raw };
            let attributes = bits.cleared_from(P::Arch::attributes(leaf));
            let leaf = P::Arch::page_entry(P::Arch::frame(leaf), level, attributes);
            if contig { P::Arch::set_contig(leaf, index) } else { leaf }
        }),
    }
}

/// Narrows the leaves of a run that `change` alters, based on their values in memory. Returns the
/// number of altered leaves.
#[inline(always)]
fn narrow_changed<P: Platform>(
    span: &mut Span<'_, '_, P>,
    run: &Run<P::Arch>,
    change: impl Fn(Entry, EntryIndex) -> Entry,
) -> u64 {
    let entries = span.page_table.entries_of(run);
    let mut narrowing = span.narrow_some(run);
    for ((number, word), index) in entries.iter().enumerate().zip(run.index.stretch(run.count)) {
        let raw = Entry(word.load(Ordering::Relaxed));
        if change(raw, index) != raw {
            narrowing.replace(number, raw, |raw| change(raw, index));
        }
    }
    let narrowed = u64::from(narrowing.narrowed());
    span.counts.entries_read += u64::from(run.count);
    span.counts.entries_written += narrowed;
    narrowed
}

/// Clears the accessed bits of a run of leaves or of `PROT_NONE` entries.
pub(in crate::table) fn clear_accessed<P: Platform>(
    span: &mut Span<'_, '_, P>,
    run: &Run<P::Arch>,
) {
    match run.what {
        What::Leaf(_) => _ = clear_use(span, run, UseBits::Accessed),
        What::Absent(first) if P::Arch::is_prot_none(first) => {
            change_absent_bits(span, run, absent::ACCESSED, 0);
        }
        What::Absent(_) | What::Empty | What::Table(_) => {}
    }
}

/// Sets the leaves of `run`, which agree with `first`, to the permissions and the key of `new`.
/// Stale ranges enter the gather.
#[inline(always)]
pub(super) fn permit<P: Platform>(
    span: &mut Span<'_, '_, P>,
    run: &Run<P::Arch>,
    first: Entry,
    new: Attributes,
) {
    let frame = P::Arch::frame(first);
    let old = P::Arch::attributes(first);
    // An architecture may imply permissions that it cannot express, so the comparison is between
    // entries.
    let template = |Attributes { permissions, key, .. }: Attributes| {
        let attributes = Attributes { permissions, key, ..Attributes::default() };
        P::Arch::page_entry(frame, run.node.level, attributes)
    };
    let (before, after) = (template(old), template(new));
    if before == after {
        return;
    }
    // Memory that was already executable was synchronized at that time.
    before_execution_of(span.page_table.memory, new.permissions - old.permissions, frame);
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
        // A part may divide contiguous runs that the run did not divide.
        span.unfold_edges(run);
    }
    // Entries of a contiguous run must agree in all bits except accessed and dirty, so the
    // contiguous run is broken first. Removing only the write permission is safe in place: until
    // the flush, either answer is correct.
    if (difference != 0 || writable) && has_contig(span, run) {
        span.break_run(run).make(change);
    } else if is_narrower::<P::Arch>(before, after) {
        span.narrow(run).replace_each(change);
    } else {
        span.widen(run).replace_each(change);
        span.counts.invalidations_saved += 1;
    }
    span.counts.entries_read += u64::from(run.count);
    span.counts.entries_written += u64::from(run.count);
}

/// Whether an entry of `run` belongs to a contiguous run.
#[inline]
fn has_contig<P: Platform>(cursor: &Cursor<'_, '_, P>, run: &Run<P::Arch>) -> bool {
    let is_contig = |word: &AtomicU64| P::Arch::is_contig(Entry(word.load(Ordering::Relaxed)));
    run.node.level == Level::PTE && cursor.page_table.entries_of(run).iter().any(is_contig)
}

/// Turns the run's leaves into `PROT_NONE` entries.
#[inline(always)]
pub(super) fn hide<P: Platform>(span: &mut Span<'_, '_, P>, run: &Run<P::Arch>) {
    let prot_none =
        |leaf| P::Arch::encode_prot_none(P::Arch::frame(leaf), P::Arch::attributes(leaf));
    let entries = span.page_table.entries_of(run);
    let narrowing = span.narrow(run);
    let mut gathered = None;
    for (number, index) in run.index.stretch(run.count).enumerate() {
        let load = || Entry(entries[number].load(Ordering::Relaxed));
        let raw = load();
        if run.node.level > Level::PTE {
            narrowing.replace(number, raw, prot_none);
            continue;
        }
        if P::Arch::is_contig(raw) && index.offset_in(P::Arch::CONTIG_ENTRIES) == 0 {
            gathered = Some(narrowing.suspend_contig(number));
        } else if !P::Arch::is_contig(raw) {
            gathered = None;
        }
        narrowing.replace(number, load(), |entry| {
            let entry = Entry(entry.0 | P::Arch::PRESENT);
            let entry = P::Arch::clear_contig(entry, index);
            prot_none(gathered.map_or(entry, |all| P::Arch::gather(entry, all)))
        });
    }
    span.counts.entries_read += u64::from(run.count);
    span.counts.entries_written += u64::from(run.count);
}

/// Turns the run's `PROT_NONE` entries into leaves, in contiguous runs where alignment allows. No
/// break is needed, because no TLB holds a `PROT_NONE` entry.
#[inline(always)]
pub(super) fn reveal<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    first: Entry,
    new: Attributes,
) {
    if let Some(Absent::ProtNone { frame, .. }) = P::Arch::decode_absent(first) {
        before_execution_of(cursor.page_table.memory, new.permissions, frame);
    }
    let level = run.node.level;
    let end = run.index + run.count;
    let mut contig_end = EntryIndex::FIRST;
    cursor.widen(run).replace_absent(|entry, index| {
        let Some(Absent::ProtNone { frame, accessed, dirty, soft_dirty, userfault, memory }) =
            P::Arch::decode_absent(entry)
        else {
            return entry;
        };
        let attributes = Attributes { accessed, dirty, soft_dirty, userfault, memory, ..new };
        let leaf = P::Arch::page_entry(frame, level, attributes);
        if level == Level::PTE
            && P::Arch::may_fold(leaf, index)
            && end - index >= P::Arch::CONTIG_ENTRIES
        {
            contig_end = index + P::Arch::CONTIG_ENTRIES;
        }
        if index < contig_end { P::Arch::set_contig(leaf, index) } else { leaf }
    });
    cursor.counts.entries_read += u64::from(run.count);
    cursor.counts.entries_written += u64::from(run.count);
}

/// Removes the write permission and sets the userfault bit. The change is made in place: until the
/// flush, either answer is correct, and the MMU ignores the bit.
#[inline(always)]
pub(super) fn write_protect<P: Platform>(span: &mut Span<'_, '_, P>, run: &Run<P::Arch>) {
    span.narrow(run)
        .replace_each(|entry| Entry(P::Arch::write_protect(entry).0 | P::Arch::USERFAULT));
    span.counts.entries_read += u64::from(run.count);
    span.counts.entries_written += u64::from(run.count);
}

/// Clears the userfault bit of leaves, which stay write-protected.
#[inline(always)]
pub(super) fn lift_write_protect<P: Platform>(cursor: &mut Cursor<'_, '_, P>, run: &Run<P::Arch>) {
    cursor.widen(run).replace_each(|entry| Entry(entry.0 & !P::Arch::USERFAULT));
    cursor.counts.entries_read += u64::from(run.count);
    cursor.counts.entries_written += u64::from(run.count);
}

/// Clears and sets bits of absent entries, which are read only by software.
#[inline(always)]
pub(super) fn change_absent_bits<P: Platform>(
    cursor: &mut Cursor<'_, '_, P>,
    run: &Run<P::Arch>,
    cleared: u64,
    set: u64,
) {
    cursor.widen(run).replace_absent(|entry, _| Entry(entry.0 & !cleared | set));
    cursor.counts.entries_written += u64::from(run.count);
}
