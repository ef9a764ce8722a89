//! `/proc/self/pagemap`: the bits for each kind of entry.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bindery::addr::{PAGE_SHIFT, VirtAddr};
use bindery::arch::{Absent, Level, Marker};
use bindery::platform::Cpu;
use bindery::{
    Accounting, AddressSpace, Advice, Inspection, MapRequest, Protection, Sealing, Sharing, testing,
};
use bindery_hosted::{Config, Program, Walk};
use bindery_linux::proc::{self, PhysicalAddresses};

use super::fixture::*;
use crate::support::kernel::Finished;
use crate::support::{GIB, MIB, READ_WRITE, audit, fixed, memory_with, options, use_order};

on_every_architecture! {
    unmapped_reads_as_zero_and_new_as_written => nothing_there;
    anonymous_pages_tell_their_frames => anonymous;
    the_page_of_zeroes_is_present_and_nobodys => zeroes;
    pages_of_objects_are_marked_as_such => objects;
    a_page_that_several_map_is_not_exclusive => shared;
    prot_none_pages_are_present => prot_none;
    guards_look_swapped_out => guards;
    swapped_pages_tell_device_and_slot => swapped;
    write_protection_by_userfaultfd_shows => userfault;
    a_huge_leaf_may_be_read_in_part => huge;
    a_contiguous_block_may_be_read_in_part => block;
    the_map_ends_where_user_space_ends => the_end;
    any_window_reads_as_the_whole_does => windows;
    readers_never_miss_a_page_that_is_there => readers;
}

const AT: u64 = GIB;
const WRITTEN: u64 = PRESENT | SOFT_DIRTY | EXCLUSIVE;
const WRITE_PROTECTED: u64 = 1 << 57;
/// The device number of Linux's markers, which no real device has.
const MARKERS: u64 = 31;

#[track_caller]
fn frame<A: Walk>(space: &Space<'_, A>, at: u64) -> u64 {
    match space.inspect(VirtAddr(at)) {
        Inspection::Page { frame, .. } | Inspection::Absent(Absent::ProtNone { frame, .. }) => {
            u64::from(frame.0)
        }
        other => panic!("no page, but {other:?}"),
    }
}

fn nothing_there<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        assert_eq!(pagemap(&space, AT, 4), [0; 4]);
        space.mmap(&fixed(AT + PAGE, 2 * PAGE)).unwrap();
        assert_eq!(pagemap(&space, AT, 4), [0, SOFT_DIRTY, SOFT_DIRTY, 0]);
        watch(&space);
        assert_eq!(pagemap(&space, AT, 4), [0; 4]);
    });
}

fn anonymous<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * PAGE)).unwrap();
        fixture.program(&space).store(VirtAddr(AT + PAGE), 1).unwrap();
        let there = WRITTEN | frame(&space, AT + PAGE);
        assert_eq!(pagemap(&space, AT, 3), [SOFT_DIRTY, there, SOFT_DIRTY]);
        let mut words = [1; 3];
        proc::pagemap(&space, AT / PAGE, PhysicalAddresses::Withheld, &mut words);
        assert_eq!(words, [SOFT_DIRTY, WRITTEN, SOFT_DIRTY]);
        // Read-only entries give the same result.
        space.mprotect(VirtAddr(AT), 4 * PAGE, Protection::READ).unwrap();
        assert_eq!(pagemap(&space, AT + PAGE, 1), [there]);
    });
}

fn zeroes<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * PAGE)).unwrap();
        watch(&space);
        for page in 0..3 {
            fixture.program(&space).load(VirtAddr(AT + page * PAGE)).unwrap();
        }
        let zero = PRESENT | frame(&space, AT);
        assert_eq!(pagemap(&space, AT, 4), [zero, zero, zero, 0]);
        space.mprotect(VirtAddr(AT), PAGE, Protection::empty()).unwrap();
        assert_eq!(pagemap(&space, AT, 4), [zero, zero, zero, 0]);
        assert_eq!(resident(&space), (0, 0, 0));
    });
}

fn objects<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let (space, file) = (fixture.space(), fixture.file(4 * PAGE));
        map_object(&space, &file, AT, 4 * PAGE, 0, Sharing::Private);
        space.mmap(&MapRequest { sharing: Sharing::Shared, ..fixed(AT + MIB, 4 * PAGE) }).unwrap();
        watch(&space);
        let program = fixture.program(&space);
        program.load(VirtAddr(AT + PAGE)).unwrap();
        let of_file = PRESENT | FILE | EXCLUSIVE | frame(&space, AT + PAGE);
        assert_eq!(pagemap(&space, AT + PAGE, 1), [of_file]);
        // A copy no longer belongs to the file.
        program.store(VirtAddr(AT + PAGE), 1).unwrap();
        assert_eq!(pagemap(&space, AT + PAGE, 1), [WRITTEN | frame(&space, AT + PAGE)]);
        program.store(VirtAddr(AT + MIB), 1).unwrap();
        let shared = WRITTEN | FILE | frame(&space, AT + MIB);
        assert_eq!(pagemap(&space, AT + MIB, 1), [shared]);
        fixture.audit(&[&space]);
    });
}

fn shared<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 2 * PAGE)).unwrap();
        fixture.program(&space).fill(VirtAddr(AT), 2 * PAGE, 1).unwrap();
        let child = space.fork().unwrap();
        let both = PRESENT | SOFT_DIRTY | frame(&space, AT);
        assert_eq!((pagemap(&space, AT, 1), pagemap(&child, AT, 1)), (vec![both], vec![both]));
        // The child now has its own copy.
        fixture.program(&child).store(VirtAddr(AT), 1).unwrap();
        assert_eq!(pagemap(&child, AT, 1), [WRITTEN | frame(&child, AT)]);
        assert_eq!(pagemap(&space, AT, 1), [both | EXCLUSIVE]);
        assert_eq!(pagemap(&space, AT + PAGE, 1)[0] & EXCLUSIVE, 0);
        drop(child);
        assert_eq!(pagemap(&space, AT + PAGE, 1)[0] & EXCLUSIVE, EXCLUSIVE);
    });
}

fn prot_none<A: Walk>() {
    for order in [0, 4, 9] {
        with_fixture::<A>(order, |fixture| {
            let space = fixture.space();
            space.mmap(&fixed(AT, 4 * MIB)).unwrap();
            fixture.program(&space).fill(VirtAddr(AT), 2 * MIB, 1).unwrap();
            let seen = pagemap(&space, AT, 1024);
            space.mprotect(VirtAddr(AT), 4 * MIB, Protection::empty()).unwrap();
            assert_eq!(pagemap(&space, AT, 1024), seen);
            assert_eq!(pagemap(&space, AT + 5 * PAGE, 100), seen[5..105]);
            space.mprotect(VirtAddr(AT), 4 * MIB, READ_WRITE).unwrap();
            assert_eq!(pagemap(&space, AT, 1024), seen);
        });
    }
}

fn guards<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        watch(&space);
        // A table's span, and three pages.
        space.madvise(VirtAddr(AT), 2 * MIB + 3 * PAGE, Advice::GuardInstall).unwrap();
        let guard = SWAPPED | GUARD | MARKERS | 4 << 5;
        let words = pagemap(&space, AT, 520);
        assert!(words[..515].iter().all(|word| *word == guard));
        assert!(words[515..].iter().all(|word| *word == 0));
        assert_eq!(pagemap(&space, AT + 100 * PAGE, 2), [guard; 2]);
        let mut words = [1; 2];
        proc::pagemap(&space, AT / PAGE, PhysicalAddresses::Withheld, &mut words);
        assert_eq!(words, [SWAPPED | GUARD; 2]);
        assert!(area(&space, AT).field("VmFlags").contains(" gu "));
        assert_eq!(area(&space, AT).sizes(), []);
        testing::plant(&space, VirtAddr(AT + 3 * MIB), 1, Absent::Marker(Marker::Poison));
        assert_eq!(pagemap(&space, AT + 3 * MIB, 1), [SWAPPED | MARKERS | 2 << 5]);
    });
}

fn swapped<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        watch(&space);
        let swap = |slot| Absent::Swap {
            device: 3,
            slot,
            exclusive: true,
            soft_dirty: false,
            userfault: false,
        };
        testing::plant(&space, VirtAddr(AT), 3, swap(0x1234));
        testing::plant_huge(&space, VirtAddr(AT + 2 * MIB), swap(0x4000));
        let word = |slot: u64| SWAPPED | 3 | slot << 5;
        assert_eq!(pagemap(&space, AT, 4), [word(0x1234), word(0x1235), word(0x1236), 0]);
        assert_eq!(pagemap(&space, AT + 2 * MIB + 9 * PAGE, 2), [word(0x4009), word(0x400a)]);
        let area = area(&space, AT);
        assert_eq!(area.sizes(), [("Swap", 2048 + 12), ("SwapPss", 2048 + 12)]);
    });
}

fn userfault<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * PAGE)).unwrap();
        watch(&space);
        fixture.program(&space).store(VirtAddr(AT), 1).unwrap();
        let raw = testing::raw_entry(&space, VirtAddr(AT), Level::PTE).unwrap();
        let marked = bindery::arch::Entry(raw.0 | A::USERFAULT);
        testing::set_raw_entry(&space, VirtAddr(AT), Level::PTE, marked);
        testing::plant(
            &space,
            VirtAddr(AT + PAGE),
            1,
            Absent::Marker(Marker::UserfaultWriteProtect),
        );
        let there = WRITTEN | WRITE_PROTECTED | frame(&space, AT);
        let marker = SWAPPED | WRITE_PROTECTED | MARKERS | 1 << 5;
        assert_eq!(pagemap(&space, AT, 3), [there, marker, 0]);
        testing::set_raw_entry(&space, VirtAddr(AT), Level::PTE, raw);
    });
}

fn huge<A: Walk>() {
    with_fixture::<A>(9, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 4 * MIB)).unwrap();
        fixture.program(&space).store(VirtAddr(AT), 1).unwrap();
        let first = frame(&space, AT);
        for (page, count) in [(0, 512), (17, 3), (511, 1), (500, 20)] {
            let words = pagemap(&space, AT + page * PAGE, count);
            for (number, word) in (page..).zip(words) {
                let there = if number < 512 { WRITTEN | (first + number) } else { SOFT_DIRTY };
                assert_eq!(word, there, "page {number}");
            }
        }
    });
}

fn block<A: Walk>() {
    with_fixture::<A>(4, |fixture| {
        let space = fixture.space();
        space.mmap(&fixed(AT, 64 * PAGE)).unwrap();
        fixture.program(&space).fill(VirtAddr(AT + 16 * PAGE), 32 * PAGE, 1).unwrap();
        for start in 0..64 {
            let words = pagemap(&space, AT + start * PAGE, 64 - start as usize);
            for (number, word) in (start..).zip(words) {
                let there = if (16..48).contains(&number) {
                    WRITTEN | frame(&space, AT + number * PAGE)
                } else {
                    SOFT_DIRTY
                };
                assert_eq!(word, there, "page {number}, read from {start}");
            }
        }
        fixture.audit(&[&space]);
    });
}

fn the_end<A: Walk>() {
    with_fixture::<A>(0, |fixture| {
        let space = fixture.space();
        let end = A::USER_END >> PAGE_SHIFT;
        let mut words = [1; 8];
        let mut read = |first| {
            words.fill(1);
            let told = proc::pagemap(&space, first, PhysicalAddresses::Shown, &mut words);
            assert!(words[..told].iter().all(|word| *word == 0));
            assert!(words[told..].iter().all(|word| *word == 1));
            told
        };
        assert_eq!((read(end - 8), read(end - 3), read(end)), (8, 3, 0));
        assert_eq!((read(end + 1), read(u64::MAX >> PAGE_SHIFT), read(u64::MAX)), (0, 0, 0));
        assert_eq!(proc::pagemap(&space, 0, PhysicalAddresses::Shown, &mut []), 0);
    });
}

fn windows<A: Walk>() {
    with_fixture::<A>(4, |fixture| {
        let space = fixture.space();
        let pages = 3000;
        let start = AT - 100 * PAGE;
        for at in [AT, AT + 5 * PAGE, AT + 2 * MIB - 7 * PAGE, AT + 6 * MIB] {
            space.mmap(&fixed(at, 3 * PAGE + MIB)).unwrap();
            fixture.program(&space).fill(VirtAddr(at + PAGE), 33 * PAGE, 1).unwrap();
            watch(&space);
        }
        let whole = pagemap(&space, start, pages);
        for first in (0..pages).step_by(77) {
            for count in [1, 2, 15, 16, 513, 1024].map(|count| count.min(pages - first)) {
                let words = pagemap(&space, start + first as u64 * PAGE, count);
                assert_eq!(words, whole[first..first + count]);
            }
        }
    });
}

/// Reads the page map while programs write (each first store unfolds a block) and an object is
/// truncated and grows again.
fn readers<A: Walk>() {
    const PAGES: u64 = 128;
    let config = Config { memory: 32 << 20, cpus: 3, ..Config::default() };
    let (machine, memory) = memory_with::<A>(config);
    use_order(&memory, 4);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let object = memory.shared_memory(4 * MIB, Sealing::Allowed, Accounting::PerPage).unwrap();
    space.mmap(&fixed(AT, PAGES * PAGE)).unwrap();
    map_object(&space, &object, AT + GIB, 4 * MIB, 0, Sharing::Shared);
    machine.on_cpu(Cpu(1), || {
        Program::new(&machine, &space).fill(VirtAddr(AT), PAGES * PAGE, 1).unwrap();
    });
    let done = AtomicBool::new(false);
    let working = || !done.load(Ordering::Relaxed);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _on_cpu = machine.bind(Cpu(1));
            let program = Program::new(&machine, &space);
            for page in (0..PAGES).cycle().step_by(7).take_while(|_| working()) {
                program.store(VirtAddr(AT + page * PAGE), page).unwrap();
            }
        });
        scope.spawn(|| {
            let _on_cpu = machine.bind(Cpu(2));
            let program = Program::new(&machine, &space);
            for page in (0..1024).cycle().take_while(|_| working()) {
                object.set_size(page * PAGE).unwrap();
                object.set_size(4 * MIB).unwrap();
                program.store(VirtAddr(AT + GIB + page * PAGE), page).unwrap();
            }
        });
        let _on_cpu = machine.bind(Cpu(0));
        // Loads the space here, so that invalidations wait for this CPU too after entries were
        // removed.
        Program::new(&machine, &space).load(VirtAddr(AT)).unwrap();
        let _stop = Finished(&done);
        for _ in 0..150 {
            watch(&space);
            for _ in 0..20 {
                let words = pagemap(&space, AT, PAGES as usize);
                assert!(words.iter().all(|word| word & PRESENT != 0));
            }
            pagemap(&space, AT + GIB, 1024);
            assert_eq!(area(&space, AT).kib("Private_Dirty"), PAGES * 4);
            let shared = area(&space, AT + GIB).kib("Rss");
            assert!(shared <= 4096 && resident(&space).0 == PAGES);
        }
    });
    audit(&machine, &memory, &[&space]);
}
