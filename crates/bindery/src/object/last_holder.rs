//! The end of an object, when its last holder releases it.
//!
//! A file is saved first, while its last holder is still counted. A lookup during the save finds
//! the object unchanged, and the finder saves it again when it becomes the last holder. Once the
//! object has left the registry's list, its `changes` are held until the pager has been notified.
//! An open in that time waits for them and then creates another object, so a file never has two
//! objects.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;

use crate::Memory;
use crate::addr::PageRange;
use crate::collections::page_tree::PAGE_LIMIT;
use crate::platform::Platform;

use super::ObjectState;
use super::detached_batch::leave_pool;
use super::dropping::{DropPiece, drop_pages};
use super::read_end::{end_reads, wait_for_reads_ahead};
use super::registry::{Leave, Registry};
use super::sync;

/// Removes a holder. The last one frees the object and all its pages. Dirty pages are saved first;
/// a failure loses them, as no holder is left to receive the error. A pager's lack of memory counts
/// as a failure only once reclaim finds nothing more to free.
///
/// # Safety
/// 1. The caller is one of the counted holders and ends its hold.
pub(super) unsafe fn release<P: Platform>(memory: &Memory<P>, node: NonNull<ObjectState>) {
    // SAFETY: the object lives until this call drops the caller's hold (obligation 1).
    if !unsafe { node.as_ref() }.drop_shared_holder() {
        // SAFETY: 1. the caller's obligation 1; its hold has not been dropped.
        unsafe { release_last(memory, node) };
    }
}

/// # Safety
/// 1. As for [`release`].
#[inline(never)]
unsafe fn release_last<P: Platform>(memory: &Memory<P>, node: NonNull<ObjectState>) {
    // SAFETY: the holders together keep one record reference, until `free_record` below.
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
                // A pager that lacks memory is called again after reclaim. The out-of-memory hook
                // is not called, because the program that it ends may be the one in this call.
                let save = || sync::save(memory, object, all, sync::Until::End);
                let _ = memory.retry_without_hook(save);
                // Done before the object leaves, so that an open does not wait for reads that no
                // thread needs.
                wait_for_reads_ahead(memory, object, all);
                saved = Some(found);
            }
        }
    }
    if object.is_last_record() {
        // SAFETY: 1. `is_last_record` has checked this.
        return unsafe { free(memory, node) };
    }
    Registry::of(memory).note_kept(true);
    // SAFETY: 1. this is the record reference of the holders.
    unsafe { free_record(memory, node) };
}

/// Drops the pages of an object that has left and frees its name.
fn take_apart<P: Platform>(memory: &Memory<P>, object: &ObjectState) {
    if object.is_file() {
        end_reads(memory, object);
    }
    let all = PageRange { first: 0, end: PAGE_LIMIT };
    loop {
        // A reclaimer has no hold on the object, only this lock. It may have begun to store pages
        // since the last holder has saved them.
        object.pages.wait_for_writes(memory, all, u64::MAX);
        let is_dropped = object.invalidate_lock.with_write(memory.platform(), |proof| {
            let may_drop = object.pages.ends.no_writes();
            if may_drop {
                drop_pages(memory, object, all, &mut DropPiece::first_of(memory), proof);
            }
            may_drop
        });
        if is_dropped {
            break;
        }
    }
    object.uncommit(memory, object.committed());
    if let Some((pager, file)) = object.file() {
        pager.removed(file);
        leave_pool(memory);
    }
    debug_assert!(object.mappers.is_empty(), "an object without holders is mapped");
    // SAFETY: 1. the only caller has the name from `leave` and calls once.
    unsafe { Registry::of(memory).forget_name(object) };
}

/// Drops a reference to the record of an object; the last one frees it.
///
/// # Safety
/// 1. The caller has a reference to the record and gives it up. The caller is not a holder, or was
///    the last holder and has left.
pub(super) unsafe fn free_record<P: Platform>(memory: &Memory<P>, node: NonNull<ObjectState>) {
    // SAFETY: the caller has a reference to the record (obligation 1).
    if !unsafe { node.as_ref() }.drop_record() {
        return;
    }
    Registry::of(memory).note_kept(false);
    // SAFETY: 1. this was the last reference.
    unsafe { free(memory, node) };
}

/// # Safety
/// 1. The object has left, and the caller has the only reference to its record.
unsafe fn free<P: Platform>(memory: &Memory<P>, node: NonNull<ObjectState>) {
    // SAFETY: the node came from this slab (`object::create`); it has no holder and no weak handle,
    // and is in no list and no tree, so no thread can reach it any longer (the caller's obligation
    // 1). A walker follows a folio to its object only while the object has a holder, or while the
    // folio's lock or the invalidate lock keeps the last holder from getting here.
    unsafe { memory.slab::<ObjectState>().free(&memory.frames, node) };
}
