//! The names of shared data: the region that holds it, and the function of the core that uses it.

use std::collections::HashMap;

use addr2line::Context;
use addr2line::gimli::{Dwarf, EndianSlice, LittleEndian, SectionId};
use bindery_cli::guest::Problem;
use object::{Object, ObjectSection, ObjectSymbol};
use rustc_demangle::demangle;

use super::read::{Program, Word};

type Reader<'p> = EndianSlice<'p, LittleEndian>;

/// The source folder of the core, in the paths of its debug information.
const CORE: &str = "crates/bindery/src/";
/// The folder of the core's locks.
const LOCKS: &str = "sync/";

/// The names of one run of the program.
pub struct Names<'p> {
    program: &'p Program,
    lines: Context<Reader<'p>>,
    /// The difference between the addresses in the run and the addresses in the file.
    offset: u64,
    /// Names of instructions that were looked up.
    known: HashMap<u64, String>,
}

impl<'p> Names<'p> {
    /// Reads the debug information of the program's file, whose bytes are `file`.
    ///
    /// # Errors
    /// If the file is not the program.
    pub fn of(file: &'p [u8], program: &'p Program) -> Result<Self, Problem> {
        let wrong = |error: &dyn std::fmt::Display| {
            Problem::Failed(format!("cannot read the symbols of bindery-conflicts: {error}"))
        };
        let object = object::File::parse(file).map_err(|error| wrong(&error))?;
        let is_main = |symbol: &object::Symbol<'_, '_>| {
            symbol.name().is_ok_and(|name| format!("{:#}", demangle(name)) == MAIN)
        };
        let main = object.symbols().find(is_main).ok_or_else(|| wrong(&"it has no `main`"))?;
        let section = |id: SectionId| -> Result<Reader<'p>, object::Error> {
            let section = object.section_by_name(id.name());
            let data = section.map_or(Ok(&[][..]), |section| section.data())?;
            Ok(EndianSlice::new(data, LittleEndian))
        };
        let dwarf = Dwarf::load(section).map_err(|error| wrong(&error))?;
        let lines = Context::from_dwarf(dwarf).map_err(|error| wrong(&error))?;
        let offset = program.main.wrapping_sub(main.address());
        Ok(Self { program, lines, offset, known: HashMap::new() })
    }

    /// The name of the data of a line of conflict.
    pub fn of_line(&mut self, line: &[Word]) -> String {
        // Conflicting words explain the line's conflict; without such a word, all words do.
        let word = line.iter().find(|word| word.conflicts());
        let shared = word.unwrap_or(&line[0]);
        let region = self.program.region(shared.address);
        let region = region.map_or("another place", |region| region.name.as_str());
        let function = self.function(shared.instruction());
        let layout = if word.is_some() { "" } else { ", by layout only" };
        format!("{region}: {function}{layout}")
    }

    /// The file and the function of the core that has an instruction.
    fn function(&mut self, instruction: u64) -> String {
        if let Some(name) = self.known.get(&instruction) {
            return name.clone();
        }
        let name = self.look_up(instruction.wrapping_sub(self.offset));
        let name = name.unwrap_or_else(|| "bytes cleared or copied".to_owned());
        self.known.insert(instruction, name.clone());
        name
    }

    /// Returns the innermost function of the core at `address`, inlined ones included. Functions of
    /// locks are skipped, because their callers are more informative.
    fn look_up(&self, address: u64) -> Option<String> {
        let mut frames = self.lines.find_frames(address).skip_all_loads().ok()?;
        while let Some(frame) = frames.next().ok()? {
            let file = frame.location.and_then(|location| location.file);
            let Some((_, file)) = file.and_then(|file| file.split_once(CORE)) else { continue };
            if file.starts_with(LOCKS) {
                continue;
            }
            let function = frame.function?;
            let name = function.raw_name().ok()?;
            return Some(format!("{file} {}", short(&format!("{:#}", demangle(&name)))));
        }
        None
    }
}

/// The demangled name of the program's `main`.
const MAIN: &str = "bindery_conflicts::main";

/// The last part of a path, without type parameters.
fn short(path: &str) -> String {
    let mut depth = 0_usize;
    let plain: String = path
        .chars()
        .filter(|character| {
            let outside = depth == 0;
            match character {
                '<' => depth += 1,
                '>' => depth = depth.saturating_sub(1),
                _ => return outside,
            }
            false
        })
        .collect();
    plain
        .rsplit("::")
        .find(|part| !part.is_empty() && *part != "{closure#0}")
        .unwrap_or(path)
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_has_a_short_name() {
        assert_eq!(short("bindery::frame::Frames<P>::take"), "take");
        assert_eq!(short("<bindery::frame::Frames<P> as Trait<u8>>::take"), "take");
        assert_eq!(short("free<bindery::Platform>"), "free");
        assert_eq!(short("a::b::{closure#0}"), "b");
    }
}
