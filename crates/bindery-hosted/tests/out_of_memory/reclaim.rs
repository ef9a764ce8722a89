//! Memory is full and swap is empty. Every call that allocates reclaims the memory that it needs,
//! wherever memory runs out, and succeeds.

use bindery::addr::{Order, PAGE_SIZE as PAGE, VirtAddr, VirtRange};
use bindery::arch::X86_64;
use bindery::check;
use bindery::{
    Access, Accounting, AddressSpace, Advice, Errno, Error, FaultError, FillMode, Growth,
    KernelMap, LockPages, MapFlags, MapObject, MapRequest, Memory, MoveMode, Object,
    PageCategories, PageRegion, PageRegions, PageScan, PinTime, Place, Protection, Remap, Scanned,
    Sealing, Sharing, Userfault, UserfaultFeatures, UserfaultModes, UserfaultScope, VmallocOptions,
    WriteProtectMode, testing,
};
use bindery_hosted::{Machine, MemoryFiles, Program};
use bindery_linux::proc::{SCAN_END, SCAN_WORDS, pagemap_scan};

use crate::support::{GIB, MIB, READ_WRITE, anywhere, audit, fixed, kernel, options, strict};

type A = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<A>>;
type Fd<'m> = Userfault<'m, Machine<A>>;
type Shared<'m> = Object<'m, Machine<A>>;

/// Sixteen written pages in two tables.
const AT: VirtAddr = VirtAddr(GIB + 2 * MIB - 8 * PAGE);
/// Sixteen other pages in their own table, in the middle of a larger mapping.
const OVER: VirtAddr = VirtAddr(1 << 41);
/// Nothing is mapped here.
const FREE: VirtAddr = VirtAddr(1 << 42);
/// Memory of a userfaultfd with one touched page.
const SERVED: VirtAddr = VirtAddr(1 << 43);
/// Untouched private memory.
const FRESH: VirtAddr = VirtAddr(1 << 44);
/// Shared memory.
const SHARED: VirtAddr = VirtAddr(1 << 45);

/// The state before a call.
struct World<'s, 'm> {
    memory: &'m Memory<Machine<A>>,
    space: &'s Space<'m>,
    fd: &'s Fd<'m>,
    object: &'s Shared<'m>,
    kernel: &'s KernelMap<'m, Machine<A>>,
}

fn up(at: VirtAddr, bytes: u64) -> VirtAddr {
    VirtAddr(at.0 + bytes)
}

type Call = fn(&World<'_, '_>) -> Result<(), String>;

fn ok<T, E: std::fmt::Debug>(result: Result<T, E>) -> Result<(), String> {
    result.map(drop).map_err(|error| format!("{error:?}"))
}

fn remap(world: &World<'_, '_>, old: u64, new: u64, remap: Remap) -> Result<(), String> {
    ok(world.space.mremap(AT, old * PAGE, new * PAGE, remap))
}

const WRITE_ALL: &[u8] = &[7; 3 * PAGE as usize];

/// Every call of the library that allocates.
const CALLS: &[(&str, Call)] = &[
    ("AddressSpace::new", |world| ok(AddressSpace::new(world.memory, options()))),
    ("mmap", |world| ok(world.space.mmap(&anywhere(8 * PAGE)))),
    ("mmap over the middle of a mapping", |world| {
        ok(world.space.mmap(&fixed(OVER.0 + 4 * PAGE, 8 * PAGE)))
    }),
    ("mmap with MAP_POPULATE", |world| {
        ok(world.space.mmap(&MapRequest { flags: MapFlags::POPULATE, ..fixed(FREE.0, 8 * PAGE) }))
    }),
    ("mmap of an object", |world| ok(map_shared(world, FREE))),
    ("munmap of the middle", |world| ok(world.space.munmap(up(AT, 4 * PAGE), 8 * PAGE))),
    ("mprotect of the middle", |world| {
        ok(world.space.mprotect(up(AT, 4 * PAGE), 8 * PAGE, Protection::READ))
    }),
    ("mseal of the middle", |world| ok(world.space.mseal(up(AT, 4 * PAGE), 8 * PAGE))),
    ("mlock of the middle", |world| {
        ok(world.space.mlock(up(FRESH, 4 * PAGE), 8 * PAGE, LockPages::Now))
    }),
    ("brk", |world| {
        world.space.set_break_start(FREE);
        let end = up(FREE, MIB);
        if world.space.set_break(end) == end { Ok(()) } else { Err("the old break".into()) }
    }),
    ("mremap that may move", |world| {
        ok(world.space.mremap(OVER, 16 * PAGE, 4096 * PAGE, Remap::MayMove))
    }),
    ("mremap to free addresses", |world| remap(world, 16, 16, Remap::To(FREE))),
    ("mremap over a mapping", |world| remap(world, 16, 16, Remap::To(up(OVER, 4 * PAGE)))),
    ("mremap to free addresses, and shorter", |world| remap(world, 16, 9, Remap::To(FREE))),
    ("mremap over a mapping, and longer", |world| {
        remap(world, 16, 24, Remap::To(up(OVER, 4 * PAGE)))
    }),
    ("mremap over a mapping, and away again", |world| {
        remap(world, 16, 16, Remap::LeaveTo(up(OVER, 4 * PAGE)))
    }),
    ("mremap of the middle over a mapping", |world| {
        let to = Remap::To(up(OVER, 4 * PAGE));
        ok(world.space.mremap(up(AT, 4 * PAGE), 8 * PAGE, 8 * PAGE, to))
    }),
    ("mremap of served memory over a mapping", |world| {
        ok(world.space.mremap(SERVED, 16 * PAGE, 16 * PAGE, Remap::To(up(OVER, 4 * PAGE))))
    }),
    ("remap_file_pages", |world| {
        map_shared(world, FREE).map_err(|error| error.to_string())?;
        ok(world.space.remap_file_pages(FREE, 4 * PAGE, 8, MapFlags::empty()))
    }),
    ("fork", |world| ok(world.space.fork())),
    ("fork with a pinned page", |world| {
        let pinned = world.space.pin(AT, 1, Access::Write, PinTime::Short);
        let pinned = pinned.map_err(|error| error.to_string())?;
        let forked = ok(world.space.fork());
        drop(pinned);
        forked
    }),
    ("a read fault", |world| ok(world.space.fault(FRESH, Access::Read))),
    ("a write fault", |world| ok(world.space.fault(FRESH, Access::Write))),
    ("a fault in an object", |world| ok(world.space.fault(SHARED, Access::Write))),
    ("a copy on write", |world| {
        let _child = world.space.fork().map_err(|error| error.to_string())?;
        ok(world.space.fault(AT, Access::Write))
    }),
    ("pin", |world| ok(world.space.pin(FRESH, 1, Access::Write, PinTime::Long))),
    ("write_user", |world| ok(world.space.write_user(FRESH, WRITE_ALL))),
    ("madvise(MADV_POPULATE_WRITE)", |world| {
        ok(world.space.madvise(FRESH, 8 * PAGE, Advice::PopulateWrite))
    }),
    ("madvise(MADV_GUARD_INSTALL)", |world| {
        ok(world.space.madvise(FRESH, 2 * MIB + PAGE, Advice::GuardInstall))
    }),
    ("madvise(MADV_DONTFORK) of the middle", |world| {
        ok(world.space.madvise(up(AT, 4 * PAGE), 8 * PAGE, Advice::DontFork))
    }),
    ("shared memory", |world| {
        ok(world.memory.shared_memory(MIB, Sealing::Allowed, Accounting::PerPage))
    }),
    ("write to an object", |world| ok(world.object.write(0, WRITE_ALL))),
    ("fallocate of an object", |world| ok(world.object.allocate(0, 8 * PAGE, Growth::Allowed))),
    ("userfaultfd", |world| {
        ok(world.space.userfault(UserfaultFeatures::empty(), UserfaultScope::All))
    }),
    ("UFFDIO_REGISTER of the middle", |world| {
        let (middle, modes) = (up(FRESH, 4 * PAGE), UserfaultModes::MISSING);
        ok(world.space.register_userfault(world.fd, middle, 8 * PAGE, modes))
    }),
    ("UFFDIO_UNREGISTER of the middle", |world| {
        ok(world.space.unregister_userfault(world.fd, up(SERVED, 4 * PAGE), 8 * PAGE))
    }),
    ("UFFDIO_UNREGISTER of two mappings of a file", |world| {
        map_file_twice(world).map_err(|error| error.to_string())?;
        let modes = UserfaultModes::WRITE_PROTECT;
        ok(world.space.register_userfault(world.fd, FREE, 16 * PAGE, modes))?;
        ok(world.space.unregister_userfault(world.fd, FREE, 12 * PAGE))
    }),
    ("UFFDIO_WRITEPROTECT", |world| {
        ok(world.space.handler(world.fd).write_protect(SERVED, 8 * MIB, WriteProtectMode::PROTECT))
    }),
    ("UFFDIO_COPY", |world| {
        let mut source = |_, piece: &mut [u8]| {
            piece.fill(1);
            Ok::<(), FaultError>(())
        };
        let to = up(SERVED, 4 * PAGE);
        ok(world.space.handler(world.fd).fill_copy(to, 8 * PAGE, FillMode::empty(), &mut source))
    }),
    ("UFFDIO_ZEROPAGE", |world| {
        let to = up(SERVED, 4 * MIB);
        ok(world.space.handler(world.fd).fill_zeroes(to, 8 * PAGE, FillMode::empty()))
    }),
    ("UFFDIO_POISON", |world| {
        let to = up(SERVED, 4 * MIB);
        ok(world.space.handler(world.fd).fill_poison(to, 8 * PAGE, FillMode::empty()))
    }),
    ("UFFDIO_MOVE", |world| {
        let to = up(SERVED, 4 * MIB);
        ok(world.space.handler(world.fd).move_pages(to, AT, 16 * PAGE, MoveMode::empty()))
    }),
    ("PAGEMAP_SCAN that protects", |world| {
        let range = VirtRange::from_len(SERVED, 8 * MIB).unwrap();
        let scan = PageScan { protects: true, ..PageScan::of(range) };
        let mut room = [PageRegion::default(); 8];
        let mut regions = PageRegions::new(&mut room);
        let scanned = world.space.scan_pages(&scan, Some(&mut regions));
        let all = Ok(Scanned { end: range.end(), pages: range.pages() });
        if scanned == all { Ok(()) } else { Err(format!("{scanned:?}")) }
    }),
    ("KernelMap::new", |world| ok(KernelMap::new(world.memory, kernel::arena::<A>(1 << 33)))),
    ("vmalloc", |world| ok(world.kernel.vmalloc(9 * PAGE, &VmallocOptions::default()))),
    ("swap_on", |world| {
        let area = world.memory.swap_on(1 << 12, 0).map_err(|error| format!("{error:?}"))?;
        world.memory.swap_off(&area).map_err(|error| format!("{error:?}"))
    }),
];

fn map_shared(world: &World<'_, '_>, at: VirtAddr) -> Result<VirtAddr, Error> {
    let request = MapRequest {
        length: 16 * PAGE,
        protection: READ_WRITE,
        place: Place::Fixed(at),
        sharing: Sharing::Shared,
        ..MapRequest::default()
    };
    let access = bindery::FileAccess::READ | bindery::FileAccess::WRITE;
    world.space.mmap_object(&request, &MapObject { object: world.object, offset: 0, access })
}

/// Maps eight pages of a file, and others after them that are not the next of the file.
fn map_file_twice(world: &World<'_, '_>) -> Result<(), Error> {
    let files = Box::leak(Box::new(MemoryFiles::new()));
    let file = world.memory.file(files, 1, 64 * PAGE)?;
    for (at, offset) in [(FREE, 0), (up(FREE, 8 * PAGE), 32 * PAGE)] {
        let request = MapRequest { sharing: Sharing::Shared, ..fixed(at.0, 8 * PAGE) };
        let access = bindery::FileAccess::READ | bindery::FileAccess::WRITE;
        world.space.mmap_object(&request, &MapObject { object: &file, offset, access })?;
    }
    Ok(())
}

/// Makes memory run out at each point of the call in turn; other programs' pages can be reclaimed.
fn at_every_point(name: &str, call: Call) -> u64 {
    for point in 0.. {
        let failed = with_world(|world| {
            testing::fail_one_allocation(world.memory, Some(point));
            let result = call(world);
            let failed = testing::failed_allocations(world.memory);
            testing::fail_one_allocation(world.memory, None);
            assert_eq!(result, Ok(()), "{name} gives up where allocation {point} fails");
            failed
        });
        if failed == 0 {
            return point;
        }
    }
    unreachable!()
}

fn with_world<R>(scenario: impl FnOnce(&World<'_, '_>) -> R) -> R {
    let (machine, memory) = strict::<A>(16 * MIB);
    let area = memory.swap_on(1 << 14, 0).unwrap();
    let result = {
        let space = AddressSpace::new(&memory, options()).unwrap();
        let other = AddressSpace::new(&memory, options()).unwrap();
        let kernel = kernel::map::<A>(&memory);
        let shared = memory.shared_memory(MIB, Sealing::Allowed, Accounting::PerPage).unwrap();
        let features = UserfaultFeatures::WP_ASYNC | UserfaultFeatures::WP_UNPOPULATED;
        let fd = space.userfault(features, UserfaultScope::All).unwrap();
        let (object, kernel_map) = (&shared, &kernel);
        let world = World { memory: &memory, space: &space, fd: &fd, object, kernel: kernel_map };
        space.mmap(&fixed(AT.0, 16 * PAGE)).unwrap();
        space.mmap(&fixed(OVER.0, 64 * PAGE)).unwrap();
        space.mmap(&fixed(FRESH.0, 8 * MIB)).unwrap();
        space.mmap(&fixed(SERVED.0, 8 * MIB)).unwrap();
        let modes = UserfaultModes::WRITE_PROTECT | UserfaultModes::MISSING;
        for page in 0..16 {
            space.write_user(up(AT, page * PAGE), &[page as u8 + 1]).unwrap();
            space.write_user(up(OVER, page * PAGE), &[page as u8 + 1]).unwrap();
        }
        space.write_user(SERVED, &[1]).unwrap();
        space.register_userfault(&fd, SERVED, 8 * MIB, modes).unwrap();
        map_shared(&world, SHARED).unwrap();
        other.mmap(&fixed(GIB, 4 * MIB)).unwrap();
        other.madvise(VirtAddr(GIB), 4 * MIB, Advice::PopulateWrite).unwrap();
        let result = scenario(&world);
        kernel.purge();
        machine.assert_clean();
        let mut scratch = vec![0; check::scratch_words(&memory)];
        check::check_with_kernel(&memory, &[&space, &other], &[&kernel], &mut scratch).unwrap();
        space.close_userfault(fd);
        result
    };
    memory.swap_off(&area).unwrap();
    result
}

#[test]
fn every_call_reclaims_what_it_needs() {
    let mut idle = Vec::new();
    for (name, call) in CALLS {
        if at_every_point(name, *call) == 0 {
            idle.push(name);
        }
    }
    assert!(idle.is_empty(), "no allocation at all: {idle:?}");
}

/// The only free frames are those reserved for swap.
fn exhaust(memory: &Memory<Machine<A>>) {
    while memory.allocate_frames(Order(0)).is_some() {}
}

#[test]
fn a_replacing_move_reclaims_before_it_unmaps() {
    let (machine, memory) = strict::<A>(16 * MIB);
    memory.swap_on(1 << 14, 0).unwrap();
    let space = AddressSpace::new(&memory, options()).unwrap();
    let other = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 16 * PAGE)).unwrap();
    space.mmap(&fixed(OVER.0, 64 * PAGE)).unwrap();
    space.write_user(AT, b"source").unwrap();
    other.mmap(&fixed(GIB, 30 * MIB)).unwrap();
    other.madvise(VirtAddr(GIB), 30 * MIB, Advice::PopulateWrite).unwrap();
    exhaust(&memory);
    let to = up(OVER, 4 * PAGE);
    assert_eq!(space.mremap(AT, 16 * PAGE, 16 * PAGE, Remap::To(to)), Ok(to));
    let mut content = [0; 6];
    Program::new(&machine, &space).read(to, &mut content).unwrap();
    assert_eq!(&content, b"source");
    audit(&machine, &memory, &[&space, &other]);
}

#[test]
fn a_replacing_move_without_memory_changes_nothing() {
    let (machine, memory) = strict::<A>(16 * MIB);
    let space = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(AT.0, 16 * PAGE)).unwrap();
    space.mmap(&fixed(OVER.0, 64 * PAGE)).unwrap();
    space.write_user(AT, b"source").unwrap();
    space.write_user(up(OVER, 4 * PAGE), b"target").unwrap();
    let mappings = space.mapping_count();
    exhaust(&memory);
    for (old, new) in [(16, 16), (16, 9), (16, 24)] {
        let to = Remap::To(up(OVER, 4 * PAGE));
        let refused = space.mremap(AT, old * PAGE, new * PAGE, to);
        assert_eq!(refused, Err(Error::OutOfMemory));
        assert_eq!(space.mapping_count(), mappings);
        for (at, expected) in [(AT, b"source"), (up(OVER, 4 * PAGE), b"target")] {
            let mut content = [0; 6];
            Program::new(&machine, &space).read(at, &mut content).unwrap();
            assert_eq!(&content, expected);
        }
    }
    audit(&machine, &memory, &[&space]);
}

/// Memory of a userfaultfd with asynchronous write-protection, with one page in its first table, on
/// a machine without a free frame.
fn with_served(swap: bool, scenario: impl FnOnce(&Memory<Machine<A>>, &Space<'_>)) {
    let (machine, memory) = strict::<A>(16 * MIB);
    if swap {
        memory.swap_on(1 << 14, 0).unwrap();
    }
    let space = AddressSpace::new(&memory, options()).unwrap();
    let other = AddressSpace::new(&memory, options()).unwrap();
    space.mmap(&fixed(SERVED.0, 8 * MIB)).unwrap();
    let features = UserfaultFeatures::WP_ASYNC | UserfaultFeatures::WP_UNPOPULATED;
    let fd = space.userfault(features, UserfaultScope::All).unwrap();
    space.register_userfault(&fd, SERVED, 8 * MIB, UserfaultModes::WRITE_PROTECT).unwrap();
    space.write_user(up(SERVED, PAGE), &[1]).unwrap();
    space.write_user(up(SERVED, 5 * MIB), &[1]).unwrap();
    other.mmap(&fixed(GIB, 30 * MIB)).unwrap();
    if swap {
        other.madvise(VirtAddr(GIB), 30 * MIB, Advice::PopulateWrite).unwrap();
    }
    exhaust(&memory);
    scenario(&memory, &space);
    audit(&machine, &memory, &[&space, &other]);
    space.close_userfault(fd);
}

fn protecting() -> PageScan {
    let range = VirtRange::from_len(SERVED, 8 * MIB).unwrap();
    let written = PageCategories::WRITTEN;
    PageScan { protects: true, required: written, reported: written, ..PageScan::of(range) }
}

#[test]
fn a_scan_that_protects_reclaims() {
    with_served(true, |_, space| {
        let mut room = [PageRegion::default(); 8];
        let mut regions = PageRegions::new(&mut room);
        let scanned = space.scan_pages(&protecting(), Some(&mut regions));
        assert_eq!(scanned, Ok(Scanned { end: up(SERVED, 8 * MIB), pages: 2048 }));
        let [region] = regions.found() else { panic!("{:?}", regions.found()) };
        assert_eq!(region.range, protecting().range);
    });
}

#[test]
fn a_scan_without_memory_ends_where_it_protected() {
    with_served(false, |_, space| {
        let mut room = [PageRegion::default(); 8];
        let mut regions = PageRegions::new(&mut room);
        // The first table exists; the next 2 MiB would need another.
        let end = up(SERVED, 2 * MIB);
        let scanned = space.scan_pages(&protecting(), Some(&mut regions));
        assert_eq!(scanned, Ok(Scanned { end, pages: 512 }));
        let [region] = regions.found() else { panic!("{:?}", regions.found()) };
        assert_eq!(region.range, VirtRange::from_len(SERVED, 2 * MIB).unwrap());
        // Only the reported pages are protected.
        let mut room = [PageRegion::default(); 8];
        let mut left = PageRegions::new(&mut room);
        let look = PageScan { protects: false, ..protecting() };
        space.scan_pages(&look, Some(&mut left)).unwrap();
        let range = VirtRange::from_len(end, 6 * MIB).unwrap();
        let [region] = left.found() else { panic!("{:?}", left.found()) };
        assert_eq!(region.range, range);
        // The next scan returns the reason.
        let rest = PageScan { range, ..protecting() };
        let mut none = PageRegions::new(&mut room);
        assert_eq!(space.scan_pages(&rest, Some(&mut none)), Err(Error::OutOfMemory));
        assert_eq!(none.found(), []);
    });
}

#[test]
fn a_program_learns_what_its_scan_has_protected() {
    with_served(false, |_, space| {
        let written = PageCategories::WRITTEN.bits();
        let end = SERVED.0 + 8 * MIB;
        let room = FREE.0;
        let size = 8 * SCAN_WORDS as u64;
        let mut words = [size, 1, SERVED.0, end, 0, room, 8, 0, 0, written, 0, written];
        let mut regions = Vec::new();
        let mut write = |_, bytes: &[u8]| {
            regions.extend_from_slice(bytes);
            Ok(())
        };
        assert_eq!(pagemap_scan(space, &mut words, &mut write), Ok(1));
        assert_eq!(words[SCAN_END], SERVED.0 + 2 * MIB);
        words[2] = words[SCAN_END];
        assert_eq!(pagemap_scan(space, &mut words, &mut write), Err(Errno::ENOMEM));
        let numbers: Vec<_> =
            regions.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(numbers, [SERVED.0, SERVED.0 + 2 * MIB, written]);
    });
}
