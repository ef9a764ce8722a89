//! The table of layers of a crate, and the item behind each path.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use syn::Item;
use syn::visit::Visit;

use crate::reader::{Finder, Names, follow, ident, read, without_modules};

/// The modules of a crate and their layers.
pub(crate) struct Tree {
    layers: HashMap<String, usize>,
    /// By path; the crate's root is the empty path.
    pub(crate) modules: BTreeMap<Names, Room>,
}

/// A module without its child modules.
#[derive(Default)]
pub(crate) struct Room {
    pub(crate) items: Vec<Item>,
    pub(crate) found: Finder,
}

impl Tree {
    pub(crate) fn read(source: &Path) -> Self {
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
    pub(crate) fn layer(&self, path: &[String]) -> usize {
        let mut prefixes = (1..=path.len()).rev().map(|length| path[..length].join("::"));
        let layer = prefixes.find_map(|prefix| self.layers.get(&prefix).copied());
        layer.unwrap_or_else(|| panic!("`{}` is in no layer", path.join("::")))
    }

    /// The items and globs of this crate that a module names, behind all re-exports. A `use` of a
    /// module counts as the paths that begin with it.
    pub(crate) fn targets(&self, module: &Names) -> Vec<Names> {
        let found = &self.modules[module].found;
        let brought = found.imports.iter().map(|import| (&import.path, import.name == "*"));
        // A path of one name is imported by a `use` or belongs to the module.
        let used = found.paths.iter().filter(|path| path.len() > 1).map(|path| (path, false));
        let absolute = brought.chain(used).filter_map(|(path, is_glob)| {
            let target = self.target(self.absolute(path, module)?);
            (is_glob || !self.modules.contains_key(&target)).then_some(target)
        });
        absolute.collect()
    }

    /// The path from the crate's root; `None` for a path into another crate.
    pub(crate) fn absolute(&self, path: &[String], module: &Names) -> Option<Names> {
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

    /// The item that a path refers to, behind all its re-exports.
    pub(crate) fn target(&self, mut path: Names) -> Names {
        // The bound on a chain of re-exports; it also ends a cycle.
        for _ in 0..16 {
            let Some(next) = (1..=path.len()).find_map(|end| self.exported(&path, end)) else {
                break;
            };
            path = next;
        }
        path
    }

    /// The path behind the re-export that the first `end` names form, if any.
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

/// Whether the item is a macro of this name in its crate's root.
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
