//! Faults on absent pages.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::platform::Cpu;
use bindery::{
    Access, Error, FaultError, FileAccess, FillMode, MapObject, MapRequest, Remap, Sharing,
    UserfaultFault, UserfaultFeatures, UserfaultKind, UserfaultModes, UserfaultScope,
    WaitingFaults,
};
use bindery_hosted::MemoryFiles;
use bindery_linux::userfault_text;

use super::fixture::{AT, PAGE, PAGES, Wish, at, with_features, with_fixture, with_wish};
use crate::support::{MIB, fixed};

fn missing(address: VirtAddr, is_write: bool) -> UserfaultFault {
    UserfaultFault { address, kind: UserfaultKind::Missing, is_write, thread: 0 }
}

#[test]
fn a_fault_waits_until_its_page_is_copied() {
    with_fixture(|fixture| {
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(at(3)));
            assert_eq!(fixture.fault(), missing(at(3), false));
            assert!(!reader.is_finished() && !fixture.fd.is_readable());
            fixture.copy(3, PAGE, 7).unwrap();
            assert_eq!(reader.join().unwrap(), Ok(0x0707_0707_0707_0707));
            let writer = fixture.spawn(scope, 1, |program| program.store(at(4), 9));
            assert_eq!(fixture.fault(), missing(at(4), true));
            fixture.copy(4, PAGE, 1).unwrap();
            writer.join().unwrap().unwrap();
            assert_eq!(fixture.byte(4), 9);
        });
    });
}

#[test]
fn a_fault_woken_without_page_asks_again() {
    with_fixture(|fixture| {
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(at(3)));
            fixture.fault();
            fixture.space.wake_userfaults(fixture.fd, at(0), 3 * PAGE).unwrap();
            fixture.space.wake_userfaults(fixture.fd, at(4), PAGE).unwrap();
            assert!(!fixture.fd.is_readable());
            fixture.space.wake_userfaults(fixture.fd, at(3), PAGE).unwrap();
            assert_eq!(fixture.fault(), missing(at(3), false));
            fixture.copy_as(3, PAGE, 1, FillMode::DONT_WAKE).unwrap();
            assert!(!reader.is_finished());
            fixture.space.wake_userfaults(fixture.fd, at(0), PAGES * PAGE).unwrap();
            assert_eq!(reader.join().unwrap(), Ok(0x0101_0101_0101_0101));
        });
    });
}

#[test]
fn no_lock_is_held_while_a_fault_waits() {
    with_fixture(|fixture| {
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(at(3)));
            fixture.fault();
            let space = fixture.space;
            space.mmap(&fixed(4 * AT, MIB)).unwrap();
            space.mremap(VirtAddr(4 * AT), MIB, 2 * MIB, Remap::MayMove).unwrap();
            space.munmap(VirtAddr(4 * AT), 2 * MIB).unwrap();
            // The mapping itself, then the page itself.
            space.munmap(at(4), PAGE).unwrap();
            space.mremap(at(16), 16 * PAGE, 16 * PAGE, Remap::To(VirtAddr(4 * AT))).unwrap();
            space.munmap(at(3), PAGE).unwrap();
            assert!(!reader.is_finished());
            space.wake_userfaults(fixture.fd, at(3), PAGE).unwrap();
            assert_eq!(reader.join().unwrap(), Err(FaultError::NotMapped));
        });
    });
}

#[test]
fn the_kernels_copy_waits_like_the_program() {
    with_fixture(|fixture| {
        thread::scope(|scope| {
            let kernel = scope.spawn(|| {
                let copy = || fixture.space.write_user(at(5), b"kernel");
                fixture.machine.on_cpu(Cpu(1), copy)
            });
            assert_eq!(fixture.fault(), missing(at(5), true));
            fixture.space.munmap(at(6), PAGE).unwrap();
            fixture.copy(5, PAGE, 0).unwrap();
            kernel.join().unwrap().unwrap();
            assert_eq!(fixture.byte(5), b'k');
        });
    });
}

#[test]
fn who_serves_programs_alone_refuses_the_kernel() {
    with_wish(Wish { scope: UserfaultScope::UserMode, ..Wish::default() }, |fixture| {
        assert_eq!(fixture.space.write_user(at(5), b"kernel"), Err(FaultError::Bus));
        assert_eq!(fixture.space.mlock(at(5), PAGE, Default::default()), Err(Error::Fault(at(5))));
        assert!(!fixture.fd.is_readable());
        thread::scope(|scope| {
            let writer = fixture.spawn(scope, 1, |program| program.store(at(5), 1));
            fixture.fault();
            fixture.copy(5, PAGE, 0).unwrap();
            writer.join().unwrap().unwrap();
        });
    });
}

#[test]
fn a_fault_is_sigbus_with_that_feature() {
    with_features(UserfaultFeatures::SIGBUS, |fixture| {
        let fault = |page| fixture.space.fault(at(page), Access::Read);
        assert_eq!(fault(5), Err(FaultError::Bus));
        assert!(!fixture.fd.is_readable());
        fixture.copy(5, PAGE, 5).unwrap();
        assert_eq!(fixture.byte(5), 5);
    });
}

#[test]
fn a_message_has_the_requested_address_and_thread() {
    let features = UserfaultFeatures::EXACT_ADDRESS | UserfaultFeatures::THREAD_ID;
    with_features(features, |fixture| {
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 2, |program| program.load(VirtAddr(at(3).0 + 40)));
            let expected = UserfaultFault { thread: 3, ..missing(VirtAddr(at(3).0 + 40), false) };
            assert_eq!(fixture.fault(), expected);
            // Linux wakes by the page.
            fixture.copy(3, PAGE, 1).unwrap();
            reader.join().unwrap().unwrap();
        });
    });
}

#[test]
fn the_faults_that_wait_are_counted() {
    with_fixture(|fixture| {
        let waiting = |unread, all| assert_eq!(fixture.fd.waiting(), WaitingFaults { unread, all });
        waiting(0, 0);
        thread::scope(|scope| {
            let first = fixture.spawn(scope, 1, |program| program.load(at(1)));
            fixture.fault();
            waiting(0, 1);
            let second = fixture.spawn(scope, 2, |program| program.load(at(2)));
            while !fixture.fd.is_readable() {
                thread::yield_now();
            }
            waiting(1, 2);
            let mut text = String::new();
            userfault_text(Some(fixture.fd), &mut text).unwrap();
            let api = "API:\taa:80000000:80000000000001ff\n";
            assert_eq!(text, format!("pending:\t1\ntotal:\t2\n{api}"));
            fixture.space.wake_userfaults(fixture.fd, at(4), PAGE).unwrap();
            fixture.copy(1, 2 * PAGE, 1).unwrap();
            first.join().unwrap().unwrap();
            second.join().unwrap().unwrap();
        });
        waiting(0, 0);
    });
}

#[test]
fn two_readers_share_the_messages() {
    with_fixture(|fixture| {
        let serve = || {
            let fault = fixture.fault();
            let page = (fault.address.0 - AT) / PAGE;
            fixture.copy(page, PAGE, page as u8).unwrap();
            page
        };
        thread::scope(|scope| {
            let faults: Vec<_> = (1..=2)
                .map(|cpu| {
                    fixture.spawn(scope, cpu, move |program| program.load(at(u64::from(cpu))))
                })
                .collect();
            let other = scope.spawn(move || fixture.machine.on_cpu(Cpu(3), serve));
            let mut served = [serve(), other.join().unwrap()];
            served.sort_unstable();
            assert_eq!(served, [1, 2]);
            for fault in faults {
                fault.join().unwrap().unwrap();
            }
            assert!(fixture.fd.try_read().is_none());
        });
    });
}

#[test]
fn a_waiter_that_is_killed_leaves_nothing_behind() {
    with_fixture(|fixture| {
        thread::scope(|scope| {
            let killed = fixture.spawn(scope, 1, |program| program.load(at(3)));
            fixture.fault();
            let unread = fixture.spawn(scope, 2, |program| program.load(at(4)));
            while !fixture.fd.is_readable() {
                thread::yield_now();
            }
            fixture.machine.kill(Cpu(1));
            fixture.machine.kill(Cpu(2));
            assert_eq!(killed.join().unwrap(), Err(FaultError::Interrupted));
            assert_eq!(unread.join().unwrap(), Err(FaultError::Interrupted));
            assert!(fixture.fd.try_read().is_none());
            fixture.copy(3, PAGE, 1).unwrap();
        });
    });
}

#[test]
fn closing_wakes_all_who_wait() {
    with_fixture(|fixture| {
        let fd = fixture.space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
        let length = 4 * PAGE;
        let register = |fd: &_| {
            fixture.space.register_userfault(fd, VirtAddr(4 * AT), length, UserfaultModes::MISSING)
        };
        fixture.space.mmap(&fixed(4 * AT, length)).unwrap();
        register(&fd).unwrap();
        thread::scope(|scope| {
            let read = fixture.spawn(scope, 1, |program| program.load(VirtAddr(4 * AT)));
            fd.read().unwrap();
            let unread = fixture.spawn(scope, 2, |program| program.load(VirtAddr(4 * AT + PAGE)));
            while !fd.is_readable() {
                thread::yield_now();
            }
            drop(fd);
            assert_eq!((read.join().unwrap(), unread.join().unwrap()), (Ok(0), Ok(0)));
        });
        // The memory counts as unregistered, so another userfaultfd may register it.
        register(fixture.fd).unwrap();
        fixture.space.unregister_userfault(fixture.fd, VirtAddr(4 * AT), length).unwrap();
        fixture.space.fault(VirtAddr(4 * AT + 2 * PAGE), Access::Write).unwrap();
    });
}

/// The mappings of a userfaultfd whose handle was dropped count as not registered.
#[test]
fn another_unregisters_what_a_closed_one_served() {
    with_fixture(|fixture| {
        let space = fixture.space;
        let modes = UserfaultModes::MISSING;
        let fd = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
        space.unregister_userfault(fixture.fd, at(8), 8 * PAGE).unwrap();
        space.register_userfault(&fd, at(8), 8 * PAGE, modes).unwrap();
        let all = || space.unregister_userfault(fixture.fd, at(0), PAGES * PAGE);
        assert_eq!(all(), Err(Error::Invalid), "the other one is open");
        drop(fd);
        assert_eq!(all(), Ok(()));
        assert_eq!(space.mapping_count(), 1, "nothing refers to a userfaultfd");
        // Asynchronous protection also concerns files, whose mappings are refused otherwise.
        let features = UserfaultFeatures::WP_ASYNC;
        let [first, second] =
            [(); 2].map(|()| space.userfault(features, Default::default()).unwrap());
        let file = fixture.memory.file(Box::leak(Box::new(MemoryFiles::new())), 1, PAGE).unwrap();
        let request = MapRequest { sharing: Sharing::Shared, ..fixed(4 * AT, PAGE) };
        let access = FileAccess::READ | FileAccess::WRITE;
        space.mmap_object(&request, &MapObject { object: &file, offset: 0, access }).unwrap();
        let modes = UserfaultModes::WRITE_PROTECT;
        space.register_userfault(&first, VirtAddr(4 * AT), PAGE, modes).unwrap();
        drop(first);
        let unregistered = space.unregister_userfault(&second, VirtAddr(4 * AT), PAGE);
        assert_eq!(unregistered, Err(Error::Invalid), "a mapping of a file");
        space.munmap(VirtAddr(4 * AT), PAGE).unwrap();
    });
}

#[test]
fn unregistering_wakes_who_waits_there() {
    with_fixture(|fixture| {
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(at(3)));
            fixture.fault();
            fixture.space.unregister_userfault(fixture.fd, at(2), 2 * PAGE).unwrap();
            assert_eq!(reader.join().unwrap(), Ok(0));
            assert_eq!(fixture.space.mapping_count(), 3);
            fixture
                .space
                .register_userfault(fixture.fd, at(2), 2 * PAGE, UserfaultModes::MISSING)
                .unwrap();
            assert_eq!(fixture.space.mapping_count(), 1);
        });
    });
}

#[test]
fn failing_or_distant_unregistering_wakes_none() {
    with_fixture(|fixture| {
        thread::scope(|scope| {
            let reader = fixture.spawn(scope, 1, |program| program.load(at(3)));
            fixture.fault();
            let space = fixture.space;
            let other = space.userfault(Default::default(), Default::default()).unwrap();
            space.mmap(&fixed(AT + PAGES * PAGE, PAGE)).unwrap();
            let next = VirtAddr(AT + PAGES * PAGE);
            space.register_userfault(&other, next, PAGE, UserfaultModes::MISSING).unwrap();
            let refused = space.unregister_userfault(fixture.fd, at(0), (PAGES + 1) * PAGE);
            assert_eq!(refused, Err(Error::Invalid), "a part is the other's");
            space.unregister_userfault(fixture.fd, at(4), PAGE).unwrap();
            // A woken fault would queue its message again.
            assert!(!reader.is_finished() && !fixture.fd.is_readable());
            space.close_userfault(other);
            space.unregister_userfault(fixture.fd, at(0), 4 * PAGE).unwrap();
            assert_eq!(reader.join().unwrap(), Ok(0));
        });
    });
}

#[test]
fn registration_refuses_what_linux_refuses() {
    with_fixture(|fixture| {
        let space = fixture.space;
        let missing = UserfaultModes::MISSING;
        let register = |start, length, modes| {
            space.register_userfault(fixture.fd, VirtAddr(start), length, modes)
        };
        assert_eq!(register(AT, PAGE, UserfaultModes::empty()), Err(Error::Invalid));
        assert_eq!(register(AT + 1, PAGE, missing), Err(Error::Unaligned(VirtAddr(AT + 1))));
        assert_eq!(register(AT, PAGE + 1, missing), Err(Error::Unaligned(VirtAddr(AT))));
        assert_eq!(register(AT, 0, missing), Err(Error::ZeroLength));
        let limit = VirtAddr(1 << 47);
        assert!(matches!(register(AT, limit.0, missing), Err(Error::OutOfRange { .. })));
        assert!(matches!(register(0, PAGE, missing), Err(Error::OutOfRange { .. })));
        assert_eq!(register(8 * AT, PAGE, missing), Err(Error::Invalid), "nothing is mapped");
        assert_eq!(register(AT, PAGE, UserfaultModes::MINOR), Err(Error::Invalid));
        let other = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All).unwrap();
        let busy = space.register_userfault(&other, at(1), PAGE, missing);
        assert_eq!(busy, Err(Error::Busy));
        assert_eq!(space.unregister_userfault(&other, at(1), PAGE), Err(Error::Invalid));
        let foreign = bindery::AddressSpace::new(fixture.memory, Default::default()).unwrap();
        let elsewhere = foreign.userfault(Default::default(), Default::default()).unwrap();
        let refused = space.register_userfault(&elsewhere, at(1), PAGE, missing);
        assert_eq!(refused, Err(Error::Invalid));
        // Gaps are skipped.
        space.munmap(at(8), 8 * PAGE).unwrap();
        register(AT, PAGES * PAGE, missing).unwrap();
        assert_eq!(space.mapping_count(), 2);
    });
}

#[test]
fn an_unserved_mapping_costs_no_message() {
    with_fixture(|fixture| {
        fixture.space.mmap(&fixed(4 * AT, PAGE)).unwrap();
        fixture.space.fault(VirtAddr(4 * AT), Access::Write).unwrap();
        assert!(!fixture.fd.is_readable());
        // A new mapping next to registered memory does not merge with it.
        fixture.space.mmap(&fixed(AT + PAGES * PAGE, PAGE)).unwrap();
        assert_eq!(fixture.space.mapping_count(), 3);
    });
}
