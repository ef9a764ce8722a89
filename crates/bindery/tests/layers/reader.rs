//! Reads the modules of a crate: their items, and the paths and methods that their code names.

use std::fs;
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, Meta, Token, TraitItem, UseTree};

/// A path of modules and a name, from the crate's root.
pub(crate) type Names = Vec<String>;

pub(crate) fn read(file: &Path) -> syn::File {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"))
}

/// Collects the modules under `items`, which are in the module `path`; the files of its children
/// are in `folder`.
pub(crate) fn follow(
    items: &[Item],
    path: &mut Names,
    folder: &Path,
    modules: &mut Vec<(Names, Vec<Item>)>,
) {
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

pub(crate) fn without_modules(items: Vec<Item>) -> Vec<Item> {
    items.into_iter().filter(|item| !matches!(item, Item::Mod(_))).collect()
}

/// The paths of a `use`. A glob is represented by the path before it.
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

/// The type of an inherent `impl`.
pub(crate) fn own_type(item: &Item) -> Option<Names> {
    let Item::Impl(syn::ItemImpl { trait_: None, self_ty, .. }) = item else { return None };
    let syn::Type::Path(path) = &**self_ty else { return None };
    Some(names(&path.path))
}

fn names(path: &syn::Path) -> Names {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

/// Finds the paths of a module, the methods that it calls, and the functions that it defines.
#[derive(Default)]
pub(crate) struct Finder {
    pub(crate) imports: Vec<Import>,
    pub(crate) paths: Vec<Names>,
    pub(crate) calls: Names,
    pub(crate) functions: Names,
}

/// A path of a `use` and its imported name; `*` for a glob, whose path is that of the module.
pub(crate) struct Import {
    pub(crate) path: Names,
    pub(crate) name: String,
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

    /// The visibility of an item does not count as a path that its code depends on.
    fn visit_visibility(&mut self, _: &'a syn::Visibility) {}

    fn visit_attribute(&mut self, _: &'a Attribute) {}
}

impl Finder {
    /// Whether a `use` imports this name.
    pub(crate) fn brings(&self, name: &str) -> bool {
        self.imports.iter().any(|import| import.name == name)
    }

    /// Finds paths in unparsed tokens.
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

/// Whether code with these attributes is part of a product. Conditions on features and targets
/// count as satisfied, even negated ones.
pub(crate) fn is_built(attributes: &[Attribute]) -> bool {
    let conditions = attributes.iter().filter(|attribute| attribute.path().is_ident("cfg"));
    conditions.map(|cfg| cfg.parse_args::<Meta>().unwrap()).all(|cfg| holds(&cfg) != Some(false))
}

/// Whether the condition has the same value in every product; `None` if the value depends on the
/// product.
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

pub(crate) fn ident(item: &Item) -> Option<&proc_macro2::Ident> {
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

pub(crate) fn attributes(item: &Item) -> &[Attribute] {
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
