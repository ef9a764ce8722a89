//! `bindery doctor`: shows installed and missing requirements, and how to install them.

use std::io::{self, Write};
use std::process::ExitCode;

use comfy_table::{LineStyle, Table, TableStyle};

use crate::guest::Problem;
use crate::guest::requirements::{Remedy, Requirement, apt_install};

/// Show what is installed, what is missing, and how to install it
///
/// Exit status: 0 if everything is installed, 1 if something is missing. `bench` and `check` need
/// none of it.
#[derive(clap::Args)]
pub struct Arguments {}

/// Shows the table.
///
/// # Errors
/// If the output cannot be written.
pub fn run(_: &Arguments) -> Result<ExitCode, Problem> {
    let rows: Vec<Row> = Requirement::all().into_iter().map(Row::look).collect();
    let mut text = format!("{}\n", table(&rows));
    let missing: Vec<Requirement> =
        rows.iter().filter(|row| row.version.is_none()).map(|row| row.requirement).collect();
    text.push_str(&summary(&missing));
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Problem::Failed(format!("cannot write to standard output: {error}")))?;
    Ok(if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Row {
    requirement: Requirement,
    version: Option<String>,
}

impl Row {
    fn look(requirement: Requirement) -> Self {
        Self { requirement, version: requirement.version() }
    }
}

const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('-').junction('-'));

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE);
    table.set_header(["what", "for", "found"]);
    for Row { requirement, version } in rows {
        let found = match version {
            Some(version) => version.clone(),
            None => format!("missing: {}", command(*requirement)),
        };
        table.add_row([requirement.name(), requirement.purpose().to_owned(), found]);
    }
    table
}

/// The command that installs one requirement.
fn command(requirement: Requirement) -> String {
    match requirement.remedy() {
        Remedy::Packages(packages) => apt_install(packages),
        Remedy::RustTarget(target) => format!("rustup target add {target}"),
        Remedy::OnDebian => "fetched only on Debian".to_owned(),
    }
}

fn summary(missing: &[Requirement]) -> String {
    match missing.len() {
        0 => "Everything is installed.\n".to_owned(),
        1 => "One thing is missing. On Debian, `bindery setup` installs it.\n".to_owned(),
        count => {
            format!("{count} things are missing. On Debian, `bindery setup` installs them.\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_shows_a_version_or_its_installation() {
        let rows: Vec<Row> = Requirement::all()
            .into_iter()
            .enumerate()
            .map(|(index, requirement)| Row {
                requirement,
                version: index.is_multiple_of(2).then(|| format!("version {index}")),
            })
            .collect();
        let text = table(&rows).to_string();
        assert!(text.contains("version 0"), "{text}");
        assert!(text.contains("missing: apt-get install qemu-system-arm"), "{text}");
        assert!(text.contains("rustup target add aarch64-unknown-none-softfloat"), "{text}");
    }

    #[test]
    fn the_summary_counts_what_is_missing() {
        assert!(summary(&[]).contains("Everything"));
        assert!(summary(&[Requirement::Valgrind]).contains("One thing"));
        assert!(summary(&[Requirement::Valgrind; 3]).contains("3 things"));
    }
}
