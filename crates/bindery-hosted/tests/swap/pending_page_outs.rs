//! `MADV_PAGEOUT` in steps: a step ends where all requests of the swap device are in use, and the
//! next one continues with the folios that had no request.

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::testing::is_mutex_locked;
use bindery::{
    Accounting, AddressSpace, Advice, CallPoll, Errno, Error, LockPages, Object, PendingMadvise,
    Sealing, Sharing, Step, SwapOperation,
};
use bindery_hosted::{Machine, SwapFile, SwapService};
use bindery_linux::{Call, CallStep, OpenFile, PendingCall, Process};

use super::fixture::{Swapping, device, with_area, with_device};
use crate::support::objects::use_object_order;
use crate::support::objects_fixture::map;
use crate::support::{GIB, MIB, audit};

type A = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<A>>;
type PageOut<'m> = PendingMadvise<'m, Machine<A>>;

const AT: u64 = GIB;
const PAGE: u64 = 4096;
/// The requests of a device.
const REQUESTS: u64 = 32;
const FOLIOS: u64 = 100;
const SHARINGS: [Sharing; 2] = [Sharing::Private, Sharing::Shared];

/// What the pages are: their sharing, and the order of their folios.
#[derive(Clone, Copy, Debug)]
struct Shape {
    sharing: Sharing,
    order: u8,
}

impl Shape {
    fn pages(self) -> u64 {
        FOLIOS << self.order
    }
}

/// Runs `scenario` for private and for shared memory, with folios of these orders: [`FOLIOS`] of
/// them, on a device that completes nothing by itself.
fn with_page_out(
    orders: &[u8],
    scenario: impl for<'m> Fn(&Swapping<'_, 'm, A>, &'static SwapFile, Shape, PageOut<'m>),
) {
    for sharing in SHARINGS {
        for &order in orders {
            let shape = Shape { sharing, order };
            let device = device(4096, SwapService::InOrder);
            with_device::<A>(64 * MIB, order, device, |swapping| {
                let _object = fill(swapping, shape);
                let call = begin(swapping, AT, shape.pages());
                assert_eq!(device.waiting(), 0, "nothing is written before the first step");
                scenario(swapping, device, shape, call);
                while device.serve_one(swapping.memory) {}
                swapping.memory.wait_for_swap_writes().unwrap();
                audit(swapping.machine, swapping.memory, &[swapping.space]);
                let all = shape.pages() * PAGE;
                swapping.served(device, || swapping.space.munmap(VirtAddr(AT), all).unwrap());
            });
        }
    }
}

/// Maps and fills the memory.
fn fill<'m>(swapping: &Swapping<'_, 'm, A>, shape: Shape) -> Option<Object<'m, Machine<A>>> {
    let (memory, length) = (swapping.memory, shape.pages() * PAGE);
    use_object_order(memory, shape.order);
    let object = match shape.sharing {
        Sharing::Private => {
            swapping.map(AT, shape.pages());
            None
        }
        Sharing::Shared => {
            let object = memory.shared_memory(length, Sealing::Allowed, Accounting::PerPage);
            let object = object.unwrap();
            map(swapping.space, &object, AT, length, Sharing::Shared).unwrap();
            Some(object)
        }
    };
    swapping.fill(AT, shape.pages());
    object
}

fn begin<'m>(swapping: &Swapping<'_, 'm, A>, at: u64, pages: u64) -> PageOut<'m> {
    let (at, length) = (VirtAddr(at), pages * PAGE);
    swapping.space.begin_madvise(at, length, Advice::PageOut, KeyRights::ALL).unwrap()
}

/// Takes the steps up to the end. The device serves one request for each wait.
fn finish<'m>(
    swapping: &Swapping<'_, 'm, A>,
    device: &SwapFile,
    call: &mut PageOut<'m>,
) -> Result<u64, Error> {
    let (mut ready, mut waits) = (None, 0);
    while let Step::Blocked(mut wait) = call.step(swapping.space, ready.take())? {
        assert!(wait.is_for_storage());
        assert!(!is_mutex_locked(swapping.space));
        ready = Some(loop {
            match wait.poll() {
                CallPoll::Ready(ready) => break ready,
                CallPoll::Pending(_) => assert!(device.serve_one(swapping.memory)),
                CallPoll::NeedsThread => panic!("a request needs no thread"),
            }
        });
        waits += 1;
    }
    Ok(waits)
}

/// Takes the first step, which uses up all requests.
#[track_caller]
fn first_step<'m>(swapping: &Swapping<'_, 'm, A>, device: &SwapFile, call: &mut PageOut<'m>) {
    assert!(matches!(call.step(swapping.space, None), Ok(Step::Blocked(_))));
    assert_eq!(device.waiting() as u64, REQUESTS);
}

#[test]
fn each_folio_is_written_once() {
    with_page_out(&[0, 4], |swapping, device, shape, mut call| {
        let before = swapping.space.counts().invalidations;
        assert_eq!(finish(swapping, device, &mut call), Ok(FOLIOS - REQUESTS), "{shape:?}");
        let flushes = swapping.space.counts().invalidations - before;
        // One for each set of table locks.
        let pages = if shape.sharing == Sharing::Private { 1024 } else { 512 };
        assert_eq!(flushes, shape.pages().div_ceil(pages), "{shape:?}");
        while device.serve_one(swapping.memory) {}
        swapping.memory.wait_for_swap_writes().unwrap();
        let counts = device.counts();
        assert_eq!((counts.writes, counts.pages_written), (FOLIOS, shape.pages()), "{shape:?}");
        assert_eq!(swapping.taken(), shape.pages());
        swapping.served(device, || swapping.assert_filled(AT, shape.pages(), AT));
        assert_eq!(device.counts().pages_read, shape.pages(), "{shape:?}");
    });
}

/// The folios without a request stay in the cache, where a fault finds them.
#[test]
fn a_dropped_call_leaves_nothing() {
    with_page_out(&[0, 4], |swapping, device, shape, mut call| {
        first_step(swapping, device, &mut call);
        drop(call);
        let last = AT + (shape.pages() - 1) * PAGE;
        assert_eq!(swapping.program.load(VirtAddr(last)), Ok(AT + shape.pages() - 1));
        swapping.served(device, || swapping.assert_filled(AT, shape.pages(), AT));
        let counts = device.counts();
        assert_eq!((counts.writes, counts.reads <= REQUESTS), (REQUESTS, true), "{shape:?}");
    });
}

/// Reclaim writes what a dropped call has left.
#[test]
fn reclaim_finds_the_folios_left() {
    with_page_out(&[0, 4], |swapping, device, shape, mut call| {
        first_step(swapping, device, &mut call);
        drop(call);
        swapping.served(device, || {
            for _ in 0..8 {
                swapping.memory.reclaim(shape.pages());
            }
        });
        assert_eq!(device.counts().writes, FOLIOS, "{shape:?}");
        swapping.served(device, || swapping.assert_filled(AT, shape.pages(), AT));
    });
}

#[test]
fn a_page_that_is_used_again_stays() {
    with_page_out(&[0, 4], |swapping, device, shape, mut call| {
        first_step(swapping, device, &mut call);
        let used = 50 << shape.order;
        assert_eq!(swapping.program.load(VirtAddr(AT + used * PAGE)), Ok(AT + used));
        finish(swapping, device, &mut call).unwrap();
        while device.serve_one(swapping.memory) {}
        assert_eq!(device.counts().writes, FOLIOS - 1, "{shape:?}");
        assert_eq!(swapping.program.load(VirtAddr(AT + used * PAGE)), Ok(AT + used));
        assert_eq!(device.counts().reads, 0, "{shape:?}");
        swapping.served(device, || swapping.assert_filled(AT, shape.pages(), AT));
    });
}

/// A part that the call has reached counts as present.
#[test]
fn a_range_unmapped_meanwhile_is_passed() {
    with_page_out(&[0, 4], |swapping, device, shape, mut call| {
        first_step(swapping, device, &mut call);
        let pages = |folios: u64| (folios << shape.order) * PAGE;
        let (from, length) = (AT + pages(40), pages(20));
        swapping.space.munmap(VirtAddr(from), length).unwrap();
        finish(swapping, device, &mut call).unwrap();
        while device.serve_one(swapping.memory) {}
        assert_eq!(device.counts().writes, FOLIOS - 20, "{shape:?}");
        swapping.served(device, || swapping.assert_filled(AT, 40 << shape.order, AT));
    });
}

#[test]
fn all_may_be_unmapped_meanwhile() {
    with_page_out(&[0, 4], |swapping, device, shape, mut call| {
        first_step(swapping, device, &mut call);
        let length = shape.pages() * PAGE;
        swapping.space.munmap(VirtAddr(AT), length).unwrap();
        assert_eq!(finish(swapping, device, &mut call), Ok(0));
        assert_eq!(device.waiting() as u64, REQUESTS, "{shape:?}");
        swapping.map(AT, 1);
    });
}

/// Mappings that the call has not reached: another thread locks one, and unmaps the next.
#[test]
fn later_mappings_are_examined_when_reached() {
    let device = device(4096, SwapService::InOrder);
    with_device::<A>(64 * MIB, 0, device, |swapping| {
        let (first, gap) = (AT, 1024 * PAGE);
        let second = first + gap;
        for at in [first, second] {
            swapping.map(at, FOLIOS);
            swapping.fill(at, FOLIOS);
        }
        swapping
            .space
            .mmap(&crate::support::fixed(first + FOLIOS * PAGE, gap - FOLIOS * PAGE))
            .unwrap();
        swapping.space.mprotect(VirtAddr(second), PAGE, bindery::Protection::READ).unwrap();
        let pages = 1024 + FOLIOS;
        let mut call = begin(swapping, first, pages);
        first_step(swapping, device, &mut call);
        swapping.space.munmap(VirtAddr(second + 8 * PAGE), PAGE).unwrap();
        let hole = Error::NotMapped(VirtAddr(second + 8 * PAGE));
        assert_eq!(finish(swapping, device, &mut call), Err(hole));
        while device.serve_one(swapping.memory) {}
        assert_eq!(device.counts().writes, 2 * FOLIOS - 1);

        swapping.served(device, || swapping.fill(first, FOLIOS));
        let mut call = begin(swapping, first, pages);
        first_step(swapping, device, &mut call);
        swapping.space.mlock(VirtAddr(second), PAGE, LockPages::OnFault).unwrap();
        assert_eq!(finish(swapping, device, &mut call), Err(Error::Invalid));
        while device.serve_one(swapping.memory) {}
        swapping.space.munlock(VirtAddr(second), PAGE).unwrap();
    });
}

/// A failed write is no error of the call. Its page stays.
#[test]
fn failed_writes_keep_their_pages() {
    with_page_out(&[0, 4], |swapping, device, shape, mut call| {
        device.fail(|request| request.operation() == SwapOperation::Write);
        finish(swapping, device, &mut call).unwrap();
        while device.serve_one(swapping.memory) {}
        assert_eq!((device.counts().writes, device.counts().failed), (FOLIOS, FOLIOS));
        swapping.assert_filled(AT, shape.pages(), AT);
        assert_eq!(device.counts().reads, 0, "{shape:?}");
    });
}

#[test]
fn a_fatal_signal_ends_the_call() {
    with_page_out(&[0], |swapping, device, shape, mut call| {
        first_step(swapping, device, &mut call);
        assert!(device.serve_one(swapping.memory));
        swapping.machine.fatal_signal_after(Some(0));
        let step = call.step(swapping.space, None).map(|_| ());
        assert_eq!(step, Err(Error::Interrupted), "{shape:?}");
        swapping.machine.fatal_signal_after(None);
        assert_eq!(device.counts().writes, 1);
    });
}

/// Free slots that are not consecutive fill a batch before a table is complete.
#[test]
fn pages_go_to_single_slots_in_steps() {
    let turn_on = |memory: &bindery::Memory<_>| memory.swap_on(1024, 0).expect("a swap area");
    with_area::<A>(64 * MIB, 0, turn_on, |swapping| {
        let others = AT + 64 * MIB;
        swapping.map(others, 1024);
        swapping.fill(others, 1024);
        swapping.page_out(others, 1024);
        assert_eq!(swapping.taken(), 1024);
        for page in (0..1024).step_by(2) {
            let page = VirtAddr(others + page * PAGE);
            swapping.space.madvise(page, PAGE, Advice::DontNeed).unwrap();
        }
        assert_eq!(swapping.taken(), 512);
        let (memory, length) = (swapping.memory, 512 * PAGE);
        let object = memory.shared_memory(length, Sealing::Allowed, Accounting::PerPage).unwrap();
        map(swapping.space, &object, AT, length, Sharing::Shared).unwrap();
        swapping.fill(AT, 512);
        let before = swapping.space.counts().invalidations;
        swapping.page_out(AT, 512);
        assert_eq!(swapping.space.counts().invalidations - before, 1);
        assert_eq!((object.resident_pages(), object.swapped_pages()), (0, 512));
        audit(swapping.machine, swapping.memory, &[swapping.space]);
        swapping.assert_filled(AT, 512, AT);
        swapping.space.munmap(VirtAddr(AT), length).unwrap();
    });
}

/// A process that may advise itself by pidfd 7.
struct Caller<'s, 'm>(&'s Space<'m>);

impl<'m> Process<'m, Machine<A>> for Caller<'_, 'm> {
    fn space(&self) -> &Space<'m> {
        self.0
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'m, Machine<A>>> {
        None
    }

    fn process(&self, descriptor: i32) -> Option<&Space<'m>> {
        (descriptor == 7).then_some(self.0)
    }
}

#[test]
fn system_calls_page_out_in_steps() {
    const PAGEOUT: u64 = 21;
    with_page_out(&[0], |swapping, device, shape, _| {
        let array = AT + 512 * MIB;
        swapping.map(array, 1);
        let length = shape.pages() * PAGE;
        // Two ranges; a hole ends the second one.
        let words = [AT, length, AT + 50 * PAGE, length];
        for (word, at) in words.into_iter().zip((array..).step_by(8)) {
            swapping.program.store(VirtAddr(at), word).unwrap();
        }
        let calls = [
            (Call::Madvise, [AT, length, PAGEOUT, 0, 0, 0], 0),
            (Call::Madvise, [AT, length + PAGE, PAGEOUT, 0, 0, 0], -(Errno::ENOMEM as i64)),
            (Call::ProcessMadvise, [7, array, 2, PAGEOUT, 0, 0], length as i64),
        ];
        let caller = Caller(swapping.space);
        for (call, arguments, result) in calls {
            let (mut pending, mut ready, mut waits) = (PendingCall::new(call, arguments), None, 0);
            let done = loop {
                let mut wait = match pending.step(&caller, ready.take()) {
                    CallStep::Done(done) => break done,
                    CallStep::Blocked(wait) => wait,
                };
                ready = Some(loop {
                    match wait.poll() {
                        CallPoll::Ready(ready) => break ready,
                        CallPoll::Pending(_) => assert!(device.serve_one(swapping.memory)),
                        CallPoll::NeedsThread => panic!("a request needs no thread"),
                    }
                });
                waits += 1;
            };
            assert_eq!((done, waits), (result, FOLIOS - REQUESTS), "{call:?}");
            swapping.served(device, || swapping.assert_filled(AT, shape.pages(), AT));
            swapping.fill(AT, shape.pages());
        }
    });
}
