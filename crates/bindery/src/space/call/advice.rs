//! The kinds of advice and the table of their effects.
//!
//! A new kind begins as a variant of [`Advice`]. The compiler then asks for its row in
//! [`Advice::effect`], for the function in `madvise.rs` that carries out a new [`Call`] or
//! [`EntryChange`], and for the answer of [`Advice::is_for_others`]. Its number is in
//! `bindery-linux` (`advice.rs`); a test there finds a kind without one.

use crate::error::Error;

use super::populate::Want;
use crate::space::merging::mergeable;
use crate::vma::{MappingFlags, Vma};

/// Defines [`Advice`], and the list of all its variants, which a new one cannot be left out of.
macro_rules! kinds {
    ($(#[$attribute:meta])* pub enum $name:ident { $($(#[$doc:meta])* $kind:ident,)* }) => {
        $(#[$attribute])*
        pub enum $name {
            $($(#[$doc])* $kind,)*
        }

        impl $name {
            /// All of them, for tests of what holds for each.
            #[cfg(any(test, feature = "testing"))]
            pub const ALL: &[Self] = &[$(Self::$kind,)*];
        }
    };
}

kinds! {
    /// Advice of a program about a range of its memory.
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
        /// Nothing special (`MADV_NORMAL`).
        Normal,
        /// Pages are used in no order (`MADV_RANDOM`).
        Random,
        /// Pages are used in order (`MADV_SEQUENTIAL`).
        Sequential,
        /// Pages are used soon (`MADV_WILLNEED`): those in swap come in, unless memory is short.
        /// Pages of files do not.
        WillNeed,
        /// The contents are not needed any more (`MADV_DONTNEED`).
        DontNeed,
        /// As `DontNeed`, of locked memory too (`MADV_DONTNEED_LOCKED`).
        DontNeedLocked,
        /// The contents are not needed any more, unless they are written again before memory is
        /// short (`MADV_FREE`). Those in swap are dropped at once. A large folio that the range
        /// covers in part is split, unless another process maps it or it is pinned: then nothing
        /// happens to it.
        Free,
        /// The contents are not used for a while (`MADV_COLD`). Large folios in part: as
        /// [`Advice::Free`].
        Cold,
        /// The contents are not used for a while, and may leave memory now (`MADV_PAGEOUT`). Large
        /// folios in part: as [`Advice::Free`].
        PageOut,
        /// The contents of the object are not needed any more (`MADV_REMOVE`).
        Remove,
        /// A child does not inherit it (`MADV_DONTFORK`).
        DontFork,
        /// A child inherits it (`MADV_DOFORK`).
        DoFork,
        /// A child inherits it empty (`MADV_WIPEONFORK`).
        WipeOnFork,
        /// A child inherits it with its contents (`MADV_KEEPONFORK`).
        KeepOnFork,
        /// It is not part of a core dump (`MADV_DONTDUMP`).
        DontDump,
        /// It is part of a core dump (`MADV_DODUMP`).
        DoDump,
        /// Pages with equal contents may be merged (`MADV_MERGEABLE`). They never are, as on a
        /// Linux whose `ksmd` was not started. No effect on memory that is not private.
        Mergeable,
        /// Pages may not be merged (`MADV_UNMERGEABLE`).
        Unmergeable,
        /// Large folios are wanted (`MADV_HUGEPAGE`).
        Huge,
        /// Large folios are not wanted (`MADV_NOHUGEPAGE`).
        NoHuge,
        /// Large folios are wanted now (`MADV_COLLAPSE`).
        Collapse,
        /// All pages are to be readable without a fault (`MADV_POPULATE_READ`).
        PopulateRead,
        /// All pages are to be writable without a fault (`MADV_POPULATE_WRITE`).
        PopulateWrite,
        /// An access raises a signal, whatever the protection allows (`MADV_GUARD_INSTALL`).
        GuardInstall,
        /// Guards are removed (`MADV_GUARD_REMOVE`).
        GuardRemove,
    }
}

impl Advice {
    /// Whether one process may give it about the memory of another (`process_madvise(2)`).
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
            Self::PageOut => entries(Entry::PageOut, Nothing),
            Self::Remove => call(Call::Remove, Contents),
            Self::DontFork => flags(NONE, DONT_FORK, AppliesTo::All, Unnoticed),
            Self::DoFork => flags(DONT_FORK, NONE, AppliesTo::All, Nothing),
            Self::WipeOnFork => flags(NONE, WIPE, AppliesTo::Anonymous, Unnoticed),
            Self::KeepOnFork => flags(WIPE, NONE, AppliesTo::NotDroppable, Nothing),
            Self::DontDump => flags(NONE, DONT_DUMP, AppliesTo::All, Nothing),
            Self::DoDump => flags(DONT_DUMP, NONE, AppliesTo::NotDroppable, Nothing),
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
    pub(in crate::space) change: Change,
    /// The contents that the program or a child loses by it.
    pub(in crate::space) loss: Loss,
}

const fn call(call: Call, loss: Loss) -> Effect {
    Effect { change: Change::Call(call), loss }
}

const fn entries(change: EntryChange, loss: Loss) -> Effect {
    Effect { change: Change::Vmas(VmaChange::Entries(change)), loss }
}

const fn flags(clear: MappingFlags, set: MappingFlags, to: AppliesTo, loss: Loss) -> Effect {
    let change = FlagChange { clear, set, applies: to };
    Effect { change: Change::Vmas(VmaChange::Flags(change)), loss }
}

/// The part of an address space that advice changes.
#[derive(Clone, Copy)]
pub(in crate::space) enum Change {
    /// A call of its own, which holds no lock over the whole range.
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

/// Advice that is a call of its own.
#[derive(Clone, Copy)]
pub(in crate::space) enum Call {
    WillNeed,
    Populate(Want),
    Remove,
    Collapse,
}

/// Advice that changes entries.
#[derive(Clone, Copy)]
pub(in crate::space) enum EntryChange {
    /// Contents are dropped; `locked`: of locked VMAs too.
    Drop {
        locked: bool,
    },
    Free,
    Cold,
    PageOut,
    InstallGuards,
    RemoveGuards,
}

impl EntryChange {
    /// Whether the advice works page by page, so that a fatal signal may stop it anywhere.
    pub(in crate::space) const fn is_page_by_page(self) -> bool {
        match self {
            Self::Free | Self::Cold | Self::PageOut => true,
            Self::Drop { .. } | Self::InstallGuards | Self::RemoveGuards => false,
        }
    }
}

/// The contents that advice takes from the program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::space) enum Loss {
    Nothing,
    /// The contents of the range, with a notice to a userfaultfd.
    Contents,
    /// Contents of the range or of a child's copy, without a notice to a userfaultfd.
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
    /// Others refuse it.
    Anonymous,
    /// Those with [`MappingFlags::DROPPABLE`] refuse it.
    NotDroppable,
    /// Others ignore it.
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
            AppliesTo::Anonymous | AppliesTo::NotDroppable => return Err(Error::Invalid),
            AppliesTo::Mergeable => mergeable(flags),
        };
        Ok((flags - self.clear) | set)
    }
}
