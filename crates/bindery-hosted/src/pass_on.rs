//! Platforms that wrap a [`Machine`](crate::Machine).

/// Implements the listed methods of [`bindery::Platform`] by the same methods of a field. For a
/// platform that observes or delays some calls of a machine and passes on the others: a method that
/// is not listed is written out, or keeps its provided body.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use bindery::Platform;
/// use bindery::arch::X86_64;
/// use bindery_hosted::{Machine, pass_on};
///
/// struct Waits {
///     machine: Machine<X86_64>,
///     count: AtomicU64,
/// }
///
/// // SAFETY: the machine keeps the promises, and all is its doing.
/// unsafe impl Platform for Waits {
///     type Arch = X86_64;
///     type Mutex = <Machine<X86_64> as Platform>::Mutex;
///     type SpinLock = <Machine<X86_64> as Platform>::SpinLock;
///
///     pass_on! { machine:
///         direct_map zero copy invalidate invalidate_local invalidate_kernel publish_entries cpu relax
///         park unpark enter_read leave_read grace_period is_over seed fatal_signal
///         allocation_may_wait frames_released
///     }
///
///     fn synchronize(&self) {
///         self.count.fetch_add(1, Ordering::Relaxed);
///         self.machine.synchronize();
///     }
/// }
/// ```
#[macro_export]
macro_rules! pass_on {
    ($to:tt: $($method:ident)+) => {
        $($crate::pass_on!(@ $to $method);)+
    };
    (@ $to:tt direct_map) => {
        fn direct_map(&self, frame: ::bindery::addr::Frame) -> ::core::ptr::NonNull<u8> {
            ::bindery::Platform::direct_map(&self.$to, frame)
        }
    };
    (@ $to:tt zero) => {
        fn zero(&self, first: ::bindery::addr::Frame, count: u32) {
            ::bindery::Platform::zero(&self.$to, first, count);
        }
    };
    (@ $to:tt copy) => {
        fn copy(&self, from: ::bindery::addr::Frame, to: ::bindery::addr::Frame, count: u32) {
            ::bindery::Platform::copy(&self.$to, from, to, count);
        }
    };
    (@ $to:tt invalidate) => {
        fn invalidate(
            &self,
            root: ::bindery::addr::Frame,
            cpus: &::bindery::platform::CpuSet,
            what: &::bindery::platform::Invalidation,
        ) {
            ::bindery::Platform::invalidate(&self.$to, root, cpus, what);
        }
    };
    (@ $to:tt invalidate_local) => {
        fn invalidate_local(
            &self,
            root: ::bindery::addr::Frame,
            what: &::bindery::platform::Invalidation,
        ) {
            ::bindery::Platform::invalidate_local(&self.$to, root, what);
        }
    };
    (@ $to:tt invalidate_kernel) => {
        fn invalidate_kernel(
            &self,
            root: ::bindery::addr::Frame,
            what: &::bindery::platform::Invalidation,
        ) {
            ::bindery::Platform::invalidate_kernel(&self.$to, root, what);
        }
    };
    (@ $to:tt cpu) => {
        fn cpu(&self) -> ::bindery::platform::Cpu {
            ::bindery::Platform::cpu(&self.$to)
        }
    };
    (@ $to:tt park) => {
        fn park(&self, word: &::core::sync::atomic::AtomicU32, expected: u32) {
            ::bindery::Platform::park(&self.$to, word, expected);
        }
    };
    (@ $to:tt park_briefly) => {
        fn park_briefly(&self, word: &::core::sync::atomic::AtomicU32, expected: u32) {
            ::bindery::Platform::park_briefly(&self.$to, word, expected);
        }
    };
    (@ $to:tt works_for_pager) => {
        fn works_for_pager(&self) -> bool {
            ::bindery::Platform::works_for_pager(&self.$to)
        }
    };
    (@ $to:tt unpark) => {
        fn unpark(&self, word: *const ::core::sync::atomic::AtomicU32) {
            ::bindery::Platform::unpark(&self.$to, word);
        }
    };
    (@ $to:tt grace_period) => {
        fn grace_period(&self) -> ::bindery::platform::GracePeriod {
            ::bindery::Platform::grace_period(&self.$to)
        }
    };
    (@ $to:tt is_over) => {
        fn is_over(&self, period: ::bindery::platform::GracePeriod) -> bool {
            ::bindery::Platform::is_over(&self.$to, period)
        }
    };
    (@ $to:tt seed) => {
        fn seed(&self) -> u64 {
            ::bindery::Platform::seed(&self.$to)
        }
    };
    (@ $to:tt protection_keys) => {
        fn protection_keys(&self) -> u8 {
            ::bindery::Platform::protection_keys(&self.$to)
        }
    };
    (@ $to:tt branch_target_identification) => {
        fn branch_target_identification(&self) -> bool {
            ::bindery::Platform::branch_target_identification(&self.$to)
        }
    };
    (@ $to:tt page_based_memory_types) => {
        fn page_based_memory_types(&self) -> bool {
            ::bindery::Platform::page_based_memory_types(&self.$to)
        }
    };
    (@ $to:tt largest_shown_leaf) => {
        fn largest_shown_leaf(&self) -> ::bindery::arch::Level<Self::Arch> {
            ::bindery::Platform::largest_shown_leaf(&self.$to)
        }
    };
    (@ $to:tt fatal_signal) => {
        fn fatal_signal(&self) -> bool {
            ::bindery::Platform::fatal_signal(&self.$to)
        }
    };
    (@ $to:tt frames_released) => {
        fn frames_released(&self, first: ::bindery::addr::Frame, count: u32) {
            ::bindery::Platform::frames_released(&self.$to, first, count);
        }
    };
    (@ $to:tt synchronize_instructions) => {
        fn synchronize_instructions(&self, first: ::bindery::addr::Frame, count: u32) {
            ::bindery::Platform::synchronize_instructions(&self.$to, first, count);
        }
    };
    (@ $to:tt $method:ident) => {
        fn $method(&self) {
            ::bindery::Platform::$method(&self.$to);
        }
    };
}
