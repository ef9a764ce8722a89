//! The floor of calls to a kernel map; see [`crate::bench::floor`].
//!
//! - Map: an entry for each piece, a link for each table that is missing under the root's entries,
//!   with areas as close as their guard pages and the alignment of their pieces allow. No
//!   invalidation, unless the MMU may cache invalid entries (RISC-V).
//! - Protect: entries are written once; those in contiguous runs twice, since architectures require
//!   break-before-make of a block. One invalidation for each area.
//! - Unmap: entries are cleared once, for walkers of the tables in software; one invalidation for
//!   all areas. The removal of tables is housekeeping and not counted.

use bindery::Pieces;
use bindery::addr::PAGE_SIZE;

use super::{Area, KernelCall, Operation, Source};
use crate::bench::floor::{Floor, Geometry, Hooks, Piece, pieces};
use crate::bench::workload::range;

/// The needs of `call`, for all its areas, without other mappings.
pub fn floor(call: KernelCall, geometry: Geometry) -> Floor {
    let KernelCall { operation, area, .. } = call;
    let areas = call.areas();
    let single = u64::from(geometry.remembers_invalid);
    match operation {
        Operation::Map => {
            let mut hooks = Hooks::default();
            let mut entries_written = 0;
            for start in starts(call, geometry) {
                // The root's entries are filled from the beginning.
                hooks.are_there(range(start, area.bytes), geometry.levels - 1, geometry);
                for (piece, _) in leaves(area, start, geometry) {
                    hooks.need(piece.at, piece.level, geometry);
                    entries_written += 1;
                }
            }
            let tables_installed = hooks.count();
            Floor { entries_written, tables_installed, invalidations: areas * single }
        }
        Operation::Protect => {
            let start = starts(call, geometry).next().unwrap_or(0);
            let (mut entries, mut in_blocks) = (0, 0);
            for (_, folded) in leaves(area, start, geometry) {
                entries += 1;
                in_blocks += u64::from(folded);
            }
            let invalidations = if in_blocks > 0 { 1 + single } else { 1 };
            Floor {
                entries_written: areas * (entries + in_blocks),
                tables_installed: 0,
                invalidations: areas * invalidations,
            }
        }
        Operation::Unmap => {
            let start = starts(call, geometry).next().unwrap_or(0);
            let entries = leaves(area, start, geometry).len() as u64;
            Floor { entries_written: areas * entries, tables_installed: 0, invalidations: 1 }
        }
    }
}

/// The ranges of consecutive memory that an area maps: first bytes and lengths.
fn stretches(area: Area) -> Vec<(u64, u64)> {
    match area.source {
        Source::Device(from) => vec![(from.0, area.bytes)],
        Source::New(_) => vec![(0, area.bytes)],
        Source::Pages { order } | Source::Ranges { order, .. } => {
            let bytes = PAGE_SIZE << order;
            area.blocks(order).map(|block| (block * bytes, bytes)).collect()
        }
    }
}

fn largest_leaf(area: Area, geometry: Geometry) -> u8 {
    match area.source {
        Source::New(Pieces::Base) | Source::Ranges { pieces: Pieces::Base, .. } => 1,
        Source::Device(_) | Source::New(_) | Source::Pages { .. } | Source::Ranges { .. } => {
            geometry.largest_leaf
        }
    }
}

/// Bytes of a contiguous run of leaves at `level`; 0 if an area has no such run.
fn block(area: Area, level: u8, geometry: Geometry) -> u64 {
    let base = largest_leaf(area, geometry) == 1;
    if base || level > geometry.largest_block {
        0
    } else {
        geometry.span(level) * u64::from(geometry.block)
    }
}

/// The entries of an area at `start`, each with whether it is part of a contiguous run.
fn leaves(area: Area, start: u64, geometry: Geometry) -> Vec<(Piece, bool)> {
    let top = largest_leaf(area, geometry);
    let mut leaves = Vec::new();
    let mut at = start;
    for (from, bytes) in stretches(area) {
        let (delta, end) = (from.wrapping_sub(at), at + bytes);
        for piece in pieces(range(at, bytes), delta, top, geometry) {
            let block = block(area, piece.level, geometry);
            let folded = block > 0 && delta.is_multiple_of(block) && {
                let first = piece.at / block * block;
                at <= first && first + block <= end
            };
            leaves.push((piece, folded));
        }
        at = end;
    }
    leaves
}

/// The lowest possible addresses of the areas, each followed by a guard page.
fn starts(call: KernelCall, geometry: Geometry) -> impl Iterator<Item = u64> {
    let KernelCall { area, .. } = call;
    let stretches = stretches(area);
    let (from, longest) = stretches.first().copied().unwrap_or((0, PAGE_SIZE));
    let align = match area.source {
        // The rule for devices depends only on the size.
        Source::Device(_) => longest.next_power_of_two().min(geometry.span(geometry.largest_leaf)),
        Source::New(_) | Source::Pages { .. } | Source::Ranges { .. } => {
            let levels = 1..=largest_leaf(area, geometry);
            let sizes =
                levels.flat_map(|level| [geometry.span(level), block(area, level, geometry)]);
            sizes.filter(|size| *size <= longest).max().unwrap_or(PAGE_SIZE)
        }
    };
    let congruent = from % align;
    let mut free = 0_u64;
    (0..call.areas()).map(move |_| {
        let start = free.saturating_sub(congruent).next_multiple_of(align) + congruent;
        free = start + area.bytes + PAGE_SIZE;
        start
    })
}

#[cfg(test)]
mod tests {
    use bindery::addr::PhysAddr;

    use super::*;
    use crate::size::{KIB, MIB};

    const X86_64: Geometry = Geometry::FOUR_LEVELS;
    const AARCH64: Geometry = Geometry { block: 16, largest_block: 2, ..X86_64 };
    const SV39: Geometry = Geometry {
        levels: 3,
        block: 16,
        largest_block: 1,
        largest_leaf: 2,
        remembers_invalid: true,
        ..X86_64
    };

    fn of(operation: Operation, bytes: u64, source: Source, geometry: Geometry) -> (u64, u64, u64) {
        let call = KernelCall { operation, area: Area { bytes, source } };
        let Floor { entries_written, tables_installed, invalidations } = floor(call, geometry);
        (entries_written, tables_installed, invalidations)
    }

    #[test]
    fn areas_of_base_pages_lie_close_together() {
        // 32 times 257 pages take 17 tables and one table above them.
        let base = Source::New(Pieces::Base);
        assert_eq!(of(Operation::Map, MIB, base, X86_64), (8_192, 18, 0));
        assert_eq!(of(Operation::Map, MIB, base, SV39), (8_192, 17, 32));
        assert_eq!(of(Operation::Map, MIB, Source::Pages { order: 0 }, AARCH64), (8_192, 18, 0));
    }

    #[test]
    fn devices_lie_at_multiples_of_their_size() {
        for from in [0x3_0000_0000, 0x3_0000_0000 + 64 * KIB] {
            let device = Source::Device(PhysAddr(from));
            assert_eq!(of(Operation::Map, MIB, device, AARCH64), (8_192, 33, 0));
        }
    }

    #[test]
    fn large_leaves_need_no_table_of_base_pages() {
        let new = Source::New(Pieces::Largest);
        assert_eq!(of(Operation::Map, 16 * MIB, new, X86_64), (16, 1, 0));
        assert_eq!(of(Operation::Map, 16 * MIB, new, SV39), (16, 0, 2));
        assert_eq!(of(Operation::Unmap, 16 * MIB, new, X86_64), (16, 0, 1));
    }

    #[test]
    fn blocks_are_broken_before_they_change() {
        let new = Source::New(Pieces::Largest);
        assert_eq!(of(Operation::Protect, MIB, new, X86_64), (8_192, 0, 32));
        assert_eq!(of(Operation::Protect, MIB, new, AARCH64), (16_384, 0, 32));
        assert_eq!(of(Operation::Protect, MIB, new, SV39), (16_384, 0, 64));
        let base = Source::New(Pieces::Base);
        assert_eq!(of(Operation::Protect, MIB, base, AARCH64), (8_192, 0, 32));
    }

    #[test]
    fn a_list_is_unmapped_with_one_invalidation() {
        let list = Source::Pages { order: 8 };
        assert_eq!(of(Operation::Unmap, MIB, list, AARCH64), (8_192, 0, 1));
        assert_eq!(of(Operation::Unmap, 100 * MIB, list, AARCH64), (25_600, 0, 1));
        // 50 tables and one above; blocks begin at multiples of 64 KiB.
        assert_eq!(of(Operation::Map, 100 * MIB, list, AARCH64), (25_600, 51, 0));
    }
}
