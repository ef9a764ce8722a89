//! Writes whose source stops early, at the end of a file: no page beyond the end stays.

use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{Access, AddressSpace, Object, Resolved, Sharing};
use bindery_hosted::{Config, Machine, MemoryFiles, Program};

use super::held_pager::Io;
use super::mapped_writes::{Fixture, at, with_blocks};
use crate::support::objects::{PAGE, content, memfd, use_object_order};
use crate::support::objects_fixture::{AT, map};
use crate::support::{MIB, audit, memory_with, options};

type A = X86_64<4>;

fn with_file(order: u8, scenario: impl FnOnce(&Object<'_, Machine<A>>, &MemoryFiles)) {
    let (machine, memory) = memory_with::<A>(Config { memory: 64 * MIB, ..Config::default() });
    use_object_order(&memory, order);
    let files = MemoryFiles::new();
    files.put(1, &[1; PAGE as usize]);
    let file = memory.file(&files, 1, PAGE).unwrap();
    scenario(&file, &files);
    assert_eq!(memory.dirty_limit().pages(), 0);
    drop(file);
    audit(&machine, &memory, &[]);
}

#[test]
fn a_write_of_nothing_dirties_nothing() {
    for (order, length) in [(0, 100), (2, 100), (0, 5 * PAGE), (2, 5 * PAGE)] {
        with_file(order, |file, files| {
            // The program's buffer is not mapped.
            assert_eq!(file.write_with(PAGE, length as usize, |_, _, _| 0), Ok(0));
            assert_eq!((file.size(), file.resident_pages()), (PAGE, 0));
            file.sync(0, u64::MAX).unwrap();
            assert_eq!(files.counts().writes, 0);
        });
    }
}

#[test]
fn a_stopped_write_leaves_nothing_behind_it() {
    // The source stops in the first page of five, or before the last page, which is a part.
    for (stop, length) in [(100, 5 * PAGE as usize), (PAGE as usize, PAGE as usize + 100)] {
        for order in [0, 2] {
            with_file(order, |file, files| {
                let some = |done: usize, _, length: usize| length.min(stop.saturating_sub(done));
                assert_eq!(file.write_with(PAGE, length, some), Ok(stop));
                assert_eq!((file.size(), file.resident_pages()), (PAGE + stop as u64, 1));
                file.sync(0, u64::MAX).unwrap();
                // The remote side writes to the pages after the end.
                files.put(1, &[3; 4 * PAGE as usize]);
                file.size_changed(4 * PAGE).unwrap();
                let written = PAGE as usize + stop;
                assert_eq!(content(file)[written..], vec![3; 4 * PAGE as usize - written]);
            });
        }
    }
}

#[test]
fn a_write_of_nothing_extends_nothing() {
    let (_machine, memory) = memory_with::<A>(Config { memory: 64 * MIB, ..Config::default() });
    let object = memfd(&memory, 0);
    assert_eq!(object.write_with(2 * PAGE, 1, |_, _, _| 0), Ok(0));
    assert_eq!(object.size(), 0);
}

/// A copy of a private mapping is none of the file's pages.
#[test]
fn no_private_write_asks_the_pager() {
    with_blocks(0, |fixture| {
        let Fixture { machine, memory, file, pager, .. } = fixture;
        let space = AddressSpace::new(memory, options()).unwrap();
        map(&space, file, AT, 4 * PAGE, Sharing::Private).unwrap();
        let program = Program::new(machine, &space);
        program.store(at(0), 1).unwrap();
        space.clear_soft_dirty().unwrap();
        program.store(at(0), 2).unwrap();
        assert_eq!(program.load(at(0)), Ok(2));
        assert_eq!(pager.asked(Io::MakeWritable), []);
        assert_eq!(memory.dirty_limit().pages(), 0);
        audit(machine, memory, &[&space, &fixture.space]);
    });
}

/// As for anonymous memory: a write to a copy that no other process maps takes one entry of one
/// locked table.
#[test]
fn a_copy_is_written_in_place() {
    with_blocks(0, |fixture| {
        let Fixture { machine, memory, file, .. } = fixture;
        let space = AddressSpace::new(memory, options()).unwrap();
        map(&space, file, AT, 4 * PAGE, Sharing::Private).unwrap();
        let program = Program::new(machine, &space);
        program.store(at(0), 1).unwrap();
        assert_eq!(program.load(at(1)), Ok(0));
        let child = space.fork().unwrap();
        machine.on_cpu(Cpu(1), || drop(child));
        let before = space.counts();
        assert_eq!(space.fault(at(0), Access::Write), Ok(Resolved::MadeWritable));
        let cost = space.counts() - before;
        assert_eq!((cost.tables_locked, cost.entries_written), (1, 1), "{cost:?}");
        assert_eq!(program.load(at(0)), Ok(1));
        // A page of the file itself is copied.
        assert_eq!(space.fault(at(1), Access::Write), Ok(Resolved::Copied));
        audit(machine, memory, &[&space, &fixture.space]);
    });
}
