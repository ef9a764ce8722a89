//! The operations of a sequence. An operation prints as the Rust expression that creates it, so
//! that a sequence found by proptest can become a test.

use std::fmt::{self, Debug, Formatter};

use super::names::{
    ADVICE, ALLOCATE_MODES, ALLOWANCES,
    Argument::{self, Address, Descriptor, Flags, Length, Number, OneOf},
    FEATURES, LOCK_ALL_FLAGS, LOCK_FLAGS, MAP_FLAGS, MOVE_MODES, PROTECT_MODES, PROTECTIONS,
    REGISTER_MODES, REMAP_FLAGS, RESOURCES, SEALS, SUPPLY_MODES, SWAPS, SYNC_FLAGS,
};
use super::words::{Sink, Source};

macro_rules! operations {
    ($($(#[$text:meta])* $operation:ident = $name:ident($($argument:ident: $kind:expr),*);)*) => {
        /// The kind of an operation.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum OperationKind {
            $($(#[$text])* $operation,)*
        }

        impl OperationKind {
            /// All kinds, each at the index equal to its number.
            const ALL: &[Self] = &[$(Self::$operation,)*];

            /// The name of the function that creates such an operation.
            pub fn name(self) -> &'static str {
                match self { $(Self::$operation => stringify!($name),)* }.trim_end_matches("_raw")
            }

            /// The kinds of its arguments.
            fn arguments(self) -> &'static [Argument] {
                match self { $(Self::$operation => &[$($kind),*],)* }
            }
        }

        $(
            $(#[$text])*
            pub fn $name($($argument: u64),*) -> Operation {
                Operation::new(OperationKind::$operation, &[$($argument),*])
            }
        )*
    };
}

operations! {
    /// System call.
    Mmap = mmap(at: Address, length: Length, protection: Flags(PROTECTIONS),
        flags: Flags(MAP_FLAGS), file: Descriptor, offset: Length);
    /// System call.
    Munmap = munmap(at: Address, length: Length);
    /// System call.
    Mremap = mremap(old: Address, old_length: Length, length: Length, flags: Flags(REMAP_FLAGS),
        to: Address);
    /// System call.
    Mprotect = mprotect(at: Address, length: Length, protection: Flags(PROTECTIONS));
    /// System call.
    Madvise = madvise(at: Address, length: Length, advice: OneOf(ADVICE));
    /// System call. The ranges are in [`Operation::ranges`]; they are written to
    /// [`super::place::SCRATCH`].
    ProcessMadvise = process_madvise_raw(process: Descriptor, advice: OneOf(ADVICE), flags: Number);
    /// System call.
    Brk = brk(at: Address);
    /// System call.
    Mlock = mlock(at: Address, length: Length);
    /// System call.
    Mlock2 = mlock2(at: Address, length: Length, flags: Flags(LOCK_FLAGS));
    /// System call.
    Munlock = munlock(at: Address, length: Length);
    /// System call.
    Mlockall = mlockall(flags: Flags(LOCK_ALL_FLAGS));
    /// System call.
    Munlockall = munlockall();
    /// System call. Its output is visible if it is written to [`super::place::SCRATCH`].
    Mincore = mincore(at: Address, length: Length, vector: Address);
    /// System call.
    Msync = msync(at: Address, length: Length, flags: Flags(SYNC_FLAGS));
    /// System call.
    Mseal = mseal(at: Address, length: Length, flags: Number);
    /// System call.
    Ftruncate = ftruncate(file: Descriptor, length: Length);
    /// System call.
    Fallocate = fallocate(file: Descriptor, mode: Flags(ALLOCATE_MODES), offset: Length,
        length: Length);
    /// `fcntl(F_ADD_SEALS)`.
    AddSeals = add_seals(file: Descriptor, seals: Flags(SEALS));
    /// `fcntl(F_GET_SEALS)`.
    GetSeals = get_seals(file: Descriptor);
    /// `pread` to memory outside the process; the bytes are observed.
    ReadAt = read_at(file: Descriptor, offset: Length, length: Length);
    /// `pwrite` of bytes that `stamp` makes distinct.
    WriteAt = write_at(file: Descriptor, offset: Length, length: Length, stamp: Number);
    /// `setrlimit`: the present usage plus this number of pages, or a special limit.
    Limit = limit(resource: OneOf(RESOURCES), pages: OneOf(ALLOWANCES));
    /// `UFFDIO_API`.
    Agree = agree(features: Flags(FEATURES));
    /// `UFFDIO_REGISTER`.
    Register = register(at: Address, length: Length, modes: Flags(REGISTER_MODES));
    /// `UFFDIO_UNREGISTER`.
    Unregister = unregister(at: Address, length: Length);
    /// `UFFDIO_COPY`. For this and all other requests that may stop early, the result in the
    /// structure is observed.
    SupplyCopy = supply_copy(to: Address, from: Address, length: Length, mode: Flags(SUPPLY_MODES));
    /// `UFFDIO_ZEROPAGE`.
    SupplyZeroes = supply_zeroes(at: Address, length: Length, mode: Flags(SUPPLY_MODES));
    /// `UFFDIO_CONTINUE`.
    SupplyPresent = supply_present(at: Address, length: Length, mode: Flags(SUPPLY_MODES));
    /// `UFFDIO_POISON`.
    SupplyPoison = supply_poison(at: Address, length: Length, mode: Flags(SUPPLY_MODES));
    /// `UFFDIO_MOVE`.
    MovePages = move_pages(to: Address, from: Address, length: Length, mode: Flags(MOVE_MODES));
    /// `UFFDIO_WRITEPROTECT`.
    WriteProtect = write_protect(at: Address, length: Length, mode: Flags(PROTECT_MODES));
    /// Removes the core's swap area (`swapoff`) and adds another. Linux stays without swap.
    SwapTo = swap_to(area: OneOf(SWAPS));
    /// The core frees this number of pages if it can. Linux has enough memory.
    Reclaim = reclaim(pages: Number);
    /// Zeroes all writable words, gives the first advice if it is not 0, then gives `MADV_FREE`.
    /// Such a page reads as zeroes whether or not it has been freed.
    FreeWiped = free_wiped(at: Address, length: Length, first: OneOf(ADVICE));
    /// The program loads eight bytes.
    Load = load(at: Address);
    /// The program stores eight bytes.
    Store = store(at: Address, value: Number);
    /// Forks; the parent continues. No effect if a child already exists.
    Fork = fork();
    /// From here on the other process acts. No effect if no other process exists.
    Switch = switch();
    /// Observes the child's memory. The child exits, and the parent acts from here on. No effect
    /// without a child.
    Exit = exit();
}

/// An operation of a process.
#[derive(Clone, PartialEq, Eq)]
pub struct Operation {
    pub operation: OperationKind,
    /// The arguments, as in registers; 0 for absent ones.
    pub arguments: [u64; 6],
    /// The vector of `process_madvise`.
    pub ranges: Vec<(u64, u64)>,
}

/// System call, with its vector: addresses and lengths.
pub fn process_madvise(process: u64, ranges: &[(u64, u64)], advice: u64, flags: u64) -> Operation {
    Operation { ranges: ranges.to_vec(), ..process_madvise_raw(process, advice, flags) }
}

impl OperationKind {
    /// The request of `ioctl(2)` on a userfaultfd, and the number of words in its structure. The
    /// last word receives the result.
    pub fn userfault_request(self) -> Option<(u32, usize)> {
        Some(match self {
            Self::Agree => (0xc018_aa3f, 3),
            Self::Register => (0xc020_aa00, 4),
            Self::Unregister => (0x8010_aa01, 2),
            Self::SupplyCopy => (0xc028_aa03, 5),
            Self::SupplyZeroes => (0xc020_aa04, 4),
            Self::MovePages => (0xc028_aa05, 5),
            Self::WriteProtect => (0xc018_aa06, 3),
            Self::SupplyPresent => (0xc020_aa07, 4),
            Self::SupplyPoison => (0xc020_aa08, 4),
            _ => return None,
        })
    }
}

impl Operation {
    /// The argument structure of a request on a userfaultfd.
    pub fn userfault_words(&self) -> [u64; 5] {
        let a = self.arguments;
        match self.operation {
            OperationKind::Agree => [0xaa, a[0], 0, 0, 0],
            _ => [a[0], a[1], a[2], a[3], 0],
        }
    }

    fn new(operation: OperationKind, given: &[u64]) -> Self {
        let mut arguments = [0; 6];
        arguments[..given.len()].copy_from_slice(given);
        Self { operation, arguments, ranges: Vec::new() }
    }

    /// Writes the operation as words.
    pub fn put(&self, sink: &mut impl Sink) {
        sink.put(self.operation as u64);
        sink.put_all(&self.arguments);
        sink.put(self.ranges.len() as u64);
        for (start, length) in &self.ranges {
            sink.put(*start);
            sink.put(*length);
        }
    }

    /// Reads what [`Operation::put`] wrote.
    pub fn take(source: &mut Source<'_>) -> Self {
        let operation = OperationKind::ALL[source.take() as usize];
        let arguments = source.take_all().try_into().expect("six arguments");
        let count = source.take() as usize;
        let ranges = source.take_many(count, |source| (source.take(), source.take()));
        Self { operation, arguments, ranges }
    }
}

struct Written(Argument, u64);

impl Debug for Written {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.write(self.1, f)
    }
}

impl Debug for Operation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let kinds = self.operation.arguments();
        let mut written: Vec<_> = kinds
            .iter()
            .zip(self.arguments)
            .map(|(kind, value)| format!("{:?}", Written(*kind, value)))
            .collect();
        if self.operation != OperationKind::ProcessMadvise {
            return write!(f, "{}({})", self.operation.name(), written.join(", "));
        }
        let ranges: Vec<_> = self
            .ranges
            .iter()
            .map(|(start, length)| {
                format!("({:?}, {:?})", Written(Address, *start), Written(Length, *length))
            })
            .collect();
        written.insert(1, format!("&[{}]", ranges.join(", ")));
        write!(f, "{}({})", self.operation.name(), written.join(", "))
    }
}
