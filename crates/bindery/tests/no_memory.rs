//! Lack of memory is converted to a public error in only one place, after reclaim.
//!
//! `NoMemory` has no conversion to a public error, so `?` cannot convert it. Only code that names
//! the error itself could; this test lists all such code.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::collections::BTreeMap;
use std::path::Path;
use std::{env, fs};

/// The files that name `OutOfMemory` of a public error, the number of such lines, and the reason
/// why no allocation there skips reclaim.
const NAMED: &[(&str, usize, &str)] = &[
    ("error/errno.rs", 1, "the errno of it"),
    ("error/failure.rs", 3, "the errors themselves"),
    ("error/mod.rs", 3, "the errors themselves"),
    ("kernel_map/error.rs", 3, "the error itself"),
    ("kernel_map/vmalloc.rs", 1, "more frames than the machine has"),
    ("memory/cpus.rs", 1, "a CPU that comes: the caller may try again"),
    ("object/pager.rs", 3, "what a pager says, which is no call's error yet"),
    ("object/write_errors.rs", 2, "what a pager says, which the caller of the write tries again"),
    ("reclaim/direct.rs", 1, "the place"),
    ("space/call/collapse/call.rs", 1, "the error itself"),
    ("space/fault/object.rs", 3, "a folio that has the most mappings that can be counted"),
    ("space/folio.rs", 2, "the error itself"),
    ("space/call/collapse/pending.rs", 2, "what a wait for a page has said after reclaim"),
    ("space/call/madvise.rs", 1, "another error for what a call has said after reclaim"),
    ("space/move_pages.rs", 2, "the error itself"),
    ("space/call/mremap/mod.rs", 1, "a second attempt would unmap the target again"),
    ("space/call/populate.rs", 2, "what a fault has said after reclaim, also as another error"),
    ("space/call/scan_pages.rs", 1, "what an attempt has said after reclaim"),
    ("space/call/swap_off.rs", 1, "what a fault has said after reclaim"),
    ("swap/mod.rs", 2, "the error itself"),
];

#[test]
fn only_reclaim_says_that_memory_ran_out() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = BTreeMap::new();
    count(&root, &root, &mut found);
    let known: BTreeMap<_, _> =
        NAMED.iter().map(|(file, count, _)| (String::from(*file), *count)).collect();
    assert_eq!(found, known);
}

/// Counts the lines that name the error or create it without reclaim. Ignores comments and tests.
fn count(root: &Path, folder: &Path, found: &mut BTreeMap<String, usize>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "tests") {
                count(root, &path, found);
            }
            continue;
        }
        if path.file_name().is_some_and(|name| name == "tests.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        let named = lines
            .filter(|line| {
                let words = ["::OutOfMemory", "::OUT_OF_MEMORY", ".without_second_attempt"];
                words.iter().any(|word| line.contains(word)) || line.contains("::without_second")
            })
            .count();
        if named > 0 {
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            found.insert(name, named);
        }
    }
}
