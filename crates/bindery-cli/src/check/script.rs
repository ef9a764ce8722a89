//! What a script says, once it is read.

use bindery::{FileAccess, Overcommit, SizeMode};
use bindery_linux::Call;

use super::failure::Awaited;
use super::mistake::{Place, Source};
use super::number::Value;
use super::words::Vocabulary;

/// The process that is there from the beginning.
pub const MAIN: &str = "main";

/// A script without mistakes that could be seen before it runs.
#[derive(Debug)]
pub struct Script {
    pub source: Source,
    pub statements: Vec<Statement>,
}

/// One line that does something.
#[derive(Debug)]
pub struct Statement {
    /// All of it.
    pub place: Place,
    /// Who does it.
    pub process: String,
    /// What the result goes by from here on.
    pub name: Option<String>,
    pub action: Action,
    pub expectation: Option<Expectation>,
}

/// What is done.
#[derive(Debug)]
pub enum Action {
    Call(SystemCall),
    File(FileAction),
    Access(Access),
    /// The child's name, and where it stands.
    Fork(String, Place),
    Exit,
    Setting(Setting),
    /// A number that is given a name.
    Constant(Value),
    Layout,
    Counts,
    Audit,
}

/// A call as the Linux ABI takes it.
#[derive(Debug)]
pub struct SystemCall {
    pub call: Call,
    /// In the call's order; those that are left out are zero, but for the file of `mmap`.
    pub arguments: Vec<Argument>,
}

/// An argument, and what it is, so that it can be shown.
#[derive(Debug)]
pub enum Argument {
    Address(Value),
    Length(Value),
    Number(Value),
    Words(&'static Vocabulary, u64),
    File(File),
    Process(Process),
}

/// A file that is already there: by name, or by the number of its descriptor.
#[derive(Debug)]
pub enum File {
    Named(String, Place),
    Number(Value),
}

/// A process: by name, or by what might be its pidfd.
#[derive(Debug)]
pub enum Process {
    Named(String, Place),
    Number(Value),
}

/// What is done to shared memory and files.
#[derive(Debug)]
pub enum FileAction {
    Memfd { name: String, flags: u64 },
    New { name: String, size: Option<Value> },
    Open { name: String, file: File, access: FileAccess },
    Close { file: File },
    On { file: File, what: OnFile },
}

/// What leaves a file open.
#[derive(Debug)]
pub enum OnFile {
    Truncate { length: Value },
    Allocate { offset: Value, length: Value, mode: u64 },
    Seal { seals: u64 },
    Seals,
    Read { offset: Value, length: Option<Value> },
    Write { offset: Value, values: Vec<Value> },
}

/// What a program does with its memory.
#[derive(Debug)]
pub enum Access {
    Read { at: Value, length: Option<Value> },
    Write { at: Value, values: Vec<Value> },
    Fetch { at: Value },
    Fill { at: Value, length: Value, byte: Value },
}

/// What always works: the administrator's part, and the loader's.
#[derive(Debug)]
pub enum Setting {
    Heap(Value),
    /// `None` is no limit.
    Limit(Resource, Option<Value>),
    Policy {
        orders: Vec<u8>,
        mode: SizeMode,
        kind: FolioKind,
    },
    Overcommit(Overcommit, Option<Value>),
}

/// What `setrlimit` is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resource {
    AddressSpace,
    Data,
    Locked,
    Stack,
}

/// The memory that a folio policy is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FolioKind {
    Anonymous,
    Shared,
    File,
}

/// Names of limits.
pub const RESOURCES: &[(&str, Resource)] = &[
    ("memlock", Resource::Locked),
    ("as", Resource::AddressSpace),
    ("data", Resource::Data),
    ("stack", Resource::Stack),
];

/// Names of what folio policies are for.
pub const FOLIO_KINDS: &[(&str, FolioKind)] = &[
    ("anonymous", FolioKind::Anonymous),
    ("shared", FolioKind::Shared),
    ("file", FolioKind::File),
];

/// Names of when folios of a size are used.
pub const FOLIO_MODES: &[(&str, SizeMode)] =
    &[("always", SizeMode::Always), ("madvise", SizeMode::Madvise), ("never", SizeMode::Never)];

/// Names of what is done about promises that memory could not keep.
pub const OVERCOMMITS: &[(&str, Overcommit)] = &[
    ("heuristic", Overcommit::Heuristic),
    ("always", Overcommit::Always),
    ("never", Overcommit::Never),
];

/// Names of how a file is opened.
pub const FILE_ACCESSES: &[(&str, FileAccess)] = &[
    ("r", FileAccess::READ),
    ("w", FileAccess::WRITE),
    ("rw", FileAccess::READ.union(FileAccess::WRITE)),
];

/// The name of one of the things above.
pub fn name_of<T: PartialEq>(table: &[(&'static str, T)], of: &T) -> &'static str {
    table.iter().find(|(_, thing)| thing == of).map_or("?", |(name, _)| name)
}

/// How an action was expected to end.
#[derive(Debug)]
pub struct Expectation {
    pub place: Place,
    pub outcome: Awaitable,
}

/// What may be expected.
#[derive(Debug)]
pub enum Awaitable {
    /// No failure.
    Success,
    Failure(Awaited),
    Value(Value),
    Bytes(Vec<Value>),
    /// Bytes that are all the same.
    All(Value),
    Seals(u64),
    /// Some of the counts, by their names.
    Counts(Vec<(&'static str, Value)>),
}

/// How an action can end, besides well.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Endings {
    pub errno: bool,
    pub signal: bool,
    pub value: bool,
    pub bytes: bool,
}

impl Action {
    /// How it can end: what there is to be expected.
    pub fn endings(&self) -> Endings {
        let nothing = Endings::default();
        match self {
            Self::Call(call) => {
                Endings { errno: true, value: true, bytes: call.call == Call::Mincore, ..nothing }
            }
            Self::File(FileAction::On { what: OnFile::Read { length, .. }, .. }) => {
                Endings { errno: true, value: true, bytes: length.is_some(), ..nothing }
            }
            Self::File(FileAction::Close { .. } | FileAction::On { what: OnFile::Seals, .. })
            | Self::Fork(..) => Endings { errno: true, ..nothing },
            Self::File(_) => Endings { errno: true, value: true, ..nothing },
            Self::Access(Access::Read { length, .. }) => {
                let bytes = length.is_some();
                Endings { signal: true, value: !bytes, bytes, ..nothing }
            }
            Self::Access(_) => Endings { signal: true, ..nothing },
            Self::Constant(_) | Self::Layout => Endings { value: true, ..nothing },
            Self::Exit | Self::Setting(_) | Self::Counts | Self::Audit => nothing,
        }
    }
}
