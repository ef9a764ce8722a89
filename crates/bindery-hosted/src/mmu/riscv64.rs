//! RISC-V Sv39 and Sv48 in U-mode and S-mode, with Svadu (`menvcfg.ADUE` set), Svnapot and Svpbmt
//! (`menvcfg.PBMTE` set); `sstatus.SUM` and `MXR` are clear. Privileged specification: 4.3.1 (the
//! entry), 4.3.2 (the algorithm, cited by its steps), 4.4 and 4.5 (Sv39, Sv48), chapters "Svnapot"
//! and "Svpbmt", 4.2.1 (`SFENCE.VMA`, and caching).

use bindery::arch::{MemoryType, Permissions, Riscv64};

use super::{Denial, Fetches, InvalidEntries, Leaf, Meaning, Mode, Rights, Rules, Walk};

/// Positions of the flags.
const V: u32 = 0;
const R: u32 = 1;
const W: u32 = 2;
const X: u32 = 3;
const U: u32 = 4;
const G: u32 = 5;
const A: u32 = 6;
const D: u32 = 7;
/// PBMT is bits 62:61.
const PBMT: u32 = 61;
const N: u32 = 63;

/// The PPN is bits 53:10.
const PPN: u32 = 10;
const PPN_BITS: u32 = 44;

impl<const LEVELS: u8> Walk for Riscv64<LEVELS> {
    const RULES: Rules = Rules {
        levels: if LEVELS == 4 { 4 } else { 3 },
        index_bits: 9,
        denial: Denial::Report,
        // 4.2.1: implicit reads may be performed early and their results cached, even for invalid
        // entries.
        invalid: InvalidEntries::Cached,
        // The physical address (PMAs), not the entry, determines where fetches are allowed.
        fetches: Fetches::OnDemand,
    };

    fn translates(addr: u64, _mode: Mode) -> bool {
        // All bits above the translated bits equal the highest translated bit.
        let translated = if LEVELS == 4 { 48 } else { 39 };
        let upper = (addr as i64) >> (translated - 1);
        upper == 0 || upper == -1
    }

    fn decode(entry: u64, level: u8, index: u32) -> Meaning {
        let flag = |position: u32| entry >> position & 1 == 1;
        if !flag(V) {
            return Meaning::Invalid;
        }
        if flag(W) && !flag(R) {
            return Meaning::Malformed("writable but not readable, which is reserved (step 3)");
        }
        if entry & ((1 << PBMT) - (1 << (PPN + PPN_BITS))) != 0 {
            return Meaning::Malformed(
                "bits of 62:54 are set that are reserved: those below the memory type (step 3)",
            );
        }
        let ppn = entry << (64 - PPN - PPN_BITS) >> (64 - PPN_BITS);
        if !flag(R) && !flag(X) {
            return table(entry, level, ppn);
        }
        let memory = match entry >> PBMT & 3 {
            0 => MemoryType::Normal,
            1 => MemoryType::WriteCombining,
            2 => MemoryType::Uncached,
            _ => return Meaning::Malformed("PBMT is 3, which is reserved (Svpbmt)"),
        };
        let mut permissions = Permissions::empty();
        permissions.set(Permissions::READ, flag(R));
        permissions.set(Permissions::WRITE, flag(W));
        permissions.set(Permissions::EXECUTE, flag(X));
        permissions.set(Permissions::USER, flag(U));
        let below = 9 * (u32::from(level) - 1);
        if ppn & ((1 << below) - 1) != 0 {
            return Meaning::Malformed("a misaligned superpage (step 6)");
        }
        if flag(U) && flag(G) {
            return Meaning::Malformed(
                "a user page is global: it would survive in every address space",
            );
        }
        let (frame, block) = match (flag(N), level, ppn & 15) {
            (false, ..) => (ppn, 0),
            // The low bits of the frame number come from the address.
            (true, 1, 0b1000) => (ppn - 0b1000 + u64::from(index & 15), 4),
            (true, 1, _) => {
                return Meaning::Malformed("N with a size other than 64 KiB, which is reserved");
            }
            (true, ..) => return Meaning::Malformed("N above level 1, which is reserved"),
        };
        Meaning::Leaf(Leaf {
            frame,
            rights: Rights::same(permissions),
            memory,
            accessed: flag(A),
            dirty: flag(D),
            key: 0,
            block,
            attributes: u64::from(flag(G)),
        })
    }

    fn with_accessed(entry: u64) -> u64 {
        entry | 1 << A
    }

    fn with_dirty(entry: u64) -> u64 {
        entry | 1 << A | 1 << D
    }
}

fn table(entry: u64, level: u8, ppn: u64) -> Meaning {
    if level == 1 {
        return Meaning::Malformed("a pointer to a table at level 1 (step 4)");
    }
    if entry & (1 << A | 1 << D | 1 << U) != 0 {
        return Meaning::Malformed("A, D or U in a pointer to a table, which are reserved");
    }
    if entry >> N & 1 == 1 {
        return Meaning::Malformed("N in a pointer to a table, which is reserved");
    }
    if entry >> PBMT & 3 != 0 {
        return Meaning::Malformed("PBMT in a pointer to a table, which is reserved (Svpbmt)");
    }
    Meaning::Table { frame: ppn, rights: Rights::all(), accessed: true }
}
