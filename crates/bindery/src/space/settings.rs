//! Settings of a whole address space and of its children (`prctl(2)`): whether it uses large
//! folios, whether memory may become executable, and whether its pages may be merged.
//!
//! | setting | `fork` | `execve`: the embedder calls [`AddressSpace::inherit_settings`] |
//! |---|---|---|
//! | large folios | inherited | kept |
//! | executable memory | inherited, unless the setting excludes that | the same |
//! | merging of pages | inherited | kept |

use core::sync::atomic::{AtomicU8, Ordering};

use crate::addr::Orders;
use crate::error::Error;
use crate::platform::Platform;

use super::AddressSpace;
use crate::vma::MappingFlags;

/// The mappings in which an address space uses large folios (Linux: `PR_SET_THP_DISABLE`).
///
/// ```
/// use bindery::{AddressSpace, LargeFolios, Platform};
///
/// /// `prctl(2)` with `PR_SET_THP_DISABLE`.
/// fn disable<P: Platform>(space: &AddressSpace<'_, P>) {
///     space.set_large_folios(LargeFolios::Never);
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LargeFolios {
    /// In all mappings that allow them, subject to the policy.
    #[default]
    Allowed,
    /// Only at the program's request, that is, in mappings with `MADV_HUGEPAGE`, and by
    /// `MADV_COLLAPSE` (Linux: `PR_THP_DISABLE_EXCEPT_ADVISED`).
    Advised,
    /// In no mapping.
    Never,
}

/// Whether memory of an address space may become executable (Linux: `PR_SET_MDWE`).
///
/// ```
/// use bindery::{AddressSpace, Error, ExecGain, Platform};
///
/// /// `prctl(2)` with `PR_SET_MDWE`.
/// fn harden<P: Platform>(space: &AddressSpace<'_, P>) -> Result<(), Error> {
///     space.set_exec_gain(ExecGain::Refused)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ExecGain {
    /// Memory may become executable if its mapping allows it.
    #[default]
    Allowed,
    /// No mapping may be both writable and executable, and no mapping may become executable
    /// (`PR_MDWE_REFUSE_EXEC_GAIN`). Children inherit the setting.
    Refused,
    /// As `Refused`, but children do not inherit the setting (`PR_MDWE_NO_INHERIT`).
    RefusedHere,
}

/// All settings of an address space, packed into one byte because faults read them.
#[derive(Default)]
pub(super) struct Settings(AtomicU8);

const ADVISED: u8 = 1;
const NEVER: u8 = 2;
const LARGE_FOLIOS: u8 = ADVISED | NEVER;
const REFUSED: u8 = 4;
const NOT_INHERITED: u8 = 8;
const EXEC_GAIN: u8 = REFUSED | NOT_INHERITED;
const MERGING: u8 = 16;

impl Settings {
    fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    /// The settings of a child.
    fn inherited(&self) -> u8 {
        let set = self.get();
        if set & NOT_INHERITED == 0 { set } else { set & !EXEC_GAIN }
    }

    /// Whether pages with equal contents may be merged in all mappings.
    pub(super) fn merges(&self) -> bool {
        self.get() & MERGING != 0
    }

    /// The caller holds the address space's lock.
    pub(super) fn set_merges(&self, merges: bool) {
        self.change(MERGING, if merges { MERGING } else { 0 });
    }

    fn large_folios(&self) -> LargeFolios {
        match self.get() & LARGE_FOLIOS {
            0 => LargeFolios::Allowed,
            ADVISED => LargeFolios::Advised,
            _ => LargeFolios::Never,
        }
    }

    fn set_large_folios(&self, large: LargeFolios) {
        let value = match large {
            LargeFolios::Allowed => 0,
            LargeFolios::Advised => ADVISED,
            LargeFolios::Never => NEVER,
        };
        self.change(LARGE_FOLIOS, value);
    }

    fn exec_gain(&self) -> ExecGain {
        match self.get() & EXEC_GAIN {
            0 => ExecGain::Allowed,
            EXEC_GAIN => ExecGain::RefusedHere,
            _ => ExecGain::Refused,
        }
    }

    /// The caller holds the address space's lock.
    fn set_exec_gain(&self, gain: ExecGain) -> Result<(), Error> {
        let value = match gain {
            ExecGain::Allowed => 0,
            ExecGain::Refused => REFUSED,
            ExecGain::RefusedHere => EXEC_GAIN,
        };
        let set = self.get() & EXEC_GAIN;
        if set != 0 && set != value {
            return Err(Error::SealForbids);
        }
        self.change(EXEC_GAIN, value);
        Ok(())
    }

    /// The orders that the policy allows in a mapping with these flags, reduced to those that the
    /// address space uses.
    #[inline]
    pub(super) fn used_orders(&self, orders: Orders, flags: MappingFlags) -> Orders {
        match self.get() & LARGE_FOLIOS {
            0 => orders,
            ADVISED if flags.contains(MappingFlags::HUGE) => orders,
            _ => Orders::default(),
        }
    }

    /// Whether `MADV_COLLAPSE` may make large folios.
    pub(super) fn may_collapse_on_demand(&self) -> bool {
        self.get() & NEVER == 0
    }

    /// Refuses a change that would let memory with the flags `before` become executable, or be both
    /// writable and executable. For a new mapping, both arguments are its intended flags.
    pub(super) fn refuse_exec_gain(
        &self,
        before: MappingFlags,
        after: MappingFlags,
    ) -> Result<(), Error> {
        let executable = after.contains(MappingFlags::EXECUTE);
        if self.get() & REFUSED == 0 || !executable {
            return Ok(());
        }
        let gained = !before.contains(MappingFlags::EXECUTE);
        if gained || after.contains(MappingFlags::WRITE) {
            return Err(Error::AccessDenied);
        }
        Ok(())
    }

    fn change(&self, mask: u8, value: u8) {
        let changed = |old: u8| Some(old & !mask | value);
        // The closure never refuses.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
    }
}

impl<P: Platform> AddressSpace<'_, P> {
    /// Sets the mappings in which the address space uses large folios from now on. Existing large
    /// folios stay.
    ///
    /// Context: any.
    pub fn set_large_folios(&self, large: LargeFolios) {
        self.settings.set_large_folios(large);
    }

    /// The mappings in which the address space uses large folios.
    ///
    /// Context: any.
    pub fn large_folios(&self) -> LargeFolios {
        self.settings.large_folios()
    }

    /// Sets whether memory may become executable from now on. Existing mappings do not change.
    ///
    /// Context: may sleep.
    ///
    /// # Errors
    /// [`Error::SealForbids`] if a different value was set before, which cannot be undone.
    pub fn set_exec_gain(&self, gain: ExecGain) -> Result<(), Error> {
        let _guard = self.vmas.lock();
        self.settings.set_exec_gain(gain)
    }

    /// Whether memory may become executable.
    ///
    /// Context: any.
    pub fn exec_gain(&self) -> ExecGain {
        self.settings.exec_gain()
    }

    /// Adopts the settings of `parent` that children inherit (not the limits), for the address
    /// space of a program that `parent`'s process executes. [`AddressSpace::fork`] does this
    /// itself.
    ///
    /// Context: any.
    pub fn inherit_settings(&self, parent: &Self) {
        self.settings.change(u8::MAX, parent.settings.inherited());
    }
}
