//! `/proc/self/{maps,smaps,smaps_rollup,statm,status}`: formats and numbers.

use std::cell::Cell;
use std::fmt::{self, Write};

use bindery::addr::{Order, VirtAddr};
use bindery::{Advice, LockPages, MapFlags, MapRequest, Place, Protection, Sharing};
use bindery_hosted::Walk;
use bindery_linux::proc::{self, ClearRefs, FileId, Unnamed};

use super::fixture::*;
use crate::support::{GIB, MIB, fixed};

on_every_architecture! {
    a_listing_is_written_as_linux_writes_it => exact_lines;
    objects_are_named_sensibly_by_default => default_names;
    a_slow_reader_keeps_nobody_waiting => slow_reader;
    a_listing_that_cannot_be_written_ends => failing_reader;
    what_a_fork_shares_counts_in_parts => shared_parts;
    a_partly_copied_folio_counts_on_average => partial_copies;
    a_huge_folio_is_told_as_one => huge;
    files_are_dirty_until_they_are_saved => files;
    shared_memory_counts_as_such => shared_memory;
    contents_that_may_vanish_are_told => lazily_freed;
    locked_memory_counts_in_parts => locked;
    the_rollup_is_the_sum_of_all_mappings => rolled_up;
    the_status_tells_what_is_resident => told_by_status;
    huge_pages_are_possible_where_one_fits => eligible;
}

const AT: u64 = GIB;

fn exact_lines<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let protections = [
            Protection::empty(),
            Protection::READ,
            Protection::READ | Protection::EXECUTE,
            Protection::READ | Protection::WRITE,
        ];
        for (number, protection) in (0..).zip(protections) {
            let at = AT + number * 0x1_0000;
            space.mmap(&MapRequest { protection, ..fixed(at, 0x2000) }).unwrap();
        }
        let object = fixture.memfd(0x10_0000);
        map_object(&space, &object, AT + 0x4_0000, PAGE, 0, Sharing::Shared);
        map_object(&space, &object, AT + 0x5_0000, 2 * PAGE, 0x1_2000, Sharing::Private);
        space.set_break_start(VirtAddr(0x5000_0800));
        space.set_break(VirtAddr(0x5000_2001));
        let flags = MapFlags::GROWS_DOWN;
        space.mmap(&MapRequest { flags, ..fixed(0x2_0000_0000, 0x2_1000) }).unwrap();
        let id = FileId { major: 0xfe, minor: 3, inode: 1234567 };
        let path = "/tmp/two\nlines (deleted)".to_owned();
        let naming = OneFile { id, path, stack: 0x2_0002_0ff0 };
        let expected = "\
40000000-40002000 ---p 00000000 00:00 0 
40010000-40012000 r--p 00000000 00:00 0 
40020000-40022000 r-xp 00000000 00:00 0 
40030000-40032000 rw-p 00000000 00:00 0 
40040000-40041000 rw-s 00000000 fe:03 1234567                            /tmp/two\\012lines (deleted)
40050000-40052000 rw-p 00012000 fe:03 1234567                            /tmp/two\\012lines (deleted)
50001000-50003000 rw-p 00000000 00:00 0                                  [heap]
200000000-200021000 rw-p 00000000 00:00 0                                [stack]
";
        assert_eq!(maps(&space, &naming), expected);
        let first_lines: String = parse(&smaps(&space, &naming)).iter().map(first_line).collect();
        assert_eq!(first_lines, expected);
        fixture.audit(&[&space]);
    });
}

fn first_line(area: &Area) -> &str {
    area.text.split_inclusive('\n').next().unwrap_or_default()
}

fn default_names<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let file = fixture.file(PAGE);
        let object = fixture.memfd(PAGE);
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT, PAGE) }).unwrap();
        map_object(&space, &object, AT + 0x1_0000, PAGE, 0, Sharing::Shared);
        map_object(&space, &file, AT + 0x2_0000, PAGE, 0, Sharing::Shared);
        let areas = parse(&maps(&space, &Unnamed));
        let paths: Vec<_> = areas.iter().map(|area| area.path.as_str()).collect();
        let path = format!("file:[{}]", file.identity());
        assert_eq!(paths, ["/dev/zero (deleted)", "/memfd: (deleted)", &path]);
        let inodes: Vec<_> = areas.iter().map(|area| Some(area.file.inode)).collect();
        let identities: Vec<_> = mappings(&space).iter().map(|mapping| mapping.object).collect();
        assert_eq!(inodes, identities);
        assert_eq!(identities[1], Some(object.identity()));
        let devices = areas.iter().map(|area| (area.file.major, area.file.minor));
        assert!(devices.eq([(0, 1), (0, 1), (0, 0)]));
    });
}

/// A writer that uses the address space during each write.
struct Busy<'a, F: Fn()> {
    text: String,
    between: &'a F,
}

impl<F: Fn()> Write for Busy<'_, F> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        (self.between)();
        self.text.push_str(text);
        Ok(())
    }
}

fn slow_reader<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let program = fixture.program(&space);
        for number in 0..8 {
            space.mmap(&fixed(AT + number * 0x1_0000, 4 * PAGE)).unwrap();
        }
        let round = Cell::new(0);
        let between = || {
            // The reader's own operations and faults, and mappings that other threads add and
            // remove behind its position.
            round.set(round.get() + 1);
            let at = AT + 0x10_0000 + round.get() % 7 * 0x1_0000;
            space.mmap(&fixed(at, 2 * PAGE)).unwrap();
            program.store(VirtAddr(at), 1).unwrap();
            space.munmap(VirtAddr(at), 2 * PAGE).unwrap();
        };
        let mut out = Busy { text: String::new(), between: &between };
        proc::maps(&space, &Unnamed, &mut out).unwrap();
        assert_eq!(out.text, maps(&space, &Unnamed));
        let mut out = Busy { text: String::new(), between: &between };
        proc::smaps(&space, &Unnamed, &mut out).unwrap();
        assert_eq!(out.text, smaps(&space, &Unnamed));
        // Mappings removed before the reader reaches them are not shown; mappings added behind its
        // position are shown.
        let before = maps(&space, &Unnamed);
        let once = Cell::new(true);
        let between = || {
            if once.replace(false) {
                space.munmap(VirtAddr(AT + 0x1_0000), 4 * PAGE).unwrap();
                space.mmap(&fixed(AT + 0x20_0000, PAGE)).unwrap();
            }
        };
        let mut out = Busy { text: String::new(), between: &between };
        proc::maps(&space, &Unnamed, &mut out).unwrap();
        assert_eq!(out.text, maps(&space, &Unnamed));
        assert_ne!(out.text, before);
        fixture.audit(&[&space]);
    });
}

/// A writer with room for this number of bytes.
struct Short(usize);

impl Write for Short {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 = self.0.checked_sub(text.len()).ok_or(fmt::Error)?;
        Ok(())
    }
}

fn failing_reader<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT, PAGE) }).unwrap();
        space.mmap(&fixed(AT + MIB, PAGE)).unwrap();
        let whole = smaps(&space, &Unnamed).len();
        for room in (0..whole).step_by(7) {
            assert!(proc::smaps(&space, &Unnamed, &mut Short(room)).is_err());
        }
        assert!(proc::smaps(&space, &Unnamed, &mut Short(whole)).is_ok());
        assert!(proc::smaps_rollup(&space, &mut Short(80)).is_err());
    });
}

fn shared_parts<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 64 * PAGE)).unwrap();
        fixture.program(&space).fill(VirtAddr(AT), 6 * PAGE, 1).unwrap();
        let dirty = ["Rss", "Pss", "Pss_Dirty", "Private_Dirty", "Referenced", "Anonymous"];
        let all = dirty.map(|name| (name, 24));
        assert_eq!(area(&space, AT).sizes(), all);
        let child = space.fork().unwrap();
        let grandchild = child.fork().unwrap();
        let shared = [
            ("Rss", 24),
            ("Pss", 8),
            ("Pss_Dirty", 8),
            ("Shared_Dirty", 24),
            ("Referenced", 24),
            ("Anonymous", 24),
        ];
        for space in [&space, &child, &grandchild] {
            // A third of a byte is rounded off for each page, as on Linux.
            let third = shared.map(|(name, size)| (name, size - u64::from(size == 8)));
            assert_eq!(area(space, AT).sizes(), third);
        }
        // Copies are private, and the original has one user fewer.
        fixture.program(&child).store(VirtAddr(AT), 1).unwrap();
        let mixed = area(&child, AT);
        assert_eq!((mixed.kib("Private_Dirty"), mixed.kib("Shared_Dirty")), (4, 20));
        assert_eq!(mixed.kib("Pss"), 4 + 6);
        assert_eq!(area(&space, AT).kib("Pss"), 2 + 6);
        fixture.audit(&[&space, &child, &grandchild]);
    });
}

fn partial_copies<A: Walk>() {
    with_fixture::<A>(4, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
        fixture.program(&space).fill(VirtAddr(AT), 16 * PAGE, 1).unwrap();
        let child = space.fork().unwrap();
        assert_eq!((area(&space, AT).kib("Pss"), area(&child, AT).kib("Pss")), (32, 32));
        fixture.program(&child).fill(VirtAddr(AT), 8 * PAGE, 2).unwrap();
        // 24 mappings of 16 pages: each counts two thirds, and their sum is 16 pages.
        let (parent, young) = (area(&space, AT), area(&child, AT));
        assert_eq!(parent.kib("Pss"), 42);
        assert_eq!(young.kib("Pss"), 32 + 21);
        assert_eq!((young.kib("Private_Dirty"), young.kib("Shared_Dirty")), (32, 32));
        assert_eq!(parent.kib("Shared_Dirty"), 64);
        drop(child);
        assert_eq!(area(&space, AT).kib("Private_Dirty"), 64);
    });
}

fn huge<A: Walk>() {
    with_fixture::<A>(9, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        fixture.program(&space).store(VirtAddr(AT), 1).unwrap();
        assert_eq!(area(&space, AT).kib("AnonHugePages"), 2048);
        assert_eq!(area(&space, AT).kib("Rss"), 2048);
        // ProtNone pages are present nevertheless.
        space.mprotect(VirtAddr(AT), 4 * MIB, Protection::empty()).unwrap();
        let prot_none = area(&space, AT);
        assert_eq!((prot_none.kib("AnonHugePages"), prot_none.kib("Private_Dirty")), (2048, 2048));
        let object = fixture.memfd(2 * MIB);
        map_object(&space, &object, AT + 8 * MIB, 2 * MIB, 0, Sharing::Shared);
        fixture.program(&space).store(VirtAddr(AT + 8 * MIB), 1).unwrap();
        assert_eq!(area(&space, AT + 8 * MIB).kib("ShmemPmdMapped"), 2048);
        let file = fixture.file(2 * MIB);
        map_object(&space, &file, AT + 16 * MIB, 2 * MIB, 0, Sharing::Shared);
        fixture.program(&space).load(VirtAddr(AT + 16 * MIB)).unwrap();
        assert_eq!(area(&space, AT + 16 * MIB).kib("FilePmdMapped"), 2048);
        fixture.audit(&[&space]);
    });
}

fn files<A: Walk>() {
    with_fixture::<A>(2, |fixture| {
        let (space, file) = (fixture.space(), fixture.file(16 * PAGE));
        map_object(&space, &file, AT, 16 * PAGE, 0, Sharing::Shared);
        map_object(&space, &file, AT + MIB, 16 * PAGE, 0, Sharing::Private);
        let program = fixture.program(&space);
        program.load(VirtAddr(AT)).unwrap();
        let clean = area(&space, AT);
        assert_eq!((clean.kib("Private_Clean"), clean.kib("Pss_Dirty")), (clean.kib("Rss"), 0));
        program.store(VirtAddr(AT + PAGE), 1).unwrap();
        assert_eq!(area(&space, AT).kib("Private_Dirty"), 4);
        // The file's page is dirty, in each of its mappings.
        program.load(VirtAddr(AT + MIB)).unwrap();
        let other = area(&space, AT + MIB);
        assert_eq!(other.kib("Shared_Dirty"), 4);
        assert_eq!(other.kib("Shared_Clean") + 4, other.kib("Rss"));
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(area(&space, AT + MIB).kib("Pss_Dirty"), 0);
        assert_eq!(area(&space, AT).kib("Pss_Dirty"), 0);
        // A copy is the program's own.
        program.store(VirtAddr(AT + MIB), 1).unwrap();
        let copied = area(&space, AT + MIB);
        assert_eq!((copied.kib("Anonymous"), copied.kib("Private_Dirty")), (4, 4));
        fixture.audit(&[&space]);
    });
}

fn shared_memory<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT, 16 * PAGE) }).unwrap();
        fixture.program(&space).fill(VirtAddr(AT), 8 * PAGE, 1).unwrap();
        let alone = [
            ("Rss", 32),
            ("Pss", 32),
            ("Pss_Dirty", 32),
            ("Private_Dirty", 32),
            ("Referenced", 32),
        ];
        assert_eq!(area(&space, AT).sizes(), alone);
        let child = space.fork().unwrap();
        // The child has not mapped any page yet.
        assert_eq!(area(&child, AT).sizes(), []);
        fixture.program(&child).load(VirtAddr(AT)).unwrap();
        let seen = area(&child, AT).kib("Rss");
        assert_eq!(area(&child, AT).kib("Pss"), seen / 2);
        let child_area = area(&child, AT);
        assert_eq!(child_area.kib("Shared_Dirty") + child_area.kib("Shared_Clean"), seen);
        assert_eq!(area(&space, AT).kib("Shared_Dirty"), seen);
        assert_eq!(rollup(&child).kib("Pss_Shmem"), seen / 2);
        fixture.audit(&[&space, &child]);
    });
}

fn lazily_freed<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
        let program = fixture.program(&space);
        program.fill(VirtAddr(AT), 16 * PAGE, 1).unwrap();
        space.madvise(VirtAddr(AT), 8 * PAGE, Advice::Free).unwrap();
        let free = area(&space, AT);
        assert_eq!((free.kib("LazyFree"), free.kib("Private_Clean")), (32, 32));
        assert_eq!(free.kib("Referenced"), 32);
        program.store(VirtAddr(AT), 1).unwrap();
        assert_eq!(area(&space, AT).kib("LazyFree"), 28);
        fixture.audit(&[&space]);
    });
}

fn locked<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * PAGE)).unwrap();
        space.mlock(VirtAddr(AT), 4 * PAGE, LockPages::Now).unwrap();
        assert_eq!(area(&space, AT).kib("Locked"), 16);
        let child = space.fork().unwrap();
        assert_eq!((area(&space, AT).kib("Locked"), area(&child, AT).kib("Locked")), (8, 0));
    });
}

fn rolled_up<A: Walk>() {
    with_fixture::<A>(2, |fixture| {
        let space = fixture.space();
        assert_eq!(rollup(&space).sizes(), []);
        assert_eq!((rollup(&space).start, rollup(&space).end), (0, 0));
        space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT + MIB, 16 * PAGE) }).unwrap();
        let child = space.fork().unwrap();
        fixture.program(&space).fill(VirtAddr(AT), 7 * PAGE, 1).unwrap();
        fixture.program(&space).fill(VirtAddr(AT + MIB), 9 * PAGE, 1).unwrap();
        fixture.program(&child).load(VirtAddr(AT + MIB)).unwrap();
        let all = rollup(&space);
        let areas = parse(&smaps(&space, &Unnamed));
        for name in all.names().into_iter().filter(|name| !name.starts_with("Pss_")) {
            let sum: u64 = areas.iter().map(|area| area.kib(name)).sum();
            assert_eq!(all.kib(name), sum, "{name}");
        }
        assert_eq!(all.kib("Pss"), all.kib("Pss_Anon") + all.kib("Pss_Shmem"));
        let line =
            "40000000-40110000 ---p 00000000 00:00 0                                  [rollup]\n";
        assert_eq!(first_line(&all), line);
    });
}

fn told_by_status<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let (space, file) = (fixture.space(), fixture.file(PAGE));
        space.mmap(&fixed(AT, 16 * PAGE)).unwrap();
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT + MIB, 16 * PAGE) }).unwrap();
        let flags = MapFlags::GROWS_DOWN;
        space.mmap(&MapRequest { flags, ..fixed(AT + GIB, 3 * PAGE) }).unwrap();
        map_object(&space, &file, AT + 2 * MIB, PAGE, 0, Sharing::Private);
        let program = fixture.program(&space);
        program.fill(VirtAddr(AT), 5 * PAGE, 1).unwrap();
        program.fill(VirtAddr(AT + MIB), 2 * PAGE, 1).unwrap();
        program.load(VirtAddr(AT + 9 * PAGE)).unwrap();
        program.load(VirtAddr(AT + 2 * MIB)).unwrap();
        space.mlock(VirtAddr(AT), PAGE, LockPages::Now).unwrap();
        assert_eq!(resident(&space), (5, 1, 2));
        let mut text = String::new();
        proc::statm(&space, 17, &mut text).unwrap();
        assert_eq!(text, "36 8 3 17 0 20 0\n");
        let mut text = String::new();
        proc::status(&space, &mut text).unwrap();
        let counts = space.counts();
        let tables = (counts.tables_allocated - counts.tables_freed) * 4;
        let expected = format!(
            "\
VmPeak:\t     144 kB
VmSize:\t     144 kB
VmLck:\t       4 kB
VmPin:\t       0 kB
VmHWM:\t      32 kB
VmRSS:\t      32 kB
RssAnon:\t      20 kB
RssFile:\t       4 kB
RssShmem:\t       8 kB
VmData:\t      68 kB
VmStk:\t      12 kB
VmPTE:\t{tables:>8} kB
VmSwap:\t       0 kB
THP_enabled:\t1
"
        );
        assert_eq!(text, expected);
        // The peak stays until it is reset.
        space.munmap(VirtAddr(AT), 2 * PAGE).unwrap();
        let status = |space: &_| {
            let mut text = String::new();
            proc::status(space, &mut text).unwrap();
            text
        };
        assert!(status(&space).contains("VmPeak:\t     144 kB\nVmSize:\t     136 kB\n"));
        assert!(status(&space).contains("VmHWM:\t      32 kB\nVmRSS:\t      24 kB\n"));
        proc::clear_refs(&space, ClearRefs::PeakResident).unwrap();
        assert!(status(&space).contains("VmHWM:\t      24 kB\nVmRSS:\t      24 kB\n"));
    });
}

fn eligible<A: Walk>() {
    with_fixture::<A>(9, |fixture| {
        let space = fixture.space();
        let possible = |at| area(&space, at).field("THPeligible") == "1";
        space.mmap(&fixed(AT, 2 * MIB)).unwrap();
        space.mmap(&fixed(AT + 9 * MIB, 2 * MIB)).unwrap();
        assert!(possible(AT) && !possible(AT + 9 * MIB));
        space.madvise(VirtAddr(AT), 2 * MIB, Advice::NoHuge).unwrap();
        assert!(!possible(AT));
        // Entries of an object have the order of its index.
        let object = fixture.memfd(8 * MIB);
        map_object(&space, &object, AT + 16 * MIB, 3 * MIB, 2 * MIB, Sharing::Shared);
        map_object(&space, &object, AT + 24 * MIB, 3 * MIB, MIB, Sharing::Shared);
        assert!(possible(AT + 16 * MIB) && !possible(AT + 24 * MIB));
        fixture.memory.folio_policy().set(Order(9), bindery::SizeMode::Madvise);
        let place = Place::Fixed(VirtAddr(AT + 32 * MIB));
        space.mmap(&MapRequest { place, ..fixed(0, 2 * MIB) }).unwrap();
        assert!(!possible(AT + 32 * MIB));
        space.madvise(VirtAddr(AT + 32 * MIB), 2 * MIB, Advice::Huge).unwrap();
        assert!(possible(AT + 32 * MIB));
    });
}
