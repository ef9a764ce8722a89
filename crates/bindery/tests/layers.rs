//! Layers: lower code names no higher code.
//!
//! The layers are the table under "Layers" in the docs of a crate, lowest first. The test follows
//! the `mod` items from the crate's root and resolves every path: one that begins with `crate`,
//! `super`, `self`, a child module, or a name that a `use` brings (paths in the arguments and bodies
//! of macros too). A path counts as the item behind all re-exports on its way. So a module that only
//! re-exports may be in a high layer, and its name in a path costs nothing.
//!
//! A call of a method names no path. Two rules see methods:
//! 1. Calling a method that only inherent `impl`s above their types' layers define counts as naming
//!    the lowest layer of those. The test tells methods apart by name, and leaves out a list of names
//!    of the standard library.
//! 2. In the kernel, an inherent `impl` outside of its type's layer only has forwards, of at most
//!    [`FORWARD`] lines.
//!
//! Code that no product is built of is left out by its `cfg`: tests, models, fault injection. Doc
//! comments may link up.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, Meta, Token, TraitItem, UseTree};

#[test]
fn lower_layers_name_no_higher_ones() {
    check("bindery", violations);
}

#[test]
fn lower_layers_of_the_kernel_name_no_higher_ones() {
    check("bindery-kernel", violations);
}

#[test]
fn methods_of_the_kernel_are_in_the_layers_of_their_types() {
    check("bindery-kernel", stray_methods);
}

fn check(package: &str, find: fn(&Path) -> Vec<String>) {
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let found = find(&packages.join(package).join("src"));
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
fn names_are_followed_through_imports_children_and_re_exports() {
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
fn a_long_method_outside_of_its_types_layer_is_found() {
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

/// A path of modules and a name, from the crate's root.
type Names = Vec<String>;

/// The violations of a crate, one a line: the module, the path or the method, and both layers'
/// numbers.
fn violations(source: &Path) -> Vec<String> {
    let tree = Tree::read(source);
    let methods = raised_methods(&tree);
    let mut found = Vec::new();
    for (module, room) in tree.modules.iter().filter(|(module, _)| !module.is_empty()) {
        let from = tree.layer(module);
        let name = module.join("::");
        for called in room.found.calls.iter().filter(|name| !STANDARD.contains(&name.as_str())) {
            if let Some(&to) = methods.get(called).filter(|to| **to > from) {
                found.push(format!("{name}: .{called}() (layer {from} calls layer {to})"));
            }
        }
        for path in tree.targets(module) {
            let to = tree.layer(&path);
            if to > from {
                let path = path.join("::");
                found.push(format!("{name}: crate::{path} (layer {from} names layer {to})"));
            }
        }
    }
    found
}

/// Functions of inherent `impl`s in another layer than their type whose bodies are longer than a
/// forward.
fn stray_methods(source: &Path) -> Vec<String> {
    let tree = Tree::read(source);
    let mut found = Vec::new();
    for (module, room) in &tree.modules {
        for item in room.items.iter().filter(|item| is_built(attributes(item))) {
            let (Some(path), Item::Impl(block)) = (own_type(item), item) else { continue };
            let home = tree.absolute(&path, module).map(|path| tree.target(path));
            let Some(home) = home.filter(|home| tree.layer(home) != tree.layer(module)) else {
                continue;
            };
            for item in &block.items {
                let ImplItem::Fn(function) = item else { continue };
                let (first, last) = (function.block.span().start(), function.block.span().end());
                let lines = (last.line - first.line).saturating_sub(1);
                if is_built(&function.attrs) && lines > FORWARD {
                    let (home, module) = (home.join("::"), module.join("::"));
                    let name = &function.sig.ident;
                    found.push(format!("{module}: {home}::{name} ({lines} lines)"));
                }
            }
        }
    }
    found
}

/// The most lines that the body of a forward has.
const FORWARD: usize = 5;

/// The modules of a crate and their layers.
struct Tree {
    layers: HashMap<String, usize>,
    /// By path; the crate's root is the empty path.
    modules: BTreeMap<Names, Room>,
}

/// A module without its child modules.
#[derive(Default)]
struct Room {
    items: Vec<Item>,
    found: Finder,
}

impl Tree {
    fn read(source: &Path) -> Self {
        let mut roots = ["lib.rs", "main.rs"].iter().map(|name| source.join(name));
        let file = roots.find(|file| file.exists()).expect("a crate has a root");
        let root = read(&file).items;
        let mut modules = Vec::new();
        follow(&root, &mut Vec::new(), source, &mut modules);
        modules.push((Vec::new(), without_modules(root)));
        let modules = modules.into_iter().map(|(path, items)| {
            let mut found = Finder::default();
            items.iter().for_each(|item| found.visit_item(item));
            found.calls.sort_unstable();
            found.calls.dedup();
            (path, Room { items, found })
        });
        let layers = table_of_layers(&fs::read_to_string(file).unwrap());
        Self { layers, modules: modules.collect() }
    }

    /// The layer of the longest prefix in the table.
    fn layer(&self, path: &[String]) -> usize {
        let mut prefixes = (1..=path.len()).rev().map(|length| path[..length].join("::"));
        let layer = prefixes.find_map(|prefix| self.layers.get(&prefix).copied());
        layer.unwrap_or_else(|| panic!("`{}` is in no layer", path.join("::")))
    }

    /// The items and globs of this crate that a module names, behind all re-exports. A `use` of a
    /// module counts by the paths that begin with it.
    fn targets(&self, module: &Names) -> Vec<Names> {
        let found = &self.modules[module].found;
        let brought = found.imports.iter().map(|import| (&import.path, import.name == "*"));
        // A path of one name is brought by a `use` or belongs to the module.
        let used = found.paths.iter().filter(|path| path.len() > 1).map(|path| (path, false));
        let absolute = brought.chain(used).filter_map(|(path, is_glob)| {
            let target = self.target(self.absolute(path, module)?);
            (is_glob || !self.modules.contains_key(&target)).then_some(target)
        });
        absolute.collect()
    }

    /// The path from the crate's root; `None` for one into another crate.
    fn absolute(&self, path: &[String], module: &Names) -> Option<Names> {
        let (first, mut rest) = path.split_first()?;
        let mut base = match first.as_str() {
            "crate" => Vec::new(),
            "self" => module.clone(),
            "super" => module[..module.len() - 1].to_vec(),
            name => {
                let room = self.modules.get(module)?;
                let import = room.found.imports.iter().find(|import| import.name == name);
                // `use name::...` names a crate or a child, not itself.
                let import = import.filter(|import| import.path.first() != Some(first));
                if let Some(import) = import {
                    self.absolute(&import.path, module)?
                } else {
                    let mut own = module.clone();
                    own.push(name.to_owned());
                    let is_own = self.modules.contains_key(&own) || room.defines(name);
                    is_own.then_some(own)?
                }
            }
        };
        while let Some((first, after)) = rest.split_first()
            && first == "super"
        {
            base.pop();
            rest = after;
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// The item that a path stands for, behind the re-exports on its way.
    fn target(&self, mut path: Names) -> Names {
        // A chain of re-exports is shorter than this, and a cycle is none.
        for _ in 0..16 {
            let Some(next) = (1..=path.len()).find_map(|end| self.exported(&path, end)) else {
                break;
            };
            path = next;
        }
        path
    }

    /// The path behind the re-export of its first `end` names, if these are one.
    fn exported(&self, path: &[String], end: usize) -> Option<Names> {
        let (name, module) = path[..end].split_last()?;
        let (module, rest) = (module.to_vec(), &path[end..]);
        let room = self.modules.get(&module)?;
        if self.modules.contains_key(&path[..end]) || room.defines(name) {
            return None;
        }
        let found = &room.found;
        if let Some(import) = found.imports.iter().find(|import| import.name == *name) {
            let mut target = self.absolute(&import.path, &module)?;
            target.extend_from_slice(rest);
            return Some(target);
        }
        if module.is_empty() {
            let exports = |room: &Room| room.items.iter().any(|item| is_exported(item, name));
            let home = self.modules.iter().find(|(_, room)| exports(room));
            if let Some((home, _)) = home {
                return Some([home.as_slice(), &path[..1]].concat());
            }
        }
        let globs = found.imports.iter().filter(|import| import.name == "*");
        let mut targets = globs.filter_map(|glob| self.absolute(&glob.path, &module));
        let behind = |glob: &Names| {
            let has = |room: &Room| room.defines(name) || room.found.brings(name);
            let child = [glob.as_slice(), std::slice::from_ref(name)].concat();
            self.modules.get(glob).is_some_and(has) || self.modules.contains_key(&child)
        };
        let mut target = targets.find(behind)?;
        target.extend_from_slice(&path[end - 1..]);
        Some(target)
    }
}

impl Room {
    /// Whether the module has an item of this name.
    fn defines(&self, name: &str) -> bool {
        self.items.iter().any(|item| ident(item).is_some_and(|ident| ident == name))
    }
}

/// Whether the item is a macro of this name that its crate's root has.
fn is_exported(item: &Item, name: &str) -> bool {
    let Item::Macro(syn::ItemMacro { attrs, ident: Some(ident), .. }) = item else { return false };
    ident == name && attrs.iter().any(|attribute| attribute.path().is_ident("macro_export"))
}

/// Reads the rows under "# Layers": the first column names modules, each in backquotes.
fn table_of_layers(root: &str) -> HashMap<String, usize> {
    let docs = root.lines().map(str::trim_start).filter_map(|line| line.strip_prefix("//!"));
    let rows = docs.map(str::trim).skip_while(|line| *line != "# Layers").skip(1);
    let rows = rows.take_while(|line| !line.starts_with('#'));
    let columns = rows.filter_map(|line| line.strip_prefix('|')?.split('|').next());
    let named = columns.filter(|column| column.contains('`')).enumerate();
    let layers = named.flat_map(|(layer, column)| {
        let names = column.split('`').skip(1).step_by(2);
        names.map(move |name| (name.to_owned(), layer))
    });
    layers.collect()
}

fn read(file: &Path) -> syn::File {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"))
}

/// Collects the modules under `items`, which are in the module `path`, whose children's files are
/// in `folder`.
fn follow(items: &[Item], path: &mut Names, folder: &Path, modules: &mut Vec<(Names, Vec<Item>)>) {
    for item in items {
        let Item::Mod(module) = item else { continue };
        if !is_built(&module.attrs) {
            continue;
        }
        let name = module.ident.to_string();
        let folder = folder.join(&name);
        let items = match &module.content {
            Some((_, items)) => items.clone(),
            None => {
                let file = folder.with_extension("rs");
                let file = if file.exists() { file } else { folder.join("mod.rs") };
                read(&file).items
            }
        };
        path.push(name);
        follow(&items, path, &folder, modules);
        modules.push((path.clone(), without_modules(items)));
        path.pop();
    }
}

fn without_modules(items: Vec<Item>) -> Vec<Item> {
    items.into_iter().filter(|item| !matches!(item, Item::Mod(_))).collect()
}

/// The paths of a `use`. A glob is the path before it.
fn leaves(tree: &UseTree) -> Vec<Import> {
    let import = |path: &proc_macro2::Ident, name: &proc_macro2::Ident| Import {
        path: vec![path.to_string()],
        name: name.to_string(),
    };
    match tree {
        UseTree::Path(path) => {
            let name = path.ident.to_string();
            let mut leaves = leaves(&path.tree);
            for leaf in &mut leaves {
                if leaf.path.last().is_some_and(|last| last == "self") {
                    leaf.path.pop();
                    if leaf.name == "self" {
                        leaf.name.clone_from(&name);
                    }
                }
                leaf.path.insert(0, name.clone());
            }
            leaves
        }
        UseTree::Name(name) => vec![import(&name.ident, &name.ident)],
        UseTree::Rename(name) => vec![import(&name.ident, &name.rename)],
        UseTree::Glob(_) => vec![Import { path: Vec::new(), name: "*".to_owned() }],
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
    }
}

/// Methods of the standard library that a higher layer defines as well.
const STANDARD: &[&str] = &["inspect"];

/// For each method that only `impl`s above their types' layers have, the lowest layer of those.
fn raised_methods(tree: &Tree) -> HashMap<String, usize> {
    let (mut raised, mut others) = (HashMap::new(), HashMap::new());
    for (module, room) in tree.modules.iter().filter(|(module, _)| !module.is_empty()) {
        let layer = tree.layer(module);
        for item in room.items.iter().filter(|item| is_built(attributes(item))) {
            let mut finder = Finder::default();
            finder.visit_item(item);
            let home = own_type(item).and_then(|path| tree.absolute(&path, module));
            let is_raised = home.is_some_and(|home| tree.layer(&tree.target(home)) < layer);
            let methods = if is_raised { &mut raised } else { &mut others };
            for name in finder.functions {
                let lowest = methods.entry(name).or_insert(layer);
                *lowest = layer.min(*lowest);
            }
        }
    }
    raised.retain(|name, layer| others.get(name).is_none_or(|other| other >= layer));
    raised
}

/// The type of an inherent `impl`.
fn own_type(item: &Item) -> Option<Names> {
    let Item::Impl(syn::ItemImpl { trait_: None, self_ty, .. }) = item else { return None };
    let syn::Type::Path(path) = &**self_ty else { return None };
    Some(names(&path.path))
}

fn names(path: &syn::Path) -> Names {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

/// Finds the paths of a module, the methods that it calls, and the functions that it defines.
#[derive(Default)]
struct Finder {
    imports: Vec<Import>,
    paths: Vec<Names>,
    calls: Names,
    functions: Names,
}

/// A path of a `use`, and the name that it gets; `*` for a glob, whose path is that of the module.
struct Import {
    path: Names,
    name: String,
}

impl<'a> Visit<'a> for Finder {
    fn visit_item(&mut self, item: &'a Item) {
        if is_built(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'a ImplItem) {
        let attributes: &[_] = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => &[],
        };
        if is_built(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'a TraitItem) {
        let attributes: &[_] = match item {
            TraitItem::Const(item) => &item.attrs,
            TraitItem::Fn(item) => &item.attrs,
            TraitItem::Type(item) => &item.attrs,
            _ => &[],
        };
        if is_built(attributes) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        self.imports.extend(leaves(&item.tree));
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.paths.push(names(path));
        visit::visit_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'a syn::ExprMethodCall) {
        self.calls.push(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_signature(&mut self, signature: &'a syn::Signature) {
        self.functions.push(signature.ident.to_string());
        visit::visit_signature(self, signature);
    }

    fn visit_macro(&mut self, invocation: &'a syn::Macro) {
        self.visit_path(&invocation.path);
        self.tokens(invocation.tokens.clone());
    }

    /// The visibility of an item is no path that its code depends on.
    fn visit_visibility(&mut self, _: &'a syn::Visibility) {}

    fn visit_attribute(&mut self, _: &'a Attribute) {}
}

impl Finder {
    /// Whether a `use` brings this name.
    fn brings(&self, name: &str) -> bool {
        self.imports.iter().any(|import| import.name == name)
    }

    /// Finds paths where nothing is parsed yet.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path = Names::new();
        let mut colons = 0;
        let mut after_dot = false;
        let mut method = None;
        for token in tokens {
            let called = method.take();
            let dotted = std::mem::replace(&mut after_dot, false);
            match token {
                TokenTree::Ident(name) => {
                    method = dotted.then(|| name.to_string());
                    if colons != 2 {
                        self.paths.push(std::mem::take(&mut path));
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                TokenTree::Punct(mark) if mark.as_char() == '.' => {
                    after_dot = true;
                    colons = 0;
                }
                TokenTree::Group(group) => {
                    if group.delimiter() == Delimiter::Parenthesis {
                        self.calls.extend(called);
                    }
                    let groups = (colons == 2).then(|| path.clone());
                    self.tokens_in(groups, group.stream());
                    colons = 0;
                }
                _ => colons = 0,
            }
        }
        self.paths.push(path);
    }

    /// As [`Finder::tokens`], in a group behind `path::`, or in another one.
    fn tokens_in(&mut self, path: Option<Names>, tokens: TokenStream) {
        let first = self.paths.len();
        self.tokens(tokens);
        if let Some(path) = path {
            self.paths[first..].iter_mut().for_each(|rest| {
                rest.splice(..0, path.iter().cloned());
            });
        }
    }
}

/// Whether code with these attributes is part of a product. Features and targets count as present,
/// whichever way round they are asked for.
fn is_built(attributes: &[Attribute]) -> bool {
    let conditions = attributes.iter().filter(|attribute| attribute.path().is_ident("cfg"));
    conditions.map(|cfg| cfg.parse_args::<Meta>().unwrap()).all(|cfg| holds(&cfg) != Some(false))
}

/// Whether the condition holds in every product or in none; `None` where it depends.
fn holds(condition: &Meta) -> Option<bool> {
    match condition {
        Meta::Path(path) => {
            let tests = ["test", "loom", "doctest"].iter().any(|name| path.is_ident(name));
            tests.then_some(false)
        }
        Meta::NameValue(pair) => {
            let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(value), .. }) = &pair.value else {
                return None;
            };
            let testing = pair.path.is_ident("feature") && value.value() == "testing";
            (testing || pair.path.is_ident("lock_violations")).then_some(false)
        }
        Meta::List(list) => {
            let inner = Punctuated::<Meta, Token![,]>::parse_terminated;
            let inner: Vec<_> = list.parse_args_with(inner).unwrap().iter().map(holds).collect();
            let decided = |by| inner.contains(&Some(by)).then_some(by);
            let otherwise = |value| inner.iter().all(Option::is_some).then_some(value);
            if list.path.is_ident("any") {
                decided(true).or_else(|| otherwise(false))
            } else if list.path.is_ident("all") {
                decided(false).or_else(|| otherwise(true))
            } else {
                inner[0].map(|value| !value)
            }
        }
    }
}

fn ident(item: &Item) -> Option<&proc_macro2::Ident> {
    match item {
        Item::Const(item) => Some(&item.ident),
        Item::Enum(item) => Some(&item.ident),
        Item::Fn(item) => Some(&item.sig.ident),
        Item::Macro(item) => item.ident.as_ref(),
        Item::Static(item) => Some(&item.ident),
        Item::Struct(item) => Some(&item.ident),
        Item::Trait(item) => Some(&item.ident),
        Item::Type(item) => Some(&item.ident),
        Item::Union(item) => Some(&item.ident),
        _ => None,
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
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
