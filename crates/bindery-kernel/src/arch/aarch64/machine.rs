//! The machine according to its device tree: memory, CPUs and devices.

use bindery::platform::MAX_CPUS;
use fdt::Fdt;
use fdt::node::FdtNode;
use spin::Once;

use crate::boot::{Information, Stretch};

use super::super::boot_tables::Mapping;
use super::control::{self, Conduit};
use super::page_tables;
use super::serial;

pub(super) static TREE: Once<Fdt<'static>> = Once::new();

/// Reads the tree at a physical address. Maps memory and the console and starts to use both.
///
/// # Panics
/// If a required node is missing.
pub fn read(physical: u64) -> Information {
    let Some(bytes) = page_tables::map_device_tree(physical) else {
        panic!(
            "the machine passes no device tree at {physical:#x}: boot with QEMU's `virt` \
             machine, or another loader that passes one"
        );
    };
    let tree = TREE.call_once(|| match Fdt::new(bytes) {
        Ok(tree) => tree,
        Err(problem) => panic!("the device tree is damaged: {problem}"),
    });
    begin_console(tree);
    let mut information = Information::EMPTY;
    let image = Stretch {
        start: page_tables::physical(&raw const page_tables::_start),
        end: page_tables::image_end(),
    };
    let tree_itself = Stretch { start: physical, end: physical + bytes.len() as u64 };
    information.initramfs = initramfs(tree);
    let mut reserved = [image, tree_itself, information.initramfs].into_iter().chain(
        tree.memory_reservations().map(|area| stretch(area.address() as u64, area.size() as u64)),
    );
    for (place, area) in information.reserved.iter_mut().zip(&mut reserved) {
        *place = area;
    }
    assert!(
        reserved.next().is_none(),
        "the device tree reserves more areas of memory than the kernel has room for"
    );
    for (place, area) in information.memory.iter_mut().zip(memory(tree)) {
        *place = area;
        // The image has its own mapping, with the permissions of its sections.
        map(area.start, area.end.min(image.start));
        map(area.start.max(image.end), area.end);
    }
    information.command_line = tree
        .find_node("/chosen")
        .and_then(|node| node.property("bootargs")?.as_str())
        .unwrap_or("");
    information.cpus = cpus().count();
    begin_firmware(tree);
    information
}

fn map(start: u64, end: u64) {
    if start < end {
        page_tables::map_direct(Stretch { start, end }, Mapping::Data);
    }
}

fn stretch(start: u64, size: u64) -> Stretch {
    Stretch { start, end: start.saturating_add(size) }
}

fn memory(tree: &'static Fdt<'static>) -> impl Iterator<Item = Stretch> {
    let is_memory = |node: &FdtNode<'_, '_>| {
        node.property("device_type").and_then(|kind| kind.as_str()) == Some("memory")
    };
    tree.all_nodes().filter(is_memory).flat_map(registers)
}

/// The areas of a node's `reg`.
pub(super) fn registers(node: FdtNode<'_, 'static>) -> impl Iterator<Item = Stretch> {
    node.reg()
        .into_iter()
        .flatten()
        .map(|area| stretch(area.starting_address as u64, area.size.unwrap_or(0) as u64))
}

fn initramfs(tree: &Fdt<'_>) -> Stretch {
    let chosen = tree.find_node("/chosen");
    let address = |name| chosen?.property(name)?.as_usize();
    match (address("linux,initrd-start"), address("linux,initrd-end")) {
        (Some(start), Some(end)) if start < end => Stretch { start: start as u64, end: end as u64 },
        _ => Stretch::default(),
    }
}

/// The affinities of the machine's CPUs.
pub fn cpus() -> impl Iterator<Item = u64> {
    let tree = TREE.get().into_iter();
    tree.flat_map(|tree| tree.cpus()).map(|cpu| cpu.ids().first() as u64).take(MAX_CPUS)
}

/// The first area of a device's registers.
pub(super) fn device(tree: &'static Fdt<'static>, compatible: &str) -> Option<Stretch> {
    registers(tree.find_compatible(&[compatible])?).next()
}

fn begin_console(tree: &'static Fdt<'static>) {
    if let Some(area) = device(tree, "arm,pl011") {
        page_tables::map_direct(area, Mapping::Device);
        serial::begin(area.start);
    }
}

fn begin_firmware(tree: &'static Fdt<'static>) {
    let method = tree.find_compatible(&["arm,psci-1.0", "arm,psci-0.2"]).and_then(|node| {
        let method = node.property("method")?;
        method.as_str()
    });
    control::begin(match method {
        Some("smc") => Conduit::SecureMonitor,
        _ => Conduit::Hypervisor,
    });
}
