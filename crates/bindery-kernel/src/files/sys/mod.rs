//! `/sys`: the folio policies and the background collapser under
//! `/sys/kernel/mm/transparent_hugepage`, and how many CPUs run programs.

use alloc::sync::Arc;
use core::fmt::Write;

use super::generated::{Shelf, Text};
use super::node::Node;

mod huge;
mod setting;

/// The root of `/sys`.
pub fn root() -> Arc<dyn Node> {
    let pools = Shelf::of([]);
    let mm = Shelf::of([("transparent_hugepage", huge::shelf() as _), ("hugepages", pools)]);
    let kernel = Shelf::of([("mm", mm as _)]);
    // Programs run on one CPU.
    let cpu = || Text::new(|out| out.write_str("0\n")) as _;
    let cpus = Shelf::of([
        ("possible", cpu()),
        ("present", cpu()),
        ("online", cpu()),
        ("cpu0", Shelf::of([]) as _),
    ]);
    let system = Shelf::of([("cpu", cpus as _)]);
    let devices = Shelf::of([("system", system as _)]);
    Shelf::of([("kernel", kernel as _), ("devices", devices)])
}
