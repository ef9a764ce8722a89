//! Supply: inserts filled folios into the page index, which holds them from then on.

use crate::Memory;
use crate::collections::page_tree::PageStretch;
use crate::error::{Error, Failure, NoMemory};
use crate::folio::{Folio, FolioIndex, FolioRef};
use crate::platform::Platform;

use super::ObjectState;
use super::fetch::{Fresh, committed, give_back};
use super::in_flight::Record;

/// Inserts a filled folio into the index, which holds it from then on. For a folio that a read
/// fetched, returns another reference. Discards the folio if one of its pages is present already,
/// if the read was canceled, or if the call fails.
pub(super) fn add<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    fresh: &Fresh,
    read: Option<&Record>,
) -> Result<Option<FolioRef<'m, P>>, Failure> {
    match enter(memory, object, fresh, read) {
        Ok(Some(kept)) => Ok(kept),
        Ok(None) => {
            give_back(memory, object, fresh.folio);
            Ok(None)
        }
        Err(NoMemory) => {
            give_back(memory, object, fresh.folio);
            Err(Failure::NoMemory)
        }
    }
}

/// Inserts a folio that the caller filled, and that no other thread knows, into the index of shared
/// memory. Returns whether none of its pages was present; if false, and on an error, the caller
/// keeps the folio. The invalidate lock is held.
///
/// # Errors
/// [`Error::Overcommitted`] if no more may be committed, or the quota is used up (`ENOMEM`, as on
/// Linux).
pub(crate) fn supply<P: Platform>(
    memory: &Memory<P>,
    object: &ObjectState,
    first: u64,
    folio: Folio,
) -> Result<bool, Failure> {
    let committed = committed(object, folio.order);
    object.commit(memory, committed).map_err(|_| Error::Overcommitted)?;
    let entered = enter(memory, object, &Fresh { first, folio }, None);
    if !matches!(entered, Ok(Some(_))) {
        object.uncommit(memory, committed);
    }
    Ok(entered.map(|entered| entered.is_some())?)
}

/// As [`add`]; on `None` or an error, the caller keeps the folio.
fn enter<'m, P: Platform>(
    memory: &'m Memory<P>,
    object: &ObjectState,
    fresh: &Fresh,
    read: Option<&Record>,
) -> Result<Option<Option<FolioRef<'m, P>>>, NoMemory> {
    let frames = &memory.frames;
    let Fresh { first, folio } = *fresh;
    let pages = folio.pages();
    let count = u64::from(pages);
    frames.fresh(folio).set_owner(object.as_owner(), FolioIndex::new(first));
    // A userfaultfd fills folios before their destination is known.
    frames.folio(folio).exclusive().clear(0, pages);
    object.pages.change_with_nodes(memory, |index, nodes| {
        // In one step with the check of the index: a call that drops pages has canceled the read
        // before.
        let stale = read.is_some_and(Record::is_canceled);
        if stale || index.run(first, count) != PageStretch::Empty(count) {
            return (Ok(None), 0);
        }
        if let Err(error) = index.prepare(first, count, nodes) {
            return (Err(error), 0);
        }
        // No step can fail any more. Takes one reference for each page that the index will refer
        // to, before another thread finds it there.
        frames.fresh(folio).publish(pages);
        index.set(first, folio.head, pages);
        // Before another thread can drop the pages.
        let kept = read.and_then(|_| frames.folio(folio).keep());
        (Ok(Some(kept)), count as i64)
    })
}
