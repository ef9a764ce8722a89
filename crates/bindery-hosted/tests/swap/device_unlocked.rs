//! No VMA lock is held while a device works: the mapping changes while a fault in it waits.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Access, FaultError, MapRequest, Protection, Resolved, Sharing};
use bindery_hosted::{Program, SwapFile, SwapService};

use super::fixture::{Swapping, device, with_device};
use crate::support::objects::use_object_order;
use crate::support::{GIB, MIB, audit, fixed};

type A = X86_64<4>;

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const PAGES: u64 = 64;
const SHARINGS: [Sharing; 2] = [Sharing::Private, Sharing::Shared];

/// Runs `scenario` with a mapping whose pages are on a device that completes nothing by itself.
fn with_mapping(
    sharing: Sharing,
    order: u8,
    scenario: impl FnOnce(&Swapping<'_, '_, A>, &'static SwapFile),
) {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, order, device, |swapping| {
        use_object_order(swapping.memory, order);
        let request = MapRequest { sharing, ..fixed(AT, PAGES * PAGE) };
        swapping.space.mmap(&request).unwrap();
        swapping.fill(AT, PAGES);
        swapping.served(device, || swapping.page_out(AT, PAGES));
        scenario(swapping, device);
    });
}

/// Makes a fault wait for the device, runs `change` during the wait, completes the request, and
/// returns the result of the fault. Hangs if `change` waits for the device.
fn fault_during(
    swapping: &Swapping<'_, '_, A>,
    device: &SwapFile,
    access: Access,
    change: impl FnOnce(),
) -> Result<Resolved, FaultError> {
    thread::scope(|scope| {
        let fault = scope.spawn(|| {
            swapping.machine.on_cpu(Cpu(1), || swapping.space.fault(VirtAddr(AT), access))
        });
        device.wait_for_request();
        change();
        assert!(device.waiting() > 0 && !fault.is_finished(), "the fault waits for the device");
        while !fault.is_finished() {
            device.serve_one(swapping.memory);
            thread::yield_now();
        }
        fault.join().unwrap()
    })
}

#[test]
fn munmap_proceeds_while_a_fault_waits() {
    for sharing in SHARINGS {
        for order in [0, 4] {
            with_mapping(sharing, order, |swapping, device| {
                let unmap = || swapping.space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap();
                let result = fault_during(swapping, device, Access::Read, unmap);
                assert_eq!(result, Err(FaultError::NotMapped));
                audit(swapping.machine, swapping.memory, &[swapping.space]);
                assert_eq!(swapping.taken(), 0);
            });
        }
    }
}

#[test]
fn mprotect_proceeds_while_a_fault_waits() {
    for sharing in SHARINGS {
        with_mapping(sharing, 4, |swapping, device| {
            let protect = || {
                let protection = Protection::READ;
                swapping.space.mprotect(VirtAddr(AT), PAGES * PAGE, protection).unwrap();
            };
            let result = fault_during(swapping, device, Access::Write, protect);
            assert_eq!(result, Err(FaultError::Protection));
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            swapping.served(device, || {
                let program = Program::new(swapping.machine, swapping.space);
                for page in 0..PAGES {
                    assert_eq!(program.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
                }
            });
        });
    }
}

#[test]
fn another_mapping_takes_a_waiting_faults_place() {
    for sharing in SHARINGS {
        with_mapping(sharing, 0, |swapping, device| {
            let map = || {
                swapping.space.mmap(&fixed(AT, PAGES * PAGE)).unwrap();
            };
            let result = fault_during(swapping, device, Access::Read, map);
            assert_eq!(result, Ok(Resolved::ZeroPage), "the fault begins again");
            audit(swapping.machine, swapping.memory, &[swapping.space]);
            assert_eq!(swapping.taken(), 0);
        });
    }
}

/// The page that was read stays in the swap cache until the fault has mapped it.
#[test]
fn a_fault_reads_a_page_once() {
    for sharing in SHARINGS {
        for order in [0, 4] {
            for access in [Access::Read, Access::Write] {
                with_mapping(sharing, order, |swapping, device| {
                    let before = swapping.memory.events().major_faults;
                    let result = fault_during(swapping, device, access, || {});
                    assert!(result.is_ok(), "{result:?}");
                    let counts = device.counts();
                    assert_eq!((counts.reads, counts.pages_read), (1, 1 << order));
                    assert_eq!(swapping.memory.events().major_faults, before + 1);
                    assert_eq!(swapping.program.load(VirtAddr(AT)), Ok(AT));
                });
            }
        }
    }
}
