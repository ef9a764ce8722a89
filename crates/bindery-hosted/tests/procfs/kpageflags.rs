//! `/proc/kpageflags` and `kpagecount`: the use of every frame.

use bindery::addr::{Frame, Order, VirtAddr};
use bindery::{FrameUse, Sharing};
use bindery_hosted::{Machine, Walk};
use bindery_linux::proc::{
    self, KPF_ANON, KPF_BUDDY, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_MMAP, KPF_NOPAGE,
    KPF_PGTABLE, KPF_SLAB, KPF_SWAPBACKED, KPF_THP, KPF_UPTODATE, KPF_ZERO_PAGE,
};

use super::fixture::*;
use crate::support::{GIB, MIB, fixed};

type Memory<A> = bindery::Memory<Machine<A>>;

on_every_architecture! {
    every_frame_is_of_one_use => all;
    pages_have_the_flags_of_their_owner => flagged;
    mappings_are_counted => counted;
    the_files_end_behind_the_last_frame => ended;
    the_sums_are_those_of_the_frames => summed;
}

const AT: u64 = GIB;

fn flags<A: Walk>(memory: &Memory<A>, frame: u64) -> u64 {
    let mut word = [0];
    assert_eq!(proc::kpageflags(memory, frame, &mut word), 1);
    word[0]
}

fn count<A: Walk>(memory: &Memory<A>, frame: u64) -> u64 {
    let mut word = [0];
    assert_eq!(proc::kpagecount(memory, frame, &mut word), 1);
    word[0]
}

fn bits(bits: &[u32]) -> u64 {
    bits.iter().fold(0, |word, bit| word | 1 << bit)
}

fn all<A: Walk>() {
    with_fixture::<A>(2, |fixture| {
        let space = fixture.space();
        let program = fixture.program(&space);
        space.mmap(&fixed(AT, 8 * MIB)).unwrap();
        program.fill(VirtAddr(AT), 3 * MIB, 1).unwrap();
        let span = fixture.memory.frame_span();
        let mut words = vec![0; span.count as usize];
        assert_eq!(proc::kpageflags(fixture.memory, span.first.0.into(), &mut words), words.len());
        let with = |bit: u32| words.iter().filter(|word| **word & 1 << bit != 0).count() as u64;
        assert_eq!(with(KPF_BUDDY), fixture.memory.free_frame_count());
        assert_eq!(with(KPF_ANON), 3 * MIB / PAGE);
        assert_eq!(with(KPF_ZERO_PAGE), 1);
        let counts = space.counts();
        assert!(with(KPF_PGTABLE) >= counts.tables_allocated - counts.tables_freed);
        assert!(with(KPF_SLAB) > 0);
        assert_eq!(with(KPF_COMPOUND_HEAD) * 3, with(KPF_COMPOUND_TAIL));
        let kinds = [KPF_BUDDY, KPF_ANON, KPF_ZERO_PAGE, KPF_PGTABLE, KPF_SLAB, KPF_NOPAGE];
        let kinds = bits(&kinds);
        assert!(words.iter().all(|word| (word & kinds).count_ones() <= 1));
        let managed = span.count as u64 - with(KPF_NOPAGE);
        assert_eq!(managed, fixture.memory.total_frames());
    });
}

fn flagged<A: Walk>() {
    with_fixture::<A>(2, |fixture| {
        let (space, memory) = (fixture.space(), fixture.memory);
        let program = fixture.program(&space);
        space.mmap(&fixed(AT, 4 * PAGE)).unwrap();
        program.store(VirtAddr(AT), 1).unwrap();
        let shown = |at: u64| flags(memory, pagemap(&space, at, 1)[0] & FRAME);
        let anonymous = [KPF_ANON, KPF_MMAP, KPF_SWAPBACKED, KPF_UPTODATE, KPF_THP];
        assert_eq!(shown(AT), bits(&anonymous) | bits(&[KPF_COMPOUND_HEAD]));
        assert_eq!(shown(AT + 3 * PAGE), bits(&anonymous) | bits(&[KPF_COMPOUND_TAIL]));
        fixture.use_order(0);
        let (shared, file) = (fixture.memfd(PAGE), fixture.file(PAGE));
        map_object(&space, &shared, AT + MIB, PAGE, 0, Sharing::Shared);
        map_object(&space, &file, AT + 2 * MIB, PAGE, 0, Sharing::Private);
        program.store(VirtAddr(AT + MIB), 1).unwrap();
        program.load(VirtAddr(AT + 2 * MIB)).unwrap();
        let common = bits(&[KPF_MMAP, KPF_UPTODATE]);
        let dirty = bits(&[proc::KPF_DIRTY]);
        assert_eq!(shown(AT + MIB) & !dirty, common | bits(&[KPF_SWAPBACKED]));
        assert_eq!(shown(AT + 2 * MIB), common);
        let frame = (pagemap(&space, AT, 1)[0] & FRAME) as u32;
        let view = memory.frame_view(Frame(frame + 1));
        assert_eq!(
            (view.usage, view.block.first, view.block.count),
            (FrameUse::Anonymous, Frame(frame), 4)
        );
        assert_eq!((view.mappings, view.holders), (4, 0));
        space.munmap(VirtAddr(AT), 4 * PAGE).unwrap();
        memory.trim();
        assert_eq!(flags(memory, frame.into()), bits(&[KPF_BUDDY]));
        let mine = memory.allocate_frames(Order(3)).unwrap();
        assert_eq!(memory.frame_view(Frame(mine.first.0 + 5)).block, mine);
        assert_eq!(flags(memory, mine.first.0.into()), bits(&[KPF_COMPOUND_HEAD]));
        // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
        assert!(unsafe { memory.free_frames(mine) });
    });
}

fn counted<A: Walk>() {
    with_fixture::<A>(2, |fixture| {
        let space = fixture.space();
        let program = fixture.program(&space);
        space.mmap(&fixed(AT, 4 * PAGE)).unwrap();
        program.store(VirtAddr(AT), 1).unwrap();
        let frame = pagemap(&space, AT, 1)[0] & FRAME;
        let counts =
            |fixture: &Fixture<'_, A>| [0, 3].map(|page| count(fixture.memory, frame + page));
        assert_eq!(counts(fixture), [1, 1]);
        let child = space.fork().unwrap();
        assert_eq!(counts(fixture), [2, 2]);
        // One of four entries is left, and a page shows at least one while any entry is left.
        child.munmap(VirtAddr(AT), 4 * PAGE).unwrap();
        space.munmap(VirtAddr(AT), 3 * PAGE).unwrap();
        assert_eq!(counts(fixture), [1, 1]);
        space.munmap(VirtAddr(AT), 4 * PAGE).unwrap();
        assert_eq!(counts(fixture), [0, 0]);
    });
}

fn ended<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let span = fixture.memory.frame_span();
        let end = u64::from(span.first.0) + u64::from(span.count);
        let mut words = [7; 4];
        assert_eq!(proc::kpageflags(fixture.memory, end - 3, &mut words), 3);
        assert_eq!(words[3], 7);
        for beyond in [end, end + 1, 1 << 33, u64::MAX] {
            assert_eq!(proc::kpageflags(fixture.memory, beyond, &mut words), 0);
            assert_eq!(proc::kpagecount(fixture.memory, beyond, &mut words), 0);
        }
        if span.first.0 > 0 {
            assert_eq!(flags(fixture.memory, 0), bits(&[KPF_NOPAGE]));
        }
        assert_eq!(fixture.memory.frame_view(Frame(u32::MAX)).usage, FrameUse::NotManaged);
    });
}

fn summed<A: Walk>() {
    with_fixture::<A>(9, |fixture| {
        let (space, memory) = (fixture.space(), fixture.memory);
        let program = fixture.program(&space);
        space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        program.store(VirtAddr(AT), 1).unwrap();
        let before = memory.events();
        fixture.use_order(0);
        program.store(VirtAddr(AT + 2 * MIB), 1).unwrap();
        let shared = fixture.memfd(4 * PAGE);
        map_object(&space, &shared, AT + 8 * MIB, 4 * PAGE, 0, Sharing::Shared);
        program.fill(VirtAddr(AT + 8 * MIB), 4 * PAGE, 1).unwrap();
        let usage = memory.frame_usage();
        assert_eq!((usage.anonymous, usage.anonymous_huge), (513, 512));
        assert_eq!((usage.shared_memory, usage.mapped, usage.file), (4, 4, 0));
        assert_eq!(usage.free, memory.free_frame_count());
        space.munmap(VirtAddr(AT + 8 * MIB), 4 * PAGE).unwrap();
        assert_eq!((memory.frame_usage().shared_memory, memory.frame_usage().mapped), (4, 0));
        assert_eq!(before.huge_faults, 1);
        space.munmap(VirtAddr(AT), PAGE).unwrap();
        let events = memory.events();
        assert_eq!(events.leaf_splits, before.leaf_splits + 1);
        assert!(events.frames_allocated > before.frames_allocated);
    });
}
