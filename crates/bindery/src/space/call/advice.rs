//! The kinds of advice and the table of their effects.
//!
//! A new kind starts as a variant of [`Advice`]. The compiler then requires a row in
//! [`Advice::effect`], a function in `madvise.rs` that carries out a new [`Call`] or
//! [`EntryChange`], and an answer in [`Advice::is_for_others`]. The number of the kind is in
//! `bindery-linux` (`advice.rs`); a test there detects a kind without a number.

use crate::error::Error;

use super::populate::Want;
use crate::space::merging::mergeable;
use crate::vma::{MappingFlags, Vma};

/// Defines [`Advice`] and the list of its variants together, so that the list is complete.
macro_rules! kinds {
    ($(#[$attribute:meta])* pub enum $name:ident { $($(#[$doc:meta])* $kind:ident,)* }) => {
        $(#[$attribute])*
        pub enum $name {
            $($(#[$doc])* $kind,)*
        }

        impl $name {
            /// All variants, for tests that check every variant.
            #[cfg(any(test, feature = "testing"))]
            pub const ALL: &[Self] = &[$(Self::$kind,)*];
        }
    };
}

kinds! {
    /// A program's advice about a range of its memory.
    ///
    /// ```
    /// use bindery::addr::VirtAddr;
    /// use bindery::{Advice, AddressSpace, Error, Platform};
    ///
    /// fn forget<P: Platform>(space: &AddressSpace<'_, P>, at: VirtAddr) -> Result<(), Error> {
    ///     space.madvise(at, 1 << 20, Advice::DontNeed)
    /// }
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
    #[non_exhaustive]
    pub enum Advice {
        /// No particular order of use (`MADV_NORMAL`).
        Normal,
        /// Pages are used in random order (`MADV_RANDOM`).
        Random,
        /// Pages are used in order (`MADV_SEQUENTIAL`).
        Sequential,
        /// Pages will be used soon (`MADV_WILLNEED`). Swaps pages in and starts reads of file
        /// pages, unless memory is short.
        WillNeed,
        /// The contents are no longer needed (`MADV_DONTNEED`).
        DontNeed,
        /// As `DontNeed`, but also applies to locked memory (`MADV_DONTNEED_LOCKED`).
        DontNeedLocked,
        /// The contents are no longer needed, unless the program writes to them again before memory
        /// is short (`MADV_FREE`). Drops contents in swap immediately. Splits a large folio that
        /// the range covers in part; skips the folio if it is pinned or another process maps it.
        Free,
        /// The contents will not be used for a while (`MADV_COLD`). Splits or skips large folios as
        /// [`Advice::Free`] does.
        Cold,
        /// The contents will not be used for a while and can be swapped out now (`MADV_PAGEOUT`).
        /// Splits or skips large folios as [`Advice::Free`] does.
        PageOut,
        /// The contents of the object are no longer needed (`MADV_REMOVE`).
        Remove,
        /// Children do not inherit the mapping (`MADV_DONTFORK`).
        DontFork,
        /// Children inherit the mapping (`MADV_DOFORK`).
        DoFork,
        /// Children inherit the mapping without its contents (`MADV_WIPEONFORK`).
        WipeOnFork,
        /// Children inherit the mapping with its contents (`MADV_KEEPONFORK`).
        KeepOnFork,
        /// Core dumps exclude the mapping (`MADV_DONTDUMP`).
        DontDump,
        /// Core dumps include the mapping (`MADV_DODUMP`).
        DoDump,
        /// Pages with equal contents may be merged (`MADV_MERGEABLE`). The core never merges them,
        /// as on a Linux system whose `ksmd` was not started. Has no effect on shared mappings.
        Mergeable,
        /// Pages may not be merged (`MADV_UNMERGEABLE`).
        Unmergeable,
        /// Use large folios (`MADV_HUGEPAGE`).
        Huge,
        /// Do not use large folios (`MADV_NOHUGEPAGE`).
        NoHuge,
        /// Collapse the range into large folios now (`MADV_COLLAPSE`).
        Collapse,
        /// Map all pages, so that reads do not fault (`MADV_POPULATE_READ`).
        PopulateRead,
        /// Map all pages, so that writes do not fault (`MADV_POPULATE_WRITE`).
        PopulateWrite,
        /// Install guards: accesses raise a signal, regardless of the protection
        /// (`MADV_GUARD_INSTALL`).
        GuardInstall,
        /// Remove guards (`MADV_GUARD_REMOVE`).
        GuardRemove,
    }
}

impl Advice {
    /// Whether a process may give this advice on the memory of another (`process_madvise(2)`).
    ///
    /// Context: any.
    pub const fn is_for_others(self) -> bool {
        match self {
            Self::Cold | Self::PageOut | Self::WillNeed | Self::Collapse => true,
            Self::Normal
            | Self::Random
            | Self::Sequential
            | Self::DontNeed
            | Self::DontNeedLocked
            | Self::Free
            | Self::Remove
            | Self::DontFork
            | Self::DoFork
            | Self::WipeOnFork
            | Self::KeepOnFork
            | Self::DontDump
            | Self::DoDump
            | Self::Mergeable
            | Self::Unmergeable
            | Self::Huge
            | Self::NoHuge
            | Self::PopulateRead
            | Self::PopulateWrite
            | Self::GuardInstall
            | Self::GuardRemove => false,
        }
    }

    /// The row of this kind in the table of effects.
    #[inline]
    pub(in crate::space) const fn effect(self) -> Effect {
        const NONE: MappingFlags = MappingFlags::empty();
        const ORDER: MappingFlags = MappingFlags::SEQUENTIAL.union(MappingFlags::RANDOM);
        const DONT_FORK: MappingFlags = MappingFlags::DONT_FORK;
        const WIPE: MappingFlags = MappingFlags::WIPE_ON_FORK;
        const DONT_DUMP: MappingFlags = MappingFlags::DONT_DUMP;
        const MERGEABLE: MappingFlags = MappingFlags::MERGEABLE;
        const HUGE: MappingFlags = MappingFlags::HUGE;
        const NO_HUGE: MappingFlags = MappingFlags::NO_HUGE;

        use EntryChange as Entry;
        use Loss::{Contents, Nothing, Unnoticed};

        match self {
            Self::Normal => flags(ORDER, NONE, AppliesTo::All, Nothing),
            Self::Random => flags(ORDER, MappingFlags::RANDOM, AppliesTo::All, Nothing),
            Self::Sequential => flags(ORDER, MappingFlags::SEQUENTIAL, AppliesTo::All, Nothing),
            Self::WillNeed => call(Call::WillNeed, Nothing),
            Self::DontNeed => entries(Entry::Drop { locked: false }, Contents),
            Self::DontNeedLocked => entries(Entry::Drop { locked: true }, Contents),
            Self::Free => entries(Entry::Free, Contents),
            Self::Cold => entries(Entry::Cold, Nothing),
            Self::PageOut => call(Call::PageOut, Nothing),
            Self::Remove => call(Call::Remove, Contents),
            Self::DontFork => flags(NONE, DONT_FORK, AppliesTo::All, Unnoticed),
            Self::DoFork => flags(DONT_FORK, NONE, AppliesTo::CoreFrames, Nothing),
            Self::WipeOnFork => flags(NONE, WIPE, AppliesTo::Anonymous, Unnoticed),
            Self::KeepOnFork => flags(WIPE, NONE, AppliesTo::NotDroppable, Nothing),
            Self::DontDump => flags(NONE, DONT_DUMP, AppliesTo::All, Nothing),
            Self::DoDump => flags(DONT_DUMP, NONE, AppliesTo::Dumpable, Nothing),
            Self::Mergeable => flags(NONE, MERGEABLE, AppliesTo::Mergeable, Nothing),
            Self::Unmergeable => flags(MERGEABLE, NONE, AppliesTo::All, Nothing),
            Self::Huge => flags(NO_HUGE, HUGE, AppliesTo::All, Nothing),
            Self::NoHuge => flags(HUGE, NO_HUGE, AppliesTo::All, Nothing),
            Self::Collapse => call(Call::Collapse, Nothing),
            Self::PopulateRead => call(Call::Populate(Want::Readable), Nothing),
            Self::PopulateWrite => call(Call::Populate(Want::Writable), Nothing),
            Self::GuardInstall => entries(Entry::InstallGuards, Unnoticed),
            Self::GuardRemove => entries(Entry::RemoveGuards, Nothing),
        }
    }
}

/// The effect of one kind of advice.
#[derive(Clone, Copy)]
pub(in crate::space) struct Effect {
    pub(in crate::space) change: AdviceChange,
    /// The contents that the advice takes from the program or a child.
    pub(in crate::space) loss: Loss,
}

const fn call(call: Call, loss: Loss) -> Effect {
    Effect { change: AdviceChange::Call(call), loss }
}

const fn entries(change: EntryChange, loss: Loss) -> Effect {
    Effect { change: AdviceChange::Vmas(VmaChange::Entries(change)), loss }
}

const fn flags(clear: MappingFlags, set: MappingFlags, to: AppliesTo, loss: Loss) -> Effect {
    let change = FlagChange { clear, set, applies: to };
    Effect { change: AdviceChange::Vmas(VmaChange::Flags(change)), loss }
}

/// The part of an address space that advice changes.
#[derive(Clone, Copy)]
pub(in crate::space) enum AdviceChange {
    /// A separate call, which holds no lock over the whole range.
    Call(Call),
    /// A change VMA by VMA, under the mutex.
    Vmas(VmaChange),
}

/// Advice that changes VMAs or their pages.
#[derive(Clone, Copy)]
pub(in crate::space) enum VmaChange {
    Flags(FlagChange),
    Entries(EntryChange),
}

/// Advice that is implemented by a call of its own.
#[derive(Clone, Copy)]
pub(in crate::space) enum Call {
    WillNeed,
    Populate(Want),
    Remove,
    Collapse,
    PageOut,
}

/// Advice that changes entries.
#[derive(Clone, Copy)]
pub(in crate::space) enum EntryChange {
    /// Drops the contents. `locked`: also drops the contents of locked VMAs.
    Drop {
        locked: bool,
    },
    Free,
    Cold,
    InstallGuards,
    RemoveGuards,
}

impl EntryChange {
    /// Whether the advice works page by page, so that a fatal signal may stop it anywhere.
    pub(in crate::space) const fn is_page_by_page(self) -> bool {
        match self {
            Self::Free | Self::Cold => true,
            Self::Drop { .. } | Self::InstallGuards | Self::RemoveGuards => false,
        }
    }
}

/// The contents that a piece of advice discards.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::space) enum Loss {
    Nothing,
    /// The contents of the range; a userfaultfd is notified.
    Contents,
    /// Contents of the range or of a child's copy; no userfaultfd is notified.
    Unnoticed,
}

/// Advice that changes the flags of a VMA.
#[derive(Clone, Copy)]
pub(in crate::space) struct FlagChange {
    clear: MappingFlags,
    set: MappingFlags,
    applies: AppliesTo,
}

/// The VMAs to which a change of flags applies.
#[derive(Clone, Copy)]
enum AppliesTo {
    All,
    /// Other VMAs refuse the advice.
    Anonymous,
    /// VMAs with [`MappingFlags::DROPPABLE`] refuse the advice.
    NotDroppable,
    /// VMAs of frames outside the core's memory refuse the advice.
    CoreFrames,
    /// VMAs with [`MappingFlags::DROPPABLE`] or [`MappingFlags::DONT_EXPAND`] refuse the advice.
    Dumpable,
    /// Other VMAs ignore the advice.
    Mergeable,
}

impl FlagChange {
    /// The flags of `vma` after the change.
    pub(in crate::space) fn of(self, vma: &Vma) -> Result<MappingFlags, Error> {
        let flags = vma.flags();
        let set = match self.applies {
            AppliesTo::All => self.set,
            AppliesTo::Anonymous if vma.is_anonymous() => self.set,
            AppliesTo::NotDroppable if !vma.has(MappingFlags::DROPPABLE) => self.set,
            AppliesTo::CoreFrames if !vma.has(MappingFlags::FRAMES) => self.set,
            AppliesTo::Dumpable
                if !flags.intersects(MappingFlags::DROPPABLE | MappingFlags::DONT_EXPAND) =>
            {
                self.set
            }
            AppliesTo::Anonymous
            | AppliesTo::NotDroppable
            | AppliesTo::CoreFrames
            | AppliesTo::Dumpable => return Err(Error::Invalid),
            AppliesTo::Mergeable => mergeable(flags),
        };
        Ok((flags - self.clear) | set)
    }
}
