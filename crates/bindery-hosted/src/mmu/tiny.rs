//! The imaginary architecture; its manual is the documentation of [`bindery::arch::Tiny`].

use bindery::arch::{MemoryType, Permissions, Tiny};

use super::{Denial, Fetches, InvalidEntries, Leaf, Meaning, Mode, Rights, Rules, Walk};

impl Walk for Tiny {
    const RULES: Rules = Rules {
        levels: 3,
        index_bits: 2,
        denial: Denial::Report,
        invalid: InvalidEntries::NotCached,
        fetches: Fetches::OnDemand,
    };

    fn translates(addr: u64, _mode: Mode) -> bool {
        // Both modes share one half, so kernel pages lie among user-mode pages.
        addr < 0x4_0000
    }

    fn decode(entry: u64, level: u8, index: u32) -> Meaning {
        if entry & 1 == 0 {
            return Meaning::Invalid;
        }
        if entry & 0xffff_f000_0000_0c00 != 0 {
            return Meaning::Malformed("bits without a meaning are set");
        }
        let frame = entry >> 12;
        if entry & 2 != 0 {
            return match level {
                1 => Meaning::Malformed("a table at level 1"),
                _ => Meaning::Table { frame, rights: Rights::all(), accessed: true },
            };
        }
        if level == 3 {
            return Meaning::Malformed("a leaf at level 3");
        }
        let block = (entry >> 7 & 1) as u8;
        if block == 1 && level > 1 {
            return Meaning::Malformed("contiguous above level 1");
        }
        if block == 1 && frame & 1 != u64::from(index & 1) {
            return Meaning::Malformed("contiguous, and a frame that is not aligned");
        }
        let mut permissions = Permissions::READ;
        permissions.set(Permissions::WRITE, entry & 4 != 0);
        permissions.set(Permissions::EXECUTE, entry & 8 != 0);
        permissions.set(Permissions::USER, entry & 0x10 != 0);
        Meaning::Leaf(Leaf {
            frame,
            rights: Rights::same(permissions),
            memory: MemoryType::Normal,
            accessed: entry & 0x20 != 0,
            dirty: entry & 0x40 != 0,
            key: 0,
            block,
            attributes: 0,
        })
    }

    fn with_accessed(entry: u64) -> u64 {
        entry | 0x20
    }

    fn with_dirty(entry: u64) -> u64 {
        entry | 0x60
    }
}
