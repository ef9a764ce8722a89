//! Repeated faults that change nothing are counted and, in debug builds, reported with their
//! causes.

#[cfg(debug_assertions)]
use std::panic::{AssertUnwindSafe, catch_unwind};

use bindery::addr::VirtAddr;
#[cfg(debug_assertions)]
use bindery::arch::{AArch64, Riscv64, X86_64};
use bindery::{
    Access, AddressSpace, FaultError, MapRequest, Protection, Resolution, Resolved, VmallocOptions,
};
use bindery_hosted::{Program, Walk};

use crate::support::kernel::map;
use crate::support::{READ_WRITE, anywhere, options, strict};

on_every_architecture! {
    a_fault_that_changes_nothing_is_counted => counted;
    faults_after_changes_are_no_repetition => changes;
}

/// The panic of a kernel whose processor faults at one address forever.
#[cfg(debug_assertions)]
fn faults_for_ever<A: Walk>() -> String {
    let (_machine, memory) = strict::<A>(16 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let at = space.mmap(&anywhere(1 << 16)).unwrap();
    space.fault(at, Access::Write).unwrap();
    let fault = || {
        for _ in 0..10_000 {
            assert_eq!(space.fault(at, Access::Write), Ok(Resolved::Spurious));
        }
    };
    let panic = catch_unwind(AssertUnwindSafe(fault)).unwrap_err();
    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    // The locks that the fault held when it panicked are never released.
    std::mem::forget(space);
    std::mem::forget(memory);
    text
}

#[test]
#[cfg(debug_assertions)]
fn the_usual_causes_are_named_in_debug_builds() {
    let text = faults_for_ever::<X86_64<4>>();
    assert!(text.contains("EFER.NXE must be set"), "{text}");
    assert!(text.contains("invalidate_local"), "{text}");
    assert!(faults_for_ever::<AArch64>().contains("SCTLR_EL1.WXN must be clear"));
    assert!(faults_for_ever::<Riscv64<4>>().contains("another root is loaded"));
}

fn counted<A: Walk>() {
    let (_machine, memory) = strict::<A>(16 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let at = space.mmap(&anywhere(1 << 16)).unwrap();
    space.fault(at, Access::Write).unwrap();
    assert_eq!(memory.events().spurious_faults, 0);
    for times in 1..10 {
        assert_eq!(space.fault(at, Access::Write), Ok(Resolved::Spurious));
        assert_eq!(memory.events().spurious_faults, times);
        assert_eq!(memory.events().repeated_faults, times);
    }
    // A refused fault does not count.
    assert_eq!(space.fault(VirtAddr(0x1_0000), Access::Read), Err(FaultError::NotMapped));
    let map = map(&memory);
    let area = map.vmalloc(1, &VmallocOptions::default()).unwrap();
    for _ in 0..20 {
        assert_eq!(map.resolve(area, bindery::arch::Permissions::READ), Resolution::Retry);
    }
    assert_eq!((memory.events().spurious_faults, memory.events().repeated_faults), (29, 20));
}

fn changes<A: Walk>() {
    let (machine, memory) = strict::<A>(16 << 20);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let length = 4096;
    let request = MapRequest { length, protection: READ_WRITE, ..MapRequest::default() };
    let at = space.mmap(&request).unwrap();
    let program = Program::new(&machine, &space);
    for value in 0..5_000 {
        program.store(at, value).unwrap();
        space.mprotect(at, length, Protection::READ).unwrap();
        program.load(at).unwrap();
        // The TLB still caches a translation that refuses stores.
        space.mprotect(at, length, READ_WRITE).unwrap();
    }
    assert!(memory.events().repeated_faults <= 1, "{:?}", memory.events());
}
