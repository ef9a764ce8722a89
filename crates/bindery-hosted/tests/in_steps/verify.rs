//! The comparison of the machine with the model.

use std::collections::BTreeMap;

use bindery::arch::Absent;
use bindery::{MappingFlags, PageRunContent, Protection};

use super::action::{Cells, LARGE, LARGE_PAGES, SMALL, Span, Way, What};
use super::calls::PAGE_OUT;
use super::model::{CELL, CELLS, Cell, MOST_PAGES, Source};
use super::world::{AT, PAGE, World, address};
use crate::support::audit;

/// The content that an entry refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    /// The process's own copy, in memory.
    Own,
    /// The process's own copy, in swap.
    Swapped,
    Object,
    Zero,
}

/// The pages of the arena that calls use.
fn window() -> impl Iterator<Item = u64> {
    let end = LARGE + LARGE_PAGES;
    (0..SMALL).chain(LARGE..LARGE + 8).chain(end - 8..end)
}

/// Compares one cell. All of its bytes are the same.
pub fn assert_cell(bytes: &[u8], expected: Cell, place: impl FnOnce() -> String) {
    let Some(value) = expected else { return };
    if bytes.iter().any(|byte| *byte != value) {
        panic!("{}: {:x?}... instead of {value:#x}", place(), &bytes[..4]);
    }
}

impl World<'_, '_> {
    /// The entries of a process.
    pub fn entries(&self, by: usize) -> BTreeMap<u64, Seen> {
        let (space, mut seen) = (self.space(by), BTreeMap::new());
        let (mut at, end) = (address(0), address(LARGE + LARGE_PAGES));
        let mut add = |at: u64, length: u64, what| {
            let first = (at - AT) / PAGE;
            seen.extend((first..first + length / PAGE).map(|page| (page, what)));
        };
        while let Some(next) = space.view_mapping(at, |view| {
            if view.range().start() < end {
                view.for_each_run(view.range(), |run| {
                    let what = match run.content() {
                        PageRunContent::Pages { folio: Some(folio), .. } => {
                            if folio.is_of_object() { Seen::Object } else { Seen::Own }
                        }
                        PageRunContent::Pages { folio: None, .. } => Seen::Zero,
                        PageRunContent::Absent(Absent::Swap { .. }) => Seen::Swapped,
                        PageRunContent::Absent(other) => panic!("an entry is {other:?}"),
                    };
                    add(run.range().start().0, run.range().len(), what);
                });
            }
            view.range().end()
        }) {
            at = next;
        }
        seen
    }

    /// Learns which pages have been copied for a process, and finds copies that were lost.
    pub fn observe(&mut self) {
        for by in 0..self.model.spaces.len() {
            let seen = self.entries(by);
            let pages: Vec<u64> = self.model.spaces[by].keys().copied().collect();
            for number in pages {
                let page = &self.model.spaces[by][&number];
                let seen = seen.get(&number).copied();
                let is_own = matches!(seen, Some(Seen::Own | Seen::Swapped));
                // A copy that failed may have written no cell of the page.
                let is_zero = |own: &[Cell; CELLS as usize]| {
                    own.iter().all(|cell| cell.is_none_or(|value| value == 0))
                };
                match (page.source, &page.own) {
                    (Source::Private(_), None) if is_own => {
                        let content = self.model.content(page);
                        assert!(content.is_some(), "page {number} of {by}: a copy behind the end");
                        self.model.spaces[by].get_mut(&number).unwrap().own = content;
                    }
                    (Source::Private(_), Some(_)) => {
                        assert!(is_own, "page {number} of {by}: a copy was lost");
                    }
                    (Source::Anonymous, Some(own)) if !is_own && !is_zero(own) => {
                        panic!("page {number} of {by}: its content was lost ({seen:?})");
                    }
                    (Source::Anonymous, _) => assert_ne!(seen, Some(Seen::Object)),
                    (Source::Shared(..), _) => {
                        assert!(matches!(seen, None | Some(Seen::Object)), "{number}: {seen:?}");
                    }
                    (Source::Private(_), None) => {}
                }
            }
        }
    }

    /// Compares the contents of all mapped pages, and disturbs nothing.
    pub fn peek(&self) {
        let mut bytes = [0; PAGE as usize];
        for (by, pages) in self.model.spaces.iter().enumerate() {
            let space = self.space(by);
            space.enter();
            for number in window() {
                if self.machine.read_user(space.root(), address(number), &mut bytes, Err).is_err() {
                    continue;
                }
                let content = pages.get(&number).filter(|page| page.reads);
                let Some(content) = content.and_then(|page| self.model.content(page)) else {
                    panic!("page {number} of process {by} is accessible")
                };
                for (cell, expected) in content.into_iter().enumerate() {
                    let at = cell * CELL as usize;
                    let place = || format!("cell {cell} of page {number} of process {by}");
                    assert_cell(&bytes[at..at + CELL as usize], expected, place);
                }
            }
        }
    }

    /// The auditor runs while nothing is in flight: the server answers everything first.
    pub fn audit(&mut self) {
        // It holds a page.
        self.spare = None;
        while self.server.serve() {}
        self.with(|| {
            // A read settles the answers, although it may fail, and leaves no read ahead.
            let mut bytes = vec![0; (MOST_PAGES * PAGE) as usize];
            let _ = self.objects[0].read(0, &mut bytes);
            while self.server.serve() {}
            let _ = self.objects[0].read(0, &mut bytes);
            self.memory.wait_for_swap_writes().unwrap();
            self.memory.drop_clean_pages();
        });
        let spaces: Vec<_> = (0..self.model.spaces.len()).map(|by| self.space(by)).collect();
        audit(self.machine, self.memory, &spaces);
    }

    /// All waits are over, so answers of the pager and of the device wake no task. The pager is kind.
    pub fn assert_none_waits(&mut self) {
        let files = self.server.files;
        files.keep_reads(true);
        self.objects[0].read_ahead(0, MOST_PAGES * PAGE);
        self.block(0, What::UnlockAll);
        self.block(0, What::MapLarge);
        // Zeroes would not go to the device.
        self.block(0, What::Fill(Cells { first: LARGE * CELLS, count: CELLS }, 1));
        self.block(0, What::Advise(Span::of(LARGE, 1), PAGE_OUT));
        // The device is to read the page, and the fault is dropped.
        self.memory.drop_clean_pages();
        self.begin(0, What::Touch(LARGE, true));
        if !self.flights.is_empty() {
            self.advance(0, Way::Poll);
        }
        let flights = std::mem::take(&mut self.flights);
        self.with(|| drop(flights));
        assert!(self.server.device.waiting() > 0, "nothing is read from the device");
        let before = self.machine.unparks();
        while self.server.serve() {}
        assert_eq!(self.machine.unparks(), before, "a wait that is over is still counted");
        files.keep_reads(false);
    }

    /// Compares the mappings and the counts.
    pub fn compare_counts(&self) {
        for (by, pages) in self.model.spaces.iter().enumerate() {
            let (space, mut mapped) = (self.space(by), BTreeMap::new());
            space.for_each_mapping(|mapping| {
                let first = (mapping.range.start().0 - AT) / PAGE;
                let reads = mapping.protection.contains(Protection::READ);
                let writes = mapping.protection.contains(Protection::WRITE);
                let is_locked = mapping.flags.contains(MappingFlags::LOCKED);
                let all = first..first + mapping.range.len() / PAGE;
                mapped.extend(all.map(|page| (page, (reads, writes, is_locked))));
            });
            let expected: BTreeMap<_, _> = pages
                .iter()
                .map(|(number, page)| (*number, (page.reads, page.writes, page.is_locked)))
                .collect();
            assert_eq!(mapped, expected, "the mappings of process {by}");
            let seen = self.entries(by);
            let count = |of| seen.values().filter(|seen| **seen == of).count() as u64;
            let resident = space.resident();
            assert_eq!(
                (resident.anonymous, resident.file + resident.shared),
                (count(Seen::Own), count(Seen::Object)),
                "the resident pages of process {by}"
            );
        }
    }

    /// Compares everything that a process can read, and both objects. The pager is kind.
    pub fn read_all(&self) {
        let mut bytes = vec![0; PAGE as usize];
        for by in 0..self.model.spaces.len() {
            let space = self.space(by);
            for number in window() {
                let read = self.with(|| space.read_user(address(number), &mut bytes));
                let expected = self.model.find(by, number, false);
                assert_eq!(read.is_ok(), expected.is_some(), "page {number} of {by}: {read:?}");
                for (cell, expected) in expected.into_iter().flatten().enumerate() {
                    let at = cell * CELL as usize;
                    let place = || format!("cell {cell} of page {number} of process {by}");
                    assert_cell(&bytes[at..at + CELL as usize], expected, place);
                }
            }
        }
        for (number, object) in self.objects.iter().enumerate() {
            let content = &self.model.objects[number];
            assert_eq!(object.size(), content.size * CELL, "the size of object {number}");
            let mut bytes = vec![0; (content.size * CELL) as usize];
            let read = self.with(|| object.read(0, &mut bytes));
            assert_eq!(read, Ok(bytes.len()));
            for (cell, bytes) in bytes.chunks(CELL as usize).enumerate() {
                assert_cell(bytes, content.cells[cell], || format!("cell {cell} of {number}"));
            }
        }
    }

    /// Compares cells that a process has read.
    pub fn check_load(&self, by: usize, cells: Cells, into: &[u8], done: std::ops::Range<u64>) {
        for index in done {
            let cell = cells.first + index;
            let Some(page) = self.model.find(by, cell / CELLS, false) else {
                panic!("process {by} has read page {}", cell / CELLS)
            };
            let at = (index * CELL) as usize;
            let expected = page[(cell % CELLS) as usize];
            assert_cell(&into[at..at + CELL as usize], expected, || {
                format!("cell {cell} as read by {by}")
            });
        }
    }

    /// Compares cells that were read from an object.
    pub fn check_read(&self, object: usize, cells: Cells, into: &[u8], done: std::ops::Range<u64>) {
        let content = &self.model.objects[object];
        for index in done {
            let cell = cells.first + index;
            assert!(cell < content.size, "cell {cell} is behind the end of object {object}");
            let at = (index * CELL) as usize;
            let bytes = &into[at..at + CELL as usize];
            assert_cell(bytes, content.cells[cell as usize], || {
                format!("cell {cell} as read from object {object}")
            });
        }
    }

    /// Compares stored cells of the file that have not changed since `time`.
    pub fn assert_stored(&self, cells: impl Iterator<Item = u64>, time: u64) {
        let (stored, content) = (self.server.files.files.content(1), &self.model.objects[0]);
        for cell in cells.filter(|cell| *cell < content.size) {
            if !content.is_unchanged_since(cell, time) {
                continue;
            }
            let at = (cell * CELL) as usize;
            let bytes = stored.get(at..at + CELL as usize).unwrap_or(&[0; CELL as usize]);
            assert_cell(bytes, content.cells[cell as usize], || format!("stored cell {cell}"));
        }
    }
}
