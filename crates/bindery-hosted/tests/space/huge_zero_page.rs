//! The huge zero page: a first read maps it where a huge folio would fit. Tests the effect of every
//! call on the page, and of the first write.

use bindery::addr::{Order, VirtAddr};
use bindery::arch::Level;
use bindery::{
    Access, Advice, FrameKind, FrameRange, Inspection, LargeFolioEffort, PinTime, Place,
    Protection, Remap, Residence, Resolved, testing,
};
use bindery_hosted::Walk;
use bindery_linux::proc::{self, KPF_THP, KPF_ZERO_PAGE, PhysicalAddresses};

use crate::support::fixture::Fixture;
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, options, strict, use_order};

on_every_architecture! {
    a_read_maps_one_leaf_for_all => read;
    where_it_does_not_fit_small_pages_come => does_not_fit;
    a_write_brings_a_huge_folio => write;
    a_write_makes_do_with_a_page => write_without_block;
    what_is_cut_reads_as_zero => cuts;
    it_moves_whole_and_in_parts => moves;
    it_is_prot_none_and_shown => hide;
    a_child_shares_it => fork;
    a_pin_makes_the_page_exclusive => pins;
    it_is_collapsed_as_missing_pages_are => collapse;
    advice_leaves_it_alone => advice;
    others_see_what_it_is => seen;
    memory_runs_out_at_every_point => exhausted;
}

const PAGE: u64 = 4096;
/// The address of the fixture's memory, aligned for huge leaves.
const AT: u64 = GIB;
/// Congruent with `AT` modulo a table.
const TO: u64 = 4 * GIB;
const HUGE: u64 = 2 * MIB;

/// A fixture with 4 MiB of untouched memory, huge folios, and the huge zero page.
#[track_caller]
fn with_huge_zeroes<A: Walk>(play: impl FnOnce(&Fixture<'_, '_, A>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, 9);
    memory.set_huge_zero_page(true);
    let free = memory.free_frame_count();
    {
        let space = bindery::AddressSpace::new(&memory, options()).unwrap();
        let program = bindery_hosted::Program::new(&machine, &space);
        let fixture = Fixture { machine: &machine, memory: &memory, space: &space, program };
        space.mmap(&fixed(AT, 2 * HUGE)).unwrap();
        play(&fixture);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    let kept = memory.events().huge_zero_pages * HUGE / PAGE;
    assert_eq!(memory.free_frame_count(), free - kept, "frames have leaked");
}

/// The level of the leaf at `at`, and the kind of its frame.
#[track_caller]
fn leaf<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64) -> (Level<A>, FrameKind) {
    match fixture.space.inspect(VirtAddr(at)) {
        Inspection::Page { frame, level, .. } => (level, fixture.memory.frame_kind(frame)),
        other => panic!("{at:#x} is {other:?}"),
    }
}

const ZERO: FrameKind = FrameKind::Zero;
const OWN: FrameKind = FrameKind::Anonymous;

#[track_caller]
fn reads_zero<A: Walk>(fixture: &Fixture<'_, '_, A>, at: u64, pages: u64) {
    for page in 0..pages {
        assert_eq!(
            fixture.program.load(VirtAddr(at + page * PAGE)),
            Ok(0),
            "page {page} at {at:#x}"
        );
    }
}

fn resident<A: Walk>(fixture: &Fixture<'_, '_, A>) -> u64 {
    fixture.space.counts().anonymous_pages
}

fn read<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        let fault = fixture.space.fault(VirtAddr(AT + 17 * PAGE), Access::Read);
        assert_eq!(fault, Ok(Resolved::ZeroPage));
        assert_eq!(leaf(fixture, AT), (Level::PMD, ZERO));
        let before = fixture.space.counts();
        reads_zero(fixture, AT, 512);
        assert_eq!((fixture.space.counts() - before).entries_written, 0, "one fault for all");
        fixture.program.load(VirtAddr(AT + HUGE)).unwrap();
        assert_eq!(fixture.frame(AT), fixture.frame(AT + HUGE), "one block for all");
        assert_eq!(fixture.memory.events().huge_zero_pages, 1);
        assert_eq!(resident(fixture), 0);
        fixture.space.munmap(VirtAddr(AT), 2 * HUGE).unwrap();
        assert_eq!(fixture.space.inspect(VirtAddr(AT)), Inspection::Empty);
    });
}

fn does_not_fit<A: Walk>() {
    let small = |fixture: &Fixture<'_, '_, A>, at: u64| {
        fixture.program.load(VirtAddr(at)).unwrap();
        assert_eq!(leaf(fixture, at), (Level::PTE, ZERO));
    };
    with_huge_zeroes::<A>(|fixture| {
        // The mapping does not cover the whole entry span.
        fixture.space.munmap(VirtAddr(AT), PAGE).unwrap();
        small(fixture, AT + PAGE);
        // Large folios are not wanted here.
        fixture.space.madvise(VirtAddr(AT + HUGE), HUGE, Advice::NoHuge).unwrap();
        small(fixture, AT + HUGE);
    });
    with_huge_zeroes::<A>(|fixture| {
        // The slot has a page.
        fixture.memory.folio_policy().set(Order(9), bindery::SizeMode::Never);
        fixture.fill(AT, 1);
        use_order(fixture.memory, 9);
        small(fixture, AT + PAGE);
        // The huge zero page is switched off.
        fixture.memory.set_huge_zero_page(false);
        assert!(!fixture.memory.uses_huge_zero_page());
        small(fixture, AT + HUGE);
    });
    with_huge_zeroes::<A>(|fixture| {
        // No free block of this size exists.
        let blocks = take_blocks(fixture);
        small(fixture, AT);
        assert_eq!(fixture.memory.events().huge_zero_pages, 0);
        free_blocks(fixture, blocks);
    });
}

/// Allocates all blocks that could be a huge folio.
fn take_blocks<A: Walk>(fixture: &Fixture<'_, '_, A>) -> Vec<FrameRange> {
    std::iter::from_fn(|| fixture.memory.allocate_frames(Order(9))).collect()
}

fn free_blocks<A: Walk>(fixture: &Fixture<'_, '_, A>, blocks: Vec<FrameRange>) {
    for block in blocks {
        // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
        assert!(unsafe { fixture.memory.free_frames(block) });
    }
}

fn write<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        reads_zero(fixture, AT, 1);
        reads_zero(fixture, AT + HUGE, 1);
        let before = fixture.space.counts();
        let fault = fixture.space.fault(VirtAddr(AT + 3 * PAGE), Access::Write);
        assert!(matches!(fault, Ok(Resolved::New(window)) if window.len() == HUGE), "{fault:?}");
        let cost = fixture.space.counts() - before;
        assert_eq!((cost.tables_allocated, cost.invalidations), (0, 1), "{cost:?}");
        assert_eq!((cost.bytes_zeroed, cost.bytes_copied), (HUGE, 0), "{cost:?}");
        assert_eq!(leaf(fixture, AT), (Level::PMD, OWN));
        assert_eq!(leaf(fixture, AT + HUGE), (Level::PMD, ZERO));
        assert_eq!(resident(fixture), 512);
        reads_zero(fixture, AT, 512);
        fixture.fill(AT, 512);
        fixture.assert_filled(AT, 512, AT);
        reads_zero(fixture, AT + HUGE, 512);
        assert_eq!(fixture.memory.events().huge_faults, 1);
    });
}

fn write_without_block<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        fixture.memory.set_large_folio_effort(LargeFolioEffort::Never);
        reads_zero(fixture, AT, 1);
        let blocks = take_blocks(fixture);
        let before = fixture.space.counts();
        fixture.fill(AT + 5 * PAGE, 1);
        let cost = fixture.space.counts() - before;
        assert_eq!(cost.tables_allocated, 0, "there is a table on deposit");
        assert_eq!(leaf(fixture, AT + 5 * PAGE), (Level::PTE, OWN));
        assert_eq!(leaf(fixture, AT + 6 * PAGE), (Level::PTE, ZERO));
        assert_eq!(resident(fixture), 1);
        reads_zero(fixture, AT, 5);
        reads_zero(fixture, AT + 6 * PAGE, 506);
        free_blocks(fixture, blocks);
        // The slot has a table now, so pages are mapped one by one.
        fixture.fill(AT, 512);
        fixture.assert_filled(AT, 512, AT);
        assert_eq!(resident(fixture), 512);
    });
}

fn cuts<A: Walk>() {
    let part = 100 * PAGE;
    type Cut<A> = fn(&Fixture<'_, '_, A>);
    let cuts: [Cut<A>; 4] = [
        |fixture| fixture.space.munmap(VirtAddr(AT), 100 * PAGE).unwrap(),
        |fixture| fixture.space.discard(VirtAddr(AT + PAGE), 99 * PAGE).unwrap(),
        |fixture| fixture.space.mprotect(VirtAddr(AT), 100 * PAGE, Protection::READ).unwrap(),
        |fixture| {
            let to = Remap::To(VirtAddr(TO));
            fixture.space.mremap(VirtAddr(AT), 100 * PAGE, 100 * PAGE, to).unwrap();
        },
    ];
    for cut in cuts {
        with_huge_zeroes::<A>(|fixture| {
            reads_zero(fixture, AT, 1);
            cut(fixture);
            audit(fixture.machine, fixture.memory, &[fixture.space]);
            assert_eq!(leaf(fixture, AT + part), (Level::PTE, ZERO));
            assert_eq!(resident(fixture), 0);
            reads_zero(fixture, AT + part, 412);
            fixture.fill(AT + part, 412);
            fixture.assert_filled(AT + part, 412, AT + part);
            assert_eq!(resident(fixture), 412);
        });
    }
}

fn moves<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        reads_zero(fixture, AT, 1);
        reads_zero(fixture, AT + HUGE, 1);
        let remap = |from: u64, to: u64| {
            let to = Remap::To(VirtAddr(to));
            fixture.space.mremap(VirtAddr(from), HUGE, HUGE, to).unwrap();
            audit(fixture.machine, fixture.memory, &[fixture.space]);
        };
        remap(AT, TO);
        assert_eq!(leaf(fixture, TO), (Level::PMD, ZERO));
        // Moves by one page and back leave the range in small leaves.
        remap(TO, TO + 2 * HUGE + PAGE);
        let there = TO + 2 * HUGE + PAGE;
        assert_eq!(leaf(fixture, there + PAGE), (Level::PTE, ZERO));
        reads_zero(fixture, there, 512);
        remap(there, TO);
        assert_eq!(leaf(fixture, TO + HUGE - PAGE), (Level::PTE, ZERO));
        reads_zero(fixture, TO, 512);
        fixture.fill(TO, 512);
        fixture.assert_filled(TO, 512, TO);
        assert_eq!(leaf(fixture, AT + HUGE), (Level::PMD, ZERO));
    });
}

fn hide<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        let protect = |at: u64, length: u64, protection| {
            fixture.space.mprotect(VirtAddr(at), length, protection).unwrap();
            audit(fixture.machine, fixture.memory, &[fixture.space]);
        };
        reads_zero(fixture, AT, 1);
        reads_zero(fixture, AT + HUGE, 1);
        protect(AT, 2 * HUGE, Protection::empty());
        assert!(fixture.program.load(VirtAddr(AT)).is_err());
        // One of the two leaves is cut while it is `PROT_NONE`.
        protect(AT + 7 * PAGE, 9 * PAGE, READ_WRITE);
        protect(AT, 2 * HUGE, READ_WRITE);
        assert_eq!(leaf(fixture, AT + 7 * PAGE), (Level::PTE, ZERO));
        assert_eq!(leaf(fixture, AT + HUGE), (Level::PMD, ZERO));
        fixture.fill(AT, 1024);
        fixture.assert_filled(AT, 1024, AT);
        protect(AT, 2 * HUGE, Protection::READ);
        assert!(fixture.program.store(VirtAddr(AT), 1).is_err());
    });
}

fn fork<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        fixture.fill(AT + HUGE, 1);
        reads_zero(fixture, AT, 1);
        let child = fixture.space.fork().unwrap();
        assert_eq!(child.counts().anonymous_pages, 512);
        let Inspection::Page { frame, level, .. } = child.inspect(VirtAddr(AT)) else {
            panic!("the child has not got it");
        };
        assert_eq!(level, Level::PMD);
        assert_eq!(frame, fixture.frame(AT));
        let program = bindery_hosted::Program::new(fixture.machine, &child);
        program.store(VirtAddr(AT + PAGE), 5).unwrap();
        assert_eq!(leaf(fixture, AT), (Level::PMD, ZERO));
        reads_zero(fixture, AT, 512);
        fixture.fill(AT, 512);
        assert_eq!(program.load(VirtAddr(AT)), Ok(0));
        assert_eq!(program.load(VirtAddr(AT + PAGE)), Ok(5));
        audit(fixture.machine, fixture.memory, &[fixture.space, &child]);
    });
}

fn pins<A: Walk>() {
    for (protection, time) in [
        (READ_WRITE, PinTime::Short),
        (READ_WRITE, PinTime::Long),
        (Protection::READ, PinTime::Long),
    ] {
        with_huge_zeroes::<A>(|fixture| {
            fixture.space.mprotect(VirtAddr(AT), 2 * HUGE, protection).unwrap();
            reads_zero(fixture, AT, 1);
            let pin = fixture.space.pin(VirtAddr(AT + PAGE), 4, Access::Read, time).unwrap();
            assert_eq!(pin.pages(), 4);
            assert_eq!(leaf(fixture, AT), (Level::PMD, OWN));
            assert_eq!(pin.first(), fixture.frame(AT + PAGE));
            // Later writes are seen through the pin.
            fixture.space.mprotect(VirtAddr(AT), 2 * HUGE, READ_WRITE).unwrap();
            fixture.fill(AT, 512);
            assert_eq!(pin.first(), fixture.frame(AT + PAGE));
        });
    }
}

fn collapse<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        reads_zero(fixture, AT, 1);
        let all = bindery::addr::VirtRange::from_len(VirtAddr(AT), HUGE).unwrap();
        fixture.fill(AT + HUGE, 1);
        fixture.space.collapse_range(all).unwrap();
        assert_eq!(leaf(fixture, AT), (Level::PMD, ZERO), "there is a huge leaf already");
        // The leaf is cut, and one page is written.
        fixture.space.discard(VirtAddr(AT + 9 * PAGE), PAGE).unwrap();
        fixture.fill(AT + 3 * PAGE, 1);
        let limits = bindery::CollapseLimits { missing: 510, ..Default::default() };
        assert_eq!(fixture.space.collapse_some(VirtAddr(AT), 1, &limits).collapsed, 0);
        let limits = bindery::CollapseLimits { missing: 511, ..Default::default() };
        assert_eq!(fixture.space.collapse_some(VirtAddr(AT), 1, &limits).collapsed, 1);
        assert_eq!(leaf(fixture, AT), (Level::PMD, OWN));
        fixture.assert_filled(AT + 3 * PAGE, 1, AT + 3 * PAGE);
        reads_zero(fixture, AT, 3);
        reads_zero(fixture, AT + 4 * PAGE, 508);
    });
}

fn advice<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        reads_zero(fixture, AT, 1);
        for advice in [Advice::Free, Advice::Cold, Advice::PageOut, Advice::WillNeed] {
            fixture.space.madvise(VirtAddr(AT), HUGE, advice).unwrap();
            assert_eq!(leaf(fixture, AT), (Level::PMD, ZERO), "{advice:?}");
        }
        testing::clear_accessed_and_dirty(fixture.space, VirtAddr(AT), 1);
        reads_zero(fixture, AT, 512);
        fixture.space.madvise(VirtAddr(AT), HUGE, Advice::DontNeed).unwrap();
        assert_eq!(fixture.space.inspect(VirtAddr(AT)), Inspection::Empty);
        let request = bindery::MapRequest {
            flags: bindery::MapFlags::POPULATE,
            protection: Protection::READ,
            place: Place::Fixed(VirtAddr(TO)),
            ..fixed(TO, 2 * HUGE)
        };
        fixture.space.mmap(&request).unwrap();
        assert_eq!(
            (leaf(fixture, TO), leaf(fixture, TO + HUGE)),
            ((Level::PMD, ZERO), (Level::PMD, ZERO))
        );
        assert_eq!(resident(fixture), 0);
    });
}

fn seen<A: Walk>() {
    with_huge_zeroes::<A>(|fixture| {
        reads_zero(fixture, AT, 1);
        let first = u64::from(fixture.frame(AT).0);
        let mut words = vec![0; 512];
        proc::pagemap(fixture.space, AT / PAGE, PhysicalAddresses::Shown, &mut words);
        for (page, word) in (first..).zip(&words) {
            assert_eq!(word & ((1 << 55) - 1), page);
            assert_eq!((word >> 63, word >> 61 & 1, word >> 56 & 1), (1, 0, 0), "{word:#x}");
        }
        let mut flags = vec![0; 512];
        proc::kpageflags(fixture.memory, first, &mut flags);
        let both = 1 << KPF_ZERO_PAGE | 1 << KPF_THP;
        assert!(flags.iter().all(|word| word & both == both));
        let mut counts = vec![1; 512];
        proc::kpagecount(fixture.memory, first, &mut counts);
        assert!(counts.iter().all(|count| *count == 0));
        let mut residence = Vec::new();
        fixture
            .space
            .mincore(VirtAddr(AT), HUGE, |what, pages| residence.push((what, pages)))
            .unwrap();
        assert!(residence.iter().all(|(what, _)| *what == Residence::Resident), "{residence:?}");
        let mut listing = String::new();
        proc::smaps_rollup(fixture.space, &mut listing).unwrap();
        for line in ["Rss:", "Pss:", "Anonymous:", "AnonHugePages:"] {
            let line = listing.lines().find(|found| found.starts_with(line)).unwrap();
            assert_eq!(line.split_whitespace().nth(1), Some("0"), "{line}");
        }
    });
}

fn exhausted<A: Walk>() {
    let calls: [fn(&Fixture<'_, '_, A>) -> bool; 3] = [
        |fixture| fixture.space.fault(VirtAddr(AT), Access::Read).is_ok(),
        |fixture| fixture.space.fault(VirtAddr(AT + PAGE), Access::Write).is_ok(),
        |fixture| {
            let to = Remap::To(VirtAddr(TO + PAGE));
            fixture.space.mremap(VirtAddr(AT), HUGE, HUGE, to).is_ok()
        },
    ];
    for (number, call) in calls.iter().enumerate() {
        for point in 0.. {
            let mut failed = 0;
            with_huge_zeroes::<A>(|fixture| {
                fixture.fill(AT + HUGE, 1);
                if number > 0 {
                    reads_zero(fixture, AT, 1);
                }
                fixture.memory.fail_allocations_after(Some(point));
                let done = call(fixture);
                failed = testing::failed_allocations(fixture.memory);
                fixture.memory.fail_allocations_after(None);
                audit(fixture.machine, fixture.memory, &[fixture.space]);
                assert!(done || failed > 0);
                assert!(done || call(fixture), "with memory again");
                let at = if number == 2 { TO + PAGE } else { AT };
                reads_zero(fixture, at, 512);
                fixture.fill(at, 512);
                fixture.assert_filled(at, 512, at);
            });
            if failed == 0 {
                assert!(point > 0, "it takes memory");
                break;
            }
        }
    }
}
