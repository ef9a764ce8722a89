//! Random sequences. Addresses are close to each other, so that calls overlap; lengths cover pages,
//! tables and several mappings; most arguments are valid.
//!
//! A sequence must not contain the following, which would affect memory that the process itself
//! needs:
//! - ranges that begin in the region and end behind it, unless Linux refuses them as a whole
//!   (`madvise` and `msync` continue after holes);
//! - loads and stores outside of the region.
//!
//! `PROT_EXEC` comes with `PROT_READ` or `PROT_WRITE` only: an execute-only page has
//! architecture-dependent rights.

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::names::*;
use super::operation::{self as op, Operation, OperationKind};
use super::place::{
    BREAK, CLOSED, FILES, FIRST_PROCESS, HIGH, LOW, NO_FILE, PAGE, READ_ONLY, SCRATCH, WRITE_ONLY,
    ZEROES, in_region, page, pages,
};

/// A page of the region, and a number of pages for a call there.
fn stretch() -> impl Strategy<Value = (u64, u64)> {
    let few = prop_oneof![8 => 1..=4_u64, 3 => 5..=12_u64, 1 => 13..=40_u64];
    let cluster = (500..=524_u64, few.clone());
    let low = (LOW.0..LOW.0 + LOW.1, few.clone());
    let at_break = (BREAK - 2..BREAK + 20, few);
    let edges = select(vec![0, 1, 15, 16, 256, 496, 511, 512, 513, 1008]);
    let many = prop_oneof![
        2 => select(vec![1, 2, 16, 17, 256]),
        2 => select(vec![496_u64, 511, 512, 513, 528, 1024]),
    ];
    let high =
        (edges, many).prop_map(|(first, count)| (HIGH.0 + first, count.min(HIGH.1 + 64 - first)));
    prop_oneof![10 => cluster, 4 => low, 1 => at_break, 3 => high]
}

/// Address and length for a call that either completes or fails as a whole.
fn range() -> impl Strategy<Value = (u64, u64)> {
    let whole = stretch().prop_map(|(first, count)| (page(first), pages(count)));
    prop_oneof![15 => whole, 1 => odd_range(select(vec![
        0, 1, PAGE - 1, PAGE + 1, 1 << 50, 1 << 63, u64::MAX - 2 * PAGE + 1, u64::MAX - PAGE + 1,
        u64::MAX,
    ]))]
}

/// As [`range`], for calls that continue after holes.
fn gentle_range() -> impl Strategy<Value = (u64, u64)> {
    let whole = stretch().prop_map(|(first, count)| (page(first), pages(count)));
    let lengths = select(vec![0, 1, PAGE - 1, PAGE + 1, u64::MAX - PAGE + 1, u64::MAX]);
    prop_oneof![15 => whole, 1 => odd_range(lengths)]
}

/// A range at the limit of valid values.
fn odd_range(lengths: impl Strategy<Value = u64>) -> impl Strategy<Value = (u64, u64)> {
    let at = (stretch(), select(vec![0, 0, 0, 1, 8, 2048, PAGE - 1]))
        .prop_map(|((first, _), rest)| page(first) + rest);
    let ordinary = stretch().prop_map(|(_, count)| pages(count));
    (at, prop_oneof![1 => lengths, 1 => ordinary])
}

/// The address of a program's load or store.
fn word() -> impl Strategy<Value = u64> {
    (stretch(), select(vec![0, 0, 8, 2048, PAGE - 8]))
        .prop_map(|((first, _), rest)| page(first) + rest)
}

/// A random subset of the flags, mostly small.
fn some_of(names: &'static Names) -> impl Strategy<Value = u64> {
    let bits = names.iter().map(|(bit, _)| *bit).collect::<Vec<_>>();
    let most = bits.len().min(3);
    subsequence(bits, 0..=most).prop_map(|bits| bits.into_iter().sum())
}

fn protection() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => Just(PROT_READ | PROT_WRITE),
        3 => Just(PROT_READ),
        3 => Just(0),
        1 => Just(PROT_WRITE),
        1 => Just(PROT_READ | PROT_EXEC),
        1 => Just(PROT_READ | PROT_WRITE | PROT_EXEC),
    ]
}

fn file() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => Just(FILES[0]),
        3 => Just(FILES[1]),
        2 => Just(FILES[2]),
        1 => Just(READ_ONLY),
        1 => Just(WRITE_ONLY),
    ]
}

fn any_file() -> impl Strategy<Value = u64> {
    prop_oneof![20 => file(), 1 => Just(CLOSED), 1 => Just(NO_FILE)]
}

/// An offset in a file, or the size of one.
fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => (0..=12_u64).prop_map(pages),
        2 => (0..=24_u64).prop_map(pages),
        1 => (0..=12_u64, select(vec![1, 100, 2048, PAGE - 1])).prop_map(|(n, rest)| pages(n) + rest),
    ]
}

fn odd_offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        40 => offset(),
        1 => select(vec![1 << 63, u64::MAX, i64::MAX as u64, i64::MAX as u64 - PAGE + 1, 1 << 44]),
    ]
}

fn extra_map_flags() -> impl Strategy<Value = u64> {
    prop_oneof![
        10 => Just(0),
        3 => Just(MAP_POPULATE),
        2 => Just(MAP_LOCKED),
        1 => Just(MAP_NORESERVE),
        1 => Just(MAP_POPULATE | MAP_NONBLOCK),
        1 => Just(MAP_LOCKED | MAP_NONBLOCK),
        1 => Just(MAP_STACK),
        1 => Just(MAP_GROWSDOWN),
    ]
}

fn placement() -> impl Strategy<Value = u64> {
    prop_oneof![8 => Just(MAP_FIXED), 3 => Just(MAP_FIXED_NOREPLACE), 2 => Just(0)]
}

/// Anonymous, private or shared memory; files with offsets; `/dev/zero`, shared and opened for
/// writing. (Linux reports other mappings of `/dev/zero` as a file and never merges them with
/// ordinary memory; for the core they are ordinary memory.)
fn mmap() -> impl Strategy<Value = Operation> {
    let kind = prop_oneof![
        6 => Just((MAP_PRIVATE | MAP_ANONYMOUS, NO_FILE, 0)),
        3 => Just((MAP_SHARED | MAP_ANONYMOUS, NO_FILE, 0)),
        3 => (any_file(), offset()).prop_map(|(file, offset)| (MAP_SHARED, file, offset)),
        3 => (any_file(), offset()).prop_map(|(file, offset)| (MAP_PRIVATE, file, offset)),
        1 => offset().prop_map(|offset| (MAP_SHARED, ZEROES[0], offset)),
    ];
    let usual = (range(), protection(), kind, placement(), extra_map_flags()).prop_map(
        |((at, length), protection, (kind, file, offset), place, extra)| {
            op::mmap(at, length, protection, kind | place | extra, file, offset)
        },
    );
    let types = select(vec![0, MAP_SHARED, MAP_PRIVATE, MAP_SHARED | MAP_PRIVATE, MAP_DROPPABLE]);
    let odd = (range(), protection(), types, placement(), some_of(MAP_FLAGS), any_file());
    let odd = (odd, odd_offset()).prop_map(
        |(((at, length), protection, kind, place, extra, file), offset)| {
            // The combination of two types is a third type.
            let mut extra = extra & !(MAP_SHARED | MAP_PRIVATE | MAP_DROPPABLE);
            if kind != MAP_SHARED | MAP_PRIVATE {
                // If the flag is not validated, Linux records it and merges only mappings that
                // requested it; the core ignores the flag.
                extra &= !MAP_SYNC;
            }
            op::mmap(at, length, protection, kind | place | extra, file, offset)
        },
    );
    prop_oneof![15 => usual, 1 => odd]
}

fn mremap() -> impl Strategy<Value = Operation> {
    let both = MREMAP_MAYMOVE | MREMAP_FIXED;
    let flags = prop_oneof![
        8 => Just(both),
        3 => Just(0),
        2 => Just(MREMAP_MAYMOVE),
        3 => Just(both | MREMAP_DONTUNMAP),
        1 => some_of(REMAP_FLAGS),
        1 => Just(8),
    ];
    let length = prop_oneof![
        6 => Just(None),
        4 => stretch().prop_map(|(_, count)| Some(pages(count))),
        1 => odd_range(select(vec![0, 1, PAGE + 1, u64::MAX])).prop_map(|(_, length)| Some(length)),
    ];
    let to = prop_oneof![
        6 => stretch().prop_map(|(first, _)| page(first)),
        // Destinations outside the usual source.
        6 => prop_oneof![LOW.0..496, 524..LOW.0 + LOW.1].prop_map(page),
        1 => odd_range(Just(0)).prop_map(|(at, _)| at),
    ];
    let copy = prop_oneof![12 => Just(false), 1 => Just(true)];
    (range(), length, flags, to, copy).prop_map(|((old, old_length), length, flags, to, copy)| {
        // With an old length of zero, the call duplicates a shared mapping.
        let given = if copy { 0 } else { old_length };
        op::mremap(old, given, length.unwrap_or(old_length), flags, to)
    })
}

/// All advice that does not remove pages.
fn all_but_pageout() -> Vec<u64> {
    ADVICE.iter().map(|(advice, _)| *advice).filter(|advice| *advice != MADV_PAGEOUT).collect()
}

fn advice() -> impl Strategy<Value = u64> {
    prop_oneof![
        5 => Just(MADV_DONTNEED),
        2 => Just(MADV_FREE),
        3 => Just(MADV_POPULATE_READ),
        3 => Just(MADV_POPULATE_WRITE),
        4 => Just(MADV_GUARD_INSTALL),
        3 => Just(MADV_GUARD_REMOVE),
        2 => Just(MADV_REMOVE),
        2 => Just(MADV_COLLAPSE),
        8 => select(all_but_pageout()),
        1 => select(vec![5, 6, 7, 26, 104, 1000]),
    ]
}

/// Steps that affect the collapse of private and shared memory, on whole tables of the high area
/// and guards in them.
fn collapse() -> impl Strategy<Value = Operation> {
    let whole = select(vec![(0, 512_u64), (512, 512), (0, 1024)]);
    let part = (0..1024_u64, 1..=4_u64).prop_map(|(first, count)| (first, count));
    let guards = select(vec![MADV_GUARD_INSTALL, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE]);
    let about = prop_oneof![2 => (whole, Just(MADV_COLLAPSE)), 1 => (part, guards)];
    about.prop_map(|((first, count), advice)| {
        op::madvise(page(HIGH.0 + first), pages(count), advice)
    })
}

fn process_madvise() -> impl Strategy<Value = Operation> {
    let process = prop_oneof![12 => Just(FIRST_PROCESS), 1 => any_file()];
    let flags = prop_oneof![20 => Just(0), 1 => Just(1_u64)];
    (process, vec(gentle_range(), 0..4), advice(), flags).prop_map(
        |(process, ranges, advice, flags)| op::process_madvise(process, &ranges, advice, flags),
    )
}

fn brk() -> impl Strategy<Value = Operation> {
    let around = (BREAK - 1..BREAK + 20, select(vec![0, 0, 0, 1, PAGE - 1]));
    prop_oneof![12 => around.prop_map(|(first, rest)| op::brk(page(first) + rest)),
        1 => select(vec![0, u64::MAX, 1 << 63]).prop_map(op::brk)]
}

fn locks() -> impl Strategy<Value = Operation> {
    let all = prop_oneof![6 => 1..8_u64, 1 => select(vec![0, 8, 9])];
    prop_oneof![
        4 => range().prop_map(|(at, length)| op::mlock(at, length)),
        4 => (range(), select(vec![0, MLOCK_ONFAULT, MLOCK_ONFAULT, 2]))
            .prop_map(|((at, length), flags)| op::mlock2(at, length, flags)),
        4 => range().prop_map(|(at, length)| op::munlock(at, length)),
        1 => all.prop_map(op::mlockall),
        1 => Just(op::munlockall()),
    ]
}

fn looks() -> impl Strategy<Value = Operation> {
    let vector = prop_oneof![
        10 => Just(SCRATCH),
        1 => Just(0),
        1 => stretch().prop_map(|(first, _)| page(first)),
    ];
    prop_oneof![
        4 => (range(), vector).prop_map(|((at, length), vector)| op::mincore(at, length, vector)),
        2 => (gentle_range(), 0..9_u64).prop_map(|((at, length), flags)| op::msync(at, length, flags)),
    ]
}

fn files() -> impl Strategy<Value = Operation> {
    let length =
        || prop_oneof![3 => 1..=300_u64, 2 => (0..=3_u64).prop_map(pages), 1 => 4000..9000_u64];
    let modes = prop_oneof![
        6 => Just(FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE),
        3 => Just(0),
        2 => Just(FALLOC_FL_KEEP_SIZE),
        1 => some_of(ALLOCATE_MODES),
    ];
    prop_oneof![
        4 => (any_file(), odd_offset()).prop_map(|(file, length)| op::ftruncate(file, length)),
        4 => (any_file(), modes, odd_offset(), offset())
            .prop_map(|(file, mode, offset, length)| op::fallocate(file, mode, offset, length)),
        3 => (any_file(), odd_offset(), length())
            .prop_map(|(file, offset, length)| op::read_at(file, offset, length)),
        4 => (any_file(), offset(), length(), 1..200_u64).prop_map(
            |(file, offset, length, stamp)| op::write_at(file, offset, length, stamp)),
        1 => (any_file(), some_of(SEALS)).prop_map(|(file, seals)| op::add_seals(file, seals)),
        1 => any_file().prop_map(op::get_seals),
    ]
}

fn limit() -> impl Strategy<Value = Operation> {
    let resource = select(vec![RLIMIT_AS, RLIMIT_DATA, RLIMIT_MEMLOCK]);
    let pages = prop_oneof![
        6 => Just(UNLIMITED),
        1 => Just(NOTHING),
        3 => 0..=8_u64,
        3 => 9..=64_u64,
    ];
    (resource, pages).prop_map(|(resource, pages)| op::limit(resource, pages))
}

fn operation() -> impl Strategy<Value = Operation> {
    let seal = (range(), prop_oneof![9 => Just(0), 1 => Just(1_u64)]);
    prop_oneof![
        16 => mmap(),
        3 => range().prop_map(|(at, length)| op::munmap(at, length)),
        10 => (range(), protection()).prop_map(|((at, length), p)| op::mprotect(at, length, p)),
        1 => (range(), some_of(PROTECTIONS))
            .prop_filter("what one may do with code is the architecture's affair",
                |(_, protection)| protection & 7 != PROT_EXEC)
            .prop_map(|((at, length), p)| op::mprotect(at, length, p)),
        16 => mremap(),
        16 => (gentle_range(), advice()).prop_map(|((at, length), a)| op::madvise(at, length, a)),
        2 => collapse(),
        3 => process_madvise(),
        3 => brk(),
        8 => locks(),
        5 => looks(),
        1 => seal.prop_map(|((at, length), flags)| op::mseal(at, length, flags)),
        9 => files(),
        1 => limit(),
        12 => word().prop_map(op::load),
        16 => (word(), 1..=255_u64).prop_map(|(at, value)| op::store(at, value)),
        2 => Just(op::fork()),
        4 => Just(op::switch()),
        1 => Just(op::exit()),
    ]
}

/// Requests to a userfaultfd, and calls that affect it.
fn userfaults() -> impl Strategy<Value = Operation> {
    let modes = prop_oneof![
        4 => Just(UFFDIO_REGISTER_MODE_MISSING),
        4 => Just(UFFDIO_REGISTER_MODE_WP),
        4 => Just(UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP),
        2 => Just(UFFDIO_REGISTER_MODE_MINOR),
        1 => 0..16_u64,
    ];
    let mode = || prop_oneof![8 => Just(0), 4 => Just(UFFDIO_MODE_WP), 1 => 0..5_u64];
    let protect = prop_oneof![6 => Just(UFFDIO_WRITEPROTECT_MODE_WP), 3 => Just(0), 1 => 0..5_u64];
    let moves =
        prop_oneof![1 => Just(0), 2 => Just(UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES), 1 => 0..5_u64];
    let source = prop_oneof![
        3 => Just(SCRATCH),
        1 => odd_range(Just(0)).prop_map(|(at, _)| at),
        3 => stretch().prop_map(|(first, _)| page(first)),
    ];
    let place = || stretch().prop_map(|(first, _)| page(first));
    prop_oneof![
        6 => (range(), modes).prop_map(|((at, length), modes)| op::register(at, length, modes)),
        1 => range().prop_map(|(at, length)| op::unregister(at, length)),
        6 => (range(), source, mode())
            .prop_map(|((to, length), from, mode)| op::supply_copy(to, from, length, mode)),
        3 => (range(), mode())
            .prop_map(|((at, length), mode)| op::supply_zeroes(at, length, mode)),
        3 => (range(), mode())
            .prop_map(|((at, length), mode)| op::supply_present(at, length, mode)),
        2 => (range(), mode())
            .prop_map(|((at, length), mode)| op::supply_poison(at, length, mode)),
        6 => (range(), place(), moves)
            .prop_map(|((to, length), from, mode)| op::move_pages(to, from, length, mode)),
        6 => (range(), protect)
            .prop_map(|((at, length), mode)| op::write_protect(at, length, mode)),
    ]
}

/// As [`sequence`], with a userfaultfd.
pub fn sequence_with_userfaults(length: usize) -> impl Strategy<Value = Vec<Operation>> {
    let features = prop_oneof![
        4 => Just(UFFD_FEATURE_SIGBUS),
        2 => Just(UFFD_FEATURE_SIGBUS | UFFD_FEATURE_WP_UNPOPULATED),
        2 => Just(UFFD_FEATURE_SIGBUS | UFFD_FEATURE_WP_ASYNC),
    ];
    let rest = vec(prop_oneof![operation(), userfaults()], 0..=2 * length);
    (features, beginning(), rest).prop_map(|(features, first, rest)| {
        let agreed = [op::agree(features)].into_iter();
        agreed.chain(first).chain(rest).collect()
    })
}

/// Calls that swap pages out and in.
fn swaps() -> impl Strategy<Value = Operation> {
    let outward = || select(vec![MADV_PAGEOUT, MADV_PAGEOUT, MADV_PAGEOUT, MADV_COLD]);
    let before = select(vec![0, 0, MADV_PAGEOUT, MADV_COLD]);
    let huge = select(vec![(0, 512_u64), (512, 512), (3, 509), (500, 24), (1, 1)]);
    let areas = select(SWAPS.iter().map(|(area, _)| *area).collect::<Vec<_>>());
    prop_oneof![
        8 => (gentle_range(), outward()).prop_map(|((at, length), advice)| {
            op::madvise(at, length, advice)
        }),
        4 => (huge, outward()).prop_map(|((first, count), advice)| {
            op::madvise(page(HIGH.0 + first), pages(count), advice)
        }),
        2 => (vec(gentle_range(), 0..3), outward()).prop_map(|(ranges, advice)| {
            op::process_madvise(FIRST_PROCESS, &ranges, advice, 0)
        }),
        2 => (stretch(), before).prop_map(|((first, count), before)| {
            op::free_wiped(page(first), pages(count), before)
        }),
        5 => select(vec![1, 7, 32, 1000, 8000_u64]).prop_map(op::reclaim),
        2 => areas.prop_map(op::swap_to),
        4 => word().prop_map(op::load),
        4 => (word(), 1..=255_u64).prop_map(|(at, value)| op::store(at, value)),
    ]
}

/// As [`sequence`], while the core has swap.
pub fn sequence_with_swap(length: usize) -> impl Strategy<Value = Vec<Operation>> {
    let huge = op::madvise(page(HIGH.0), pages(HIGH.1), MADV_HUGEPAGE);
    let areas = select(vec![COMPRESSED_MEMORY, COMPRESSED_MEMORY, SWAP_DEVICE, FEW_SLOTS]);
    let rest = vec(prop_oneof![operation().boxed(), swaps().boxed()], 0..=2 * length);
    let first = (areas, beginning(), weighted(0.5, Just(huge)));
    (first, rest).prop_map(|((area, first, huge), rest)| {
        let all = [op::swap_to(area)].into_iter().chain(first).chain(huge);
        all.chain(without_chance(rest)).collect()
    })
}

/// The same operations, without those whose results depend on the time of evictions.
fn without_chance(operations: Vec<Operation>) -> impl Iterator<Item = Operation> {
    let mut freed = false;
    operations.into_iter().map(move |mut operation| {
        let a = operation.arguments;
        freed |= operation.operation == OperationKind::FreeWiped;
        match operation.operation {
            OperationKind::Madvise if a[2] == MADV_FREE => {
                freed = true;
                return op::free_wiped(a[0], a[1], 0);
            }
            // The written vector depends on the pages in memory.
            OperationKind::Mincore if in_region(a[2]) => operation.arguments[2] = SCRATCH,
            OperationKind::Madvise if freed && a[2] == MADV_COLLAPSE => {
                operation.arguments[2] = MADV_COLD;
            }
            OperationKind::ProcessMadvise
                if a[1] == MADV_FREE || freed && a[1] == MADV_COLLAPSE =>
            {
                operation.arguments[1] = MADV_COLD;
            }
            _ => {}
        }
        operation
    })
}

/// The start of sequences: content in the files, and mappings that cover most of the addresses of
/// later calls.
fn beginning() -> impl Strategy<Value = Vec<Operation>> {
    let sizes =
        FILES.map(|file| (1..=20_u64).prop_map(move |size| op::ftruncate(file, pages(size))));
    let kind = prop_oneof![
        6 => Just((MAP_PRIVATE | MAP_ANONYMOUS, NO_FILE)),
        2 => Just((MAP_SHARED | MAP_ANONYMOUS, NO_FILE)),
        1 => Just((MAP_SHARED, FILES[0])),
        1 => Just((MAP_PRIVATE, FILES[0])),
    ];
    let low = (480..=504_u64, 20..=64_u64, kind).prop_map(|(first, count, (kind, file))| {
        op::mmap(page(first), pages(count), PROT_READ | PROT_WRITE, kind | MAP_FIXED, file, 0)
    });
    let sharing = prop_oneof![2 => Just(MAP_PRIVATE), 1 => Just(MAP_SHARED)];
    let sizes_of_high = select(vec![512_u64, 600, 1024]);
    let high = (sizes_of_high, protection(), sharing).prop_map(|(count, protection, sharing)| {
        let flags = sharing | MAP_ANONYMOUS | MAP_FIXED;
        op::mmap(page(HIGH.0), pages(count), protection, flags, NO_FILE, 0)
    });
    let first = (weighted(0.8, sizes), weighted(0.9, low), weighted(0.4, high), vec(mmap(), 0..4));
    first.prop_map(|(sizes, low, high, more)| {
        let sizes = sizes.into_iter().flatten();
        sizes.chain(low).chain(high).chain(more).collect()
    })
}

/// A sequence: its start, and `length` operations on average.
pub fn sequence(length: usize) -> impl Strategy<Value = Vec<Operation>> {
    (beginning(), vec(operation(), 0..=2 * length)).prop_map(|(mut first, rest)| {
        first.extend(rest);
        first
    })
}
