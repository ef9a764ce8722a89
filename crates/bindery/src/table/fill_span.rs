//! A locked range in which tables can be created.

use core::mem;
use core::ops::{Deref, DerefMut};

use crate::addr::{Frame, VirtAddr, VirtRange};
use crate::arch::Level;
use crate::platform::Platform;

use super::cursor::Cursor;
use super::locking::Depth;
use super::{NoMemory, PageTable, Table, TablePool};

/// A locked range that an operation fills, and the tables allocated for it.
/// [`PageTable::with_tables`] lends the range. Everything else is a method of the [`Cursor`].
///
/// `fork` and moves fill several places with the tables of one pool, and pass the pool on
/// themselves.
pub(crate) struct FillSpan<'f, 'a, 'm, P: Platform> {
    cursor: &'f mut Cursor<'a, 'm, P>,
    pool: &'f mut TablePool<'m, P>,
}

impl<'a, 'm, P: Platform> Deref for FillSpan<'_, 'a, 'm, P> {
    type Target = Cursor<'a, 'm, P>;

    #[inline(always)]
    fn deref(&self) -> &Cursor<'a, 'm, P> {
        self.cursor
    }
}

impl<'a, 'm, P: Platform> DerefMut for FillSpan<'_, 'a, 'm, P> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Cursor<'a, 'm, P> {
        self.cursor
    }
}

impl<'a, P: Platform> FillSpan<'_, 'a, '_, P> {
    /// As [`Cursor::table_at`], with the tables of this range.
    #[inline(always)]
    pub(crate) fn table_at(
        &mut self,
        addr: VirtAddr,
        level: Level<P::Arch>,
    ) -> Result<Table<'a>, NoMemory> {
        self.cursor.table_at(addr, level, self.pool)
    }

    /// A locked, empty table to deposit, so that a later split of a huge leaf cannot fail.
    #[inline(always)]
    pub(crate) fn take_deposit(&mut self) -> Result<Frame, NoMemory> {
        self.pool.take(Level::PTE, &mut self.cursor.counts)
    }

    /// Returns an unused deposit to the pool.
    #[inline]
    pub(crate) fn return_deposit(&mut self, table: Frame) {
        self.pool.put(table);
    }
}

impl<'m, P: Platform> PageTable<'m, P> {
    /// Locks the level-1 tables of `range` and lends them to `work`. Allocates missing tables and
    /// retries until `work` has all tables that it needs. Called without table locks and outside of
    /// read sections.
    #[inline]
    pub(crate) fn with_tables<R>(
        &self,
        range: VirtRange,
        mut work: impl FnMut(FillSpan<'_, '_, 'm, P>) -> Result<R, NoMemory>,
    ) -> Result<R, NoMemory> {
        let mut pool = TablePool::new(self.memory);
        let result = loop {
            let worked = {
                // As `Edit::unlocked_span`.
                let section = self.read_section();
                let mut cursor = self.unlocked_cursor(&section, range);
                cursor.lock(&section, Depth::Floor(Level::PTE), None);
                work(FillSpan { cursor: &mut cursor, pool: &mut pool })
            };
            match worked {
                Err(NoMemory) if refill(self, &mut pool).is_ok() => {}
                done => break done,
            }
        };
        if !pool.is_empty() {
            empty(self, &mut pool);
        }
        result
    }
}

/// Refills the pool and adds the allocations to the page table's statistics.
#[cold]
#[inline(never)]
fn refill<'m, P: Platform>(
    page_table: &PageTable<'m, P>,
    pool: &mut TablePool<'m, P>,
) -> Result<(), NoMemory> {
    let result = pool.refill();
    page_table.count(&mem::take(&mut pool.counts));
    result
}

/// Empties the pool and adds the frees to the page table's statistics.
#[cold]
#[inline(never)]
fn empty<'m, P: Platform>(page_table: &PageTable<'m, P>, pool: &mut TablePool<'m, P>) {
    pool.free_unused();
    page_table.count(&mem::take(&mut pool.counts));
}
