//! AArch64, EL0 through TTBR0: 4 KiB granule, 48-bit input and output addresses, FEAT_HAFDBS with
//! `TCR_EL1.HA` and `HD` set, hierarchical permissions on. Arm Architecture Reference Manual
//! (DDI 0487), chapter D8: descriptor formats (D8.3), access permissions (D8.4), hardware updates
//! (D8.5), the Contiguous bit (D8.7), TLB maintenance and break-before-make (D8.16, D8.17).
//!
//! Our level 4 is the manual's level 0, our level 1 its level 3.

use bindery::arch::{AArch64, Permissions};

use super::{Denial, InvalidEntries, Leaf, Meaning, Rules, Walk};

/// Bits \[1:0\]: what the descriptor is.
const TYPE: u64 = 0b11;
const TYPE_BLOCK: u64 = 0b01;
const TYPE_TABLE_OR_PAGE: u64 = 0b11;

const ATTR_INDEX: u64 = 7 << 2;
const NS: u64 = 1 << 5;
/// AP\[2:1\] are bits 7 and 6.
const AP1_EL0: u64 = 1 << 6;
const AP2_READ_ONLY: u64 = 1 << 7;
const SH: u64 = 3 << 8;
const SH_RESERVED: u64 = 1 << 8;
const AF: u64 = 1 << 10;
const NOT_GLOBAL: u64 = 1 << 11;
const DBM: u64 = 1 << 51;
const CONTIGUOUS: u64 = 1 << 52;
const PXN: u64 = 1 << 53;
const UXN: u64 = 1 << 54;

// In table descriptors: limits for all that lies below.
const UXN_TABLE: u64 = 1 << 60;
const AP_TABLE_NO_EL0: u64 = 1 << 61;
const AP_TABLE_READ_ONLY: u64 = 1 << 62;

/// Output address bits 47:12.
const ADDRESS: u64 = (1 << 48) - (1 << 12);
/// Reserved without FEAT_LPA and FEAT_LPA2.
const ADDRESS_ABOVE: u64 = 3 << 48;

impl Walk for AArch64 {
    const RULES: Rules = Rules {
        levels: 4,
        index_bits: 9,
        denial: Denial::Report,
        // A translation that gives a Translation fault is never held in a TLB.
        invalid: InvalidEntries::NotCached,
    };

    fn translates(addr: u64) -> bool {
        // T0SZ is 16; what lies above is TTBR1's or nobody's.
        addr >> 48 == 0
    }

    fn decode(entry: u64, level: u8, index: u32) -> Meaning {
        if entry & 1 == 0 {
            return Meaning::Invalid;
        }
        if entry & ADDRESS_ABOVE != 0 {
            return Meaning::Malformed("output address bits above 47 are set");
        }
        match (entry & TYPE, level) {
            (TYPE_TABLE_OR_PAGE, 1) => leaf(entry, level, index),
            (TYPE_TABLE_OR_PAGE, _) => table(entry),
            (TYPE_BLOCK, 2 | 3) => leaf(entry, level, index),
            _ => Meaning::Malformed("a block descriptor at a level that has none"),
        }
    }

    fn with_accessed(entry: u64) -> u64 {
        // Only leaves have the flag (FEAT_HAFT is absent), and tables are decoded as used.
        entry | AF
    }

    fn with_dirty(entry: u64) -> u64 {
        (entry | AF) & !AP2_READ_ONLY
    }
}

fn table(entry: u64) -> Meaning {
    let mut permissions = Permissions::all();
    permissions.set(Permissions::EXECUTE, entry & UXN_TABLE == 0);
    permissions.set(Permissions::USER, entry & AP_TABLE_NO_EL0 == 0);
    permissions.set(Permissions::WRITE, entry & AP_TABLE_READ_ONLY == 0);
    Meaning::Table { frame: (entry & ADDRESS) >> 12, permissions, accessed: true }
}

fn leaf(entry: u64, level: u8, index: u32) -> Meaning {
    let size = 12 + 9 * (u32::from(level) - 1);
    if entry & ADDRESS & ((1 << size) - 1) != 0 {
        return Meaning::Malformed("output address bits below the size of the block are set");
    }
    if entry & SH == SH_RESERVED {
        return Meaning::Malformed("SH is 0b01, which is reserved");
    }
    let user = entry & AP1_EL0 != 0;
    if user && entry & NOT_GLOBAL == 0 {
        return Meaning::Malformed(
            "a user page is global: it would survive in every address space",
        );
    }
    let block = if entry & CONTIGUOUS != 0 { 4 } else { 0 };
    let frame = (entry & ADDRESS) >> 12;
    if block > 0 && (frame >> (size - 12)) & 15 != u64::from(index) & 15 {
        return Meaning::Malformed("the Contiguous bit, and an output address that is not aligned");
    }
    let mut permissions = Permissions::READ;
    // With DBM the hardware may clear AP[2], so that a store is allowed either way.
    permissions.set(Permissions::WRITE, entry & AP2_READ_ONLY == 0 || entry & DBM != 0);
    permissions.set(Permissions::EXECUTE, entry & UXN == 0);
    permissions.set(Permissions::USER, user);
    Meaning::Leaf(Leaf {
        frame,
        permissions,
        accessed: entry & AF != 0,
        dirty: entry & AP2_READ_ONLY == 0,
        block,
        attributes: entry & (ATTR_INDEX | NS | SH | NOT_GLOBAL | PXN),
    })
}
