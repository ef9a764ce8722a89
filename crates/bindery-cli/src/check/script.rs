//! A parsed script.

use bindery::{FileAccess, Overcommit, SizeMode};
use bindery_linux::Call;

use super::failure::Awaited;
use super::mistake::{Place, Source};
use super::number::Value;
use super::words::Vocabulary;

/// The initial process.
pub const MAIN: &str = "main";

/// A script without errors that can be found before it runs.
#[derive(Debug)]
pub struct Script {
    pub source: Source,
    pub statements: Vec<Statement>,
}

/// One line with an action.
#[derive(Debug)]
pub struct Statement {
    /// The whole line.
    pub place: Place,
    /// The acting process.
    pub process: String,
    /// The name that the result gets.
    pub name: Option<String>,
    pub action: Action,
    pub expectation: Option<Expectation>,
}

/// The action of a statement.
#[derive(Debug)]
pub enum Action {
    Call(SystemCall),
    File(FileAction),
    Access(Access),
    /// The child's name, and its place.
    Fork(String, Place),
    Exit,
    Setting(Setting),
    /// A number that gets a name.
    Constant(Value),
    Layout,
    Counts,
    Audit,
}

/// A call as the Linux ABI takes it.
#[derive(Debug)]
pub struct SystemCall {
    pub call: Call,
    /// In the call's order; omitted ones are zero, except the file of `mmap`.
    pub arguments: Vec<Argument>,
}

/// An argument with its kind, which determines its text.
#[derive(Debug)]
pub enum Argument {
    Address(Value),
    Length(Value),
    Number(Value),
    Words(&'static Vocabulary, u64),
    File(File),
    Process(Process),
}

/// An existing file: by name, or by the number of its descriptor.
#[derive(Debug)]
pub enum File {
    Named(String, Place),
    Number(Value),
}

/// A process: by name, or by a number as its pidfd.
#[derive(Debug)]
pub enum Process {
    Named(String, Place),
    Number(Value),
}

/// An action on shared memory and files.
#[derive(Debug)]
pub enum FileAction {
    Memfd { name: String, flags: u64 },
    New { name: String, size: Option<Value> },
    Open { name: String, file: File, access: FileAccess },
    Close { file: File },
    On { file: File, what: OnFile },
}

/// An action that leaves the file open.
#[derive(Debug)]
pub enum OnFile {
    Truncate { length: Value },
    Allocate { offset: Value, length: Value, mode: u64 },
    Seal { seals: u64 },
    Seals,
    Read { offset: Value, length: Option<Value> },
    Write { offset: Value, values: Vec<Value> },
}

/// An access of a program to its memory.
#[derive(Debug)]
pub enum Access {
    Read { at: Value, length: Option<Value> },
    Write { at: Value, values: Vec<Value> },
    Fetch { at: Value },
    Fill { at: Value, length: Value, byte: Value },
}

/// An action of the administrator or the loader, which always succeeds.
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

/// The resource of a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resource {
    AddressSpace,
    Data,
    Locked,
    Stack,
}

/// The memory that a folio policy applies to.
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

/// Names of the memory of folio policies.
pub const FOLIO_KINDS: &[(&str, FolioKind)] = &[
    ("anonymous", FolioKind::Anonymous),
    ("shared", FolioKind::Shared),
    ("file", FolioKind::File),
];

/// Names of the modes of a folio size.
pub const FOLIO_MODES: &[(&str, SizeMode)] =
    &[("always", SizeMode::Always), ("madvise", SizeMode::Madvise), ("never", SizeMode::Never)];

/// Names of the modes of commit accounting.
pub const OVERCOMMITS: &[(&str, Overcommit)] = &[
    ("heuristic", Overcommit::Heuristic),
    ("always", Overcommit::Always),
    ("never", Overcommit::Never),
];

/// Names of the modes of opening a file.
pub const FILE_ACCESSES: &[(&str, FileAccess)] = &[
    ("r", FileAccess::READ),
    ("w", FileAccess::WRITE),
    ("rw", FileAccess::READ.union(FileAccess::WRITE)),
];

/// The name of one of the values above.
pub fn name_of<T: PartialEq>(table: &[(&'static str, T)], of: &T) -> &'static str {
    table.iter().find(|(_, thing)| thing == of).map_or("?", |(name, _)| name)
}

/// The expected outcome of an action.
#[derive(Debug)]
pub struct Expectation {
    pub place: Place,
    pub outcome: Awaitable,
}

/// The kinds of expected outcomes.
#[derive(Debug)]
pub enum Awaitable {
    /// No failure.
    Success,
    Failure(Awaited),
    Value(Value),
    Bytes(Vec<Value>),
    /// Equal bytes.
    All(Value),
    Seals(u64),
    /// Some of the counts, by their names.
    Counts(Vec<(&'static str, Value)>),
}

/// The possible outcomes of an action, besides success.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Endings {
    pub errno: bool,
    pub signal: bool,
    pub value: bool,
    pub bytes: bool,
}

impl Action {
    /// The possible outcomes, and so the possible expectations.
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
