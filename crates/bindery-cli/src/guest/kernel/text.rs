//! The bytes of a kernel's functions.

use object::{Object, ObjectSection, ObjectSymbol, SectionKind, SymbolKind};
use rustc_demangle::demangle;

use crate::guest::Problem;

/// The text of a kernel, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Text {
    /// The whole text.
    pub whole: u64,
    /// Functions of the core, without the auditor's. Functions that were inlined into the kernel's
    /// are not counted.
    pub core: u64,
}

/// The text of an ELF file.
///
/// # Errors
/// If the file is not an ELF file.
pub fn of(elf: &[u8]) -> Result<Text, Problem> {
    let file = object::File::parse(elf).map_err(super::no_elf)?;
    let sections = file.sections().filter(|section| section.kind() == SectionKind::Text);
    let whole = sections.map(|section| section.size()).sum();
    let functions = file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text);
    let of_core = functions.filter(|symbol| symbol.name().is_ok_and(is_of_core));
    Ok(Text { whole, core: of_core.map(|symbol| symbol.size()).sum() })
}

/// Whether a symbol is a function of the core but not of the auditor.
fn is_of_core(mangled: &str) -> bool {
    let name = format!("{:#}", demangle(mangled));
    let path = name.trim_start_matches(['<', '&']);
    path.starts_with("bindery::") && !path.starts_with("bindery::check")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_tests_text_has_a_core_part() {
        let elf = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let text = of(&elf).unwrap();
        assert!(text.core < text.whole && text.whole > 1000, "{text:?}");
    }

    #[test]
    fn names_of_the_core_begin_with_its_path() {
        assert!(is_of_core("_ZN7bindery5space12AddressSpace4mmap17h0123456789abcdefE"));
        assert!(!is_of_core("_ZN7bindery5check5check17h0123456789abcdefE"));
        assert!(!is_of_core("_ZN14bindery_kernel4main17h0123456789abcdefE"));
    }
}
