//! The operations: the call that each side repeats between the marks, and its preparation.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{Access, Advice, Place, Protection, Remap};

use crate::side::{COMMON, GIB, KIB, MIB, Side, request};

/// A step of a side. Its argument is the number of the repetition.
type Step = fn(&Side<'_>, u64);

/// An operation of both sides. Only `run` is inside the marks.
pub struct Operation {
    /// The operation's name in the table.
    pub name: &'static str,
    /// Whether the operation needs an address space for each side.
    pub needs_own_spaces: bool,
    /// Before the first repetition.
    pub start: Step,
    /// Before each repetition.
    pub before: Step,
    /// The operation itself.
    pub run: Step,
    /// After each repetition.
    pub after: Step,
    /// After the last repetition.
    pub end: Step,
}

const NOTHING: Step = |_, _| {};

impl Operation {
    const fn named(name: &'static str) -> Self {
        Self {
            name,
            needs_own_spaces: false,
            start: NOTHING,
            before: NOTHING,
            run: NOTHING,
            after: NOTHING,
            end: NOTHING,
        }
    }

    /// An operation on the 64 KiB piece, whose pages were all written. A neighboring page keeps the
    /// piece's table allocated.
    const fn on_filled_piece(name: &'static str, run: Step) -> Self {
        Self {
            start: |side, _| side.keep_table(),
            before: |side, _| side.fill_piece(),
            run,
            after: |side, _| side.unmap_piece(),
            end: unmap_own,
            ..Self::named(name)
        }
    }

    /// Swaps out the pages of the piece, which `before` has written, to the area that `start`
    /// selects.
    const fn page_out(name: &'static str, before: Step, start: Step) -> Self {
        Self {
            start,
            before,
            needs_own_spaces: true,
            ..Self::on_filled_piece(name, |side, _| side.advise(Advice::PageOut))
        }
    }

    /// Swaps in a page of the piece, which `before` has swapped out to the area that `start`
    /// selects.
    const fn swap_in(name: &'static str, before: Step, start: Step) -> Self {
        Self { run: |side, _| side.touch(side.piece()), ..Self::page_out(name, before, start) }
    }
}

/// Unmaps everything at the side's own addresses.
fn unmap_own(side: &Side<'_>, _: u64) {
    side.unmap(side.own(), GIB);
}

fn unmap_common(side: &Side<'_>, _: u64) {
    if side.is_in_charge() {
        side.unmap(COMMON, 8 * MIB);
    }
}

/// Maps the common addresses and touches the last pages of the first two tables.
fn map_common(side: &Side<'_>, _: u64) {
    if side.is_in_charge() {
        side.map(COMMON, 8 * MIB);
        side.touch(COMMON + 2 * MIB - PAGE_SIZE);
        side.touch(COMMON + 4 * MIB - PAGE_SIZE);
    }
}

fn map_20_vmas(side: &Side<'_>, _: u64) {
    for number in 0..20 {
        let at = side.own() + number * 4 * MIB;
        side.map(at, 64 * KIB);
        side.touch_all(at, 64 * KIB);
    }
}

/// Fills the piece with zeroes, which need neither compressed memory nor a device.
fn zeroes(side: &Side<'_>, _: u64) {
    side.fill_piece();
}

/// Fills the piece with pages that compress to half their size.
fn text(side: &Side<'_>, number: u64) {
    side.map_piece();
    side.write_piece(number);
}

fn zeroes_in_swap(side: &Side<'_>, number: u64) {
    zeroes(side, number);
    side.advise(Advice::PageOut);
}

fn text_in_swap(side: &Side<'_>, number: u64) {
    text(side, number);
    side.advise(Advice::PageOut);
}

fn to_device(side: &Side<'_>, _: u64) {
    side.keep_table();
    side.areas.swap_to_device(side.space.memory());
}

fn to_compressed_memory(side: &Side<'_>, _: u64) {
    side.keep_table();
    side.areas.swap_to_compressed_memory(side.space.memory());
}

/// The operations in the order of the table.
pub const OPERATIONS: &[Operation] = &[
    Operation::named("nothing"),
    Operation {
        start: |side, _| {
            side.map(side.own(), 2 * MIB);
            side.touch(side.own() + 2 * MIB - PAGE_SIZE);
        },
        run: |side, number| side.touch(side.own() + number * PAGE_SIZE),
        end: unmap_own,
        ..Operation::named("first touch, own VMA")
    },
    Operation {
        start: |side, _| {
            side.map(side.own(), 128 * MIB);
            side.touch(side.own() + 128 * MIB - PAGE_SIZE);
        },
        run: |side, number| side.touch(side.own() + number * 2 * MIB),
        end: unmap_own,
        ..Operation::named("first touch, new table")
    },
    Operation {
        start: map_common,
        run: |side, number| side.touch(COMMON + side.number * 2 * MIB + number * PAGE_SIZE),
        end: unmap_common,
        ..Operation::named("first touch, one VMA")
    },
    Operation {
        start: map_common,
        run: |side, number| side.touch(COMMON + side.number * MIB + number * PAGE_SIZE),
        end: unmap_common,
        ..Operation::named("first touch, one table, far")
    },
    Operation {
        start: map_common,
        run: |side, number| side.touch(COMMON + (2 * number + side.number) * PAGE_SIZE),
        end: unmap_common,
        ..Operation::named("first touch, one table, near")
    },
    Operation {
        start: |side, _| {
            side.map(side.own(), 2 * MIB);
            side.touch(side.own() + 2 * MIB - PAGE_SIZE);
        },
        run: |side, number| {
            let page = VirtAddr(side.own() + number * PAGE_SIZE);
            side.space.fault(page, Access::Read).expect("memory is mapped and free");
        },
        end: unmap_own,
        ..Operation::named("first read, zero page")
    },
    Operation {
        start: |side, _| {
            for page in 0..1024 * (1 - side.number) {
                side.object.write(page * PAGE_SIZE, &[1]).expect("memory is free");
            }
            side.map_object(side.own(), 4 * MIB);
            side.touch(side.own() + 2 * MIB - PAGE_SIZE);
        },
        run: |side, number| side.touch(side.own() + (2 * number + side.number) * PAGE_SIZE),
        end: unmap_own,
        ..Operation::named("memfd page, present")
    },
    Operation {
        start: |side, _| {
            if side.number == 0 {
                side.object.set_size(0).expect("no seals");
                side.object.set_size(4 * MIB).expect("no seals");
            }
            side.map_object(side.own(), 4 * MIB);
            side.touch(side.own() + 2 * MIB - PAGE_SIZE);
        },
        run: |side, number| side.touch(side.own() + side.number * MIB + number * PAGE_SIZE),
        end: unmap_own,
        ..Operation::named("memfd page, new")
    },
    Operation::on_filled_piece("madvise, DONTNEED", |side, _| side.advise(Advice::DontNeed)),
    Operation::on_filled_piece("madvise, FREE", |side, _| side.advise(Advice::Free)),
    Operation::on_filled_piece("madvise, COLD", |side, _| side.advise(Advice::Cold)),
    Operation {
        before: |side, _| side.map_piece(),
        ..Operation::on_filled_piece("madvise, POPULATE_WRITE", |side, _| {
            side.advise(Advice::PopulateWrite);
        })
    },
    Operation::on_filled_piece("mincore", |side, _| {
        let piece = VirtAddr(side.piece());
        side.space.mincore(piece, 64 * KIB, |_, _| {}).expect("the range is mapped");
    }),
    Operation {
        before: NOTHING,
        ..Operation::on_filled_piece("mmap, fixed", |side, _| side.map_piece())
    },
    Operation {
        run: |side, _| {
            let at = side.space.mmap(&request(Place::Anywhere, 64 * KIB));
            side.result.set(at.expect("addresses are free").0);
        },
        after: |side, _| side.unmap(side.result.get(), 64 * KIB),
        ..Operation::named("mmap, anywhere")
    },
    Operation {
        after: NOTHING,
        ..Operation::on_filled_piece("munmap, resident", |side, _| side.unmap_piece())
    },
    Operation {
        before: |side, _| side.map_piece(),
        after: NOTHING,
        ..Operation::on_filled_piece("munmap, untouched", |side, _| side.unmap_piece())
    },
    Operation {
        before: NOTHING,
        after: NOTHING,
        ..Operation::on_filled_piece("mmap, touch, munmap", |side, _| {
            side.fill_piece();
            side.unmap_piece();
        })
    },
    Operation::on_filled_piece("mprotect", |side, _| {
        let piece = VirtAddr(side.piece());
        side.space.mprotect(piece, 64 * KIB, Protection::READ).expect("the range is mapped");
    }),
    Operation {
        after: |side, _| side.unmap(side.piece() + 256 * KIB, 64 * KIB),
        ..Operation::on_filled_piece("mremap", |side, _| {
            let (piece, to) = (VirtAddr(side.piece()), VirtAddr(side.piece() + 256 * KIB));
            side.space.mremap(piece, 64 * KIB, 64 * KIB, Remap::To(to)).expect("it is mapped");
        })
    },
    Operation {
        start: |side, _| side.space.set_break_start(VirtAddr(0x2000_0000_0000)),
        before: |side, _| side.result.set(side.space.set_break(VirtAddr(0)).0),
        // Each side extends the heap beyond the end that the other side set.
        run: |side, _| {
            let pieces = if side.has_own_space { 1 } else { side.number + 1 };
            side.space.set_break(VirtAddr(side.result.get() + pieces * 64 * KIB));
        },
        after: |side, _| {
            side.space.set_break(VirtAddr(side.result.get()));
        },
        ..Operation::named("brk")
    },
    Operation {
        run: |side, _| {
            side.child.replace(Some(side.space.fork().expect("memory is free")));
        },
        after: |side, _| drop(side.child.take()),
        needs_own_spaces: true,
        ..Operation::named("fork, nearly empty")
    },
    Operation {
        start: map_20_vmas,
        run: |side, _| {
            side.child.replace(Some(side.space.fork().expect("memory is free")));
        },
        after: |side, _| drop(side.child.take()),
        end: unmap_own,
        needs_own_spaces: true,
        ..Operation::named("fork, 20 VMAs, 320 pages")
    },
    Operation {
        start: |side, _| side.keep_table(),
        before: |side, _| side.map_huge(),
        run: |side, _| {
            side.touch(side.huge());
            side.unmap(side.huge(), 2 * MIB);
        },
        end: unmap_own,
        needs_own_spaces: true,
        ..Operation::named("2 MiB folio, touch, munmap")
    },
    Operation::page_out("pageout", zeroes, to_device),
    Operation::swap_in("swap-in", zeroes_in_swap, to_device),
    Operation::page_out("pageout, compressed", text, to_compressed_memory),
    Operation::swap_in("swap-in, compressed", text_in_swap, to_compressed_memory),
    Operation::page_out("pageout, device", text, to_device),
    Operation::swap_in("swap-in, device", text_in_swap, to_device),
];
