//! Copies of bytes between a caller's buffer and the frames of an object.
//!
//! Programs may read and write the same pages at the same time, through their own tables. So the
//! copies use [`Platform::read_bytes`] and [`Platform::write_bytes`], which create no references. A
//! kernel implements them by special instructions. The provided versions use aligned 64-bit
//! atomics, and a store of fewer bytes changes no neighboring byte. (Linux copies without that
//! care; Rust calls such a race undefined.)
//!
//! ```text
//! words   |. . . . . b b b|b b b b b b b b|b b b b b b b b|b b . . . . . .|
//!          exchanged       stored          stored          exchanged
//! ```

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::addr::{Frame, PAGE_SIZE};
use crate::platform::Platform;

const WORD: usize = size_of::<u64>();
const WORDS: usize = PAGE_SIZE as usize / WORD;

/// The address of the byte at `offset` from the beginning of `first`, across consecutive frames.
///
/// # Safety
/// 1. The frames from `first` to the byte, or to the exclusive end, are one block or folio of the
///    memory.
#[inline]
pub(crate) unsafe fn place<P: Platform>(platform: &P, first: Frame, offset: usize) -> NonNull<u8> {
    // SAFETY: the frames are in one range (the caller's obligation 1), so their bytes are
    // consecutive in the direct map (obligation 1 of `Platform`, and `Frames::new` checked where
    // two ranges touch).
    unsafe { platform.direct_map(first).add(offset) }
}

/// Reads from `offset` on, counted from the beginning of `first`, across consecutive frames.
///
/// # Safety
/// 1. The frames that contain the bytes are one block or folio of the memory.
/// 2. They are not freed during the call and belong to programs or to an object: their bytes are
///    accessed only by atomics or by [`Platform::read_bytes`] and [`Platform::write_bytes`].
#[inline]
pub(crate) unsafe fn read<P: Platform>(platform: &P, first: Frame, offset: usize, into: &mut [u8]) {
    // SAFETY: 1. the caller's obligation 1, and the direct map shows these frames; other code
    // accesses the bytes by atomics or by the platform's means (the caller's obligation 2). `into`
    // is the caller's own.
    unsafe { platform.read_bytes(place(platform, first, offset), into) }
}

/// Writes from `offset` on, counted from the beginning of `first`, across consecutive frames.
///
/// # Safety
/// 1. As for [`read`].
/// 2. As for [`read`].
/// 3. No pager has borrowed the bytes ([`crate::StoredBytes`]).
#[inline]
pub(crate) unsafe fn write<P: Platform>(platform: &P, first: Frame, offset: usize, from: &[u8]) {
    // SAFETY: as in `read`; no other code relies on the old bytes (the caller's obligation 3).
    unsafe { platform.write_bytes(place(platform, first, offset), from) }
}

/// Fills the bytes `inside` of `frame` with zeroes.
///
/// # Safety
/// 1. `frame` is a frame of the memory.
/// 2. As for [`read`].
/// 3. As for [`write()`].
pub(crate) unsafe fn zero<P: Platform>(platform: &P, frame: Frame, inside: Range<usize>) {
    // SAFETY: 1. and 2. the caller's obligations 1 and 2.
    let words = unsafe { words(platform, frame) };
    for_each_word(inside, |word, part, _| change(&words[word], part, |bytes| bytes.fill(0)));
}

/// [`Platform::read_bytes`] by atomics.
///
/// # Safety
/// As for [`Platform::read_bytes`].
pub(crate) unsafe fn read_by_words(from: NonNull<u8>, into: &mut [u8]) {
    let (first, inside) = word_at(from);
    for_each_word(inside..inside + into.len(), |word, part, at| {
        // SAFETY: the word contains a byte that the caller may read, and lies in that byte's page;
        // other threads access it by atomics.
        let bytes = unsafe { first.add(word).as_ref() }.load(Relaxed).to_ne_bytes();
        into[at..at + part.len()].copy_from_slice(&bytes[part]);
    });
}

/// [`Platform::write_bytes`] by atomics.
///
/// # Safety
/// As for [`Platform::write_bytes`].
pub(crate) unsafe fn write_by_words(to: NonNull<u8>, from: &[u8]) {
    let (first, inside) = word_at(to);
    for_each_word(inside..inside + from.len(), |word, part, at| {
        // SAFETY: as in `read_by_words`; neighboring bytes do not change.
        let word = unsafe { first.add(word).as_ref() };
        let source = &from[at..at + part.len()];
        change(word, part, |bytes| bytes.copy_from_slice(source));
    });
}

/// The word that contains a byte, and the byte's offset there.
#[inline]
fn word_at(at: NonNull<u8>) -> (NonNull<AtomicU64>, usize) {
    let inside = at.addr().get() % WORD;
    // SAFETY: the result is in the same page, which begins at a word boundary.
    (unsafe { at.sub(inside) }.cast(), inside)
}

/// Changes only `part` of a word.
#[inline]
fn change(word: &AtomicU64, part: Range<usize>, change: impl Fn(&mut [u8])) {
    if part.len() == WORD {
        let mut bytes = [0; WORD];
        change(&mut bytes);
        word.store(u64::from_ne_bytes(bytes), Relaxed);
        return;
    }
    let changed = |old: u64| {
        let mut bytes = old.to_ne_bytes();
        change(&mut bytes[part.clone()]);
        Some(u64::from_ne_bytes(bytes))
    };
    // `changed` never returns `None`.
    let _ = word.fetch_update(Relaxed, Relaxed, changed);
}

/// Splits a range of bytes at word boundaries. `f` receives the word, the bytes in it, and their
/// offset in the range.
#[inline]
fn for_each_word(range: Range<usize>, mut f: impl FnMut(usize, Range<usize>, usize)) {
    let mut at = range.start;
    while at < range.end {
        let inside = at % WORD;
        let count = (WORD - inside).min(range.end - at);
        f(at / WORD, inside..inside + count, at - range.start);
        at += count;
    }
}

/// The words of a frame.
///
/// # Safety
/// 1. `frame` is a frame of the memory.
/// 2. While the result is used, the frame is not freed, and its bytes are accessed only as aligned
///    atomics or by the platform's means.
#[inline]
unsafe fn words<P: Platform>(platform: &P, frame: Frame) -> &[AtomicU64; WORDS] {
    let bytes = platform.direct_map(frame).cast::<[AtomicU64; WORDS]>();
    // SAFETY: the direct map shows all 4,096 bytes of the frame for as long as the platform lives,
    // aligned to 4,096 (obligation 1 of `Platform`, `Frames::new` checked it, and the caller's
    // obligation 1). No references to them exist (its obligation 2).
    unsafe { bytes.as_ref() }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[repr(align(4096))]
    struct Page([u8; 64]);

    #[test]
    fn bytes_are_copied_by_words_without_neighbors() {
        let mut page = Page(core::array::from_fn(|at| at as u8));
        for start in 0..16 {
            for length in 0..40 {
                let at = NonNull::from(&mut page.0).cast::<u8>();
                let mut read = std::vec![0; length];
                // SAFETY: the bytes are the test's own, in a page.
                unsafe { read_by_words(at.add(start), &mut read) };
                assert!(read.iter().enumerate().all(|(n, byte)| *byte == (start + n) as u8));
                let new: Vec<u8> = read.iter().map(|byte| byte ^ 0x80).collect();
                // SAFETY: as above.
                unsafe { write_by_words(at.add(start), &new) };
                let changed = |at: &usize| page.0[*at] != *at as u8;
                assert!((0..64).filter(changed).eq(start..start + length));
                // SAFETY: as above.
                unsafe {
                    write_by_words(NonNull::from(&mut page.0).cast::<u8>().add(start), &read)
                };
            }
        }
    }
}
