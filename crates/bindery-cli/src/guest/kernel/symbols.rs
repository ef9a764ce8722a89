//! The kernel's symbols, in the form that the kernel itself reads after a panic.
//!
//! One line for each function, `HEXADDRESS NAME`, sorted by address. Names are as in the source; if
//! several names have the same address, the shortest is kept.

use std::collections::BTreeMap;
use std::fmt::Write;

use object::{Object, ObjectSymbol, SymbolKind};
use rustc_demangle::demangle;

use crate::guest::Problem;

/// The symbols of an ELF file.
///
/// # Errors
/// If `elf` is not an ELF file.
pub fn text(elf: &[u8]) -> Result<String, Problem> {
    let file = object::File::parse(elf).map_err(super::no_elf)?;
    let mut names: BTreeMap<u64, String> = BTreeMap::new();
    for symbol in file.symbols() {
        if symbol.kind() != SymbolKind::Text || !symbol.is_definition() {
            continue;
        }
        let Ok(name) = symbol.name() else { continue };
        let name = format!("{:#}", demangle(name));
        let kept = names.entry(symbol.address()).or_insert_with(|| name.clone());
        if (name.len(), &name) < (kept.len(), kept) {
            *kept = name;
        }
    }
    let mut text = String::new();
    for (address, name) in names {
        writeln!(text, "{address:x} {name}").expect("writing to a string does not fail");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_sorted_with_names_of_the_source() {
        let elf = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let text = text(&elf).unwrap();
        let addresses: Vec<u64> = text
            .lines()
            .map(|line| u64::from_str_radix(line.split_once(' ').unwrap().0, 16).unwrap())
            .collect();
        assert!(addresses.len() > 100 && addresses.is_sorted_by(|a, b| a < b));
        let own = text.lines().find(|line| line.ends_with("kernel::symbols::text"));
        assert!(own.is_some(), "this module's own function is there, without a hash");
    }

    #[test]
    fn what_is_no_elf_file_is_refused() {
        assert!(text(b"no ELF").is_err());
    }
}
