//! The steps of a random sequence.

use proptest::prelude::*;
use proptest::sample::select;

use super::handlers::Service;
use super::model::{CELL, CELLS, Kind, MOST_PAGES};

/// The pages of the arena that calls use: small mappings, and both ends of a 2 MiB range.
pub const SMALL: u64 = 56;
/// The cell at which the heap starts, within a page.
pub const HEAP: u64 = 48 * CELLS + 3;
/// The first page of the 2 MiB range.
pub const LARGE: u64 = 512;
/// The number of pages of the 2 MiB range.
pub const LARGE_PAGES: u64 = 512;

/// Pages of the arena.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub first: u64,
    pub pages: u64,
    /// The bytes of the first page before the range of the call.
    pub head: u64,
    /// The bytes of the last page behind it.
    pub tail: u64,
}

impl Span {
    /// Whole pages.
    pub const fn of(first: u64, pages: u64) -> Self {
        Self { first, pages, head: 0, tail: 0 }
    }

    pub fn all(self) -> std::ops::Range<u64> {
        self.first..self.first + self.pages
    }
}

/// Cells of the arena or of an object: 512 bytes each.
#[derive(Clone, Copy, Debug)]
pub struct Cells {
    pub first: u64,
    pub count: u64,
}

/// Cells that are copied between two processes.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    /// The cells of the caller.
    pub here: Cells,
    /// The first cell of the other process.
    pub there: u64,
    pub other: u8,
    /// Whether the caller gets the cells.
    pub is_from_other: bool,
}

/// The pages that `mmap` provides at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Provided {
    None,
    Populated,
    Locked,
}

/// A call.
#[derive(Clone, Copy, Debug)]
pub enum What {
    /// The number is the page of the object at the start of the span.
    Map(Span, Kind, u64, Provided),
    MapLarge,
    Unmap(Span),
    /// Nothing, reads, or reads and writes.
    Protect(Span, u8),
    Remap(Span, u64),
    /// The raw number of the advice.
    Advise(Span, u64),
    Lock(Span, bool),
    Unlock(Span),
    /// The raw flags.
    LockAll(u8),
    UnlockAll,
    /// The heap ends at this cell.
    Break(u64),
    Store(Span),
    /// Tells which pages are in memory. The number is the address of the answers, in bytes of the
    /// arena.
    Tell(Span, u64),
    /// Copies from the program.
    Load(Cells),
    /// Copies to the program, with this value.
    Fill(Cells, u8),
    /// Between a process and another one.
    Copy(Copied),
    /// What a process has on the swap device comes back.
    SwapIn,
    /// What the shared memory has there comes back.
    SwapInObjects,
    /// Page, and whether it is written.
    Touch(u64, bool),
    /// The number of the object first.
    Read(usize, Cells),
    /// Object, cells, value. In steps, the source stops once, at this cell of the call.
    Write(usize, Cells, u8, u64),
    Sync(usize, Cells),
}

/// The way in which a call in steps continues.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// The wait is polled; a thread waits if the poll needs one.
    Poll,
    /// A thread waits.
    Thread,
    /// The next step comes before the end of the wait.
    Early,
    /// As `Poll`, but the step gets the end of another call's wait.
    Mixed,
    /// The next step comes after the end of the wait, without its result.
    Without,
}

#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// A call of this process; whether it takes steps; the seed of the answers during its sleeps.
    Make(u8, What, bool, u64),
    Advance(u8, Way, u64),
    /// A fatal signal comes during the next call or step, after this many questions for it.
    Kill(u8),
    Cancel(u8),
    /// The pager answers a request.
    Answer(u64),
    /// The swap device serves its oldest request.
    Serve,
    /// Whether the pager keeps reads, and writes.
    Keep(bool, bool),
    /// A store of the program to this cell, if the page is mapped and writable already.
    Poke(u8, u64, u8),
    /// The number of the object, and its size in cells.
    Resize(usize, u64, u64),
    Punch(usize, Cells, u64),
    ReadAhead(u64),
    Evict,
    Reclaim(u64, u64),
    Fork(u8, u64),
    Exit(u8, u64),
    /// A signal that is not fatal, as [`Step::Kill`].
    Signal(u8),
    /// A userfaultfd serves memory of a process from now on, or no longer.
    Register(u8, Span),
    Unregister(u8, Span),
    /// A handler answers a fault.
    Handle(u64),
    /// A handler serves a page, asked or not.
    FillEarly(u8, u64, Service),
    /// The userfaultfd of a process is closed, or its handler dies.
    CloseHandler(u8, bool),
}

fn page() -> impl Strategy<Value = u64> {
    prop_oneof![
        12 => 0..SMALL,
        1 => LARGE..LARGE + 8,
        1 => LARGE + LARGE_PAGES - 8..LARGE + LARGE_PAGES
    ]
}

fn whole_span() -> impl Strategy<Value = Span> {
    (page(), 1..=12_u64).prop_map(|(first, pages)| {
        let end = if first < SMALL { SMALL } else { (first / 8 + 1) * 8 };
        Span::of(first, pages.min(end - first))
    })
}

fn span() -> impl Strategy<Value = Span> {
    let head = prop_oneof![15 => Just(0), 1 => 1..2048_u64];
    let tail = prop_oneof![3 => Just(0), 1 => 1..2048_u64];
    (whole_span(), head, tail).prop_map(|(span, head, tail)| Span { head, tail, ..span })
}

fn cells() -> impl Strategy<Value = Cells> {
    (whole_span(), 0..CELLS, 0..CELLS).prop_map(|(span, head, tail)| {
        let (first, end) = (span.first * CELLS + head, (span.first + span.pages) * CELLS);
        Cells { first, count: end.saturating_sub(first + tail).max(1) }
    })
}

fn object_cells() -> impl Strategy<Value = Cells> {
    let most = MOST_PAGES * CELLS;
    (0..20 * CELLS, 1..6 * CELLS)
        .prop_map(move |(first, count)| Cells { first, count: count.min(most - first) })
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![(0..24_u64).prop_map(|pages| pages * CELLS), 0..24 * CELLS]
}

fn copied() -> impl Strategy<Value = Copied> {
    (cells(), cells(), any::<u8>(), any::<bool>()).prop_map(
        |(here, there, other, is_from_other)| {
            let here = Cells { count: here.count.min(there.count), ..here };
            Copied { here, there: there.first, other, is_from_other }
        },
    )
}

fn kind() -> impl Strategy<Value = Kind> {
    select(vec![Kind::Anonymous, Kind::Private, Kind::Shared(0), Kind::Shared(1)])
}

fn what() -> impl Strategy<Value = What> {
    let provided = prop_oneof![
        1 => Just(Provided::None), 2 => Just(Provided::Populated), 1 => Just(Provided::Locked)
    ];
    let advice = select(vec![0, 1, 2, 3, 4, 4, 20, 21, 21, 21, 22, 22, 22, 23, 23, 23]);
    let object = 0..2_usize;
    prop_oneof![
        6 => (span(), kind(), 0..12_u64, provided).prop_map(|(s, k, o, p)| What::Map(s, k, o, p)),
        1 => Just(What::MapLarge),
        3 => span().prop_map(What::Unmap),
        4 => (span(), 0..3_u8).prop_map(|(s, p)| What::Protect(s, p)),
        3 => (span(), 0..SMALL - 12).prop_map(|(s, to)| What::Remap(s, to)),
        10 => (span(), advice).prop_map(|(s, a)| What::Advise(s, a)),
        2 => page().prop_map(|first| What::Advise(Span::of(first, 1), 9)),
        2 => Just(What::Advise(Span::of(LARGE, LARGE_PAGES), 25)),
        1 => Just(What::Advise(Span::of(LARGE, LARGE_PAGES), 21)),
        4 => (span(), any::<bool>()).prop_map(|(s, on)| What::Lock(s, on)),
        2 => span().prop_map(What::Unlock),
        1 => prop_oneof![2 => Just(1), 1 => 2..4_u8].prop_map(What::LockAll),
        1 => Just(What::UnlockAll),
        4 => (0..8 * CELLS).prop_map(|end| What::Break(HEAP - CELLS + end)),
        4 => span().prop_map(What::Store),
        5 => (span(), page(), prop_oneof![0..4096_u64, 4086..4096_u64])
            .prop_map(|(s, p, inside)| What::Tell(s, p * CELLS * CELL + inside)),
        8 => cells().prop_map(What::Load),
        10 => (cells(), 0..63_u8).prop_map(|(c, v)| What::Fill(c, v)),
        6 => copied().prop_map(What::Copy),
        2 => Just(What::SwapIn),
        1 => Just(What::SwapInObjects),
        6 => (page(), any::<bool>()).prop_map(|(p, w)| What::Touch(p, w)),
        6 => (object.clone(), object_cells()).prop_map(|(o, c)| What::Read(o, c)),
        8 => (object, object_cells(), 0..63_u8, 0..5 * CELLS)
            .prop_map(|(o, c, v, stop)| What::Write(o, c, v, stop)),
        4 => object_cells().prop_map(|c| What::Sync(0, c)),
    ]
}

fn small_span() -> impl Strategy<Value = Span> {
    (0..SMALL, 1..=12_u64).prop_map(|(first, pages)| Span::of(first, pages.min(SMALL - first)))
}

fn service() -> impl Strategy<Value = Service> {
    prop_oneof![(0..63_u8).prop_map(Service::Copy), Just(Service::Zero), Just(Service::Wake)]
}

fn step() -> impl Strategy<Value = Step> {
    let way = prop_oneof![
        8 => Just(Way::Poll), 2 => Just(Way::Thread), 1 => Just(Way::Early), 1 => Just(Way::Mixed),
        1 => Just(Way::Without)
    ];
    let object = 0..2_usize;
    prop_oneof![
        16 => (any::<u8>(), what(), prop::bool::weighted(0.7), any::<u64>())
            .prop_map(|(by, w, s, n)| Step::Make(by, w, s, n)),
        20 => (any::<u8>(), way, any::<u64>()).prop_map(|(f, w, n)| Step::Advance(f, w, n)),
        3 => any::<u8>().prop_map(Step::Cancel),
        10 => any::<u64>().prop_map(Step::Answer),
        4 => Just(Step::Serve),
        2 => (0..6_u8).prop_map(Step::Kill),
        2 => (0..6_u8).prop_map(Step::Signal),
        3 => (any::<u8>(), small_span()).prop_map(|(by, s)| Step::Register(by, s)),
        1 => (any::<u8>(), small_span()).prop_map(|(by, s)| Step::Unregister(by, s)),
        6 => any::<u64>().prop_map(Step::Handle),
        3 => (any::<u8>(), 0..SMALL, service()).prop_map(|(by, p, s)| Step::FillEarly(by, p, s)),
        1 => (any::<u8>(), any::<bool>()).prop_map(|(by, d)| Step::CloseHandler(by, d)),
        1 => prop::bool::weighted(0.8).prop_flat_map(|r| (Just(r), prop::bool::weighted(0.8)))
            .prop_map(|(r, w)| Step::Keep(r, w)),
        4 => (any::<u8>(), page(), 0..CELLS, 0..63_u8)
            .prop_map(|(by, p, c, v)| Step::Poke(by, p * CELLS + c, v)),
        1 => (object.clone(), size(), any::<u64>()).prop_map(|(o, s, n)| Step::Resize(o, s, n)),
        1 => (object, object_cells(), any::<u64>()).prop_map(|(o, c, n)| Step::Punch(o, c, n)),
        1 => (0..16_u64).prop_map(Step::ReadAhead),
        2 => Just(Step::Evict),
        1 => (1..64_u64, any::<u64>()).prop_map(|(p, n)| Step::Reclaim(p, n)),
        1 => (any::<u8>(), any::<u64>()).prop_map(|(by, n)| Step::Fork(by, n)),
        1 => (any::<u8>(), any::<u64>()).prop_map(|(by, n)| Step::Exit(by, n)),
    ]
}

/// The order of the folios of files and shared memory, and the steps.
pub fn sequence() -> impl Strategy<Value = (u8, Vec<Step>)> {
    (select(vec![0_u8, 0, 1, 2, 4]), prop::collection::vec(step(), 1..120))
}
