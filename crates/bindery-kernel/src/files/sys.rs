//! `/sys/kernel/mm/transparent_hugepage`: which folio sizes are used, as Linux lets one say it, and
//! obeyed by the core's policies.

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU8, Ordering};

use bindery::{FolioPolicy, SizeMode};

use crate::errno::Errno;
use crate::memory::memory;

use super::generated::{Shelf, Text, Window};
use super::memory::new_number;
use super::node::{Attributes, Kind, Node, Patience};

/// The orders that have a folder: 16 KiB to 2 MiB.
const ORDERS: core::ops::RangeInclusive<u8> = 2..=9;

/// What a file decides about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Policy {
    Anonymous,
    Shared,
}

impl Policy {
    fn get(self) -> &'static FolioPolicy {
        match self {
            Self::Anonymous => memory().folio_policy(),
            Self::Shared => memory().shared_folio_policy(),
        }
    }
}

/// What `enabled` and `shmem_enabled` say for all sizes, which the policies do not tell again:
/// anonymous, shared.
static GLOBAL: [AtomicU8; 2] = [const { AtomicU8::new(2) }; 2];

/// The words of `enabled`.
const WORDS: [(&str, SizeMode); 3] =
    [("always", SizeMode::Always), ("madvise", SizeMode::Madvise), ("never", SizeMode::Never)];

/// The words of `shmem_enabled`, which are Linux's for shared memory.
const SHARED_WORDS: [(&str, SizeMode); 6] = [
    ("always", SizeMode::Always),
    ("within_size", SizeMode::Always),
    ("advise", SizeMode::Madvise),
    ("never", SizeMode::Never),
    ("deny", SizeMode::Never),
    ("force", SizeMode::Always),
];

/// The words of a size's own file.
const SIZE_WORDS: [(&str, SizeMode); 4] = [
    ("always", SizeMode::Always),
    ("inherit", SizeMode::Inherit),
    ("madvise", SizeMode::Madvise),
    ("never", SizeMode::Never),
];

/// As [`SIZE_WORDS`], for shared memory.
const SHARED_SIZE_WORDS: [(&str, SizeMode); 5] = [
    ("always", SizeMode::Always),
    ("inherit", SizeMode::Inherit),
    ("within_size", SizeMode::Always),
    ("advise", SizeMode::Madvise),
    ("never", SizeMode::Never),
];

fn write_words(words: &[&str], chosen: usize, out: &mut Window<'_>) -> fmt::Result {
    for (index, word) in words.iter().enumerate() {
        let space = if index > 0 { " " } else { "" };
        if index == chosen {
            write!(out, "{space}[{word}]")?
        } else {
            write!(out, "{space}{word}")?
        }
    }
    out.write_str("\n")
}

/// `enabled` for all sizes.
fn make_enabled(out: &mut Window<'_>) -> fmt::Result {
    write_words(&WORDS.map(|(word, _)| word), GLOBAL[0].load(Ordering::Relaxed).into(), out)
}

fn take_enabled(text: &str) -> Result<(), Errno> {
    let chosen = WORDS.iter().position(|(word, _)| *word == text).ok_or(Errno::EINVAL)?;
    GLOBAL[0].store(chosen as u8, Ordering::Relaxed);
    memory().folio_policy().set_global(WORDS[chosen].1);
    Ok(())
}

/// `shmem_enabled` for all sizes.
fn make_shared(out: &mut Window<'_>) -> fmt::Result {
    // The initial 2 is anonymous memory's "never".
    let chosen = match GLOBAL[1].load(Ordering::Relaxed) {
        chosen @ 0x80.. => usize::from(chosen & 0x7f),
        _ => 3,
    };
    write_words(&SHARED_WORDS.map(|(word, _)| word), chosen, out)
}

fn take_shared(text: &str) -> Result<(), Errno> {
    let chosen = SHARED_WORDS.iter().position(|(word, _)| *word == text).ok_or(Errno::EINVAL)?;
    GLOBAL[1].store(0x80 | chosen as u8, Ordering::Relaxed);
    memory().shared_folio_policy().set_global(SHARED_WORDS[chosen].1);
    Ok(())
}

/// A size's own `enabled` or `shmem_enabled`.
struct SizeFile {
    number: u64,
    policy: Policy,
    order: u8,
}

impl SizeFile {
    fn words(&self) -> &'static [(&'static str, SizeMode)] {
        match self.policy {
            Policy::Anonymous => &SIZE_WORDS,
            Policy::Shared => &SHARED_SIZE_WORDS,
        }
    }
}

impl Node for SizeFile {
    fn kind(&self) -> Kind {
        Kind::Regular
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(self.number, 0o644)
    }

    fn open(self: Arc<Self>, _: u32) -> Result<Arc<dyn Node>, Errno> {
        Ok(self)
    }

    fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
        let mode = self.policy.get().get(self.order);
        let chosen = self.words().iter().position(|(_, known)| *known == mode);
        let words: Vec<&str> = self.words().iter().map(|(word, _)| *word).collect();
        let mut window = Window::new(at, into);
        // An error means that the window is full.
        let _ = write_words(&words, chosen.unwrap_or(words.len() - 1), &mut window);
        Ok(window.filled())
    }

    fn write(&self, _: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        let text = core::str::from_utf8(from).map_err(|_| Errno::EINVAL)?.trim();
        let found = self.words().iter().find(|(word, _)| *word == text).ok_or(Errno::EINVAL)?;
        self.policy.get().set(self.order, found.1);
        Ok(from.len())
    }

    fn is_seekable(&self) -> bool {
        true
    }
}

/// A file whose value is kept and means nothing: what scripts write to before they measure.
fn kept(text: &'static str) -> Arc<dyn Node> {
    struct Kept {
        number: u64,
        text: crate::sync::Mutex<Vec<u8>>,
    }
    impl Node for Kept {
        fn kind(&self) -> Kind {
            Kind::Regular
        }

        fn attributes(&self) -> Attributes {
            Attributes::plain(self.number, 0o644)
        }

        fn open(self: Arc<Self>, _: u32) -> Result<Arc<dyn Node>, Errno> {
            Ok(self)
        }

        fn read(&self, at: u64, into: &mut [u8], _: Patience) -> Result<usize, Errno> {
            let mut window = Window::new(at, into);
            // An error means that the window is full.
            let _ = window.push(&self.text.lock());
            Ok(window.filled())
        }

        fn write(&self, _: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
            let number = core::str::from_utf8(from).ok().and_then(|text| text.trim().parse().ok());
            let number: u64 = number.ok_or(Errno::EINVAL)?;
            *self.text.lock() = format!("{number}\n").into_bytes();
            Ok(from.len())
        }

        fn is_seekable(&self) -> bool {
            true
        }
    }
    Arc::new(Kept { number: new_number(), text: crate::sync::Mutex::new(text.into()) })
}

/// The root of `/sys`.
pub fn root() -> Arc<dyn Node> {
    let khugepaged = Shelf::of([
        ("defrag", kept("0\n")),
        ("scan_sleep_millisecs", kept("10000\n")),
        ("alloc_sleep_millisecs", kept("60000\n")),
        ("pages_to_scan", kept("4096\n")),
        ("max_ptes_none", kept("511\n")),
        ("max_ptes_swap", kept("64\n")),
        ("max_ptes_shared", kept("256\n")),
        ("full_scans", Text::new(|out| out.write_str("0\n"))),
        ("pages_collapsed", Text::new(|out| out.write_str("0\n"))),
    ]);
    let mut entries: Vec<(String, Arc<dyn Node>)> = alloc::vec![
        ("enabled".into(), Text::writable(make_enabled, take_enabled) as _),
        ("shmem_enabled".into(), Text::writable(make_shared, take_shared)),
        (
            "defrag".into(),
            Text::new(|out| out.write_str("always defer defer+madvise madvise [never]\n"))
        ),
        ("use_zero_page".into(), Text::new(|out| out.write_str("0\n"))),
        ("hpage_pmd_size".into(), Text::new(|out| out.write_str("2097152\n"))),
        ("khugepaged".into(), khugepaged),
    ];
    for order in ORDERS {
        let file = |policy| Arc::new(SizeFile { number: new_number(), policy, order });
        let size = Shelf::of([
            ("enabled", file(Policy::Anonymous) as _),
            ("shmem_enabled", file(Policy::Shared)),
        ]);
        entries.push((format!("hugepages-{}kB", 4_u32 << order), size));
    }
    let hugepages = Shelf::new(entries);
    let pools = Shelf::of([]);
    let mm = Shelf::of([("transparent_hugepage", hugepages as _), ("hugepages", pools)]);
    let kernel = Shelf::of([("mm", mm as _)]);
    // Programs run on one CPU.
    let cpu = || Text::new(|out| out.write_str("0\n")) as _;
    let cpus = Shelf::of([
        ("possible", cpu()),
        ("present", cpu()),
        ("online", cpu()),
        ("cpu0", Shelf::of([]) as _),
    ]);
    let system = Shelf::of([("cpu", cpus as _)]);
    let devices = Shelf::of([("system", system as _)]);
    Shelf::of([("kernel", kernel as _), ("devices", devices)])
}
