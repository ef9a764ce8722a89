//! The decision about a non-empty entry, as a pure function of the VMA, the access, the entry and
//! the folio.

use crate::error::FaultError;
use crate::table::protect::{Watched, Writable};

use super::Access;

/// The properties of the VMA that the decision depends on. The VMA allows the access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Terms {
    pub(super) writable: Writable,
    pub(super) watched: Watched,
    /// Whether an open userfaultfd write-protects pages of the VMA.
    pub(super) protects: bool,
}

/// The entry of the page, read under the lock of its table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Present {
    /// The entry has become empty or refers to a table.
    Vacant,
    /// A leaf that allows the access.
    Allowed,
    /// A leaf that does not allow the access, and that a userfaultfd has write-protected.
    Protected,
    /// Any other leaf that does not allow the access.
    Refused,
    /// A `PROT_NONE` entry.
    ProtNone,
    /// A guard.
    Guard,
    /// Poison, or an entry of no known format.
    Poison,
    /// A marker of write-protection: no page is mapped.
    ProtectedVacant,
    /// A reference to a swap slot.
    Swap,
}

/// The page that a leaf maps. `F` reads the state of its folio, which few decisions need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MappedPage<F> {
    /// The zero page.
    Zero,
    /// A page of the huge zero page, mapped by a huge leaf.
    HugeZero,
    /// A frame outside the core's memory, and whether the core can read it
    /// ([`crate::FrameSource`]).
    Shown { readable: bool },
    /// A page of a folio.
    Folio(F),
}

/// The state of the folio that a leaf of a private mapping maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FolioState {
    /// The folio belongs to an object.
    OfObject,
    /// The folio is anonymous, and no other process maps the pages that the leaf maps.
    Exclusive,
    /// The folio is anonymous, and other processes may map it.
    Shared,
}

/// The continuation of a fault at a non-empty entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Decision {
    /// Read the entry again: it was changed, or now refers to a swap slot.
    Again,
    /// The entry allows the access. Record the access and flush this CPU's TLB entry.
    Spurious,
    /// The fault fails.
    Fail(FaultError),
    /// Lift the write-protection without notifying a userfaultfd.
    LiftProtection,
    /// Map a page, write-protected.
    MapProtected,
    /// Replace the huge zero page by a huge folio.
    FillHuge,
    /// Copy the page.
    Copy,
    /// Make the page writable and record its first write.
    NotifyWrite,
    /// Make all pages of the folio writable that are exclusive or shared on purpose.
    Reuse,
    /// If no other process maps the folio, proceed as for an exclusive folio; otherwise, copy the
    /// page.
    Claim,
}

impl Terms {
    /// The decision about `entry`. `page` is called to get the page of a leaf that refuses a write.
    #[inline(always)]
    pub(super) fn decide<F: FnOnce() -> FolioState>(
        self,
        access: Access,
        entry: Present,
        page: impl FnOnce() -> MappedPage<F>,
    ) -> Decision {
        match entry {
            Present::Vacant | Present::Swap => Decision::Again,
            Present::Allowed => Decision::Spurious,
            Present::ProtNone => Decision::Fail(FaultError::Protection),
            Present::Guard => Decision::Fail(FaultError::NotMapped),
            Present::Poison => Decision::Fail(FaultError::Bus),
            // A write that a userfaultfd tracks has already waited for its handler.
            Present::ProtectedVacant if self.protects && access != Access::Write => {
                Decision::MapProtected
            }
            Present::ProtectedVacant => Decision::LiftProtection,
            // `mprotect` rewrites entries, so a leaf refuses only writes that the VMA allows.
            Present::Protected | Present::Refused if access != Access::Write => {
                Decision::Fail(FaultError::Protection)
            }
            Present::Protected => Decision::LiftProtection,
            Present::Refused => self.decide_write(page()),
        }
    }

    /// As [`Terms::decide`], for a write to a page mapped read-only.
    #[inline(always)]
    fn decide_write<F: FnOnce() -> FolioState>(self, page: MappedPage<F>) -> Decision {
        let state = match page {
            MappedPage::Zero => return Decision::Copy,
            MappedPage::HugeZero => return Decision::FillHuge,
            MappedPage::Shown { readable } => return self.decide_shown(readable),
            MappedPage::Folio(state) => state,
        };
        match self.writable {
            Writable::Noticed => Decision::NotifyWrite,
            Writable::All => self.decide_exclusive(),
            Writable::Exclusive => match state() {
                // A private mapping never writes to an object's page.
                FolioState::OfObject => Decision::Copy,
                FolioState::Exclusive => self.decide_exclusive(),
                FolioState::Shared => Decision::Claim,
            },
        }
    }

    /// The decision for a write to a frame outside the core's memory. A private mapping never
    /// writes to such a frame, and a shared mapping never copies it.
    #[cold]
    fn decide_shown(self, readable: bool) -> Decision {
        match self.writable {
            Writable::Exclusive if readable => Decision::Copy,
            Writable::Exclusive => Decision::Fail(FaultError::Bus),
            Writable::All | Writable::Noticed => Decision::NotifyWrite,
        }
    }

    /// The decision for a write to a page that may be written in place.
    #[inline(always)]
    pub(super) fn decide_exclusive(self) -> Decision {
        match self.watched {
            Watched::SoftDirty => Decision::NotifyWrite,
            Watched::No => Decision::Reuse,
        }
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;
    use std::vec::Vec;

    use super::*;

    const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];
    const ENTRIES: [Present; 9] = [
        Present::Vacant,
        Present::Allowed,
        Present::Protected,
        Present::Refused,
        Present::ProtNone,
        Present::Guard,
        Present::Poison,
        Present::ProtectedVacant,
        Present::Swap,
    ];
    const PAGES: [MappedPage<FolioState>; 7] = [
        MappedPage::Zero,
        MappedPage::HugeZero,
        MappedPage::Shown { readable: true },
        MappedPage::Shown { readable: false },
        MappedPage::Folio(FolioState::OfObject),
        MappedPage::Folio(FolioState::Exclusive),
        MappedPage::Folio(FolioState::Shared),
    ];

    fn all_terms() -> Vec<Terms> {
        let mut all = Vec::new();
        for writable in [Writable::Exclusive, Writable::All, Writable::Noticed] {
            for watched in [Watched::No, Watched::SoftDirty] {
                for protects in [false, true] {
                    all.push(Terms { writable, watched, protects });
                }
            }
        }
        all
    }

    /// The decision, and whether it required the page and the folio's state.
    fn decide(
        terms: Terms,
        access: Access,
        entry: Present,
        page: MappedPage<FolioState>,
    ) -> (Decision, bool, bool) {
        let (page_read, state_read) = (Cell::new(false), Cell::new(false));
        let state_read_by = &state_read;
        let content = || {
            page_read.set(true);
            let read = move |state| {
                move || {
                    state_read_by.set(true);
                    state
                }
            };
            match page {
                MappedPage::Zero => MappedPage::Zero,
                MappedPage::HugeZero => MappedPage::HugeZero,
                MappedPage::Shown { readable } => MappedPage::Shown { readable },
                MappedPage::Folio(state) => MappedPage::Folio(read(state)),
            }
        };
        let decision = terms.decide(access, entry, content);
        (decision, page_read.get(), state_read.get())
    }

    /// Decisions about entries other than a leaf that refuses a write. For each entry: the
    /// decisions for a read (or fetch), a read with write-protection, a write, and a write with
    /// write-protection.
    const WITHOUT_PAGE: [(Present, [Decision; 4]); 8] = {
        use Decision::{Again, Fail, LiftProtection as Lift, MapProtected, Spurious};
        use FaultError::{Bus, NotMapped, Protection};
        [
            (Present::Vacant, [Again; 4]),
            (Present::Swap, [Again; 4]),
            (Present::Allowed, [Spurious; 4]),
            (Present::ProtNone, [Fail(Protection); 4]),
            (Present::Guard, [Fail(NotMapped); 4]),
            (Present::Poison, [Fail(Bus); 4]),
            (Present::ProtectedVacant, [Lift, MapProtected, Lift, Lift]),
            (Present::Protected, [Fail(Protection), Fail(Protection), Lift, Lift]),
        ]
    };

    /// Decisions about a leaf that refuses a write. For each kind of VMA: the decisions for the
    /// zero page, the huge zero page, a readable frame outside the core's memory, an unreadable
    /// one, an object's folio, an exclusive folio and a shared folio.
    const WITH_PAGE: [(Writable, Watched, [Decision; 7]); 6] = {
        use Decision::{Claim, Copy, FillHuge as Huge, NotifyWrite as Notify, Reuse};
        const BUS: Decision = Decision::Fail(FaultError::Bus);
        [
            (Writable::Exclusive, Watched::No, [Copy, Huge, Copy, BUS, Copy, Reuse, Claim]),
            (Writable::Exclusive, Watched::SoftDirty, [Copy, Huge, Copy, BUS, Copy, Notify, Claim]),
            (Writable::All, Watched::No, [Copy, Huge, Notify, Notify, Reuse, Reuse, Reuse]),
            (
                Writable::All,
                Watched::SoftDirty,
                [Copy, Huge, Notify, Notify, Notify, Notify, Notify],
            ),
            (Writable::Noticed, Watched::No, [Copy, Huge, Notify, Notify, Notify, Notify, Notify]),
            (
                Writable::Noticed,
                Watched::SoftDirty,
                [Copy, Huge, Notify, Notify, Notify, Notify, Notify],
            ),
        ]
    };

    /// The tables' decision for one case.
    fn expected(
        terms: Terms,
        access: Access,
        entry: Present,
        page: MappedPage<FolioState>,
    ) -> Decision {
        let write = access == Access::Write;
        if entry == Present::Refused {
            if !write {
                return Decision::Fail(FaultError::Protection);
            }
            let mut rows = WITH_PAGE.iter();
            let row = rows.find(|row| (row.0, row.1) == (terms.writable, terms.watched));
            let column = PAGES.iter().position(|known| *known == page);
            return row.expect("a row for each VMA").2[column.expect("a column for each page")];
        }
        let row = WITHOUT_PAGE.iter().find(|row| row.0 == entry).expect("a row for each entry");
        row.1[2 * usize::from(write) + usize::from(terms.protects)]
    }

    #[test]
    fn every_case_has_the_decision_of_the_tables() {
        let mut cases = 0;
        for terms in all_terms() {
            for access in ACCESSES {
                for entry in ENTRIES {
                    for page in PAGES {
                        let (decision, page_read, state_read) = decide(terms, access, entry, page);
                        let case = (terms, access, entry, page);
                        assert_eq!(decision, expected(terms, access, entry, page), "{case:?}");
                        let refused = entry == Present::Refused && access == Access::Write;
                        assert_eq!(page_read, refused, "{case:?}");
                        let private = terms.writable == Writable::Exclusive;
                        let folio = matches!(page, MappedPage::Folio(_));
                        assert_eq!(state_read, refused && private && folio, "{case:?}");
                        cases += 1;
                    }
                }
            }
        }
        assert_eq!(cases, 12 * 3 * 9 * 7);
    }

    #[test]
    fn a_claimed_page_is_treated_as_exclusive() {
        for terms in all_terms() {
            let exclusive = MappedPage::Folio(FolioState::Exclusive);
            let (decision, ..) = decide(terms, Access::Write, Present::Refused, exclusive);
            if terms.writable != Writable::Noticed {
                assert_eq!(terms.decide_exclusive(), decision);
            }
        }
    }
}
