//! Supply: inserts filled folios into the page index, which holds them from then on.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use crate::Memory;
use crate::collections::page_tree::PageStretch;
use crate::error::{Error, Failure, NoMemory};
use crate::folio::{FolioIndex, FolioRef, FreshFolio};
use crate::platform::Platform;

use super::ObjectState;
use super::fetch::{Fresh, committed, discard};
use super::in_flight::FlightRecord;

/// Inserts a filled folio into the index, which holds it from then on. For a folio that a read has
/// fetched, returns an additional reference. Discards the folio if one of its pages is present
/// already, if the read was canceled, or if the call fails.
pub(super) fn add<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    Fresh { first, folio }: Fresh<'m, P>,
    read: Option<&FlightRecord>,
) -> Result<Option<FolioRef<'m, P>>, Failure> {
    let mut left = Some(folio);
    let entered = enter(memory, object, (first, &mut left), read);
    if let Some(folio) = left {
        discard(memory, object, folio);
    }
    Ok(entered?.flatten())
}

/// Inserts a folio that the caller filled, and that no other thread knows, into the index of shared
/// memory. Consumes the folio if none of its pages was present; otherwise, and on an error, the
/// caller keeps it. The invalidate lock is held.
///
/// # Errors
/// [`Error::Overcommitted`] if no more may be committed or the quota is used up (`ENOMEM`, as on
/// Linux).
pub(crate) fn supply<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    folio: &mut Option<FreshFolio<'_, P>>,
) -> Result<(), Failure> {
    let Some(order) = folio.as_ref().map(|folio| folio.order) else { return Ok(()) };
    let committed = committed(object, order);
    object.commit(memory, committed).map_err(|_| Error::Overcommitted)?;
    let entered = enter(memory, object, (first, folio), None);
    if folio.is_some() {
        object.uncommit(memory, committed);
    }
    entered?;
    Ok(())
}

/// As [`add`], with the folio for the pages from `first` on. Consumes it if it is inserted.
fn enter<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    (first, fresh): (u64, &mut Option<FreshFolio<'_, P>>),
    read: Option<&FlightRecord>,
) -> Result<Option<Option<FolioRef<'m, P>>>, NoMemory> {
    let frames = &memory.frames;
    let Some(new) = fresh.as_ref() else { return Ok(None) };
    let folio = **new;
    let pages = folio.pages();
    let count = u64::from(pages);
    new.set_owner(object.as_owner(), FolioIndex::new(first));
    // A userfaultfd fills folios before their destination is known.
    frames.folio(folio).exclusive().clear(0, pages);
    let entered = object.pages.change_with_nodes(memory, |index, nodes| {
        // In one step with the check of the index, because a call that drops pages has canceled the
        // read before.
        let stale = read.is_some_and(FlightRecord::is_canceled);
        if stale || index.run(first, count) != PageStretch::Empty(count) {
            return (Ok(None), 0);
        }
        if let Err(error) = index.prepare(first, count, nodes) {
            return (Err(error), 0);
        }
        // No later step can fail. Adds one reference for each page that the index will refer to,
        // before another thread can find the page there. The folio is passed by number, because
        // moving its value through the closure costs 50 instructions a page. SAFETY: 1. `fresh` has
        // the value of this number, and forgets it below if this line was reached, which happens
        // once.
        unsafe { frames.fresh(folio) }.publish(pages);
        index.set(first, folio.head, pages);
        // Held before another thread can drop the pages.
        let kept = read.and_then(|_| frames.folio(folio).keep());
        (Ok(Some(kept)), count as i64)
    });
    if let Ok(Some(_)) = entered {
        let _published = fresh.take().map(FreshFolio::leave);
    }
    entered
}
