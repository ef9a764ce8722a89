//! The numbers of Linux's interface by name, so that sequences are readable. They deliberately
//! repeat the core's numbers, which are under test.

use std::fmt::{self, Formatter};

use super::place::{
    CLOSED, FILES, FIRST_PROCESS, NO_FILE, PAGE, READ_ONLY, REGION, REGION_END, SCRATCH,
    WRITE_ONLY, ZEROES,
};

/// Numbers with their names.
pub type Names = [(u64, &'static str)];

macro_rules! names {
    ($($(#[$text:meta])* $table:ident { $($name:ident = $value:expr,)* })*) => {
        $(
            $(
                pub const $name: u64 = $value;
            )*
            $(#[$text])*
            pub const $table: &Names = &[$(($name, stringify!($name)),)*];
        )*
    };
}

names! {
    /// Protections of memory.
    PROTECTIONS {
        PROT_READ = 1,
        PROT_WRITE = 2,
        PROT_EXEC = 4,
        PROT_GROWSDOWN = 0x0100_0000,
        PROT_GROWSUP = 0x0200_0000,
    }
    /// Flags of mappings.
    MAP_FLAGS {
        MAP_SHARED = 0x1,
        MAP_PRIVATE = 0x2,
        MAP_DROPPABLE = 0x8,
        MAP_FIXED = 0x10,
        MAP_ANONYMOUS = 0x20,
        MAP_GROWSDOWN = 0x100,
        MAP_LOCKED = 0x2000,
        MAP_NORESERVE = 0x4000,
        MAP_POPULATE = 0x8000,
        MAP_NONBLOCK = 0x1_0000,
        MAP_STACK = 0x2_0000,
        MAP_SYNC = 0x8_0000,
        MAP_FIXED_NOREPLACE = 0x10_0000,
    }
    /// Flags of `mremap`.
    REMAP_FLAGS {
        MREMAP_MAYMOVE = 1,
        MREMAP_FIXED = 2,
        MREMAP_DONTUNMAP = 4,
    }
    /// A program's advice about its memory.
    ADVICE {
        MADV_NORMAL = 0,
        MADV_RANDOM = 1,
        MADV_SEQUENTIAL = 2,
        MADV_WILLNEED = 3,
        MADV_DONTNEED = 4,
        MADV_FREE = 8,
        MADV_REMOVE = 9,
        MADV_DONTFORK = 10,
        MADV_DOFORK = 11,
        MADV_HUGEPAGE = 14,
        MADV_NOHUGEPAGE = 15,
        MADV_DONTDUMP = 16,
        MADV_DODUMP = 17,
        MADV_WIPEONFORK = 18,
        MADV_KEEPONFORK = 19,
        MADV_COLD = 20,
        MADV_PAGEOUT = 21,
        MADV_POPULATE_READ = 22,
        MADV_POPULATE_WRITE = 23,
        MADV_DONTNEED_LOCKED = 24,
        MADV_COLLAPSE = 25,
        MADV_GUARD_INSTALL = 102,
        MADV_GUARD_REMOVE = 103,
    }
    /// The swap area of pages.
    SWAPS {
        NO_SWAP = 0,
        COMPRESSED_MEMORY = 1,
        SWAP_DEVICE = 2,
        FEW_SLOTS = 3,
    }
    /// Flags of locking.
    LOCK_FLAGS {
        MLOCK_ONFAULT = 1,
    }
    /// The scope of mlockall.
    LOCK_ALL_FLAGS {
        MCL_CURRENT = 1,
        MCL_FUTURE = 2,
        MCL_ONFAULT = 4,
    }
    /// Flags of writeback.
    SYNC_FLAGS {
        MS_ASYNC = 1,
        MS_INVALIDATE = 2,
        MS_SYNC = 4,
    }
    /// Flags that allocate or remove space in a file.
    ALLOCATE_MODES {
        FALLOC_FL_KEEP_SIZE = 1,
        FALLOC_FL_PUNCH_HOLE = 2,
        FALLOC_FL_COLLAPSE_RANGE = 8,
        FALLOC_FL_ZERO_RANGE = 0x10,
    }
    /// Limited resources.
    RESOURCES {
        RLIMIT_DATA = 2,
        RLIMIT_MEMLOCK = 8,
        RLIMIT_AS = 9,
    }
    /// Limits other than a number of additional pages.
    ALLOWANCES {
        UNLIMITED = u64::MAX,
        NOTHING = u64::MAX - 1,
    }
    /// Optional features of a userfaultfd. (Without the first one, an access to a missing page
    /// would wait forever.)
    FEATURES {
        UFFD_FEATURE_SIGBUS = 1 << 7,
        UFFD_FEATURE_WP_UNPOPULATED = 1 << 13,
        UFFD_FEATURE_WP_ASYNC = 1 << 15,
    }
    /// Modes of registration with a userfaultfd.
    REGISTER_MODES {
        UFFDIO_REGISTER_MODE_MISSING = 1,
        UFFDIO_REGISTER_MODE_WP = 2,
        UFFDIO_REGISTER_MODE_MINOR = 4,
    }
    /// Modes of supplying pages.
    SUPPLY_MODES {
        UFFDIO_MODE_DONTWAKE = 1,
        UFFDIO_MODE_WP = 2,
    }
    /// Modes of moving pages by a userfaultfd.
    MOVE_MODES {
        UFFDIO_MOVE_MODE_DONTWAKE = 1,
        UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES = 2,
    }
    /// Modes of write-protection by a userfaultfd.
    PROTECT_MODES {
        UFFDIO_WRITEPROTECT_MODE_WP = 1,
        UFFDIO_WRITEPROTECT_MODE_DONTWAKE = 2,
    }
    /// Forbidden changes of a file.
    SEALS {
        F_SEAL_SEAL = 1,
        F_SEAL_SHRINK = 2,
        F_SEAL_GROW = 4,
        F_SEAL_WRITE = 8,
        F_SEAL_FUTURE_WRITE = 0x10,
        F_SEAL_EXEC = 0x20,
    }
}

/// The kind of an argument, for readers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Argument {
    Address,
    Length,
    Descriptor,
    Flags(&'static Names),
    OneOf(&'static Names),
    Number,
}

impl Argument {
    /// Writes a value of this kind as a Rust expression.
    pub fn write(self, value: u64, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => write_address(value, f),
            Self::Length => write_length(value, f),
            Self::Descriptor => write_descriptor(value, f),
            Self::Flags(names) => write_flags(value, names, f),
            Self::OneOf(names) => match names.iter().find(|(number, _)| *number == value) {
                Some((_, name)) => f.write_str(name),
                None => write_number(value, f),
            },
            Self::Number => write_number(value, f),
        }
    }
}

fn write_number(value: u64, f: &mut Formatter<'_>) -> fmt::Result {
    if value < 1 << 12 { write!(f, "{value}") } else { write!(f, "{value:#x}") }
}

fn write_address(value: u64, f: &mut Formatter<'_>) -> fmt::Result {
    if (REGION..=REGION_END).contains(&value) {
        write!(f, "page({})", (value - REGION) / PAGE)?;
        write_rest(value % PAGE, f)
    } else if (SCRATCH..SCRATCH + 2 * PAGE).contains(&value) {
        f.write_str("SCRATCH")?;
        write_rest(value - SCRATCH, f)
    } else {
        write_number(value, f)
    }
}

fn write_length(value: u64, f: &mut Formatter<'_>) -> fmt::Result {
    if !(PAGE..=REGION_END - REGION).contains(&value) {
        return write_number(value, f);
    }
    write!(f, "pages({})", value / PAGE)?;
    write_rest(value % PAGE, f)
}

fn write_rest(rest: u64, f: &mut Formatter<'_>) -> fmt::Result {
    if rest == 0 { Ok(()) } else { write!(f, " + {rest}") }
}

fn write_descriptor(descriptor: u64, f: &mut Formatter<'_>) -> fmt::Result {
    for (name, files) in [("FILES", &FILES[..]), ("ZEROES", &ZEROES)] {
        if let Some(index) = files.iter().position(|file| *file == descriptor) {
            return write!(f, "{name}[{index}]");
        }
    }
    match descriptor {
        NO_FILE => f.write_str("NO_FILE"),
        READ_ONLY => f.write_str("READ_ONLY"),
        WRITE_ONLY => f.write_str("WRITE_ONLY"),
        CLOSED => f.write_str("CLOSED"),
        FIRST_PROCESS => f.write_str("FIRST_PROCESS"),
        other => write!(f, "{other}"),
    }
}

fn write_flags(value: u64, names: &Names, f: &mut Formatter<'_>) -> fmt::Result {
    let mut rest = value;
    let mut between = "";
    for (bit, name) in names {
        if value & bit == *bit {
            write!(f, "{between}{name}")?;
            between = " | ";
            rest &= !bit;
        }
    }
    if rest == 0 && !between.is_empty() {
        return Ok(());
    }
    f.write_str(between)?;
    write_number(rest, f)
}

/// The errno's name, or the number of a rare one.
pub fn errno(number: i64) -> String {
    const NAMES: [(i64, &str); 17] = [
        (1, "EPERM"),
        (3, "ESRCH"),
        (4, "EINTR"),
        (9, "EBADF"),
        (11, "EAGAIN"),
        (12, "ENOMEM"),
        (13, "EACCES"),
        (14, "EFAULT"),
        (16, "EBUSY"),
        (17, "EEXIST"),
        (19, "ENODEV"),
        (22, "EINVAL"),
        (26, "ETXTBSY"),
        (27, "EFBIG"),
        (28, "ENOSPC"),
        (75, "EOVERFLOW"),
        (95, "EOPNOTSUPP"),
    ];
    let name = NAMES.iter().find(|(value, _)| *value == number);
    name.map_or_else(|| format!("errno {number}"), |(_, name)| (*name).to_owned())
}
