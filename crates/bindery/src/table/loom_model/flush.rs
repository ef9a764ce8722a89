//! Flushes that follow the release of the lock, and tables that are carried away from lockers.
//!
//! The model has one more CPU, which only caches: its TLB allows stores to every page until a
//! flush. Each call that revokes a permission checks that TLB when it returns.

use std::sync::atomic::Ordering::Relaxed;
use std::vec::Vec;

use crate::sync::model::sync::atomic::Ordering;

use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::arch::{Arch, Level, Tiny};
use crate::frame::pending::{self, Last};
use crate::table::locking::{self, Depth, LockTree, Node};

use super::cpu::Cpu;
use super::world::{Life, Omit, ROOT, count, index_of, page, pages};
use super::{explore, hold, without};

impl Cpu {
    /// `Platform::invalidate` of the pages from `first` to `end`.
    fn flush(&self, first: u64, end: u64) {
        let bits = (first..end).fold(0, |bits, page| bits | 1 << page);
        self.world.tlb.fetch_and(!bits, Ordering::SeqCst);
    }

    /// Asserts the guarantee of each call that unmaps page `number` or revokes its write
    /// permission.
    fn promise(&self, number: u64) {
        let allows = self.world.tlb.fetch_or(0, Ordering::SeqCst) & 1 << number != 0;
        assert!(!allows, "a TLB still allows what the call has revoked");
    }

    /// Removes the permission to write page `number`, as `mprotect` does and as a call that saves a
    /// file does, with the flush after the unlock. `rest` is the work elsewhere that the call has
    /// yet to do before the flush.
    fn narrow_and(&self, number: u64, rest: impl FnOnce()) {
        let (omit, mut marked) = (self.world.omit, None);
        self.in_section(|locks| {
            let cover =
                locking::lock_range(self, pages(number, 1), Depth::Floor(Level::PTE), locks);
            if locks.is_pending() && omit != Omit::Honor {
                self.flush(number, number + 1);
            }
            if cover.level > Level::PTE {
                return;
            }
            let table = self.table(cover.table);
            let narrowed = |inside: &mut super::world::Inside| {
                core::mem::replace(&mut inside.narrowed[index_of(page(number), Level::PTE)], true)
            };
            if table.inside(narrowed) {
                return;
            }
            marked = Some(cover.table);
            match omit {
                Omit::Mark => {}
                Omit::Count => table.pending.store(1, Ordering::Relaxed),
                _ => pending::raise(&table.pending),
            }
        });
        rest();
        if let Some(frame) = marked {
            self.flush(number, number + 1);
            match omit {
                Omit::Mark => {}
                Omit::Count => self.table(frame).pending.store(0, Ordering::Release),
                _ => {
                    let table = self.table(frame);
                    if pending::lower(&table.pending) == Last::Yes {
                        table.set_life(Life::Freed);
                    }
                }
            }
        }
        self.promise(number);
    }

    fn narrow(&self, number: u64) {
        self.narrow_and(number, || {});
    }

    /// As `mprotect` of a range that may have no table: empty entries are passed over without a
    /// lock, unless their table is locked or pending.
    fn narrow_past(&self, number: u64) {
        let passed = self.in_section(|locks| {
            let mut node = Node { table: ROOT, level: Tiny::ROOT };
            while node.level > Level::PTE
                && let Some(table) = self.child(node, node.level.index_of(page(number)))
            {
                node = node.child(table);
            }
            if node.level == Level::PTE {
                return false;
            }
            if self.world.omit != Omit::Settle && !locking::has_no_pending_flush(self, node.table) {
                let span = node.level.span();
                let start = page(number).align_down(span);
                let slot = VirtRange::raw(start.0, start.0 + span);
                locking::lock_range(self, slot, Depth::Floor(node.level), locks);
                if locks.is_pending() {
                    self.flush(number, number + 1);
                }
            }
            true
        });
        if passed {
            self.promise(number);
        } else {
            self.narrow(number);
        }
    }

    /// As a truncation: removes the table of pages 0 to 3, and flushes before the parent's lock is
    /// released.
    fn punch(&self) {
        let mut gathered = Vec::new();
        self.in_section(|locks| {
            let range = pages(0, 4);
            let cover = locking::lock_range(self, range, Depth::Edges, locks);
            if let Some(table) = self.detach(cover, range.start()) {
                let node = cover.child(table);
                self.gather_subtree(node, Level::new(u8::MAX), &mut gathered);
                self.flush(0, 4);
            }
        });
        (0..4).for_each(|page| self.promise(page));
        self.finish(gathered);
    }

    /// Moves a page from X to Y, and more pages elsewhere; the locks are released before the flush.
    fn shift(&self, from: u64, to: u64) {
        let source = pages(from, 1);
        self.world.moving.begin(source);
        let mut marked = Vec::new();
        self.in_section(|locks| {
            let (one, other) = (source.into(), pages(to, 1).into());
            let [source, target] = locking::lock_both_ranges(self, [one, other], Level::PTE, locks);
            assert_eq!((source.level, target.level), (Level::PTE, Level::PTE));
            for node in [source, target] {
                pending::raise(&self.table(node.table).pending);
                marked.push(node.table);
            }
            self.table(target.table)
                .inside(|inside| inside.arrived[index_of(page(to), Level::PTE)] = true);
        });
        self.flush(from, from + 1);
        self.world.moving.end();
        for table in marked {
            assert_eq!(pending::lower(&self.table(table).pending), Last::No);
        }
        self.promise(from);
    }

    /// As a truncation that removes the page that has moved from `from` to `to`, if it is present.
    /// Afterwards no TLB leads to the page, not even from its old address.
    fn take(&self, from: u64, to: u64) {
        let taken = self.in_section(|locks| {
            let cover = locking::lock_range(self, pages(to, 1), Depth::Floor(Level::PTE), locks);
            if locks.is_pending() {
                self.flush(to, to + 1);
                let moving = self.world.moving.source();
                if let Some(source) = moving.filter(|_| self.world.omit != Omit::OldPlace) {
                    let first = source.start().0 >> PAGE_SHIFT;
                    self.flush(first, first + source.pages());
                }
            }
            self.table(cover.table).inside(|inside| {
                core::mem::replace(&mut inside.arrived[index_of(page(to), Level::PTE)], false)
            })
        });
        if taken {
            self.flush(to, to + 1);
            self.promise(from);
            self.promise(to);
            count(&self.world.seen.restarts);
        }
    }

    /// A move of the table of `from` by a mover that does not hold the VMA for writing, and
    /// therefore also locks the table that it carries.
    fn carry(&self, from: VirtRange, to: VirtRange) {
        self.in_section(|locks| {
            let floor = if self.world.omit == Omit::LockCarried { Level::PMD } else { Level::PTE };
            let [source, target] =
                locking::lock_both_ranges(self, [from.into(), to.into()], floor, locks);
            let index = target.level.index_of(to.start());
            if self.child(target, index).is_some() {
                return;
            }
            let Some(table) = self.detach(source, from.start()) else { return };
            self.tell_place(table, to.start());
            self.install(target, to.start(), table);
        });
    }
}

#[test]
fn two_equal_revocations_both_wait_for_flushes() {
    hold([|cpu| cpu.narrow(1), |cpu| cpu.narrow(1)], 0);
}

#[test]
fn a_flusher_lowers_no_mark_but_its_own() {
    hold([|cpu| cpu.narrow(1), |cpu| cpu.narrow(2), |cpu| cpu.narrow(1)], 0);
}

#[test]
fn a_revocation_at_a_detached_table_waits() {
    hold([|cpu| cpu.punch(), |cpu| cpu.narrow_past(1)], 0);
    hold([|cpu| cpu.punch(), |cpu| cpu.narrow(1)], 0);
}

#[test]
fn a_detached_pending_table_is_freed_once_later() {
    hold([|cpu| cpu.narrow(1), |cpu| cpu.punch()], 0);
    hold([|cpu| cpu.narrow(1), |cpu| cpu.narrow(2), |cpu| cpu.punch()], 0);
}

#[test]
fn a_page_taken_after_a_move_is_unmapped() {
    let seen = explore(Omit::Nothing, [|cpu| cpu.shift(1, 5), |cpu| cpu.take(1, 5)], |_| {});
    assert!(seen.restarts.load(Relaxed) > 0);
    // A second move, with a different source, follows immediately. An idle third CPU bounds the
    // number of preemptions, because exploring all interleavings of two CPUs takes hours.
    explore(
        Omit::Nothing,
        [
            |cpu| {
                cpu.shift(1, 5);
                cpu.shift(2, 6);
            },
            |cpu| cpu.take(1, 5),
            |_| {},
        ],
        |_| {},
    );
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a TLB still allows what the call has revoked")]
fn flushing_only_its_own_range_misses_the_source() {
    without(Omit::OldPlace, [|cpu| cpu.shift(1, 5), |cpu| cpu.take(1, 5)]);
}

#[test]
fn two_flushes_waiting_for_tables_both_end() {
    // Each CPU has a mark in one table, and locks the other CPU's table before it flushes.
    hold(
        [
            |cpu| cpu.narrow_and(1, || cpu.operate(pages(5, 1))),
            |cpu| cpu.narrow_and(5, || cpu.operate(pages(1, 1))),
        ],
        2,
    );
}

#[test]
fn a_late_locker_of_a_moved_table_restarts() {
    let seen = explore(
        Omit::Nothing,
        [|cpu| cpu.operate(pages(1, 1)), |cpu| cpu.carry(pages(0, 4), pages(8, 4))],
        |world| assert_eq!(world.visits(), 1),
    );
    assert!(seen.restarts.load(Relaxed) > 0);
    // There and back again.
    explore(
        Omit::Nothing,
        [
            |cpu| cpu.operate(pages(1, 1)),
            |cpu| cpu.carry(pages(0, 4), pages(8, 4)),
            |cpu| cpu.carry(pages(8, 4), pages(0, 4)),
        ],
        |world| assert_eq!(world.visits(), 1),
    );
}

#[test]
#[should_panic(expected = "a TLB still allows what the call has revoked")]
fn without_a_mark_the_next_returns_early() {
    without(Omit::Mark, [|cpu| cpu.narrow(1), |cpu| cpu.narrow(1)]);
}

#[test]
#[should_panic(expected = "a TLB still allows what the call has revoked")]
fn ignoring_a_mark_returns_too_early() {
    without(Omit::Honor, [|cpu| cpu.narrow(1), |cpu| cpu.narrow(1)]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a TLB still allows what the call has revoked")]
fn a_flag_is_cleared_by_the_wrong_flusher() {
    without(Omit::Count, [|cpu| cpu.narrow(1), |cpu| cpu.narrow(2), |cpu| cpu.narrow(1)]);
}

#[test]
#[should_panic(expected = "a TLB still allows what the call has revoked")]
fn passing_an_empty_entry_unchecked_returns_early() {
    without(Omit::Settle, [|cpu| cpu.punch(), |cpu| cpu.narrow_past(1)]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "a TLB still allows what the call has revoked")]
fn clearing_without_release_hides_the_lock() {
    without(Omit::ReleaseClear, [|cpu| cpu.punch(), |cpu| cpu.narrow_past(1)]);
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "ausality violation")]
fn freeing_a_pending_table_races_the_flusher() {
    without(Omit::KeepPending, [|cpu| cpu.narrow(1), |cpu| cpu.punch()]);
}

#[test]
#[should_panic(expected = "wrote to an old address")]
fn without_a_second_descent_moved_tables_are_written() {
    without(
        Omit::SecondDescent,
        [|cpu| cpu.operate(pages(1, 1)), |cpu| cpu.carry(pages(0, 4), pages(8, 4))],
    );
}

#[test]
#[cfg_attr(shuttle, ignore = "it fails only under loom, or rarely, or in another way")]
#[should_panic(expected = "ausality violation")]
fn moving_an_unlocked_table_races_an_operation() {
    without(
        Omit::LockCarried,
        [|cpu| cpu.operate(pages(1, 1)), |cpu| cpu.carry(pages(0, 4), pages(8, 4))],
    );
}
