//! `/sys/kernel/mm/transparent_hugepage`: the folio sizes that the core's policies
//! allow, in Linux's words; and `khugepaged`, for the kernel's own thread.
//!
//! The written words are kept here, because several may mean the same policy.

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU8, Ordering};

use bindery::addr::Order;
use bindery::{FolioPolicy, LargeFolioEffort, SizeMode};

use crate::errno::Errno;
use crate::memory::memory;
use crate::process::background::{self, COLLAPSED, FULL_SCANS, TUNABLES};

use super::super::generated::{FixedDirectory, Text};
use super::super::node::Node;
use super::super::sequence::SequenceBuffer;
use super::setting::{Number, Setting, Value, show_words};

/// The orders that have a directory: 16 KiB to 2 MiB.
const ORDERS: core::ops::RangeInclusive<u8> = 2..=HUGE;
/// The order of 2 MiB.
const HUGE: u8 = 9;
/// Base pages in 2 MiB.
const HUGE_PAGES: u32 = 1 << HUGE;

/// The meaning of a word in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Meaning {
    /// To the policy.
    Mode(SizeMode),
    /// No large folios of any size, whatever the setting of each size.
    Deny,
    /// The sizes that inherit, and no others, whatever their settings.
    Force,
}

use Meaning::{Deny, Force, Mode};

/// The words of a file.
type Words = &'static [(&'static str, Meaning)];

/// `enabled`.
const WORDS: Words = &[
    ("always", Mode(SizeMode::Always)),
    ("madvise", Mode(SizeMode::Madvise)),
    ("never", Mode(SizeMode::Never)),
];

/// `shmem_enabled`. The core's folios never extend beyond an object's end, so `always` is
/// `within_size`.
const SHARED_WORDS: Words = &[
    ("always", Mode(SizeMode::Always)),
    ("within_size", Mode(SizeMode::Always)),
    ("advise", Mode(SizeMode::Madvise)),
    ("never", Mode(SizeMode::Never)),
    ("deny", Deny),
    ("force", Force),
];

/// A size's own `enabled`.
const SIZE_WORDS: Words = &[
    ("always", Mode(SizeMode::Always)),
    ("inherit", Mode(SizeMode::Inherit)),
    ("madvise", Mode(SizeMode::Madvise)),
    ("never", Mode(SizeMode::Never)),
];

/// A size's own `shmem_enabled`.
const SHARED_SIZE_WORDS: Words = &[
    ("always", Mode(SizeMode::Always)),
    ("inherit", Mode(SizeMode::Inherit)),
    ("within_size", Mode(SizeMode::Always)),
    ("advise", Mode(SizeMode::Madvise)),
    ("never", Mode(SizeMode::Never)),
];

/// `defrag`.
const EFFORTS: [(&str, LargeFolioEffort); 5] = [
    ("always", LargeFolioEffort::Always),
    ("defer", LargeFolioEffort::Defer),
    ("defer+madvise", LargeFolioEffort::DeferMadvise),
    ("madvise", LargeFolioEffort::Madvise),
    ("never", LargeFolioEffort::Never),
];

/// The index of `inherit` in a size's words.
const INHERIT: u8 = 1;

/// The files of anonymous or of shared memory, and the index of the chosen word: for all sizes, and
/// by order.
struct Files {
    words: Words,
    size_words: Words,
    all: AtomicU8,
    sizes: [AtomicU8; HUGE as usize + 1],
}

static ANONYMOUS: Files = Files::new(WORDS, 2, SIZE_WORDS, 3);
static SHARED: Files = Files::new(SHARED_WORDS, 3, SHARED_SIZE_WORDS, 4);

impl Files {
    /// The huge size inherits, as on Linux; all other sizes are never used.
    const fn new(words: Words, never: u8, size_words: Words, never_of_size: u8) -> Self {
        let mut sizes = [const { AtomicU8::new(INHERIT) }; HUGE as usize + 1];
        let mut order = 0;
        while order < HUGE as usize {
            sizes[order] = AtomicU8::new(never_of_size);
            order += 1;
        }
        Self { words, size_words, all: AtomicU8::new(never), sizes }
    }

    fn all(&self) -> Meaning {
        self.words[usize::from(self.all.load(Ordering::Relaxed))].1
    }

    fn size(&self, order: u8) -> SizeMode {
        let chosen = self.sizes[usize::from(order)].load(Ordering::Relaxed);
        match self.size_words[usize::from(chosen)].1 {
            Mode(mode) => mode,
            Deny | Force => SizeMode::Never,
        }
    }

    /// Sets the core's policy. Returns whether any size is used, and whether the huge one is.
    fn apply(&self, policy: &FolioPolicy) -> (bool, bool) {
        let all = self.all();
        if let Mode(mode) = all {
            policy.set_global(mode);
        }
        let mut used = (false, false);
        for order in ORDERS {
            let mode = match (all, self.size(order)) {
                (Deny, _) => SizeMode::Never,
                (Force, SizeMode::Inherit) => SizeMode::Always,
                (Force, _) => SizeMode::Never,
                (Mode(_), mode) => mode,
            };
            policy.set(Order(order), mode);
            let is_used = match mode {
                SizeMode::Inherit => all != Mode(SizeMode::Never),
                SizeMode::Never => false,
                SizeMode::Madvise | SizeMode::Always => true,
            };
            used = (used.0 || is_used, used.1 || is_used && order == HUGE);
        }
        used
    }

    /// Whether only the huge size inherits. As on Linux, no other size can be forced.
    fn inherits_huge_alone(&self) -> bool {
        let mut orders = ORDERS;
        orders.all(|order| (self.size(order) == SizeMode::Inherit) == (order == HUGE))
    }
}

/// Passes the settings to the core and the kernel's thread.
fn apply() -> Result<(), Errno> {
    let anonymous = ANONYMOUS.apply(memory().folio_policy());
    let shared = SHARED.apply(memory().shared_folio_policy());
    background::policies_changed(anonymous.0 || shared.0, anonymous.1 || shared.1)
}

fn position(words: Words, text: &str) -> Result<u8, Errno> {
    let found = words.iter().position(|(word, _)| *word == text);
    found.map(|index| index as u8).ok_or(Errno::EINVAL)
}

/// `enabled` or `shmem_enabled` for all sizes.
struct All(&'static Files);

impl Value for All {
    fn show(&self, out: &mut SequenceBuffer<'_>) -> fmt::Result {
        let chosen = self.0.all.load(Ordering::Relaxed);
        show_words(self.0.words.iter().map(|(word, _)| *word), chosen.into(), out)
    }

    fn take(&self, text: &str) -> Result<(), Errno> {
        let chosen = position(self.0.words, text)?;
        if self.0.words[usize::from(chosen)].1 == Force && !self.0.inherits_huge_alone() {
            return Err(Errno::EINVAL);
        }
        self.0.all.store(chosen, Ordering::Relaxed);
        apply()
    }
}

/// A size's own `enabled` or `shmem_enabled`.
struct Size(&'static Files, u8);

impl Value for Size {
    fn show(&self, out: &mut SequenceBuffer<'_>) -> fmt::Result {
        let chosen = self.0.sizes[usize::from(self.1)].load(Ordering::Relaxed);
        show_words(self.0.size_words.iter().map(|(word, _)| *word), chosen.into(), out)
    }

    fn take(&self, text: &str) -> Result<(), Errno> {
        let Self(files, order) = *self;
        let chosen = position(files.size_words, text)?;
        if files.all() == Force && chosen == INHERIT && order != HUGE {
            return Err(Errno::EINVAL);
        }
        files.sizes[usize::from(order)].store(chosen, Ordering::Relaxed);
        apply()
    }
}

/// `defrag`.
struct Effort;

impl Value for Effort {
    fn show(&self, out: &mut SequenceBuffer<'_>) -> fmt::Result {
        let effort = memory().large_folio_effort();
        let chosen = EFFORTS.iter().position(|(_, known)| *known == effort);
        show_words(EFFORTS.iter().map(|(word, _)| *word), chosen.unwrap_or(EFFORTS.len()), out)
    }

    fn take(&self, text: &str) -> Result<(), Errno> {
        let (_, effort) = EFFORTS.iter().find(|(word, _)| *word == text).ok_or(Errno::EINVAL)?;
        memory().set_large_folio_effort(*effort);
        Ok(())
    }
}

/// `use_zero_page`.
struct UseZeroPage;

impl Value for UseZeroPage {
    fn show(&self, out: &mut SequenceBuffer<'_>) -> fmt::Result {
        write!(out, "{}", u8::from(memory().uses_huge_zero_page()))
    }

    fn take(&self, text: &str) -> Result<(), Errno> {
        let used = match text.parse() {
            Ok(0_u64) => false,
            Ok(1) => true,
            _ => return Err(Errno::EINVAL),
        };
        memory().set_huge_zero_page(used);
        Ok(())
    }
}

fn khugepaged() -> Arc<FixedDirectory> {
    let pages = |cell| Setting::file(Number::new(cell, 0..=HUGE_PAGES - 1));
    let sleep = |cell| Setting::file(Number::watched(cell, background::sleep_changed));
    FixedDirectory::of([
        ("defrag", Setting::file(Number::new(&TUNABLES.defrag, 0..=1))),
        ("scan_sleep_millisecs", sleep(&TUNABLES.scan_sleep)),
        ("alloc_sleep_millisecs", sleep(&TUNABLES.alloc_sleep)),
        ("pages_to_scan", Setting::file(Number::new(&TUNABLES.pages_to_scan, 1..=u32::MAX))),
        ("max_ptes_none", pages(&TUNABLES.max_missing)),
        ("max_ptes_swap", pages(&TUNABLES.max_swapped)),
        ("max_ptes_shared", pages(&TUNABLES.max_shared)),
        ("full_scans", Text::new(|out| writeln!(out, "{}", FULL_SCANS.load(Ordering::Relaxed)))),
        (
            "pages_collapsed",
            Text::new(|out| writeln!(out, "{}", COLLAPSED.load(Ordering::Relaxed))),
        ),
    ])
}

/// The directory.
pub fn directory() -> Arc<FixedDirectory> {
    // No size is used at first, so no thread has to be created, and the call cannot fail.
    let _ = apply();
    // Linux defragments whenever large folios are used.
    memory().set_huge_zero_page(true);
    let mut entries: Vec<(String, Arc<dyn Node>)> = alloc::vec![
        ("enabled".into(), Setting::file(All(&ANONYMOUS))),
        ("shmem_enabled".into(), Setting::file(All(&SHARED))),
        ("defrag".into(), Setting::file(Effort)),
        ("use_zero_page".into(), Setting::file(UseZeroPage)),
        ("hpage_pmd_size".into(), Text::new(|out| out.write_str("2097152\n"))),
        ("khugepaged".into(), khugepaged()),
    ];
    for order in ORDERS {
        let size = FixedDirectory::of([
            ("enabled", Setting::file(Size(&ANONYMOUS, order))),
            ("shmem_enabled", Setting::file(Size(&SHARED, order))),
        ]);
        entries.push((format!("hugepages-{}kB", 4_u32 << order), size));
    }
    FixedDirectory::new(entries)
}
