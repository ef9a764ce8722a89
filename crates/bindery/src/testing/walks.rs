//! Walks of the reverse map, like those of a reclaimer or a truncation.

use crate::addr::{PAGE_SIZE, PageRange, VirtAddr, VirtRange};
use crate::platform::Platform;
use crate::rmap::{self, HOLD, WalkLocking, WalkProgress, Walked};
use crate::table::look;
use crate::table::look::MappedRun;
use crate::table::zap_except::{Exceptions, Protected, Spared};
use crate::{AddressSpace, Memory, Object};

/// The result of a walk of the reverse map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnonymousWalk {
    /// The number of VMAs that the walk visited.
    pub visited: u64,
    /// The number of pages of the folio that the walk found mapped, including those without
    /// permissions; a page that is mapped twice counts twice.
    pub found: u64,
    /// The folio's count of mappings.
    pub mappings: u64,
}

/// A walk over the mappings of an object that unmaps pages one by one and releases all locks in
/// between. This is a truncation in steps, between which a test can run other calls.
pub struct UnmapWalk<'a, 'm, P: Platform> {
    memory: &'m Memory<P>,
    walk: rmap::ObjectWalk<'a>,
}

impl<P: Platform> core::fmt::Debug for UnmapWalk<'_, '_, P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("UnmapWalk").finish_non_exhaustive()
    }
}

impl<'a, 'm, P: Platform> UnmapWalk<'a, 'm, P> {
    /// A walk for `ranges`, which are in ascending order without overlaps. The caller keeps the
    /// pages from being mapped again during the walk.
    pub fn new(object: &'a Object<'m, P>, ranges: &'a [PageRange]) -> Self {
        Self { memory: object.memory, walk: rmap::ObjectWalk::new(object.state(), ranges) }
    }

    /// Unmaps the next page, or skips a hole. Calls `inside` with the lock of the object's mappings
    /// held. Returns whether the walk is done. The lock is only tried; returns `None` if it is held
    /// for a change of the set of mappings.
    pub fn step(&mut self, mut inside: impl FnMut(VirtAddr)) -> Option<bool> {
        let done = self.walk.hold(self.memory, WalkLocking::Try, &mut |sight, edit| {
            inside(sight.range.start());
            let Some(rest) = sight.page_table.first_part(sight.range, PAGE_SIZE, None) else {
                return WalkProgress { until: sight.range.end(), entries: 1 };
            };
            let except = Exceptions { spared: Spared::Guards, protected: Protected::Forgotten };
            let zapped = edit.zap_sparing(rest, except);
            assert!(zapped.is_ok(), "a huge leaf has lost its deposit");
            WalkProgress { until: rest.end(), entries: HOLD }
        });
        done.ok()
    }

    /// The number of mappings that the walk has visited; those visited twice count twice.
    pub fn visited(&self) -> u64 {
        self.walk.visited()
    }
}

/// Walks the reverse map for the folio of anonymous memory that is mapped at `at`. `None` if the
/// folio is busy. Panics if no folio is mapped there.
pub fn walk_anonymous<P: Platform>(
    space: &AddressSpace<'_, P>,
    at: VirtAddr,
) -> Option<AnonymousWalk> {
    let memory = space.memory();
    let frames = &memory.frames;
    let page = VirtRange::raw(at.0, at.0 + PAGE_SIZE);
    let mut folio = None;
    look::survey(&space.page_table, page, |stretch| {
        if let MappedRun::Pages { folio: Some(there), .. } = stretch.what {
            folio = Some(frames.folio(there).keep().expect("room for a reference"));
        }
    });
    let folio = folio.unwrap_or_else(|| panic!("no folio at {at}"));
    let locked = folio.try_lock();
    let mut found = 0;
    let walked = locked.as_ref().map(|_| {
        rmap::for_each_anonymous_sight(memory, *folio, WalkLocking::Try, |sight, _| {
            look::survey(&sight.page_table, sight.range, |stretch| {
                if let MappedRun::Pages { folio: Some(there), .. } = stretch.what {
                    found += if there == *folio { stretch.range.pages() } else { 0 };
                }
            });
            WalkProgress { until: sight.range.end(), entries: sight.range.pages() }
        })
    });
    let mappings = u64::from(frames.folio(*folio).mappings());
    drop(locked);
    match walked {
        Some(Walked::Visited(visited)) => Some(AnonymousWalk { visited, found, mappings }),
        Some(Walked::NotMapped) => panic!("no anonymous folio is mapped at {at}"),
        Some(Walked::Busy) | None => None,
    }
}
