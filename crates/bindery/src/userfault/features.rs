//! The features and modes of a userfaultfd.

use bitflags::bitflags;

bitflags! {
    /// Features of a userfaultfd in addition to serving faults (`UFFD_FEATURE_*`, with the same
    /// bits). The kinds of memory that Linux lists as features need none here.
    ///
    /// ```
    /// use bindery::UserfaultFeatures;
    ///
    /// let monitor = UserfaultFeatures::EVENT_FORK | UserfaultFeatures::EVENT_REMAP;
    /// assert!(!monitor.contains(UserfaultFeatures::SIGBUS));
    /// ```
    ///
    /// # Context
    /// Context: any.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct UserfaultFeatures: u32 {
        /// A fork sends a message, and the child gets its own userfaultfd.
        const EVENT_FORK = 1 << 1;
        /// A move by `mremap` sends a message, and the memory stays registered.
        const EVENT_REMAP = 1 << 2;
        /// Dropped contents (`madvise`) send a message.
        const EVENT_REMOVE = 1 << 3;
        /// An unmapping sends a message.
        const EVENT_UNMAP = 1 << 6;
        /// Faults are not queued but fail with [`crate::FaultError::Bus`].
        const SIGBUS = 1 << 7;
        /// Messages contain the thread ([`crate::Platform::thread`]).
        const THREAD_ID = 1 << 8;
        /// Messages contain the exact address of the access rather than that of its page.
        const EXACT_ADDRESS = 1 << 11;
        /// Absent pages can be write-protected too, in anonymous memory.
        const WP_UNPOPULATED = 1 << 13;
        /// A write to a write-protected page removes the protection without a message.
        const WP_ASYNC = 1 << 15;
    }

    /// The kinds of faults in a registered range that a userfaultfd handles
    /// (`UFFDIO_REGISTER_MODE_*`, with the same bits).
    ///
    /// # Context
    /// Context: any.
    ///
    /// ```
    /// use bindery::UserfaultModes;
    ///
    /// // The bits are those of UFFDIO_REGISTER.
    /// let modes = UserfaultModes::from_bits(0b11);
    /// assert_eq!(modes, Some(UserfaultModes::MISSING | UserfaultModes::WRITE_PROTECT));
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct UserfaultModes: u32 {
        /// Absent pages.
        const MISSING = 1 << 0;
        /// Writes to pages that were write-protected.
        const WRITE_PROTECT = 1 << 1;
        /// Pages that the object has but no entry maps.
        const MINOR = 1 << 2;
    }
}

/// The faults that a userfaultfd serves.
///
/// ```
/// use bindery::{AddressSpace, Error, Platform, Userfault, UserfaultFeatures, UserfaultScope};
///
/// /// `userfaultfd(2)` of a program without privileges.
/// fn create<'m, P: Platform>(space: &AddressSpace<'m, P>) -> Result<Userfault<'m, P>, Error> {
///     space.userfault(UserfaultFeatures::empty(), UserfaultScope::UserMode)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum UserfaultScope {
    /// Faults of programs, and faults of the kernel on their behalf.
    #[default]
    All,
    /// Only faults of programs (`UFFD_USER_MODE_ONLY`); a fault of the kernel fails with
    /// [`crate::FaultError::Bus`].
    UserMode,
}
