//! Reclaim when locked memory is most of the memory.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, Absent, X86_64};
use bindery::{
    Access, AddressSpace, Inspection, Limits, LockPages, Locking, MapRequest, Memory, PinTime,
    Sharing,
};
use bindery_hosted::Walk;

use crate::support::measured::{Measured, measured};
use crate::support::{GIB, MIB, fixed, options};

const AT: u64 = GIB;
const LOCKED: u64 = 8_192;

type Space<'m, A> = AddressSpace<'m, Measured<A>>;

fn touch<A: Walk>(space: &Space<'_, A>, at: u64, pages: u64) {
    for page in 0..pages {
        space.fault(VirtAddr(at + page * PAGE_SIZE), Access::Write).unwrap();
    }
}

fn with_pages<A: Walk>(
    sharing: Sharing,
    scenario: impl FnOnce(&Memory<Measured<A>>, Space<'_, A>),
) {
    let (_, memory) = measured::<A>(64 * MIB);
    memory.swap_on(1 << 14, 0).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.set_limits(&Limits { locking: Locking::Privileged, ..space.limits() });
    let request = fixed(AT, LOCKED * PAGE_SIZE);
    space.mmap(&MapRequest { sharing, ..request }).unwrap();
    touch(&space, AT, LOCKED);
    scenario(&memory, space);
}

/// The same pages, locked, after reclaim has visited all of them.
fn with_locked<A: Walk>(
    sharing: Sharing,
    scenario: impl FnOnce(&Memory<Measured<A>>, Space<'_, A>),
) {
    with_pages(sharing, |memory, space| {
        space.mlock(VirtAddr(AT), LOCKED * PAGE_SIZE, LockPages::Now).unwrap();
        assert_eq!(memory.reclaim(u64::MAX).freed, 0);
        scenario(memory, space);
    });
}

/// Reclaim finds evictable pages without visiting each locked page.
fn locked_pages_are_passed_over<A: Walk>(sharing: Sharing) {
    const OTHERS: u64 = 64;
    with_locked::<A>(sharing, |memory, space| {
        let others = AT + GIB;
        space.mmap(&fixed(others, OTHERS * PAGE_SIZE)).unwrap();
        touch(&space, others, OTHERS);
        let before = memory.platform().steps();
        assert_eq!(memory.reclaim(OTHERS).freed, OTHERS);
        let steps = memory.platform().steps() - before;
        assert!(steps < LOCKED / 4, "{steps} looks for {OTHERS} pages beside {LOCKED}");
    });
}

/// The locked mapping was removed without an unlock.
fn what_a_child_keeps_goes<A: Walk>(sharing: Sharing) {
    with_locked::<A>(sharing, |memory, space| {
        let child = space.fork().unwrap();
        assert_eq!(memory.reclaim(u64::MAX).freed, 0);
        drop(space);
        assert_eq!(memory.reclaim(u64::MAX).freed, LOCKED);
        drop(child);
    });
}

/// Reclaims in rounds of 32 pages until `pages` are swapped out. Returns the number of scanned
/// frames.
fn rounds<A: Walk>(memory: &Memory<Measured<A>>, pages: u64) -> u64 {
    let (mut freed, mut scanned) = (0, 0);
    while freed < pages {
        let done = memory.reclaim(32);
        assert!(done.freed > 0, "{freed} of {pages} pages have gone");
        (freed, scanned) = (freed + done.freed, scanned + done.scanned);
    }
    scanned
}

/// Unlocked pages are reclaimed within the turn in which they become cold.
fn unlocked_pages_go<A: Walk>(sharing: Sharing) {
    let unlock = |space: &Space<'_, A>| space.munlock(VirtAddr(AT), LOCKED * PAGE_SIZE).unwrap();
    with_locked::<A>(sharing, |memory, space| {
        unlock(&space);
        let reclaimed = memory.reclaim(LOCKED);
        assert_eq!(reclaimed.freed, LOCKED);
        assert!(reclaimed.scanned <= 2 * memory.total_frames() + 128, "{reclaimed:?}");
    });
    let mut never_locked = 0;
    with_pages::<A>(sharing, |memory, space| {
        never_locked = rounds(memory, LOCKED);
        drop(space);
    });
    with_locked::<A>(sharing, |memory, space| {
        unlock(&space);
        let scanned = rounds(memory, LOCKED);
        let most = never_locked + memory.total_frames();
        assert!(scanned <= most, "{scanned} frames in rounds, {never_locked} if never locked");
    });
}

/// The locked mapping is removed. In each turn one folio is pinned and may be freed only later;
/// other folios can be freed at once, so the search continues past the pinned folio.
fn pages_go_beside_others<A: Walk>(sharing: Sharing) {
    with_locked::<A>(sharing, |memory, space| {
        let child = space.fork().unwrap();
        let others = AT + GIB;
        let request = fixed(others, 256 * PAGE_SIZE);
        child.mmap(&MapRequest { sharing: Sharing::Shared, ..request }).unwrap();
        touch(&child, others, 256);
        let pinned = child.pin(VirtAddr(others), 1, Access::Write, PinTime::Long).unwrap();
        drop(space);
        rounds(memory, LOCKED + 255);
        drop(pinned);
        drop(child);
    });
}

/// As long as other pages are evictable, the search must not give up.
fn the_last_lock_that_goes_is_noticed<A: Walk>() {
    const OTHERS: u64 = 4_096;
    with_locked::<A>(Sharing::Private, |memory, space| {
        let child = space.fork().unwrap();
        child.mmap(&fixed(AT + GIB, OTHERS * PAGE_SIZE)).unwrap();
        touch(&child, AT + GIB, OTHERS);
        drop(space);
        rounds(memory, OTHERS / 2);
        let is_out = |page: &u64| {
            let entry = child.inspect(VirtAddr(AT + page * PAGE_SIZE));
            matches!(entry, Inspection::Absent(Absent::Swap { .. }))
        };
        let out = (0..LOCKED).filter(is_out).count();
        assert!(out > 0, "the pages that were locked stay");
    });
}

fn all<A: Walk>() {
    the_last_lock_that_goes_is_noticed::<A>();
    for sharing in [Sharing::Private, Sharing::Shared] {
        locked_pages_are_passed_over::<A>(sharing);
        what_a_child_keeps_goes::<A>(sharing);
        unlocked_pages_go::<A>(sharing);
        pages_go_beside_others::<A>(sharing);
    }
}

#[test]
fn on_x86_64() {
    all::<X86_64<4>>();
}

#[test]
fn on_aarch64() {
    all::<AArch64>();
}
