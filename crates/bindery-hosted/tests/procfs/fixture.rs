//! Common parts of the tests of `/proc`: listings as text, a parser for them, words of the page
//! map.

use std::fmt::{self, Write};

use bindery::addr::{Order, VirtAddr};
use bindery::{
    Accounting, AddressSpace, FileAccess, MapObject, MapRequest, Mapping, Memory, Object, Place,
    Resident, Sealing, Sharing, SizeMode,
};
use bindery_hosted::{Machine, MemoryFiles, Program, Walk};
use bindery_linux::proc::{
    self, ClearRefs, FileId, NameSource, Naming, PhysicalAddresses, Unnamed,
};

use crate::support::{READ_WRITE, audit, options, strict};

pub const PAGE: u64 = 4096;

pub const SOFT_DIRTY: u64 = 1 << 55;
pub const EXCLUSIVE: u64 = 1 << 56;
pub const GUARD: u64 = 1 << 58;
pub const FILE: u64 = 1 << 61;
pub const SWAPPED: u64 = 1 << 62;
pub const PRESENT: u64 = 1 << 63;
pub const FRAME: u64 = (1 << 55) - 1;

pub type Space<'m, A> = AddressSpace<'m, Machine<A>>;

/// A machine with the core on it, and one CPU.
pub struct Fixture<'m, A: Walk> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
    pub files: &'m MemoryFiles,
}

impl<'m, A: Walk> Fixture<'m, A> {
    pub fn space(&self) -> Space<'m, A> {
        AddressSpace::new(self.memory, options()).unwrap()
    }

    pub fn program<'a>(&'a self, space: &'a Space<'m, A>) -> Program<'a, 'm, A> {
        Program::new(self.machine, space)
    }

    pub fn memfd(&self, size: u64) -> Object<'m, Machine<A>> {
        self.memory.shared_memory(size, Sealing::Allowed, Accounting::PerPage).unwrap()
    }

    pub fn file(&self, size: u64) -> Object<'m, Machine<A>> {
        self.memory.file(self.files, 1, size).unwrap()
    }

    /// Allows faults to use folios of 2^`order` pages, in memory of all kinds.
    pub fn use_order(&self, order: u8) {
        let memory = self.memory;
        let kinds =
            [memory.folio_policy(), memory.shared_folio_policy(), memory.file_folio_policy()];
        for policy in kinds {
            (1..=9).for_each(|order| policy.set(Order(order), SizeMode::Never));
            policy.set(Order(order), SizeMode::Always);
        }
    }

    #[track_caller]
    pub fn audit(&self, spaces: &[&Space<'_, A>]) {
        audit(self.machine, self.memory, spaces);
    }
}

/// Runs `scenario` on a strict machine with folios of 2^`order` pages. No memory may be left in use
/// afterwards.
#[track_caller]
pub fn with_fixture<A: Walk>(order: u8, scenario: impl FnOnce(&Fixture<'_, A>)) {
    let files = MemoryFiles::new();
    let (machine, memory) = strict::<A>(64 << 20);
    let fixture = Fixture { machine: &machine, memory: &memory, files: &files };
    fixture.use_order(order);
    let free = memory.free_frame_count();
    scenario(&fixture);
    fixture.audit(&[]);
    bindery::testing::forget_areas(&memory);
    memory.trim();
    assert_eq!(memory.free_frame_count(), free, "frames have leaked");
}

/// Maps an object at a fixed address, readable and writable.
#[track_caller]
pub fn map_object<'m, A: Walk>(
    space: &Space<'m, A>,
    object: &Object<'m, Machine<A>>,
    at: u64,
    length: u64,
    offset: u64,
    sharing: Sharing,
) {
    let place = Place::Fixed(VirtAddr(at));
    let request =
        MapRequest { length, protection: READ_WRITE, place, sharing, ..MapRequest::default() };
    let access = FileAccess::READ | FileAccess::WRITE;
    space.mmap_object(&request, &MapObject { object, offset, access }).unwrap();
}

pub fn maps<A: Walk>(space: &Space<'_, A>, naming: &dyn Naming) -> String {
    let mut text = String::new();
    proc::maps(space, naming, &mut text).unwrap();
    text
}

pub fn smaps<A: Walk>(space: &Space<'_, A>, naming: &dyn Naming) -> String {
    let mut text = String::new();
    proc::smaps(space, naming, &mut text).unwrap();
    text
}

pub fn rollup<A: Walk>(space: &Space<'_, A>) -> Area {
    let mut text = String::new();
    proc::smaps_rollup(space, &mut text).unwrap();
    parse(&text).remove(0)
}

/// The section of `smaps` for the mapping that begins at `at`.
#[track_caller]
pub fn area<A: Walk>(space: &Space<'_, A>, at: u64) -> Area {
    let areas = parse(&smaps(space, &Unnamed));
    areas.into_iter().find(|area| area.start == at).expect("a mapping begins there")
}

/// The words of the page map, with frames.
pub fn pagemap<A: Walk>(space: &Space<'_, A>, at: u64, pages: usize) -> Vec<u64> {
    let mut words = vec![u64::MAX; pages];
    let told = proc::pagemap(space, at / PAGE, PhysicalAddresses::Shown, &mut words);
    assert_eq!(told, pages);
    words
}

/// The numbers of the pages written since soft-dirty was cleared.
pub fn written<A: Walk>(space: &Space<'_, A>, at: u64, pages: usize) -> Vec<usize> {
    let words = pagemap(space, at, pages);
    (0..pages).filter(|page| words[*page] & SOFT_DIRTY != 0).collect()
}

/// Clears the process's soft-dirty marks.
pub fn watch<A: Walk>(space: &Space<'_, A>) {
    proc::clear_refs(space, ClearRefs::SoftDirty).unwrap();
}

pub fn resident<A: Walk>(space: &Space<'_, A>) -> (u64, u64, u64) {
    let Resident { anonymous, file, shared } = space.resident();
    (anonymous, file, shared)
}

/// The mappings, as the core reports them.
pub fn mappings<A: Walk>(space: &Space<'_, A>) -> Vec<Mapping> {
    let mut mappings = Vec::new();
    space.for_each_mapping(|mapping| mappings.push(mapping));
    mappings
}

/// An embedder with one name for all files and another for the stack.
pub struct OneFile {
    pub id: FileId,
    pub path: String,
    pub stack: u64,
}

impl Naming for OneFile {
    fn file_id(&self, _: u64, _: NameSource) -> FileId {
        self.id
    }

    fn write_path(&self, _: u64, _: NameSource, out: &mut dyn Write) -> fmt::Result {
        out.write_str(&self.path)
    }

    fn stack(&self) -> Option<VirtAddr> {
        Some(VirtAddr(self.stack))
    }
}

/// One mapping of a listing, ours or Linux's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Area {
    pub start: u64,
    pub end: u64,
    pub permissions: String,
    pub offset: u64,
    pub file: FileId,
    pub path: String,
    /// The lines below the first, as names and values.
    pub fields: Vec<(String, String)>,
    /// The complete text of the section.
    pub text: String,
}

impl Area {
    /// The value of a field in KiB.
    #[track_caller]
    pub fn kib(&self, name: &str) -> u64 {
        let value = self.field(name).strip_suffix(" kB").expect("a size");
        value.trim().parse().expect("a number")
    }

    #[track_caller]
    pub fn field(&self, name: &str) -> &str {
        let found = self.fields.iter().find(|(field, _)| field == name);
        &found.unwrap_or_else(|| panic!("no {name} in {}", self.text)).1
    }

    pub fn names(&self) -> Vec<&str> {
        self.fields.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The nonzero sizes, without the fields that every mapping has.
    pub fn sizes(&self) -> Vec<(&str, u64)> {
        let usual = ["Size", "KernelPageSize", "MMUPageSize"];
        let sizes = self
            .fields
            .iter()
            .filter(|(name, value)| value.ends_with(" kB") && !usual.contains(&name.as_str()));
        let sizes = sizes.map(|(name, _)| (name.as_str(), self.kib(name)));
        sizes.filter(|(_, size)| *size > 0).collect()
    }
}

/// Reads a listing, `maps` or `smaps`.
pub fn parse(text: &str) -> Vec<Area> {
    let mut areas: Vec<Area> = Vec::new();
    for line in text.split_inclusive('\n') {
        let first = line.split_whitespace().next().unwrap_or_default();
        if let (Some((name, value)), Some(area)) = (line.split_once(':'), areas.last_mut())
            && first.ends_with(':')
        {
            area.fields.push((name.to_owned(), value.trim().to_owned()));
            area.text.push_str(line);
            continue;
        }
        areas.push(parse_line(line));
    }
    areas
}

fn parse_line(line: &str) -> Area {
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).expect("a hexadecimal number");
    let mut columns = line.trim_end_matches('\n').splitn(6, ' ');
    let mut column = || columns.next().expect("a column");
    let (start, end) = column().split_once('-').expect("a range");
    let (permissions, offset) = (column().to_owned(), hexadecimal(column()));
    let (major, minor) = column().split_once(':').expect("a device");
    let inode = column().parse().expect("an inode");
    let file = FileId { major: hexadecimal(major) as u32, minor: hexadecimal(minor) as u32, inode };
    let path = columns.next().unwrap_or_default().trim_start().to_owned();
    let (start, end) = (hexadecimal(start), hexadecimal(end));
    let text = line.to_owned();
    Area { start, end, permissions, offset, file, path, fields: Vec::new(), text }
}
