//! Several CPUs on one kernel map under the strict TLB. A gate before the invalidations produces
//! the worst moment of a purge or a cut for each operation of another CPU. In the end everything
//! runs at once: small and huge areas alternate in the same slots while a dump walks.

mod everything;
mod interposed;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;

use bindery::addr::{PAGE_SIZE, PhysAddr, VirtAddr};
use bindery::arch::Permissions;
use bindery::check;
use bindery::platform::Cpu;
use bindery::{
    AreaKind, KernelAddress, KernelMap, KernelMapError, Pauses, Platform, Resolution,
    VmallocOptions,
};
use bindery_hosted::{AccessKind, Config, Machine, MmuFault, Walk};

use crate::support::areas::Areas;
use crate::support::kernel::{self, arena, assert_filled, audit, fill, pages, rounds};
use crate::support::{MIB, memory_with, waiting};
use everything::everything as everything_at_once_on_five_cpus;
use interposed::{Gate, Interposed, interposed};

on_every_architecture! {
    an_area_beside_a_purged_one_never_faults => beside_a_purge;
    freed_addresses_wait_for_the_purges_flush => not_reused;
    a_dump_sees_everything_during_a_cut => dump_during_cut;
    a_fault_waits_for_a_cuts_end => fault_during_cut;
    frames_and_tables_wait_for_whoever_walks => walkers;
    a_stopped_purge_bounds_the_backlog => bounded_backlog;
    everything_at_once => everything_at_once_on_five_cpus;
}

const READ_WRITE: Permissions = Permissions::READ.union(Permissions::WRITE);

/// The common parts of one scenario.
struct Scene<'s, 'm, A: Walk> {
    machine: &'s Machine<A>,
    gate: &'s Gate,
    map: &'s KernelMap<'m, Interposed<A>>,
}

impl<A: Walk> Scene<'_, '_, A> {
    fn translate(&self, at: VirtAddr, access: AccessKind) -> Result<PhysAddr, MmuFault> {
        self.machine.translate_kernel(self.map.root(), at, access)
    }
}

/// Runs `stopped` on CPU 0. `stopped` arms the gate, which then holds CPU 0 at an invalidation
/// until CPU 1 has completed `meanwhile` or waits for CPU 0. Afterwards audits everything.
fn at_an_invalidation<A: Walk>(
    prepare: impl Fn(&Scene<'_, '_, A>) -> VirtAddr,
    stopped: impl Fn(&Scene<'_, '_, A>, VirtAddr) + Sync,
    meanwhile: impl Fn(&Scene<'_, '_, A>, VirtAddr) + Sync,
) {
    let (platform, memory) = interposed::<A>();
    let map = KernelMap::new(&memory, arena::<A>(1 << 33)).unwrap();
    map.set_purge_limit(u64::MAX);
    let scene = Scene { machine: &platform.machine, gate: &platform.gate, map: &map };
    let at = scene.machine.on_cpu(Cpu(0), || prepare(&scene));
    // The second CPU has cached the tables.
    scene.machine.on_cpu(Cpu(1), || scene.translate(at, AccessKind::Read)).unwrap();
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            scene.gate.wait();
            let _opens = scene.gate.opens_at_last();
            let gate = Arc::clone(&platform.gate);
            let meanwhile = || scene.machine.on_cpu(Cpu(1), || meanwhile(&scene, at));
            waiting::told(move || gate.open(), meanwhile);
        });
        scene.machine.on_cpu(Cpu(0), || stopped(&scene, at));
        other.join().unwrap();
    });
    map.purge();
    scene.machine.assert_clean();
    let mut scratch = vec![0; check::scratch_words(&memory)];
    check::check_with_kernel(&memory, &[], &[&map], &mut scratch).unwrap();
}

/// The addresses behind a purged area, under a table that is being detached, are free throughout. A
/// caller that gets these addresses installs another table there, which every CPU must see.
fn beside_a_purge<A: Walk>() {
    let options = VmallocOptions { pauses: Pauses::Never, ..VmallocOptions::default() };
    for count in [1, 100, 700] {
        at_an_invalidation::<A>(
            |scene| {
                let at = scene.map.vmalloc(count * PAGE_SIZE, &options).unwrap();
                fill(scene.machine, scene.map.root(), pages(at, count), 1);
                at
            },
            |scene, at| {
                scene.map.free_vmalloc(at).unwrap();
                scene.gate.arm();
                scene.map.purge();
            },
            |scene, old| {
                let at = scene.map.vmalloc(2 * PAGE_SIZE, &options).unwrap();
                let freed = pages(old, count);
                assert!(!scene.gate.is_shut() || !freed.overlaps(pages(at, 2)), "too early");
                fill(scene.machine, scene.map.root(), pages(at, 2), 2);
                assert_filled(scene.machine, scene.map.root(), pages(at, 2), at, 2);
            },
        );
    }
}

/// While one CPU is held in a purge and another frees areas, the backlog of the purge stays
/// bounded.
fn bounded_backlog<A: Walk>() {
    const LIMIT: u64 = 64;
    const COUNT: u64 = 8;
    let options = VmallocOptions::default();
    at_an_invalidation::<A>(
        |scene| scene.map.vmalloc(COUNT * PAGE_SIZE, &options).unwrap(),
        |scene, at| {
            scene.map.free_vmalloc(at).unwrap();
            scene.gate.arm();
            scene.map.purge();
        },
        |scene, _| {
            scene.map.set_purge_limit(LIMIT);
            let mut most = 0;
            for _ in 0..4 * LIMIT / COUNT {
                let at = scene.map.vmalloc(COUNT * PAGE_SIZE, &options).unwrap();
                scene.map.free_vmalloc(at).unwrap();
                most = most.max(scene.map.freed_pages());
            }
            assert!(most <= 2 * LIMIT + COUNT, "{most} pages waited");
            assert!(!scene.gate.is_shut(), "no free waited for the purge");
        },
    );
}

/// While the old area's table still exists, no call waits, but no call gets the area's addresses
/// either.
fn not_reused<A: Walk>() {
    let options = VmallocOptions::default();
    at_an_invalidation::<A>(
        |scene| {
            let at = scene.map.vmalloc(40 * PAGE_SIZE, &options).unwrap();
            // This area keeps the table allocated.
            scene.map.vmalloc(PAGE_SIZE, &options).unwrap();
            fill(scene.machine, scene.map.root(), pages(at, 40), 1);
            at
        },
        |scene, at| {
            scene.map.free_vmalloc(at).unwrap();
            scene.gate.arm();
            scene.map.purge();
        },
        |scene, old| {
            let map = scene.map;
            for count in [1, 5, 40] {
                let at = map.vmalloc(count * PAGE_SIZE, &options).unwrap();
                fill(scene.machine, map.root(), pages(at, count), 2);
                assert!(!pages(old, 41).overlaps(pages(at, count + 1)), "{at} was used too early");
                assert!(scene.gate.is_shut(), "it waited for the flush");
            }
            assert!(matches!(map.explain(old), KernelAddress::Freed { .. }));
            assert!(matches!(map.free_vmalloc(old), Err(KernelMapError::Freed { .. })));
            assert_eq!(map.physical(old), None);
            assert_eq!(map.resolve(old, Permissions::READ), Resolution::NotMapped);
        },
    );
}

/// While a part of a huge area is paused, software still sees the whole area.
fn dump_during_cut<A: Walk>() {
    for (from, until) in [(1, 3), (0, 600), (500, 1024), (512, 1024), (15, 17)] {
        at_an_invalidation::<A>(
            |scene| scene.map.vmalloc(4 * MIB, &VmallocOptions::huge()).unwrap(),
            |scene, at| {
                let part = pages(VirtAddr(at.0 + from * PAGE_SIZE), until - from);
                scene.gate.arm();
                scene.map.protect_part(part, Permissions::READ).unwrap();
            },
            |scene, at| {
                let (map, whole) = (scene.map, pages(at, 1024));
                let mut end = at;
                map.for_each_piece(map.arena(), |piece| {
                    assert_eq!(piece.range.start(), end, "a hole");
                    assert_eq!(Some(piece.to), map.physical(end));
                    end = piece.range.end();
                });
                assert_eq!(end, whole.end());
                let mut areas = 0;
                map.for_each_area(|area| {
                    assert_eq!((area.range, area.kind), (whole, AreaKind::Vmalloc));
                    areas += 1;
                });
                assert_eq!(areas, 1);
                for page in 0..1024 {
                    let place = VirtAddr(at.0 + page * PAGE_SIZE);
                    let to = map.physical(place).unwrap();
                    let KernelAddress::Mapped { to: told, .. } = map.explain(place) else {
                        panic!("{:?}", map.explain(place));
                    };
                    assert_eq!(told, to);
                }
                assert!(scene.gate.is_shut(), "nobody has waited");
            },
        );
    }
}

/// An access to a paused page faults; the handler waits and repeats the access.
fn fault_during_cut<A: Walk>() {
    at_an_invalidation::<A>(
        |scene| {
            let at = scene.map.vmalloc(2 * MIB, &VmallocOptions::huge()).unwrap();
            fill(scene.machine, scene.map.root(), pages(at, 512), 1);
            at
        },
        |scene, at| {
            let part = pages(VirtAddr(at.0 + 5 * PAGE_SIZE), 2);
            scene.gate.arm();
            scene.map.protect_part(part, Permissions::READ).unwrap();
        },
        |scene, at| {
            let map = scene.map;
            for (page, allowed) in [(0, true), (5, false), (6, false), (100, true)] {
                let place = VirtAddr(at.0 + page * PAGE_SIZE);
                // The TLB may still allow the access.
                let mut result = scene.machine.write_kernel(map.root(), place, &[3]);
                while result.is_err() && map.resolve(place, READ_WRITE) == Resolution::Retry {
                    assert!(!scene.gate.is_shut(), "the pause was not over");
                    result = scene.machine.write_kernel(map.root(), place, &[3]);
                }
                if allowed {
                    result.unwrap();
                }
            }
        },
    );
}

/// A walk that began before a purge may still read a table that the purge has detached. The purge
/// nevertheless frees the addresses and the area's own frames, but not the tables.
fn walkers<A: Walk>() {
    let (machine, memory) =
        memory_with::<A>(Config { memory: 32 * MIB, cpus: 2, ..Config::default() });
    let map = kernel::map(&memory);
    map.set_purge_limit(u64::MAX);
    let at = machine.on_cpu(Cpu(0), || map.vmalloc(MIB, &VmallocOptions::default()).unwrap());
    let free = memory.free_frame_count();
    let (inside, purged) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            machine.on_cpu(Cpu(1), || {
                machine.enter_read();
                inside.store(1, SeqCst);
                while map.explain(at) != KernelAddress::Free {
                    thread::yield_now();
                }
                while purged.load(SeqCst) == 0 {
                    thread::yield_now();
                }
                assert!(memory.deferred().tables > 0, "{:?}", memory.deferred());
                assert_eq!(memory.free_frame_count(), free + 256, "a table was freed too early");
                machine.leave_read();
            });
        });
        while inside.load(SeqCst) == 0 {
            thread::yield_now();
        }
        machine.on_cpu(Cpu(0), || {
            map.free_vmalloc(at).unwrap();
            // The call does not wait for the walk.
            map.purge();
            purged.store(1, SeqCst);
        });
    });
    memory.drain_deferred();
    assert!(memory.free_frame_count() > free + 256, "the tables have come back, too");
    audit(&machine, &memory, &[&map]);
}

#[test]
fn an_area_that_is_busy_is_waited_for() {
    let config = Config { memory: 64 * MIB, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<bindery::arch::AArch64>(config);
    let map = kernel::map(&memory);
    for round in 0..rounds(40) {
        let at = machine.on_cpu(Cpu(0), || map.vmalloc(3 * MIB, &VmallocOptions::huge()).unwrap());
        let freed = AtomicU64::new(0);
        thread::scope(|scope| {
            // All other CPUs free the area while one CPU cuts it. Only the first free succeeds.
            for cpu in 0..3_u16 {
                let (machine, map, freed) = (&machine, &map, &freed);
                scope.spawn(move || {
                    machine.on_cpu(Cpu(cpu), || {
                        let part = pages(VirtAddr(at.0 + 4096 * (5 + round)), 3);
                        let result = map.protect_part(part, Permissions::READ);
                        let gone = |problem| {
                            matches!(
                                problem,
                                KernelMapError::Freed { .. } | KernelMapError::NotAnArea(_)
                            )
                        };
                        assert!(result.is_ok() || result.is_err_and(gone));
                        match map.free_vmalloc(at) {
                            Ok(()) => drop(freed.fetch_add(1, SeqCst)),
                            Err(problem) => assert!(gone(problem), "{problem}"),
                        }
                        if cpu == 1 {
                            map.purge();
                        }
                    });
                });
            }
        });
        assert_eq!(freed.load(SeqCst), 1, "it is freed once");
    }
    audit(&machine, &memory, &[&map]);
}
