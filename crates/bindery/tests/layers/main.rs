//! Layers: lower code names no higher code.
//!
//! The layers are the table under "Layers" in the docs of a crate, lowest first. The test follows
//! the `mod` items from the crate's root and resolves every path: one that begins with `crate`,
//! `super`, `self`, a child module, or a name that a `use` imports (paths in the arguments and
//! bodies of macros too). A path counts as the item behind all its re-exports. So a module that
//! only re-exports may be in a high layer, and its name in a path costs nothing.
//!
//! A method call contains no path. Two rules cover methods:
//! 1. Calling a method that only inherent `impl`s above their types' layers define counts as naming
//!    the lowest layer of these `impl`s. The test distinguishes methods by name and excludes a list
//!    of standard library names.
//! 2. An inherent `impl` outside its type's layer contains only forwards, of at most
//!    [`rules::FORWARD`] lines.
//!
//! Code that is in no product (tests, models, fault injection) is excluded by its `cfg`. Doc
//! comments may link to higher layers.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

mod reader;
mod rules;
mod table;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process};

use rules::{stray_methods, violations};

#[test]
fn lower_layers_name_no_higher_ones() {
    check("bindery", violations);
}

#[test]
fn lower_kernel_layers_name_no_higher_ones() {
    check("bindery-kernel", violations);
}

#[test]
fn kernel_methods_are_in_their_types_layers() {
    check("bindery-kernel", stray_methods);
}

#[test]
fn core_methods_are_in_their_types_layers() {
    check("bindery", stray_methods);
}

fn source_of(package: &str) -> PathBuf {
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    packages.join(package).join("src")
}

fn check(package: &str, find: fn(&Path) -> Vec<String>) {
    let found = find(&source_of(package));
    assert!(found.is_empty(), "{package} has {}:\n{}", found.len(), found.join("\n"));
}

#[test]
fn each_form_of_a_planted_violation_is_found() {
    const ROOT: &str = "
        //! # Layers
        //! | modules | idea |
        //! |---|---|
        //! | `low`, `low::shared` | below |
        //! | `middle`, `low::raised` | between |
        //! | `high` | above |
        mod low; mod middle; mod high;
        pub use high::{Thing, deep::Other as Renamed};";
    const LOW: &str = "
        mod inner; mod raised; mod shared;
        #[cfg(test)] mod tests;
        #[cfg(all(test, loom))] mod model;
        use crate::high::Thing as InUse;
        use crate::{middle::{self, Part}};
        use super::high::*;
        use crate::Renamed;
        use self::raised::Raised;
        fn expression() { crate::high::call(); let _: super::middle::Part; }
        fn in_macro() { assert_eq!(crate::high::VALUE, 1); }
        macro_rules! body { () => { $crate::high::call() } }
        impl crate::high::Trait for Low { fn f() { <u8 as crate::high::Trait>::f() } }
        #[cfg(any(test, feature = \"testing\"))] fn tested() { crate::high::call(); }
        #[cfg(feature = \"measure\")] fn measured() { crate::high::call(); }
        /// [`crate::high`]
        pub(crate) struct Low(self::shared::Shared, core::num::NonZeroU8);";
    let tree = TemporaryTree::new(&[
        ("lib.rs", ROOT),
        ("low/mod.rs", LOW),
        (
            "low/inner.rs",
            "use super::super::high::Thing; use super::Low; mod nested { use super::super::Low; use super::super::super::high::call; }",
        ),
        ("low/shared.rs", "use super::Low; use crate::low::raised;"),
        ("low/raised.rs", "use super::Low; use crate::middle::Part; use crate::high::Thing;"),
        (
            "middle.rs",
            "use crate::low::Low; use crate::low::raised::Raised; use super::middle::Part;",
        ),
        ("high/mod.rs", "mod deep; use crate::low; use crate::middle;"),
        ("high/deep.rs", "use crate::low::Low; pub struct Other;"),
    ]);
    let found = violations(&tree.0);
    let mut expected = vec![
        "low: crate::high::Thing",
        "low: crate::middle::Part",
        "low: crate::high",
        "low: crate::high::deep::Other",
        "low: crate::low::raised::Raised",
        "low: crate::high::call",
        "low: crate::middle::Part",
        "low: crate::high::VALUE",
        "low: crate::high::call",
        "low: crate::high::Trait",
        "low: crate::high::Trait::f",
        "low: crate::high::call",
        "low::inner: crate::high::Thing",
        "low::inner::nested: crate::high::call",
        "low::raised: crate::high::Thing",
    ];
    let mut lines: Vec<_> = found.iter().map(|line| line.split(" (").next().unwrap()).collect();
    expected.sort_unstable();
    lines.sort_unstable();
    assert_eq!(lines, expected);
}

#[test]
fn names_are_followed_through_imports_and_re_exports() {
    let tree = TemporaryTree::new(&[
        (
            "main.rs",
            "//! # Layers\n//! | `low` | below |\n//! | `face` | between |\n//! | `high` | above |
            mod low; mod face; mod high;",
        ),
        (
            "low/mod.rs",
            "mod child; use crate::high as up; use crate::face::{self, Renamed};
            fn imported() { up::call(); face::low_again(); face::Inner; face::child::call(); }
            fn children() { child::inner(); }
            fn others() { core::mem::take(); up(); }",
        ),
        ("low/child.rs", "pub fn inner() { super::up::call(); super::imported(); }"),
        (
            "face.rs",
            "pub use crate::high::{Thing as Renamed, child}; pub use crate::high::*;
            pub use crate::low::imported as low_again;",
        ),
        ("high/mod.rs", "pub mod child; pub struct Thing; pub struct Inner; pub fn call() {}"),
        ("high/child.rs", "pub fn call() {}"),
    ]);
    let found = violations(&tree.0);
    let mut lines: Vec<_> = found.iter().map(|line| line.split(" (").next().unwrap()).collect();
    lines.sort_unstable();
    let expected = [
        "face: crate::high",
        "face: crate::high::Thing",
        "low: crate::high::Inner",
        "low: crate::high::Thing",
        "low: crate::high::call",
        "low: crate::high::child::call",
        "low::child: crate::high::call",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn a_long_method_outside_its_layer_is_found() {
    let tree = TemporaryTree::new(&[
        ("lib.rs", "//! # Layers\n//! | `low` | below |\n//! | `high` | above |\nmod low; mod high;"),
        ("low.rs", "pub struct Low; impl Low { fn own() {\n 1;\n 2;\n 3;\n 4;\n 5;\n 6;\n} }"),
        (
            "high.rs",
            "use crate::low::Low;
            impl Low { fn forward() {\n 1;\n 2;\n 3;\n 4;\n 5;\n} fn stray() {\n 1;\n 2;\n 3;\n 4;\n 5;\n 6;\n} }
            impl crate::Trait for Low { fn of_trait() {\n 1;\n 2;\n 3;\n 4;\n 5;\n 6;\n} }",
        ),
    ]);
    assert_eq!(stray_methods(&tree.0), ["high: low::Low::stray (6 lines)"]);
}

#[test]
fn a_method_of_a_higher_layer_is_found() {
    let tree = TemporaryTree::new(&[
        ("lib.rs", "//! # Layers\n//! | `low` | below |\n//! | `high` | above |\nmod low; mod high;"),
        (
            "low.rs",
            "pub struct Low; impl Low { fn both(&self) {} }
            fn call(low: &Low) { low.above(); low.both(); low.insert(1); assert!(low.in_macro()); }",
        ),
        (
            "high.rs",
            "use crate::low::Low; impl Low { pub fn above(&self) {} fn in_macro(&self) {} }
            struct High; impl High { fn both(&self) {} fn insert(&self) {} }",
        ),
    ]);
    let found = violations(&tree.0);
    let lines: Vec<_> = found.iter().map(|line| line.split(" (").next().unwrap()).collect();
    assert_eq!(lines, ["low: .above()", "low: .in_macro()"]);
}

#[test]
#[should_panic(expected = "`extra` is in no layer")]
fn a_module_that_no_layer_names_is_refused() {
    let tree = TemporaryTree::new(&[
        ("lib.rs", "//! # Layers\n//! | `low` | below |\nmod low; mod extra;"),
        ("low.rs", ""),
        ("extra.rs", ""),
    ]);
    violations(&tree.0);
}

/// Files that are removed at the end.
struct TemporaryTree(PathBuf);

impl TemporaryTree {
    fn new(files: &[(&str, &str)]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("bindery-layers-{}-{number}", process::id());
        let root = env::temp_dir().join(name);
        for (file, text) in files {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        Self(root)
    }
}

impl Drop for TemporaryTree {
    fn drop(&mut self) {
        // The rest is in the folder for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
