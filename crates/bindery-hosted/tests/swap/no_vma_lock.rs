//! No thread holds a VMA lock, or the mutex of an address space, while a swap device works for it.
//! The device checks this for every call that needs the device.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::testing::{is_mutex_locked, is_vma_locked};
use bindery::{
    Accounting, Advice, Growth, Memory, Object, Sealing, Sharing, SwapDevice, SwapRequest,
};
use bindery_hosted::{Machine, Program, SwapFile, SwapService};
use parking_lot::{Condvar, Mutex};

use super::fixture::{Swapping, with_area};
use crate::support::objects::use_object_order;
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, audit};

type A = X86_64<4>;

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const PAGES: u64 = 64;
const SHARINGS: [Sharing; 2] = [Sharing::Private, Sharing::Shared];

/// A device that transfers pages in `submit`, and only with permission.
struct Gated {
    file: SwapFile,
    is_synchronous: AtomicBool,
    is_gated: AtomicBool,
    passed: AtomicU64,
    waits: Mutex<bool>,
    changed: Condvar,
}

impl Gated {
    fn new(is_synchronous: bool) -> &'static Self {
        Box::leak(Box::new(Self {
            file: SwapFile::new(4096, SwapService::AtOnce).expect("a temporary file"),
            is_synchronous: AtomicBool::new(is_synchronous),
            is_gated: AtomicBool::new(false),
            passed: AtomicU64::new(0),
            waits: Mutex::new(false),
            changed: Condvar::new(),
        }))
    }

    /// Runs `work` on another CPU. Panics if the VMA at `AT` or the mutex was locked while the
    /// device worked. Returns the number of transfers.
    fn during(&self, swapping: &Swapping<'_, '_, A>, work: impl FnOnce() + Send) -> u64 {
        let mut locked = 0;
        self.is_gated.store(true, Relaxed);
        self.passed.store(0, Relaxed);
        thread::scope(|scope| {
            let worker = scope.spawn(|| swapping.machine.on_cpu(Cpu(1), work));
            while !worker.is_finished() {
                let mut waits = self.waits.lock();
                if *waits {
                    let space = swapping.space;
                    let is_locked = is_vma_locked(space, VirtAddr(AT)) || is_mutex_locked(space);
                    locked += u64::from(is_locked);
                    *waits = false;
                    self.changed.notify_all();
                }
                drop(waits);
                thread::yield_now();
            }
            worker.join().unwrap();
        });
        self.is_gated.store(false, Relaxed);
        assert_eq!(locked, 0, "transfers with the VMA or the mutex locked");
        self.passed.load(Relaxed)
    }
}

impl SwapDevice<Machine<A>> for Gated {
    fn slots(&self) -> u64 {
        SwapDevice::<Machine<A>>::slots(&self.file)
    }

    fn is_synchronous(&self) -> bool {
        self.is_synchronous.load(Relaxed)
    }

    fn submit(&self, memory: &Memory<Machine<A>>, request: SwapRequest) {
        if self.is_gated.load(Relaxed) {
            self.passed.fetch_add(1, Relaxed);
            let mut waits = self.waits.lock();
            *waits = true;
            self.changed.wait_while(&mut waits, |waits| *waits);
        }
        self.file.submit(memory, request);
    }
}

/// Runs `scenario` with `PAGES` pages mapped at `AT`, and an object. Shared pages belong to the
/// object.
fn with_mapping(
    is_synchronous: bool,
    sharing: Sharing,
    order: u8,
    scenario: impl Fn(&Swapping<'_, '_, A>, &'static Gated, &Object<'_, Machine<A>>),
) {
    let device = Gated::new(is_synchronous);
    let turn_on = |memory: &Memory<_>| memory.swap_on_device(device, 0).expect("a swap area");
    with_area::<A>(64 * MIB, order, turn_on, |swapping| {
        swapping.memory.set_page_cluster(0);
        use_object_order(swapping.memory, order);
        let memory = swapping.memory;
        let object = memory.shared_memory(PAGES * PAGE, Sealing::Allowed, Accounting::PerPage);
        let object = object.unwrap();
        match sharing {
            Sharing::Private => swapping.map(AT, PAGES),
            Sharing::Shared => map(swapping.space, &object, AT, PAGES * PAGE, sharing).unwrap(),
        }
        swapping.fill(AT, PAGES);
        scenario(swapping, device, &object);
        swapping.memory.wait_for_swap_writes().unwrap();
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.assert_filled(AT, PAGES / 2, AT);
        swapping.space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap();
    });
}

#[test]
fn pages_are_written_without_locks() {
    for sharing in SHARINGS {
        for order in [0, 4] {
            with_mapping(false, sharing, order, |swapping, device, _| {
                let transfers = device.during(swapping, || swapping.page_out(AT, PAGES));
                assert!(transfers > 0, "nothing was written");
            });
        }
    }
}

#[test]
fn a_fault_reads_with_the_vma_unlocked() {
    for is_synchronous in [false, true] {
        for sharing in SHARINGS {
            for order in [0, 4] {
                with_mapping(is_synchronous, sharing, order, |swapping, device, _| {
                    swapping.page_out(AT, PAGES);
                    let read = || {
                        let program = Program::new(swapping.machine, swapping.space);
                        for page in 0..PAGES {
                            assert_eq!(program.load(VirtAddr(AT + page * PAGE)), Ok(AT + page));
                        }
                    };
                    let before = swapping.memory.events().major_faults;
                    let transfers = device.during(swapping, read);
                    assert_eq!(transfers, PAGES >> order);
                    let faults = swapping.memory.events().major_faults - before;
                    assert_eq!(faults, transfers, "each read is a major fault");
                });
            }
        }
    }
}

#[test]
fn announced_pages_are_read_with_the_vma_unlocked() {
    for sharing in SHARINGS {
        with_mapping(true, sharing, 4, |swapping, device, object| {
            swapping.page_out(AT, PAGES);
            let will_need = || {
                let length = PAGES * PAGE;
                swapping.space.madvise(VirtAddr(AT), length, Advice::WillNeed).unwrap();
            };
            assert!(device.during(swapping, will_need) > 0, "nothing was read");
            assert_eq!((swapping.swapped(AT, PAGES), object.swapped_pages()), (0, 0));
            assert_eq!(swapping.taken(), 0, "all pages are back");
        });
    }
}

#[test]
fn calls_on_objects_read_with_the_vma_unlocked() {
    type Call = fn(&Object<'_, Machine<A>>);
    let calls: [Call; 5] = [
        |object| assert_eq!(object.read(0, &mut [0; (PAGES * PAGE) as usize]), Ok(262_144)),
        |object| assert_eq!(object.write(40 * PAGE + 16, &[1; 8]), Ok(8)),
        |object| object.punch_hole(40 * PAGE + 16, 4 * PAGE).unwrap(),
        |object| object.set_size(50 * PAGE + 16).unwrap(),
        |object| object.allocate(32 * PAGE, 32 * PAGE, Growth::Allowed).unwrap(),
    ];
    for call in calls {
        for is_synchronous in [false, true] {
            with_mapping(is_synchronous, Sharing::Shared, 0, |swapping, device, object| {
                swapping.page_out(AT, PAGES);
                assert!(device.during(swapping, || call(object)) > 0, "nothing was read");
            });
        }
    }
}

#[test]
fn swapoff_reads_with_the_vma_unlocked() {
    for is_synchronous in [false, true] {
        for sharing in SHARINGS {
            with_mapping(is_synchronous, sharing, 4, |swapping, device, _| {
                swapping.page_out(AT, PAGES);
                let bring_back = || {
                    swapping.space.swap_in_area(&swapping.area).unwrap();
                    swapping.memory.swap_in_objects(&swapping.area).unwrap();
                };
                assert!(device.during(swapping, bring_back) > 0, "nothing was read");
                assert_eq!(swapping.taken(), 0, "all pages are back");
            });
        }
    }
}
