//! Runs: the longest stretch of consecutive entries in one table that an operation may treat as a
//! unit.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::{VirtAddr, VirtRange};
use crate::arch::{AbsentFormat, Arch, Entry, EntryIndex, Equal};

use super::Table;
use super::locking::Node;

/// The content of the entries of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What<'s> {
    /// Empty entries.
    Empty,
    /// One entry that refers to this table. The operation's range covers the table's whole span.
    Table(Table<'s>),
    /// Leaves of consecutive frames with the same attributes. The value is the first leaf without
    /// the contiguous bit, with accessed and dirty gathered from all leaves. With
    /// [`Equal::ANY_FRAMES`] the leaves agree only in their attributes.
    Leaf(Entry),
    /// Consecutive swap slots, consecutive `PROT_NONE` pages or equal markers. The value is the
    /// first entry.
    Absent(Entry),
}

/// A run: `count` entries from `index` on in the table of `node`. The first entry covers `at`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run<'s, A: Arch> {
    pub(crate) at: VirtAddr,
    pub(crate) node: Node<A, Table<'s>>,
    pub(crate) index: EntryIndex,
    pub(crate) count: u32,
    pub(crate) what: What<'s>,
}

impl<A: Arch> Run<'_, A> {
    /// The addresses that the run covers.
    pub(crate) fn range(&self) -> VirtRange {
        let bytes = u64::from(self.count) << self.node.level.span_shift();
        VirtRange::raw(self.at.0, self.at.0 + bytes)
    }

    /// The run without its first `count` entries.
    pub(crate) fn rest(&self, count: u32) -> Self {
        let bytes = u64::from(count) << self.node.level.span_shift();
        let (at, index) = (VirtAddr(self.at.0.wrapping_add(bytes)), self.index + count);
        let what = match self.what {
            What::Leaf(first) if count < self.count => What::Leaf(A::nth_page(first, count)),
            What::Absent(first) if count < self.count => What::Absent(A::nth_page(first, count)),
            What::Empty | What::Table(_) | What::Leaf(_) | What::Absent(_) => self.what,
        };
        Self { at, index, count: self.count - count, what, ..*self }
    }

    /// The number of base pages that the run covers.
    pub(crate) fn pages(&self) -> u32 {
        self.count << self.node.level.order().0
    }
}

#[inline]
pub(crate) fn load(entries: &[AtomicU64], index: EntryIndex) -> Entry {
    Entry(entries[index.position()].load(Ordering::Relaxed))
}

/// The number of empty entries at the beginning of `entries`.
pub(crate) fn count_empty(entries: &[AtomicU64]) -> u32 {
    let filled = entries.iter().position(|word| word.load(Ordering::Relaxed) != 0);
    filled.unwrap_or(entries.len()) as u32
}

/// Whether all of `entries` are empty. One pass without a branch per entry.
#[inline]
pub(crate) fn are_empty(entries: &[AtomicU64]) -> bool {
    if let [word] = entries {
        return word.load(Ordering::Relaxed) == 0;
    }
    let any = |entries: &[AtomicU64]| {
        entries.iter().fold(0, |any, word| any | word.load(Ordering::Relaxed))
    };
    // The length is known at compile time, which leaves one instruction per entry.
    let (chunks, rest) = entries.as_chunks::<8>();
    chunks.iter().fold(any(rest), |all, chunk| all | any(chunk)) == 0
}

/// The number of empty entries at the beginning of `entries`, whose first entry is known to be
/// empty. The result may be up to seven too low.
#[inline]
pub(crate) fn count_empty_ahead(entries: &[AtomicU64]) -> u32 {
    let (chunks, _) = entries.as_chunks::<8>();
    let is_empty = |chunk: &&[AtomicU64; 8]| {
        chunk.iter().fold(0, |any, word| any | word.load(Ordering::Relaxed)) == 0
    };
    (chunks.iter().take_while(is_empty).count() as u32 * 8).max(1)
}

/// The number of level-1 leaves at the beginning of `entries`, whichever pages they map.
#[inline]
pub(crate) fn count_leaves<A: Arch>(entries: &[AtomicU64]) -> u32 {
    let (chunks, _) = entries.as_chunks::<8>();
    let all_present = |chunk: &&[AtomicU64; 8]| {
        chunk.iter().fold(A::PRESENT, |all, word| all & word.load(Ordering::Relaxed)) != 0
    };
    let passed = chunks.iter().take_while(all_present).count() * 8;
    let is_present = |word: &&AtomicU64| word.load(Ordering::Relaxed) & A::PRESENT != 0;
    (passed + entries[passed..].iter().take_while(is_present).count()) as u32
}

/// Operations on the entries of a table that are the same for every tree and architecture.
pub(crate) trait Entries: Arch {
    /// The number of level-1 leaves at the beginning of `entries` (at least one) that continue the
    /// first leaf, each by `step` more, and the first leaf with accessed and dirty gathered from
    /// all of them. `entries` starts at `index` of its table. The bits of `restored` are set in
    /// every entry before the comparison (the valid bit, for suspended entries).
    #[inline]
    fn match_leaves(
        entries: &[AtomicU64],
        index: EntryIndex,
        equal: Equal,
        step: u64,
        restored: u64,
    ) -> (u32, Entry) {
        let mask = Self::compare_mask(equal);
        let first = entries[0].load(Ordering::Relaxed);
        let first = Self::clear_contig(Entry(first | restored), index);
        let (mut any, mut all) = (first.0, first.0);
        let mut expected = first.0;
        let mut count = 1;
        for word in &entries[1..] {
            let raw = word.load(Ordering::Relaxed);
            if raw == 0 {
                break;
            }
            expected = expected.wrapping_add(step);
            let entry = Self::clear_contig(Entry(raw | restored), index + count);
            if (entry.0 ^ expected) & mask != 0 {
                break;
            }
            any |= entry.0;
            all &= entry.0;
            count += 1;
        }
        (count, Self::gather_run(first, any, all))
    }

    /// Whether all of `entries` (at least one) continue the first entry, each by `step` more, and
    /// agree in the bits that `Equal::empty()` compares. `entries` starts at `index` of its level-1
    /// table. One pass without a branch per entry.
    #[inline(always)]
    fn are_leaves(entries: &[AtomicU64], index: EntryIndex, step: u64, restored: u64) -> bool {
        let differ = Self::bits_that_differ(entries, index, step, restored);
        differ & Self::compare_mask(Equal::empty()) == 0
    }

    /// The bits in which any of `entries` (at least one) differs from the first entry, after `step`
    /// was subtracted for each position. `entries` starts at `index` of its level-1 table. One pass
    /// without a branch per entry.
    #[inline(always)]
    fn bits_that_differ(entries: &[AtomicU64], index: EntryIndex, step: u64, restored: u64) -> u64 {
        let entry = |raw: &AtomicU64, index| {
            Self::clear_contig(Entry(raw.load(Ordering::Relaxed) | restored), index).0
        };
        let first = entry(&entries[0], index);
        let mut differ = 0;
        let mut compare = |entries: &[AtomicU64], passed: usize| {
            let (index, expected) =
                (index + passed as u32, first.wrapping_add(step * passed as u64));
            for (count, word) in entries.iter().enumerate() {
                let expected = expected.wrapping_add(step * count as u64);
                differ |= entry(word, index + count as u32) ^ expected;
            }
        };
        // The length is known at compile time, so the expected value costs one addition per entry.
        let (chunks, rest) = entries.as_chunks::<8>();
        for (passed, chunk) in chunks.iter().enumerate() {
            compare(chunk, passed * 8);
        }
        compare(rest, chunks.len() * 8);
        differ
    }

    /// As [`Entries::match_leaves`], for absent entries at the beginning of `entries`.
    fn match_absent(entries: &[AtomicU64]) -> (u32, Entry) {
        let first = load(entries, EntryIndex::FIRST);
        let mask = Self::absent_compare_mask(first);
        let step = Self::absent_step(first);
        let mut gathered = first;
        let mut expected = first.0;
        let mut count = 1;
        for word in &entries[1..] {
            let entry = Entry(word.load(Ordering::Relaxed));
            expected = expected.wrapping_add(step);
            if (entry.0 ^ expected) & mask != 0 {
                break;
            }
            gathered = Self::gather_absent(gathered, entry);
            count += 1;
        }
        (count, gathered)
    }

    /// Replaces `old`, just read from `word`, by the result of `change`, and returns the old entry
    /// with all bits that the MMU added.
    #[inline]
    fn replace_entry(word: &AtomicU64, old: Entry, change: impl Fn(Entry) -> Entry) -> Entry {
        if old.0 & Self::PRESENT == 0 || Self::is_saturated(old) {
            word.store(change(old).0, Ordering::Relaxed);
            return old;
        }
        let mut current = old.0;
        while let Err(newer) = word.compare_exchange_weak(
            current,
            change(Entry(current)).0,
            Ordering::Relaxed,
            Ordering::Relaxed,
        ) {
            current = newer;
        }
        Entry(current)
    }
}

impl<A: Arch> Entries for A {}
