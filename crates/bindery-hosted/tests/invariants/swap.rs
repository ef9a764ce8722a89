//! The invariants of swap, broken on purpose: slots and the entries that refer to them.

use bindery::addr::VirtAddr;
use bindery::arch::{Absent, AbsentFormat, Level, Marker, X86_64};
use bindery::check::{self, Violation};
use bindery::{Advice, testing};

use crate::support::fixture::{Fixture, with_fixture};
use crate::support::{GIB, fixed};

type X86 = X86_64<4>;

const PAGE: u64 = 4096;
const AT: VirtAddr = VirtAddr(GIB);

/// Eight pages at `AT` that are in swap.
fn swapped(scenario: impl FnOnce(&Fixture<'_, '_, X86>)) {
    with_fixture::<X86>(0, |fixture| {
        let area = fixture.memory.swap_on(1024, 0).unwrap();
        fixture.space.mmap(&fixed(AT.0, 16 * PAGE)).unwrap();
        fixture.fill(AT.0, 8);
        fixture.space.madvise(AT, 8 * PAGE, Advice::PageOut).unwrap();
        scenario(fixture);
        fixture.space.munmap(AT, 16 * PAGE).unwrap();
        fixture.memory.swap_off(&area).unwrap();
    });
}

/// The auditor's verdict after `change` of the swap entry at `AT`.
fn changed(change: impl FnOnce(Absent) -> Absent) -> Violation {
    let mut found = None;
    swapped(|fixture| {
        let old = testing::raw_entry(fixture.space, AT, Level::PTE).unwrap();
        let entry = X86::encode_absent(change(X86::decode_absent(old).unwrap()));
        testing::set_raw_entry(fixture.space, AT, Level::PTE, entry);
        found = Some(fixture.broken(&[]));
        testing::set_raw_entry(fixture.space, AT, Level::PTE, old);
    });
    found.unwrap()
}

fn with_slot(absent: Absent, change: impl FnOnce(&mut u8, &mut u64)) -> Absent {
    let Absent::Swap { mut device, mut slot, exclusive, soft_dirty, userfault } = absent else {
        panic!("{absent:?} names no slot");
    };
    change(&mut device, &mut slot);
    Absent::Swap { device, slot, exclusive, soft_dirty, userfault }
}

#[test]
fn an_entry_names_a_slot_that_is_taken() {
    let found = changed(|entry| with_slot(entry, |_, slot| *slot += 500));
    assert!(matches!(found, Violation::WrongSlot { at: AT, area: 0, .. }), "{found}");
}

#[test]
fn an_entry_names_a_slot_that_there_is() {
    let beyond = changed(|entry| with_slot(entry, |_, slot| *slot = 1 << 20));
    assert!(matches!(beyond, Violation::NoSlot(AT)), "{beyond}");
    let elsewhere = changed(|entry| with_slot(entry, |device, _| *device = 7));
    assert!(matches!(elsewhere, Violation::NoSlot(AT)), "{elsewhere}");
}

#[test]
fn an_exclusive_entry_is_its_slots_only_one() {
    swapped(|fixture| {
        let child = fixture.space.fork().unwrap();
        let old = testing::raw_entry(fixture.space, AT, Level::PTE).unwrap();
        let shared = X86::decode_absent(old).unwrap();
        let Absent::Swap { device, slot, soft_dirty, userfault, .. } = shared else { panic!() };
        let own = Absent::Swap { device, slot, exclusive: true, soft_dirty, userfault };
        testing::set_raw_entry(fixture.space, AT, Level::PTE, X86::encode_absent(own));
        let found = fixture.broken(&[&child]);
        assert!(matches!(found, Violation::WrongSlot { at: AT, .. }), "{found}");
        testing::set_raw_entry(fixture.space, AT, Level::PTE, old);
    });
}

#[test]
fn slots_count_the_entries_that_name_them() {
    let found = changed(|_| Absent::Marker(Marker::Poison));
    assert!(matches!(found, Violation::SwapSlots { named: 8, holds: 7, .. }), "{found}");
}

#[test]
fn a_child_hidden_from_the_auditor_is_missed() {
    swapped(|fixture| {
        let child = fixture.space.fork().unwrap();
        let mut scratch = vec![0; check::scratch_words(fixture.memory)];
        let found = check::check(fixture.memory, &[fixture.space], &mut scratch);
        assert!(found.is_err());
        drop(child);
    });
}
