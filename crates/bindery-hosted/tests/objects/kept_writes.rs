//! Writes that a pager answers later: concurrently, in another order, or with an error.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{AddressSpace, Error, Memory, Object, PagerError, Sharing};
use bindery_hosted::{Config, DelayedFiles, Machine};

use crate::support::objects::PAGE;
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

type A = X86_64<4>;
type File<'m> = Object<'m, Machine<A>>;

const PAGES: u64 = 64;

struct Fixture<'m> {
    machine: &'m Machine<A>,
    memory: &'m Memory<Machine<A>>,
    pager: &'m DelayedFiles,
    space: AddressSpace<'m, Machine<A>>,
}

/// Runs `scenario` with an empty file whose pager keeps writes. Nothing is left afterwards.
#[track_caller]
fn with_file(scenario: impl for<'m> FnOnce(&Fixture<'m>, File<'m>)) {
    let config = Config { memory: 32 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    let free = memory.free_frame_count();
    let pager = DelayedFiles::new();
    pager.keep_writes(true);
    {
        let file = memory.file(&pager, 1, 0).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        let fixture = Fixture { machine: &machine, memory: &memory, pager: &pager, space };
        scenario(&fixture, file);
        pager.keep_writes(false);
    }
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

impl Fixture<'_> {
    /// Runs `waits` on another CPU, and `meanwhile` on this one.
    fn beside<T: Send>(&self, waits: impl FnOnce() -> T + Send, meanwhile: impl FnOnce()) -> T {
        thread::scope(|scope| {
            let waits = scope.spawn(|| self.machine.on_cpu(Cpu(1), waits));
            meanwhile();
            waits.join().unwrap()
        })
    }

    #[track_caller]
    fn answer(&self, page: u64, answer: Result<(), PagerError>) {
        let kept = self.pager.try_take_write(|asked| asked.first == page);
        self.pager.answer_write(self.memory, kept.expect("a write of the page"), answer);
    }
}

/// Writes one byte to each of the pages, which are not adjacent.
fn write(file: &File<'_>, pages: &[u64]) {
    for page in pages {
        assert_eq!(file.write(page * PAGE, &[*page as u8 + 1]), Ok(1));
    }
}

#[test]
fn the_writes_of_a_save_run_concurrently() {
    with_file(|fixture, file| {
        // Reads the pages early as zeroes, since nothing is stored yet.
        file.set_size(PAGES * PAGE).unwrap();
        file.read_ahead(0, PAGES * PAGE);
        fixture.pager.answer_all(fixture.memory);
        write(&file, &[1, 5, 9]);
        let stored = fixture.beside(
            || file.sync(0, u64::MAX),
            || {
                fixture.pager.wait_for_writes(3);
                [9, 1, 5].into_iter().for_each(|page| fixture.answer(page, Ok(())));
            },
        );
        assert_eq!(stored, Ok(()));
        let content = fixture.pager.files.content(1);
        assert_eq!([1, 5, 9].map(|page| content[page * PAGE as usize]), [2, 6, 10]);
        audit(fixture.machine, fixture.memory, &[&fixture.space]);
    });
}

#[test]
fn one_failed_write_leaves_its_pages_dirty() {
    with_file(|fixture, file| {
        file.set_size(PAGES * PAGE).unwrap();
        file.read_ahead(0, PAGES * PAGE);
        fixture.pager.answer_all(fixture.memory);
        let mut mark = file.error_mark();
        write(&file, &[1, 5]);
        let stored = fixture.beside(
            || file.sync(0, u64::MAX),
            || {
                fixture.pager.wait_for_writes(2);
                fixture.answer(5, Err(PagerError::NoSpace));
                // A dropped request counts as failed.
                let kept = fixture.pager.try_take_write(|asked| asked.first == 1).unwrap();
                drop(fixture.memory.resume_write(kept));
            },
        );
        // The call reports the first error; the object reports the last error once.
        assert_eq!(stored, Err(Error::InputOutput));
        assert_eq!(file.check_errors(&mut mark), Err(Error::NoSpace));
        assert_eq!(file.check_errors(&mut mark), Ok(()));
        assert!(fixture.pager.files.content(1).iter().all(|byte| *byte == 0));
        fixture.pager.keep_writes(false);
        assert_eq!(file.sync(0, u64::MAX), Ok(()));
        let content = fixture.pager.files.content(1);
        assert_eq!([1, 5].map(|page| content[page * PAGE as usize]), [2, 6]);
    });
}

#[test]
fn a_stored_page_is_writable_after_the_answer() {
    with_file(|fixture, file| {
        let Fixture { machine, memory, pager, space } = fixture;
        file.set_size(PAGE).unwrap();
        map(space, &file, AT, PAGE, Sharing::Shared).unwrap();
        file.read_ahead(0, PAGE);
        pager.answer_all(memory);
        space.write_user(VirtAddr(AT), b"old").unwrap();
        let has_written = AtomicBool::new(false);
        thread::scope(|scope| {
            let sync = scope.spawn(|| machine.on_cpu(Cpu(1), || file.sync(0, PAGE)));
            pager.wait_for_writes(1);
            let write = scope.spawn(|| {
                machine.on_cpu(Cpu(2), || space.write_user(VirtAddr(AT), b"new").unwrap());
                has_written.store(true, Relaxed);
            });
            thread::sleep(std::time::Duration::from_millis(5));
            assert!(!has_written.load(Relaxed), "the page is being stored");
            fixture.answer(0, Ok(()));
            write.join().unwrap();
            assert_eq!(sync.join().unwrap(), Ok(()));
        });
        assert_eq!(&pager.files.content(1)[..3], b"old");
        pager.keep_writes(false);
        file.sync(0, PAGE).unwrap();
        assert_eq!(&pager.files.content(1)[..3], b"new");
        audit(machine, memory, &[space]);
    });
}

#[test]
fn the_last_holder_waits_for_its_writes() {
    with_file(|fixture, file| {
        file.set_size(PAGES * PAGE).unwrap();
        file.read_ahead(0, PAGES * PAGE);
        fixture.pager.answer_all(fixture.memory);
        write(&file, &[3, 7]);
        fixture.beside(
            || drop(file),
            || {
                fixture.pager.wait_for_writes(2);
                assert_eq!(fixture.pager.files.counts().removed, 0);
                fixture.pager.answer_all(fixture.memory);
            },
        );
        assert_eq!(fixture.pager.files.counts().removed, 1);
        assert_eq!(fixture.pager.files.content(1)[3 * PAGE as usize], 4);
    });
}

#[test]
fn a_write_of_another_memory_is_refused() {
    with_file(|fixture, file| {
        let (_machine, other) = memory_with::<A>(Config { memory: 8 * MIB, ..Config::default() });
        // A new page needs no read.
        file.write(0, &[1; PAGE as usize]).unwrap();
        let stored = fixture.beside(
            || file.sync(0, PAGE),
            || {
                fixture.pager.wait_for_writes(1);
                let kept = fixture.pager.try_take_write(|_| true).unwrap();
                let kept = other.resume_write(kept).expect_err("it is not its own");
                fixture.pager.answer_write(fixture.memory, kept, Ok(()));
            },
        );
        assert_eq!(stored, Ok(()));
    });
}
