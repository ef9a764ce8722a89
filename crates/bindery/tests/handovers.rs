//! Checks folio locks and references whose guards are consumed while the lock or the reference
//! remains: the table in `docs/lock-order.md` names each place, and the end of each hand-over. Also
//! checks the names by which a file could bypass a type that enforces a rule: forgotten guards, and
//! entries with attributes that no mapping provided.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const HEADING: &str = "## Folio locks without a guard";

/// Calls that consume a guard, or create a guard for an existing hold.
const CALLS: [&str; 8] = [
    "leave_to_batch",
    "leave_lock_to_batch",
    "lock_of_batch",
    "folio_of_batch",
    "into_request",
    "lock_of_request",
    "into_frozen",
    "with_reference",
];

/// The calls themselves.
const UNLISTED: [&str; 1] = ["folio/lock.rs"];

/// The files that define guards which may be left; no other file may forget a value.
const GUARDS: [&str; 9] = [
    "folio/lock.rs",
    "folio/reference.rs",
    "object/page_read.rs",
    "object/read_request.rs",
    "object/write_request.rs",
    "sync/mutex.rs",
    "sync/rw_lock/mod.rs",
    "vma/guards.rs",
    "vmas/new_vma.rs",
];

/// The names that create attributes or an entry from values other than a mapping's flags, and the
/// file above the page tables that may use them.
const UNGRANTED: [&str; 4] = ["page_entry(", "user_attributes(", "Attributes {", "EntryPolicy {"];
const GRANTS: [&str; 2] = ["space/entry_policy.rs", "vma/attributes.rs"];

type Places = BTreeMap<String, BTreeSet<String>>;

/// The rows of the table: file, calls.
fn documented(page: &str) -> Places {
    let section = page.split_once(HEADING).expect("the section").1;
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| {
        let (file, rest) = row.split_once('`').expect("a file");
        let calls = rest.split('|').nth(1).expect("its calls");
        let calls = calls.split(',').map(|call| call.trim().trim_matches('`').to_owned());
        (file.to_owned(), calls.collect())
    })
    .collect()
}

/// The elements of `calls` that the source calls, ignoring its comments.
fn calls_in<'a>(source: &str, calls: &[&'a str]) -> BTreeSet<&'a str> {
    let code = source.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    let code: Vec<_> = code.collect();
    let is_called = |name: &&str| {
        let (method, path) = (format!(".{name}("), format!("::{name}("));
        code.iter().any(|line| line.contains(&method) || line.contains(&path))
    };
    calls.iter().copied().filter(is_called).collect()
}

/// Calls `visit` with each source file of the product, and its name below `src`.
fn for_each_source(root: &Path, folder: &Path, visit: &mut impl FnMut(&str, &str)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
        if path.is_dir() {
            if !name.ends_with("tests") && !name.contains("loom_model") {
                for_each_source(root, &path, visit);
            }
        } else if name.ends_with(".rs") && !name.contains("loom_model") {
            visit(&name, &fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn each_handover_of_a_folio_lock_is_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("../../docs/lock-order.md")).unwrap();
    let mut found = Places::new();
    let source = root.join("src");
    for_each_source(&source, &source, &mut |name, text| {
        let calls = calls_in(text, &CALLS);
        if !calls.is_empty() && !UNLISTED.contains(&name) {
            found.insert(name.to_owned(), calls.into_iter().map(str::to_owned).collect());
        }
    });
    assert!(found.len() > 4, "{found:?}");
    assert_eq!(found, documented(&page));
}

#[test]
fn only_files_of_guards_forget_values() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = BTreeSet::new();
    for_each_source(&source, &source, &mut |name, text| {
        let names = ["mem::forget", "mem::{forget", "ManuallyDrop"];
        if names.iter().any(|name| text.contains(name)) {
            found.insert(name.to_owned());
        }
    });
    assert_eq!(found, BTreeSet::from(GUARDS.map(str::to_owned)));
}

#[test]
fn entries_are_made_of_their_mappings_attributes() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = BTreeSet::new();
    for_each_source(&source, &source, &mut |name, text| {
        let is_above = ["space/", "vma/", "vmas/", "object/", "reclaim/", "userfault/", "swap/"];
        if is_above.iter().any(|folder| name.starts_with(folder)) && makes_ungranted(text) {
            found.insert(name.to_owned());
        }
    });
    assert_eq!(found, BTreeSet::from(GRANTS.map(str::to_owned)));
}

/// Whether the source creates attributes or entries that need not come from a mapping.
fn makes_ungranted(source: &str) -> bool {
    source.lines().any(|line| {
        let code = line.split_once("//").map_or(line, |(code, _)| code);
        UNGRANTED.iter().any(|name| {
            code.split_once(name).is_some_and(|(before, _)| {
                // Excludes types whose names end in this name, with their methods and results.
                !before.ends_with(char::is_alphanumeric) && !before.trim_end().ends_with("->")
            })
        })
    })
}

#[test]
fn attributes_of_no_mapping_are_found() {
    assert!(makes_ungranted("let entry = P::Arch::page_entry(frame, level, attributes);"));
    assert!(makes_ungranted("Attributes { accessed: true, ..attributes }"));
    assert!(!makes_ungranted("fn attributes(self) -> MappingAttributes {"));
    assert!(!makes_ungranted("// As `user_attributes(permissions, key)`."));
}

#[test]
fn a_call_is_found_only_in_code() {
    let source = "// lock.leave_to_batch();\n/// [`FolioLock::into_request`]\nlock.into_frozen();\n\
                  fn lock_of_batch(self) {}\nFolioLock::with_reference(lock);";
    assert_eq!(calls_in(source, &CALLS), BTreeSet::from(["into_frozen", "with_reference"]));
}
