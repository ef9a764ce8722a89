//! Layers: lower code names no higher code.
//!
//! The layers are the table under "Layers" in the crate docs, lowest first. The test follows the
//! `mod` items from `lib.rs`, resolves every `use` and every path that begins with `crate`, `super`
//! or `self` (those in the arguments and bodies of macros too), and names each one that leads from
//! a module to a higher layer. Other paths begin with a name that a `use` or a child module has
//! brought, or with another crate. A name that `lib.rs` re-exports counts as the item itself.
//!
//! A call of a method names no path. An inherent `impl` may stand in a layer above its type:
//! calling a method that only such an `impl` defines counts as naming the layer of the `impl`. The
//! test tells methods apart by name only, and leaves out a list of names of the standard library.
//!
//! Code that no product is built of is left out by its `cfg`: tests, models, fault injection. Doc
//! comments may link up.

#![allow(clippy::disallowed_methods, reason = "tests may use the whole standard library")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, Meta, Token, TraitItem, UseTree};

#[test]
fn lower_layers_name_no_higher_ones() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let found = violations(&source);
    assert!(found.is_empty(), "{} paths lead up:\n{}", found.len(), found.join("\n"));
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
        "low: crate::middle",
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
        "low::shared: crate::low::raised",
        "low::raised: crate::high::Thing",
    ];
    let mut lines: Vec<_> = found.iter().map(|line| line.split(" (").next().unwrap()).collect();
    expected.sort_unstable();
    lines.sort_unstable();
    assert_eq!(lines, expected);
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

/// The paths that lead up, one a line: the module, the path, and both layers' numbers.
fn violations(source: &Path) -> Vec<String> {
    let root = read(&source.join("lib.rs"));
    let layers = Layers::of(&fs::read_to_string(source.join("lib.rs")).unwrap());
    let mut modules = Vec::new();
    follow(&root.items, &mut Vec::new(), source, &mut modules);
    let exports = exports(&root.items);
    let methods = raised_methods(&modules, &layers);
    let mut found = Vec::new();
    for (module, items) in &modules {
        let from = layers.of_path(module);
        let mut finder = Finder::default();
        items.iter().for_each(|item| finder.visit_item(item));
        finder.calls.sort_unstable();
        finder.calls.dedup();
        let up = finder.calls.iter().filter(|name| !STANDARD.contains(&name.as_str()));
        found.extend(up.filter_map(|name| {
            let to = *methods.get(name)?;
            let module = module.join("::");
            (to > from).then(|| format!("{module}: .{name}() (layer {from} calls layer {to})"))
        }));
        let paths = finder.paths.iter().filter_map(|path| resolve(path, module, &exports));
        found.extend(paths.filter(|path| !path.is_empty()).filter_map(|path| {
            let to = layers.of_path(&path);
            let (module, path) = (module.join("::"), path.join("::"));
            (to > from).then(|| format!("{module}: crate::{path} (layer {from} names layer {to})"))
        }));
    }
    found
}

/// The table of layers in the docs of the crate.
struct Layers(HashMap<String, usize>);

impl Layers {
    /// Reads the rows under "# Layers": the first column names modules, each in backquotes.
    fn of(root: &str) -> Self {
        let docs = root.lines().map(str::trim_start).filter_map(|line| line.strip_prefix("//!"));
        let rows = docs.map(str::trim).skip_while(|line| *line != "# Layers").skip(1);
        let rows = rows.take_while(|line| !line.starts_with('#'));
        let columns = rows.filter_map(|line| line.strip_prefix('|')?.split('|').next());
        let named = columns.filter(|column| column.contains('`')).enumerate();
        let layers = named.flat_map(|(layer, column)| {
            let names = column.split('`').skip(1).step_by(2);
            names.map(move |name| (name.to_owned(), layer))
        });
        Self(layers.collect())
    }

    /// The layer of the longest named prefix.
    fn of_path(&self, path: &[String]) -> usize {
        let prefixes = (1..=path.len()).rev().map(|length| path[..length].join("::"));
        let layer = prefixes.into_iter().find_map(|prefix| self.0.get(&prefix).copied());
        layer.unwrap_or_else(|| panic!("`{}` is in no layer", path.join("::")))
    }
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
        // Nested modules were visited by themselves.
        let own = items.into_iter().filter(|item| !matches!(item, Item::Mod(_)));
        modules.push((path.clone(), own.collect()));
        path.pop();
    }
}

/// The items behind the names that the crate's root re-exports.
fn exports(root: &[Item]) -> HashMap<String, Names> {
    let mut exports = HashMap::new();
    for item in root {
        let Item::Use(item) = item else { continue };
        for (path, name) in leaves(&item.tree) {
            exports.insert(name, path);
        }
    }
    exports
}

/// The paths of a `use`, each with the name that it gets here. A glob is the path before it.
fn leaves(tree: &UseTree) -> Vec<(Names, String)> {
    match tree {
        UseTree::Path(path) => {
            let name = path.ident.to_string();
            let mut leaves = leaves(&path.tree);
            for (rest, local) in &mut leaves {
                if rest.last().is_some_and(|last| last == "self") {
                    rest.pop();
                    if local == "self" {
                        local.clone_from(&name);
                    }
                }
                rest.insert(0, name.clone());
            }
            leaves
        }
        UseTree::Name(name) => vec![(vec![name.ident.to_string()], name.ident.to_string())],
        UseTree::Rename(name) => vec![(vec![name.ident.to_string()], name.rename.to_string())],
        UseTree::Glob(_) => vec![(Vec::new(), "*".to_owned())],
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
    }
}

/// The path from the crate's root; `None` for one that does not begin there.
fn resolve(path: &[String], module: &[String], exports: &HashMap<String, Names>) -> Option<Names> {
    let (first, mut rest) = path.split_first()?;
    let mut base = match first.as_str() {
        "crate" => Vec::new(),
        "self" => module.to_vec(),
        "super" => module[..module.len() - 1].to_vec(),
        _ => return None,
    };
    while let Some((first, after)) = rest.split_first()
        && first == "super"
    {
        base.pop();
        rest = after;
    }
    base.extend_from_slice(rest);
    if let Some(target) = base.first().and_then(|first| exports.get(first)) {
        base.splice(..1, target.iter().cloned());
    }
    Some(base)
}

/// Methods of the standard library that a higher layer defines as well.
const STANDARD: &[&str] = &["inspect"];

/// For each method that only an `impl` above its type's layer has, the layer of the `impl`.
fn raised_methods(modules: &[(Names, Vec<Item>)], layers: &Layers) -> HashMap<String, usize> {
    let mut homes: HashMap<String, usize> = HashMap::new();
    for (module, items) in modules {
        let layer = layers.of_path(module);
        for item in items {
            let name = match item {
                Item::Struct(item) => item.ident.to_string(),
                Item::Enum(item) => item.ident.to_string(),
                _ => continue,
            };
            let home = homes.entry(name).or_insert(layer);
            *home = layer.min(*home);
        }
    }
    let (mut raised, mut others) = (HashMap::new(), HashMap::new());
    for (module, items) in modules {
        let layer = layers.of_path(module);
        for item in items.iter().filter(|item| is_built(attributes(item))) {
            let mut finder = Finder::default();
            finder.visit_item(item);
            let is_raised = own_type(item).and_then(|name| homes.get(&name)) < Some(&layer)
                && own_type(item).is_some_and(|name| homes.contains_key(&name));
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
fn own_type(item: &Item) -> Option<String> {
    let Item::Impl(syn::ItemImpl { trait_: None, self_ty, .. }) = item else { return None };
    let syn::Type::Path(path) = &**self_ty else { return None };
    Some(path.path.segments.last()?.ident.to_string())
}

/// Finds the paths of a module, the methods that it calls, and the functions that it defines.
#[derive(Default)]
struct Finder {
    paths: Vec<Names>,
    calls: Names,
    functions: Names,
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
        self.paths.extend(leaves(&item.tree).into_iter().map(|(path, _)| path));
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
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
