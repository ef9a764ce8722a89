//! A task whose read another thread settles.

use std::sync::Mutex;
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::KeyRights;
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, FaultPoll, FaultWait, FileAccess, KeptRead, MapObject, Pager, PagerError,
    ReadRequest, TriedFault,
};

use super::word_lock::{WithWords, memory_with_words};
use crate::support::objects::PAGE;
use crate::support::objects_fixture::AT;
use crate::support::{fixed, options};

/// A pager that keeps one read.
#[derive(Default)]
struct Keeping(Mutex<Option<KeptRead>>);

impl Pager for Keeping {
    fn begin_read(&self, request: ReadRequest<'_>) {
        *self.0.lock().unwrap() = Some(request.keep());
    }

    fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
        Ok(())
    }

    fn removed(&self, _: u64) {}
}

#[track_caller]
fn blocked<'s, 'm>(space: &'s AddressSpace<'m, WithWords>) -> FaultWait<'s, 'm, WithWords> {
    match space.try_fault(VirtAddr(AT), Access::Read, KeyRights::ALL) {
        Ok(TriedFault::Blocked(wait)) => wait,
        tried => panic!("{tried:?}"),
    }
}

/// The answer has woken the task before, so only the end of the settlement can.
#[test]
fn the_end_of_a_settlement_wakes_tasks() {
    let pager = Keeping::default();
    let memory = memory_with_words();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let file = memory.file(&pager, 1, PAGE).unwrap();
    let source = MapObject { object: &file, offset: 0, access: FileAccess::READ };
    space.mmap_object(&fixed(AT, PAGE), &source).unwrap();
    let (mut settling, mut waiting) = (blocked(&space), blocked(&space));
    for wait in [&mut settling, &mut waiting] {
        assert!(matches!(wait.poll(), Ok(FaultPoll::Pending(_))));
    }
    let kept = pager.0.lock().unwrap().take().unwrap();
    memory.resume_read(kept).unwrap_or_else(|_| panic!("its own read")).supply();
    let platform = memory.platform();
    thread::scope(|scope| {
        platform.hold_next_section();
        let settles = scope.spawn(|| {
            let polled = platform.on_cpu(Cpu(1), || settling.poll().map(drop));
            assert_eq!(polled, Ok(()));
        });
        platform.wait_until_held();
        let Ok(FaultPoll::Pending(on)) = waiting.poll() else { panic!("it is not settled") };
        assert!(!on.has_changed());
        platform.release();
        settles.join().unwrap();
        assert!(on.has_changed(), "nothing else wakes the task");
    });
    assert!(matches!(waiting.poll(), Ok(FaultPoll::Ready(_))));
}
