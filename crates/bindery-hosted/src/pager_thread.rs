//! Threads that work for a pager ([`bindery::Platform::works_for_pager`]).

use std::cell::Cell;

thread_local! {
    static FOR_PAGER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread works for a pager.
pub(crate) fn is_one() -> bool {
    FOR_PAGER.get()
}

/// Runs `work` as a thread that works for a pager.
pub fn for_pager<R>(work: impl FnOnce() -> R) -> R {
    let before = FOR_PAGER.replace(true);
    let result = work();
    FOR_PAGER.set(before);
    result
}
