//! The invariants that the auditor may find broken.

use core::fmt;

use crate::addr::{Frame, VirtAddr};
use crate::space::Resident;

/// A broken invariant: the first one that the auditor found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Violation {
    /// The scratch memory holds fewer words than [`super::scratch_words`] says.
    ScratchTooSmall {
        /// How many words it takes.
        needed: usize,
    },
    /// The index of VMAs is out of order, or its gaps are wrong.
    MappingIndex,
    /// A VMA is empty, unaligned, or reaches out of user space.
    MappingBounds(VirtAddr),
    /// A frame that is used as a table is not a table, or is one of another level.
    NotATable {
        /// The frame.
        table: Frame,
        /// The address that led to it.
        at: VirtAddr,
    },
    /// A table in a tree is marked as detached.
    StrayTable {
        /// The table.
        table: Frame,
        /// The first address that it covers.
        at: VirtAddr,
    },
    /// A table is locked although nothing runs.
    LockedTable {
        /// The table.
        table: Frame,
        /// The first address that it covers.
        at: VirtAddr,
    },
    /// A table is marked for a pending flush although nothing runs.
    PendingFlush {
        /// The table.
        table: Frame,
        /// The first address that it covers.
        at: VirtAddr,
    },
    /// A table holds a guard marker but is not marked as holding any.
    UnknownGuard(VirtAddr),
    /// A table is in two places.
    TableTwice {
        /// The table.
        table: Frame,
        /// The second place.
        at: VirtAddr,
    },
    /// A table's span touches no VMA.
    TableOutsideMappings {
        /// The table.
        table: Frame,
        /// The first address that it covers.
        at: VirtAddr,
    },
    /// A table's entry count is not the number of its entries.
    LiveCount {
        /// The table.
        table: Frame,
        /// What it says.
        says: u32,
        /// How many it has.
        holds: u32,
    },
    /// A table does not have one deposited table for each huge leaf.
    Deposit {
        /// The table.
        table: Frame,
        /// Tables on deposit.
        says: u32,
        /// Huge leaves and absent entries above level 1.
        needs: u32,
    },
    /// An address outside all VMAs is mapped.
    OutsideMappings(VirtAddr),
    /// An entry allows what its VMA does not, or is not for user mode.
    TooWide(VirtAddr),
    /// The entry has another protection key than its VMA.
    WrongKey(VirtAddr),
    /// A leaf allows neither loads nor stores nor fetches. Only RISC-V can write one down.
    LeafWithoutAccess(VirtAddr),
    /// A page is `PROT_NONE` although its VMA allows an access, or mapped although its VMA allows
    /// none.
    WrongProtNone(VirtAddr),
    /// An absent entry has no meaning.
    BadAbsent(VirtAddr),
    /// A leaf names a frame that is no folio of the memory, or not aligned to its size.
    NotAFolio {
        /// Where it is mapped.
        at: VirtAddr,
        /// The frame.
        frame: Frame,
    },
    /// A private page may be written although it is not exclusive.
    WritableButShared(VirtAddr),
    /// A contiguous run is incomplete, unaligned or unequal.
    BrokenBlock(VirtAddr),
    /// A folio's mapping count is not the number of mappings in tables.
    Mappings {
        /// The folio's first frame.
        folio: Frame,
        /// What its count says.
        says: u32,
        /// Entries that map one of its pages.
        holds: u32,
    },
    /// A folio has references that nobody holds.
    References {
        /// The folio's first frame.
        folio: Frame,
        /// How many.
        says: u32,
    },
    /// A page is marked exclusive and mapped more than once.
    ExclusiveButShared {
        /// The page's frame.
        frame: Frame,
        /// How often it is mapped.
        mappings: u32,
    },
    /// A page of shared memory or of a file is marked exclusive: no process has it alone.
    ExclusiveButOfObject(Frame),
    /// An allocated frame cannot be reached.
    Leaked(Frame),
    /// A folio without mappings that no object names still names an owner, which may be freed.
    StaleOwner(Frame),
    /// The free lists contradict the frames' metadata.
    FreeLists(Frame),
    /// This many frees, unmaps or releases were refused, because nothing was there to be freed.
    Refused(u64),
    /// The reverse map does not lead to the page mapped at the address.
    WrongOwner(VirtAddr),
    /// The counts of resident pages are not what the tables hold.
    Resident {
        /// What they say.
        says: Resident,
        /// The sums.
        holds: Resident,
    },
    /// An address space's accounts are not the sums over its VMAs.
    Accounts {
        /// What they say.
        says: crate::Usage,
        /// The sums.
        holds: crate::Usage,
    },
    /// Anon groups, or states of address spaces, that cannot be reached.
    LeakedGroups {
        /// How many are allocated.
        allocated: u64,
        /// How many were met.
        used: u64,
    },
    /// The page index of the object with this number is out of order, or the object is not at rest.
    ObjectIndex(u64),
    /// An object names for a page a frame that is not in a folio of its own, or that is named
    /// twice.
    ObjectPage {
        /// The object's number.
        object: u64,
        /// The page's.
        page: u64,
    },
    /// The object with this number lists VMAs that do not map it, or counts them wrongly.
    ObjectMappers(u64),
    /// Mappings of objects are missing in the objects' lists, or too many are there.
    Unlisted {
        /// VMAs in the lists.
        listed: u64,
        /// VMAs that map objects.
        mapping: u64,
    },
    /// The committed memory is not what it should be.
    Committed {
        /// What does.
        says: u64,
        /// What should.
        holds: u64,
    },
    /// A quota has given out more or fewer pages than are committed for its objects.
    Quota {
        /// What it has given out.
        says: u64,
        /// What is committed.
        holds: u64,
    },
    /// A page is mapped although its object has dropped it.
    DroppedButMapped(Frame),
    /// A kernel area is not mapped at the address, or not to its own frames.
    AreaPage(VirtAddr),
    /// Kernel areas that are in no map, or too few of them.
    LeakedAreas {
        /// Areas that are allocated.
        allocated: u64,
        /// Areas in the maps.
        used: u64,
    },
    /// Objects, or nodes of their page indexes, that cannot be reached.
    LeakedObjects {
        /// How many are allocated.
        allocated: u64,
        /// How many were met.
        used: u64,
    },
    /// An entry names a slot of no area.
    NoSlot(VirtAddr),
    /// A slot is not as the entry that names it says, or its content is nowhere.
    WrongSlot {
        /// Where the entry is, or the page in its object; 0 for a slot that names a page wrongly.
        at: VirtAddr,
        /// The area.
        area: u8,
        /// The slot.
        slot: u64,
    },
    /// The counts of the slots are not those of the entries, or slots are lost.
    SwapSlots {
        /// Entries that the slots say they have.
        named: u64,
        /// Entries that name slots.
        holds: u64,
        /// Slots that are not free.
        taken: u64,
        /// Slots that the areas say are taken.
        says: u64,
    },
    /// Frames of the compressed store or of the slots' account are lost.
    SwapFrames {
        /// Frames of the store.
        compressed: u64,
        /// Frames of the account.
        account: u64,
        /// What both say they have.
        held: (u64, u64),
    },
    /// VMAs that are in no address space, or too few of them.
    LeakedMappings {
        /// VMAs that are allocated.
        allocated: u64,
        /// VMAs in the address spaces.
        used: u64,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ScratchTooSmall { needed } => {
                write!(f, "the audit takes {needed} words of scratch memory")
            }
            Self::MappingIndex => write!(f, "the index of VMAs is out of order"),
            Self::MappingBounds(at) => write!(f, "the VMA at {at} has impossible bounds"),
            Self::NotATable { table, at } => {
                write!(f, "{table:?} is no table of the level at {at}")
            }
            Self::StrayTable { table, at } => {
                write!(f, "the table {table:?} at {at} is marked stray")
            }
            Self::LockedTable { table, at } => {
                write!(f, "the table {table:?} at {at} is still locked")
            }
            Self::PendingFlush { table, at } => {
                write!(f, "the table {table:?} at {at} still waits for a flush")
            }
            Self::UnknownGuard(at) => {
                write!(f, "the table of the guard at {at} does not know that it has one")
            }
            Self::TableTwice { table, at } => {
                write!(f, "the table {table:?} hangs at {at} and elsewhere")
            }
            Self::TableOutsideMappings { table, at } => {
                write!(f, "the table {table:?} at {at} is where no VMA is")
            }
            Self::LiveCount { table, says, holds } => {
                write!(f, "the table {table:?} counts {says} entries and holds {holds}")
            }
            Self::Deposit { table, says, needs } => {
                write!(f, "the table {table:?} has {says} tables on deposit and needs {needs}")
            }
            Self::OutsideMappings(at) => write!(f, "something is mapped at {at}, where no VMA is"),
            Self::TooWide(at) => write!(f, "the entry at {at} allows more than its VMA"),
            Self::WrongKey(at) => write!(f, "the entry at {at} has another key than its VMA"),
            Self::LeafWithoutAccess(at) => write!(f, "the leaf at {at} allows nothing"),
            Self::WrongProtNone(at) => {
                write!(f, "the page at {at} is PROT_NONE or shown against its VMA")
            }
            Self::BadAbsent(at) => write!(f, "the absent entry at {at} means nothing"),
            Self::NotAFolio { at, frame } => write!(f, "{frame:?}, mapped at {at}, is no folio"),
            Self::WritableButShared(at) => {
                write!(f, "the page at {at} is writable and not exclusive")
            }
            Self::BrokenBlock(at) => {
                write!(f, "the contiguous run at {at} is not all or nothing")
            }
            Self::Mappings { folio, says, holds } => {
                write!(f, "the folio at {folio:?} counts {says} mappings, tables hold {holds}")
            }
            Self::References { folio, says } => {
                write!(f, "the folio at {folio:?} has {says} references that nobody holds")
            }
            Self::ExclusiveButShared { frame, mappings } => {
                write!(f, "{frame:?} is exclusive and mapped {mappings} times")
            }
            Self::ExclusiveButOfObject(frame) => {
                write!(f, "{frame:?} is exclusive and a page of an object")
            }
            Self::StaleOwner(frame) => {
                write!(f, "{frame:?} heads a folio without mappings that names an owner")
            }
            Self::Leaked(frame) => write!(f, "{frame:?} is allocated and nobody can reach it"),
            Self::FreeLists(frame) => write!(f, "the free lists are wrong at {frame:?}"),
            Self::Refused(count) => write!(f, "{count} frees of something that was not there"),
            Self::WrongOwner(at) => write!(f, "the reverse map does not lead to {at}"),
            Self::Resident { says, holds } => {
                write!(f, "the counts of resident pages are {says:?}, and {holds:?} are mapped")
            }
            Self::Accounts { says, holds } => {
                write!(f, "an address space accounts for {says:?} and has {holds:?}")
            }
            Self::LeakedGroups { allocated, used } => {
                write!(f, "{allocated} groups or trees are allocated and {used} in use")
            }
            Self::ObjectIndex(object) => write!(f, "the index of object {object} is out of order"),
            Self::ObjectPage { object, page } => {
                write!(f, "object {object} names for page {page} what is not its own")
            }
            Self::ObjectMappers(object) => write!(f, "the mappings of object {object} are wrong"),
            Self::Unlisted { listed, mapping } => {
                write!(f, "{mapping} VMAs map objects and {listed} are listed")
            }
            Self::Committed { says, holds } => {
                write!(f, "{says} pages count as committed instead of {holds}")
            }
            Self::Quota { says, holds } => {
                write!(f, "a quota has given out {says} pages and its objects have {holds}")
            }
            Self::DroppedButMapped(frame) => {
                write!(f, "{frame:?} is mapped and its object has dropped it")
            }
            Self::AreaPage(at) => write!(f, "the kernel's area at {at} does not have its page"),
            Self::LeakedAreas { allocated, used } => {
                write!(f, "{allocated} areas of the kernel are allocated and {used} in use")
            }
            Self::LeakedObjects { allocated, used } => {
                write!(f, "{allocated} objects or nodes are allocated and {used} in use")
            }
            Self::NoSlot(at) => write!(f, "the entry at {at} names a slot that does not exist"),
            Self::WrongSlot { at, area, slot } => {
                write!(f, "slot {slot} of swap area {area} is not as the entry at {at} says")
            }
            Self::SwapSlots { named, holds, taken, says } => write!(
                f,
                "swap slots have {named} entries and are named by {holds}; {taken} are taken, not {says}"
            ),
            Self::SwapFrames { compressed, account, held } => write!(
                f,
                "{compressed} frames are compressed memory and {account} the account of slots, not {held:?}"
            ),
            Self::LeakedMappings { allocated, used } => {
                write!(f, "{allocated} VMAs are allocated and {used} in use")
            }
        }
    }
}

impl core::error::Error for Violation {}
