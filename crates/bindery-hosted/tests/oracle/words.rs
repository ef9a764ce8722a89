//! Sequences and observations as words, for the channel between processes. Writing allocates no
//! memory, because the writing process must not change while it is observed.

use std::sync::atomic::{AtomicU64, Ordering};

/// A destination of words.
pub trait Sink {
    /// Writes one word.
    fn put(&mut self, word: u64);

    /// Writes a count and that number of words.
    fn put_all(&mut self, words: &[u64]) {
        self.put(words.len() as u64);
        for word in words {
            self.put(*word);
        }
    }
}

impl Sink for Vec<u64> {
    fn put(&mut self, word: u64) {
        self.push(word);
    }
}

/// Memory shared by processes. The first word counts the written words behind it.
#[derive(Clone, Copy)]
pub struct Shared<'a>(pub &'a [AtomicU64]);

impl Shared<'_> {
    /// The number of written words.
    pub fn len(&self) -> usize {
        self.0[0].load(Ordering::SeqCst) as usize
    }

    /// Forgets all words.
    pub fn clear(&self) {
        self.0[0].store(0, Ordering::SeqCst);
    }

    /// All words that are written.
    pub fn read(&self) -> Vec<u64> {
        self.0[1..=self.len()].iter().map(|word| word.load(Ordering::SeqCst)).collect()
    }

    /// Overwrites a word.
    pub fn amend(&self, index: usize, word: u64) {
        self.0[1 + index].store(word, Ordering::SeqCst);
    }
}

impl Sink for Shared<'_> {
    fn put(&mut self, word: u64) {
        let index = self.len();
        self.amend(index, word);
        self.0[0].store(index as u64 + 1, Ordering::SeqCst);
    }
}

/// A source of words.
pub struct Source<'a>(pub &'a [u64]);

impl Source<'_> {
    /// The next word. Panics if no word is left, since this program wrote the words itself.
    pub fn take(&mut self) -> u64 {
        let (first, rest) = self.0.split_first().expect("a word");
        self.0 = rest;
        *first
    }

    /// The words that [`Sink::put_all`] wrote.
    pub fn take_all(&mut self) -> Vec<u64> {
        let count = self.take() as usize;
        self.take_many(count, Self::take)
    }

    /// Reads this number of values with `one`.
    pub fn take_many<T>(&mut self, count: usize, mut one: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..count).map(|_| one(self)).collect()
    }
}
