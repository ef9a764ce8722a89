//! The tree of source files checks itself: each file is compiled, tables of files are complete, the
//! bits of the frame metadata are those of their table, unsafe code is in its rooms, a trait whose
//! type is assumed has one, one page orders the locks, names of tests are short, and each
//! type of the core has a name of its own.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::{Attribute, Expr, Item, ItemMod, Lit, Meta};

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All `.rs` files under a folder, except build output.
fn sources(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.insert(path);
        }
    }
}

/// A file that Cargo compiles as a crate root: a library, a program, a test or an example.
fn is_root(file: &Path) -> bool {
    let from_crate = file.strip_prefix(crates()).unwrap();
    let parts: Vec<_> = from_crate.iter().skip(1).map(|part| part.to_str().unwrap()).collect();
    matches!(
        parts.as_slice(),
        ["build.rs"]
            | ["src", "lib.rs" | "main.rs"]
            | ["src", "bin", _]
            | ["tests" | "examples" | "benches", _]
            | ["tests" | "examples" | "benches", _, "main.rs"]
    )
}

/// The modules that each file declares, regardless of `cfg`, starting at the roots.
struct Tree {
    compiled: BTreeSet<PathBuf>,
    /// For each file, the children with their own files: the name, and whether a product contains
    /// the child.
    children: BTreeMap<PathBuf, Vec<(String, bool)>>,
    missing: Vec<String>,
}

impl Tree {
    fn of(roots: impl IntoIterator<Item = PathBuf>) -> Self {
        let mut tree =
            Self { compiled: BTreeSet::new(), children: BTreeMap::new(), missing: Vec::new() };
        for root in roots {
            let folder = root.parent().unwrap().to_owned();
            tree.file(&root, &folder);
        }
        tree
    }

    /// Reads a file, whose modules are in `folder`.
    fn file(&mut self, file: &Path, folder: &Path) {
        if self.compiled.insert(file.to_owned()) {
            let parsed = syn::parse_file(&read(file));
            let parsed = parsed.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            self.items(&parsed.items, file, folder);
        }
    }

    fn items(&mut self, items: &[Item], file: &Path, folder: &Path) {
        for item in items {
            let Item::Mod(module) = item else { continue };
            let name = module.ident.to_string();
            let inside = folder.join(&name);
            if let Some((_, items)) = &module.content {
                self.items(items, file, &inside);
                continue;
            }
            let candidates = match path_of(module) {
                Some(path) => vec![file.with_file_name(path).canonicalize().unwrap()],
                None => vec![inside.with_extension("rs"), inside.join("mod.rs")],
            };
            let children = self.children.entry(file.to_owned()).or_default();
            children.push((name.clone(), !module.attrs.iter().any(is_for_tests)));
            match candidates.into_iter().find(|candidate| candidate.exists()) {
                Some(child) => self.file(&child, &inside),
                None => self.missing.push(format!("{}: {name}", file.display())),
            }
        }
    }
}

impl Tree {
    /// The modules in a file's folder. A table may also name files in its subfolders.
    fn names_below(&self, file: &Path) -> BTreeSet<&str> {
        let folder = file.parent().unwrap();
        let below = self.children.iter().filter(|(parent, _)| parent.starts_with(folder));
        below.flat_map(|(_, children)| children.iter().map(|(name, _)| name.as_str())).collect()
    }
}

/// `#[path = "..."]`.
fn path_of(module: &ItemMod) -> Option<String> {
    module.attrs.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    })
}

/// A module of tests or models, which a table of files need not name.
fn is_for_tests(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    let condition = list.tokens.to_string();
    attribute.path().is_ident("cfg")
        && ["test", "loom", "lock_violations"].iter().any(|word| condition.contains(word))
}

fn tree() -> (BTreeSet<PathBuf>, Tree) {
    let mut all = BTreeSet::new();
    sources(&crates(), &mut all);
    let roots: Vec<_> = all.iter().filter(|file| is_root(file)).cloned().collect();
    (all, Tree::of(roots))
}

#[test]
fn every_source_file_is_compiled() {
    let (all, tree) = tree();
    let orphans: Vec<_> = all.difference(&tree.compiled).collect();
    assert!(orphans.is_empty(), "nothing compiles {orphans:#?}");
    assert!(tree.missing.is_empty(), "modules without a file: {:#?}", tree.missing);
}

/// The names in the first table of files of a module's documentation.
fn listed_files(text: &str) -> Option<BTreeSet<String>> {
    let docs = text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    let rows = docs.skip_while(|line| !is_table_of_files(line)).skip(2);
    let mut listed = BTreeSet::new();
    for row in rows.take_while(|line| line.starts_with('|')) {
        let column = row.split('|').nth(1).unwrap();
        let names = column.split('`').skip(1).step_by(2);
        listed.extend(
            names.map(|name| name.trim_end_matches('/').trim_end_matches(".rs").to_owned()),
        );
    }
    (!listed.is_empty()).then_some(listed)
}

fn is_table_of_files(line: &str) -> bool {
    let Some(columns) = line.strip_prefix("| file |").map(|rest| rest.split('|').count()) else {
        return line.starts_with("| file in ");
    };
    columns == 2
}

#[test]
fn tables_of_files_name_every_file() {
    let (_, tree) = tree();
    let mut wrong = Vec::new();
    let mut tables = 0;
    for (file, children) in &tree.children {
        let Some(listed) = listed_files(&read(file)) else { continue };
        tables += 1;
        for (name, _) in
            children.iter().filter(|(name, product)| *product && !listed.contains(name))
        {
            wrong.push(format!("{}: lacks `{name}`", file.display()));
        }
        // A path leads elsewhere, and a file with another extension is not a module.
        let local = listed.iter().filter(|name| !name.contains([':', '.']));
        let below = tree.names_below(file);
        for name in local.filter(|name| !below.contains(name.as_str())) {
            wrong.push(format!("{}: `{name}` is no module of it", file.display()));
        }
    }
    assert!(tables > 20, "only {tables} tables were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The table of `frame/meta.rs` names each bit of the metadata's state, and marks no bit as spare
/// that a constant uses.
#[test]
fn frame_metadata_bits_match_the_constants() {
    let text = read(&crates().join("bindery/src/frame/meta.rs"));
    let row = |start: &str| {
        let line = text
            .lines()
            .filter_map(|line| line.strip_prefix("//! "))
            .find(|line| line.starts_with(start));
        line.unwrap_or_else(|| panic!("no row {start}")).to_owned()
    };
    let bits = columns(row("state").trim_start_matches("state"));
    let lines: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("//! ")).collect();
    let at = lines.iter().position(|line| line.starts_with("state")).unwrap();
    let names = columns(lines[at + 1]);
    assert_eq!(bits.len(), names.len(), "{bits:?} {names:?}");
    let table: BTreeMap<_, _> = names.into_iter().zip(bits).collect();
    let mut checked = 0;
    for line in text.lines() {
        let Some(rest) = line.split("const ").nth(1) else { continue };
        let Some((name, value)) = rest.split_once(": u32 = 1 << ") else { continue };
        let bit = value.trim_end_matches(';');
        if let Some(column) = table.get(name) {
            assert_eq!(column, bit, "{name}");
            checked += 1;
        } else {
            let number: u32 = bit.parse().unwrap_or_else(|_| panic!("{line}"));
            let spare = table.iter().filter(|(name, _)| name.starts_with("spare"));
            for (_, range) in spare {
                assert!(!is_in(number, range), "bit {number} is spare, and {name}");
            }
        }
    }
    assert!(checked >= 10, "only {checked} bits were found");
}

/// The columns of a table that are two spaces or more apart.
fn columns(line: &str) -> Vec<String> {
    line.split("  ").map(str::trim).filter(|column| !column.is_empty()).map(str::to_owned).collect()
}

fn is_in(bit: u32, range: &str) -> bool {
    match range.split_once(" .. ") {
        Some((high, low)) => (low.parse().unwrap()..=high.parse().unwrap()).contains(&bit),
        None => range.parse() == Ok(bit),
    }
}

/// The files that the table of `docs/invariants.md` names, with their paths below `src`.
fn rooms_of_unsafe_code(page: &str) -> BTreeSet<String> {
    let section = page.split_once("\n## Rooms of unsafe code\n").expect("the section").1;
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let mut files = BTreeSet::new();
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let mut columns = row.split('|').skip(1);
        let room = columns.next().unwrap().trim().trim_matches('`');
        match room.strip_suffix('/') {
            Some(_) => files.extend(
                columns
                    .next()
                    .unwrap()
                    .split('`')
                    .skip(1)
                    .step_by(2)
                    .map(|file| room.to_owned() + file),
            ),
            None => _ = files.insert(room.to_owned()),
        }
    }
    files
}

/// Whether a line of code, not a comment, begins an unsafe item or block.
fn is_unsafe(line: &str) -> bool {
    let line = line.split_once("//").map_or(line, |(code, _)| code);
    let begins = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe trait", "unsafe extern"];
    begins.iter().any(|begin| line.contains(begin))
}

/// The compiler denies unsafe code outside files that allow it. Children of such a file inherit the
/// permission, so the files are compared individually.
#[test]
fn unsafe_code_is_in_its_rooms() {
    let source = crates().join("bindery/src");
    let page = read(&crates().join("../docs/invariants.md"));
    let (mut all, mut allowed, mut used) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    sources(&source, &mut all);
    for file in all {
        let name = file.strip_prefix(&source).unwrap().to_str().unwrap().to_owned();
        if name.contains("loom_model") || name.contains("/tests/") || name.ends_with("tests.rs") {
            continue;
        }
        let text = read(&file);
        if text.lines().any(|line| line.starts_with("#![allow(unsafe_code")) {
            allowed.insert(name.clone());
        }
        let product =
            text.split_once("\n#[cfg(test)]\nmod tests {").map_or(&*text, |(product, _)| product);
        if product.lines().any(is_unsafe) {
            used.insert(name);
        }
    }
    assert_eq!(allowed, rooms_of_unsafe_code(&page), "files that allow it, and the table");
    assert_eq!(allowed, used, "files that allow it, and those that have any");
}

/// The types that implement a trait, named by any path, in the sources of a crate.
fn implementations(of: &str, folder: &Path) -> Vec<String> {
    let mut files = BTreeSet::new();
    sources(folder, &mut files);
    let mut found = Vec::new();
    for file in &files {
        // Matched as words, because an implementation may be generic and span several lines.
        let text = read(file);
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code: Vec<_> = code.flat_map(str::split_whitespace).collect();
        for pair in code.windows(3) {
            let name = pair[0].rsplit("::").next().unwrap();
            if name.split('<').next() == Some(of) && pair[1] == "for" {
                found.push(pair[2].to_owned());
            }
        }
        // A macro could implement the trait without these words.
        let hidden = |line: &&str| line.contains(of) && line.contains('$');
        assert_eq!(text.lines().find(hidden), None, "{}", file.display());
    }
    found
}

/// `Files::of` and `Files::description` cast the files of a thread without a check.
#[test]
fn one_type_is_the_files_of_a_thread() {
    let kernel = crates().join("bindery-kernel/src");
    assert_eq!(implementations("ThreadFiles", &kernel), ["Files"]);
}

/// Two lists of the order of locks would differ sooner or later.
#[test]
fn only_one_page_orders_the_locks() {
    let mut orders = Vec::new();
    let (all, _) = tree();
    let docs = fs::read_dir(crates().join("../docs")).unwrap().map(|entry| entry.unwrap().path());
    for file in docs.filter(|path| path.extension().is_some_and(|e| e == "md")).chain(all) {
        if file.ends_with("docs/lock-order.md") || file.ends_with("tests/tree.rs") {
            continue;
        }
        for (number, line) in read(&file).lines().enumerate() {
            if line.contains("Order: the") || line.contains("ocks are taken in this order") {
                orders.push(format!("{}:{}: {line}", file.display(), number + 1));
            }
        }
    }
    assert!(orders.is_empty(), "docs/lock-order.md has the order:\n{}", orders.join("\n"));
}

/// The names of the functions that a test attribute precedes.
fn tests_of(text: &str) -> Vec<&str> {
    let mut is_test = false;
    let mut names = Vec::new();
    for line in text.lines().map(str::trim_start) {
        let after = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("fn ");
        match after.and_then(|rest| rest.split_once(['(', '<'])) {
            Some((name, _)) if is_test => names.push(name),
            Some(_) => {}
            None if line.starts_with("#[") || line.starts_with("//") => {
                is_test |= line == "#[test]";
                continue;
            }
            None => {}
        }
        is_test = false;
    }
    names
}

/// The content of a longer name belongs in the comment above it.
#[test]
fn test_names_have_at_most_eight_words() {
    let (all, _) = tree();
    let (mut found, mut long) = (0, Vec::new());
    for file in all {
        let text = read(&file);
        for name in tests_of(&text) {
            found += 1;
            if name.split('_').count() > 8 {
                long.push(format!("{}: {name}", file.display()));
            }
        }
    }
    assert!(found > 1_000, "only {found} tests were found");
    assert!(long.is_empty(), "{}", long.join("\n"));
}

/// The names of the types that the product defines in a file.
fn types_of(text: &str) -> Vec<&str> {
    let product =
        text.split_once("\n#[cfg(test)]\nmod tests {").map_or(text, |(product, _)| product);
    let mut names = Vec::new();
    for line in product.lines() {
        // Types in functions and associated types are indented.
        let after = match line.split_once(") ") {
            Some((visibility, rest)) if visibility.starts_with("pub(") => rest,
            _ => line.strip_prefix("pub ").unwrap_or(line),
        };
        let after = after.strip_prefix("unsafe ").unwrap_or(after);
        let kinds = ["struct ", "enum ", "union ", "trait ", "type "];
        if let Some(rest) = kinds.iter().find_map(|kind| after.strip_prefix(kind)) {
            names.extend(rest.split(|c: char| !c.is_alphanumeric() && c != '_').next());
        }
    }
    names
}

/// A search for a name finds only one type.
#[test]
fn each_type_of_the_core_has_one_name() {
    /// A build contains one of two types: one with a feature, the other without it.
    const TWINS: [&str; 5] = ["Built", "CompressedStore", "Handle", "PendingCollapse", "StorePart"];
    let source = crates().join("bindery/src");
    let mut all = BTreeSet::new();
    sources(&source, &mut all);
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in all {
        let name = file.strip_prefix(&source).unwrap().to_str().unwrap().to_owned();
        let is_product = !name.contains("loom_model")
            && !name.contains("/tests/")
            && !name.ends_with("tests.rs")
            && !name.starts_with("testing/");
        for found in types_of(&read(&file)).into_iter().filter(|_| is_product) {
            places.entry(found.to_owned()).or_default().push(name.clone());
        }
    }
    assert!(places.len() > 700, "only {} types were found", places.len());
    let double: Vec<_> = places.iter().filter(|(_, places)| places.len() > 1).collect();
    let names: Vec<_> = double.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, TWINS, "{double:#?}");
}
