//! The end of an object, with its last holder.
//!
//! A file is saved first, while its last holder still is one. A lookup during the save finds the
//! object unchanged, and the finder saves it again when it is the last holder. Once the object has
//! left the list, its `changes` are held until the pager has been notified. So an open in between
//! waits for them, and then makes another object: a file never has two.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crate::Memory;
use crate::addr::PageRange;
use crate::collections::page_tree::PAGE_LIMIT;
use crate::platform::Platform;

use super::ObjectState;
use super::dropping::{DropPiece, drop_pages};
use super::read_end::{end_reads, wait_for_reads_ahead};
use super::registry::{Leave, Registry};
use super::sync;

/// Removes a holder. The last one frees the object and all its pages. Dirty pages are saved first;
/// a failure loses them, as no holder is left to receive the error. A pager that lacks memory has
/// failed only once reclaim finds no more.
///
/// # Safety
/// 1. The caller is one of the holders counted, and gives that up.
pub(super) unsafe fn release<P: Platform>(memory: &Memory<P>, node: NonNull<ObjectState>) {
    // SAFETY: the object lives until this call gives up the caller's holder (obligation 1).
    if !unsafe { node.as_ref() }.drop_shared_holder() {
        // SAFETY: 1. the caller's obligation 1: it has not been given up.
        unsafe { release_last(memory, node) };
    }
}

/// # Safety
/// 1. As of [`release`].
#[inline(never)]
unsafe fn release_last<P: Platform>(memory: &Memory<P>, node: NonNull<ObjectState>) {
    // SAFETY: the holders keep a record, until `free_record` below.
    let object = unsafe { node.as_ref() };
    let mut saved = None;
    loop {
        let leave = || {
            // SAFETY: 1. the caller's obligation 1; the loop ends with the holder.
            let left = unsafe { Registry::of(memory).leave(object, saved) };
            if let Leave::Left = left {
                take_apart(memory, object);
            }
            left
        };
        let left = if object.name.name().is_some() {
            object.changes.with_write(memory.platform(), leave)
        } else {
            leave()
        };
        match left {
            Leave::Shared => return,
            Leave::Left => break,
            Leave::Unsaved(found) => {
                let all = PageRange { first: 0, end: PAGE_LIMIT };
                // A pager that lacks memory is called again, after reclaim. No program is ended for
                // it: its end may be this call.
                let save = || sync::save(memory, object, all, sync::Until::End);
                let _ = memory.retry_without_hook(save);
                // Before the object leaves: an open must not wait for reads that nothing needs.
                wait_for_reads_ahead(memory, object, all);
                saved = Some(found);
            }
        }
    }
    if object.is_last_record() {
        // SAFETY: 1. `is_last_record` checked it.
        return unsafe { free(memory, node) };
    }
    Registry::of(memory).note_kept(true);
    // SAFETY: 1. that of the holders.
    unsafe { free_record(memory, node) };
}

/// Drops the pages of an object that has left, and frees its name.
fn take_apart<P: Platform>(memory: &Memory<P>, object: &ObjectState) {
    if object.is_file() {
        end_reads(memory, object);
    }
    // A reclaimer has no holder, only this lock.
    object.invalidate_lock.with_write(memory.platform(), |proof| {
        let all = PageRange { first: 0, end: PAGE_LIMIT };
        drop_pages(memory, object, all, &mut DropPiece::first_of(memory), proof);
    });
    object.uncommit(memory, object.committed());
    if let Some((pager, file)) = object.file() {
        pager.removed(file);
    }
    debug_assert!(object.mappers.is_empty(), "an object without holders is mapped");
    // SAFETY: 1. the only caller has it from `leave`, and calls once.
    unsafe { Registry::of(memory).forget_name(object) };
}

/// Releases the record of an object; the last release frees it.
///
/// # Safety
/// 1. The caller keeps the record, and gives that up. It is not a holder, or was the last one,
///    which has left.
pub(super) unsafe fn free_record<P: Platform>(memory: &Memory<P>, node: NonNull<ObjectState>) {
    // SAFETY: the caller keeps the record (obligation 1).
    if !unsafe { node.as_ref() }.drop_record() {
        return;
    }
    Registry::of(memory).note_kept(false);
    // SAFETY: 1. it was the last.
    unsafe { free(memory, node) };
}

/// # Safety
/// 1. The object has left, and its record is kept by nothing but the caller.
unsafe fn free<P: Platform>(memory: &Memory<P>, node: NonNull<ObjectState>) {
    // SAFETY: the node came from this slab (`object::create`); it has no holder and no weak handle,
    // and is in no list and no tree, so no thread can reach it any more (the caller's obligation
    // 1). A walker follows a folio to its object only with a holder of the object's.
    unsafe { memory.slab::<ObjectState>().free(&memory.frames, node) };
}
