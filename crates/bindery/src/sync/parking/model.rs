//! A platform's sleeping threads under loom: a locked queue by address, like an embedder's.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::vec::Vec;

use crate::sync::model::sync::Mutex;
use crate::sync::model::sync::atomic::AtomicU32;
use crate::sync::model::thread::{self, Thread};

/// Whether a parking thread checks again after it has become visible to wakers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SecondLook {
    Taken,
    LeftOut,
}

/// The sleeping threads and their words.
pub(crate) struct Sleepers {
    queue: Mutex<Vec<(usize, Thread)>>,
    second_look: SecondLook,
    /// The number of times that a thread slept.
    pub(crate) sleeps: AtomicUsize,
}

impl Sleepers {
    pub(crate) fn new(second_look: SecondLook) -> Self {
        Self { queue: Mutex::new(Vec::new()), second_look, sleeps: AtomicUsize::new(0) }
    }

    /// Sleeps until another thread wakes this address, unless `unchanged` returns false.
    pub(crate) fn park(&self, word: *const AtomicU32, unchanged: impl FnOnce() -> bool) {
        let mut queue = self.queue.lock().unwrap();
        if self.second_look == SecondLook::Taken && !unchanged() {
            return;
        }
        queue.push((word.addr(), thread::current()));
        drop(queue);
        self.sleeps.fetch_add(1, Relaxed);
        thread::park();
    }

    /// Wakes the threads that sleep on the address.
    pub(crate) fn unpark(&self, word: *const AtomicU32) {
        let woken: Vec<_> =
            self.queue.lock().unwrap().extract_if(.., |(at, _)| *at == word.addr()).collect();
        woken.into_iter().for_each(|(_, sleeper)| sleeper.unpark());
    }
}

impl super::Parking<AtomicU32> for Sleepers {
    fn park(&self, word: &AtomicU32, expected: u32) {
        let look = || word.load(crate::sync::model::sync::atomic::Ordering::Acquire) == expected;
        Self::park(self, ptr::from_ref(word), look);
    }

    fn unpark(&self, word: *const AtomicU32) {
        Self::unpark(self, word);
    }
}
