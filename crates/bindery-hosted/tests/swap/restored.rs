//! A thread pins a folio, or takes a reference to it, between the clearing of its entries and the
//! check of its counts. In that case a call maps the folio again, whereas reclaim leaves it in the
//! swap cache.
//!
//! The platform's `invalidate` runs in between, where another thread acts.

use std::sync::mpsc;
use std::thread;

use bindery::addr::{Frame, Order, VirtAddr};
use bindery::arch::AArch64;
use bindery::{Access, AddressSpace, Advice, Inspection, Memory, Remap, SizeMode, testing};
use bindery_hosted::Machine;

use super::interposed::{Interposed, Moment, audit, interposed};
use crate::support::{GIB, MIB, fixed, options};

const AT: u64 = GIB;
const PAGES: u64 = 64;

fn frame_at(space: &AddressSpace<'_, Interposed>, page: u64) -> Frame {
    match space.inspect(VirtAddr(AT + page * 4096)) {
        Inspection::Page { frame, .. } => frame,
        other => panic!("page {page} is not mapped: {other:?}"),
    }
}

fn swapped(space: &AddressSpace<'_, Interposed>) -> u64 {
    let is_out =
        |page: &u64| matches!(space.inspect(VirtAddr(AT + page * 4096)), Inspection::Absent(_));
    (0..PAGES).filter(is_out).count() as u64
}

/// The reference that the other thread takes.
#[derive(Clone, Copy)]
enum Taken {
    Reference,
    /// The maximum of the folio's count.
    AllReferences,
    Pin,
}

impl Taken {
    /// Calls `f` while the folio around `frame` is held.
    fn around(self, memory: &Memory<Interposed>, frame: Frame, f: impl FnOnce()) {
        match self {
            Self::Reference => testing::with_reference(memory, frame, |_, _| f()).unwrap(),
            Self::AllReferences => with_all_references(memory, frame, Box::new(f)),
            Self::Pin => testing::with_pin(memory, frame, f),
        }
    }
}

/// Each recursive call holds one of the references.
fn with_all_references<'a>(memory: &Memory<Interposed>, frame: Frame, f: Box<dyn FnOnce() + 'a>) {
    let mut f = Some(f);
    let further = |_, _| f.take().map(|f| with_all_references(memory, frame, f));
    let held = testing::with_reference(memory, frame, further);
    if held.is_none() {
        f.take().into_iter().for_each(|f| f());
    }
}

/// Runs `scenario` with an address space with [`PAGES`] pages, in folios of 2^`order`, and swap.
fn with_pages(
    order: u8,
    scenario: impl FnOnce(&Machine<AArch64>, &Memory<Interposed>, &AddressSpace<'_, Interposed>),
) {
    let (machine, memory) = interposed(32 * MIB);
    if order > 0 {
        memory.folio_policy().set(Order(order), SizeMode::Always);
    }
    let area = memory.swap_on(512, 0).unwrap();
    {
        let space = AddressSpace::new(&memory, options()).unwrap();
        // A CPU has loaded the space, so the CPU's TLB has to be invalidated.
        space.enter();
        space.mmap(&fixed(AT, PAGES * 4096)).unwrap();
        (0..PAGES).for_each(|page| write(&space, page, page + 1));
        scenario(&machine, &memory, &space);
        audit(&machine, &memory, &space);
    }
    assert_eq!(memory.swap_off(&area), Ok(()));
}

fn write(space: &AddressSpace<'_, Interposed>, page: u64, value: u64) {
    space.write_user(VirtAddr(AT + page * 4096), &value.to_ne_bytes()).unwrap();
}

fn assert_holds(space: &AddressSpace<'_, Interposed>, changed: Option<(u64, u64)>) {
    for page in 0..PAGES {
        let mut value = [0; 8];
        space.read_user(VirtAddr(AT + page * 4096), &mut value).unwrap();
        let expected = changed.filter(|(at, _)| *at == page).map_or(page + 1, |(_, new)| new);
        assert_eq!(u64::from_ne_bytes(value), expected, "page {page}");
    }
}

/// Runs `send_out`. In its first flush another thread takes hold of the folio and runs `look`
/// before it releases the folio.
fn while_taken(
    memory: &Memory<Interposed>,
    (taken, frame): (Taken, Frame),
    send_out: impl FnOnce(),
    look: impl FnOnce(),
) {
    let (reached, reaches) = mpsc::channel();
    let (lets_go_on, go_on) = mpsc::channel();
    let (over, is_over) = mpsc::channel::<()>();
    let mut first = Some((reached, go_on));
    let (flushed, was_flushed) = mpsc::channel();
    memory.platform().at(Moment::Invalidation, move || {
        if let Some((reached, go_on)) = first.take() {
            reached.send(()).unwrap();
            go_on.recv().unwrap();
            let _ = flushed.send(());
        }
    });
    thread::scope(|scope| {
        // Dropped even if the test fails, because the other thread waits for this.
        let over = over;
        // `Taken::AllReferences` needs this large stack.
        let other = thread::Builder::new().stack_size(64 << 20);
        let other = other.spawn_scoped(scope, move || {
            if reaches.recv().is_err() {
                return;
            }
            taken.around(memory, frame, || {
                lets_go_on.send(()).unwrap();
                // Waits until the other side has finished or failed.
                let _ = is_over.recv();
            });
        });
        other.unwrap();
        send_out();
        assert!(was_flushed.try_recv().is_ok(), "no invalidation");
        look();
        drop(over);
    });
}

fn a_folio_that_somebody_takes_is_mapped_again(order: u8, taken: Taken) {
    with_pages(order, |machine, memory, space| {
        let before = frame_at(space, 21);
        let page_out = || space.madvise(VirtAddr(AT), PAGES * 4096, Advice::PageOut).unwrap();
        while_taken(memory, (taken, before), page_out, || {
            assert_eq!(memory.events().swap_out_busy, 1);
            assert_eq!(swapped(space), PAGES - (1 << order), "all other folios are out");
            assert_eq!(frame_at(space, 21), before);
            assert_eq!(memory.swap_areas().next().unwrap().taken, PAGES - (1 << order));
        });
        audit(machine, memory, space);
        // The folio is unchanged. It is written in place and swapped out the next time.
        space.fault(VirtAddr(AT + 21 * 4096), Access::Write).unwrap();
        write(space, 21, 7);
        assert_eq!(frame_at(space, 21), before, "an exclusive page was copied");
        page_out();
        assert_eq!((swapped(space), memory.events().swap_out_busy), (PAGES, 1));
        assert_holds(space, Some((21, 7)));
    });
}

/// By then, reclaim has changed entries at several places and flushed them together. The entries
/// lead to the folio in the cache.
fn a_folio_that_somebody_takes_stays_in_the_cache(order: u8, taken: Taken) {
    with_pages(order, |machine, memory, space| {
        let frame = frame_at(space, 21);
        space.madvise(VirtAddr(AT), PAGES * 4096, Advice::Cold).unwrap();
        let send_out = || assert!(memory.reclaim(PAGES).freed >= PAGES - (1 << order));
        while_taken(memory, (taken, frame), send_out, || {
            assert_eq!(swapped(space), PAGES);
            assert_eq!(memory.swap_areas().next().unwrap().taken, PAGES);
        });
        audit(machine, memory, space);
        space.fault(VirtAddr(AT + 21 * 4096), Access::Read).unwrap();
        assert_eq!(frame_at(space, 21), frame);
        assert_eq!(memory.events().pages_swapped_in, 0, "it was there");
        assert_holds(space, None);
    });
}

#[test]
fn a_page() {
    a_folio_that_somebody_takes_is_mapped_again(0, Taken::Reference);
}

#[test]
fn a_folio() {
    a_folio_that_somebody_takes_is_mapped_again(4, Taken::Reference);
}

#[test]
fn a_pinned_page() {
    a_folio_that_somebody_takes_is_mapped_again(0, Taken::Pin);
}

#[test]
fn a_pinned_folio() {
    a_folio_that_somebody_takes_is_mapped_again(4, Taken::Pin);
}

#[test]
fn a_page_that_reclaim_wanted() {
    a_folio_that_somebody_takes_stays_in_the_cache(0, Taken::Pin);
}

#[test]
fn a_fully_referenced_page_that_reclaim_wanted() {
    a_folio_that_somebody_takes_stays_in_the_cache(0, Taken::AllReferences);
}

#[test]
fn a_fully_referenced_folio_that_reclaim_wanted() {
    a_folio_that_somebody_takes_stays_in_the_cache(4, Taken::AllReferences);
}

#[test]
fn a_folio_that_reclaim_wanted() {
    a_folio_that_somebody_takes_stays_in_the_cache(4, Taken::Reference);
}

/// The address of the folio's first page would be below zero.
#[test]
fn a_folios_end_at_the_lowest_addresses() {
    const LOW: VirtAddr = VirtAddr(64 * 1024);
    const KEPT: u64 = 8;
    with_pages(5, |machine, memory, space| {
        let length = KEPT * 4096;
        let end = VirtAddr(AT + 24 * 4096);
        space.munmap(VirtAddr(AT), 24 * 4096).unwrap();
        assert_eq!(space.mremap(end, length, length, Remap::To(LOW)), Ok(LOW));
        let Inspection::Page { frame, .. } = space.inspect(LOW) else { panic!("not mapped") };
        let page_out = || space.madvise(LOW, length, Advice::PageOut).unwrap();
        while_taken(memory, (Taken::Reference, frame), page_out, || {
            assert_eq!(memory.events().swap_out_busy, 1);
            assert!(
                matches!(space.inspect(LOW), Inspection::Page { frame: now, .. } if now == frame)
            );
        });
        audit(machine, memory, space);
        for page in 0..KEPT {
            let mut value = [0; 8];
            space.read_user(VirtAddr(LOW.0 + page * 4096), &mut value).unwrap();
            assert_eq!(u64::from_ne_bytes(value), 24 + page + 1, "page {page}");
        }
    });
}
