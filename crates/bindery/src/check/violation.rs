//! The violations of invariants that the auditor may find.

use core::fmt;

use crate::addr::{Frame, VirtAddr};
use crate::space::Resident;

/// A broken invariant: the first that the auditor found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Violation {
    /// The scratch memory has fewer words than [`super::scratch_words`] requires.
    ScratchTooSmall {
        /// The number of words required.
        needed: usize,
    },
    /// The index of VMAs is out of order, or its gaps are wrong.
    MappingIndex,
    /// A VMA is empty, unaligned, or extends beyond user space.
    MappingBounds(VirtAddr),
    /// A frame that is used as a table is not a table or has another level.
    NotATable {
        /// The frame.
        table: Frame,
        /// The address at which the table was found.
        at: VirtAddr,
    },
    /// A table in a tree is marked as detached.
    StrayTable {
        /// The table.
        table: Frame,
        /// The first address that it covers.
        at: VirtAddr,
    },
    /// A table is locked although no operation runs.
    LockedTable {
        /// The table.
        table: Frame,
        /// The first address that it covers.
        at: VirtAddr,
    },
    /// A table is marked for a pending flush although no operation runs.
    PendingFlush {
        /// The table.
        table: Frame,
        /// The first address that it covers.
        at: VirtAddr,
    },
    /// A table has a guard marker but is not marked as having any.
    UnknownGuard(VirtAddr),
    /// A table is linked twice.
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
        /// The recorded count.
        says: u32,
        /// The actual number.
        holds: u32,
    },
    /// A table's number of deposited tables differs from its number of huge leaves.
    Deposit {
        /// The table.
        table: Frame,
        /// Deposited tables.
        says: u32,
        /// Huge leaves and absent entries above level 1.
        needs: u32,
    },
    /// An address outside all VMAs is mapped.
    OutsideMappings(VirtAddr),
    /// An entry allows more than its VMA, or lacks user mode.
    TooWide(VirtAddr),
    /// The entry's protection key differs from the VMA's.
    WrongKey(VirtAddr),
    /// A leaf allows no load, store or fetch. Only RISC-V can encode such a leaf.
    LeafWithoutAccess(VirtAddr),
    /// A page is `PROT_NONE` although its VMA allows an access, or mapped although its VMA allows
    /// none.
    WrongProtNone(VirtAddr),
    /// An absent entry cannot be decoded.
    BadAbsent(VirtAddr),
    /// A leaf maps a frame that is in no folio of the memory, or not aligned to its size.
    NotAFolio {
        /// The address that it maps.
        at: VirtAddr,
        /// The frame.
        frame: Frame,
    },
    /// A leaf in a mapping of the embedder's frames maps a frame that the core uses.
    NotShown {
        /// The address that it maps.
        at: VirtAddr,
        /// The frame.
        frame: Frame,
    },
    /// The memory type of an entry differs from its mapping's.
    WrongMemoryType(VirtAddr),
    /// A private page is writable although it is not exclusive.
    WritableButShared(VirtAddr),
    /// A contiguous run is incomplete or unaligned, or its entries differ.
    BrokenBlock(VirtAddr),
    /// A folio's mapping count differs from the number of mappings in tables.
    Mappings {
        /// The folio's first frame.
        folio: Frame,
        /// The recorded count.
        says: u32,
        /// The number of entries that map one of its pages.
        holds: u32,
    },
    /// A folio has more references than holders.
    References {
        /// The folio's first frame.
        folio: Frame,
        /// The number of excess references.
        says: u32,
    },
    /// A page is marked exclusive but mapped more than once.
    ExclusiveButShared {
        /// The page's frame.
        frame: Frame,
        /// The number of its mappings.
        mappings: u32,
    },
    /// A page of shared memory or of a file is marked exclusive, although it never belongs to only
    /// one process.
    ExclusiveButOfObject(Frame),
    /// An allocated frame is unreachable.
    Leaked(Frame),
    /// A folio that is unmapped and in no object still has an owner, which may be freed.
    StaleOwner(Frame),
    /// The free lists, the fronts or the magazines of the CPUs contradict the frames' metadata.
    FreeLists(Frame),
    /// This number of frees, unmaps or releases was refused, because nothing was allocated, mapped
    /// or held.
    Refused(u64),
    /// The reverse map does not lead to the page mapped at the address.
    WrongOwner(VirtAddr),
    /// The counts of resident pages differ from the tables.
    Resident {
        /// The recorded counts.
        says: Resident,
        /// The actual sums.
        holds: Resident,
    },
    /// An address space's accounts differ from the sums over its VMAs.
    Accounts {
        /// The recorded accounts.
        says: crate::Usage,
        /// The actual sums.
        holds: crate::Usage,
    },
    /// Anon groups or address space states are unreachable.
    LeakedGroups {
        /// The number allocated.
        allocated: u64,
        /// The number found.
        used: u64,
    },
    /// The page index of the object with this number is out of order, or an operation of the object
    /// is in progress.
    ObjectIndex(u64),
    /// An object refers to a frame that is in no folio of the object, or refers to a frame twice.
    ObjectPage {
        /// The object's number.
        object: u64,
        /// The page's number.
        page: u64,
    },
    /// The list of the object with this number contains VMAs that do not map it, or their number is
    /// wrong.
    ObjectMappers(u64),
    /// The objects' lists lack mappings of objects or contain too many.
    Unlisted {
        /// VMAs in the lists.
        listed: u64,
        /// VMAs that map objects.
        mapping: u64,
    },
    /// The committed memory is wrong.
    Committed {
        /// The recorded amount.
        says: u64,
        /// The required amount.
        holds: u64,
    },
    /// The number of pages counted as dirty differs from that of the files.
    Unsaved {
        /// The recorded number.
        says: u64,
        /// The sum over the files.
        holds: u64,
    },
    /// The number of pages that a quota has granted differs from the number committed for its
    /// objects.
    Quota {
        /// The pages granted.
        says: u64,
        /// The pages committed.
        holds: u64,
    },
    /// A page is mapped although its object has dropped it.
    DroppedButMapped(Frame),
    /// A kernel area is not mapped at the address, or not to its own frames.
    AreaPage(VirtAddr),
    /// Kernel areas are in no map, or maps contain too many.
    LeakedAreas {
        /// The number of allocated areas.
        allocated: u64,
        /// The number of areas in the maps.
        used: u64,
    },
    /// The file names, or the list of files with dirty pages, contradict the objects.
    Registry,
    /// Objects, or nodes of their page indexes, are unreachable.
    LeakedObjects {
        /// The number allocated.
        allocated: u64,
        /// The number found.
        used: u64,
    },
    /// An entry refers to a slot of no area.
    NoSlot(VirtAddr),
    /// A slot contradicts the entry that refers to it, or its content is missing.
    WrongSlot {
        /// The address of the entry, or the page in its object; 0 for a slot with a wrong page.
        at: VirtAddr,
        /// The area.
        area: u8,
        /// The slot.
        slot: u64,
    },
    /// The counts of the slots differ from the entries, or slots are lost.
    SwapSlots {
        /// The sum of the slots' counts.
        named: u64,
        /// Entries that refer to slots.
        holds: u64,
        /// Slots that are not free.
        taken: u64,
        /// The areas' count of used slots.
        says: u64,
    },
    /// Frames of the compressed store or of the slot records are lost.
    SwapFrames {
        /// Frames of the compressed store.
        compressed: u64,
        /// Frames of the slot records.
        account: u64,
        /// The recorded number of frames of both.
        held: (u64, u64),
    },
    /// VMAs are in no address space, or address spaces contain too many.
    LeakedMappings {
        /// The number of allocated VMAs.
        allocated: u64,
        /// The number of VMAs in the address spaces.
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
            Self::NotShown { at, frame } => {
                write!(f, "{frame:?}, shown at {at}, is used by the core")
            }
            Self::WrongMemoryType(at) => {
                write!(f, "the entry at {at} has another memory type than its mapping")
            }
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
                write!(f, "the folio at {folio:?} has {says} references without a holder")
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
            Self::Leaked(frame) => write!(f, "{frame:?} is allocated and unreachable"),
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
            Self::Unsaved { says, holds } => {
                write!(f, "{says} pages count as dirty instead of {holds}")
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
            Self::Registry => {
                write!(f, "the names of files or the list of dirty ones are not as the objects say")
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
