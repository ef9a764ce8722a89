//! Write-protection across faults, forks, moves, swaps and `mprotect`.

use std::thread;

use bindery::addr::{Order, VirtAddr};
use bindery::platform::Cpu;
use bindery::{
    Access, Error, FillMode, Inspection, PinTime, Protection, Remap, Resolved, SizeMode,
    UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultMessage, UserfaultModes,
    WriteProtectMode,
};

use super::fixture::{AT, Fixture, PAGE, PAGES, Space, Wish, at, with_wish};
use crate::support::{READ_WRITE, audit};

const PROTECT: WriteProtectMode = WriteProtectMode::PROTECT;
const LIFT: WriteProtectMode = WriteProtectMode::empty();

fn with_protection(features: UserfaultFeatures, scenario: impl FnOnce(&Fixture<'_, '_>)) {
    let modes = UserfaultModes::WRITE_PROTECT;
    with_wish(Wish { features, modes, ..Wish::default() }, scenario);
}

/// Whether a page is present and protected.
fn is_protected(space: &Space<'_>, at: VirtAddr) -> bool {
    match space.inspect(at) {
        Inspection::Page { attributes, .. } => attributes.userfault,
        Inspection::Absent(absent) => matches!(
            absent,
            bindery::arch::Absent::Marker(bindery::arch::Marker::UserfaultWriteProtect)
                | bindery::arch::Absent::Swap { userfault: true, .. }
                | bindery::arch::Absent::ProtNone { userfault: true, .. }
        ),
        _ => false,
    }
}

impl Fixture<'_, '_> {
    fn fill_all(&self, pages: u64) {
        for page in 0..pages {
            self.space.write_user(at(page), &[page as u8]).unwrap();
        }
    }

    fn protect(&self, page: u64, pages: u64, mode: WriteProtectMode) -> Result<(), Error> {
        self.space.handler(self.fd).write_protect(at(page), pages * PAGE, mode)
    }

    /// Whether a page is present and protected.
    fn is_protected(&self, at: VirtAddr) -> bool {
        is_protected(self.space, at)
    }

    /// Writes to a page on another CPU. The write waits and continues after `serve`.
    #[track_caller]
    fn blocked(&self, page: u64, serve: impl FnOnce(UserfaultFault)) {
        thread::scope(|scope| {
            let writer = self.spawn(scope, 1, move |program| program.write(at(page), &[99]));
            serve(self.fault());
            writer.join().unwrap().unwrap();
        });
        assert_eq!(self.byte(page), 99);
    }
}

#[test]
fn a_write_to_a_protected_page_waits() {
    with_protection(UserfaultFeatures::empty(), |fixture| {
        fixture.fill_all(8);
        fixture.protect(0, 8, PROTECT).unwrap();
        assert_eq!(fixture.byte(3), 3, "reads go on");
        fixture.blocked(3, |fault| {
            let kind = UserfaultKind::WriteProtected;
            assert_eq!(fault, UserfaultFault { address: at(3), kind, is_write: true, thread: 0 });
            assert_eq!(fixture.byte(3), 3);
            fixture.protect(3, 1, LIFT).unwrap();
        });
        assert!(!fixture.is_protected(at(3)) && fixture.is_protected(at(4)));
        // Writable pages are written without another fault.
        fixture.protect(0, 8, LIFT).unwrap();
        assert_eq!(fixture.space.fault(at(5), Access::Write), Ok(Resolved::Spurious));
    });
}

#[test]
fn large_folios_are_protected_wholly_and_partly() {
    with_protection(UserfaultFeatures::empty(), |fixture| {
        fixture.memory.folio_policy().set(Order(9), SizeMode::Always);
        fixture.memory.folio_policy().set(Order(4), SizeMode::Always);
        fixture.space.write_user(at(0), &[7; 16]).unwrap();
        fixture.protect(0, 512, PROTECT).unwrap();
        assert!(fixture.is_protected(at(0)) && fixture.is_protected(at(511)));
        fixture.protect(100, 1, LIFT).unwrap();
        assert!(fixture.is_protected(at(99)) && !fixture.is_protected(at(100)));
        fixture.space.fault(at(100), Access::Write).unwrap();
        fixture.blocked(0, |_| fixture.protect(0, 512, LIFT).unwrap());
    });
}

#[test]
fn absent_pages_are_protected_only_on_request() {
    with_protection(UserfaultFeatures::empty(), |fixture| {
        fixture.protect(0, PAGES, PROTECT).unwrap();
        assert_eq!(fixture.space.inspect(at(1)), Inspection::Empty);
        fixture.space.fault(at(1), Access::Write).unwrap();
        assert!(!fixture.fd.is_readable());
    });
    with_protection(UserfaultFeatures::WP_UNPOPULATED, |fixture| {
        fixture.protect(1, PAGES - 1, PROTECT).unwrap();
        assert!(fixture.is_protected(at(1)) && fixture.is_protected(at(600)));
        assert!(!fixture.is_protected(at(0)));
        assert_eq!(fixture.byte(600), 0);
        assert!(fixture.is_protected(at(600)), "a read leaves it");
        fixture.blocked(600, |_| fixture.protect(600, 1, LIFT).unwrap());
        fixture.blocked(2, |_| fixture.protect(2, 1, LIFT).unwrap());
        fixture.protect(0, PAGES, LIFT).unwrap();
        fixture.space.fault(at(700), Access::Write).unwrap();
    });
}

#[test]
fn an_asynchronous_write_removes_its_pages_protection() {
    let features = UserfaultFeatures::WP_ASYNC | UserfaultFeatures::WP_UNPOPULATED;
    with_protection(features, |fixture| {
        fixture.fill_all(4);
        fixture.protect(0, 16, PROTECT).unwrap();
        fixture.space.write_user(at(1), &[1]).unwrap();
        fixture.space.write_user(at(9), &[1]).unwrap();
        assert!(!fixture.fd.is_readable());
        let protected: Vec<_> = (0..16).filter(|page| fixture.is_protected(at(*page))).collect();
        assert_eq!(protected, [0, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15]);
    });
}

#[test]
fn a_child_is_unprotected_and_the_parent_protected() {
    with_protection(UserfaultFeatures::WP_UNPOPULATED, |fixture| {
        fixture.fill_all(4);
        fixture.protect(0, 8, PROTECT).unwrap();
        let child = fixture.space.fork().unwrap();
        child.write_user(at(2), &[5]).unwrap();
        child.write_user(at(6), &[5]).unwrap();
        drop(child);
        fixture.blocked(2, |_| fixture.protect(2, 1, LIFT).unwrap());
        fixture.blocked(6, |_| fixture.protect(6, 1, LIFT).unwrap());
    });
}

#[test]
fn mprotect_keeps_the_protection() {
    with_protection(UserfaultFeatures::empty(), |fixture| {
        fixture.fill_all(4);
        fixture.protect(0, 4, PROTECT).unwrap();
        let both = Protection::READ | Protection::WRITE;
        for protection in [Protection::READ, both, Protection::empty(), both] {
            fixture.space.mprotect(at(0), 4 * PAGE, protection).unwrap();
            assert!(fixture.is_protected(at(2)));
        }
        fixture.blocked(2, |_| fixture.protect(2, 1, LIFT).unwrap());
    });
}

#[test]
fn protection_is_lost_in_unserved_memory() {
    with_protection(UserfaultFeatures::WP_UNPOPULATED, |fixture| {
        fixture.fill_all(1024);
        fixture.protect(0, 512, PROTECT).unwrap();
        fixture.protect(512, 512, LIFT).unwrap();
        let to = VirtAddr(4 * AT);
        fixture.space.mremap(at(0), PAGES * PAGE, PAGES * PAGE, Remap::To(to)).unwrap();
        assert!(!fixture.is_protected(to) && !fixture.is_protected(VirtAddr(to.0 + 511 * PAGE)));
        fixture.space.write_user(VirtAddr(to.0 + 5 * PAGE), &[1]).unwrap();
        assert!(!fixture.fd.is_readable());
        // Restores the fixture's mapping, without a registration.
        fixture.space.mmap(&crate::support::fixed(AT, PAGES * PAGE)).unwrap();
    });
}

#[test]
fn unregistering_and_closing_lift_it() {
    with_protection(UserfaultFeatures::WP_UNPOPULATED, |fixture| {
        fixture.fill_all(4);
        fixture.protect(0, 8, PROTECT).unwrap();
        fixture.space.unregister_userfault(fixture.fd, at(0), 2 * PAGE).unwrap();
        assert!(!fixture.is_protected(at(1)) && fixture.is_protected(at(2)));
        fixture.space.write_user(at(1), &[1]).unwrap();
    });
    let (machine, memory) = crate::support::strict::<super::fixture::A>(16 << 20);
    let space = bindery::AddressSpace::new(&memory, Default::default()).unwrap();
    space.mmap(&crate::support::fixed(AT, 8 * PAGE)).unwrap();
    let fd = space.userfault(UserfaultFeatures::WP_UNPOPULATED, Default::default()).unwrap();
    let modes = UserfaultModes::WRITE_PROTECT;
    space.register_userfault(&fd, at(0), 8 * PAGE, modes).unwrap();
    space.write_user(at(0), &[1]).unwrap();
    space.handler(&fd).write_protect(at(0), 8 * PAGE, PROTECT).unwrap();
    // The VMA still refers to the userfaultfd.
    drop(fd);
    space.write_user(at(0), &[2]).unwrap();
    space.write_user(at(4), &[2]).unwrap();
    crate::support::audit(&machine, &memory, &[&space]);
}

#[test]
fn copies_can_be_protected_from_the_first() {
    let modes = UserfaultModes::MISSING | UserfaultModes::WRITE_PROTECT;
    with_wish(Wish { modes, ..Wish::default() }, |fixture| {
        fixture.memory.folio_policy().set(Order(4), SizeMode::Always);
        fixture.copy_as(0, 20 * PAGE, 5, FillMode::WRITE_PROTECT).unwrap();
        assert!((0..20).all(|page| fixture.is_protected(at(page))));
        fixture.blocked(7, |fault| {
            assert_eq!(fault.kind, UserfaultKind::WriteProtected);
            fixture.protect(0, 20, LIFT).unwrap();
        });
    });
}

#[test]
fn protection_refuses_what_linux_refuses() {
    with_protection(UserfaultFeatures::empty(), |fixture| {
        let both = WriteProtectMode::all();
        assert_eq!(fixture.protect(0, 1, both), Err(Error::Invalid));
        assert_eq!(fixture.protect(0, 0, PROTECT), Err(Error::ZeroLength));
        assert_eq!(fixture.protect(PAGES, 1, PROTECT), Err(Error::NotMapped(at(PAGES))));
        fixture.space.unregister_userfault(fixture.fd, at(4), PAGE).unwrap();
        assert_eq!(fixture.protect(2, 4, PROTECT), Err(Error::NotMapped(at(4))));
    });
    with_wish(Wish::default(), |fixture| {
        assert_eq!(fixture.protect(0, 1, PROTECT), Err(Error::NotMapped(at(0))));
    });
}

#[test]
fn a_child_has_protected_copies_of_pinned_pages() {
    for order in [0, 4, 9] {
        for none in [false, true] {
            for features in [UserfaultFeatures::empty(), UserfaultFeatures::EVENT_FORK] {
                with_protection(features, |fixture| forked_with_a_pin(fixture, order, none));
            }
        }
    }
}

/// Protects pages, one of them pinned, and forks. With `none`, all pages are inaccessible then.
fn forked_with_a_pin(fixture: &Fixture<'_, '_>, order: u8, none: bool) {
    const COUNT: u64 = 512;
    fixture.memory.folio_policy().set(Order(order), SizeMode::Always);
    fixture.fill_all(COUNT);
    let pinned = fixture.space.pin(at(3), 1, Access::Read, PinTime::Long).unwrap();
    fixture.protect(0, COUNT, PROTECT).unwrap();
    if none {
        fixture.space.mprotect(at(0), COUNT * PAGE, Protection::empty()).unwrap();
    }
    let is_watched = fixture.fd.features().contains(UserfaultFeatures::EVENT_FORK);
    let (child, theirs) = thread::scope(|scope| {
        let fork = || fixture.machine.on_cpu(Cpu(1), || fixture.space.fork().unwrap());
        let child = scope.spawn(fork);
        let theirs = is_watched.then(|| match fixture.fd.read().unwrap() {
            UserfaultMessage::Fork(theirs) => theirs,
            other => panic!("{other:?}"),
        });
        (child.join().unwrap(), theirs)
    });
    for page in 0..COUNT {
        let is_protected = is_protected(&child, at(page));
        assert_eq!(is_protected, is_watched, "page {page}, folios of {order}, {none}");
        assert!(fixture.is_protected(at(page)));
    }
    if none {
        child.mprotect(at(0), COUNT * PAGE, READ_WRITE).unwrap();
        fixture.space.mprotect(at(0), COUNT * PAGE, READ_WRITE).unwrap();
    }
    if let Some(theirs) = theirs {
        let of_child = Fixture { space: &child, fd: &theirs, ..*fixture };
        of_child.blocked(3, |fault| {
            assert_eq!((fault.address, fault.kind), (at(3), UserfaultKind::WriteProtected));
            of_child.protect(3, 1, LIFT).unwrap();
        });
        child.close_userfault(theirs);
    } else {
        child.write_user(at(3), &[99]).unwrap();
    }
    audit(fixture.machine, fixture.memory, &[fixture.space, &child]);
    drop(pinned);
}

/// A debugger's write to memory that the program may not write is no write that a handler awaits.
#[test]
fn no_debugger_writes_a_protected_page_by_force() {
    with_protection(UserfaultFeatures::empty(), |fixture| {
        fixture.fill_all(8);
        fixture.protect(3, 1, PROTECT).unwrap();
        for protection in [Protection::READ, Protection::empty()] {
            fixture.space.mprotect(at(0), 8 * PAGE, protection).unwrap();
            let refused = Err(bindery::FaultError::Protection);
            assert_eq!(fixture.space.write_forced(at(3), &[99]), refused);
            assert_eq!(fixture.space.write_forced(at(4), &[99]), Ok(()));
            let mut byte = [0];
            fixture.space.read_forced(at(3), &mut byte).unwrap();
            assert_eq!(byte, [3]);
        }
    });
}

/// No handler awaits a write to a page whose userfaultfd lifts protection by itself, or is closed.
#[test]
fn a_debugger_lifts_protection_without_a_handler() {
    let written = |space: &Space<'_>, page: u64| {
        for protection in [Protection::READ, Protection::empty()] {
            space.mprotect(at(0), PAGES * PAGE, protection).unwrap();
            // A page that was written before, and one that is new.
            for page in [page, page + 8] {
                assert_eq!(space.write_forced(at(page), &[99]), Ok(()), "{protection:?}");
                let mut byte = [0];
                space.read_forced(at(page), &mut byte).unwrap();
                assert_eq!(byte, [99]);
                assert!(!is_protected(space, at(page)));
                let refused = space.fault(at(page), Access::Write);
                assert_eq!(refused, Err(bindery::FaultError::Protection));
            }
            space.mprotect(at(0), PAGES * PAGE, READ_WRITE).unwrap();
        }
    };
    let features = UserfaultFeatures::WP_ASYNC | UserfaultFeatures::WP_UNPOPULATED;
    with_protection(features, |fixture| {
        fixture.fill_all(4);
        fixture.protect(0, 16, PROTECT).unwrap();
        written(fixture.space, 2);
        assert!(!fixture.fd.is_readable());
    });
    with_protection(UserfaultFeatures::empty(), |fixture| {
        let (space, all) = (fixture.space, PAGES * PAGE);
        fixture.fill_all(16);
        space.unregister_userfault(fixture.fd, at(0), all).unwrap();
        let fd = space.userfault(UserfaultFeatures::empty(), Default::default()).unwrap();
        space.register_userfault(&fd, at(0), all, UserfaultModes::WRITE_PROTECT).unwrap();
        space.handler(&fd).write_protect(at(0), all, PROTECT).unwrap();
        drop(fd);
        assert!(fixture.is_protected(at(2)), "its pages keep the bit");
        written(space, 2);
        space.unregister_userfault(fixture.fd, at(0), all).unwrap();
        let modes = UserfaultModes::WRITE_PROTECT;
        space.register_userfault(fixture.fd, at(0), all, modes).unwrap();
    });
}
