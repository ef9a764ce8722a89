//! Reads that a pager answers later: in another order, from another thread, with an error, or
//! never.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::{KeyRights, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, Memory, Object, Pager, PagerError,
    ReadRequest, Sharing, TriedFault, WriteRequest,
};
use bindery_hosted::{Asked, Config, DelayedFiles, Machine, Program};

use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

type A = X86_64<4>;
type File<'m> = Object<'m, Machine<A>>;

const PAGES: u64 = 128;

struct Fixture<'m> {
    machine: &'m Machine<A>,
    memory: &'m Memory<Machine<A>>,
    pager: &'m DelayedFiles,
    space: AddressSpace<'m, Machine<A>>,
}

/// Runs `scenario` with a file in which each byte is the number of its page plus 1. Nothing is left
/// afterwards.
#[track_caller]
fn with_file(scenario: impl for<'m> FnOnce(&Fixture<'m>, File<'m>)) {
    let config = Config { memory: 32 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    let pager = DelayedFiles::new();
    let content: Vec<u8> = (0..PAGES * PAGE).map(|n| (n / PAGE) as u8 + 1).collect();
    pager.files.put(1, &content);
    {
        let file = memory.file(&pager, 1, PAGES * PAGE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        let fixture = Fixture { machine: &machine, memory: &memory, pager: &pager, space };
        scenario(&fixture, file);
    }
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

impl Fixture<'_> {
    /// Runs `waits` on another CPU. Until `waits` returns, answers only the requests for which a
    /// thread waits.
    fn serve<T: Send>(&self, waits: impl FnOnce() -> T + Send) -> T {
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let result = self.machine.on_cpu(Cpu(1), waits);
                is_done.store(true, Relaxed);
                result
            });
            while !is_done.load(Relaxed) {
                if let Some(kept) = self.pager.try_take(|asked| !asked.ahead) {
                    self.pager.answer(self.memory, kept, Ok(()));
                }
                thread::yield_now();
            }
            waits.join().unwrap()
        })
    }

    fn reads(&self) -> usize {
        self.pager.log().len()
    }
}

fn is_first(page: u64) -> impl Fn(&Asked) -> bool {
    move |asked| asked.first == page
}

fn byte(file: &File<'_>, page: u64) -> Result<u8, Error> {
    let mut byte = [0];
    file.read(page * PAGE, &mut byte).map(|_| byte[0])
}

#[test]
fn requests_are_answered_in_any_order() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, space } = fixture;
        thread::scope(|scope| {
            let read = |cpu, page| {
                let file = &file;
                scope.spawn(move || machine.on_cpu(Cpu(cpu), || byte(file, page)))
            };
            let (early, late) = (read(1, 10), read(2, 20));
            let kept = [20, 10].map(|page| pager.take(is_first(page)));
            for kept in kept {
                pager.answer(memory, kept, Ok(()));
            }
            assert_eq!((early.join().unwrap(), late.join().unwrap()), (Ok(11), Ok(21)));
        });
        audit(machine, memory, &[space]);
    });
}

#[test]
fn threads_share_the_request_of_a_page() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, space } = fixture;
        map(space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        thread::scope(|scope| {
            let read = scope.spawn(|| machine.on_cpu(Cpu(1), || byte(&file, 3)));
            let kept = pager.take(is_first(3));
            let fault = scope.spawn(|| {
                machine
                    .on_cpu(Cpu(2), || Program::new(machine, space).load(VirtAddr(AT + 3 * PAGE)))
            });
            // Time for the call to reach the request; the test passes without it, too.
            thread::sleep(std::time::Duration::from_millis(5));
            pager.answer(memory, kept, Ok(()));
            assert_eq!(read.join().unwrap(), Ok(4));
            assert_eq!(fault.join().unwrap(), Ok(0x0404_0404_0404_0404));
        });
        assert_eq!(fixture.reads(), 1);
        audit(machine, memory, &[space]);
    });
}

#[test]
fn a_failed_or_dropped_request_fails_the_access() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, space } = fixture;
        map(space, &file, AT, PAGES * PAGE, Sharing::Private).unwrap();
        thread::scope(|scope| {
            let read = scope.spawn(|| machine.on_cpu(Cpu(1), || byte(&file, 3)));
            let kept = pager.take(is_first(3));
            pager.answer(memory, kept, Err(PagerError::NoSpace));
            assert_eq!(read.join().unwrap(), Err(Error::NoSpace));
            let fault = scope.spawn(|| {
                machine.on_cpu(Cpu(1), || space.fault(VirtAddr(AT + 9 * PAGE), Access::Read))
            });
            drop(memory.resume_read(pager.take(is_first(9))));
            assert_eq!(fault.join().unwrap(), Err(FaultError::Bus));
        });
        audit(machine, memory, &[space]);
    });
}

#[test]
fn a_request_of_another_memory_is_refused() {
    with_file(|fixture, file| {
        let (_machine, other) = memory_with::<A>(Config { memory: 8 * MIB, ..Config::default() });
        file.read_ahead(0, PAGE);
        let kept = fixture.pager.take(is_first(0));
        let kept = other.resume_read(kept).expect_err("it is not its own");
        fixture.pager.answer(fixture.memory, kept, Ok(()));
        assert_eq!(byte(&file, 0), Ok(1));
        assert_eq!(fixture.reads(), 1);
    });
}

#[test]
fn an_answer_after_a_truncation_is_dropped() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, space } = fixture;
        file.read_ahead(0, 4 * PAGE);
        file.set_size(PAGE).unwrap();
        file.set_size(4 * PAGE).unwrap();
        let mut request = memory.resume_read(pager.take(is_first(0))).unwrap();
        request.fill(|bytes| bytes.append_all(0xee));
        request.supply();
        let read = fixture.serve(|| (byte(&file, 0), byte(&file, 3)));
        assert_eq!(read, (Ok(1), Ok(0)), "the first page was fetched again");
        audit(machine, memory, &[space]);
    });
}

#[test]
fn bytes_the_pager_skips_are_zeroes() {
    with_file(|fixture, file| {
        let Fixture { memory, pager, .. } = fixture;
        file.read_ahead(0, 2 * PAGE);
        let mut request = memory.resume_read(pager.take(is_first(0))).unwrap();
        request.fill(|bytes| bytes.append(&[7; 100]));
        request.fill(|bytes| bytes.append(&[8; 100]));
        request.supply();
        let mut bytes = vec![1; 2 * PAGE as usize];
        file.read(0, &mut bytes).unwrap();
        assert!(bytes[..100].iter().all(|byte| *byte == 7));
        assert!(bytes[100..200].iter().all(|byte| *byte == 8));
        assert!(bytes[200..].iter().all(|byte| *byte == 0));
        // As for a device that reports how much it has written.
        file.read_ahead(4 * PAGE, 2 * PAGE);
        let mut request = memory.resume_read(pager.take(is_first(4))).unwrap();
        request.fill(|bytes| bytes.append_all(9));
        request.has_filled(PAGE as usize);
        request.supply();
        assert_eq!((byte(&file, 4), byte(&file, 5)), (Ok(9), Ok(0)));
    });
}

#[test]
fn the_last_holder_waits_for_the_answer() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, .. } = fixture;
        file.read_ahead(0, 8 * PAGE);
        let kept = pager.take(is_first(0));
        let has_ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let end = scope.spawn(|| {
                machine.on_cpu(Cpu(1), || drop(file));
                has_ended.store(true, Relaxed);
            });
            thread::sleep(std::time::Duration::from_millis(5));
            assert!(!has_ended.load(Relaxed), "the frames are the pager's");
            assert_eq!(pager.files.counts().removed, 0);
            pager.answer(memory, kept, Ok(()));
            end.join().unwrap();
        });
        assert_eq!(pager.files.counts().removed, 1);
    });
}

#[test]
fn the_last_holder_ends_answered_reads() {
    with_file(|fixture, file| {
        file.read_ahead(0, 8 * PAGE);
        assert_eq!(fixture.pager.answer_all(fixture.memory), 1);
        drop(file);
    });
}

#[test]
fn reclaim_frees_what_was_read_ahead_in_vain() {
    with_file(|fixture, file| {
        let Fixture { memory, pager, .. } = fixture;
        file.read_ahead(0, 32 * PAGE);
        let free = memory.free_frame_count();
        assert_eq!(pager.answer_all(memory), 1);
        assert!(memory.reclaim(1).freed >= 32);
        assert!(memory.free_frame_count() >= free + 32);
        assert_eq!(file.resident_pages(), 0);
        assert_eq!(fixture.serve(|| byte(&file, 5)), Ok(6));
    });
}

#[test]
fn advice_begins_reads_and_waits_for_none() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, space } = fixture;
        map(space, &file, AT, PAGES * PAGE, Sharing::Private).unwrap();
        space.madvise(VirtAddr(AT), PAGES * PAGE, Advice::WillNeed).unwrap();
        let asked = pager.log();
        assert_eq!(asked.iter().map(|asked| asked.pages).sum::<u64>(), PAGES);
        assert!(asked.iter().all(|asked| asked.ahead));
        // Pages that are being read are not requested again.
        space.madvise(VirtAddr(AT), PAGES * PAGE, Advice::WillNeed).unwrap();
        assert_eq!(pager.log().len(), asked.len());
        pager.answer_all(memory);
        let program = Program::new(machine, space);
        for page in 0..PAGES {
            let word = u64::from_ne_bytes([page as u8 + 1; 8]);
            assert_eq!(program.load(VirtAddr(AT + page * PAGE)), Ok(word));
        }
        assert_eq!(pager.log().len(), asked.len());
        audit(machine, memory, &[space]);
    });
}

#[test]
fn a_failed_read_ahead_is_asked_for_again() {
    with_file(|fixture, file| {
        let Fixture { memory, pager, .. } = fixture;
        file.read_ahead(0, 4 * PAGE);
        pager.answer(memory, pager.take(is_first(0)), Err(PagerError::InputOutput));
        assert_eq!(fixture.serve(|| byte(&file, 0)), Ok(1));
    });
}

#[test]
fn a_fault_finds_pages_read_ahead() {
    with_file(|fixture, file| {
        let Fixture { memory, pager, space, .. } = fixture;
        map(space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        file.read_ahead(0, 4 * PAGE);
        pager.answer_all(memory);
        let attempt = || space.try_fault(VirtAddr(AT), Access::Read, KeyRights::ALL);
        let Ok(TriedFault::Blocked(wait)) = attempt() else { panic!("it was not taken in yet") };
        let ready = wait.wait().unwrap();
        assert!(matches!(attempt(), Ok(TriedFault::Resolved(_))));
        drop(ready);
        assert_eq!(fixture.reads(), 1);
    });
}

#[test]
fn an_old_answer_replaces_no_newer_page() {
    with_file(|fixture, file| {
        let Fixture { memory, pager, .. } = fixture;
        file.read_ahead(0, 4 * PAGE);
        // A page that is written completely needs no read.
        file.write(2 * PAGE, &[99; PAGE as usize]).unwrap();
        file.sync(0, u64::MAX).unwrap();
        file.evict(0, u64::MAX);
        memory.reclaim(1);
        let mut request = memory.resume_read(pager.take(is_first(0))).unwrap();
        request.fill(|bytes| bytes.append_all(0xee));
        request.supply();
        assert_eq!((byte(&file, 1), byte(&file, 2)), (Ok(0xee), Ok(99)));
        assert_eq!(pager.files.content(1)[2 * PAGE as usize], 99);
    });
}

/// A pager that keeps the first request of each kind, then panics.
struct Panicking<'p>(&'p DelayedFiles);

impl Pager for Panicking<'_> {
    fn begin_read(&self, request: ReadRequest<'_>) {
        self.0.begin_read(request);
        panic!("the pager panics");
    }

    fn begin_write(&self, request: WriteRequest<'_>) {
        let is_first = request.first_page() == 0;
        self.0.begin_write(request);
        assert!(is_first, "the pager panics");
    }

    fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
        Ok(())
    }

    fn removed(&self, _: u64) {}
}

#[test]
fn a_pager_that_panics_leaves_nothing_behind() {
    let config = Config { memory: 32 * MIB, cpus: 2, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let files = DelayedFiles::new();
    let pager = Panicking(&files);
    let file = memory.file(&pager, 1, 8 * PAGE).unwrap();
    let panics = |work: &dyn Fn()| {
        catch_unwind(AssertUnwindSafe(work)).expect_err("the pager has panicked");
    };
    thread::scope(|scope| {
        scope.spawn(|| files.serve(&memory, std::time::Duration::ZERO));
        // The call waits for the answer to the kept request.
        panics(&|| {
            let _ = byte(&file, 3);
        });
        assert_eq!(file.resident_pages(), 0);
        file.write(0, &[1; PAGE as usize]).unwrap();
        file.write(4 * PAGE, &[1; PAGE as usize]).unwrap();
        files.keep_writes(true);
        panics(&|| {
            let _ = file.sync(0, u64::MAX);
        });
        files.keep_writes(false);
        files.wait_until_idle();
        // The first page is stored. The second may still be dirty and is stored now.
        files.stop();
    });
    assert_eq!(files.files.content(1)[0], 1);
    file.discard(0, u64::MAX).unwrap();
    drop(file);
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
}
