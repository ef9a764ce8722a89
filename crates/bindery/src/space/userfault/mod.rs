//! The calls of a userfaultfd ([`crate::Userfault`]), and the faults that wait for its handler.
//!
//! | file | contents |
//! |---|---|
//! | `handler` | the handler's side: a userfaultfd and the address space that it serves |
//! | `register` | registers and unregisters ranges |
//! | `wait` | the wait of a fault for its handler |
//! | `events` | messages about changes of the address space |
//! | `pending_events` | the messages of a call, delivered in steps |
//! | `fill`, `copies` | fills pages with copies, zeroes or poison; several copies mapped together |
//! | `shared` | pages of shared memory |
//! | `protect` | write-protection |
//! | `install` | maps the supplied pages |
//! | `moves` | moves pages from another place |

mod copies;
pub(in crate::space) mod events;
mod fill;
mod handler;
mod install;
mod moves;
pub(in crate::space) mod pending_events;
pub(in crate::space) mod protect;
mod register;
pub(in crate::space) mod shared;
mod wait;

pub use fill::{FillMode, FillOrder, FillSource, PartialFill};
pub use handler::UserfaultHandler;
pub use moves::MoveMode;
pub use pending_events::PendingEvents;
pub use protect::WriteProtectMode;
pub(super) use protect::{lift_protection, map_protected_page};
pub(super) use wait::{PolledHandler, Served, awaits_handler, serve_by_userfault};

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::Memory;
use crate::addr::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::error::{Error, NoMemory};
use crate::platform::Platform;
use crate::userfault::{Built, Userfault, UserfaultFeatures, UserfaultScope};
use crate::vma::Vma;

use super::AddressSpace;

impl<'m, P: Platform> AddressSpace<'m, P> {
    /// A new userfaultfd of this address space, with nothing registered (`userfaultfd(2)`).
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::NotBuilt`] in a build without the feature `userfault`.
    pub fn userfault(
        &self,
        features: UserfaultFeatures,
        scope: UserfaultScope,
    ) -> Result<Userfault<'m, P>, Error> {
        new_userfault(self, features, scope)
    }

    /// Wakes the faults that wait in `length` bytes at `start`, so that they check the page again
    /// (`UFFDIO_WAKE`).
    ///
    /// Context: may sleep. Complexity: linear in the number of waiting faults.
    ///
    /// # Errors
    /// [`Error::Unaligned`], [`Error::ZeroLength`], [`Error::OutOfRange`].
    pub fn wake_userfaults(
        &self,
        userfault: &Userfault<'_, P>,
        start: VirtAddr,
        length: u64,
    ) -> Result<(), Error> {
        let range = userfault_range(self, start, length)?;
        userfault.state().wake(self.platform(), range);
        Ok(())
    }

    /// Whether the userfaultfd belongs to this address space.
    ///
    /// Context: any.
    pub fn owns_userfault(&self, userfault: &Userfault<'_, P>) -> bool {
        userfault.state().space() == self.userfaults.get()
    }
}

fn new_userfault<'m, P: Platform>(
    space: &AddressSpace<'m, P>,
    features: UserfaultFeatures,
    scope: UserfaultScope,
) -> Result<Userfault<'m, P>, Error> {
    let built = Built::new().ok_or(Error::NotBuilt)?;
    let memory = space.page_table.memory;
    let make = || {
        let identity = space.userfaults.get_or_make(memory);
        space.userfaults.note(features);
        Userfault::new(built, memory, identity, features, scope)
    };
    memory.retry(|| Ok(make().ok_or(NoMemory)?))
}

/// The number by which userfaultfds identify an address space; 0 before its first userfaultfd. The
/// number is never reused for another address space, so a handle that outlives its address space is
/// harmless.
#[derive(Default)]
pub(super) struct UserfaultIdentity {
    number: AtomicU64,
    /// Whether a userfaultfd subscribed to removals. Never reset.
    hears_of_removals: AtomicBool,
}

impl UserfaultIdentity {
    fn get(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    /// The number, allocated now if the address space has none.
    fn get_or_make<P: Platform>(&self, memory: &Memory<P>) -> u64 {
        let known = self.get();
        if known != 0 {
            return known;
        }
        let new = memory.new_identity();
        let set = self.number.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed);
        set.err().unwrap_or(new)
    }

    /// Records the features of a new userfaultfd.
    fn note(&self, features: UserfaultFeatures) {
        if features.contains(UserfaultFeatures::EVENT_REMOVE) {
            self.hears_of_removals.store(true, Ordering::Relaxed);
        }
    }
}

/// The range of a call, which must consist of whole pages within user space.
fn userfault_range<P: Platform>(
    space: &AddressSpace<'_, P>,
    start: VirtAddr,
    length: u64,
) -> Result<VirtRange, Error> {
    if !start.is_aligned(PAGE_SIZE) || !length.is_multiple_of(PAGE_SIZE) {
        return Err(Error::Unaligned(start));
    }
    if length == 0 {
        return Err(Error::ZeroLength);
    }
    let limit = space.limit();
    let minimum = space.vmas.minimum();
    VirtRange::from_len(start, length)
        .filter(|range| minimum <= range.start() && range.end() <= limit)
        .ok_or(Error::OutOfRange { limit })
}

/// Whether a handler serves the VMA's faults or write-protects the VMA. As on Linux, any
/// userfaultfd of the address space may supply pages.
fn is_served(vma: &Vma) -> bool {
    vma.userfault().is_some_and(|state| !state.is_closed())
}
