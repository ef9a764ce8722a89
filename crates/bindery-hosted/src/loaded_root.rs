//! Roots that CPUs load: for a platform that spares CPUs invalidations, because they have another
//! root loaded.

use std::sync::atomic::Ordering;

use bindery::addr::Frame;

use crate::machine::Machine;
use crate::mmu::Walk;

impl<A: Walk> Machine<A> {
    /// Loads a root, or the kernel's, on the CPU of the calling thread, and flushes nothing: a root
    /// is the tag of its translations.
    ///
    /// From the first call on, the strict TLB of this CPU walks the tables of the loaded root also
    /// between accesses, as processors do. It keeps the translations of other roots, which may lead
    /// to freed frames, until [`Machine::flush_root`]. If a root is loaded again with such a
    /// translation, a [`Violation`](crate::Violation) reports the frame. Programs may access only
    /// the loaded root.
    ///
    /// # Panics
    /// Later, at an access to a root that is not loaded.
    pub fn load_root(&self, root: Option<Frame>) {
        self.shared.records_roots.store(true, Ordering::Relaxed);
        self.tlb(self.shared.seats.cpu()).lock().load(self.world(), root);
    }

    /// Drops all translations and intermediate entries of the root, or of all roots, on the CPU of
    /// the calling thread. Of the loaded root, the walker brings them back at once.
    pub fn flush_root(&self, root: Option<Frame>) {
        self.tlb(self.shared.seats.cpu()).lock().flush_root(self.world(), root);
    }

    /// All CPUs that record which root they have loaded walk to all pages that they have accessed.
    /// Called before an invalidation, as the latest moment at which a walker finds its way to a
    /// table that is about to be freed.
    pub fn speculate(&self) {
        if self.shared.records_roots.load(Ordering::Relaxed) {
            for tlb in &self.shared.tlbs {
                tlb.0.lock().speculate(self.world());
            }
        }
    }
}
