//! `/sys`: the folio policies and the background collapser under
//! `/sys/kernel/mm/transparent_hugepage`, the merging of equal pages, which is off, the swap
//! device, and the CPUs that run programs.

use alloc::sync::Arc;

use super::generated::FixedDirectory;
use super::huge_pages;
use super::node::Node;

mod block;
mod cpus;
mod huge;
mod merging;
mod setting;

/// The root of `/sys`.
pub fn root() -> Arc<dyn Node> {
    let mm = FixedDirectory::of([
        ("transparent_hugepage", huge::directory() as _),
        ("hugepages", huge_pages::directory()),
        ("ksm", merging::directory()),
    ]);
    let kernel = FixedDirectory::of([("mm", mm as _)]);
    let system = FixedDirectory::of([("cpu", cpus::directory())]);
    let devices = FixedDirectory::of([("system", system as _)]);
    FixedDirectory::of([
        ("block", block::directory()),
        ("kernel", kernel as _),
        ("devices", devices),
    ])
}
