//! The atomics of the core library, or in a model those of loom.

#[cfg(not(all(test, loom)))]
pub(crate) use core::hint::spin_loop;
#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(all(test, loom))]
pub(crate) use loom::hint::spin_loop;
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// A constructor that is `const`, except in a model, whose atomics are made at run time.
macro_rules! constructor {
    ($(#[$attribute:meta])* $visibility:vis const fn $($rest:tt)*) => {
        #[cfg(not(all(test, loom)))]
        $(#[$attribute])*
        $visibility const fn $($rest)*
        #[cfg(all(test, loom))]
        $(#[$attribute])*
        $visibility fn $($rest)*
    };
}
pub(crate) use constructor;
