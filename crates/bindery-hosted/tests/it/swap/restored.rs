//! Somebody takes a reference to a folio between the clearing of its entries and the check of its
//! counts: then it is mapped again, and stays.
//!
//! The platform's `invalidate` is in between: there another thread takes the reference.

use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use bindery::addr::{Frame, Order, VirtAddr};
use bindery::arch::AArch64;
use bindery::platform::{CpuSet, Invalidation, Platform};
use bindery::{
    Access, AddressSpace, Advice, FrameRange, Inspection, Memory, SizeMode, check, testing,
};
use bindery_hosted::{Config, Machine, pass_on};

use crate::support::{GIB, MIB, fixed, options};

const AT: u64 = GIB;
const PAGES: u64 = 64;

/// A machine whose invalidations wait until another thread has what it wants.
struct Held {
    machine: Machine<AArch64>,
    between: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

// SAFETY: all is the machine's doing, which keeps the promises.
unsafe impl Platform for Held {
    type Arch = AArch64;
    type Mutex = <Machine<AArch64> as Platform>::Mutex;
    type SpinLock = <Machine<AArch64> as Platform>::SpinLock;

    pass_on! { machine:
        direct_map zero copy invalidate_local invalidate_kernel publish_entries cpu relax park unpark
        enter_read leave_read synchronize grace_period is_over seed fatal_signal
        allocation_may_wait frames_released
    }

    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation) {
        if let Some((reached, go_on)) = self.between.lock().unwrap().take() {
            reached.send(()).unwrap();
            go_on.recv().unwrap();
        }
        self.machine.invalidate(root, cpus, what);
    }
}

fn frame_at(space: &AddressSpace<'_, Held>, page: u64) -> Frame {
    match space.inspect(VirtAddr(AT + page * 4096)) {
        Inspection::Page { frame, .. } => frame,
        other => panic!("page {page} is not mapped: {other:?}"),
    }
}

fn swapped(space: &AddressSpace<'_, Held>) -> u64 {
    let is_out =
        |page: &u64| matches!(space.inspect(VirtAddr(AT + page * 4096)), Inspection::Absent(_));
    (0..PAGES).filter(is_out).count() as u64
}

fn audit(machine: &Machine<AArch64>, memory: &Memory<Held>, space: &AddressSpace<'_, Held>) {
    machine.assert_clean();
    let mut scratch = vec![0; check::scratch_words(memory)];
    if let Err(violation) = check::check(memory, &[space], &mut scratch) {
        panic!("the audit found: {violation}");
    }
}

fn a_folio_with_a_new_reference_is_mapped_again(order: u8) {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let machine = Machine::<AArch64>::new(config);
    let (first, count) = machine.frames();
    let platform = Held { machine: machine.clone(), between: Mutex::new(None) };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(platform, &[FrameRange { first, count }]) }.unwrap();
    memory.folio_policy().set_global(SizeMode::Never);
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    let area = memory.swap_on(512, 0).unwrap();
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        // A CPU has it, so its TLB has to be invalidated.
        space.enter();
        space.mmap(&fixed(AT, PAGES * 4096)).unwrap();
        let write = |page: u64, value: u64| {
            space.write_user(VirtAddr(AT + page * 4096), &value.to_ne_bytes()).unwrap();
        };
        (0..PAGES).for_each(|page| write(page, page + 1));
        let frame = frame_at(&space, 21);
        let before = frame;
        let (reached, reaches) = mpsc::channel();
        let (lets_go_on, go_on) = mpsc::channel();
        let (over, is_over) = mpsc::channel::<()>();
        *memory.platform().between.lock().unwrap() = Some((reached, go_on));
        thread::scope(|scope| {
            let memory = &memory;
            // Dropped even where the test fails: the other thread waits for it.
            let over = over;
            scope.spawn(move || {
                if reaches.recv().is_err() {
                    return;
                }
                testing::with_reference(memory, frame, |_, _| {
                    lets_go_on.send(()).unwrap();
                    // Until the other side is done, or has failed.
                    let _ = is_over.recv();
                })
                .unwrap();
            });
            space.madvise(VirtAddr(AT), PAGES * 4096, Advice::PageOut).unwrap();
            let unused = memory.platform().between.lock().unwrap().take();
            assert!(unused.is_none(), "no invalidation");
            assert_eq!(memory.events().swap_out_busy, 1);
            assert_eq!(swapped(&space), PAGES - (1 << order), "all other folios are out");
            assert_eq!(frame_at(&space, 21), before);
            assert_eq!(memory.swap_areas().next().unwrap().taken, PAGES - (1 << order));
            drop(over);
        });
        audit(&machine, &memory, &space);
        // It is as it was: written in place, and sent out the next time.
        space.fault(VirtAddr(AT + 21 * 4096), Access::Write).unwrap();
        write(21, 7);
        assert_eq!(frame_at(&space, 21), before, "an exclusive page was copied");
        space.madvise(VirtAddr(AT), PAGES * 4096, Advice::PageOut).unwrap();
        assert_eq!((swapped(&space), memory.events().swap_out_busy), (PAGES, 1));
        for page in 0..PAGES {
            let mut value = [0; 8];
            space.read_user(VirtAddr(AT + page * 4096), &mut value).unwrap();
            assert_eq!(u64::from_ne_bytes(value), if page == 21 { 7 } else { page + 1 });
        }
        audit(&machine, &memory, &space);
    }
    assert_eq!(memory.swap_off(&area), Ok(()));
}

#[test]
fn a_page() {
    a_folio_with_a_new_reference_is_mapped_again(0);
}

#[test]
fn a_folio() {
    a_folio_with_a_new_reference_is_mapped_again(4);
}
