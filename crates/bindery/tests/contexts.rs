//! Contexts: every public function documents where it may be called.
//!
//! The crate's docs define three contexts ("Contexts"). A function's docs have a paragraph
//! `Context: ` with one of them, before the first section (`# Errors`, `# Safety`); or its type,
//! its trait, or a module around it has a section `# Context`, which applies to all functions
//! there. `testing` and trait implementations are excluded.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use syn::{Attribute, Expr, ImplItem, Item, Lit, Meta, TraitItem, Type, Visibility};

const CONTEXTS: [&str; 3] = ["Context: may sleep", "Context: spins", "Context: any"];

#[test]
fn each_public_function_names_its_context() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let files: Vec<_> = ["bindery/src", "bindery-linux/src", "bindery-parts/src"]
        .iter()
        .flat_map(|folder| sources(&crates.join(folder)))
        .map(|path| (path.display().to_string(), fs::read_to_string(&path).unwrap()))
        .collect();
    let missing = missing(&files);
    assert!(
        missing.is_empty(),
        "{} have no context before their sections:\n{}",
        missing.len(),
        missing.join("\n")
    );
}

#[test]
fn each_missing_context_is_found() {
    const CODE: &str = "
        //! A module.
        /// Sleeps.
        pub fn free() {}
        /// Context: sometimes.
        pub fn unknown() {}
        /// Does it.
        ///
        /// Context: may sleep.
        ///
        /// # Errors
        /// Some.
        pub fn said() {}
        /// Does it. Context: may sleep.
        pub fn hidden() {}
        /// Does it.
        ///
        /// # Errors
        /// Some.
        ///
        /// Context: may sleep.
        pub fn late() {}
        pub struct Plain;
        impl Plain {
            /// Nothing.
            pub fn method(&self) {}
            /// Context: any.
            pub unsafe fn said(&self) {}
            /// Inside.
            pub(crate) fn inside(&self) {}
        }
        impl Clone for Plain { fn clone(&self) -> Self { Self } }
        /// All the same.
        ///
        /// # Context
        /// Context: any.
        pub struct Uniform;
        impl<T> Uniform { pub fn method(&self) {} }
        pub(crate) struct Private;
        impl Private { pub fn method(&self) {} }
        pub trait Asked { /** Asks. */ fn asked(&self); /** Context: spins. */ fn said(&self); }
        #[cfg(test)] mod tests { pub fn test() {} }";
    const WHOLE: &str = "//! # Context\n//! Context: any.\npub fn free() {}";
    let files = [("code".to_owned(), CODE.to_owned()), ("whole".to_owned(), WHOLE.to_owned())];
    let expected = ["free", "unknown", "hidden", "late", "Plain::method", "Asked::asked"];
    assert_eq!(missing(&files), expected.map(|name| format!("code: {name}")));
}

/// The functions without a context, in order, with their files.
fn missing(files: &[(String, String)]) -> Vec<String> {
    let parsed: Vec<_> = files
        .iter()
        .map(|(path, text)| (path, syn::parse_file(text).unwrap_or_else(|e| panic!("{path}: {e}"))))
        .collect();
    let mut types = Types::default();
    parsed.iter().for_each(|(_, file)| types.collect(&file.items));
    let mut missing = Vec::new();
    let folders: Vec<_> = parsed
        .iter()
        .filter(|(_, file)| has_section(&file.attrs))
        .map(|(path, _)| path.trim_end_matches("mod.rs").trim_end_matches(".rs"))
        .collect();
    for (path, file) in &parsed {
        if !folders.iter().any(|folder| path.starts_with(folder)) {
            let mut found = Vec::new();
            look(&file.items, &types, &mut found);
            missing.extend(found.into_iter().map(|name| format!("{path}: {name}")));
        }
    }
    missing
}

/// Types by name: those visible only in the crate, and those with their own section.
#[derive(Default)]
struct Types {
    private: HashSet<String>,
    described: HashSet<String>,
}

impl Types {
    fn collect(&mut self, items: &[Item]) {
        for item in items {
            let (name, visibility, attributes) = match item {
                Item::Struct(item) => (&item.ident, &item.vis, &item.attrs),
                Item::Enum(item) => (&item.ident, &item.vis, &item.attrs),
                Item::Macro(item) => {
                    self.collect_flags(item);
                    continue;
                }
                _ => continue,
            };
            if !is_public(visibility) {
                self.private.insert(name.to_string());
            }
            if has_section(attributes) {
                self.described.insert(name.to_string());
            }
        }
    }

    /// `bitflags!` contains its types as tokens.
    fn collect_flags(&mut self, item: &syn::ItemMacro) {
        if item.mac.path.segments.last().is_some_and(|segment| segment.ident == "bitflags") {
            let text = item.mac.tokens.to_string();
            let name = text.split("struct ").nth(1).and_then(|rest| rest.split(' ').next());
            if let Some(name) = name.filter(|_| text.contains("# Context")) {
                self.described.insert(name.trim_end_matches(':').to_owned());
            }
        }
    }
}

fn look(items: &[Item], types: &Types, found: &mut Vec<String>) {
    for item in items {
        match item {
            Item::Fn(item) if is_public(&item.vis) && !is_test(&item.attrs) => {
                check(&item.attrs, &item.sig.ident.to_string(), found);
            }
            Item::Impl(item) if item.trait_.is_none() && !is_test(&item.attrs) => {
                let Some(name) = name_of(&item.self_ty) else { continue };
                if types.private.contains(&name) || types.described.contains(&name) {
                    continue;
                }
                for item in &item.items {
                    if let ImplItem::Fn(item) = item
                        && is_public(&item.vis)
                        && !is_test(&item.attrs)
                    {
                        check(&item.attrs, &format!("{name}::{}", item.sig.ident), found);
                    }
                }
            }
            Item::Trait(item) if is_public(&item.vis) && !has_section(&item.attrs) => {
                for function in &item.items {
                    if let TraitItem::Fn(function) = function
                        && !is_test(&function.attrs)
                    {
                        let name = format!("{}::{}", item.ident, function.sig.ident);
                        check(&function.attrs, &name, found);
                    }
                }
            }
            _ => {}
        }
    }
}

fn check(attributes: &[Attribute], name: &str, found: &mut Vec<String>) {
    let docs = docs(attributes);
    let ahead = docs.split("\n\n# ").next().unwrap_or_default();
    let is_context = |paragraph: &str| CONTEXTS.iter().any(|start| paragraph.starts_with(start));
    if !ahead.split("\n\n").any(is_context) {
        found.push(name.to_owned());
    }
}

fn has_section(attributes: &[Attribute]) -> bool {
    docs(attributes).lines().any(|line| line.trim() == "# Context")
}

/// The lines of the docs, without the leading space.
fn docs(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else { return None };
        let Expr::Lit(literal) = &pair.value else { return None };
        let Lit::Str(text) = &literal.lit else { return None };
        pair.path.is_ident("doc").then(|| text.value().trim().to_owned())
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether the code is only for tests.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else { return false };
        let condition = list.tokens.to_string();
        list.path.is_ident("cfg") && (condition.contains("test") || condition.contains("baseline"))
    })
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn name_of(of: &Type) -> Option<String> {
    let Type::Path(path) = of else { return None };
    Some(path.path.segments.last()?.ident.to_string())
}

/// The files of the crate, in order, without tests and models.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let left_out = [
        "tests",
        "tests.rs",
        "testing.rs",
        "testing",
        "loom_model",
        "loom_model.rs",
        "inject.rs",
        "damage.rs",
        "model.rs",
    ];
    paths.retain(|path| !left_out.iter().any(|name| path.ends_with(name)));
    paths
        .into_iter()
        .flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] })
        .collect()
}
