//! Pages that are one word, again and again: mostly zeroes. They need no store.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The word that fills the page, if there is one. Ends at the first 64 words that differ.
#[inline]
pub(super) fn word_of(page: &[AtomicU64]) -> Option<u64> {
    let word = page.first()?.load(Relaxed);
    // Most pages that differ do so at the end.
    if page.last()?.load(Relaxed) != word {
        return None;
    }
    let (chunks, rest) = page.as_chunks::<64>();
    let differs = if word == 0 {
        // One instruction a word where a load can be an operand.
        let any = |words: &[AtomicU64]| words.iter().fold(0, |any, word| any | word.load(Relaxed));
        chunks.iter().any(|chunk| any(chunk) != 0) || any(rest) != 0
    } else {
        let any = |words: &[AtomicU64]| {
            words.iter().fold(0, |any, other| any | (other.load(Relaxed) ^ word))
        };
        chunks.iter().any(|chunk| any(chunk) != 0) || any(rest) != 0
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
    extern crate std;
    use std::vec::Vec;

    use super::*;

    fn page(word: u64) -> Vec<AtomicU64> {
        (0..512).map(|_| AtomicU64::new(word)).collect()
    }

    #[test]
    fn each_word_that_differs_is_found() {
        for word in [0, 0x5555_0000_ffff_0001] {
            let page = page(word);
            assert_eq!(word_of(&page), Some(word));
            for slot in &page {
                slot.store(word ^ 1 << 40, Relaxed);
                assert_eq!(word_of(&page), None);
                slot.store(word, Relaxed);
            }
            fill(&page, 7);
            assert_eq!(word_of(&page), Some(7));
        }
    }
}
