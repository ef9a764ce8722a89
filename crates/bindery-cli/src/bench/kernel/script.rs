//! The calls of `kernel-map`.

use bindery::Pieces;
use bindery::addr::PhysAddr;

use super::{Area, KernelCall, Operation, Source};
use crate::bench::floor::Geometry;
use crate::bench::workload::{Call, Effort, Script, Workload};
use crate::size::{FolioSize, KIB, MIB};

/// Addresses without memory: registers of a device.
const DEVICE: u64 = 0x3_0000_0000;

/// System 5: areas of 1 MiB in every possible way, and two larger ones.
pub fn script(geometry: Geometry) -> Script {
    let variant = "areas in the kernel's half, which is empty else".to_owned();
    let mut script = Script::new(Workload::KernelMap, variant, FolioSize::BASE, geometry);
    script.effort = Effort { turns: 40, repeats: 10 };
    let device = |from| Area { bytes: MIB, source: Source::Device(PhysAddr(from)) };
    let new = |bytes, pieces| Area { bytes, source: Source::New(pieces) };
    let pages = |bytes, order| Area { bytes, source: Source::Pages { order } };
    let frames_alone = |pieces| Area { bytes: MIB, source: Source::Ranges { order: 8, pieces } };

    script.of(device(DEVICE), [("ioremap 1 MiB", Operation::Map), ("iounmap", Operation::Unmap)]);
    script.publish("ioremap 1 MiB", 1.2);
    script.of(
        device(DEVICE + 64 * KIB),
        [("ioremap off by 64 KiB", Operation::Map), ("iounmap off by 64 KiB", Operation::Unmap)],
    );

    let base = [
        ("vmalloc 1 MiB, base", Operation::Map),
        ("protect, base", Operation::Protect),
        ("vfree, base", Operation::Unmap),
    ];
    script.of(new(MIB, Pieces::Base), base);
    let huge = [
        ("vmalloc 1 MiB, huge", Operation::Map),
        ("protect, huge", Operation::Protect),
        ("vfree, huge", Operation::Unmap),
    ];
    script.of(new(MIB, Pieces::Largest), huge);
    script.of(frames_alone(Pieces::Base), [("mapping alone, base", Operation::Map)]);
    script.untimed(Call::Kernel(KernelCall {
        operation: Operation::Unmap,
        area: frames_alone(Pieces::Base),
    }));
    script.of(frames_alone(Pieces::Largest), [("mapping alone, huge", Operation::Map)]);
    script.publish("mapping alone, huge", 1.5);
    let unmap = KernelCall { operation: Operation::Unmap, area: frames_alone(Pieces::Largest) };
    script.untimed(Call::Kernel(unmap));
    let large =
        [("vmalloc 16 MiB, huge", Operation::Map), ("vfree 16 MiB, huge", Operation::Unmap)];
    script.of(new(16 * MIB, Pieces::Largest), large);

    let orders = [
        (0, "vmap 1 MiB, order 0", "vunmap, order 0"),
        (4, "vmap 1 MiB, order 4", "vunmap, order 4"),
        (8, "vmap 1 MiB, order 8", "vunmap, order 8"),
    ];
    for (order, map, unmap) in orders {
        script.of(pages(MIB, order), [(map, Operation::Map), (unmap, Operation::Unmap)]);
    }
    script.publish("vmap 1 MiB, order 0", 1.0);
    script.publish("vmap 1 MiB, order 8", 5.6);
    let all = [("vmap 100 MiB, order 8", Operation::Map), ("vunmap 100 MiB", Operation::Unmap)];
    script.of(pages(100 * MIB, 8), all);
    script.publish("vmap 100 MiB, order 8", 8.3);
    script
}

impl Script {
    /// Calls for areas of one kind, each a phase.
    fn of<const N: usize>(&mut self, area: Area, calls: [(&str, Operation); N]) {
        for (name, operation) in calls {
            self.timed(name, Call::Kernel(KernelCall { operation, area }));
        }
    }

    /// Records the published speedup of the phase by large pieces.
    fn publish(&mut self, name: &str, ratio: f64) {
        if let Some(phase) = self.phases.iter_mut().find(|phase| phase.name == name) {
            phase.published = Some(ratio);
        }
    }
}
