//! No lock is held while a pager works. Other calls on the same mapping or file continue.
//! Afterwards the pager's pages are inserted, or discarded.

use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    Access, AddressSpace, Advice, Error, FaultError, FileAccess, MapObject, MapRequest, Object,
    Place, Protection, Remap, Sharing, SyncFlags,
};
use bindery_hosted::{Config, Machine};

use super::held_pager::{HeldFiles, Io};
use crate::support::{self, GIB, MIB, READ_WRITE, audit, memory_with, options};

type A = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<A>>;
type File<'m> = Object<'m, Machine<A>>;

pub(super) const PAGE: u64 = 4096;
pub(super) const PAGES: u64 = 64;
const AT: u64 = GIB;
/// The page at which the pager is held.
pub(super) const SLOW: u64 = 5;

pub(super) fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

/// A machine with a file of [`PAGES`] pages, mapped shared at [`AT`].
pub(super) struct Fixture<'m> {
    pub(super) machine: &'m Machine<A>,
    pub(super) pager: &'m HeldFiles,
    pub(super) file: File<'m>,
    pub(super) space: Space<'m>,
}

fn map<'m>(space: &Space<'m>, file: &File<'m>, sharing: Sharing) {
    let request = MapRequest {
        length: PAGES * PAGE,
        protection: READ_WRITE,
        place: Place::Fixed(VirtAddr(AT)),
        sharing,
        ..MapRequest::default()
    };
    let access = FileAccess::READ | FileAccess::WRITE;
    space.mmap_object(&request, &MapObject { object: file, offset: 0, access }).unwrap();
}

/// Runs `scenario` with a fixture. Nothing is left afterwards.
pub(super) fn with_fixture(scenario: impl FnOnce(&Fixture<'_>)) {
    let (machine, memory) =
        memory_with::<A>(Config { memory: 64 * MIB, cpus: 3, ..Config::default() });
    let free = memory.free_frame_count();
    let pager = HeldFiles::new();
    let content: Vec<u8> = (0..PAGES * PAGE).map(|n| (n / PAGE) as u8 + 1).collect();
    pager.files.put(1, &content);
    {
        let file = memory.file(&pager, 1, PAGES * PAGE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        let fixture = Fixture { machine: &machine, pager: &pager, file, space };
        map(&fixture.space, &fixture.file, Sharing::Shared);
        scenario(&fixture);
        audit(&machine, &memory, &[&fixture.space]);
    }
    let report = audit(&machine, &memory, &[]);
    assert_eq!((report.objects, report.object_pages), (0, 0));
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

impl Fixture<'_> {
    /// Runs `slow` on another CPU, holds the pager in it, and releases it when `meanwhile` has
    /// returned. Panics if `meanwhile` waits for the pager.
    #[track_caller]
    pub(super) fn hold<T: Send, M>(
        &self,
        io: Io,
        slow: impl FnOnce() -> T + Send,
        meanwhile: impl FnOnce() -> M,
    ) -> (T, M) {
        self.pager.hold_next(io, SLOW);
        thread::scope(|scope| {
            let slow = scope.spawn(|| self.machine.on_cpu(Cpu(1), slow));
            self.pager.wait_until_held();
            let result = meanwhile();
            self.pager.release();
            (slow.join().unwrap(), result)
        })
    }

    /// Holds the fault of a page that is being read.
    #[track_caller]
    fn hold_fault<M>(
        &self,
        meanwhile: impl FnOnce() -> M,
    ) -> Result<bindery::Resolved, FaultError> {
        self.hold(Io::Read, || self.space.fault(at(SLOW), Access::Read), meanwhile).0
    }

    /// Holds a `sync` of one page.
    #[track_caller]
    pub(super) fn hold_sync<M>(&self, meanwhile: impl FnOnce() -> M) -> Result<(), Error> {
        self.space.write_user(at(SLOW), b"written").unwrap();
        self.hold(Io::Write, || self.file.sync(SLOW * PAGE, PAGE), meanwhile).0
    }

    pub(super) fn first_byte(&self, page: u64) -> u8 {
        let mut byte = [0];
        self.space.read_user(at(page), &mut byte).unwrap();
        byte[0]
    }
}

#[test]
fn munmap_does_not_wait_for_a_pagers_fault() {
    with_fixture(|fixture| {
        let fault =
            fixture.hold_fault(|| fixture.space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap());
        assert_eq!(fault, Err(FaultError::NotMapped));
    });
}

#[test]
fn mprotect_does_not_wait_for_a_pagers_fault() {
    with_fixture(|fixture| {
        let none = Protection::empty();
        let fault = fixture
            .hold_fault(|| fixture.space.mprotect(VirtAddr(AT), PAGES * PAGE, none).unwrap());
        assert_eq!(fault, Err(FaultError::Protection));
    });
}

#[test]
fn mremap_does_not_wait_for_a_pagers_fault() {
    with_fixture(|fixture| {
        let to = VirtAddr(AT + GIB);
        let length = PAGES * PAGE;
        let fault = fixture.hold_fault(|| {
            fixture.space.mremap(VirtAddr(AT), length, length, Remap::To(to)).unwrap();
        });
        assert_eq!(fault, Err(FaultError::NotMapped));
    });
}

#[test]
fn mmap_does_not_wait_for_a_pagers_fault() {
    with_fixture(|fixture| {
        let fault =
            fixture.hold_fault(|| fixture.space.mmap(&support::fixed(AT, PAGES * PAGE)).unwrap());
        assert_eq!(fault, Ok(bindery::Resolved::ZeroPage));
    });
}

#[test]
fn fork_does_not_wait_for_a_pagers_fault() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| drop(fixture.space.fork().unwrap()));
        assert!(fault.is_ok());
        assert_eq!(fixture.first_byte(SLOW), SLOW as u8 + 1);
    });
}

#[test]
fn advice_and_locks_ignore_a_pagers_fault() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| {
            fixture.space.madvise(at(0), PAGES * PAGE, Advice::DontNeed).unwrap();
            fixture.space.mlock(at(0), 4 * PAGE, bindery::LockPages::Now).unwrap();
            fixture.space.msync(at(0), PAGES * PAGE, SyncFlags::SYNC).unwrap();
            fixture.space.mincore(at(0), PAGES * PAGE, |_, _| ()).unwrap();
        });
        assert!(fault.is_ok());
    });
}

#[test]
fn another_pages_fault_ignores_a_waiting_one() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| {
            fixture.space.fault(at(SLOW + 1), Access::Read).unwrap();
            fixture.space.fault(at(SLOW + 2), Access::Write).unwrap();
            let mut bytes = [0; 8];
            fixture.space.read_user(at(SLOW + 3), &mut bytes).unwrap();
        });
        assert!(fault.is_ok());
        assert_eq!(fixture.first_byte(SLOW + 2), SLOW as u8 + 3);
    });
}

#[test]
fn truncation_drops_the_pages_of_a_waiting_fault() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| fixture.file.set_size(2 * PAGE).unwrap());
        assert_eq!(fault, Err(FaultError::Bus));
        assert_eq!(fixture.file.resident_pages(), 0);
    });
}

#[test]
fn a_file_regrown_during_a_read_shows_zeroes() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| {
            fixture.file.set_size(0).unwrap();
            fixture.file.set_size(PAGES * PAGE).unwrap();
        });
        assert!(fault.is_ok());
        assert_eq!(fixture.first_byte(SLOW), 0, "the page is older than the truncation");
        assert_eq!(fixture.pager.times(Io::Read, SLOW), 2, "it was read again");
    });
}

#[test]
fn a_page_cut_during_a_read_ends_zeroed() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| {
            fixture.file.set_size(SLOW * PAGE + 100).unwrap();
            fixture.file.set_size(PAGES * PAGE).unwrap();
        });
        assert!(fault.is_ok());
        let mut bytes = [9; 200];
        fixture.space.read_user(at(SLOW), &mut bytes).unwrap();
        assert!(bytes[..100].iter().all(|byte| *byte == SLOW as u8 + 1));
        assert!(bytes[100..].iter().all(|byte| *byte == 0), "what was cut off is still there");
    });
}

#[test]
fn a_hole_is_made_during_the_read() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| fixture.file.punch_hole(SLOW * PAGE, PAGE).unwrap());
        assert!(fault.is_ok());
        assert_eq!(fixture.first_byte(SLOW), 0, "the page is older than the hole");
    });
}

#[test]
fn a_page_overwritten_during_a_read_stays_written() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| {
            assert_eq!(fixture.file.write(SLOW * PAGE, &[77; PAGE as usize]), Ok(PAGE as usize));
        });
        assert!(fault.is_ok());
        assert_eq!(fixture.first_byte(SLOW), 77);
        fixture.file.sync(0, u64::MAX).unwrap();
        assert_eq!(fixture.pager.files.content(1)[(SLOW * PAGE) as usize], 77);
    });
}

#[test]
fn reads_and_writes_ignore_a_waiting_fault() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| {
            let mut bytes = [0; 10];
            assert_eq!(fixture.file.read((SLOW + 1) * PAGE, &mut bytes), Ok(10));
            assert_eq!(fixture.file.write(20 * PAGE + 7, &bytes), Ok(10));
            fixture.file.sync(0, u64::MAX).unwrap();
            fixture.file.set_size((PAGES + 1) * PAGE).unwrap();
        });
        assert!(fault.is_ok());
    });
}

#[test]
fn a_write_elsewhere_ignores_a_fetching_write() {
    with_fixture(|fixture| {
        let write = || fixture.file.write(SLOW * PAGE + 1, &[50; 3 * PAGE as usize]);
        let (written, ()) = fixture.hold(Io::Read, write, || {
            assert_eq!(fixture.file.write(30 * PAGE, &[51; PAGE as usize]), Ok(PAGE as usize));
            fixture.file.set_size(40 * PAGE).unwrap();
        });
        assert_eq!(written, Ok(3 * PAGE as usize));
        let mut bytes = vec![0; 3 * PAGE as usize + 2];
        assert_eq!(fixture.file.read(SLOW * PAGE, &mut bytes), Ok(bytes.len()));
        assert_eq!(bytes[0], SLOW as u8 + 1);
        assert!(bytes[1..=3 * PAGE as usize].iter().all(|byte| *byte == 50));
        assert_eq!(bytes[3 * PAGE as usize + 1], SLOW as u8 + 4);
    });
}

#[test]
fn a_read_waiting_for_the_pager_blocks_none() {
    with_fixture(|fixture| {
        let mut bytes = [9; 10];
        let read = || fixture.file.read(SLOW * PAGE, &mut bytes);
        let (read, ()) = fixture.hold(Io::Read, read, || {
            fixture.file.set_size(0).unwrap();
            fixture.file.set_size(PAGES * PAGE).unwrap();
        });
        assert_eq!((read, bytes), (Ok(10), [0; 10]), "the bytes are older than the truncation");
    });
}

#[test]
fn two_faults_of_one_page_read_it_once() {
    with_fixture(|fixture| {
        fixture.pager.hold_next(Io::Read, SLOW);
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                fixture.machine.on_cpu(Cpu(1), || fixture.space.fault(at(SLOW), Access::Read))
            });
            fixture.pager.wait_until_held();
            let second = scope.spawn(|| {
                fixture.machine.on_cpu(Cpu(2), || fixture.space.fault(at(SLOW), Access::Write))
            });
            // The second call waits for the first or has not reached the wait yet; both are
            // correct.
            thread::yield_now();
            fixture.pager.release();
            assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
        });
        assert_eq!(fixture.pager.times(Io::Read, SLOW), 1);
    });
}

#[test]
fn a_fault_of_a_dropped_page_fetches_again() {
    const TIMES: usize = 20;
    with_fixture(|fixture| {
        thread::scope(|scope| {
            fixture.pager.hold_next(Io::Read, SLOW);
            let fault = scope.spawn(|| {
                fixture.machine.on_cpu(Cpu(1), || fixture.space.fault(at(SLOW), Access::Read))
            });
            for time in 0..TIMES {
                fixture.pager.wait_until_held();
                fixture.file.punch_hole(SLOW * PAGE, PAGE).unwrap();
                if time + 1 < TIMES {
                    fixture.pager.release_and_hold_next(Io::Read, SLOW);
                } else {
                    fixture.pager.release();
                }
            }
            assert!(fault.join().unwrap().is_ok());
        });
        assert_eq!(fixture.pager.times(Io::Read, SLOW), TIMES + 1);
    });
}
