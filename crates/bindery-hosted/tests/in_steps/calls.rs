//! System calls: their arguments, their effects, and the results that Linux allows.

use bindery_linux::Call;

use super::action::{LARGE, LARGE_PAGES, Provided, Span, What};
use super::model::{CELLS, Kind, Page, Source};
use super::world::{AT, PAGE, World, address};

const ENOMEM: i64 = -12;
const EFAULT: i64 = -14;
const EINVAL: i64 = -22;
/// The errors of all calls.
const ERRORS: [i64; 9] = [ENOMEM, EFAULT, EINVAL, -11, -5, -28, -16, -13, -9];
const DONT_NEED: u64 = 4;
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
    alone: Vec<i64>,
    /// Also, if an answer was an error, or if another call has changed the range.
    otherwise: Vec<i64>,
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
    let of = |span: Span| (AT + span.first * PAGE, span.pages * PAGE);
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
            let large = Span { first: LARGE, pages: LARGE_PAGES };
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
        What::LockAll => (Call::Mlockall, [1, 0, 0, 0, 0, 0]),
        What::UnlockAll => (Call::Munlockall, [0; 6]),
        What::Store(span) => with(Call::Msync, span, 4),
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
        match what {
            What::Map(..) | What::MapLarge => Expected::only(raw(what).1[0] as i64),
            What::Unmap(_) | What::LockAll | What::UnlockAll => Expected::only(0),
            What::Protect(span, _) | What::Unlock(span) | What::Lock(span, true) => {
                Expected::only(mapped_or(span))
            }
            What::Lock(span, false) => {
                let is_sure = accessible(span, false);
                let errors = vec![ENOMEM, -11];
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
                let alone = vec![address(to).0 as i64, EFAULT];
                Expected { alone, otherwise: vec![ENOMEM] }
            }
            What::Advise(span, DONT_NEED) => {
                let pages = &self.model.spaces[by];
                let is_locked =
                    span.all().any(|p| pages.get(&p).is_some_and(|page| page.is_locked));
                Expected::only(if is_locked { EINVAL } else { mapped_or(span) })
            }
            What::Advise(span, advice) if POPULATE.contains(&advice) => {
                if accessible(span, advice == POPULATE[1]) {
                    return Expected { alone: vec![0], otherwise: ERRORS.to_vec() };
                }
                Expected { alone: vec![ENOMEM, EFAULT, EINVAL], otherwise: otherwise() }
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

    /// Applies the effect of a call that has begun. All of it belongs to the first step.
    pub fn apply(&mut self, by: usize, what: What) {
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
                    let is_locked = provided == Provided::Locked;
                    let new = Page { source, reads: true, writes: true, is_locked, own: None };
                    pages.insert(page, new);
                }
                self.disturb(Some(by));
            }
            What::MapLarge => {
                let large = Span { first: LARGE, pages: LARGE_PAGES };
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
            What::Lock(span, _) => change(span, &|page| page.is_locked = true),
            What::Unlock(span) => change(span, &|page| page.is_locked = false),
            What::LockAll => pages.values_mut().for_each(|page| page.is_locked = true),
            What::UnlockAll => pages.values_mut().for_each(|page| page.is_locked = false),
            What::Advise(span, DONT_NEED) => {
                for page in span.all() {
                    let Some(page) = pages.get_mut(&page) else { continue };
                    if page.is_locked {
                        return;
                    }
                    page.own = None;
                }
            }
            What::Advise(..) | What::Store(_) => {}
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
                self.model.punch(object, page..page + 1);
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
