//! What a sequence is made of. An operation prints as the Rust expression that makes it, so that
//! what proptest found can be kept as a test.

use std::fmt::{self, Debug, Formatter};

use super::names::{
    ADVICE, ALLOCATE_MODES, ALLOWANCES,
    Argument::{self, Address, Descriptor, Flags, Length, Number, OneOf},
    LOCK_ALL_FLAGS, LOCK_FLAGS, MAP_FLAGS, PROTECTIONS, REMAP_FLAGS, RESOURCES, SEALS, SYNC_FLAGS,
};
use super::words::{Sink, Source};

macro_rules! operations {
    ($($(#[$text:meta])* $operation:ident = $name:ident($($argument:ident: $kind:expr),*);)*) => {
        /// What an operation does.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum OperationKind {
            $($(#[$text])* $operation,)*
        }

        impl OperationKind {
            /// All of them, each at the index that is its number.
            const ALL: &[Self] = &[$(Self::$operation,)*];

            /// The name of the function that makes such an operation.
            pub fn name(self) -> &'static str {
                match self { $(Self::$operation => stringify!($name),)* }.trim_end_matches("_raw")
            }

            /// What its arguments are.
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
    /// System call; the ranges are in [`Operation::ranges`], and are written to
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
    /// System call. What it writes is seen where it writes to [`super::place::SCRATCH`].
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
    /// `pread`, to memory of the kernel's own; the bytes are seen.
    ReadAt = read_at(file: Descriptor, offset: Length, length: Length);
    /// `pwrite`, of bytes that `stamp` tells from others.
    WriteAt = write_at(file: Descriptor, offset: Length, length: Length, stamp: Number);
    /// `setrlimit`: what is used now, and so many pages, or a special allowance.
    Limit = limit(resource: OneOf(RESOURCES), pages: OneOf(ALLOWANCES));
    /// The program loads eight bytes.
    Load = load(at: Address);
    /// The program stores eight bytes.
    Store = store(at: Address, value: Number);
    /// A child begins to live; its parent goes on. Nothing where there is a child already.
    Fork = fork();
    /// From here on the other process acts. Nothing where there is none.
    Switch = switch();
    /// The child's memory is looked at, and it exits; the parent acts from here on. Nothing where
    /// there is no child.
    Exit = exit();
}

/// One thing that a process does.
#[derive(Clone, PartialEq, Eq)]
pub struct Operation {
    pub operation: OperationKind,
    /// As in registers; 0 where there is none.
    pub arguments: [u64; 6],
    /// The vector of `process_madvise`.
    pub ranges: Vec<(u64, u64)>,
}

/// System call, with its vector: addresses and lengths.
pub fn process_madvise(process: u64, ranges: &[(u64, u64)], advice: u64, flags: u64) -> Operation {
    Operation { ranges: ranges.to_vec(), ..process_madvise_raw(process, advice, flags) }
}

impl Operation {
    fn new(operation: OperationKind, given: &[u64]) -> Self {
        let mut arguments = [0; 6];
        arguments[..given.len()].copy_from_slice(given);
        Self { operation, arguments, ranges: Vec::new() }
    }

    /// Writes it as words.
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
