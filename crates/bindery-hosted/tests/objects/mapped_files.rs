//! Files and their mappings. Program writes are saved exactly once and completely; data beyond the
//! end of the file is neither visible nor saved.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use bindery::addr::{VirtAddr, VirtRange};
use bindery::platform::{Cpu, Platform as _};
use bindery::{
    Access, AddressSpace, Error, FaultError, Object, Pager, PagerError, PinTime, Pinned,
    ReadBuffer, Sharing, StoredBytes,
};
use bindery_hosted::{Config, Machine, MemoryFiles, PagerCounts, Program, TlbKind, Walk};

use super::held_pager::stored_content;
use crate::support::kernel::Finished;
use crate::support::objects::{Failing, PAGE, content, memfd, use_object_order};
use crate::support::objects_fixture::{AT, map, with_fixture};
use crate::support::{MIB, audit, fixed, memory_with, options};

on_every_architecture! {
    bytes_beyond_the_end_stay_in_memory_only => behind_the_end;
    storage_beyond_the_end_is_not_seen => garbage;
    unfilled_pages_are_zeroes => short;
    a_file_is_read_to_become_one_folio => collapse_file;
    a_file_written_through_a_mapping_is_saved => saved;
    what_is_written_after_saving_is_saved_again => saved_again;
    a_huge_file_mapping_is_saved_and_cut => huge_file;
    the_last_mapping_saves_what_is_dirty => last_mapping;
    writes_through_a_dropped_pin_are_saved => saved_after_a_pin;
    many_programs_write_while_a_file_is_saved => write_while_saving;
}

fn behind_the_end<A: Walk>() {
    let files = MemoryFiles::new();
    with_fixture::<A>(0, |fixture| {
        let files = &files;
        let file = fixture.memory.file(files, 1, 0).unwrap();
        for (object, kept) in [(memfd(fixture.memory, 0), 7), (file, 0)] {
            object.set_size(PAGE + 100).unwrap();
            let space = fixture.space();
            map(&space, &object, AT, 2 * PAGE, Sharing::Shared).unwrap();
            let program = Program::new(fixture.machine, &space);
            for grow in
                [Object::set_size, |o: &Object<'_, _>, size| o.write(size - 1, &[0]).map(|_| ())]
            {
                object.set_size(PAGE + 100).unwrap();
                program.store(VirtAddr(AT + PAGE + 200), 7).unwrap();
                object.sync(0, u64::MAX).unwrap();
                grow(&object, 2 * PAGE).unwrap();
                // Linux 6.18 makes this data visible in shared memory, but its file systems do not.
                assert_eq!(program.load(VirtAddr(AT + PAGE + 200)), Ok(kept));
                object.set_size(PAGE + 100).unwrap();
                assert_eq!(program.load(VirtAddr(AT + PAGE + 200)), Ok(0));
            }
            object.sync(0, u64::MAX).unwrap();
        }
    });
    assert_eq!(files.content(1), [0; PAGE as usize + 100]);
}

/// A pager that fills whole pages, whatever the file's size.
struct Garbage;

impl Pager for Garbage {
    fn read(&self, _: u64, _: u64, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        into.append_all(0xdd);
        Ok(())
    }

    fn write(&self, _: u64, _: u64, _: &[StoredBytes<'_>]) -> Result<(), PagerError> {
        Ok(())
    }

    fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
        Ok(())
    }

    fn removed(&self, _: u64) {}
}

fn garbage<A: Walk>() {
    for order in [0, 2] {
        with_fixture::<A>(order, |fixture| {
            let file = fixture.memory.file(&Garbage, 1, 3 * PAGE + 8).unwrap();
            let space = fixture.space();
            map(&space, &file, AT, 4 * PAGE, Sharing::Shared).unwrap();
            let program = Program::new(fixture.machine, &space);
            assert_eq!(program.load(VirtAddr(AT + 3 * PAGE)), Ok(0xdddd_dddd_dddd_dddd));
            assert_eq!(program.load(VirtAddr(AT + 3 * PAGE + 8)), Ok(0));
            assert_eq!(program.load(VirtAddr(AT + 4 * PAGE - 8)), Ok(0));
        });
    }
}

/// A pager that reports a complete read but supplies only this number of bytes.
struct Short(usize);

impl Pager for Short {
    fn read(&self, _: u64, _: u64, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        into.append(&vec![0xdd; self.0]);
        Ok(())
    }

    fn write(&self, _: u64, _: u64, _: &[StoredBytes<'_>]) -> Result<(), PagerError> {
        Ok(())
    }

    fn resize(&self, _: u64, _: u64) -> Result<(), PagerError> {
        Ok(())
    }

    fn removed(&self, _: u64) {}
}

fn short<A: Walk>() {
    const PAGES: u64 = 64;
    for (order, filled) in [(0, 0), (0, 100), (2, 0), (2, 100), (2, PAGE as usize + 8)] {
        let config = Config { memory: 4 * MIB, ..Config::default() };
        let (machine, memory) = memory_with::<A>(config);
        use_object_order(&memory, order);
        // Fills all free frames with another program's bytes.
        let other = AddressSpace::new(&memory, options()).unwrap();
        other.mmap(&fixed(AT, 8 * MIB)).unwrap();
        let page = [0xee; PAGE as usize];
        let mut at = AT;
        while other.write_user(VirtAddr(at), &page).is_ok() {
            at += PAGE;
        }
        drop(other);
        let pager = Short(filled);
        let file = memory.file(&pager, 1, PAGES * PAGE).unwrap();
        let space = AddressSpace::new(&memory, options()).unwrap();
        map(&space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
        let mut bytes = vec![1; (PAGES * PAGE) as usize];
        space.read_user(VirtAddr(AT), &mut bytes).unwrap();
        // The pager reports the error again for each call.
        assert!(bytes.iter().all(|byte| [0, 0xdd].contains(byte)), "another program's bytes");
        assert_eq!(bytes[..filled], vec![0xdd; filled]);
        let folio = (PAGE as usize) << order;
        assert_eq!(bytes[filled..folio], vec![0; folio - filled]);
        drop((space, file));
        machine.assert_clean();
    }
}

fn collapse_file<A: Walk>() {
    let pager = Failing::new();
    pager.files.put(1, &vec![3; 3 * MIB as usize]);
    with_fixture::<A>(0, |fixture| {
        let pager = &pager;
        let file = fixture.memory.file(pager, 1, 3 * MIB).unwrap();
        let space = fixture.space();
        map(&space, &file, AT, 3 * MIB, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        program.store(VirtAddr(AT + 7 * PAGE), 8).unwrap();
        let range = VirtRange::from_len(VirtAddr(AT), 2 * MIB).unwrap();
        pager.bad_page.store(100, Relaxed);
        assert!(space.collapse_range(range).is_err());
        fixture.audit(&[&space]);
        pager.never();
        assert_eq!(space.collapse_range(range), Ok(()));
        assert_eq!(fixture.audit(&[&space]).object_pages, 512);
        assert_eq!(program.load(VirtAddr(AT + 7 * PAGE)), Ok(8));
        // Only the dirty pages are still dirty.
        let pages = pager.files.counts().pages_written;
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(pager.files.counts().pages_written, pages + 1);
        program.store(VirtAddr(AT + 8 * PAGE), 9).unwrap();
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(pager.files.content(1), content(&file));
        fixture.audit(&[&space]);
    });
}

fn saved<A: Walk>() {
    let files = MemoryFiles::new();
    files.put(1, &[1; 20 * PAGE as usize + 100]);
    for order in [0, 3] {
        with_fixture::<A>(order, |fixture| {
            let files = &files;
            let file = fixture.memory.file(files, 1, 20 * PAGE + 100).unwrap();
            let space = fixture.space();
            map(&space, &file, AT, 21 * PAGE, Sharing::Shared).unwrap();
            let program = Program::new(fixture.machine, &space);
            assert_eq!(program.load(VirtAddr(AT)), Ok(0x0101_0101_0101_0101));
            let before = files.counts();
            program.store(VirtAddr(AT + 3 * PAGE), 42).unwrap();
            program.store(VirtAddr(AT + 4 * PAGE), 43).unwrap();
            // The file ends before this page.
            program.store(VirtAddr(AT + 20 * PAGE + 200), 44).unwrap();
            assert_eq!(files.counts(), PagerCountsBefore(before).with_reads_of(files.counts()));
            file.sync(0, u64::MAX).unwrap();
            fixture.audit(&[&space]);
            let after = files.counts();
            assert_eq!(
                (after.writes - before.writes, after.pages_written - before.pages_written),
                (2, 3)
            );
            let stored = files.content(1);
            assert_eq!(stored.len() as u64, 20 * PAGE + 100);
            assert_eq!((stored[3 * PAGE as usize], stored[4 * PAGE as usize]), (42, 43));
            assert_eq!(stored[20 * PAGE as usize + 99], 1);
            fixture.audit(&[&space]);
        });
    }
}

/// Counts that may differ only in the reads.
struct PagerCountsBefore(PagerCounts);

impl PagerCountsBefore {
    fn with_reads_of(self, now: PagerCounts) -> PagerCounts {
        PagerCounts { reads: now.reads, pages_read: now.pages_read, ..self.0 }
    }
}

fn saved_again<A: Walk>() {
    let pager = Failing::new();
    with_fixture::<A>(2, |fixture| {
        let pager = &pager;
        let file = fixture.memory.file(pager, 1, 0).unwrap();
        file.set_size(16 * PAGE).unwrap();
        let (one, two) = (fixture.space(), fixture.space());
        map(&one, &file, AT, 16 * PAGE, Sharing::Shared).unwrap();
        map(&two, &file, AT, 16 * PAGE, Sharing::Shared).unwrap();
        let (first, second) =
            (Program::new(fixture.machine, &one), Program::new(fixture.machine, &two));
        let stored = || pager.files.content(1)[5 * PAGE as usize];
        first.store(VirtAddr(AT + 5 * PAGE), 1).unwrap();
        second.store(VirtAddr(AT + 5 * PAGE), 2).unwrap();
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(stored(), 2);
        file.sync(0, u64::MAX).unwrap();
        let pages = pager.files.counts().pages_written;
        for (program, value) in [(&first, 3), (&second, 4)] {
            program.store(VirtAddr(AT + 5 * PAGE), value).unwrap();
            pager.writes_left.store(0, Relaxed);
            assert_eq!(file.sync(0, u64::MAX), Err(Error::InputOutput));
            fixture.audit(&[&one, &two]);
            pager.never();
            file.sync(0, u64::MAX).unwrap();
            assert_eq!(u64::from(stored()), value);
        }
        // Each store writes one page, whatever the folio size.
        assert_eq!(pager.files.counts().pages_written, pages + 2);
        fixture.audit(&[&one, &two]);
    });
}

fn huge_file<A: Walk>() {
    let files = MemoryFiles::new();
    files.put(1, &vec![6; 4 * MIB as usize]);
    with_fixture::<A>(9, |fixture| {
        let files = &files;
        let file = fixture.memory.file(files, 1, 4 * MIB).unwrap();
        let space = fixture.space();
        map(&space, &file, AT, 4 * MIB, Sharing::Shared).unwrap();
        let program = Program::new(fixture.machine, &space);
        assert_eq!(program.load(VirtAddr(AT + MIB)), Ok(0x0606_0606_0606_0606));
        assert_eq!(files.counts().reads, 1);
        program.store(VirtAddr(AT + MIB), 9).unwrap();
        file.sync(MIB, PAGE).unwrap();
        fixture.audit(&[&space]);
        assert_eq!(files.content(1)[MIB as usize], 9);
        program.store(VirtAddr(AT + MIB), 10).unwrap();
        file.set_size(MIB + 3 * PAGE).unwrap();
        fixture.audit(&[&space]);
        assert_eq!(program.load(VirtAddr(AT + MIB)), Ok(10));
        assert_eq!(program.load(VirtAddr(AT + MIB + 3 * PAGE)), Err(FaultError::Bus));
        file.sync(0, u64::MAX).unwrap();
        assert_eq!(files.content(1), content(&file));
        fixture.audit(&[&space]);
    });
}

/// Writes without the page tables, like a device.
fn write_as_a_device<A: Walk>(machine: &Machine<A>, pinned: &Pinned<'_, Machine<A>>, byte: u8) {
    // SAFETY: the window shows the page, which is pinned, and no program writes to it now.
    unsafe { machine.direct_map(pinned.first()).as_ptr().write(byte) };
}

fn saved_after_a_pin<A: Walk>() {
    let files = MemoryFiles::new();
    with_fixture::<A>(0, |fixture| {
        let files = &files;
        let file = fixture.memory.file(files, 1, 2 * PAGE).unwrap();
        let space = fixture.space();
        map(&space, &file, AT, 2 * PAGE, Sharing::Shared).unwrap();
        let pin = |page: u64, access| {
            space.pin(VirtAddr(AT + page * PAGE), 1, access, PinTime::Short).unwrap()
        };
        let pinned = pin(0, Access::Write);
        file.sync(0, 2 * PAGE).unwrap();
        write_as_a_device(fixture.machine, &pinned, 99);
        drop(pinned);
        file.sync(0, 2 * PAGE).unwrap();
        assert_eq!(files.content(1)[0], 99);
        // A reader leaves no page to be saved.
        let writes = files.counts().writes;
        drop(pin(1, Access::Read));
        file.sync(0, 2 * PAGE).unwrap();
        assert_eq!(files.counts().writes, writes);
        // The file exists until its changes are saved, even without holders.
        let pinned = pin(1, Access::Write);
        file.sync(0, 2 * PAGE).unwrap();
        drop((space, file));
        write_as_a_device(fixture.machine, &pinned, 98);
        assert_eq!(files.counts().removed, 0);
        drop(pinned);
        assert_eq!(files.counts().removed, 1);
    });
    assert_eq!(files.content(1)[PAGE as usize], 98);
}

fn last_mapping<A: Walk>() {
    let files = MemoryFiles::new();
    with_fixture::<A>(0, |fixture| {
        let files = &files;
        let file = fixture.memory.file(files, 1, 0).unwrap();
        file.set_size(4 * PAGE).unwrap();
        let space = fixture.space();
        map(&space, &file, AT, 4 * PAGE, Sharing::Shared).unwrap();
        drop(file);
        Program::new(fixture.machine, &space).store(VirtAddr(AT + PAGE), 12).unwrap();
        assert_eq!(files.counts().writes, 0);
        space.munmap(VirtAddr(AT), 4 * PAGE).unwrap();
        assert_eq!((files.counts().writes, files.counts().removed), (1, 1));
    });
    assert_eq!(files.content(1)[PAGE as usize], 12);
}

/// A pager that stores slowly and verifies that the bytes do not change during the call.
#[derive(Default)]
struct Slow(MemoryFiles);

impl Pager for Slow {
    fn read(
        &self,
        file: u64,
        first_page: u64,
        into: &mut ReadBuffer<'_>,
    ) -> Result<(), PagerError> {
        self.0.read(file, first_page, into)
    }

    fn write(
        &self,
        file: u64,
        first_page: u64,
        from: &[StoredBytes<'_>],
    ) -> Result<(), PagerError> {
        let before: Vec<_> = from.iter().map(stored_content).collect();
        for _ in 0..20 {
            thread::yield_now();
        }
        assert!(
            from.iter().map(stored_content).eq(before),
            "somebody has written what is being saved"
        );
        self.0.write(file, first_page, from)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.0.resize(file, size)
    }

    fn removed(&self, file: u64) {
        self.0.removed(file);
    }
}

fn write_while_saving<A: Walk>() {
    const PROGRAMS: u16 = 3;
    const PAGES: u64 = 64;
    let files = Slow::default();
    let config =
        Config { memory: 64 * MIB, cpus: PROGRAMS + 1, tlb: TlbKind::Strict, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_object_order(&memory, 2);
    let file = memory.file(&files, 1, 0).unwrap();
    file.set_size(PAGES * PAGE).unwrap();
    let spaces: Vec<_> =
        (0..PROGRAMS).map(|_| AddressSpace::new(&memory, options()).unwrap()).collect();
    for space in &spaces {
        map(space, &file, AT, PAGES * PAGE, Sharing::Shared).unwrap();
    }
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let finished = Finished(&done);
        let writers: Vec<_> = (0..PROGRAMS)
            .map(|number| {
                let (machine, space, file) = (&machine, &spaces[usize::from(number)], &file);
                scope.spawn(move || {
                    let _cpu = machine.bind(Cpu(number));
                    let program = Program::new(machine, space);
                    for round in 1..400_u64 {
                        // Every program has its own word in every page.
                        let at = round * 13 % PAGES * PAGE + u64::from(number) * 8;
                        if round % 5 == 4 {
                            file.write(at, &round.to_ne_bytes()).unwrap();
                        } else {
                            program.store(VirtAddr(AT + at), round).unwrap();
                        }
                    }
                })
            })
            .collect();
        let (machine, file, done) = (&machine, file.clone(), &done);
        let saver = scope.spawn(move || {
            let _cpu = machine.bind(Cpu(PROGRAMS));
            while !done.load(Relaxed) {
                file.sync(0, u64::MAX).unwrap();
            }
            file.sync(0, u64::MAX).unwrap();
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        drop(finished);
        saver.join().unwrap();
    });
    assert_eq!(files.0.content(1), content(&file));
    audit(&machine, &memory, &spaces.iter().collect::<Vec<_>>());
    for page in 0..PAGES {
        let round = (1..400).rev().find(|round| round * 13 % PAGES == page).unwrap();
        assert_eq!(&content(&file)[(page * PAGE) as usize..][..8], &u64::to_ne_bytes(round));
    }
}
