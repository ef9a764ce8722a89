//! The layout of an address space, as `/proc/self/maps` shows it.

use std::collections::HashMap;

use bindery::addr::PAGE_SHIFT;
use bindery::{AddressSpace, Mapping, MappingFlags};
use bindery_hosted::{Machine, Walk};
use serde::Serialize;

/// One mapping.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Row {
    start: u64,
    end: u64,
    /// `rw-p`
    permissions: String,
    /// The mapping's offset in its file, in bytes; 0 for anonymous memory.
    offset: u64,
    /// The number of the mapping's file; 0 for anonymous memory.
    inode: u64,
    name: String,
}

/// All mappings, in ascending order. `names` contains the names of objects.
pub fn layout<A: Walk>(
    space: &AddressSpace<'_, Machine<A>>,
    names: &HashMap<u64, String>,
) -> Vec<Row> {
    let mut rows = Vec::new();
    space.for_each_mapping(|mapping| rows.push(row(&mapping, names)));
    rows
}

fn row(mapping: &Mapping, names: &HashMap<u64, String>) -> Row {
    let Mapping { range, flags, page_offset, object, .. } = *mapping;
    let letter = |flag, letter| if flags.contains(flag) { letter } else { '-' };
    let shared = if flags.contains(MappingFlags::SHARED) { 's' } else { 'p' };
    let permissions = [
        letter(MappingFlags::READ, 'r'),
        letter(MappingFlags::WRITE, 'w'),
        letter(MappingFlags::EXECUTE, 'x'),
        shared,
    ];
    let name = match object {
        // A shared mapping without a named file.
        Some(object) => names.get(&object).map_or("/dev/zero (deleted)", String::as_str),
        None => "",
    };
    Row {
        start: range.start().0,
        end: range.end().0,
        permissions: permissions.into_iter().collect(),
        offset: if object.is_some() { page_offset << PAGE_SHIFT } else { 0 },
        inode: object.unwrap_or(0),
        name: name.to_owned(),
    }
}

impl Row {
    pub fn show(&self) -> String {
        /// Linux' column of names.
        const NAMES: usize = 73;
        let Self { start, end, permissions, offset, inode, name } = self;
        let device = if *inode == 0 { "00:00" } else { "00:01" };
        let line = format!("{start:08x}-{end:08x} {permissions} {offset:08x} {device} {inode}");
        format!("{line:NAMES$}{name}").trim_end().to_owned()
    }
}
