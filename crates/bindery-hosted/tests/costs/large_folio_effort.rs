//! The effort for a large folio if no block is free.

use std::sync::{Arc, Mutex};

use bindery::addr::{Order, VirtAddr};
use bindery::{
    AddressSpace, Advice, CollapseLimits, FrameRange, LargeFolioEffort, Memory, SizeMode,
};
use bindery_hosted::{Machine, Program, Walk};

use crate::support::*;

on_every_architecture! {
    a_fault_collects_as_the_effort_says => faults;
    the_background_collects_if_it_may => background;
}

const AT: u64 = GIB;
const SIZE: u64 = 2 * MIB;

/// A memory whose embedder holds all frames that could form a large folio and frees them on
/// request.
struct Scene<A: Walk> {
    machine: Machine<A>,
    memory: &'static Memory<Machine<A>>,
    kept: Arc<Mutex<Vec<FrameRange>>>,
}

impl<A: Walk> Scene<A> {
    fn new() -> Self {
        let (machine, memory) = strict::<A>(16 * MIB);
        let memory: &'static _ = Box::leak(Box::new(memory));
        let kept = Arc::new(Mutex::new(Vec::<FrameRange>::new()));
        let given = kept.clone();
        machine.on_collect(move || {
            for frames in given.lock().unwrap().drain(..) {
                // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
                assert!(unsafe { memory.free_frames(frames) });
            }
        });
        Self { machine, memory, kept }
    }

    fn keep_all(&self) {
        for order in [10, 9] {
            while let Some(frames) = self.memory.allocate_frames(Order(order)) {
                self.kept.lock().unwrap().push(frames);
            }
        }
    }

    /// The number of pages that one store swaps in.
    fn touched(&self, effort: LargeFolioEffort, advised: bool) -> u64 {
        self.memory.set_large_folio_effort(effort);
        let space = AddressSpace::new(self.memory, options()).unwrap();
        space.mmap(&fixed(AT, SIZE)).unwrap();
        if advised {
            space.madvise(VirtAddr(AT), SIZE, Advice::Huge).unwrap();
        }
        self.keep_all();
        Program::new(&self.machine, &space).store(VirtAddr(AT), 1).unwrap();
        space.counts().anonymous_pages
    }
}

fn faults<A: Walk>() {
    use LargeFolioEffort::{Always, Defer, DeferMadvise, Madvise, Never};
    let scene = Scene::<A>::new();
    scene.memory.folio_policy().set(Order(9), SizeMode::Always);
    assert_eq!(scene.memory.large_folio_effort(), Madvise);
    for (effort, plain, advised, later) in [
        (Never, 1, 1, (0, 0)),
        (Madvise, 1, 512, (0, 0)),
        (DeferMadvise, 1, 512, (1, 0)),
        (Defer, 1, 1, (1, 1)),
        (Always, 512, 512, (0, 0)),
    ] {
        let before = scene.machine.collections_put_off();
        assert_eq!(scene.touched(effort, false), plain, "{effort:?}");
        let between = scene.machine.collections_put_off();
        assert_eq!(scene.touched(effort, true), advised, "{effort:?}, advised");
        let after = scene.machine.collections_put_off();
        assert_eq!((between - before, after - between), later, "{effort:?}");
    }
    audit(&scene.machine, scene.memory, &[]);
}

fn background<A: Walk>() {
    let scene = Scene::<A>::new();
    let space = AddressSpace::new(scene.memory, options()).unwrap();
    space.mmap(&fixed(AT, 2 * SIZE)).unwrap();
    let program = Program::new(&scene.machine, &space);
    program.fill(VirtAddr(AT), 2 * SIZE, 3).unwrap();
    scene.memory.folio_policy().set(Order(9), SizeMode::Always);
    scene.keep_all();
    let collapse = |collects| {
        let limits = CollapseLimits { collects, ..CollapseLimits::default() };
        space.collapse_some(VirtAddr(0), 8, &limits)
    };
    let stopped = collapse(false);
    assert_eq!((stopped.looked_at, stopped.collapsed), (1, 0));
    assert!(stopped.out_of_memory);
    let done = collapse(true);
    assert_eq!((done.looked_at, done.collapsed), (2, 2));
    assert!(!done.out_of_memory && done.next == VirtAddr(0));
    assert_eq!(program.load(VirtAddr(AT + SIZE)), Ok(0x0303_0303_0303_0303));
    audit(&scene.machine, scene.memory, &[&space]);
}
