//! The maximum work in one read section, and under one set of table locks: 1,024 entries, 512
//! marked tables, 64 KiB copied or zeroed, whatever the size of the call.

use std::sync::mpsc;
use std::thread;

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{AArch64, X86_64};
use bindery::platform::Cpu;
use bindery::{
    Access, Accounting, AddressSpace, Advice, FileAccess, Growth, MapObject, MapRequest, Memory,
    PinTime, Place, Protection, Remap, Sealing, Sharing, SizeMode, SyncFlags, testing,
};
use bindery_hosted::{MemoryFiles, Walk};
use bindery_linux::proc::{self, Unnamed};

use crate::support::measured::{Measured, Section, measured};
use crate::support::{GIB, KIB, MIB, READ_WRITE, fixed, options};

type X86 = X86_64<4>;
type Space<'m, A> = AddressSpace<'m, Measured<A>>;

const START: VirtAddr = VirtAddr(GIB);

fn at_offset(bytes: u64) -> VirtAddr {
    VirtAddr(START.0 + bytes)
}

/// The destination of moves: shifted from the source by this offset.
fn far(off: u64) -> VirtAddr {
    VirtAddr(32 * GIB + off)
}

/// Checks the longest section since the last check.
#[track_caller]
fn bounded<A: Walk>(memory: &Memory<Measured<A>>, what: &str) -> Section {
    let most = memory.platform().take_most();
    let within = most.entries <= 1024 && most.tables <= 512 && most.bytes <= 64 * KIB;
    assert!(within, "{what}: {most:?} in one section");
    most
}

/// The content of a range.
#[derive(Clone, Copy, Debug)]
struct Filling {
    size: u64,
    /// The folios' order.
    order: u8,
    /// The distance between two touches, in bytes.
    step: u64,
}

const DENSE: Filling = Filling { size: 32 * MIB, order: 0, step: PAGE_SIZE };
const BLOCKS: Filling = Filling { size: 32 * MIB, order: 4, step: 64 * KIB };
const HUGE: Filling = Filling { size: 64 * MIB, order: 9, step: 2 * MIB };
const SPARSE: Filling = Filling { size: 3 * GIB, order: 0, step: 2 * MIB };

fn fill<A: Walk>(space: &Space<'_, A>, filling: Filling) {
    for at in (0..filling.size).step_by(filling.step as usize) {
        space.fault(at_offset(at), Access::Write).unwrap();
    }
}

/// A filled range. Neighboring pages share its first and last table, so that calls cover partial
/// tables.
fn filled<'m, A: Walk>(memory: &'m Memory<Measured<A>>, filling: Filling) -> Space<'m, A> {
    if filling.order > 0 {
        memory.folio_policy().set(Order(filling.order), SizeMode::Always);
    }
    let space = AddressSpace::new(memory, options()).unwrap();
    space.mmap(&fixed(START.0, filling.size)).unwrap();
    fill(&space, filling);
    bounded(memory, "first touches");
    space
}

/// At most one invalidation per 64 tables, and a few where a range ends or a count restarts.
#[track_caller]
fn flushed_together<A: Walk>(space: &Space<'_, A>, filling: Filling, work: impl FnOnce()) {
    let before = space.counts().invalidations;
    work();
    let tables = filling.size / (2 * MIB);
    let flushes = space.counts().invalidations - before;
    assert!(flushes <= tables.div_ceil(64) + 2, "{flushes} invalidations of {tables} tables");
}

fn calls_are_bounded<A: Walk>(filling: Filling) {
    let (machine, memory) = measured::<A>(256 * MIB);
    let space = filled(&memory, filling);
    let size = filling.size;
    machine.on_cpu(Cpu(0), || space.enter());

    space.mincore(START, size, |_, _| ()).unwrap();
    bounded(&memory, "mincore");
    proc::smaps(&space, &Unnamed, &mut String::new()).unwrap();
    bounded(&memory, "smaps");

    flushed_together(&space, filling, || {
        let child = space.fork().unwrap();
        bounded(&memory, "fork");
        drop(child);
        bounded(&memory, "drop of the child");
    });
    fill(&space, filling);
    bounded(&memory, "touches after a fork");
    for protection in [Protection::READ, Protection::empty(), READ_WRITE] {
        flushed_together(&space, filling, || space.mprotect(START, size, protection).unwrap());
        bounded(&memory, "mprotect");
    }
    for advice in [Advice::Cold, Advice::Free] {
        flushed_together(&space, filling, || space.madvise(START, size, advice).unwrap());
        bounded(&memory, "forgetting");
    }
    // A range that starts and ends inside tables.
    let inner = at_offset(size / 4 + PAGE_SIZE);
    space.discard(inner, size / 4 + 2 * PAGE_SIZE).unwrap();
    bounded(&memory, "discard");
    fill(&space, filling);
    space.madvise(inner, size / 4, Advice::GuardInstall).unwrap();
    bounded(&memory, "guards");
    space.madvise(inner, size / 4, Advice::GuardRemove).unwrap();
    bounded(&memory, "guards that go");
    fill(&space, filling);
    for off in [64 * KIB, 2 * MIB] {
        for (from, to) in [(START, far(off)), (far(off), START)] {
            let moved = || space.mremap(from, size, size, Remap::To(to)).map(|_| ()).unwrap();
            memory.platform().take_most();
            flushed_together(&space, filling, moved);
            bounded(&memory, "mremap");
        }
    }
    memory.platform().take_most();
    space.munmap(inner, size / 2 + PAGE_SIZE).unwrap();
    bounded(&memory, "munmap of the middle");
    drop(space);
    bounded(&memory, "drop of the address space");
    machine.assert_clean();
}

#[test]
fn calls_on_base_pages_have_short_sections() {
    calls_are_bounded::<X86>(DENSE);
}

#[test]
fn calls_on_64_kib_folios_have_short_sections() {
    calls_are_bounded::<AArch64>(BLOCKS);
}

#[test]
fn calls_on_huge_leaves_have_short_sections() {
    calls_are_bounded::<X86>(HUGE);
}

#[test]
fn calls_on_sparse_tables_have_short_sections() {
    calls_are_bounded::<X86>(SPARSE);
}

#[test]
fn unmapping_one_entry_marks_one_table_under_lock() {
    let (_, memory) = measured::<X86>(64 * MIB);
    let space = filled(&memory, Filling { size: 16 * GIB, order: 0, step: 32 * MIB });
    let before = space.counts();
    space.munmap(START, 16 * GIB).unwrap();
    let cost = space.counts() - before;
    let most = bounded(&memory, "munmap");
    assert!(cost.invalidations <= 1, "{cost:?}");
    assert!(most.tables <= 512, "{most:?}");
}

#[test]
fn relatives_get_the_reverse_map_between_pieces() {
    let (machine, memory) = measured::<X86>(128 * MIB);
    let space = filled(&memory, DENSE);
    let child = space.fork().unwrap();
    let (ask, asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let (mut free, mut busy) = (0, 0);
    thread::scope(|scope| {
        let (machine, child) = (&machine, &child);
        scope.spawn(move || {
            machine.on_cpu(Cpu(1), || {
                while asked.recv().is_ok() {
                    answer.send(testing::walk_anonymous(child, START).is_some()).unwrap();
                }
            });
        });
        let (free_now, counted) = mpsc::channel();
        let hook = Box::new(move || {
            ask.send(()).unwrap();
            free_now.send(answers.recv().unwrap()).unwrap();
        });
        machine.on_cpu(Cpu(0), || {
            memory.platform().with_hook(hook, || {
                space.mremap(START, DENSE.size, DENSE.size, Remap::To(far(64 * KIB))).unwrap();
            });
        });
        for answer in counted {
            if answer {
                free += 1;
            } else {
                busy += 1;
            }
        }
    });
    // Two tables per batch; the reverse map is locked only for the entries of one batch at a time.
    let pieces = DENSE.size / (4 * MIB);
    assert!(free >= pieces && busy >= pieces, "free {free} times, busy {busy} times");
}

fn request(length: u64, sharing: Sharing) -> MapRequest {
    let place = Place::Fixed(START);
    MapRequest { length, protection: READ_WRITE, place, sharing, ..MapRequest::default() }
}

const ACCESS: FileAccess = FileAccess::READ.union(FileAccess::WRITE);

#[test]
fn mincore_of_an_object_asks_for_32_runs() {
    let (_, memory) = measured::<X86>(320 * MIB);
    // Takes all memory and frees it from the highest frame to the lowest, so that consecutive pages
    // get consecutive frames, each in its own folio.
    let mut all = Vec::new();
    while let Some(frames) = memory.allocate_frames(Order(10)) {
        all.push(frames);
    }
    all.sort_by_key(|frames| frames.first.0);
    for frames in all.iter().rev() {
        // SAFETY: 1. the test allocated the frames; 2. nothing maps or uses them.
        assert!(unsafe { memory.free_frames(*frames) });
    }
    let size = 256 * MIB;
    let object = memory.shared_memory(size, Sealing::Allowed, Accounting::PerPage).unwrap();
    object.allocate(0, size, Growth::Forbidden).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let backing = MapObject { object: &object, offset: 0, access: ACCESS };
    space.mmap_object(&request(size, Sharing::Shared), &backing).unwrap();
    memory.platform().take_most();
    let (mut told, mut times) = (0, 0);
    space
        .mincore(START, size, |_, pages| {
            told += pages;
            times += 1;
        })
        .unwrap();
    bounded(&memory, "mincore");
    // One report for each time that the index is locked.
    assert_eq!((told, times), (size / PAGE_SIZE, size / PAGE_SIZE / 32));
}

#[test]
fn truncating_and_saving_mapped_pages_has_short_sections() {
    let files = MemoryFiles::new();
    let (_, memory) = measured::<X86>(128 * MIB);
    let size = 32 * MIB;
    let file = memory.file(&files, 1, size).unwrap();
    for sharing in [Sharing::Shared, Sharing::Private] {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let backing = MapObject { object: &file, offset: 0, access: ACCESS };
        space.mmap_object(&request(size, sharing), &backing).unwrap();
        for at in (0..size).step_by(PAGE_SIZE as usize) {
            space.fault(at_offset(at), Access::Write).unwrap();
        }
        memory.platform().take_most();
        space.msync(START, size, SyncFlags::SYNC).unwrap();
        memory.platform().take_most();
        file.punch_hole(PAGE_SIZE, size / 2).unwrap();
        bounded(&memory, "a hole");
        file.set_size(PAGE_SIZE).unwrap();
        bounded(&memory, "a truncation");
        file.set_size(size).unwrap();
    }
}

#[test]
fn a_fork_copies_pinned_pages_outside_of_sections() {
    for (order, size) in [(0, 4 * MIB), (9, 16 * MIB)] {
        let (machine, memory) = measured::<X86>(128 * MIB);
        let step = PAGE_SIZE << order;
        let space = filled(&memory, Filling { size, order, step });
        let mut pins = Vec::new();
        for at in (0..size).step_by(step as usize) {
            let at = at_offset(at);
            space.write_user(at, &at.0.to_le_bytes()).unwrap();
            pins.push(space.pin(at, 1, Access::Write, PinTime::Long).unwrap());
        }
        memory.platform().take_most();
        let child = space.fork().unwrap();
        bounded(&memory, "fork");
        let mut bytes = [0; 8];
        for at in (0..size).step_by(step as usize) {
            let at = at_offset(at);
            space.write_user(at, &[0; 8]).unwrap();
            child.read_user(at, &mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), at.0);
        }
        assert!(child.counts().bytes_copied >= size, "{:?}", child.counts());
        drop(pins);
        drop(child);
        drop(space);
        machine.assert_clean();
    }
}

#[test]
fn collapsing_copies_outside_of_sections() {
    let (machine, memory) = measured::<X86>(64 * MIB);
    let size = 4 * MIB;
    let space = filled(&memory, Filling { size, order: 0, step: 3 * PAGE_SIZE });
    let at = at_offset(6 * PAGE_SIZE);
    space.write_user(at, b"contents").unwrap();
    memory.platform().take_most();
    space.collapse_range(bindery::addr::VirtRange::from_len(START, size).unwrap()).unwrap();
    bounded(&memory, "collapse");
    let mut bytes = [0; 8];
    space.read_user(at, &mut bytes).unwrap();
    assert_eq!(&bytes, b"contents");
    assert!(space.counts().bytes_copied > MIB);
    drop(space);
    machine.assert_clean();
}
