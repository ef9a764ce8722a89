//! Walks over the mappings of an object release the lock repeatedly, and other calls change the
//! mappings in between. The walk must miss no page that was mapped when it began.

use std::thread;

use bindery::addr::{PageRange, VirtAddr};
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::testing::UnmapWalk;
use bindery::{Access, AddressSpace, Inspection, Object, Protection, Remap, Sharing};
use bindery_hosted::{Config, Machine, TlbKind};
use proptest::prelude::*;

use crate::support::objects::{PAGE, memfd};
use crate::support::objects_fixture::{AT, Fixture, map, with_fixture};
use crate::support::{self, MIB, READ_WRITE, audit, memory_with};

type X = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<X>>;

/// Pages of the object.
const PAGES: u64 = 24;
/// The destination of pieces of mappings.
const ELSEWHERE: u64 = AT + 64 * MIB;

/// The operation between two steps of a walk.
#[derive(Clone, Copy, Debug)]
enum Op {
    /// The space, the first page, the number of pages, and whether they become read-only.
    Protect(usize, u64, u64, bool),
    Unmap(usize, u64, u64),
    /// The space, the first page, the number of pages, the destination page in the other area, and
    /// whether the move is in the reverse direction.
    Move(usize, u64, u64, u64, bool),
    Fork(usize),
    /// Maps the object once more, from a page on.
    Map(usize, u64, u64, bool),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (space, page, count) = (0..6_usize, 0..PAGES, 1..8_u64);
    let part = (space.clone(), page.clone(), count.clone());
    prop::collection::vec(
        prop_oneof![
            3 => (part.clone(), any::<bool>())
                .prop_map(|((space, page, count), write)| Op::Protect(space, page, count, write)),
            1 => part.clone().prop_map(|(space, page, count)| Op::Unmap(space, page, count)),
            4 => (part, page.clone(), any::<bool>()).prop_map(
                |((space, page, count), to, back)| Op::Move(space, page, count, to, back)
            ),
            1 => space.clone().prop_map(Op::Fork),
            1 => (space, page, count, any::<bool>())
                .prop_map(|(space, page, count, shared)| Op::Map(space, page, count, shared)),
        ],
        0..40,
    )
}

fn area(elsewhere: bool, page: u64) -> VirtAddr {
    VirtAddr(if elsewhere { ELSEWHERE } else { AT } + page * PAGE)
}

/// A failed operation changes nothing, which is a valid case too.
fn apply<'m>(op: Op, spaces: &mut Vec<Space<'m>>, object: &Object<'m, Machine<X>>) {
    let nth = |n: usize| n % spaces.len();
    match op {
        Op::Protect(space, page, count, write) => {
            let protection = if write { READ_WRITE } else { Protection::READ };
            let _ = spaces[nth(space)].mprotect(area(false, page), count * PAGE, protection);
        }
        Op::Unmap(space, page, count) => {
            let _ = spaces[nth(space)].munmap(area(page % 2 == 0, page), count * PAGE);
        }
        Op::Move(space, page, count, to, back) => {
            let (from, to) = (area(back, page), area(!back, to));
            let _ = spaces[nth(space)].mremap(from, count * PAGE, count * PAGE, Remap::To(to));
        }
        Op::Fork(space) if spaces.len() < 6 => {
            let child = spaces[nth(space)].fork().unwrap();
            spaces.push(child);
        }
        Op::Fork(_) => {}
        Op::Map(space, page, count, shared) => {
            let sharing = if shared { Sharing::Shared } else { Sharing::Private };
            let _ = map(&spaces[nth(space)], object, area(true, page).0, count * PAGE, sharing);
        }
    }
}

/// The places where pages of `ranges` are still mapped.
fn left(space: &Space<'_>, ranges: &[PageRange]) -> Vec<VirtAddr> {
    let mut mappings = Vec::new();
    space.for_each_mapping(|mapping| mappings.push(mapping));
    let mut left = Vec::new();
    for mapping in mappings {
        for page in 0..mapping.range.pages() {
            let at = VirtAddr(mapping.range.start().0 + page * PAGE);
            let index = mapping.page_offset + page;
            let asked = ranges.iter().any(|pages| (pages.first..pages.end).contains(&index));
            if asked && space.inspect(at) != Inspection::Empty {
                left.push(at);
            }
        }
    }
    left
}

/// Two address spaces that map the object, shared and private, with all pages present.
fn two_spaces<'m>(fixture: &Fixture<'m, X>, object: &Object<'m, Machine<X>>) -> Vec<Space<'m>> {
    [Sharing::Shared, Sharing::Private]
        .map(|sharing| {
            let space = fixture.space();
            map(&space, object, AT, PAGES * PAGE, sharing).unwrap();
            for page in 0..PAGES {
                let access = if page % 3 == 0 { Access::Read } else { Access::Write };
                space.fault(area(false, page), access).unwrap();
            }
            space
        })
        .into()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn walks_miss_no_page_whatever_the_mappings_do(
        before in ops(),
        meanwhile in ops(),
        first in 0..PAGES,
        count in 1..PAGES,
        gap in 1..6_u64,
    ) {
        with_fixture::<X>(0, |fixture| {
            let object = memfd(fixture.memory, PAGES * PAGE);
            let mut spaces = two_spaces(fixture, &object);
            for op in before {
                apply(op, &mut spaces, &object);
            }
            let ranges = [(first, count), (first + count + gap, 3)]
                .map(|(first, count)| PageRange::from_count(first, count));
            let mut walk = UnmapWalk::new(&object, &ranges);
            let mut meanwhile = meanwhile.into_iter();
            while !walk.step(|_| ()).expect("nobody changes the mappings now") {
                if let Some(op) = meanwhile.next() {
                    apply(op, &mut spaces, &object);
                }
            }
            for space in &spaces {
                assert_eq!(left(space, &ranges), []);
            }
            fixture.audit(&spaces.iter().collect::<Vec<_>>());
        });
    }
}

/// Steps until the walk has unmapped a page at or behind `until`.
fn step_past(walk: &mut UnmapWalk<'_, '_, Machine<X>>, until: VirtAddr) {
    let mut last = VirtAddr(0);
    while last < until {
        assert_eq!(walk.step(|at| last = at), Some(false));
    }
}

#[test]
fn pages_that_move_behind_the_walk_are_unmapped() {
    with_fixture::<X>(0, |fixture| {
        let object = memfd(fixture.memory, PAGES * PAGE);
        let space = &two_spaces(fixture, &object)[0];
        let ranges = [PageRange::from_count(0, PAGES)];
        let mut walk = UnmapWalk::new(&object, &ranges);
        step_past(&mut walk, area(false, 10));
        // The rest moves to a lower address in a VMA of its own; then all of it moves again.
        for (from, to) in [(area(false, 12), area(true, 40)), (area(true, 40), area(true, 0))] {
            space.mremap(from, 12 * PAGE, 12 * PAGE, Remap::To(to)).unwrap();
        }
        while !walk.step(|_| ()).unwrap() {}
        assert_eq!(left(space, &ranges), []);
    });
}

#[test]
fn a_merge_across_a_walk_hides_nothing() {
    with_fixture::<X>(0, |fixture| {
        let object = memfd(fixture.memory, PAGES * PAGE);
        let space = &two_spaces(fixture, &object)[0];
        space.mprotect(area(false, 0), 12 * PAGE, Protection::READ).unwrap();
        assert_eq!(space.mapping_count(), 2);
        let ranges = [PageRange::from_count(0, PAGES)];
        let mut walk = UnmapWalk::new(&object, &ranges);
        // All of the lower VMA, nothing of the upper one.
        step_past(&mut walk, area(false, 11));
        space.mprotect(area(false, 0), 12 * PAGE, READ_WRITE).unwrap();
        assert_eq!(space.mapping_count(), 1);
        while !walk.step(|_| ()).unwrap() {}
        assert_eq!(left(space, &ranges), []);
    });
}

#[test]
fn a_walk_ends_despite_constant_renewal() {
    with_fixture::<X>(0, |fixture| {
        let object = memfd(fixture.memory, PAGES * PAGE);
        let spaces = two_spaces(fixture, &object);
        let ranges = [PageRange::from_count(0, PAGES)];
        let mut walk = UnmapWalk::new(&object, &ranges);
        let (mut steps, mut at) = (0, [AT, ELSEWHERE]);
        while !walk.step(|_| ()).unwrap() {
            let [from, to] = at.map(VirtAddr);
            for space in &spaces {
                let length = PAGES * PAGE;
                space.mremap(from, length, length, Remap::To(to)).unwrap();
            }
            at.reverse();
            steps += 1;
        }
        for space in &spaces {
            assert_eq!(left(space, &ranges), []);
        }
        // One step per page, plus one per pass and mapping.
        assert!(steps <= 2 * PAGES + 2 * 8, "{steps} steps");
    });
}

#[test]
fn a_walk_visits_only_mappings_of_its_pages() {
    with_fixture::<X>(0, |fixture| {
        let count = 1000;
        let object = memfd(fixture.memory, count * PAGE);
        let space = fixture.space();
        for page in 0..count {
            let request = bindery::MapRequest {
                length: PAGE,
                protection: READ_WRITE,
                place: bindery::Place::Fixed(VirtAddr(AT + 2 * page * PAGE)),
                sharing: Sharing::Shared,
                ..bindery::MapRequest::default()
            };
            let source = bindery::MapObject {
                object: &object,
                offset: page * PAGE,
                access: bindery::FileAccess::READ.union(bindery::FileAccess::WRITE),
            };
            space.mmap_object(&request, &source).unwrap();
        }
        let ranges: Vec<_> = (0..10).map(|n| PageRange::from_count(100 * n + 7, 2)).collect();
        let mut walk = UnmapWalk::new(&object, &ranges);
        while !walk.step(|_| ()).unwrap() {}
        // Two VMAs per range, and at most one in the gap behind each range.
        assert!(walk.visited() <= 30, "{} VMAs", walk.visited());
    });
}

#[test]
fn walks_share_the_lock_and_changes_exclude_them() {
    let config = Config { memory: 64 * MIB, cpus: 2, tlb: TlbKind::Strict, ..Config::default() };
    let (machine, memory) = memory_with::<X>(config);
    let object = memfd(&memory, PAGES * PAGE);
    let space = AddressSpace::new(&memory, support::options()).unwrap();
    map(&space, &object, AT, PAGES * PAGE, Sharing::Shared).unwrap();
    let ranges = [PageRange::from_count(0, PAGES)];
    let (mut one, mut other) = (UnmapWalk::new(&object, &ranges), UnmapWalk::new(&object, &ranges));
    thread::scope(|scope| {
        let mut refused = false;
        one.step(|_| {
            assert!(other.step(|_| ()).is_some(), "a walk keeps another one out");
            scope.spawn(|| {
                machine.on_cpu(Cpu(1), || space.munmap(VirtAddr(AT), PAGE).unwrap());
            });
            // The other thread waits for this walk, and the other walk does not wait for the other
            // thread.
            while UnmapWalk::new(&object, &ranges).step(|_| ()).is_some() {
                thread::yield_now();
            }
            refused = true;
        });
        assert!(refused, "nothing was mapped");
    });
    assert_eq!(one.step(|_| ()), Some(true));
    audit(&machine, &memory, &[&space]);
}
