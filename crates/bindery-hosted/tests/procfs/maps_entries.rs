//! `/proc/self/maps` entry by entry: readers that continue later, and `ioctl(PROCMAP_QUERY)`.

use bindery::Errno;
use bindery::addr::VirtAddr;
use bindery::{MapRequest, Sharing};
use bindery_hosted::{Program, Walk};
use bindery_linux::proc::{self, FileId, Unnamed};

use super::fixture::*;
use crate::support::{GIB, MIB, fixed};

on_every_architecture! {
    a_reader_goes_on_by_address => resumed;
    resident_pages_are_counted_correctly => counted;
    a_query_finds_and_describes_the_mapping => found;
    a_query_that_cannot_be_answered_is_refused => refused;
}

const AT: u64 = GIB;

/// The address of queries.
const QUERY: u64 = 2 * GIB;

fn resumed<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        for number in 0..6 {
            space.mmap(&fixed(AT + number * 0x1_0000, 2 * PAGE)).unwrap();
        }
        let entry = |at: u64| {
            let mut line = String::new();
            let next = proc::maps_entry(&space, &Unnamed, VirtAddr(at), &mut line).unwrap();
            (line, next.map_or(0, |next| next.0))
        };
        let whole = maps(&space, &Unnamed);
        let lines: Vec<_> = whole.split_inclusive('\n').collect();
        let (line, next) = entry(0);
        assert_eq!((&*line, next), (lines[0], AT + 2 * PAGE));
        // Changes before the reader's position have no effect.
        space.munmap(VirtAddr(AT), PAGE).unwrap();
        space.mmap(&fixed(AT - MIB, PAGE)).unwrap();
        let (line, next) = entry(next);
        assert_eq!((&*line, next), (lines[1], AT + 0x1_2000));
        // Mappings removed behind the reader's position are not shown.
        space.munmap(VirtAddr(AT + 0x2_0000), 2 * PAGE).unwrap();
        let (line, next) = entry(next);
        assert_eq!((&*line, next), (lines[3], AT + 0x3_2000));
        let (_, next) = entry(next);
        assert_eq!(entry(next).0, lines[5]);
        assert_eq!(entry(AT + 0x5_2000), (String::new(), 0));
        let mut smaps_line = String::new();
        proc::smaps_entry(&space, &Unnamed, VirtAddr(AT + 0x1_0000), &mut smaps_line).unwrap();
        assert!(smaps_line.starts_with(lines[1]) && smaps_line.contains("\nSize:"));
        assert_eq!(parse(&smaps_line).len(), 1);
    });
}

fn counted<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let program = fixture.program(&space);
        space.mmap(&fixed(AT, 64 * PAGE)).unwrap();
        program.fill(VirtAddr(AT), 40 * PAGE, 1).unwrap();
        // The zero page does not count.
        assert_eq!(program.load(VirtAddr(AT + 50 * PAGE)), Ok(0));
        let before = space.counts();
        assert_eq!(resident(&space), (40, 0, 0));
        assert_eq!(space.counts() - before, bindery::Counts::default(), "nothing was looked at");
        program.store(VirtAddr(AT + 50 * PAGE), 1).unwrap();
        assert_eq!(resident(&space), (41, 0, 0));
        let (memory, file) = (fixture.memfd(8 * PAGE), fixture.file(8 * PAGE));
        map_object(&space, &memory, AT + MIB, 8 * PAGE, 0, Sharing::Shared);
        map_object(&space, &file, AT + 2 * MIB, 8 * PAGE, 0, Sharing::Private);
        for page in 0..4 {
            program.store(VirtAddr(AT + MIB + page * PAGE), 1).unwrap();
            program.load(VirtAddr(AT + 2 * MIB + page * PAGE)).unwrap();
        }
        let (_, of_file, shared) = resident(&space);
        assert!(of_file >= 4 && shared >= 4);
        // A copy of a file's page takes its place.
        program.store(VirtAddr(AT + 2 * MIB), 1).unwrap();
        assert_eq!(resident(&space), (42, of_file - 1, shared));
        let child = space.fork().unwrap();
        let inherited = resident(&child);
        assert!(inherited.0 >= 42);
        space.madvise(VirtAddr(AT), 10 * PAGE, bindery::Advice::DontNeed).unwrap();
        assert_eq!(resident(&space), (32, of_file - 1, shared));
        assert_eq!(resident(&child), inherited);
        // A hole in the object removes pages from both mappings, and both counts drop.
        space.madvise(VirtAddr(AT + MIB), 8 * PAGE, bindery::Advice::Remove).unwrap();
        assert_eq!(resident(&space), (32, of_file - 1, 0));
        assert_eq!(resident(&child).2, 0);
        fixture.audit(&[&space, &child]);
        space.munmap(VirtAddr(AT), 4 * MIB).unwrap();
        assert_eq!(resident(&space), (0, 0, 0));
        let mut status = String::new();
        proc::status(&space, &mut status).unwrap();
        let peak = 4 * (42 + of_file - 1 + shared);
        assert!(status.contains(&format!("VmHWM:\t{peak:>8} kB")), "{status}");
    });
}

/// The words of `struct procmap_query`; halves are joined.
#[derive(Clone, Copy)]
struct Query([u64; 13]);

impl Query {
    fn new(address: u64, flags: u64) -> Self {
        let mut words = [0; 13];
        (words[0], words[1], words[2]) = (104, flags, address);
        Self(words)
    }

    fn with_name(mut self, at: u64, room: u64) -> Self {
        (self.0[10], self.0[11]) = (room, at);
        self
    }

    /// Runs the query. Returns the updated words.
    fn ask<A: Walk>(
        self,
        space: &Space<'_, A>,
        program: &Program<'_, '_, A>,
        naming: &dyn proc::Naming,
    ) -> Result<[u64; 13], Errno> {
        let at = |word: usize| VirtAddr(QUERY + 8 * word as u64);
        for (word, value) in self.0.into_iter().enumerate() {
            program.store(at(word), value).unwrap();
        }
        proc::procmap_query(Some(space), space, QUERY, naming)?;
        Ok(std::array::from_fn(|word| program.load(at(word)).unwrap()))
    }
}

const WRITABLE: u64 = 2;
const SHARED: u64 = 8;
const OR_NEXT: u64 = 16;
const OF_FILE: u64 = 32;

fn found<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let program = fixture.program(&space);
        space.mmap(&fixed(QUERY, 4 * PAGE)).unwrap();
        space.mmap(&fixed(AT, 2 * PAGE)).unwrap();
        let object = fixture.memfd(16 * PAGE);
        map_object(&space, &object, AT + MIB, 2 * PAGE, 3 * PAGE, Sharing::Shared);
        let id = FileId { major: 0xfe, minor: 3, inode: 77 };
        let naming = OneFile { id, path: "/a\nname".to_owned(), stack: 0 };
        let ask = |query: Query| query.ask(&space, &program, &naming);
        let told = ask(Query::new(AT + PAGE, 0)).unwrap();
        assert_eq!(told[3..9], [AT, AT + 2 * PAGE, 3, PAGE, 0, 0]);
        // A name is returned unescaped because it is not part of a line here.
        let told = ask(Query::new(AT, OR_NEXT | SHARED).with_name(QUERY + PAGE, 8)).unwrap();
        assert_eq!(told[3..9], [AT + MIB, AT + MIB + 2 * PAGE, 11, PAGE, 3 * PAGE, 77]);
        assert_eq!((told[9], told[10]), (3 << 32 | 0xfe, 8));
        assert_eq!(program.load(VirtAddr(QUERY + PAGE)).unwrap().to_le_bytes(), *b"/a\nname\0");
        let told = ask(Query::new(AT, OR_NEXT | OF_FILE)).unwrap();
        assert_eq!(told[3], AT + MIB);
        // Anonymous memory has no name.
        assert_eq!(ask(Query::new(AT, 0).with_name(QUERY + PAGE, 8)).unwrap()[10], 0);
    });
}

fn refused<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let program = fixture.program(&space);
        space.mmap(&fixed(QUERY, 4 * PAGE)).unwrap();
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT, PAGE) }).unwrap();
        let ask = |query: Query| query.ask(&space, &program, &Unnamed).map(drop);
        assert_eq!(ask(Query::new(AT - PAGE, 0)), Err(Errno::ENOENT));
        assert_eq!(ask(Query::new(AT + PAGE, WRITABLE)), Err(Errno::ENOENT));
        assert_eq!(ask(Query::new(QUERY, SHARED | OR_NEXT)), Err(Errno::ENOENT));
        assert_eq!(ask(Query::new(AT, 64)), Err(Errno::EINVAL));
        assert_eq!(ask(Query::new(AT, 0).with_name(QUERY + PAGE, 0)), Err(Errno::EINVAL));
        assert_eq!(ask(Query::new(AT, 0).with_name(0, 8)), Err(Errno::EINVAL));
        // "/dev/zero (deleted)" and a zero.
        assert_eq!(ask(Query::new(AT, 0).with_name(QUERY + PAGE, 19)), Err(Errno::ENAMETOOLONG));
        assert_eq!(ask(Query::new(AT, 0).with_name(QUERY + PAGE, 20)), Ok(()));
        assert_eq!(ask(Query::new(AT, 0).with_name(AT - PAGE, 20)), Err(Errno::EFAULT));
        for (size, error) in [(23, Errno::EINVAL), (PAGE + 1, Errno::E2BIG)] {
            let mut query = Query::new(AT, 0);
            query.0[0] = size;
            assert_eq!(ask(query), Err(error));
        }
        let at = |word: u64| VirtAddr(QUERY + 8 * word);
        for (word, value) in [(0, 112), (1, 0), (2, AT), (10, 0), (11, 0), (12, 0), (13, 0)] {
            program.store(at(word), value).unwrap();
        }
        let query = |of| proc::procmap_query(of, &space, QUERY, &Unnamed);
        assert_eq!(query(Some(&space)), Ok(()));
        assert_eq!(query(None), Err(Errno::ESRCH));
        program.store(at(13), 1).unwrap();
        assert_eq!(query(Some(&space)), Err(Errno::E2BIG));
        let nowhere = proc::procmap_query(Some(&space), &space, AT - PAGE, &Unnamed);
        assert_eq!(nowhere, Err(Errno::EFAULT));
    });
}
