//! Reclaim beside memory that is locked into memory, and is most of what there is.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, X86_64};
use bindery::{Access, AddressSpace, Limits, LockPages, Locking, MapRequest, Memory, Sharing};
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

/// A space with pages that are locked, all of which reclaim has come to.
fn with_locked<A: Walk>(
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
    space.mlock(VirtAddr(AT), LOCKED * PAGE_SIZE, LockPages::Now).unwrap();
    assert_eq!(memory.reclaim(u64::MAX).freed, 0);
    scenario(&memory, space);
}

/// What can go is found without a look at each page that cannot.
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

/// The mapping that was locked has gone, and no call has unlocked anything.
fn what_a_child_keeps_goes<A: Walk>(sharing: Sharing) {
    with_locked::<A>(sharing, |memory, space| {
        let child = space.fork().unwrap();
        assert_eq!(memory.reclaim(u64::MAX).freed, 0);
        drop(space);
        assert_eq!(memory.reclaim(u64::MAX).freed, LOCKED);
        drop(child);
    });
}

fn unlocked_pages_go<A: Walk>(sharing: Sharing) {
    with_locked::<A>(sharing, |memory, space| {
        space.munlock(VirtAddr(AT), LOCKED * PAGE_SIZE).unwrap();
        // In the turn that it takes until the pages are cold, and no later.
        let reclaimed = memory.reclaim(LOCKED);
        assert_eq!(reclaimed.freed, LOCKED);
        assert!(reclaimed.scanned <= 2 * u64::from(memory.total_frames() as u32) + 128);
    });
}

fn all<A: Walk>() {
    for sharing in [Sharing::Private, Sharing::Shared] {
        locked_pages_are_passed_over::<A>(sharing);
        what_a_child_keeps_goes::<A>(sharing);
        unlocked_pages_go::<A>(sharing);
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
