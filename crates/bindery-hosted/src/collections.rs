//! Frames that the embedder caches and frees on request.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

type Collect = Arc<dyn Fn() + Send + Sync>;

/// The function to call, and the number of deferred requests.
#[derive(Default)]
pub(crate) struct Collections {
    collect: Mutex<Option<Collect>>,
    put_off: AtomicU64,
}

impl Collections {
    pub(crate) fn set(&self, collect: Box<dyn Fn() + Send + Sync>) {
        *self.collect.lock().unwrap_or_else(PoisonError::into_inner) = Some(collect.into());
    }

    /// The callback runs without the lock because it may free frames and so call the machine.
    pub(crate) fn collect(&self) {
        let known = self.collect.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(collect) = known {
            collect();
        }
    }

    pub(crate) fn note_put_off(&self) {
        self.put_off.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn put_off(&self) -> u64 {
        self.put_off.load(Ordering::Relaxed)
    }
}
