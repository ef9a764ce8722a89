//! The instructions of one operation by function: the hottest functions of our kernel.

use std::collections::BTreeMap;

use bindery_cli::guest::Problem;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use crate::output::thousands;

/// The number of functions shown.
const SHOWN: usize = 40;

/// The functions of a kernel by their start address.
pub struct Symbols<'a>(Vec<(u64, &'a str)>);

impl<'a> Symbols<'a> {
    /// Reads lines with an address and a name, sorted by address.
    pub fn read(text: &'a str) -> Self {
        let line = |line: &'a str| {
            let (address, name) = line.split_once(' ')?;
            Some((u64::from_str_radix(address, 16).ok()?, name))
        };
        Self(text.lines().filter_map(line).collect())
    }

    /// The function that holds an address.
    pub fn at(&self, address: u64) -> &'a str {
        let after = self.0.partition_point(|(start, _)| *start <= address);
        after.checked_sub(1).map_or("(before every function)", |place| self.0[place].1)
    }
}

/// Instructions executed in each function, most first.
fn by_function<'a>(profile: &str, symbols: &Symbols<'a>) -> Result<Vec<(&'a str, u64)>, Problem> {
    let mut functions: BTreeMap<&str, u64> = BTreeMap::new();
    for line in profile.lines() {
        let read = || {
            let (address, executions) = line.split_once('\t')?;
            Some((u64::from_str_radix(address, 16).ok()?, executions.parse::<u64>().ok()?))
        };
        let (address, executions) = read().ok_or_else(|| {
            Problem::Failed(format!(
                "cannot read the counting plugin's profile: {line:?} is not an address and a count; \
                 remove target/guest/count to build the plugin again"
            ))
        })?;
        *functions.entry(symbols.at(address)).or_default() += executions;
    }
    let mut functions: Vec<_> = functions.into_iter().collect();
    functions.sort_by_key(|(name, executions)| (std::cmp::Reverse(*executions), *name));
    Ok(functions)
}

/// The table of the hottest functions.
///
/// # Errors
/// If the profile is not in the plugin's format.
pub fn table(profile: &str, symbols: &str) -> Result<String, Problem> {
    let functions = by_function(profile, &Symbols::read(symbols))?;
    let total: u64 = functions.iter().map(|(_, executions)| executions).sum();
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('-').junction('-')));
    table.set_header(["instructions", "%", "function"]);
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if number == 0 { 0 } else { 1 }, 0));
        if number < 2 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let percent = |executions: u64| format!("{:.1}", executions as f64 * 100.0 / total as f64);
    for (name, executions) in functions.iter().take(SHOWN) {
        table.add_row([thousands(*executions), percent(*executions), (*name).to_owned()]);
    }
    let rest: u64 = functions.iter().skip(SHOWN).map(|(_, executions)| executions).sum();
    if rest > 0 {
        let others = format!("{} more functions", functions.len() - SHOWN);
        table.add_row([thousands(rest), percent(rest), others]);
    }
    table.add_row([thousands(total), "100.0".to_owned(), "all, string iterations too".to_owned()]);
    Ok(table.trim_fmt())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYMBOLS: &str = "ffff0000 entry\nffff0100 space::mremap\nffff0200 table::walk\n";

    #[test]
    fn instructions_are_summed_up_by_function() {
        let profile = "ffff0104\t5\nffff01ff\t2\nffff0000\t1\nffff0200\t100\nfff00000\t3\n";
        let functions = by_function(profile, &Symbols::read(SYMBOLS)).unwrap();
        let expected = [
            ("table::walk", 100),
            ("space::mremap", 7),
            ("(before every function)", 3),
            ("entry", 1),
        ];
        assert_eq!(functions, expected);
        let table = table(profile, SYMBOLS).unwrap();
        assert!(table.contains("90.1") && table.contains("111"), "{table}");
    }

    #[test]
    fn only_the_hottest_are_named() {
        let symbols: String = (0..100).map(|n| format!("{:x} f{n}\n", 0x1000 + n * 16)).collect();
        let profile: String = (0..100).map(|n| format!("{:x}\t{n}\n", 0x1000 + n * 16)).collect();
        let table = table(&profile, &symbols).unwrap();
        assert!(table.contains("60 more functions") && table.contains("4,950"), "{table}");
    }

    #[test]
    fn what_is_no_profile_is_refused() {
        assert!(table("x\t1\n", SYMBOLS).is_err());
        assert!(table("1\n", SYMBOLS).is_err());
    }
}
