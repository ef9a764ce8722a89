//! Pages that are filled with one repeated word, mostly zero. They need no store.

#![allow(unsafe_code, reason = "a room of docs/invariants.md")]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::bitmap::CLUSTER_SLOTS;

/// The number of words in a page, one for each slot of a cluster.
const WORDS: usize = CLUSTER_SLOTS as usize;

/// The word that fills the page, if all words are equal. Stops at the first 64 words that contain a
/// different one.
///
/// Uses plain loads, because an atomic load cannot be an operand of another instruction and would
/// double the work.
///
/// # Safety
/// 1. `page` is the direct map of a frame, which does not change during the call.
#[inline]
pub(super) unsafe fn word_of(page: NonNull<u8>) -> Option<u64> {
    // SAFETY: the direct map shows 4,096 bytes, aligned to 4,096, which do not change (1).
    let page = unsafe { page.cast::<[u64; WORDS]>().as_ref() };
    let word = page[0];
    // Most pages with different words differ at the end.
    if page[WORDS - 1] != word {
        return None;
    }
    let (chunks, _) = page.as_chunks::<64>();
    let differs = if word == 0 {
        chunks.iter().any(|chunk| chunk.iter().fold(0, |any, word| any | word) != 0)
    } else {
        chunks.iter().any(|chunk| chunk.iter().fold(0, |any, other| any | (other ^ word)) != 0)
    };
    (!differs).then_some(word)
}

/// Fills the page with the word.
pub(super) fn fill(page: &[AtomicU64], word: u64) {
    for slot in page {
        slot.store(word, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Page([u64; WORDS]);

    fn word(page: &mut Page) -> Option<u64> {
        // SAFETY: 1. the value has the size and alignment of a page, and is borrowed exclusively.
        unsafe { word_of(NonNull::from(page).cast()) }
    }

    #[test]
    fn each_word_that_differs_is_found() {
        for filled in [0, 0x5555_0000_ffff_0001] {
            let mut page = Page([filled; WORDS]);
            assert_eq!(word(&mut page), Some(filled));
            for at in 0..WORDS {
                page.0[at] = filled ^ 1 << 40;
                assert_eq!(word(&mut page), None);
                page.0[at] = filled;
            }
            fill(&page.0.map(AtomicU64::new), 7);
        }
    }
}
