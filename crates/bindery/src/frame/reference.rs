//! References: holders of a folio that neither map nor pin it.
//!
//! Most come from somebody who has one already, or a mapping. A walker that knows no more than the
//! number of a frame (from a list, or since it goes by all memory) takes one *from nothing*:
//!
//! 1. the metadata says which folio the frame is a page of. That is a guess: the folio may be freed
//!    or cut at any time;
//! 2. a reference is added at the head, unless the count is zero ([`count::refer`]). If it was, there
//!    is no folio: free, fresh, frozen, a table, a slab;
//! 3. *now* something stays: a folio with this head. Its metadata was published with the count. If the
//!    guess is not what is there, the frame may belong to something else: the reference goes back. It
//!    may be the last by now, then giving it back frees the folio.
//!
//! What step 3 prevents:
//! 1. CPU A, looking for frame 0x47, reads in its tail: head 0x40, order 4;
//! 2. CPU B unmaps that folio; its frames become a page at 0x40 and a table at 0x47;
//! 3. CPU A takes a reference at 0x40, and would hold the table for a page of a folio.
//!
//! Between, whoever wants the folio for itself sees a reference more than it knows of: a cut says
//! that the folio is busy, a write to a page that was shared copies it. Both may happen at any time.

use core::fmt;
use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Frames;
use super::count::{self, NotThere, REFERENCE, Word, references_in};
use super::folio::{Folio, Freed};
use crate::addr::Frame;
use crate::platform::Platform;

/// What a reference from nothing looks at: the metadata, or loom's.
pub(super) trait Heads {
    type Count: Word<u64>;
    /// The folio that the frame seems to be a page of.
    fn guess(&self, frame: Frame) -> Option<Folio>;
    /// The count of the folio with this head.
    fn count(&self, head: Frame) -> &Self::Count;
    /// The folio with this head, of which the caller has a reference.
    fn held(&self, head: Frame) -> Folio;
}

/// A reference was added to a folio that does not have the frame: it has to go back.
#[derive(Debug)]
pub(super) struct Mistaken(pub(super) Folio);

/// Adds a reference to the folio around `frame`, if there is any on it already.
#[inline]
pub(super) fn from_nothing(heads: &impl Heads, frame: Frame) -> Result<Option<Folio>, Mistaken> {
    let Some(guess) = heads.guess(frame) else { return Ok(None) };
    if !count::refer(heads.count(guess.head)) {
        return Ok(None);
    }
    let folio = heads.held(guess.head);
    if frame.0.wrapping_sub(folio.head.0) < folio.pages() {
        Ok(Some(folio))
    } else {
        Err(Mistaken(folio))
    }
}

impl<P: Platform> Heads for Frames<P> {
    type Count = AtomicU64;

    #[inline]
    fn guess(&self, frame: Frame) -> Option<Folio> {
        self.folio_of(frame)
    }

    #[inline]
    fn count(&self, head: Frame) -> &AtomicU64 {
        &self.meta(head).count
    }

    #[inline]
    fn held(&self, head: Frame) -> Folio {
        debug_assert_eq!(self.meta(head).kind(), super::Kind::Folio, "{head:?} has a count");
        Folio { head, order: self.meta(head).order() }
    }
}

/// A reference, released when this is dropped; the folio that it keeps is neither freed nor cut.
pub(crate) struct Reference<'a, P: Platform> {
    frames: &'a Frames<P>,
    platform: &'a P,
    folio: Folio,
}

impl<'a, P: Platform> Reference<'a, P> {
    pub(super) fn frames(&self) -> &'a Frames<P> {
        self.frames
    }
}

impl<P: Platform> Deref for Reference<'_, P> {
    type Target = Folio;

    fn deref(&self) -> &Folio {
        &self.folio
    }
}

impl<P: Platform> Drop for Reference<'_, P> {
    fn drop(&mut self) {
        self.frames.release(self.platform, self.folio);
    }
}

impl<P: Platform> fmt::Debug for Reference<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reference").field(&self.folio).finish()
    }
}

impl<P: Platform> Frames<P> {
    /// A reference to the folio that `frame` is a page of, whatever the frame is used for meanwhile.
    /// `None` where it is in no folio, in one that only its maker knows, or in one that has too many
    /// references. Two loads and an atomic instruction; takes no lock.
    #[cfg_attr(
        not(any(test, feature = "testing")),
        expect(dead_code, reason = "reclaim will need it")
    )]
    pub(crate) fn try_hold<'a>(
        &'a self,
        platform: &'a P,
        frame: Frame,
    ) -> Option<Reference<'a, P>> {
        match from_nothing(self, frame) {
            Ok(folio) => folio.map(|folio| Reference { frames: self, platform, folio }),
            Err(Mistaken(folio)) => {
                self.release(platform, folio);
                None
            }
        }
    }

    /// Shows a fresh folio to everybody, with `references` references: one for each page that an
    /// object keeps of it. One store.
    #[inline]
    pub(crate) fn publish(&self, folio: Folio, references: u32) {
        debug_assert!(references >= 1 && references <= folio.pages());
        count::publish(&self.meta(folio.head).count, u64::from(references) * REFERENCE);
    }

    /// Adds a reference, unless there are too many; says whether it did. The caller has one, or
    /// knows by a table's lock that a mapping stays.
    #[inline]
    #[must_use]
    pub(crate) fn hold(&self, folio: Folio) -> bool {
        debug_assert_ne!(self.meta(folio.head).count.load(Relaxed), 0, "{folio:?} was free");
        count::refer(&self.meta(folio.head).count)
    }

    /// Takes away a reference; the folio is freed with the last one if nobody maps or pins it. A
    /// reference that the folio does not have is counted in [`Frames::refused`].
    #[inline]
    pub(crate) fn release(&self, platform: &P, folio: Folio) -> Freed {
        self.release_pages(platform, folio, 1)
    }

    /// Takes away `count` references at once, as [`Frames::release`] does with one.
    #[inline]
    pub(crate) fn release_pages(&self, platform: &P, folio: Folio, count: u32) -> Freed {
        let taken = u64::from(count) * REFERENCE;
        let result = count::take(&self.meta(folio.head).count, taken, references_in);
        self.after_taking(platform, folio, result)
    }

    /// Frees the folio if `count` references, the caller's, are all that keeps it.
    #[inline]
    pub(crate) fn release_last(&self, platform: &P, folio: Folio, count: u32) -> Freed {
        if !count::take_all(&self.meta(folio.head).count, u64::from(count) * REFERENCE) {
            return Freed::No;
        }
        self.free(platform, folio.head, folio.order);
        Freed::Yes
    }

    /// Frees the folio after its last was taken away, or counts what was not there.
    #[inline]
    pub(super) fn after_taking(
        &self,
        platform: &P,
        folio: Folio,
        result: Result<bool, NotThere>,
    ) -> Freed {
        match result {
            Ok(false) => Freed::No,
            Ok(true) => {
                self.free(platform, folio.head, folio.order);
                Freed::Yes
            }
            Err(NotThere) => {
                self.refuse();
                Freed::No
            }
        }
    }

    /// How many hold the folio without mapping or pinning it. Old news unless the caller keeps
    /// others out.
    #[inline]
    pub(crate) fn references(&self, folio: Folio) -> u32 {
        references_in(self.meta(folio.head).count.load(Relaxed))
    }
}
