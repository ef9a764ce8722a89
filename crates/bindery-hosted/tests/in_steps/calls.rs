//! System calls: their arguments, their effects, and the results that Linux allows.

use std::cmp::Ordering;

use bindery_linux::Call;

use super::action::{HEAP, LARGE, LARGE_PAGES, Provided, Span, What};
use super::model::{CELL, CELLS, Kind, Page, Source};
use super::world::{AT, PAGE, World, address};

pub const ENOMEM: i64 = -12;
pub const EFAULT: i64 = -14;
pub const EINVAL: i64 = -22;
pub const EINTR: i64 = -4;
const EACCES: i64 = -13;
/// The errors of all calls.
const ERRORS: [i64; 9] = [ENOMEM, EFAULT, EINVAL, EINTR, EACCES, -11, -5, -28, -16];
const WILL_NEED: u64 = 3;
const DONT_NEED: u64 = 4;
const COLD: u64 = 20;
pub const PAGE_OUT: u64 = 21;
const REMOVE: u64 = 9;
const POPULATE: [u64; 2] = [22, 23];

/// A system call that has begun.
#[derive(Clone, Copy)]
pub struct Made {
    pub by: usize,
    pub what: What,
    /// The time of the call.
    pub born: u64,
    /// The page of an object that the call removes. It was found when the call began, and stays the
    /// same whatever is mapped there later.
    pub hole: Option<(usize, u64)>,
}

/// The results that a call may have.
#[derive(Clone, Debug)]
pub struct Expected {
    /// If nothing interferes.
    pub alone: Vec<i64>,
    /// Also, if an answer was an error, if another call has changed the range, or if a signal came.
    pub otherwise: Vec<i64>,
}

impl Expected {
    fn only(result: i64) -> Self {
        Self { alone: vec![result], otherwise: Vec::new() }
    }

    pub fn allows(&self, result: i64, is_alone: bool) -> bool {
        self.alone.contains(&result) || !is_alone && self.otherwise.contains(&result)
    }
}

/// The raw call.
pub fn raw(what: What) -> (Call, [u64; 6]) {
    let of = |span: Span| {
        (AT + span.first * PAGE + span.head, span.pages * PAGE - span.head - span.tail)
    };
    let with = |call, span, third| {
        let (at, length) = of(span);
        (call, [at, length, third, 0, 0, 0])
    };
    match what {
        What::Map(span, kind, offset, provided) => {
            let (flags, file) = match kind {
                Kind::Anonymous => (0x22, u64::MAX),
                Kind::Private => (2, 3),
                Kind::Shared(object) => (1, 3 + object as u64),
            };
            let more = match provided {
                Provided::None => 0,
                Provided::Populated => 0x8000,
                Provided::Locked => 0x2000,
            };
            let offset = if kind == Kind::Anonymous { 0 } else { offset * PAGE };
            let (at, length) = of(span);
            (Call::Mmap, [at, length, 3, flags | more | 0x10, file, offset])
        }
        What::MapLarge => {
            let large = Span::of(LARGE, LARGE_PAGES);
            raw(What::Map(large, Kind::Anonymous, 0, Provided::None))
        }
        What::Unmap(span) => with(Call::Munmap, span, 0),
        What::Protect(span, protection) => {
            with(Call::Mprotect, span, [0, 1, 3][protection as usize])
        }
        What::Remap(span, to) => {
            let (at, length) = of(span);
            (Call::Mremap, [at, length, length, 3, address(to).0, 0])
        }
        What::Advise(span, advice) => with(Call::Madvise, span, advice),
        What::Lock(span, on_fault) => with(Call::Mlock2, span, on_fault.into()),
        What::Unlock(span) => with(Call::Munlock, span, 0),
        What::LockAll(flags) => (Call::Mlockall, [flags.into(), 0, 0, 0, 0, 0]),
        What::UnlockAll => (Call::Munlockall, [0; 6]),
        What::Break(end) => (Call::Brk, [AT + end * CELL, 0, 0, 0, 0, 0]),
        What::Store(span) => with(Call::Msync, span, 4),
        What::Tell(span, answers) => with(Call::Mincore, span, AT + answers),
        What::Load(_)
        | What::Fill(..)
        | What::Copy(_)
        | What::SwapIn
        | What::SwapInObjects
        | What::Touch(..)
        | What::Read(..)
        | What::Write(..)
        | What::Sync(..) => unreachable!("no system call"),
    }
}

/// Whether the call may begin within a page, unless it begins with one.
fn starts_right(what: What) -> bool {
    match what {
        What::Map(span, ..)
        | What::Unmap(span)
        | What::Protect(span, _)
        | What::Remap(span, _)
        | What::Advise(span, _)
        | What::Store(span)
        | What::Tell(span, _) => span.head == 0,
        _ => true,
    }
}

impl World<'_, '_> {
    /// Whether each page of the span is mapped.
    fn is_mapped(&self, by: usize, span: Span) -> bool {
        span.all().all(|page| self.model.spaces[by].contains_key(&page))
    }

    /// The results that the call may have. Asked before it begins.
    pub fn expected(&self, by: usize, what: What) -> Expected {
        let mapped_or = |span: Span| if self.is_mapped(by, span) { 0 } else { ENOMEM };
        let accessible =
            |span: Span, writes| span.all().all(|page| self.model.find(by, page, writes).is_some());
        let otherwise = || [&[0][..], &ERRORS].concat();
        if !starts_right(what) {
            return Expected::only(EINVAL);
        }
        match what {
            What::Map(..) | What::MapLarge => Expected::only(raw(what).1[0] as i64),
            What::Unmap(_) | What::UnlockAll => Expected::only(0),
            // On Linux, a thread that a signal ends sees no result.
            What::LockAll(_) => Expected { alone: vec![0], otherwise: vec![EINTR] },
            What::Break(end) => Expected::only(self.break_after(by, end) as i64),
            What::Tell(span, answers) => self.expected_answers(by, span, answers),
            What::Protect(span, _) | What::Unlock(span) | What::Lock(span, true) => {
                Expected::only(mapped_or(span))
            }
            What::Lock(span, false) => {
                let is_sure = accessible(span, false);
                let errors = vec![ENOMEM, -11, EINTR];
                match mapped_or(span) {
                    0 if is_sure => Expected { alone: vec![0], otherwise: errors },
                    0 => Expected { alone: errors, otherwise: vec![0] },
                    error => Expected::only(error),
                }
            }
            What::Remap(span, to) => {
                let overlaps = span.first < to + span.pages && to < span.first + span.pages;
                if overlaps {
                    return Expected::only(EINVAL);
                }
                // All mappings of the range move, and the first page must be in one.
                let is_first = self.model.spaces[by].contains_key(&span.first);
                let result = if is_first { address(to).0 as i64 } else { EFAULT };
                let mut alone = vec![result];
                // A mapping that a userfaultfd serves moves only by itself.
                if span.all().any(|page| self.is_served(by, page)) {
                    alone.push(EFAULT);
                }
                Expected { alone, otherwise: vec![ENOMEM] }
            }
            What::Advise(span, DONT_NEED) => Expected::only(self.unlocked_or(by, span)),
            What::Advise(span, COLD) => {
                Expected { alone: vec![self.unlocked_or(by, span)], otherwise: vec![EINTR] }
            }
            What::Advise(span, PAGE_OUT) => {
                Expected { alone: vec![self.unlocked_or(by, span)], otherwise: otherwise() }
            }
            What::Advise(span, 0..=2) => Expected::only(mapped_or(span)),
            What::Advise(span, WILL_NEED) => {
                Expected { alone: vec![mapped_or(span)], otherwise: vec![EINTR] }
            }
            What::Advise(span, REMOVE) => {
                let result = match self.model.spaces[by].get(&span.first) {
                    None => ENOMEM,
                    Some(page) if page.is_locked => EINVAL,
                    Some(Page { source: Source::Anonymous, .. }) => EINVAL,
                    Some(Page { source: Source::Private(_), .. }) => EACCES,
                    Some(Page { source: Source::Shared(..), .. }) => 0,
                };
                Expected { alone: vec![result], otherwise: otherwise() }
            }
            What::Advise(span, advice) if POPULATE.contains(&advice) => {
                let writes = advice == POPULATE[1];
                // The first page without an access decides.
                let refusal = |page| match self.model.spaces[by].get(&page) {
                    None => Some(ENOMEM),
                    Some(found) if !(if writes { found.writes } else { found.reads }) => {
                        Some(EINVAL)
                    }
                    Some(found) if self.model.content(found).is_none() => Some(EFAULT),
                    Some(_) => None,
                };
                let result = span.all().find_map(refusal).unwrap_or(0);
                Expected { alone: vec![result], otherwise: otherwise() }
            }
            What::Store(span) => Expected { alone: vec![mapped_or(span)], otherwise: otherwise() },
            What::Advise(..) => Expected { alone: otherwise(), otherwise: Vec::new() },
            What::Load(_)
            | What::Fill(..)
            | What::Copy(_)
            | What::SwapIn
            | What::SwapInObjects
            | What::Touch(..)
            | What::Read(..)
            | What::Write(..)
            | What::Sync(..) => unreachable!("no system call"),
        }
    }

    /// The result of advice that refuses locked memory.
    fn unlocked_or(&self, by: usize, span: Span) -> i64 {
        let pages = &self.model.spaces[by];
        let is_locked = span.all().any(|p| pages.get(&p).is_some_and(|page| page.is_locked));
        if is_locked {
            EINVAL
        } else if self.is_mapped(by, span) {
            0
        } else {
            ENOMEM
        }
    }

    /// The end of the heap after a call that moves it to this cell.
    fn break_after(&self, by: usize, end: u64) -> u64 {
        let (pages, old) = (&self.model.spaces[by], self.model.heaps[by].end);
        let [old_page, page] = [old, end].map(|cell| cell.div_ceil(CELLS));
        let is_moved = end >= HEAP
            && match page.cmp(&old_page) {
                Ordering::Less => pages.range(page..old_page).next().is_some(),
                Ordering::Equal => true,
                // One page stays free above the heap.
                Ordering::Greater => pages.range(old_page..=page).next().is_none(),
            };
        AT + if is_moved { end } else { old } * CELL
    }

    /// Applies the effect of a call that has begun. All of it belongs to the first step.
    pub fn apply(&mut self, by: usize, what: What) {
        if !starts_right(what) {
            return;
        }
        let locks_new = self.model.heaps[by].locks_new;
        let pages = &mut self.model.spaces[by];
        // Up to the first page that is not mapped.
        let mut change = |span: Span, change: &dyn Fn(&mut Page)| {
            for page in span.all() {
                let Some(page) = pages.get_mut(&page) else { return };
                change(page);
            }
        };
        match what {
            What::Map(span, kind, offset, provided) => {
                for page in span.all() {
                    let of = offset + page - span.first;
                    let source = match kind {
                        Kind::Anonymous => Source::Anonymous,
                        Kind::Private => Source::Private(of),
                        Kind::Shared(object) => Source::Shared(object, of),
                    };
                    let is_locked = provided == Provided::Locked || locks_new;
                    let new = Page { source, reads: true, writes: true, is_locked, own: None };
                    pages.insert(page, new);
                }
                self.disturb(Some(by));
            }
            What::MapLarge => {
                let large = Span::of(LARGE, LARGE_PAGES);
                self.apply(by, What::Map(large, Kind::Anonymous, 0, Provided::None));
            }
            What::Unmap(span) => {
                span.all().for_each(|page| {
                    pages.remove(&page);
                });
                self.disturb(Some(by));
            }
            What::Protect(span, protection) => {
                change(span, &|page| {
                    (page.reads, page.writes) = (protection > 0, protection > 1);
                });
                self.disturb(Some(by));
            }
            What::Remap(span, to) => self.moved(by, span, to),
            What::Break(end) => {
                let now = (self.break_after(by, end) - AT) / CELL;
                let old = std::mem::replace(&mut self.model.heaps[by].end, now);
                let [old, now] = [old, now].map(|cell| cell.div_ceil(CELLS));
                let pages = &mut self.model.spaces[by];
                for page in old..now {
                    let source = Source::Anonymous;
                    let (reads, writes) = (true, true);
                    let new = Page { source, reads, writes, is_locked: locks_new, own: None };
                    pages.insert(page, new);
                }
                pages.retain(|page, _| !(now..old).contains(page));
                self.disturb(Some(by));
            }
            What::Lock(span, _) => {
                change(span, &|page| page.is_locked = true);
                self.disturb(Some(by));
            }
            What::Unlock(span) => {
                change(span, &|page| page.is_locked = false);
                self.disturb(Some(by));
            }
            What::LockAll(flags) => {
                if flags & 1 != 0 {
                    pages.values_mut().for_each(|page| page.is_locked = true);
                }
                self.model.heaps[by].locks_new = flags & 2 != 0;
                self.disturb(Some(by));
            }
            What::UnlockAll => {
                pages.values_mut().for_each(|page| page.is_locked = false);
                self.model.heaps[by].locks_new = false;
                self.disturb(Some(by));
            }
            What::Advise(span, DONT_NEED) => {
                for page in span.all() {
                    let Some(page) = pages.get_mut(&page) else { continue };
                    if page.is_locked {
                        return;
                    }
                    page.own = None;
                }
            }
            What::Advise(..) | What::Store(_) | What::Tell(..) => {}
            What::Load(_)
            | What::Fill(..)
            | What::Copy(_)
            | What::SwapIn
            | What::SwapInObjects
            | What::Touch(..)
            | What::Read(..)
            | What::Write(..)
            | What::Sync(..) => unreachable!("no system call"),
        }
    }

    /// Moves the pages that the space shows at their destinations only.
    fn moved(&mut self, by: usize, span: Span, to: u64) {
        let space = self.space(by);
        let is_there = |page| {
            let at = address(page);
            space.view_mapping(at, |view| view.range().contains(at)).unwrap_or_default()
        };
        let pages = &mut self.model.spaces[by];
        for page in 0..span.pages {
            let (from, to) = (span.first + page, to + page);
            if !is_there(from)
                && let Some(moved) = pages.remove(&from)
            {
                pages.insert(to, moved);
            } else if !is_there(to) {
                // As on Linux, a move that fails may have unmapped its destination.
                pages.remove(&to);
            }
        }
        self.disturb(Some(by));
    }

    /// A system call that begins now.
    pub fn made(&self, by: usize, what: What) -> Made {
        let hole = match what {
            What::Advise(span, REMOVE) => {
                match self.model.spaces[by].get(&span.first).map(|page| page.source) {
                    Some(Source::Shared(object, page)) => Some((object, page)),
                    Some(Source::Anonymous | Source::Private(_)) | None => None,
                }
            }
            _ => None,
        };
        Made { by, what, born: self.model.now, hole }
    }

    /// Checks the result of a call, and applies effects that come with it.
    pub fn returned(&mut self, made: &Made, result: i64, is_alone: bool) {
        let (by, born) = (made.by, made.born);
        match made.what {
            What::Advise(_, REMOVE) if result == 0 => {
                let (object, page) = made.hole.expect("MADV_REMOVE of shared memory");
                self.model.punch(object, page * CELLS..(page + 1) * CELLS);
            }
            What::Store(span) if result == 0 && is_alone => {
                let pages = &self.model.spaces[by];
                let of_file = |page| match pages.get(&page)?.source {
                    Source::Shared(0, of) => Some(of * CELLS..(of + 1) * CELLS),
                    Source::Shared(..) | Source::Anonymous | Source::Private(_) => None,
                };
                self.assert_stored(span.all().filter_map(of_file).flatten(), born);
            }
            _ => {}
        }
    }
}
