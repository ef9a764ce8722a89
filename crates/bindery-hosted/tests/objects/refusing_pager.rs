//! Files in memory whose pager fails some writes.

use std::sync::{Mutex, PoisonError};

use bindery::{Pager, PagerError, ReadBuffer, StoredBytes};
use bindery_hosted::MemoryFiles;

use crate::support::objects::PAGE;

/// The pages of a write.
pub struct Asked {
    pub file: u64,
    pub first: u64,
    pub pages: u64,
}

impl Asked {
    pub fn has(&self, page: u64) -> bool {
        (self.first..self.first + self.pages).contains(&page)
    }
}

type Refusal = Box<dyn FnMut(Asked) -> Option<PagerError> + Send>;

/// Files in memory. A function selects the writes that fail.
pub struct RefusingFiles {
    pub files: MemoryFiles,
    refusal: Mutex<Refusal>,
}

impl RefusingFiles {
    /// Writes for which `refusal` has an error fail with it.
    pub fn new(refusal: impl FnMut(Asked) -> Option<PagerError> + Send + 'static) -> Self {
        Self { files: MemoryFiles::new(), refusal: Mutex::new(Box::new(refusal)) }
    }

    /// Replaces the function that selects failing writes.
    pub fn refuse(&self, refusal: impl FnMut(Asked) -> Option<PagerError> + Send + 'static) {
        *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(refusal);
    }
}

impl Pager for RefusingFiles {
    fn read(&self, file: u64, page: u64, into: &mut ReadBuffer<'_>) -> Result<(), PagerError> {
        self.files.read(file, page, into)
    }

    fn write(&self, file: u64, page: u64, from: &[StoredBytes<'_>]) -> Result<(), PagerError> {
        let pages = from.iter().map(|piece| piece.len().div_ceil(PAGE as usize) as u64).sum();
        let asked = Asked { file, first: page, pages };
        let refused = self.refusal.lock().unwrap_or_else(PoisonError::into_inner)(asked);
        refused.map_or_else(|| self.files.write(file, page, from), Err)
    }

    fn resize(&self, file: u64, size: u64) -> Result<(), PagerError> {
        self.files.resize(file, size)
    }

    fn removed(&self, file: u64) {
        self.files.removed(file);
    }
}
