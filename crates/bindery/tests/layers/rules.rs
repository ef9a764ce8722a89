//! The rules: the items that a layer may name or call, and the placement of methods.

use std::collections::HashMap;
use std::path::Path;

use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{ImplItem, Item};

use crate::reader::{Finder, attributes, is_built, own_type};
use crate::table::Tree;

/// The violations of a crate, one a line: the module, the path or method, and the numbers of both
/// layers.
pub(crate) fn violations(source: &Path) -> Vec<String> {
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

/// Functions longer than a forward, in inherent `impl`s outside their types' layers.
pub(crate) fn stray_methods(source: &Path) -> Vec<String> {
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

/// The maximum number of lines in the body of a forward.
pub(crate) const FORWARD: usize = 5;

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
