//! [`FolioPolicy`]: the folio sizes that faults may use.

use core::fmt;
use core::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use crate::addr::{Order, Orders};
use crate::folio::MAX_FOLIO_ORDER;

/// A program's advice for a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HugeAdvice {
    /// No advice.
    None,
    /// Large folios (`MADV_HUGEPAGE`).
    Use,
    /// No large folios (`MADV_NOHUGEPAGE`).
    Avoid,
}

/// The mappings that use folios of one size, as in the Linux files
/// `/sys/kernel/mm/transparent_hugepage/hugepages-*kB/enabled`.
///
/// ```
/// use bindery::addr::Order;
/// use bindery::{Memory, Platform, SizeMode};
///
/// /// 64 KiB folios everywhere, 2 MiB ones where advised.
/// fn configure<P: Platform>(memory: &Memory<P>) {
///     memory.folio_policy().set(Order(4), SizeMode::Always);
///     memory.folio_policy().set(Order(9), SizeMode::Madvise);
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SizeMode {
    /// In no mapping.
    Never,
    /// In mappings for which the program has requested it (`MADV_HUGEPAGE`).
    Madvise,
    /// According to [`FolioPolicy::set_global`].
    Inherit,
    /// In all mappings where they fit.
    Always,
}

impl SizeMode {
    fn from_number(number: u8) -> Self {
        match number {
            1 => Self::Madvise,
            2 => Self::Inherit,
            3 => Self::Always,
            _ => Self::Never,
        }
    }
}

/// The folio sizes that faults may use. A fault takes the largest size that the policy, the mapping
/// and its neighbors allow, and a smaller one if memory is fragmented. Base pages are always
/// allowed.
///
/// ```
/// use bindery::addr::Order;
/// use bindery::{FolioPolicy, SizeMode};
///
/// /// 64 KiB for all mappings that ask for it, and 2 MiB wherever it fits.
/// fn choose(policy: &FolioPolicy) {
///     policy.set(Order(4), SizeMode::Madvise);
///     policy.set(Order(9), SizeMode::Always);
/// }
/// ```
///
/// # Context
/// Context: any.
pub struct FolioPolicy {
    modes: [AtomicU8; MAX_FOLIO_ORDER.0 as usize + 1],
    global: AtomicU8,
    /// The orders that are `Always` after inheritance; bit n for order n. Faults read this.
    always: AtomicU16,
    /// The orders that are `Madvise` after inheritance.
    advised: AtomicU16,
}

impl fmt::Debug for FolioPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let modes: [_; MAX_FOLIO_ORDER.0 as usize + 1] =
            core::array::from_fn(|order| self.get(Order(order as u8)));
        f.debug_struct("FolioPolicy")
            .field("modes", &modes)
            .field("global", &SizeMode::from_number(self.global.load(Ordering::Relaxed)))
            .finish()
    }
}

impl FolioPolicy {
    /// A policy with `huge` for the largest size and `Never` for the others.
    pub(super) fn new(huge: SizeMode, global: SizeMode) -> Self {
        let policy = Self {
            modes: [const { AtomicU8::new(SizeMode::Never as u8) }; MAX_FOLIO_ORDER.0 as usize + 1],
            global: AtomicU8::new(global as u8),
            always: AtomicU16::new(0),
            advised: AtomicU16::new(0),
        };
        policy.set(MAX_FOLIO_ORDER, huge);
        policy
    }

    /// Sets the mode for folios of 2^`order` pages. Order 0 and orders above 9 are ignored.
    pub fn set(&self, order: Order, mode: SizeMode) {
        if let Some(slot) = self.modes.get(usize::from(order.0)) {
            slot.store(mode as u8, Ordering::Relaxed);
            self.recompute();
        }
    }

    /// The mode for folios of 2^`order` pages.
    pub fn get(&self, order: Order) -> SizeMode {
        let mode = self.modes.get(usize::from(order.0)).map(|mode| mode.load(Ordering::Relaxed));
        SizeMode::from_number(mode.unwrap_or(0))
    }

    /// Sets the meaning of [`SizeMode::Inherit`]; `Inherit` itself counts as `Never`.
    pub fn set_global(&self, mode: SizeMode) {
        self.global.store(mode as u8, Ordering::Relaxed);
        self.recompute();
    }

    fn recompute(&self) {
        let global = SizeMode::from_number(self.global.load(Ordering::Relaxed));
        let (mut always, mut advised) = (Orders::default(), Orders::default());
        for order in Order(1).up_to(MAX_FOLIO_ORDER) {
            let mode = match self.get(order) {
                SizeMode::Inherit => global,
                mode @ (SizeMode::Never | SizeMode::Madvise | SizeMode::Always) => mode,
            };
            match mode {
                SizeMode::Always => always = always | Orders::of(order),
                SizeMode::Madvise => advised = advised | Orders::of(order),
                SizeMode::Never | SizeMode::Inherit => {}
            }
        }
        self.always.store(always.bits(), Ordering::Relaxed);
        self.advised.store(advised.bits(), Ordering::Relaxed);
    }

    /// The orders above 0 that a fault may use in a mapping for which the program has given this
    /// advice.
    #[inline(always)]
    pub(crate) fn orders(&self, advice: HugeAdvice) -> Orders {
        Orders::from_bits(match advice {
            HugeAdvice::Avoid => 0,
            HugeAdvice::None => self.always.load(Ordering::Relaxed),
            HugeAdvice::Use => {
                self.always.load(Ordering::Relaxed) | self.advised.load(Ordering::Relaxed)
            }
        })
    }
}
