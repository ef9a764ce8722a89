//! [`Word`]: an atomic word of the core library or of a model checker. Code written for it runs
//! under both.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The operations on an atomic word that the protocols need.
pub(crate) trait Word<V> {
    fn load(&self, order: Ordering) -> V;
    fn store(&self, value: V, order: Ordering);
    fn swap(&self, value: V, order: Ordering) -> V;
    fn exchange(&self, from: V, to: V, success: Ordering, failure: Ordering) -> Result<V, V>;
    fn add(&self, value: V, order: Ordering) -> V;
    fn sub(&self, value: V, order: Ordering) -> V;
    fn set(&self, bits: V, order: Ordering) -> V;
}

/// Implements [`Word`] for an atomic type with the methods of the core library.
macro_rules! word {
    ($atomic:ty, $value:ty) => {
        impl $crate::sync::word::Word<$value> for $atomic {
            #[inline]
            fn load(&self, order: core::sync::atomic::Ordering) -> $value {
                self.load(order)
            }
            #[inline]
            fn store(&self, value: $value, order: core::sync::atomic::Ordering) {
                self.store(value, order);
            }
            #[inline]
            fn swap(&self, value: $value, order: core::sync::atomic::Ordering) -> $value {
                self.swap(value, order)
            }
            #[inline]
            fn exchange(
                &self,
                from: $value,
                to: $value,
                success: core::sync::atomic::Ordering,
                failure: core::sync::atomic::Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(from, to, success, failure)
            }
            #[inline]
            fn add(&self, value: $value, order: core::sync::atomic::Ordering) -> $value {
                self.fetch_add(value, order)
            }
            #[inline]
            fn sub(&self, value: $value, order: core::sync::atomic::Ordering) -> $value {
                self.fetch_sub(value, order)
            }
            #[inline]
            fn set(&self, bits: $value, order: core::sync::atomic::Ordering) -> $value {
                self.fetch_or(bits, order)
            }
        }
    };
}

word!(AtomicU32, u32);
word!(AtomicU64, u64);
#[cfg(all(test, any(loom, shuttle)))]
word!(crate::sync::model::sync::atomic::AtomicU32, u32);
#[cfg(all(test, any(loom, shuttle)))]
word!(crate::sync::model::sync::atomic::AtomicU64, u64);
