//! [`Tags`]: the numbers (ASIDs, PCIDs) under which TLBs keep the translations of address spaces.
//!
//! | file | contents |
//! |---|---|
//! | `words` | the states of 64 tags |
//!
//! ```text
//! free -> taken -> retired -> collected -> free
//!   by take  by retire   by a thread that finds no free tag
//! ```
//!
//! A tag whose address space has ended is *retired*: TLBs still have translations under it. A
//! thread that finds no free tag collects the retired ones, raises the *generation*, and frees
//! them. No CPU is interrupted. Before a CPU loads a tag, it compares the generation with the one for which
//! it has flushed last, and flushes all tags of its TLB if its own is older.
//!
//! # Orders
//! 1. A tag is collected before the generation is raised. So a CPU that reads the new generation
//!    has already left the tag, and its flush removes all translations under it.
//! 2. The generation is raised before a tag is freed, and a thread that takes the tag sees that. So
//!    a CPU that loads the tag reads the new generation, and has flushed for it.
//! 3. A CPU reads the generation before it flushes, and then stores what it read. Otherwise, if the
//!    kernel is preempted in between:
//!    1. Thread S on CPU A finds an old generation and flushes.
//!    2. S is preempted. A program runs on CPU A under tag T, and ends. T is retired.
//!    3. CPU B collects T and raises the generation.
//!    4. S reads the new generation and stores it as that of CPU A.
//!    5. CPU A runs another program under T, with the translations of the first.

#[cfg(all(test, loom))]
mod loom_model;
#[cfg(all(test, not(loom)))]
mod tests;
mod words;

use core::ops::RangeInclusive;

use bindery::platform::Cpu;

use crate::atomic::{AtomicU32, AtomicU64, Ordering, constructor};
use crate::rule::{self, Rule};

pub use words::TagWord;

/// The generation at first. That of a CPU is lower, so it flushes before it loads its first tag.
const FIRST: u64 = 1;

/// A collection must free at least this fraction of all tags, since it makes every CPU flush.
const LEAST: usize = 16;

/// The number of an address space in TLBs, until it is passed to [`Tags::retire`]. A tag that is
/// dropped is never handed out again.
///
/// ```
/// use bindery_parts::{TagWord, Tags};
///
/// let words = [const { TagWord::new() }; 1];
/// let tags = Tags::new(&words, &[]);
/// let tag = tags.take().expect("a free tag");
/// assert_eq!(tag.number(), 1);
/// tags.retire(tag);
/// ```
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a tag that is dropped is lost"]
pub struct Tag(u16);

impl Tag {
    /// The number, for instructions that invalidate. The one to load is that of [`Tags::load`].
    ///
    /// Context: any.
    pub fn number(&self) -> u16 {
        self.0
    }
}

/// The memory of one CPU in [`Tags`], two cache lines of 64 bytes.
///
/// ```
/// use bindery_parts::TagCpu;
///
/// static CPUS: [TagCpu; 4] = [const { TagCpu::new() }; 4];
/// assert_eq!(size_of_val(&CPUS), 4 * 128);
/// ```
#[repr(align(128))]
#[derive(Debug)]
pub struct TagCpu {
    /// The latest generation for which the CPU has flushed. Only the CPU itself writes it.
    generation: AtomicU64,
}

impl TagCpu {
    constructor! {
        /// A CPU that has loaded no tag.
        ///
        /// Context: any.
        pub const fn new() -> Self {
            Self { generation: AtomicU64::new(FIRST - 1) }
        }
    }
}

impl Default for TagCpu {
    fn default() -> Self {
        Self::new()
    }
}

/// In lines of its own, since every switch reads it.
#[repr(align(128))]
#[derive(Debug)]
struct Generation(AtomicU64);

/// Tags for address spaces, so that a switch between them keeps the translations of both.
///
/// The embedder supplies a [`TagWord`] for each 64 tags, and a [`TagCpu`] for each CPU. Tag 0 is
/// never handed out. Before the first tag is taken, the embedder reserves those that the machine
/// does not have, and others that it wants for itself ([`Tags::reserve`]).
///
/// If no tag is free, the address space has none. Such spaces share one reserved tag, which each
/// load flushes. The kernel's root needs another.
///
/// ```
/// use bindery::platform::Cpu;
/// use bindery_parts::{Tag, TagCpu, TagWord, Tags};
///
/// /// x86-64: 4,096 PCIDs.
/// static WORDS: [TagWord; 64] = [const { TagWord::new() }; 64];
/// static CPUS: [TagCpu; 2] = [const { TagCpu::new() }; 2];
/// static TAGS: Tags<'static> = Tags::new(&WORDS, &CPUS);
///
/// const UNTAGGED: u16 = 0;
/// const KERNEL: u16 = 1;
///
/// /// Loads an address space's root. Returns the tag, and whether the load flushes it.
/// fn switch(cpu: Cpu, tag: Option<&Tag>) -> (u16, bool) {
///     let flush_all = || { /* x86-64: `invpcid` of type 3; AArch64: `tlbi vmalle1; dsb nsh` */ };
///     match tag {
///         Some(tag) => (TAGS.load(cpu, tag, flush_all), false),
///         None => (UNTAGGED, true),
///     }
/// }
///
/// TAGS.reserve(KERNEL..=KERNEL);
/// let tag = TAGS.take(); // by an address space that is made
/// assert_eq!(switch(Cpu(1), tag.as_ref()), (2, false));
/// // When the address space ends, and no CPU has its root loaded:
/// if let Some(tag) = tag {
///     TAGS.retire(tag);
/// }
/// ```
///
/// # Invalidations
/// [`Platform::invalidate`](bindery::Platform::invalidate) must reach every CPU that has loaded the
/// tag since its last flush, whether it runs the address space or not. Broadcast instructions do
/// (AArch64). With [`Shootdowns`](crate::Shootdowns), a CPU keeps the translations of one root
/// only, and flushes those of the next when it loads it, so few tags suffice.
///
/// # Context
/// Context: any. No function waits: they are free of locks.
#[derive(Debug)]
pub struct Tags<'m> {
    generation: Generation,
    /// The word at which the next search begins.
    next: AtomicU32,
    /// The number of reserved tags.
    reserved: AtomicU32,
    /// Whether a thread collects.
    is_collecting: AtomicU32,
    words: &'m [TagWord],
    cpus: &'m [TagCpu],
}

impl<'m> Tags<'m> {
    constructor! {
        /// Tags 1 to 64 times the number of words, less 1, all of them free; those above 65,535 are
        /// not used. The words and the records of the CPUs belong to no other `Tags`.
        pub const fn new(words: &'m [TagWord], cpus: &'m [TagCpu]) -> Self {
            let words = if words.len() > 1024 { words.split_at(1024).0 } else { words };
            Self {
                generation: Generation(AtomicU64::new(FIRST)),
                next: AtomicU32::new(0),
                reserved: AtomicU32::new(0),
                is_collecting: AtomicU32::new(0),
                words,
                cpus,
            }
        }
    }

    /// Takes tags out of use for ever. Called before the first [`Tags::take`]. Numbers without a
    /// tag have no effect. Linear in the number of words.
    pub fn reserve(&self, tags: RangeInclusive<u16>) {
        for (first, word) in (0..).step_by(64).zip(self.words) {
            self.reserved.fetch_add(word.reserve(first, &tags), Ordering::Relaxed);
        }
    }

    /// Takes a free tag, for an address space that has none. `None` if no tag is free, or if the
    /// thread loses a race for the last one; the address space may ask again at a later load.
    ///
    /// Linear in the number of words. If no tag is free, but at least a sixteenth of those that are
    /// not reserved is retired, the thread frees them, and every CPU flushes its TLB before it
    /// loads its next tag.
    pub fn take(&self) -> Option<Tag> {
        self.find().or_else(|| {
            self.collect();
            self.find()
        })
    }

    /// Gives back the tag of an address space that has ended. No CPU has the space's root loaded,
    /// nor will load it. Constant time.
    pub fn retire(&self, tag: Tag) {
        if let Some(word) = self.words.get(usize::from(tag.0 / 64)) {
            word.retire(tag.0 % 64);
        }
    }

    /// Returns the number of a tag that the CPU is about to load, after it has flushed all tags of
    /// its TLB by `flush` if a tag may have been freed since it did so last. Reads two words.
    ///
    /// The caller stays on the CPU from the call to the load, but may be preempted in between.
    /// `flush` removes all translations under all tags from this CPU's TLB, with intermediate
    /// entries; global translations may stay.
    ///
    /// # Panics
    /// If `cpu` is not below the number of CPUs.
    #[inline]
    pub fn load(&self, cpu: Cpu, tag: &Tag, flush: impl FnOnce()) -> u16 {
        let own = &self.cpus[usize::from(cpu.0)].generation;
        let read = self.generation();
        if own.load(Ordering::Relaxed) < read && rule::holds(Rule::CheckAtLoad) {
            flush();
            let reached =
                if rule::holds(Rule::GenerationBeforeFlush) { read } else { self.generation() };
            own.store(reached, Ordering::Relaxed);
        }
        tag.0
    }

    /// The number of the generation, which each collection raises by 1.
    pub fn generation(&self) -> u64 {
        // Relaxed: a thread that has taken a tag has acquired the raise before the tag was freed.
        self.generation.0.load(Ordering::Relaxed)
    }

    /// The number of tags that are not free: taken, retired or reserved. Not exact while tags are
    /// taken. Linear in the number of words.
    pub fn in_use(&self) -> usize {
        self.words.iter().map(TagWord::in_use).sum()
    }

    fn find(&self) -> Option<Tag> {
        let start = self.next.load(Ordering::Relaxed) as usize;
        let (before, from) = self.words.split_at_checked(start)?;
        let mut words = from.iter().zip(start..).chain(before.iter().zip(0..));
        let (number, bit) =
            words.find_map(|(word, number)| Some((number, word.take(number == 0)?)))?;
        if number != start {
            self.next.store(number as u32, Ordering::Relaxed);
        }
        Some(Tag((number * 64) as u16 + bit))
    }

    /// Frees the retired tags, unless they are few or another thread is at it.
    #[cold]
    fn collect(&self) {
        let order = rule::order(Rule::AcquireCollector, Ordering::Acquire);
        let exchange = self.is_collecting.compare_exchange(0, 1, order, Ordering::Relaxed);
        if exchange.is_err() && rule::holds(Rule::OneCollector) {
            return;
        }
        let retired: usize = self.words.iter().map(TagWord::retired).sum();
        let usable = self.words.len() * 64 - self.reserved.load(Ordering::Relaxed) as usize;
        if retired > 0 && retired >= usable / LEAST {
            self.collect_all();
        }
        self.is_collecting.store(0, rule::order(Rule::ReleaseCollector, Ordering::Release));
    }

    fn collect_all(&self) {
        let raise = || self.generation.0.fetch_add(1, Ordering::Relaxed);
        if !rule::holds(Rule::CollectBeforeRaise) {
            raise();
        }
        self.words.iter().for_each(TagWord::collect);
        if rule::holds(Rule::CollectBeforeRaise) && rule::holds(Rule::RaiseBeforeFree) {
            raise();
        }
        self.words.iter().for_each(TagWord::free_collected);
        if !rule::holds(Rule::RaiseBeforeFree) {
            raise();
        }
    }
}
