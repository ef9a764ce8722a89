//! Writes to read-only pages that no other process maps: the entries become writable in place.
//!
//! After a fork, both processes have read-only entries. Once one of them has exited or has its own
//! copies, the pages of the other process are exclusive again, and the next write to each page
//! discovers this.
//!
//! # Pages ahead
//! A program that writes page by page would fault once per page. A fault therefore also checks the
//! base pages after its own, up to the number of entries before it that are already writable, and
//! at most [`MOST_AHEAD`]. The first page of a sequence is handled by itself, then 1, 2, 4 and more
//! in one fault; a write to a single page has no extra cost. Each page ahead is checked separately,
//! under the same table lock. Its entry becomes writable but stays clean, since only a later write
//! makes it dirty.
//!
//! A huge leaf becomes writable as a whole, under the single lock of its table. So do the
//! contiguous runs of a folio, whose entries must never differ: they are broken first, with one
//! flush.
//!
//! # Excluded
//! An entry whose first write must be recorded stays read-only: every entry in a VMA that has a
//! userfaultfd or that soft-dirty watches, and each entry with the bit of a userfaultfd. The entry
//! of a folio with a reference or a pin also stays read-only, which includes folios in the swap
//! cache. Such a fault takes the slow path.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{Order, PAGE_SHIFT, VirtRange};
use crate::arch::{Arch, Entry, EntryIndex, Equal, Kind, Level, Permissions, Write};
use crate::folio::{Folio, OwnerMark};
use crate::memory::Memory;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::stats::Counts;
use crate::table::publish::flush_local;
use crate::table::run::Entries;
use crate::table::{EntryAt, LeafTable, ReadSection, run};
use crate::vma::{MappingFlags, Vma};

use super::copy_on_write::folio_range;
use super::slow::Fault;
use super::{Access, Resolved};

/// The maximum number of base pages that one fault makes writable ahead of their writes.
const MOST_AHEAD: usize = 64;

impl<P: Platform> Fault<'_, '_, P> {
    /// Makes the page writable, together with pages ahead, if a leaf in the table `found` maps the
    /// page read-only and this process has all mappings of its folio. `None`, without a change, in
    /// any other case. The VMA is private and writable. The table was found in this read section.
    #[inline(never)]
    pub(super) fn reuse_in_place(
        &self,
        section: &ReadSection<'_, P>,
        found: &LeafTable<'_>,
    ) -> Option<Resolved> {
        if !is_reusable(self.vma) {
            return None;
        }
        let (memory, page_table) = (self.memory(), self.page_table());
        let index = P::Arch::PTE.index_of(self.page);
        let words = page_table.entries(found.table);
        // Checked without the lock, so that the other case, copy-on-write, pays for no lock here.
        let entry = leaf::<P::Arch>(words, index);
        reusable_folio(memory, entry, Level::PTE)?;
        if !page_table.try_lock_leaf_table(section, self.page, found) {
            return None;
        }
        let mut counts = Counts {
            entries_descended: u64::from(P::Arch::LEVELS) - 1,
            tables_locked: 1,
            ..Counts::default()
        };
        let is_contig = P::Arch::is_contig(run::load(words, index));
        let written = if is_contig {
            reuse_contig_locked(self, words, index, &mut counts)
        } else {
            self.reuse_locked(words, index)
        };
        page_table.unlock(found.table.frame());
        let written = written?;
        counts.entries_read = u64::from(written);
        counts.entries_written = u64::from(written);
        finish_reuse(self, section, &counts);
        Some(Resolved::MadeWritable)
    }

    /// As [`Fault::reuse_in_place`], for a private mapping of an object, some of whose pages are
    /// copies of this process. The entry of the page was read without locks, at `level`.
    #[inline(never)]
    pub(super) fn reuse_copy(&self, entry: Entry, level: Level<P::Arch>) -> Option<Resolved> {
        // A page of an executable mapping is synchronized by the slow path.
        let asked = MappingFlags::WRITE | MappingFlags::SHARED;
        let asked = if P::Arch::COHERENT_FETCHES { asked } else { asked | MappingFlags::EXECUTE };
        if self.access != Access::Write
            || self.vma.flags() & asked != MappingFlags::WRITE
            || level > Level::PTE
        {
            return None;
        }
        // A page of the object itself has to be copied, which pays for no second walk here.
        reusable_folio(self.memory(), entry, level)?;
        let section = self.read_section();
        let found = self.page_table().leaf_table(&section, self.page)?;
        self.reuse_in_place(&section, &found)
    }

    /// As [`Fault::reuse_in_place`], for a huge leaf, which stays huge.
    #[inline(never)]
    pub(super) fn reuse_huge(&self, section: &ReadSection<'_, P>) -> Option<Resolved> {
        if !is_reusable(self.vma) {
            return None;
        }
        let page_table = self.page_table();
        let EntryAt { node, index, entry } = page_table.upper_entry(section, self.page)?;
        // Checked without the lock, so that the other case, copy-on-write, pays for no lock here.
        reusable_folio(self.memory(), entry, Level::PMD)?;
        if !page_table.try_lock_table(section, self.page, node) {
            return None;
        }
        let written = reuse_huge_locked(self, &page_table.entries(node.table)[index.position()]);
        page_table.unlock(node.table.frame());
        written?;
        let counts = Counts {
            entries_descended: u64::from(P::Arch::LEVELS) - 2,
            entries_read: 1,
            entries_written: 1,
            tables_locked: 1,
            ..Counts::default()
        };
        finish_reuse(self, section, &counts);
        Some(Resolved::MadeWritable)
    }

    /// As [`Fault::reuse_in_place`], with the table locked. Returns the number of written entries.
    fn reuse_locked(&self, words: &[AtomicU64], index: EntryIndex) -> Option<u32> {
        let memory = self.memory();
        let entry = run::load(words, index);
        let folio = reusable_folio(memory, entry, Level::PTE)?;
        let number = P::Arch::frame(entry).0 - folio.head.0;
        let first = index.position().checked_sub(number as usize)?;
        let entries = words.get(first..first + folio.pages() as usize)?;
        let owner = OwnerMark::of(AnonGroup::as_owner(self.vma.group()));
        let word = &words[index.position()];
        if folio.order == Order::PAGE {
            self.take_over(folio, owner);
            let written = u32::from(make_writable::<P::Arch>(word, Write::Now));
            return Some(written + reuse_ahead(self, words, index, owner));
        }
        if folio_range(self.vma, self.page, number, folio).pages() != u64::from(folio.pages()) {
            return None;
        }
        let leaves = leaves_of::<P::Arch>(entries, index - number, folio)?;
        self.take_over(folio, owner);
        let written = match leaves {
            LeafUniformity::Alike(head) => make_alike_writable::<P::Arch>(entries, head),
            LeafUniformity::Mixed => make_leaves_writable::<P::Arch>(entries),
        };
        // The entry was read-only until now, so it has already been counted.
        P::Arch::replace_entry(word, load(word), |entry| P::Arch::make_writable(entry, Write::Now));
        Some(written)
    }
}

/// Updates the counts. The program then retries the access.
#[inline(always)]
fn finish_reuse<P: Platform>(
    fault: &Fault<'_, '_, P>,
    section: &ReadSection<'_, P>,
    counts: &Counts,
) {
    let page_table = fault.page_table();
    page_table.count_in(section, counts);
    fault.memory().platform().publish_entries();
    if !P::Arch::FAULTS_INVALIDATE {
        // The other pages fault once more if this CPU's TLB holds translations for them.
        flush_local(page_table, fault.range());
    }
}

/// Makes base pages after `index` writable. Returns the number of these pages.
fn reuse_ahead<P: Platform>(
    fault: &Fault<'_, '_, P>,
    words: &[AtomicU64],
    index: EntryIndex,
    owner: OwnerMark,
) -> u32 {
    let (before, after) = words.split_at(index.position());
    let is_writable = |word: &&AtomicU64| is_writable::<P::Arch>(load(word));
    let most = before.iter().rev().take(MOST_AHEAD).take_while(is_writable).count();
    let left = (fault.vma.range().end().0 - fault.page.0) >> PAGE_SHIFT;
    let mut written = 0;
    for word in after.iter().take(left as usize).skip(1).take(most) {
        let folio = reusable_folio(fault.memory(), load(word), Level::PTE);
        let Some(folio) = folio.filter(|folio| folio.order == Order::PAGE) else { break };
        fault.take_over(folio, owner);
        written += u32::from(make_writable::<P::Arch>(word, Write::Later));
    }
    written
}

/// As [`Fault::reuse_locked`], for a page in a contiguous run: all runs of its folio become
/// writable, with one flush for all of them.
#[inline(never)]
fn reuse_contig_locked<P: Platform>(
    fault: &Fault<'_, '_, P>,
    words: &[AtomicU64],
    index: EntryIndex,
    counts: &mut Counts,
) -> Option<u32> {
    let entry = leaf::<P::Arch>(words, index);
    let folio = reusable_folio(fault.memory(), entry, Level::PTE)?;
    let number = P::Arch::frame(entry).0 - folio.head.0;
    let first = index.position().checked_sub(number as usize)?;
    let entries = words.get(first..first + folio.pages() as usize)?;
    let range = folio_range(fault.vma, fault.page, number, folio);
    let head = P::Arch::frame(leaf::<P::Arch>(words, index - number));
    let are_contig = entries.iter().all(|word| P::Arch::is_contig(load(word)));
    if range.pages() != u64::from(folio.pages())
        || head != folio.head
        || !are_contig
        || !P::Arch::are_leaves(entries, index - number, P::Arch::STEP, 0)
    {
        return None;
    }
    fault.take_over(folio, OwnerMark::of(AnonGroup::as_owner(fault.vma.group())));
    fault.page_table().make_contig_writable(entries, range, counts);
    // The MMU may use any entry of the run for the write.
    for index in index.align_down(P::Arch::CONTIG_ENTRIES).stretch(P::Arch::CONTIG_ENTRIES) {
        let word = &words[index.position()];
        P::Arch::replace_entry(word, load(word), |entry| P::Arch::make_writable(entry, Write::Now));
    }
    Some(folio.pages())
}

/// As [`Fault::reuse_huge`], with the table locked.
fn reuse_huge_locked<P: Platform>(fault: &Fault<'_, '_, P>, word: &AtomicU64) -> Option<()> {
    let (entry, size) = (load(word), P::Arch::PMD.span());
    let folio = reusable_folio(fault.memory(), entry, Level::PMD)?;
    let leaf = VirtRange::from_len(fault.page.align_down(size), size)?;
    if folio.order != P::Arch::PMD.order() || !fault.vma.range().covers(leaf) {
        return None;
    }
    fault.take_over(folio, OwnerMark::of(AnonGroup::as_owner(fault.vma.group())));
    P::Arch::replace_entry(word, entry, |entry| P::Arch::make_writable(entry, Write::Now));
    Some(())
}

/// Whether pages of the VMA need no record of their first write.
#[inline(always)]
fn is_reusable(vma: &Vma) -> bool {
    let watched = MappingFlags::USERFAULT | MappingFlags::SOFT_DIRTY;
    vma.flags() & watched == MappingFlags::SOFT_DIRTY
}

/// The folio of a read-only leaf of this level, if the folio is anonymous, has as many mappings as
/// pages, and has no other holder; `None` if an entry like this one must stay read-only. The result
/// is a hint, read without the lock of the leaf's table.
#[inline(always)]
fn reusable_folio<P: Platform>(
    memory: &Memory<P>,
    entry: Entry,
    level: Level<P::Arch>,
) -> Option<Folio> {
    if level.kind(entry) != Kind::Leaf {
        return None;
    }
    let attributes = P::Arch::attributes(entry);
    if attributes.permissions.contains(Permissions::WRITE) || attributes.userfault {
        return None;
    }
    // Zero pages have no folio.
    let folio = memory.frames.folio_of(P::Arch::frame(entry))?;
    let handle = memory.frames.folio(folio);
    (handle.is_mapped_and_held(folio.pages(), 0) && handle.is_anonymous()).then_some(folio)
}

/// The entry at `index`, as that of a single page.
#[inline(always)]
fn leaf<A: Arch>(words: &[AtomicU64], index: EntryIndex) -> Entry {
    let entry = run::load(words, index);
    if A::is_contig(entry) { A::clear_contig(entry, index) } else { entry }
}

/// The leaves of a folio.
enum LeafUniformity {
    /// The leaves differ from the first leaf, which is the value, only in their frames, and the MMU
    /// changes none of them.
    Alike(Entry),
    /// The leaves record different uses, or the MMU may record uses.
    Mixed,
}

/// The leaves in `entries`, which start at index `first` of their locked table, if they map the
/// folio's pages in order and none of them is in a contiguous run.
#[inline(always)]
fn leaves_of<A: Arch>(
    entries: &[AtomicU64],
    first: EntryIndex,
    folio: Folio,
) -> Option<LeafUniformity> {
    let head = load(&entries[0]);
    let differ = A::bits_that_differ(entries, first, A::STEP, 0);
    let is_whole = Level::<A>::PTE.kind(head) == Kind::Leaf
        && A::frame(A::clear_contig(head, first)) == folio.head
        && differ & A::compare_mask(Equal::empty()) == 0
        // The first test spares the loads, which the compiler keeps even if no leaf can be in a
        // contiguous run.
        && (A::CONTIG_ENTRIES == 1 || !entries.iter().any(|word| A::is_contig(load(word))));
    let leaves = if differ == 0 && A::is_saturated(head) {
        LeafUniformity::Alike(head)
    } else {
        LeafUniformity::Mixed
    };
    is_whole.then_some(leaves)
}

/// Whether a leaf that is not in a contiguous run allows writes.
#[inline(always)]
fn is_writable<A: Arch>(entry: Entry) -> bool {
    Level::<A>::PTE.kind(entry) == Kind::Leaf
        && !A::is_contig(entry)
        && A::attributes(entry).permissions.contains(Permissions::WRITE)
}

/// Makes a leaf writable. Returns whether the leaf was read-only.
#[inline(always)]
fn make_writable<A: Arch>(word: &AtomicU64, write: Write) -> bool {
    let old = load(word);
    let is_refused = !is_writable::<A>(old);
    if is_refused {
        A::replace_entry(word, old, |entry| A::make_writable(entry, write));
    }
    is_refused
}

/// Makes the leaves of a folio, all of them like `head`, writable before their writes. The leaves
/// have not changed since they were read. Returns the number of leaves.
#[inline(always)]
fn make_alike_writable<A: Arch>(entries: &[AtomicU64], head: Entry) -> u32 {
    let mut entry = A::make_writable(head, Write::Later);
    for word in entries {
        word.store(entry.0, Ordering::Relaxed);
        entry.0 = entry.0.wrapping_add(A::STEP);
    }
    entries.len() as u32
}

/// Makes all entries of a folio writable before their writes. All entries are leaves, and none is
/// in a contiguous run. Returns the number of entries that were not writable.
// Out of line, because the caller has no registers left for the loop.
#[inline(never)]
fn make_leaves_writable<A: Arch>(entries: &[AtomicU64]) -> u32 {
    let mut written = 0;
    for word in entries {
        let old = load(word);
        if !A::attributes(old).permissions.contains(Permissions::WRITE) {
            A::replace_entry(word, old, |entry| A::make_writable(entry, Write::Later));
            written += 1;
        }
    }
    written
}

#[inline(always)]
fn load(word: &AtomicU64) -> Entry {
    Entry(word.load(Ordering::Relaxed))
}
