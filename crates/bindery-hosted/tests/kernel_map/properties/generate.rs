//! Random calls of a kernel. Sizes and addresses are close to the boundaries of pieces.

use bindery::addr::PAGE_SIZE;
use bindery::arch::{MemoryType, Permissions};
use bindery::{AreaKind, Content, Pauses, Pieces, UnmapTime};
use bindery_hosted::Walk;
use proptest::prelude::*;

use crate::support::{KIB, MIB};

/// Frames of the pool: the first, their number, and their distance.
pub type Run = (u16, u16, i8);

#[derive(Clone, Debug)]
pub enum Step {
    /// Pages, bytes missing from the last page, alignment, requested permissions.
    Vmalloc(u64, u64, u32, Pieces, Content, Permissions, Pauses),
    Vmap(Vec<Run>, Permissions, MemoryType, Pieces),
    VmapRanges(Vec<Run>, Pieces),
    /// The device, the offset in it, size, type.
    Ioremap(u8, u64, u64, MemoryType),
    /// The area, the first page and the number of pages (both modulo the area's size).
    Protect(u8, u16, u16, Permissions),
    /// The area, pages, alignment.
    Vrealloc(u8, u64, u32),
    Free(u8, UnmapTime),
    /// A wrong free: the page, its area, and the kind of free.
    FreeWrongly(u8, i16, AreaKind),
    Write(u8, u16),
    Purge,
    Check,
}

pub struct Limits {
    /// Pages of windows.
    pub windows: Vec<u64>,
    /// The maximum number of pages in a request.
    pub largest: u64,
}

impl Limits {
    pub fn usual() -> Self {
        Self { windows: vec![1 << 21, 4096, 2048], largest: 1600 }
    }
}

/// Pages of the pool.
const POOL: u16 = 1536;

/// Pages of the pool, or fewer if the architecture allows fewer.
pub fn pool_pages<A: Walk>() -> u64 {
    if A::INDEX_BITS < 9 { 24 } else { u64::from(POOL) }
}

fn some_pages(largest: u64) -> impl Strategy<Value = u64> {
    let pages = prop_oneof![
        4 => 1..=4_u64,
        3 => 14..=18_u64,
        2 => 30..=200_u64,
        3 => 510..=514_u64,
        2 => prop::sample::select(vec![528_u64, 1024, 1025, 1536]),
    ];
    pages.prop_map(move |pages| pages % largest + u64::from(pages % largest == 0))
}

fn permissions() -> impl Strategy<Value = Permissions> {
    let read_write = Permissions::READ | Permissions::WRITE;
    prop_oneof![
        6 => Just(read_write),
        3 => Just(Permissions::READ),
        2 => Just(Permissions::READ | Permissions::EXECUTE),
        1 => Just(Permissions::EXECUTE),
        1 => Just(read_write | Permissions::EXECUTE),
        1 => Just(Permissions::empty()),
        1 => Just(Permissions::READ | Permissions::USER),
    ]
}

fn run() -> impl Strategy<Value = Run> {
    let first = prop_oneof![prop::sample::select(vec![0_u16, 16, 512, 1024, 17]), 0..POOL];
    let count = prop_oneof![2 => 1..5_u16, 2 => 7..20_u16, 1 => Just(512_u16), 1 => 500..520_u16];
    (first, count, prop::sample::select(vec![1_i8, 1, 1, -1, 2, 0]))
}

fn step(largest: u64) -> impl Strategy<Value = Step> {
    let pieces = || prop::sample::select(vec![Pieces::Largest, Pieces::Largest, Pieces::Base]);
    let content = prop::sample::select(vec![Content::Any, Content::Zeroes]);
    let pauses = prop::sample::select(vec![Pauses::Allowed, Pauses::Allowed, Pauses::Never]);
    let odd = || prop::sample::select(vec![0_u32, 11, 63]);
    let align = move || prop_oneof![6 => Just(12_u32), 2 => 12..22_u32, 1 => odd()];
    let runs = || prop::collection::vec(run(), 0..6);
    let any_type = || prop::sample::select(MemoryType::ALL.to_vec());
    let kind = prop::sample::select(vec![AreaKind::Vmalloc, AreaKind::Vmap, AreaKind::Ioremap]);
    let time = prop::sample::select(vec![UnmapTime::Later, UnmapTime::Later, UnmapTime::Now]);
    let aligned = prop::sample::select(vec![MIB, 64 * KIB]);
    let offset = prop_oneof![3 => Just(0_u64), 1 => 1..20_000_u64, 1 => aligned];
    prop_oneof![
        6 => (some_pages(largest), 0..4096_u64, align(), pieces(), content, permissions(), pauses)
            .prop_map(|(pages, less, align, pieces, content, permissions, pauses)| {
                Step::Vmalloc(pages, less, align, pieces, content, permissions, pauses)
            }),
        4 => (runs(), permissions(), any_type(), pieces())
            .prop_map(|(runs, permissions, memory, pieces)| {
                Step::Vmap(runs, permissions, memory, pieces)
            }),
        3 => (runs(), pieces()).prop_map(|(runs, pieces)| Step::VmapRanges(runs, pieces)),
        3 => (any::<u8>(), offset, some_pages(largest), 0..4096_u64, any_type())
            .prop_map(|(device, offset, pages, less, memory)| {
                Step::Ioremap(device, offset, pages * PAGE_SIZE - less, memory)
            }),
        6 => (any::<u8>(), any::<u16>(), any::<u16>(), permissions())
            .prop_map(|(which, first, count, permissions)| {
                Step::Protect(which, first, count, permissions)
            }),
        4 => (any::<u8>(), some_pages(largest), align())
            .prop_map(|(which, pages, align)| Step::Vrealloc(which, pages, align)),
        5 => (any::<u8>(), time).prop_map(|(which, time)| Step::Free(which, time)),
        1 => (any::<u8>(), -3..600_i16, kind)
            .prop_map(|(which, page, kind)| Step::FreeWrongly(which, page, kind)),
        5 => (any::<u8>(), any::<u16>()).prop_map(|(which, page)| Step::Write(which, page)),
        1 => Just(Step::Purge),
        2 => Just(Step::Check),
    ]
}

pub fn sequence(limits: &Limits) -> impl Strategy<Value = (u64, Vec<Step>)> + use<> {
    let steps = prop::collection::vec(step(limits.largest), 8..40);
    (prop::sample::select(limits.windows.clone()), steps)
}
