//! Moves stopped by a lack of memory or a fatal signal, after which every page is at exactly one
//! address. Also the work under one set of locks.

use bindery::addr::VirtAddr;
use bindery::arch::{AArch64, X86_64};
use bindery::testing::{self, move_pages};
use bindery::{AddressSpace, Errno};
use bindery_hosted::Walk;

use super::fixture::{FROM, LENGTH, Moving, PAGE, TO, from_to, with_moving};
use crate::support::measured::measured;
use crate::support::{KIB, MIB, audit, fixed, options};

/// Whether as many of the first pages have moved as the call reports, and no others.
#[track_caller]
fn assert_moved<A: Walk>(moving: &Moving<'_, '_, A>, to: u64, pages: u64, moved: u64) {
    assert!(moved.is_multiple_of(PAGE));
    let moved = moved / PAGE;
    moving.assert_empty(FROM, moved);
    moving.assert_filled(to, moved, FROM);
    moving.assert_empty(to + moved * PAGE, pages - moved);
    moving.assert_filled(FROM + moved * PAGE, pages - moved, FROM + moved);
}

fn allocations_fail<A: Walk>() {
    for (order, shift) in [(0, 0), (0, PAGE), (4, 3 * PAGE), (9, 64 * KIB)] {
        for all in [false, true] {
            let mut short = 0;
            for point in 0.. {
                let mut failed = false;
                with_moving::<A>(order, |moving| {
                    let pages = 1024;
                    moving.fill(FROM, pages);
                    let memory = moving.memory;
                    if all {
                        memory.fail_allocations_after(Some(point));
                    } else {
                        testing::fail_one_allocation(memory, Some(point));
                    }
                    let what = from_to(FROM, TO + shift, pages * PAGE);
                    let (moved, result) = moving.try_move(&what);
                    failed = testing::failed_allocations(memory) > 0;
                    memory.fail_allocations_after(None);
                    assert_eq!(result.is_ok(), moved == pages * PAGE);
                    if let Err(errno) = result {
                        assert_eq!(errno, Errno::ENOMEM);
                        short += 1;
                    }
                    assert_moved(moving, TO + shift, pages, moved);
                });
                if !failed {
                    break;
                }
            }
            assert!(short > 0 || !all, "no move ran out of memory");
        }
    }
}

#[test]
fn out_of_memory_keeps_pages_whole_x86_64() {
    allocations_fail::<X86_64<4>>();
}

#[test]
fn out_of_memory_keeps_pages_whole_aarch64() {
    allocations_fail::<AArch64>();
}

#[test]
fn a_fatal_signal_ends_a_move_between_holds() {
    // One set of locks covers two tables, or eight huge leaves.
    for (order, shift, pages) in [(0, 0, 3 * 512), (4, PAGE, 1024), (9, 0, 10 * 512)] {
        let mut stopped = 0;
        for questions in 0.. {
            let mut over = false;
            with_moving::<X86_64<4>>(order, |moving| {
                moving.fill(FROM, pages);
                moving.machine.fatal_signal_after(Some(questions));
                let (moved, result) = moving.try_move(&from_to(FROM, TO + shift, pages * PAGE));
                moving.machine.fatal_signal_after(None);
                over = result.is_ok();
                stopped += u32::from(!over);
                assert!(over || result == Err(Errno::EINTR), "{result:?}");
                assert_moved(moving, TO + shift, pages, moved);
            });
            if over {
                break;
            }
        }
        assert!(stopped >= 2, "asked {stopped} times");
    }
}

/// Other CPUs spin for a table's lock while the mover reads 1,024 entries (two tables), and no
/// longer.
fn holds<A: Walk>() {
    for order in [0, 4, 9] {
        for shift in [0, 64 * KIB, 5 * PAGE] {
            let (machine, memory) = measured::<A>(64 * MIB);
            if order > 0 {
                let order = bindery::addr::Order(order);
                memory.folio_policy().set(order, bindery::SizeMode::Always);
            }
            let space = AddressSpace::new(&memory, options()).unwrap();
            space.mmap(&fixed(FROM, LENGTH)).unwrap();
            space.mmap(&fixed(TO, LENGTH)).unwrap();
            for page in 0..1024 {
                space.write_user(VirtAddr(FROM + page * PAGE), &[7]).unwrap();
            }
            memory.platform().take_most();
            let what = testing::PageMove {
                allows_holes: true,
                ..from_to(FROM, TO + shift, LENGTH - shift)
            };
            assert_eq!(move_pages(&space, &what), (LENGTH - shift, Ok(())));
            let most = memory.platform().take_most();
            assert!(most.entries <= 1024 + 2, "order {order}, shift {shift}: {most:?}");
            assert!(most.entries > 0, "nothing was counted");
            machine.assert_clean();
        }
    }
}

#[test]
fn one_hold_is_bounded_x86_64() {
    holds::<X86_64<4>>();
}

#[test]
fn one_hold_is_bounded_aarch64() {
    holds::<AArch64>();
}

/// The move waits for a folio that another thread has locked, then moves the folio.
#[test]
fn a_locked_folio_is_waited_for() {
    with_moving::<X86_64<4>>(4, |moving| {
        moving.fill(FROM, 64);
        std::thread::scope(|scope| {
            let unlock = testing::lock_folio(moving.space, VirtAddr(FROM + 20 * PAGE));
            let moved = scope.spawn(|| {
                moving.machine.on_cpu(bindery::platform::Cpu(0), || {
                    move_pages(moving.space, &from_to(FROM, TO, 64 * PAGE))
                })
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!moved.is_finished());
            unlock();
            assert_eq!(moved.join().unwrap(), (64 * PAGE, Ok(())));
        });
        audit(moving.machine, moving.memory, &[moving.space]);
        moving.assert_filled(TO, 64, FROM);
    });
}
