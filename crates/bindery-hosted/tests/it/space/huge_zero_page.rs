//! The huge zero page: what a first read maps where a huge folio would fit, what every call
//! makes of it, and the first write.

use bindery::addr::VirtAddr;
use bindery::linux::proc::{self, KPF_THP, KPF_ZERO_PAGE, PhysicalAddresses};
use bindery::{
    Access, Advice, FrameKind, FrameRange, Inspection, LargeFolioEffort, PinTime, Place,
    Protection, Remap, Residence, Resolved, testing,
};
use bindery_hosted::Walk;

use crate::support::stage::Stage;
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
    a_pin_makes_the_memory_the_program_s_own => pins;
    it_is_collapsed_as_missing_pages_are => collapse;
    advice_leaves_it_alone => advice;
    others_see_what_it_is => seen;
    memory_runs_out_at_every_point => exhausted;
}

const PAGE: u64 = 4096;
/// Two slots that huge leaves fit in.
const AT: u64 = GIB;
/// Congruent with `AT` modulo a table.
const TO: u64 = 4 * GIB;
const HUGE: u64 = 2 * MIB;

/// A stage with 4 MiB of untouched memory, huge folios, and the huge zero page.
#[track_caller]
fn with_huge_zeroes<A: Walk>(play: impl FnOnce(&Stage<'_, '_, A>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    use_order(&memory, 9);
    memory.set_huge_zero_page(true);
    let free = memory.free_frame_count();
    {
        let space = bindery::AddressSpace::new(&memory, options()).unwrap();
        let program = bindery_hosted::Program::new(&machine, &space);
        let stage = Stage { machine: &machine, memory: &memory, space: &space, program };
        space.mmap(&fixed(AT, 2 * HUGE)).unwrap();
        play(&stage);
        audit(&machine, &memory, &[&space]);
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    let kept = memory.events().huge_zero_pages * HUGE / PAGE;
    assert_eq!(memory.free_frame_count(), free - kept, "frames have leaked");
}

/// Level of the leaf at `at`, and what its frame is.
#[track_caller]
fn leaf<A: Walk>(stage: &Stage<'_, '_, A>, at: u64) -> (u8, FrameKind) {
    match stage.space.inspect(VirtAddr(at)) {
        Inspection::Page { frame, level, .. } => (level, stage.memory.frame_kind(frame)),
        other => panic!("{at:#x} is {other:?}"),
    }
}

const ZERO: FrameKind = FrameKind::Zero;
const OWN: FrameKind = FrameKind::Anonymous;

#[track_caller]
fn reads_zero<A: Walk>(stage: &Stage<'_, '_, A>, at: u64, pages: u64) {
    for page in 0..pages {
        assert_eq!(stage.program.load(VirtAddr(at + page * PAGE)), Ok(0), "page {page} at {at:#x}");
    }
}

fn resident<A: Walk>(stage: &Stage<'_, '_, A>) -> u64 {
    stage.space.counts().anonymous_pages
}

fn read<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        let fault = stage.space.fault(VirtAddr(AT + 17 * PAGE), Access::Read);
        assert_eq!(fault, Ok(Resolved::ZeroPage));
        assert_eq!(leaf(stage, AT), (2, ZERO));
        let before = stage.space.counts();
        reads_zero(stage, AT, 512);
        assert_eq!((stage.space.counts() - before).entries_written, 0, "one fault for all");
        stage.program.load(VirtAddr(AT + HUGE)).unwrap();
        assert_eq!(stage.frame(AT), stage.frame(AT + HUGE), "one block for all");
        assert_eq!(stage.memory.events().huge_zero_pages, 1);
        assert_eq!(resident(stage), 0);
        stage.space.munmap(VirtAddr(AT), 2 * HUGE).unwrap();
        assert_eq!(stage.space.inspect(VirtAddr(AT)), Inspection::Empty);
    });
}

fn does_not_fit<A: Walk>() {
    let small = |stage: &Stage<'_, '_, A>, at: u64| {
        stage.program.load(VirtAddr(at)).unwrap();
        assert_eq!(leaf(stage, at), (1, ZERO));
    };
    with_huge_zeroes::<A>(|stage| {
        // Not all of the slot is the mapping's.
        stage.space.munmap(VirtAddr(AT), PAGE).unwrap();
        small(stage, AT + PAGE);
        // It is not wanted.
        stage.space.madvise(VirtAddr(AT + HUGE), HUGE, Advice::NoHuge).unwrap();
        small(stage, AT + HUGE);
    });
    with_huge_zeroes::<A>(|stage| {
        // A page stands in the slot.
        stage.memory.folio_policy().set(9, bindery::SizeMode::Never);
        stage.fill(AT, 1);
        use_order(stage.memory, 9);
        small(stage, AT + PAGE);
        // It is switched off.
        stage.memory.set_huge_zero_page(false);
        assert!(!stage.memory.uses_huge_zero_page());
        small(stage, AT + HUGE);
    });
    with_huge_zeroes::<A>(|stage| {
        // There is no block for it.
        let blocks = take_blocks(stage);
        small(stage, AT);
        assert_eq!(stage.memory.events().huge_zero_pages, 0);
        give_back(stage, blocks);
    });
}

/// Takes all blocks that a huge folio could be made of.
fn take_blocks<A: Walk>(stage: &Stage<'_, '_, A>) -> Vec<FrameRange> {
    std::iter::from_fn(|| stage.memory.allocate_frames(9)).collect()
}

fn give_back<A: Walk>(stage: &Stage<'_, '_, A>, blocks: Vec<FrameRange>) {
    for block in blocks {
        // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
        assert!(unsafe { stage.memory.free_frames(block) });
    }
}

fn write<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        reads_zero(stage, AT, 1);
        reads_zero(stage, AT + HUGE, 1);
        let before = stage.space.counts();
        let fault = stage.space.fault(VirtAddr(AT + 3 * PAGE), Access::Write);
        assert!(matches!(fault, Ok(Resolved::New(window)) if window.len() == HUGE), "{fault:?}");
        let cost = stage.space.counts() - before;
        assert_eq!((cost.tables_allocated, cost.invalidations), (0, 1), "{cost:?}");
        assert_eq!((cost.bytes_zeroed, cost.bytes_copied), (HUGE, 0), "{cost:?}");
        assert_eq!(leaf(stage, AT), (2, OWN));
        assert_eq!(leaf(stage, AT + HUGE), (2, ZERO));
        assert_eq!(resident(stage), 512);
        reads_zero(stage, AT, 512);
        stage.fill(AT, 512);
        stage.assert_filled(AT, 512, AT);
        reads_zero(stage, AT + HUGE, 512);
        assert_eq!(stage.memory.events().huge_faults, 1);
    });
}

fn write_without_block<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        stage.memory.set_large_folio_effort(LargeFolioEffort::Never);
        reads_zero(stage, AT, 1);
        let blocks = take_blocks(stage);
        let before = stage.space.counts();
        stage.fill(AT + 5 * PAGE, 1);
        let cost = stage.space.counts() - before;
        assert_eq!(cost.tables_allocated, 0, "there is a table on deposit");
        assert_eq!(leaf(stage, AT + 5 * PAGE), (1, OWN));
        assert_eq!(leaf(stage, AT + 6 * PAGE), (1, ZERO));
        assert_eq!(resident(stage), 1);
        reads_zero(stage, AT, 5);
        reads_zero(stage, AT + 6 * PAGE, 506);
        give_back(stage, blocks);
        // The slot has a table now: pages come one by one.
        stage.fill(AT, 512);
        stage.assert_filled(AT, 512, AT);
        assert_eq!(resident(stage), 512);
    });
}

fn cuts<A: Walk>() {
    let part = 100 * PAGE;
    type Cut<A> = fn(&Stage<'_, '_, A>);
    let cuts: [Cut<A>; 4] = [
        |stage| stage.space.munmap(VirtAddr(AT), 100 * PAGE).unwrap(),
        |stage| stage.space.discard(VirtAddr(AT + PAGE), 99 * PAGE).unwrap(),
        |stage| stage.space.mprotect(VirtAddr(AT), 100 * PAGE, Protection::READ).unwrap(),
        |stage| {
            let to = Remap::To(VirtAddr(TO));
            stage.space.mremap(VirtAddr(AT), 100 * PAGE, 100 * PAGE, to).unwrap();
        },
    ];
    for cut in cuts {
        with_huge_zeroes::<A>(|stage| {
            reads_zero(stage, AT, 1);
            cut(stage);
            audit(stage.machine, stage.memory, &[stage.space]);
            assert_eq!(leaf(stage, AT + part), (1, ZERO));
            assert_eq!(resident(stage), 0);
            reads_zero(stage, AT + part, 412);
            stage.fill(AT + part, 412);
            stage.assert_filled(AT + part, 412, AT + part);
            assert_eq!(resident(stage), 412);
        });
    }
}

fn moves<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        reads_zero(stage, AT, 1);
        reads_zero(stage, AT + HUGE, 1);
        let remap = |from: u64, to: u64| {
            let to = Remap::To(VirtAddr(to));
            stage.space.mremap(VirtAddr(from), HUGE, HUGE, to).unwrap();
            audit(stage.machine, stage.memory, &[stage.space]);
        };
        remap(AT, TO);
        assert_eq!(leaf(stage, TO), (2, ZERO));
        // By one page, and back: it stays in small leaves.
        remap(TO, TO + 2 * HUGE + PAGE);
        let there = TO + 2 * HUGE + PAGE;
        assert_eq!(leaf(stage, there + PAGE), (1, ZERO));
        reads_zero(stage, there, 512);
        remap(there, TO);
        assert_eq!(leaf(stage, TO + HUGE - PAGE), (1, ZERO));
        reads_zero(stage, TO, 512);
        stage.fill(TO, 512);
        stage.assert_filled(TO, 512, TO);
        assert_eq!(leaf(stage, AT + HUGE), (2, ZERO));
    });
}

fn hide<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        let protect = |at: u64, length: u64, protection| {
            stage.space.mprotect(VirtAddr(at), length, protection).unwrap();
            audit(stage.machine, stage.memory, &[stage.space]);
        };
        reads_zero(stage, AT, 1);
        reads_zero(stage, AT + HUGE, 1);
        protect(AT, 2 * HUGE, Protection::empty());
        assert!(stage.program.load(VirtAddr(AT)).is_err());
        // One of the two is cut while it is `PROT_NONE`.
        protect(AT + 7 * PAGE, 9 * PAGE, READ_WRITE);
        protect(AT, 2 * HUGE, READ_WRITE);
        assert_eq!(leaf(stage, AT + 7 * PAGE), (1, ZERO));
        assert_eq!(leaf(stage, AT + HUGE), (2, ZERO));
        stage.fill(AT, 1024);
        stage.assert_filled(AT, 1024, AT);
        protect(AT, 2 * HUGE, Protection::READ);
        assert!(stage.program.store(VirtAddr(AT), 1).is_err());
    });
}

fn fork<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        stage.fill(AT + HUGE, 1);
        reads_zero(stage, AT, 1);
        let child = stage.space.fork().unwrap();
        assert_eq!(child.counts().anonymous_pages, 512);
        let Inspection::Page { frame, level: 2, .. } = child.inspect(VirtAddr(AT)) else {
            panic!("the child has not got it");
        };
        assert_eq!(frame, stage.frame(AT));
        let program = bindery_hosted::Program::new(stage.machine, &child);
        program.store(VirtAddr(AT + PAGE), 5).unwrap();
        assert_eq!(leaf(stage, AT), (2, ZERO));
        reads_zero(stage, AT, 512);
        stage.fill(AT, 512);
        assert_eq!(program.load(VirtAddr(AT)), Ok(0));
        assert_eq!(program.load(VirtAddr(AT + PAGE)), Ok(5));
        audit(stage.machine, stage.memory, &[stage.space, &child]);
    });
}

fn pins<A: Walk>() {
    for (protection, time) in [
        (READ_WRITE, PinTime::Short),
        (READ_WRITE, PinTime::Long),
        (Protection::READ, PinTime::Long),
    ] {
        with_huge_zeroes::<A>(|stage| {
            stage.space.mprotect(VirtAddr(AT), 2 * HUGE, protection).unwrap();
            reads_zero(stage, AT, 1);
            let pin = stage.space.pin(VirtAddr(AT + PAGE), 4, Access::Read, time).unwrap();
            assert_eq!(pin.pages(), 4);
            assert_eq!(leaf(stage, AT), (2, OWN));
            assert_eq!(pin.first(), stage.frame(AT + PAGE));
            // Later writes are seen by who has pinned.
            stage.space.mprotect(VirtAddr(AT), 2 * HUGE, READ_WRITE).unwrap();
            stage.fill(AT, 512);
            assert_eq!(pin.first(), stage.frame(AT + PAGE));
        });
    }
}

fn collapse<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        reads_zero(stage, AT, 1);
        let all = bindery::addr::VirtRange::from_len(VirtAddr(AT), HUGE).unwrap();
        stage.fill(AT + HUGE, 1);
        stage.space.collapse_range(all).unwrap();
        assert_eq!(leaf(stage, AT), (2, ZERO), "there is a huge leaf already");
        // Cut, and one page written.
        stage.space.discard(VirtAddr(AT + 9 * PAGE), PAGE).unwrap();
        stage.fill(AT + 3 * PAGE, 1);
        let limits = bindery::CollapseLimits { missing: 510, ..Default::default() };
        assert_eq!(stage.space.collapse_some(VirtAddr(AT), 1, &limits).collapsed, 0);
        let limits = bindery::CollapseLimits { missing: 511, ..Default::default() };
        assert_eq!(stage.space.collapse_some(VirtAddr(AT), 1, &limits).collapsed, 1);
        assert_eq!(leaf(stage, AT), (2, OWN));
        stage.assert_filled(AT + 3 * PAGE, 1, AT + 3 * PAGE);
        reads_zero(stage, AT, 3);
        reads_zero(stage, AT + 4 * PAGE, 508);
    });
}

fn advice<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        reads_zero(stage, AT, 1);
        for advice in [Advice::Free, Advice::Cold, Advice::PageOut, Advice::WillNeed] {
            stage.space.madvise(VirtAddr(AT), HUGE, advice).unwrap();
            assert_eq!(leaf(stage, AT), (2, ZERO), "{advice:?}");
        }
        testing::clear_accessed_and_dirty(stage.space, VirtAddr(AT), 1);
        reads_zero(stage, AT, 512);
        stage.space.madvise(VirtAddr(AT), HUGE, Advice::DontNeed).unwrap();
        assert_eq!(stage.space.inspect(VirtAddr(AT)), Inspection::Empty);
        let request = bindery::MapRequest {
            flags: bindery::MapFlags::POPULATE,
            protection: Protection::READ,
            place: Place::Fixed(VirtAddr(TO)),
            ..fixed(TO, 2 * HUGE)
        };
        stage.space.mmap(&request).unwrap();
        assert_eq!((leaf(stage, TO), leaf(stage, TO + HUGE)), ((2, ZERO), (2, ZERO)));
        assert_eq!(resident(stage), 0);
    });
}

fn seen<A: Walk>() {
    with_huge_zeroes::<A>(|stage| {
        reads_zero(stage, AT, 1);
        let first = u64::from(stage.frame(AT).0);
        let mut words = vec![0; 512];
        proc::pagemap(stage.space, AT / PAGE, PhysicalAddresses::Shown, &mut words);
        for (page, word) in (first..).zip(&words) {
            assert_eq!(word & ((1 << 55) - 1), page);
            assert_eq!((word >> 63, word >> 61 & 1, word >> 56 & 1), (1, 0, 0), "{word:#x}");
        }
        let mut flags = vec![0; 512];
        proc::kpageflags(stage.memory, first, &mut flags);
        let both = 1 << KPF_ZERO_PAGE | 1 << KPF_THP;
        assert!(flags.iter().all(|word| word & both == both));
        let mut counts = vec![1; 512];
        proc::kpagecount(stage.memory, first, &mut counts);
        assert!(counts.iter().all(|count| *count == 0));
        let mut residence = Vec::new();
        stage
            .space
            .mincore(VirtAddr(AT), HUGE, |what, pages| residence.push((what, pages)))
            .unwrap();
        assert!(residence.iter().all(|(what, _)| *what == Residence::Resident), "{residence:?}");
        let mut listing = String::new();
        proc::smaps_rollup(stage.space, &mut listing).unwrap();
        for line in ["Rss:", "Pss:", "Anonymous:", "AnonHugePages:"] {
            let line = listing.lines().find(|found| found.starts_with(line)).unwrap();
            assert_eq!(line.split_whitespace().nth(1), Some("0"), "{line}");
        }
    });
}

fn exhausted<A: Walk>() {
    let calls: [fn(&Stage<'_, '_, A>) -> bool; 3] = [
        |stage| stage.space.fault(VirtAddr(AT), Access::Read).is_ok(),
        |stage| stage.space.fault(VirtAddr(AT + PAGE), Access::Write).is_ok(),
        |stage| {
            let to = Remap::To(VirtAddr(TO + PAGE));
            stage.space.mremap(VirtAddr(AT), HUGE, HUGE, to).is_ok()
        },
    ];
    for (number, call) in calls.iter().enumerate() {
        for point in 0.. {
            let mut failed = 0;
            with_huge_zeroes::<A>(|stage| {
                stage.fill(AT + HUGE, 1);
                if number > 0 {
                    reads_zero(stage, AT, 1);
                }
                stage.memory.fail_allocations_after(Some(point));
                let done = call(stage);
                failed = testing::failed_allocations(stage.memory);
                stage.memory.fail_allocations_after(None);
                audit(stage.machine, stage.memory, &[stage.space]);
                assert!(done || failed > 0);
                assert!(done || call(stage), "with memory again");
                let at = if number == 2 { TO + PAGE } else { AT };
                reads_zero(stage, at, 512);
                stage.fill(at, 512);
                stage.assert_filled(at, 512, at);
            });
            if failed == 0 {
                assert!(point > 0, "it takes memory");
                break;
            }
        }
    }
}
