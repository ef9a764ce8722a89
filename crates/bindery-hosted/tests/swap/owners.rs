//! The owner of a folio that is swapped in: the reverse map leads from it to the folio's mappings.
//!
//! Two anon groups of one family have pages of the same indexes:
//! 1. the first half of the parent's `A` moves to `B` and grows there over the indexes of the
//!    second half;
//! 2. a fork gives the child a group for each of the two VMAs.

use std::thread;

use bindery::addr::{Order, VirtAddr};
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::testing::{self, PageMove};
use bindery::{AddressSpace, Advice, Remap, SizeMode};
use bindery_hosted::{Machine, Program, SwapFile, SwapService};

use super::fixture::{Swapping, with_device};
use crate::support::{GIB, MIB, audit};

type Amd64 = X86_64<4>;

const PAGE: u64 = 4096;
const A: u64 = GIB;
const B: u64 = 2 * GIB;
/// A folio of four pages; `TO` is the place of the same indexes in the other VMA.
const FROM: u64 = A + 8 * PAGE;
const TO: u64 = B + 8 * PAGE;
const PAGES: u64 = 4;

/// Runs `scenario` with a child that has one folio, at [`FROM`], and nothing at [`TO`]. The
/// device's writes are still in flight, and the device allows pages to change.
fn with_child(
    scenario: impl for<'m> FnOnce(
        &Swapping<'_, 'm, Amd64>,
        &AddressSpace<'m, Machine<Amd64>>,
        &SwapFile,
    ),
) {
    let device = SwapFile::new(4096, SwapService::InOrder).expect("a temporary file");
    let device: &'static SwapFile = Box::leak(Box::new(device.without_stable_pages()));
    with_device::<Amd64>(64 * MIB, 0, device, |swapping| {
        let (parent, memory) = (swapping.space, swapping.memory);
        swapping.map(A, 16);
        swapping.fill(A, 16);
        let (half, all) = (8 * PAGE, 16 * PAGE);
        parent.mremap(VirtAddr(A), half, half, Remap::To(VirtAddr(B))).unwrap();
        parent.mremap(VirtAddr(B), half, all, Remap::InPlace).unwrap();
        let child = parent.fork().unwrap();
        for range in [(A, 2 * all), (B, 2 * all)] {
            parent.munmap(VirtAddr(range.0), range.1).unwrap();
        }
        child.discard(VirtAddr(FROM), half).unwrap();
        memory.folio_policy().set(Order(2), SizeMode::Always);
        let program = Program::new(swapping.machine, &child);
        for page in 0..PAGES {
            program.store(VirtAddr(FROM + page * PAGE), page).unwrap();
        }
        scenario(swapping, &child, device);
        while device.serve_one(memory) {}
        memory.wait_for_swap_writes().unwrap();
        assert_kept(swapping, &child);
    });
}

/// Moves pages that are in swap to the same indexes of the other VMA.
fn carry(child: &AddressSpace<'_, Machine<Amd64>>, first: u64, pages: u64) {
    let what = PageMove {
        source: VirtAddr(FROM + first * PAGE),
        destination: VirtAddr(TO + first * PAGE),
        length: pages * PAGE,
        ..PageMove::default()
    };
    assert_eq!(testing::move_pages(child, &what), (pages * PAGE, Ok(())));
}

#[track_caller]
fn assert_kept<'m>(swapping: &Swapping<'_, 'm, Amd64>, child: &AddressSpace<'m, Machine<Amd64>>) {
    audit(swapping.machine, swapping.memory, &[swapping.space, child]);
}

#[track_caller]
fn assert_found(child: &AddressSpace<'_, Machine<Amd64>>, at: u64) {
    let walk = testing::walk_anonymous(child, VirtAddr(at)).expect("no lock");
    assert!(walk.found > 0 && walk.found == walk.mappings, "{walk:?}");
}

/// Calls a function until it returns true, even if the test fails, because a scope waits for its
/// threads.
struct ServedUntil<F: FnMut() -> bool>(F);

impl<F: FnMut() -> bool> Drop for ServedUntil<F> {
    fn drop(&mut self) {
        while !(self.0)() {
            thread::yield_now();
        }
    }
}

/// Two VMAs map the folio, so reclaim replaces one entry after the other while it holds the folio's
/// lock. The last replacement leaves the owner to the lock holder, which passes the lock to the
/// device.
#[test]
fn a_taken_back_folio_belongs_to_its_vma() {
    with_child(|swapping, child, device| {
        let half = PAGES / 2 * PAGE;
        child.madvise(VirtAddr(FROM), half, Advice::DontDump).unwrap();
        child.madvise(VirtAddr(FROM), PAGES * PAGE, Advice::Cold).unwrap();
        let memory = swapping.memory;
        thread::scope(|scope| {
            // Reclaim waits for the device.
            let reclaim = scope.spawn(|| swapping.machine.on_cpu(Cpu(1), || memory.reclaim(PAGES)));
            let _served = ServedUntil(|| {
                device.serve_one(memory);
                reclaim.is_finished()
            });
            while device.waiting() == 0 {
                assert!(!reclaim.is_finished(), "nothing goes out");
                thread::yield_now();
            }
            carry(child, 0, PAGES / 2);
            carry(child, PAGES / 2, PAGES / 2);
            let program = Program::new(swapping.machine, child);
            for page in 0..PAGES {
                assert_eq!(program.load(VirtAddr(TO + page * PAGE)), Ok(page));
            }
            assert_eq!(device.counts().writes, 0, "it was taken back");
        });
        assert_kept(swapping, child);
        assert_found(child, TO);
        // The folio's old group is freed, and its memory may be reused.
        child.munmap(VirtAddr(FROM), 8 * PAGE).unwrap();
        swapping.memory.drain_deferred();
        assert_kept(swapping, child);
        assert_found(child, TO);
    });
}

/// Some pages of the folio are mapped again while other pages are mapped in the second VMA, which
/// has a different group.
#[test]
fn a_folio_of_two_groups_has_an_ancestor() {
    for old_first in [true, false] {
        with_child(|swapping, child, device| {
            child.madvise(VirtAddr(FROM), PAGES * PAGE, Advice::PageOut).unwrap();
            assert!(device.waiting() > 0 && device.counts().writes == 0, "it is on its way");
            carry(child, PAGES / 2, PAGES / 2);
            let program = Program::new(swapping.machine, child);
            let mut places = [(FROM, 0), (TO + PAGES / 2 * PAGE, PAGES / 2)];
            if !old_first {
                places.reverse();
            }
            for (at, first) in places {
                for page in 0..PAGES / 2 {
                    assert_eq!(program.load(VirtAddr(at + page * PAGE)), Ok(first + page));
                }
                assert_found(child, at);
            }
            assert_found(child, FROM);
            assert_found(child, TO + PAGES / 2 * PAGE);
            for (at, _) in places {
                program.store(VirtAddr(at), 7).unwrap();
            }
        });
    }
}
