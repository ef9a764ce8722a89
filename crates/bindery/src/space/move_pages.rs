//! Moves pages between two addresses of one address space, concurrently with faults
//! (`UFFDIO_MOVE`).
//!
//! Both VMAs are locked for reading, as for a fault (`vmas::both` describes how).

use crate::addr::{Order, PAGE_SIZE, VirtAddr, VirtRange};
use crate::arch::{Arch, Level};
use crate::error::{CallError, Error, Failure};
use crate::folio::{FolioRef, HeldFolio, OwnerMark};
use crate::interrupt;
use crate::object::Wait;
use crate::platform::Platform;
use crate::rmap::AnonGroup;
use crate::table::PageTable;
use crate::table::locking::Depth;
use crate::table::mover::pages::{MovePlan, MoveStop, PageMover, move_pages};
use crate::table::publish::publish;

use super::AddressSpace;
use super::folio::{FolioError, split_locked};
use super::sleep::MaySleep;
use crate::space::stack_growth::prepare_group;
use crate::vma::{MappingFlags, Protection, Vma};

/// The reason why a page did not move. The pages before it have moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MoveError {
    /// An argument is wrong, or the mappings cannot exchange pages.
    Invalid,
    /// An address has no mapping, or the source has no page and holes are not allowed.
    Missing,
    /// A page of the destination is present.
    Exists,
    /// A page is shared with another process, or pinned.
    Busy,
    /// The source has a guard or another marker.
    Marked,
    /// Memory for tables ran out.
    OutOfMemory,
    /// The thread is about to be killed.
    Interrupted,
    /// The mappings are being changed.
    TryAgain,
}

impl MoveError {
    /// The error that the caller gets for a page at `at`.
    pub(crate) fn at(self, at: VirtAddr) -> Error {
        match self {
            Self::Invalid => Error::Invalid,
            Self::Missing => Error::NotMapped(at),
            Self::Exists => Error::Exists(at),
            Self::Busy => Error::Busy,
            Self::Marked => Error::Fault(at),
            Self::OutOfMemory => Error::OutOfMemory,
            Self::Interrupted => Error::Interrupted,
            Self::TryAgain => Error::TryAgain,
        }
    }
}

impl CallError for MoveError {
    const OUT_OF_MEMORY: Self = Self::OutOfMemory;
}

/// The ranges of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MoveRequest {
    pub(crate) destination: VirtAddr,
    pub(crate) source: VirtAddr,
    /// The length, in bytes.
    pub(crate) length: u64,
    /// Whether to skip holes in the source and count them as moved
    /// (`UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`).
    pub(crate) allows_holes: bool,
}

/// The caller's conditions on the destination, checked each time that both VMAs are locked.
pub(crate) trait MovePermit {
    /// Whether a call whose event was not yet read is changing the mappings.
    fn is_changing(&self) -> bool;
    /// Whether pages may move to this VMA.
    fn serves(&self, destination: &Vma) -> bool;
    /// Whether pages that a userfaultfd has write-protected stay so in this VMA.
    fn keeps_protection(&self, destination: &Vma) -> bool;
}

/// The number of times that a folio with references is checked again before it counts as busy.
const TRIES: u32 = 64;

/// Moves the pages of the source, in one private anonymous mapping, to the destination, in a
/// private anonymous mapping with the same protection. Moves whole folios and swap entries. Returns
/// the number of moved bytes, and the reason why the rest has not moved.
///
/// Context: may sleep. Complexity: linear in the number of moved pages, and for holes in the number
/// of tables.
pub(crate) fn move_in_space<P: Platform>(
    space: &AddressSpace<'_, P>,
    request: &MoveRequest,
    permit: &impl MovePermit,
) -> (u64, Result<(), MoveError>) {
    let mut call = MoveCall { space, request, permit, moved: 0 };
    let result = if request.is_valid::<P::Arch>(space.vmas.minimum()) {
        space.page_table.memory.outermost(|| call.go_on())
    } else {
        Err(MoveError::Invalid)
    };
    (call.moved, result)
}

impl MoveRequest {
    /// Whether both ranges consist of whole pages that a program may have.
    fn is_valid<A: Arch>(&self, minimum: VirtAddr) -> bool {
        let Self { destination, source, length, .. } = *self;
        let fits = |at: VirtAddr| {
            at.is_aligned(PAGE_SIZE)
                && at >= minimum
                && at.0 < A::USER_END
                && length <= A::USER_END - at.0
        };
        length > 0 && length.is_multiple_of(PAGE_SIZE) && fits(destination) && fits(source)
    }
}

/// A move that may wait for events or for memory and then continues.
struct MoveCall<'c, 'm, P: Platform, M> {
    space: &'c AddressSpace<'m, P>,
    request: &'c MoveRequest,
    permit: &'c M,
    /// The number of moved bytes.
    moved: u64,
}

impl<P: Platform, M: MovePermit> MoveCall<'_, '_, P, M> {
    /// Continues after the moved bytes.
    fn go_on(&mut self) -> Result<(), Failure<MoveError>> {
        let Self { space, request, permit, .. } = *self;
        let mut call = MaySleep::new(space);
        let mut tries = 0;
        loop {
            let MoveRequest { destination, source, .. } = *request;
            let locked = call.vmas.read_both(call.platform(), destination, source);
            let locked = locked.ok_or(MoveError::Missing)?;
            let (destination, source) = locked.vmas();
            check_vmas(request, destination, source, permit)?;
            let Some(group) = destination.group() else {
                // The owner of the destination's pages is decided under the mutex.
                drop(locked);
                prepare_group(space, request.destination)?;
                continue;
            };
            let at = VirtAddr(request.destination.0 + self.moved);
            let from = VirtAddr(request.source.0 + self.moved);
            let what = MovePlan {
                source: from,
                target: at,
                len: request.length - self.moved,
                allows_holes: request.allows_holes,
                owner: OwnerMark::of(AnonGroup::as_owner(Some(group))),
                index: destination.page_offset_of(at),
                source_owner: OwnerMark::of(AnonGroup::as_owner(source.group())),
                source_index: source.page_offset_of(from),
                attributes: destination.flags().attributes().written().get(),
                keeps_protection: permit.keeps_protection(destination),
            };
            let page_table = &call.page_table;
            let (result, done) = move_pages(page_table, &what, |mover| {
                move_between(page_table, mover, source, &mut tries)
            });
            self.moved += done;
            if done > 0 {
                publish(page_table, VirtRange::raw(at.0, at.0 + done));
            }
            let Some(held) = result? else { return Ok(()) };
            drop(locked);
            wait_to_move(&mut call, Wait::Folio(held))?;
        }
    }
}

/// Waits for a folio that could not move.
#[cold]
fn wait_to_move<P: Platform>(
    call: &mut MaySleep<'_, '_, P>,
    wait: Wait,
) -> Result<(), Failure<MoveError>> {
    // A wait for a folio's lock has no other cause of failure.
    drop(call.wait(wait).map_err(|failure| failure.map(|_| MoveError::Busy))?);
    // The thread that uses the folio may hold no lock on it.
    call.platform().relax();
    Ok(interrupt::check(call.platform()).map_err(|_| MoveError::Interrupted)?)
}

/// Moves pages until all have moved, or returns the folio to wait for before the rest can move.
/// Both VMAs are locked for reading. `tries` counts the attempted splits.
fn move_between<P: Platform>(
    page_table: &PageTable<'_, P>,
    mover: &mut PageMover<'_, '_, P>,
    source: &Vma,
    tries: &mut u32,
) -> Result<Option<HeldFolio>, Failure<MoveError>> {
    while !mover.is_done() {
        match mover.step() {
            None => {}
            Some(MoveStop::Missing) => return Err(MoveError::Missing.into()),
            Some(MoveStop::Exists) => return Err(MoveError::Exists.into()),
            Some(MoveStop::Busy) => return Err(MoveError::Busy.into()),
            Some(MoveStop::Marked) => return Err(MoveError::Marked.into()),
            Some(MoveStop::NoMemory) => {
                mover.refill()?;
            }
            Some(MoveStop::Locked(held)) => return Ok(Some(held)),
            Some(MoveStop::Split(at, order)) => {
                *tries += 1;
                if let busy @ Some(_) = split_to_move(page_table, source, at, order, *tries)? {
                    return Ok(busy);
                }
            }
            Some(MoveStop::Longer(_) | MoveStop::Piecemeal) => {
                debug_assert!(false, "the mover handles these itself");
            }
        }
        interrupt::check(page_table.memory.platform()).map_err(|_| MoveError::Interrupted)?;
    }
    Ok(None)
}

/// Splits the folio at `at` into parts of 2^`order` pages, so that some of them can move. Does
/// nothing if the folio has changed. Returns the folio if another thread is using it.
#[cold]
fn split_to_move<P: Platform>(
    page_table: &PageTable<'_, P>,
    source: &Vma,
    at: VirtAddr,
    order: Order,
    tries: u32,
) -> Result<Option<HeldFolio>, Failure<MoveError>> {
    match split_locked(page_table, source, at, order) {
        Err(Failure::NoMemory) => Err(Failure::NoMemory),
        Err(Failure::Refused(FolioError::Busy)) => {
            // A thread that only reads the folio will release its reference.
            let looked_at = folio_to_wait_for(page_table, at).filter(|_| tries < TRIES);
            Ok(Some(looked_at.ok_or(MoveError::Busy)?))
        }
        Ok(()) | Err(Failure::Refused(_)) => Ok(None),
    }
}

/// The folio at `at`, unless the folio is pinned.
fn folio_to_wait_for<P: Platform>(
    page_table: &PageTable<'_, P>,
    at: VirtAddr,
) -> Option<HeldFolio> {
    let frames = &page_table.memory.frames;
    let range = VirtRange::raw(at.0, at.0 + PAGE_SIZE);
    let section = page_table.read_section();
    let mut cursor = page_table.cursor(&section, range, Depth::Floor(Level::PTE));
    let (folio, _) = cursor.folio_at(at)?;
    let folio = frames.folio(folio);
    (folio.pins() == 0).then(|| folio.keep())?.map(FolioRef::into_held)
}

/// Whether pages of the source may become pages of the destination, with errors in Linux's order.
fn check_vmas(
    request: &MoveRequest,
    destination: &Vma,
    source: &Vma,
    permit: &impl MovePermit,
) -> Result<(), MoveError> {
    if permit.is_changing() {
        return Err(MoveError::TryAgain);
    }
    let covers = |vma: &Vma, at: VirtAddr| request.length <= vma.end() - at.0;
    let access = |vma: &Vma| {
        let flags = vma.flags();
        (flags.protection(), flags.key(), flags.contains(MappingFlags::LOCKED))
    };
    let alike = [source, destination].iter().all(|vma| !vma.is_shared() && vma.is_anonymous())
        && covers(source, request.source)
        && covers(destination, request.destination)
        && access(source) == access(destination)
        && source.protection().contains(Protection::WRITE);
    if !alike || !permit.serves(destination) {
        return Err(MoveError::Invalid);
    }
    if [source, destination].iter().any(|vma| vma.has(MappingFlags::REAPED)) {
        // The process is about to end and gets no more pages.
        return Err(MoveError::Interrupted);
    }
    Ok(())
}

/// Moves with simulated answers of a userfaultfd.
#[cfg(any(test, feature = "testing"))]
pub(crate) mod testing {
    use crate::error::{Errno, Operation};

    use super::{AddressSpace, MovePermit, MoveRequest, Platform, VirtAddr, Vma};

    /// A move of pages, and a userfaultfd's answers about the destination.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct PageMove {
        /// The new address of the pages.
        pub destination: VirtAddr,
        /// The old address of the pages.
        pub source: VirtAddr,
        /// The length, in bytes.
        pub length: u64,
        /// Whether holes count as moved.
        pub allows_holes: bool,
        /// Whether the mappings are being changed.
        pub is_changing: bool,
        /// Whether the destination is registered.
        pub is_registered: bool,
        /// Whether write-protected pages stay write-protected.
        pub keeps_protection: bool,
    }

    impl Default for PageMove {
        fn default() -> Self {
            Self {
                destination: VirtAddr(0),
                source: VirtAddr(0),
                length: 0,
                allows_holes: false,
                is_changing: false,
                is_registered: true,
                keeps_protection: true,
            }
        }
    }

    impl MovePermit for PageMove {
        fn is_changing(&self) -> bool {
            self.is_changing
        }

        fn serves(&self, _destination: &Vma) -> bool {
            self.is_registered
        }

        fn keeps_protection(&self, _destination: &Vma) -> bool {
            self.keeps_protection
        }
    }

    /// Moves pages. Returns the number of moved bytes, and the reason why the rest has not moved.
    pub fn move_pages<P: Platform>(
        space: &AddressSpace<'_, P>,
        what: &PageMove,
    ) -> (u64, Result<(), Errno>) {
        let PageMove { destination, source, length, allows_holes, .. } = *what;
        let request = MoveRequest { destination, source, length, allows_holes };
        let (moved, result) = super::move_in_space(space, &request, what);
        let errno = |error: super::MoveError| error.at(source).errno(Operation::Userfault);
        (moved, result.map_err(errno))
    }

    /// Locks the folio mapped at `at` and returns a closure that unlocks the folio. Panics if no
    /// folio is mapped there or if its lock is held.
    pub fn lock_folio<'a, P: Platform>(
        space: &'a AddressSpace<'_, P>,
        at: VirtAddr,
    ) -> impl FnOnce() + 'a {
        let memory = space.memory();
        let held = super::folio_to_wait_for(&space.page_table, at).expect("a folio");
        let kept = held.guard(&memory.frames);
        let locked = kept.try_into_locked().expect("the lock");
        move || drop(locked)
    }
}
