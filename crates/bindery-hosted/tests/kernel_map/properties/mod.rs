//! Random sequences of calls of a kernel on its own map, on all architectures, with the strict TLB.
//! Results, mappings and contents match the model, freed memory is not reused before a purge, and
//! the auditor finds nothing. Sizes and addresses are close to the edges of contiguous blocks, huge
//! leaves and level-2 tables.
//!
//! `PROPTEST_CASES` sets the number of sequences for each architecture. A sequence that fails is
//! kept in `mod.regressions` beside this file and tried first from then on.

mod generate;
mod model;
mod steps;

use bindery::addr::{Frame, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Riscv64, Tiny};
use bindery::{FrameRange, KernelMap, Reach};
use bindery_hosted::Walk;
use proptest::test_runner::{Config, FileFailurePersistence, TestError, TestRunner};

use crate::support::areas::Areas;
use crate::support::kernel::{self, arena, audit, map_with, pages, rounds};
use crate::support::{MIB, strict};
use generate::{Limits, Step, pool_pages, sequence};
use steps::Kernel;

on_every_architecture! {
    random_calls_agree_with_the_model => random_calls;
    a_copied_root_shows_later_areas => through_a_copy;
}

#[test]
fn random_calls_agree_with_the_model_on_tiny() {
    random_calls::<Tiny>();
}

#[test]
fn random_calls_agree_page_by_page() {
    random_calls_of::<AArch64>(Reach::Page, 60);
    random_calls_of::<Riscv64<3>>(Reach::Page, 20);
}

/// The size of the arena in pages: sometimes so small that it fills up.
fn limits<A: Walk>() -> Limits {
    let tiny = A::INDEX_BITS < 9;
    if tiny { Limits { windows: vec![32, 21, 9], largest: 40 } } else { Limits::usual() }
}

fn scenario<A: Walk>(reach: Reach, (window_pages, steps): &(u64, Vec<Step>)) {
    let (machine, memory) = strict::<A>(64 * MIB);
    let free = memory.free_frame_count();
    // Starts the window in the middle of a table.
    let shift = if *window_pages > 100 { 7 * PAGE_SIZE } else { 0 };
    let arena = pages(VirtAddr(arena::<A>(PAGE_SIZE).start().0 + shift), *window_pages);
    {
        // The owner outlives the mappings of its frames.
        let owner = map_with(&memory, (pool_pages::<A>() + 8) * PAGE_SIZE, Reach::Table);
        let map = KernelMap::with_reach(&memory, arena, reach).unwrap();
        map.set_purge_limit(u64::MAX);
        let mut kernel = Kernel::new(&machine, &memory, &owner, &map);
        for (number, step) in (1..).zip(steps) {
            kernel.step(step, number);
        }
        kernel.finish();
    }
    audit(&machine, &memory, &[]);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

fn random_calls<A: Walk>() {
    random_calls_of::<A>(Reach::Table, 300);
}

fn random_calls_of<A: Walk>(reach: Reach, cases: u64) {
    let persistence = FileFailurePersistence::WithSource("regressions");
    let mut config = Config {
        failure_persistence: Some(Box::new(persistence)),
        source_file: Some(file!()),
        ..Config::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = rounds(cases) as u32;
    }
    let mut runner = TestRunner::new(config);
    let result = runner.run(&sequence(&limits::<A>()), |sequence| {
        scenario::<A>(reach, &sequence);
        Ok(())
    });
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, (pages, steps))) => {
            let lines: Vec<_> = steps.iter().map(|step| format!("    {step:x?},")).collect();
            panic!("{reason}, in an arena of {pages} pages, after\n{}", lines.join("\n"));
        }
        Err(error) => panic!("{error}"),
    }
}

/// Roots of address spaces copy the kernel's half of the root once, at their creation. The copies
/// show later mappings, too.
fn through_a_copy<A: Walk>() {
    let (machine, memory) = strict::<A>(64 * MIB);
    // Leaves some memory unmanaged, for unknown roots.
    let (first, count) = machine.frames();
    drop(memory);
    let managed = FrameRange { first: first.plus(2), count: count - 2 };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { bindery::Memory::new(machine.clone(), &[managed]) }.unwrap();
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    let (root, copy) = (first, first.plus(1));
    let entries = 1_usize << A::INDEX_BITS;
    let words = |frame: Frame| {
        let start = bindery::Platform::direct_map(&machine, frame).cast::<u64>().as_ptr();
        // SAFETY: the frame is memory of the machine, only the map shares the root, and it writes
        // entries as atomics; no other code uses the frame or the root.
        unsafe { std::slice::from_raw_parts(start.cast::<std::sync::atomic::AtomicU64>(), entries) }
    };
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    // SAFETY: 1. The frame is a zero page, an empty table, for as long as the machine lives.
    // 2. The copy below is made later; no other code knows the frame.
    let map = unsafe { KernelMap::with_root(&memory, root, arena::<A>(1 << 33)) };
    let map = map.unwrap();
    map.set_purge_limit(u64::MAX);
    for (from, to) in words(root).iter().zip(words(copy)) {
        to.store(from.load(relaxed), relaxed);
    }
    let before: Vec<_> = words(root).iter().map(|word| word.load(relaxed)).collect();
    for size in [PAGE_SIZE, MIB, 5 * MIB] {
        let at = map.vmalloc(size, &bindery::VmallocOptions::huge()).unwrap();
        kernel::fill(&machine, copy, pages(at, size / PAGE_SIZE), 1);
        kernel::assert_filled(&machine, root, pages(at, size / PAGE_SIZE), at, 1);
        assert_eq!(
            machine.translate_kernel(copy, at, bindery_hosted::AccessKind::Read).ok(),
            map.physical(at)
        );
        map.free_vmalloc(at).unwrap();
        // The machine tags its cache by root, and the map invalidates only under its own root,
        // while real machines use global entries. So the test flushes the copy itself.
        let what = bindery::platform::Invalidation {
            range: map.arena(),
            stride: PAGE_SIZE,
            tables: bindery::platform::Tables::Changed,
        };
        bindery::Platform::invalidate_kernel(&machine, copy, &what);
        map.purge();
        let gone = machine.translate_kernel(copy, at, bindery_hosted::AccessKind::Read);
        assert!(gone.is_err());
        bindery::Platform::invalidate_kernel(&machine, copy, &what);
    }
    let after: Vec<_> = words(root).iter().map(|word| word.load(relaxed)).collect();
    assert_eq!(before, after, "the root's entries never change again");
    // Refused: the entries are in use now. SAFETY: as above; the call fails before it changes
    // anything.
    let again = unsafe { KernelMap::with_root(&memory, root, arena::<A>(MIB)) };
    assert!(matches!(again.err(), Some(bindery::KernelMapError::BadArena)));
    audit(&machine, &memory, &[&map]);
    drop(map);
    assert!(words(root).iter().all(|word| word.load(relaxed) == 0));
    audit(&machine, &memory, &[]);
}
