//! No lock is held while a pager works: whatever else is done to the same mapping or the same file
//! goes on meanwhile, and what the pager brings afterwards is put where it belongs, or nowhere.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
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

const PAGE: u64 = 4096;
const PAGES: u64 = 64;
const AT: u64 = GIB;
/// The page that the pager is held with.
const SLOW: u64 = 5;

fn at(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

/// A machine with a file of [`PAGES`] pages, mapped shared at [`AT`].
struct Fixture<'m> {
    machine: &'m Machine<A>,
    pager: &'m HeldFiles,
    file: File<'m>,
    space: Space<'m>,
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

/// Lets `scenario` use a fixture; nothing is left of it afterwards.
fn with_fixture(scenario: impl FnOnce(&Fixture<'_>)) {
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
    /// Does `slow` on another CPU, holds the pager in it, and lets it go on when `meanwhile` has
    /// returned. Panics where that waits for the pager.
    #[track_caller]
    fn hold<T: Send, M>(
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
    fn hold_sync<M>(&self, meanwhile: impl FnOnce() -> M) -> Result<(), Error> {
        self.space.write_user(at(SLOW), b"written").unwrap();
        self.hold(Io::Write, || self.file.sync(SLOW * PAGE, PAGE), meanwhile).0
    }

    fn first_byte(&self, page: u64) -> u8 {
        let mut byte = [0];
        self.space.read_user(at(page), &mut byte).unwrap();
        byte[0]
    }
}

#[test]
fn munmap_goes_on_while_a_fault_in_the_mapping_waits_for_the_pager() {
    with_fixture(|fixture| {
        let fault =
            fixture.hold_fault(|| fixture.space.munmap(VirtAddr(AT), PAGES * PAGE).unwrap());
        assert_eq!(fault, Err(FaultError::NotMapped));
    });
}

#[test]
fn mprotect_goes_on_while_a_fault_in_the_mapping_waits_for_the_pager() {
    with_fixture(|fixture| {
        let none = Protection::empty();
        let fault = fixture
            .hold_fault(|| fixture.space.mprotect(VirtAddr(AT), PAGES * PAGE, none).unwrap());
        assert_eq!(fault, Err(FaultError::Protection));
    });
}

#[test]
fn mremap_goes_on_while_a_fault_in_the_mapping_waits_for_the_pager() {
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
fn mmap_over_the_mapping_goes_on_while_a_fault_in_it_waits_for_the_pager() {
    with_fixture(|fixture| {
        let fault =
            fixture.hold_fault(|| fixture.space.mmap(&support::fixed(AT, PAGES * PAGE)).unwrap());
        assert_eq!(fault, Ok(bindery::Resolved::ZeroPage));
    });
}

#[test]
fn fork_goes_on_while_a_fault_in_the_mapping_waits_for_the_pager() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| drop(fixture.space.fork().unwrap()));
        assert!(fault.is_ok());
        assert_eq!(fixture.first_byte(SLOW), SLOW as u8 + 1);
    });
}

#[test]
fn madvise_and_mlock_and_msync_go_on_while_a_fault_in_the_mapping_waits_for_the_pager() {
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
fn a_fault_of_another_page_goes_on_while_one_waits_for_the_pager() {
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
fn truncation_goes_on_while_a_fault_waits_for_the_pager_and_what_it_brings_is_dropped() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| fixture.file.set_size(2 * PAGE).unwrap());
        assert_eq!(fault, Err(FaultError::Bus));
        assert_eq!(fixture.file.resident_pages(), 0);
    });
}

#[test]
fn a_file_that_is_cut_off_and_grows_again_while_it_is_read_shows_zeroes() {
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
fn a_page_that_is_cut_in_two_while_it_is_read_ends_in_zeroes() {
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
fn a_hole_is_made_while_the_page_is_read() {
    with_fixture(|fixture| {
        let fault = fixture.hold_fault(|| fixture.file.punch_hole(SLOW * PAGE, PAGE).unwrap());
        assert!(fault.is_ok());
        assert_eq!(fixture.first_byte(SLOW), 0, "the page is older than the hole");
    });
}

#[test]
fn a_page_that_is_overwritten_while_it_is_read_is_what_was_written() {
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
fn reads_and_writes_of_the_file_go_on_while_a_fault_waits_for_the_pager() {
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
fn a_write_to_another_page_goes_on_while_a_write_fetches_the_page_that_it_begins_in() {
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
fn a_read_of_the_file_that_waits_for_the_pager_keeps_nobody_out() {
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
            // The second one comes to wait for the first, or is still on its way: either is right.
            thread::yield_now();
            fixture.pager.release();
            assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
        });
        assert_eq!(fixture.pager.times(Io::Read, SLOW), 1);
    });
}

#[test]
fn a_fault_of_a_page_that_is_dropped_again_and_again_comes_back_once_for_each_time() {
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

#[test]
fn a_sync_of_another_range_goes_on_while_one_is_held() {
    with_fixture(|fixture| {
        fixture.space.write_user(at(40), b"other").unwrap();
        let synced = fixture.hold_sync(|| {
            fixture.file.sync(40 * PAGE, PAGE).unwrap();
            assert_eq!(&fixture.pager.files.content(1)[40 * PAGE as usize..][..5], b"other");
        });
        assert_eq!(synced, Ok(()));
    });
}

#[test]
fn all_that_does_not_write_the_page_goes_on_while_it_is_stored() {
    with_fixture(|fixture| {
        let synced = fixture.hold_sync(|| {
            assert_eq!(fixture.first_byte(SLOW), b'w');
            fixture.space.write_user(at(SLOW + 1), b"other").unwrap();
            fixture.file.write((SLOW + 2) * PAGE, b"other").unwrap();
            fixture.file.set_size((PAGES + 3) * PAGE).unwrap();
            fixture.file.set_size(PAGES * PAGE).unwrap();
            fixture.file.punch_hole((SLOW + 3) * PAGE, PAGE).unwrap();
            drop(fixture.space.fork().unwrap());
            fixture.space.mprotect(at(0), PAGES * PAGE, Protection::READ).unwrap();
            fixture.space.munmap(at(0), PAGES * PAGE).unwrap();
        });
        assert_eq!(synced, Ok(()));
        assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"written");
    });
}

/// A call that writes, drops or replaces a page waits while the pager stores it. No other call
/// waits for that one.
#[track_caller]
fn waits_for_the_sync_alone(call: impl Fn(&Fixture<'_>) + Sync, check: impl FnOnce(&Fixture<'_>)) {
    with_fixture(|fixture| {
        fixture.space.write_user(at(SLOW), b"written").unwrap();
        fixture.pager.hold_next(Io::Write, SLOW);
        thread::scope(|scope| {
            let sync = scope
                .spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.file.sync(SLOW * PAGE, PAGE)));
            fixture.pager.wait_until_held();
            let call = scope.spawn(|| fixture.machine.on_cpu(Cpu(2), || call(fixture)));
            for page in 20..30 {
                // Faults, writes and mappings of other pages go on, whatever the two do.
                fixture.space.write_user(at(page), b"other").unwrap();
                fixture.file.write(page * PAGE + 64, b"outside").unwrap();
                fixture.file.sync(page * PAGE, PAGE).unwrap();
                fixture.space.mprotect(at(page), PAGE, Protection::READ).unwrap();
                fixture.space.mprotect(at(page), PAGE, READ_WRITE).unwrap();
            }
            assert!(!call.is_finished(), "the page was changed while the pager had it");
            fixture.pager.release();
            assert_eq!(sync.join().unwrap(), Ok(()));
            call.join().unwrap();
        });
        check(fixture);
    });
}

#[test]
fn a_store_to_a_page_that_is_being_saved_waits_without_a_lock() {
    waits_for_the_sync_alone(
        |fixture| fixture.space.write_user(at(SLOW), b"later").unwrap(),
        |fixture| {
            assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"written");
            fixture.file.sync(0, u64::MAX).unwrap();
            assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"lateren");
        },
    );
}

#[test]
fn a_write_to_a_page_that_is_being_saved_waits_without_a_lock() {
    waits_for_the_sync_alone(
        |fixture| assert_eq!(fixture.file.write(SLOW * PAGE, b"later"), Ok(5)),
        |fixture| {
            fixture.file.sync(0, u64::MAX).unwrap();
            assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"lateren");
        },
    );
}

#[test]
fn a_hole_in_a_page_that_is_being_saved_waits_without_a_lock() {
    waits_for_the_sync_alone(
        |fixture| fixture.file.punch_hole(SLOW * PAGE, PAGE).unwrap(),
        |fixture| assert_eq!(fixture.first_byte(SLOW), 0),
    );
}

#[test]
fn a_second_sync_of_a_page_waits_for_the_first_and_does_not_store_it_again() {
    waits_for_the_sync_alone(
        |fixture| fixture.file.sync(SLOW * PAGE, PAGE).unwrap(),
        |fixture| assert_eq!(fixture.pager.times(Io::Write, SLOW), 1),
    );
}

#[test]
fn truncation_of_a_page_that_is_being_saved_waits_for_that_alone() {
    with_fixture(|fixture| {
        fixture.space.write_user(at(SLOW), b"written").unwrap();
        fixture.pager.hold_next(Io::Write, SLOW);
        thread::scope(|scope| {
            let sync = scope
                .spawn(|| fixture.machine.on_cpu(Cpu(1), || fixture.file.sync(SLOW * PAGE, PAGE)));
            fixture.pager.wait_until_held();
            let cut =
                scope.spawn(|| fixture.machine.on_cpu(Cpu(2), || fixture.file.set_size(PAGE)));
            // The first page is not cut off: it can be written and saved.
            fixture.file.write(0, b"outside").unwrap();
            fixture.space.write_user(at(0), b"other").unwrap();
            fixture.file.sync(0, PAGE).unwrap();
            assert!(!cut.is_finished(), "the page was dropped while the pager had it");
            fixture.pager.release();
            assert_eq!(sync.join().unwrap(), Ok(()));
            assert_eq!(cut.join().unwrap(), Ok(()));
        });
        assert_eq!(fixture.pager.files.size(1), PAGE, "the pager has stored what was cut off");
    });
}

#[test]
fn what_the_pager_refuses_is_dirty_again_and_both_who_saved_are_told() {
    with_fixture(|fixture| {
        fixture.space.write_user(at(SLOW), b"written").unwrap();
        *fixture.pager.failures.lock().unwrap() = 2;
        fixture.pager.hold_next(Io::Write, SLOW);
        let sync = || fixture.file.sync(SLOW * PAGE, PAGE);
        thread::scope(|scope| {
            let first = scope.spawn(|| fixture.machine.on_cpu(Cpu(1), sync));
            fixture.pager.wait_until_held();
            let second = scope.spawn(|| fixture.machine.on_cpu(Cpu(2), sync));
            // The second one comes to wait for the first, or finds the page dirty again.
            thread::yield_now();
            fixture.pager.release();
            assert_eq!(first.join().unwrap(), Err(Error::InputOutput));
            assert_eq!(second.join().unwrap(), Err(Error::InputOutput));
        });
        assert_ne!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"written");
        assert_eq!(sync(), Ok(()));
        assert_eq!(&fixture.pager.files.content(1)[(SLOW * PAGE) as usize..][..7], b"written");
    });
}

#[test]
fn a_sync_comes_to_its_end_while_others_write_the_page_without_a_pause() {
    const WRITES: u64 = 200_000;
    with_fixture(|fixture| {
        let over = AtomicBool::new(false);
        let write = |cpu| {
            fixture.machine.on_cpu(Cpu(cpu), || {
                let left = (0..WRITES).find(|_| {
                    assert_eq!(fixture.file.write(SLOW * PAGE, b"line of a log"), Ok(13));
                    over.load(Relaxed)
                });
                left.is_some()
            })
        };
        thread::scope(|scope| {
            let write = &write;
            let writers = [1, 2].map(|cpu| scope.spawn(move || write(cpu)));
            for _ in 0..20 {
                fixture.file.sync(0, u64::MAX).unwrap();
            }
            over.store(true, Relaxed);
            let stopped = writers.map(|writer| writer.join().unwrap());
            assert_eq!(stopped, [true; 2], "the sync came when nobody wrote any more");
        });
    });
}

#[test]
fn scattered_pages_are_stored_in_batches_and_neighbors_in_one_call() {
    with_fixture(|fixture| {
        for page in [0, 2, 4, 5, 6, 9, 63] {
            fixture.space.write_user(at(page), b"written").unwrap();
        }
        fixture.pager.asked.lock().unwrap().clear();
        fixture.file.sync(0, u64::MAX).unwrap();
        let asked = fixture.pager.asked.lock().unwrap().clone();
        let write = |first, count| (Io::Write, first, count);
        assert_eq!(asked, [write(0, 1), write(2, 1), write(4, 3), write(9, 1), write(63, 1)]);
    });
}
