//! The repository's pages: links are valid, figures match the committed tables, and the first page
//! is short.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The maximum number of lines in README.
const README_LINES: usize = 180;
/// The maximum number of lines in all committed tables together.
const TABLE_LINES: usize = 3_200;

/// Figures in page tables that no committed table contains, with the reason.
const ELSEWHERE: &[(&str, &str)] = &[];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    files.sort();
    files
}

fn pages() -> Vec<PathBuf> {
    let mut pages = files(&root(), "md");
    pages.extend(files(&root().join("docs"), "md"));
    pages
}

/// The numbers in a text that have a thousands separator: `1,234`.
fn figures(text: &str) -> impl Iterator<Item = &str> {
    let part = |c: char| !(c.is_ascii_digit() || c == ',' || c == '.');
    text.split(part).map(|number| number.trim_matches([',', '.'])).filter(|number| {
        let mut groups = number.split(',');
        let first = groups.next().unwrap_or_default();
        let is_group = |group: &str| group.len() == 3;
        !first.is_empty() && number.contains(',') && !number.contains('.') && groups.all(is_group)
    })
}

#[test]
fn figures_are_recognized() {
    let found: Vec<_> = figures("| 1,234 | 12 | 1,2 | 3.98 | 12,345,678. (1,000)").collect();
    assert_eq!(found, ["1,234", "12,345,678", "1,000"]);
}

/// Readers compare rows of tables. A paragraph may round, or cite former figures.
#[test]
fn table_figures_are_those_of_the_committed_tables() {
    let tables: String =
        files(&root().join("docs/figures"), "txt").iter().map(|path| read(path)).collect();
    let measured: HashSet<_> = figures(&tables).collect();
    let mut wrong = Vec::new();
    for page in ["README.md", "docs/compare.md"] {
        let text = read(&root().join(page));
        for (number, line) in text.lines().enumerate().filter(|(_, line)| is_row(line)) {
            for figure in figures(line) {
                let allowed = ELSEWHERE.iter().any(|(allowed, _)| *allowed == figure);
                if !measured.contains(figure) && !allowed {
                    wrong.push(format!("{page}:{}: {figure}", number + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "in no table of docs/figures:\n{}", wrong.join("\n"));
}

/// A row of a table with figures on its right.
fn is_row(line: &str) -> bool {
    line.starts_with('|')
        && line.trim_end_matches([' ', '|']).ends_with(|c: char| c.is_ascii_digit())
}

#[test]
fn links_lead_to_files() {
    let mut broken = Vec::new();
    for page in pages() {
        let text = read(&page);
        let folder = page.parent().unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or_default();
            let is_local = !file.is_empty() && !file.contains(':');
            if is_local && !folder.join(file).exists() {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links to nothing:\n{}", broken.join("\n"));
}

#[test]
fn links_lead_to_sections() {
    let mut broken = Vec::new();
    for page in pages() {
        let text = read(&page);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let Some((file, section)) = target.split_once('#') else { continue };
            let other = match file {
                "" => page.clone(),
                _ => page.parent().unwrap().join(file),
            };
            if other.extension().is_some_and(|extension| extension == "md")
                && !read(&other).lines().any(|line| anchor(line).as_deref() == Some(section))
            {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links to no section:\n{}", broken.join("\n"));
}

/// The anchor that a Markdown renderer gives a heading.
fn anchor(line: &str) -> Option<String> {
    let heading = line.starts_with('#').then(|| line.trim_start_matches('#').trim())?;
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    Some(heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-"))
}

#[test]
fn the_first_page_is_short() {
    let lines = read(&root().join("README.md")).lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines");
}

#[test]
fn the_committed_tables_are_the_latest_of_each() {
    let tables = files(&root().join("docs/figures"), "txt");
    let lines: usize = tables.iter().map(|path| read(path).lines().count()).sum();
    assert!(lines <= TABLE_LINES, "docs/figures has {lines} lines");
    let others = fs::read_dir(root().join("docs/figures")).unwrap().count() - tables.len();
    assert_eq!(others, 0, "tables are text; JSON is made by a command");
    for table in tables {
        let name = table.file_name().unwrap().to_string_lossy().into_owned();
        assert!(!name.starts_with("20"), "{name}: the history of a table is its file's");
    }
}

/// Every page is listed in the reading order.
#[test]
fn every_page_is_listed() {
    let list = read(&root().join("docs/README.md"));
    for page in files(&root().join("docs"), "md") {
        let name = page.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name == "README.md" || list.contains(&format!("({name})")), "{name} is not listed");
    }
}
