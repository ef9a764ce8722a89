//! Reclaim that stores dirty pages of files: through pagers that answer at once, late, never, or
//! with a failure, and through pagers that need memory themselves.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    Accounting, AddressSpace, DirtyLimit, Error, KeptWrite, Memory, Object, Pager, PagerError,
    ReadBuffer, Sealing, Sharing, WriteRequest,
};
use bindery_hosted::{Config, DelayedFiles, Machine, MemoryFiles, for_pager};
use parking_lot::Mutex;

use crate::support::objects::{PAGE, content};
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, fixed, memory_with, options};

type A = X86_64<4>;
type P = Machine<A>;

/// The pages of the file. With the anonymous pages, they exceed the machine's memory.
const PAGES: u64 = 2500;
const HOG: u64 = 2500;
const HOG_AT: u64 = AT << 1;

fn config(cpus: u16) -> Config {
    Config { memory: 16 * MIB, cpus, ..Config::default() }
}

/// A machine with a memory in which any number of pages may be dirty.
fn machine(config: Config) -> (P, Memory<P>) {
    let (machine, memory) = memory_with::<A>(config);
    memory.dirty_limit().set_limit(u64::MAX);
    (machine, memory)
}

/// A pager that exists forever.
fn lasting<T: Pager + 'static>(pager: T) -> &'static T {
    Box::leak(Box::new(pager))
}

/// A file of [`PAGES`] pages with a mapping, all of them dirty.
fn dirty_file<'m>(
    memory: &'m Memory<P>,
    pager: &'static dyn Pager,
) -> (Object<'m, P>, AddressSpace<'m, P>) {
    let file = memory.lasting_file_system(pager, None).file(1, PAGES * PAGE).unwrap();
    let space = AddressSpace::new(memory, options()).unwrap();
    map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
    for page in 0..PAGES {
        space.write_user(VirtAddr(AT + page * PAGE), &[page as u8 | 1]).unwrap();
    }
    assert!(memory.dirty_limit().pages() >= PAGES);
    (file, space)
}

/// Touches [`HOG`] anonymous pages. Returns the number of pages that got memory.
fn hog(memory: &Memory<P>) -> u64 {
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(HOG_AT, HOG * PAGE)).unwrap();
    let touch = |page: &u64| space.write_user(VirtAddr(HOG_AT + page * PAGE), &[1]).is_ok();
    (0..HOG).take_while(touch).count() as u64
}

#[test]
fn a_hog_takes_memory_from_dirty_pages() {
    let files = lasting(MemoryFiles::new());
    let (machine, memory) = machine(config(1));
    let (file, space) = dirty_file(&memory, files);
    assert_eq!(hog(&memory), HOG);
    assert!(files.counts().pages_written > PAGES / 2, "{:?}", files.counts());
    audit(&machine, &memory, &[&space]);
    // Pages that were stored and freed are read again.
    let bytes = content(&file);
    assert!((0..PAGES).all(|page| bytes[(page * PAGE) as usize] == page as u8 | 1));
    file.sync(0, u64::MAX).unwrap();
    assert!(files.content(1) == bytes);
}

#[test]
fn a_pager_without_lasting_life_is_not_entered() {
    let files = MemoryFiles::new();
    let (machine, memory) = machine(config(1));
    let file = memory.file_system(&files).file(1, 0).unwrap();
    for page in 0..PAGES {
        file.write(page * PAGE, &[1]).unwrap();
    }
    assert!(hog(&memory) < HOG);
    assert_eq!(files.counts().writes, 0);
    audit(&machine, &memory, &[]);
}

#[test]
fn a_hog_waits_for_late_answers() {
    let files = lasting(DelayedFiles::new());
    let (machine, memory) = machine(config(3));
    files.keep_reads(false);
    let (file, space) = dirty_file(&memory, files);
    files.keep_writes(true);
    thread::scope(|scope| {
        let serve = |cpu| {
            let (machine, memory) = (&machine, &memory);
            move || machine.on_cpu(Cpu(cpu), || files.serve(memory, Duration::ZERO))
        };
        scope.spawn(serve(1));
        scope.spawn(serve(2));
        let got = hog(&memory);
        files.keep_writes(false);
        files.stop();
        assert_eq!(got, HOG);
    });
    assert_eq!(machine.ran_out_of_memory(), 0);
    audit(&machine, &memory, &[&space]);
    drop((file, space));
    assert_eq!(files.files.stored_pages(1) as u64, PAGES);
}

#[test]
fn a_silent_pager_stops_no_other() {
    let (silent, good) = (lasting(DelayedFiles::new()), lasting(MemoryFiles::new()));
    let (machine, memory) = machine(Config { brief_park: Duration::ZERO, ..config(1) });
    let limit: &'static DirtyLimit = Box::leak(Box::new(DirtyLimit::new(u64::MAX)));
    let dead = memory.lasting_file_system(silent, Some(limit));
    // Many files, each with few pages.
    let dead: Vec<_> = (0..300).map(|number| dead.file(number, 0).unwrap()).collect();
    silent.keep_writes(true);
    let write = |file: &Object<'_, P>, pages: Range<u64>| {
        pages.for_each(|page| assert_eq!(file.write(page * PAGE, &[1]), Ok(1)));
    };
    let file = memory.lasting_file_system(good, None).file(1, 0).unwrap();
    for (number, dead) in (0..).zip(&dead) {
        // The frames of the files alternate.
        write(dead, 0..4);
        write(&file, 5 * number..5 * number + 5);
    }
    assert_eq!(hog(&memory), HOG);
    assert!(good.counts().pages_written > 500, "{:?}", good.counts());
    // Without other pages, the call fails, in a limited number of steps.
    file.sync(0, u64::MAX).unwrap();
    file.set_size(0).unwrap();
    write(&dead[0], 0..2000);
    assert!(hog(&memory) < HOG);
    assert!(machine.ran_out_of_memory() > 0);
    let kept = silent.answer_all(&memory);
    assert!((1..=8 * 7).contains(&kept), "{kept} writes");
    silent.keep_writes(false);
    assert_eq!(hog(&memory), HOG);
    audit(&machine, &memory, &[]);
}

/// A pager that counts the stores of each page, and may fail them.
#[derive(Default)]
struct Counting {
    files: MemoryFiles,
    tries: Mutex<BTreeMap<u64, u64>>,
    fails: AtomicBool,
}

impl Pager for Counting {
    fn begin_write(&self, request: WriteRequest<'_>) {
        let first = request.first_page();
        for page in first..first + request.pages() {
            *self.tries.lock().entry(page).or_default() += 1;
        }
        if self.fails.load(Relaxed) {
            return request.fail(PagerError::InputOutput);
        }
        match request.with_bytes(|from| self.files.write(request.file(), first, from)) {
            Ok(()) => request.stored(),
            Err(error) => request.fail(error),
        }
    }

    fn read(&self, file: u64, page: u64, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        self.files.read(file, page, into)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.files.resize(file, size)
    }

    fn removed(&self, file: u64) {
        self.files.removed(file);
    }
}

#[test]
fn reclaim_tries_a_page_once() {
    let pager = lasting(Counting::default());
    pager.fails.store(true, Relaxed);
    let (machine, memory) = machine(config(1));
    let file = memory.lasting_file_system(pager, None).file(1, 0).unwrap();
    for page in 0..PAGES {
        file.write(page * PAGE, &[1]).unwrap();
    }
    for _ in 0..3 {
        assert!(hog(&memory) < HOG);
        assert!(pager.tries.lock().values().all(|tries| *tries == 1));
    }
    assert_eq!(pager.tries.lock().len() as u64, PAGES);
    assert_eq!(file.check_errors(&mut file.error_mark()), Err(Error::InputOutput));
    audit(&machine, &memory, &[]);
    assert_eq!(memory.dirty_limit().pages(), PAGES.next_multiple_of(32));
    // A truncation forgets pages whose store has failed, and gives the limit back.
    file.set_size(PAGE).unwrap();
    assert_eq!(memory.dirty_limit().pages(), 1);
    file.set_size(0).unwrap();
    assert_eq!(memory.dirty_limit().pages(), 0);
    assert_eq!(hog(&memory), HOG);
}

/// A pager that needs memory for each store.
struct Allocating {
    memory: &'static Memory<P>,
    files: MemoryFiles,
    is_inside: AtomicBool,
    stores: AtomicU64,
}

impl Pager for Allocating {
    fn begin_write(&self, request: WriteRequest<'_>) {
        assert!(!self.is_inside.swap(true, Relaxed), "the pager is entered again");
        self.stores.fetch_add(1, Relaxed);
        let needed = for_pager(|| {
            let scratch =
                self.memory.shared_memory(0, Sealing::Forbidden, Accounting::PerPage).unwrap();
            scratch.write(0, &[1; 3 * PAGE as usize])
        });
        self.is_inside.store(false, Relaxed);
        if needed.is_err() {
            return request.fail(PagerError::OutOfMemory);
        }
        let (file, first) = (request.file(), request.first_page());
        match request.with_bytes(|from| self.files.write(file, first, from)) {
            Ok(()) => request.stored(),
            Err(error) => request.fail(error),
        }
    }

    fn read(&self, file: u64, page: u64, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        self.files.read(file, page, into)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.files.resize(file, size)
    }

    fn removed(&self, file: u64) {
        self.files.removed(file);
    }
}

#[test]
fn a_pager_that_allocates_is_not_entered_again() {
    let (machine, memory) = machine(config(1));
    let memory: &'static Memory<P> = Box::leak(Box::new(memory));
    let pager = lasting(Allocating {
        memory,
        files: MemoryFiles::new(),
        is_inside: AtomicBool::new(false),
        stores: AtomicU64::new(0),
    });
    let (file, space) = dirty_file(memory, pager);
    // Reclaim for such a thread enters no pager.
    for_pager(|| assert!(hog(memory) < HOG));
    assert_eq!(pager.stores.load(Relaxed), 0);
    let got = hog(memory);
    assert!(pager.stores.load(Relaxed) > 0);
    // Each store needs pages at a time at which none is free, so some stores fail.
    assert!(got > 0);
    audit(&machine, memory, &[&space]);
    drop((file, space));
}

#[test]
fn a_thread_for_a_pager_exceeds_a_limit() {
    let silent = DelayedFiles::new();
    let (machine, memory) = machine(config(1));
    let limit = DirtyLimit::new(4);
    let file = memory.file_system_within(&silent, &limit).file(1, 0).unwrap();
    silent.keep_writes(true);
    for_pager(|| (0..50).for_each(|page| assert_eq!(file.write(page * PAGE, &[1]), Ok(1))));
    assert!(limit.pages() >= 50);
    silent.keep_writes(false);
    audit(&machine, &memory, &[]);
}

/// A pager that has no memory for its first store and keeps the second.
#[derive(Default)]
struct Short {
    stores: AtomicU64,
    kept: Mutex<Option<KeptWrite>>,
    is_removed: AtomicBool,
}

impl Pager for Short {
    fn begin_write(&self, request: WriteRequest<'_>) {
        if self.stores.fetch_add(1, Relaxed) == 1 {
            *self.kept.lock() = Some(request.keep());
        } else {
            request.fail(PagerError::OutOfMemory);
        }
    }

    fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
        Ok(())
    }

    fn removed(&self, _: u64) {
        self.is_removed.store(true, Relaxed);
    }
}

/// The last holder's own store fails for lack of memory, and its reclaim begins another one, which
/// is in flight when the object ends.
#[test]
fn the_last_holder_waits_for_stores_of_reclaim() {
    let pager = lasting(Short::default());
    let (machine, memory) = machine(Config { brief_park: Duration::ZERO, ..config(2) });
    let file = memory.lasting_file_system(pager, None).file(1, 0).unwrap();
    file.write(0, &[1]).unwrap();
    thread::scope(|scope| {
        let last = scope.spawn(|| machine.on_cpu(Cpu(1), || drop(file)));
        while !last.is_finished() && (pager.kept.lock().is_none() || machine.parked_threads() == 0)
        {
            thread::yield_now();
        }
        assert!(!pager.is_removed.load(Relaxed), "the pager still reads the page");
        let kept = pager.kept.lock().take().unwrap();
        memory.resume_write(kept).ok().unwrap().stored();
        last.join().unwrap();
    });
    assert!(pager.is_removed.load(Relaxed));
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
    assert_eq!(memory.dirty_limit().pages(), 0);
}

/// Files end while reclaim stores their pages.
#[test]
fn files_end_beside_stores_of_reclaim() {
    let files = lasting(DelayedFiles::new());
    let (machine, memory) = machine(config(4));
    files.keep_reads(false);
    files.keep_writes(true);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (machine, memory, over) = (&machine, &memory, &over);
        scope.spawn(move || {
            machine.on_cpu(Cpu(1), || files.serve(memory, Duration::from_micros(50)));
        });
        let reclaimers = [2, 3].map(|cpu| {
            scope.spawn(move || {
                machine.on_cpu(Cpu(cpu), || {
                    while !over.load(Relaxed) {
                        memory.reclaim(64);
                    }
                });
            })
        });
        let system = memory.lasting_file_system(files, None);
        for round in 0..200 {
            let file = system.file(round % 3, 0).unwrap();
            for page in 0..20 {
                file.write(page * PAGE, &[round as u8]).unwrap();
            }
            if round % 4 == 0 {
                file.set_size(5 * PAGE).unwrap();
            }
        }
        over.store(true, Relaxed);
        reclaimers.into_iter().for_each(|reclaimer| reclaimer.join().unwrap());
        files.keep_writes(false);
        files.stop();
    });
    assert_eq!(audit(&machine, &memory, &[]).objects, 0);
    assert_eq!(memory.dirty_limit().pages(), 0);
}
