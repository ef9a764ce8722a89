//! A fatal signal arrives at every point at which a long call checks for one. The call stops and
//! reports it, completed work is retained or undone as documented, and a repeated call completes.

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::X86_64;
use bindery::{
    Access, Advice, CollapseLimits, Error, Growth, KernelMapError, LockAll, LockPages, MapFlags,
    MapRequest, Residence, SyncFlags, VmallocOptions,
};
use bindery_linux as linux;

use super::scene::{AT, Case, Scene, at_every_question, on_scene};
use crate::support::areas::Areas;
use crate::support::kernel;
use crate::support::{GIB, MIB, fixed, strict};

/// Pages that are present from `at` on, of `pages`.
fn present(scene: &Scene<'_>, at: u64, pages: u64) -> u64 {
    let mut present = 0;
    scene
        .space
        .mincore(VirtAddr(at), pages * PAGE_SIZE, |residence, count| {
            present += if residence == Residence::Resident { count } else { 0 };
        })
        .unwrap();
    present
}

/// Two mappings of sixteen pages, with a third of the other protection between them.
fn three_mappings(scene: &Scene<'_>) {
    scene.space.mmap(&fixed(AT, 48 * PAGE_SIZE)).unwrap();
    let middle = VirtAddr(AT + 16 * PAGE_SIZE);
    scene.space.mprotect(middle, 16 * PAGE_SIZE, bindery::Protection::READ).unwrap();
}

#[test]
fn populating_stops_before_each_page_keeping_others() {
    for advice in [Advice::PopulateRead, Advice::PopulateWrite] {
        let asked = at_every_question(&Case {
            prepare: |scene| _ = scene.space.mmap(&fixed(AT, 16 * PAGE_SIZE)).unwrap(),
            call: &|scene| scene.space.madvise(VirtAddr(AT), 16 * PAGE_SIZE, advice),
            stopped: |scene, before| assert_eq!(present(scene, AT, 16), before),
            done: |scene| assert_eq!(present(scene, AT, 16), 16),
        });
        assert_eq!(asked, 16);
    }
}

#[test]
fn looking_for_missing_pages_stops_every_two_tables() {
    let asked = at_every_question(&Case {
        prepare: |scene| {
            scene.space.mmap(&fixed(AT, 16 * MIB)).unwrap();
            scene.space.madvise(VirtAddr(AT), 16 * MIB, Advice::PopulateWrite).unwrap();
        },
        call: &|scene| scene.space.madvise(VirtAddr(AT), 16 * MIB, Advice::PopulateWrite),
        stopped: |scene, _| assert_eq!(present(scene, AT, 4096), 4096),
        done: |scene| assert_eq!(present(scene, AT, 4096), 4096),
    });
    assert_eq!(asked, 4, "of eight tables");
}

#[test]
fn an_interrupted_populate_keeps_its_pages() {
    let asked = at_every_question(&Case {
        prepare: |_| {},
        call: &|scene| {
            let request = MapRequest { flags: MapFlags::POPULATE, ..fixed(AT, 16 * PAGE_SIZE) };
            assert_eq!(scene.space.mmap(&request), Ok(VirtAddr(AT)), "the mapping is there");
            // Cancels the signal, which would also stop the check itself.
            scene.machine.fatal_signal_after(None);
            if present(scene, AT, 16) < 16 { Err(Error::Interrupted) } else { Ok(()) }
        },
        stopped: |scene, before| assert_eq!(present(scene, AT, 16), before),
        done: |scene| assert_eq!(present(scene, AT, 16), 16),
    });
    assert_eq!(asked, 16);
}

#[test]
fn an_interrupted_mlock_keeps_lock_and_pages() {
    let asked = at_every_question(&Case {
        prepare: |scene| _ = scene.space.mmap(&fixed(AT, 16 * PAGE_SIZE)).unwrap(),
        call: &|scene| scene.space.mlock(VirtAddr(AT), 16 * PAGE_SIZE, LockPages::Now),
        stopped: |scene, before| {
            assert_eq!(scene.space.usage().locked, 16);
            assert_eq!(present(scene, AT, 16), before);
        },
        done: |scene| assert_eq!((scene.space.usage().locked, present(scene, AT, 16)), (16, 16)),
    });
    assert_eq!(asked, 16);
}

#[test]
fn an_interrupted_mlockall_keeps_locks_and_pages() {
    let asked = at_every_question(&Case {
        prepare: three_mappings,
        call: &|scene| scene.space.mlockall(LockAll::CURRENT),
        stopped: |scene, before| {
            assert_eq!(scene.space.usage().locked, 48);
            assert_eq!(present(scene, AT, 48), before);
        },
        done: |scene| assert_eq!((scene.space.usage().locked, present(scene, AT, 48)), (48, 48)),
    });
    assert_eq!(asked, 48);
}

#[test]
fn collapsing_stops_before_each_span() {
    let asked = at_every_question(&Case {
        prepare: |scene| {
            scene.space.mmap(&fixed(AT, 6 * MIB)).unwrap();
            scene.fill(AT, 3 * 512);
        },
        call: &|scene| scene.space.madvise(VirtAddr(AT), 6 * MIB, Advice::Collapse),
        stopped: |scene, before| assert_eq!(scene.huge_leaves(AT, 3), before),
        done: |scene| {
            assert_eq!(scene.huge_leaves(AT, 3), 3);
            scene.assert_filled(AT, 3 * 512);
        },
    });
    assert_eq!(asked, 3);
}

#[test]
fn the_background_collapser_goes_on_where_it_stopped() {
    on_scene(|scene| {
        scene.space.mmap(&fixed(AT, 6 * MIB)).unwrap();
        scene.fill(AT, 3 * 512);
        scene.memory.folio_policy().set(Order(9), bindery::SizeMode::Always);
        let (mut from, mut calls) = (VirtAddr(0), 0);
        loop {
            // One call for each span, because a call always makes some progress.
            scene.machine.fatal_signal_after(Some(0));
            let progress = scene.space.collapse_some(from, 8, &CollapseLimits::default());
            let (collapsed, next) = (progress.collapsed, progress.next);
            scene.machine.fatal_signal_after(None);
            if next == VirtAddr(0) {
                break;
            }
            assert_eq!(collapsed, 1);
            (from, calls) = (next, calls + 1);
        }
        assert_eq!((calls, scene.huge_leaves(AT, 3)), (3, 3));
        scene.assert_filled(AT, 3 * 512);
    });
}

#[test]
fn an_interrupted_fork_frees_the_child() {
    // A page in each of 160 tables, which form more than one piece, and two further mappings.
    const LENGTH: u64 = 160 * 2 * MIB;
    let asked = at_every_question(&Case {
        prepare: |scene| {
            three_mappings(scene);
            scene.fill(AT, 16);
            scene.space.mmap(&fixed(2 * GIB, LENGTH)).unwrap();
            for at in (2 * GIB..2 * GIB + LENGTH).step_by(2 << 20) {
                scene.fill(at, 1);
            }
        },
        call: &|scene| {
            let child = scene.space.fork()?;
            scene.audit_with(&[&child]);
            Ok(())
        },
        stopped: |scene, _| {
            scene.fill(AT, 16);
            scene.fill(2 * GIB, 1);
        },
        done: |scene| {
            scene.assert_filled(AT, 16);
            for at in (2 * GIB..2 * GIB + LENGTH).step_by(2 << 20) {
                scene.assert_filled(at, 1);
            }
        },
    });
    assert!(asked >= 4 + 3, "four mappings, and pieces of the last: {asked}");
}

#[test]
fn an_interrupted_sync_leaves_pages_dirty() {
    let asked = at_every_question(&Case {
        prepare: |scene| scene.write_scattered(100),
        call: &|scene| scene.file.sync(0, u64::MAX),
        stopped: |scene, _| scene.assert_nothing_lost(),
        done: |scene| scene.assert_saved(100),
    });
    assert!(asked >= 2, "{asked}");
}

#[test]
fn an_interrupted_msync_leaves_pages_dirty() {
    let asked = at_every_question(&Case {
        prepare: |scene| {
            scene.map_file(AT, 200);
            scene.write_scattered(100);
        },
        call: &|scene| scene.space.msync(VirtAddr(AT), 200 * PAGE_SIZE, SyncFlags::SYNC),
        stopped: |scene, _| scene.assert_nothing_lost(),
        done: |scene| scene.assert_saved(100),
    });
    assert!(asked >= 2, "{asked}");
}

#[test]
fn the_last_holder_saves_despite_signals() {
    on_scene(|scene| {
        let file = scene.memory.file(scene.files, 2, 200 * PAGE_SIZE).unwrap();
        for page in 0..100 {
            file.write(2 * page * PAGE_SIZE, &[1]).unwrap();
        }
        scene.machine.fatal_signal_after(Some(0));
        drop(file);
        scene.machine.fatal_signal_after(None);
        assert_eq!(scene.files.stored_pages(2), 100);
    });
}

#[test]
fn an_interrupted_mincore_keeps_its_answer() {
    let asked = at_every_question(&Case {
        prepare: three_mappings,
        call: &|scene| {
            let mut told = 0;
            let result = scene.space.mincore(VirtAddr(AT), 48 * PAGE_SIZE, |_, n| told += n);
            assert!(told % 16 == 0 && (told == 48) == result.is_ok());
            result
        },
        stopped: |_, _| {},
        done: |_| {},
    });
    assert_eq!(asked, 3);
}

#[test]
fn allocate_takes_back_what_it_has_allocated() {
    let asked = at_every_question(&Case {
        prepare: |_| {},
        call: &|scene| scene.shared.allocate(0, 16 * PAGE_SIZE, Growth::Allowed),
        stopped: |scene, _| {
            assert_eq!((scene.shared.size(), scene.shared.resident_pages()), (0, 0));
        },
        done: |scene| {
            let now = (scene.shared.size(), scene.shared.resident_pages());
            assert_eq!(now, (16 * PAGE_SIZE, 16));
        },
    });
    assert_eq!(asked, 16);
}

#[test]
fn reading_and_writing_count_what_went_through() {
    on_scene(|scene| {
        // Several pieces of 64 KiB, between which the call checks for the signal.
        let bytes = vec![7; 64 * PAGE_SIZE as usize];
        let mut written = 0;
        while written < bytes.len() {
            scene.machine.fatal_signal_after(Some(0));
            let refused = scene.shared.write(written as u64, &bytes[written..]);
            assert_eq!(refused, Err(Error::Interrupted));
            scene.machine.fatal_signal_after(Some(1));
            let count = scene.shared.write(written as u64, &bytes[written..]).unwrap();
            scene.machine.fatal_signal_after(None);
            assert!((1..bytes.len()).contains(&count), "{count}");
            written += count;
            assert_eq!(scene.shared.size(), written as u64);
        }
        let mut found = vec![0; bytes.len()];
        scene.machine.fatal_signal_after(Some(0));
        assert_eq!(scene.shared.read(0, &mut found), Err(Error::Interrupted));
        scene.machine.fatal_signal_after(Some(1));
        let count = scene.shared.read(0, &mut found).unwrap();
        scene.machine.fatal_signal_after(None);
        assert!((1..bytes.len()).contains(&count), "{count}");
        assert_eq!(scene.shared.read(0, &mut found), Ok(bytes.len()));
        assert!(found == bytes);
    });
}

#[test]
fn aging_stops_before_each_mapping() {
    for advice in [Advice::Cold, Advice::PageOut, Advice::Free] {
        let asked = at_every_question(&Case {
            prepare: |scene| {
                three_mappings(scene);
                scene.fill(AT, 16);
            },
            call: &|scene| scene.space.madvise(VirtAddr(AT), 48 * PAGE_SIZE, advice),
            stopped: |scene, _| scene.assert_filled(AT, 16),
            done: |scene| scene.assert_filled(AT, 16),
        });
        assert_eq!(asked, 3);
    }
}

#[test]
fn an_interrupted_vmalloc_frees_its_frames() {
    let (machine, memory) = strict::<X86_64<4>>(64 * MIB);
    let map = kernel::map(&memory);
    let options = VmallocOptions::default();
    let small = map.vmalloc(MIB, &options).unwrap();
    map.purge();
    let free = memory.free_frame_count();
    // Blocks of 4 MiB, with a signal check before each except the first.
    for questions in 0..3 {
        machine.fatal_signal_after(Some(questions));
        assert_eq!(map.vmalloc(16 * MIB, &options), Err(KernelMapError::Interrupted));
        machine.fatal_signal_after(Some(questions));
        assert_eq!(map.resize_vmalloc(small, 17 * MIB, &options), Err(KernelMapError::Interrupted));
        machine.fatal_signal_after(None);
        kernel::audit(&machine, &memory, &[&map]);
        assert_eq!(memory.free_frame_count(), free);
    }
    machine.fatal_signal_after(Some(0));
    let short = map.vmalloc(2 * MIB, &options);
    machine.fatal_signal_after(None);
    for area in
        [short, map.vmalloc(16 * MIB, &options), map.resize_vmalloc(small, 17 * MIB, &options)]
    {
        map.free_vmalloc(area.unwrap()).unwrap();
    }
    map.purge();
    kernel::audit(&machine, &memory, &[&map]);
}

#[test]
fn programs_are_told_eintr() {
    on_scene(|scene| {
        three_mappings(scene);
        scene.map_file(2 * GIB, 16);
        scene.space.fault(VirtAddr(2 * GIB), Access::Write).unwrap();
        let calls = [
            (linux::Call::Madvise, [AT, 16 * PAGE_SIZE, 20, 0, 0, 0]),
            (linux::Call::Madvise, [AT, 16 * PAGE_SIZE, 22, 0, 0, 0]),
            (linux::Call::Madvise, [AT, 16 * PAGE_SIZE, 23, 0, 0, 0]),
            (linux::Call::Mincore, [AT, 16 * PAGE_SIZE, AT, 0, 0, 0]),
            (linux::Call::Msync, [2 * GIB, 16 * PAGE_SIZE, 4, 0, 0, 0]),
            (linux::Call::Mlock, [AT, 48 * PAGE_SIZE, 0, 0, 0, 0]),
            (linux::Call::Mlock2, [AT, 48 * PAGE_SIZE, 0, 0, 0, 0]),
            (linux::Call::Mlockall, [1, 0, 0, 0, 0, 0]),
        ];
        for (call, arguments) in calls {
            scene.machine.fatal_signal_after(Some(0));
            assert_eq!(linux::call(scene, call, arguments), -4, "{call:?} {arguments:x?}");
            scene.machine.fatal_signal_after(None);
            scene.audit_with(&[]);
            assert_eq!(linux::call(scene, call, arguments), 0, "{call:?} {arguments:x?}");
        }
    });
}
