//! `/sys`: the folio policies and the background collapser under
//! `/sys/kernel/mm/transparent_hugepage`, the merging of equal pages, which is off, the swap
//! device, and the number of CPUs that run programs.

use alloc::sync::Arc;
use core::fmt::Write;

use super::generated::{FixedDirectory, Text};
use super::huge_pages;
use super::node::Node;
use crate::process::cpus;

mod block;
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
    let system = FixedDirectory::of([("cpu", cpu_directory() as _)]);
    let devices = FixedDirectory::of([("system", system as _)]);
    FixedDirectory::of([
        ("block", block::directory()),
        ("kernel", kernel as _),
        ("devices", devices),
    ])
}

/// The numbers of the CPUs that run programs.
fn cpu_directory() -> Arc<FixedDirectory> {
    let numbers = || {
        Text::new(|out| match cpus::count() {
            1 => out.write_str("0\n"),
            count => writeln!(out, "0-{}", count - 1),
        }) as _
    };
    FixedDirectory::of([
        ("possible", numbers()),
        ("present", numbers()),
        ("online", numbers()),
        ("cpu0", FixedDirectory::of([]) as _),
    ])
}
