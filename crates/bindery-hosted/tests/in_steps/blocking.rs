//! Blocking calls. In their sleeps the pager and the device answer.

use bindery::Access;
use bindery::addr::VirtAddr;
use bindery_linux as linux;

use super::action::{Cells, What};
use super::calls::{EINVAL, Made, raw};
use super::flight::bytes;
use super::model::{CELL, CELLS, Page, Source, filled};
use super::world::{AT, World, address};

impl World<'_, '_> {
    /// Runs a call that may sleep, and that a signal may end.
    fn blocking<R>(&self, what: What, work: impl FnOnce() -> R) -> R {
        self.send_signals();
        let result = self.with(work);
        if self.take_back_signals(what) {
            self.killed.set(self.killed.get() + 1);
        }
        result
    }

    /// The failed answers so far, and the blocking calls during which a signal came.
    fn failures(&self) -> u64 {
        self.failed() + self.killed.get()
    }

    /// Makes a call that returns when it is done.
    pub fn block(&mut self, by: usize, what: What) {
        let (space, failed) = (self.space(by), self.failures());
        let at = |cells: Cells| VirtAddr(AT + cells.first * CELL);
        let length = |cells: Cells| (cells.count * CELL) as usize;
        match what {
            What::Load(cells) => {
                let mut into = vec![0; length(cells)];
                let read = self.blocking(what, || space.read_user(at(cells), &mut into));
                self.apply_fillings();
                self.observe();
                match read {
                    Ok(()) => self.check_load(by, cells, &into, 0..cells.count),
                    Err(error) => {
                        let is_right = self.accessible(by, cells, false) < cells.count;
                        assert!(is_right || self.failures() > failed, "a copy fails: {error}");
                    }
                }
            }
            What::Fill(cells, value) => {
                let from = bytes(cells, value);
                let written = self.blocking(what, || space.write_user(at(cells), &from));
                self.apply_fillings();
                let most = self.accessible(by, cells, true);
                let (has_failed, is_done) = (self.failures() > failed, written.is_ok());
                assert!(is_done || most < cells.count || has_failed, "a copy fails: {written:?}");
                assert!(!is_done || most == cells.count, "a copy writes a page without right");
                if is_done || !has_failed {
                    for index in 0..most {
                        let value = Some(filled(value, index));
                        self.model.store(by, cells.first + index, value);
                    }
                } else {
                    self.forget(by, cells, most);
                }
            }
            What::Copy(copied) => {
                let other = self.space(self.other(copied));
                let (here, there) = (at(copied.here), VirtAddr(AT + copied.there * CELL));
                let bytes = copied.here.count * CELL;
                let result = self.blocking(what, || {
                    if copied.is_from_other {
                        space.copy_from(here, other, there, bytes)
                    } else {
                        space.copy_to(here, other, there, bytes)
                    }
                });
                self.apply_fillings();
                let done = result.map_or_else(|error| error.copied, |()| bytes) / CELL;
                self.copied(by, copied, 0..done, true);
                self.observe();
                let is_reached = done < copied.here.count && self.is_copied(by, copied, done);
                assert!(!is_reached || self.failures() > failed, "a copy fails: {result:?}");
            }
            What::SwapIn => {
                let back = self.blocking(what, || space.swap_in_area(&self.area));
                self.apply_fillings();
                assert!(back.is_ok() || self.failures() > failed, "a swap-in fails: {back:?}");
            }
            What::SwapInObjects => {
                let back = self.blocking(what, || self.memory.swap_in_objects(&self.area));
                self.apply_fillings();
                assert!(back.is_ok() || self.failures() > failed, "a swap-in fails: {back:?}");
            }
            What::Touch(page, writes) => {
                let access = if writes { Access::Write } else { Access::Read };
                let resolved = self.blocking(what, || space.fault(address(page), access));
                self.apply_fillings();
                self.observe();
                let is_right = self.model.find(by, page, writes).is_some() == resolved.is_ok();
                let has_failed = resolved.is_err() && self.failures() > failed;
                assert!(is_right || has_failed, "page {page}: {resolved:?}");
            }
            What::Read(object, cells) => {
                let mut into = vec![0; length(cells)];
                let object_read = &self.objects[object];
                let read = self.blocking(what, || object_read.read(cells.first * CELL, &mut into));
                self.apply_fillings();
                let has_failed = self.failures() > failed;
                let done = read.map_or(0, |bytes| bytes as u64 / CELL);
                self.check_read(object, cells, &into, 0..done);
                let left = self.model.objects[object].size.saturating_sub(cells.first);
                let is_whole = done == left.min(cells.count);
                assert!(is_whole && read.is_ok() || has_failed, "a read: {read:?}");
            }
            What::Write(object, cells, value, _) => {
                let from = bytes(cells, value);
                let object_written = &self.objects[object];
                let written =
                    self.blocking(what, || object_written.write(cells.first * CELL, &from));
                self.apply_fillings();
                self.observe();
                let done = written.map_or(0, |bytes| bytes as u64 / CELL);
                self.write(object, cells.first, value, 0..done);
                let is_whole = done == cells.count;
                assert!(is_whole || self.failures() > failed, "a write: {written:?}");
            }
            What::Sync(object, cells) => {
                let synced = self.blocking(what, || {
                    self.objects[object].sync(cells.first * CELL, cells.count * CELL)
                });
                self.apply_fillings();
                let has_failed = self.failures() > failed;
                assert!(synced.is_ok() || has_failed, "a sync fails: {synced:?}");
                if synced.is_ok() && !has_failed {
                    self.assert_stored(cells.first..cells.first + cells.count, self.model.now);
                }
            }
            _ => {
                let ((call, arguments), expected) = (raw(what), self.expected(by, what));
                let made = self.made(by, what);
                let mut answers = match what {
                    What::Tell(span, at) => Some(self.answers(by, span, at)),
                    _ => None,
                };
                let result = self.blocking(what, || linux::call(self.caller(by), call, arguments));
                self.apply_fillings();
                self.apply(by, what);
                self.observe();
                let is_alone = self.failures() == failed;
                assert!(
                    expected.allows(result, is_alone),
                    "{what:?} returns {result} (alone: {is_alone}): {expected:?}"
                );
                let made = Made { born: self.model.now, ..made };
                self.returned(&made, result, is_alone);
                if let Some(answers) = &mut answers
                    && result != EINVAL
                {
                    self.allow_answers(by, answers);
                    self.forget_answers(by, answers);
                    if result == 0 {
                        self.check_answers(by, answers, true);
                    }
                }
            }
        }
    }

    /// Notes that a copy has ended at some page: each cell is written or not.
    pub fn forget(&mut self, by: usize, cells: Cells, most: u64) {
        let all = || (cells.first..cells.first + most).map(|cell| (cell, cell / CELLS));
        let is_private = |page: &Page| matches!(page.source, Source::Private(_));
        for (cell, page) in all() {
            if !is_private(&self.model.spaces[by][&page]) {
                self.model.store(by, cell, None);
            }
        }
        // Now the copies of the file's pages are known.
        self.observe();
        for (cell, page) in all() {
            let page = &self.model.spaces[by][&page];
            if is_private(page) && page.own.is_some() {
                self.model.store(by, cell, None);
            }
        }
    }

    /// The number of cells from the first on that an access reaches.
    pub fn accessible(&self, by: usize, cells: Cells, writes: bool) -> u64 {
        let is_found =
            |index: &u64| self.model.find(by, (cells.first + index) / CELLS, writes).is_some();
        (0..cells.count).take_while(is_found).count() as u64
    }
}
