//! AArch64, EL0 and EL1: 4 KiB granule, 48-bit input and output addresses, FEAT_HAFDBS with
//! `TCR_EL1.HA` and `HD` set, hierarchical permissions on, `PSTATE.PAN` set. Arm Architecture
//! Reference Manual (DDI 0487), chapter D8: descriptor formats (D8.3), access permissions (D8.4),
//! hardware updates (D8.5), "Memory region attributes", the Contiguous bit (D8.7), TLB maintenance
//! and break-before-make (D8.16, D8.17).
//!
//! Addresses with bits 63:48 clear use TTBR0, those with all of them set TTBR1; the address
//! determines which of the two registers holds the root. `TCR_EL1.E0PD1` is set: EL0 sees nothing
//! in TTBR1. `MAIR_EL1` is programmed as the core's documentation requires, with attributes 0 to 4.
//!
//! Our level 4 is the manual's level 0, our level 1 its level 3.

use bindery::arch::{AArch64, MemoryType, Permissions};

use super::{Denial, Fetches, InvalidEntries, Leaf, Meaning, Mode, Rights, Rules, Walk};

/// Bits \[1:0\]: the kind of descriptor.
const TYPE: u64 = 0b11;
const TYPE_BLOCK: u64 = 0b01;
const TYPE_TABLE_OR_PAGE: u64 = 0b11;

/// The index of the attribute in `MAIR_EL1`.
const ATTR_INDEX: u64 = 7 << 2;
const NS: u64 = 1 << 5;
/// AP\[2:1\] are bits 7 and 6.
const AP1_EL0: u64 = 1 << 6;
const AP2_READ_ONLY: u64 = 1 << 7;
const SH: u64 = 3 << 8;
const SH_RESERVED: u64 = 1 << 8;
const AF: u64 = 1 << 10;
const NOT_GLOBAL: u64 = 1 << 11;
/// GP, of FEAT_BTI: an indirect branch to anything but a landing pad is an exception.
const GUARDED: u64 = 1 << 50;
const DBM: u64 = 1 << 51;
const CONTIGUOUS: u64 = 1 << 52;
const PXN: u64 = 1 << 53;
const UXN: u64 = 1 << 54;

// In table descriptors: limits for all levels below.
const PXN_TABLE: u64 = 1 << 59;
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
        // A translation that raises a Translation fault is never held in a TLB.
        invalid: InvalidEntries::NotCached,
        // "Device memory" (B2.7.2): only execute-never prevents speculative fetches.
        fetches: Fetches::Ahead,
    };

    fn translates(addr: u64, mode: Mode) -> bool {
        // T0SZ and T1SZ are 16, TBI0 and TBI1 clear.
        match addr >> 48 {
            0 => true,
            0xffff => mode == Mode::Kernel,
            _ => false,
        }
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
    let mut rights = Rights::all();
    rights.user.set(Permissions::EXECUTE, entry & UXN_TABLE == 0);
    rights.user.set(Permissions::USER, entry & AP_TABLE_NO_EL0 == 0);
    rights.user.set(Permissions::WRITE, entry & AP_TABLE_READ_ONLY == 0);
    rights.kernel.set(Permissions::EXECUTE, entry & PXN_TABLE == 0);
    rights.kernel.set(Permissions::WRITE, entry & AP_TABLE_READ_ONLY == 0);
    Meaning::Table { frame: (entry & ADDRESS) >> 12, rights, accessed: true }
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
    if user && entry & PXN == 0 {
        return Meaning::Malformed(
            "a user page without PXN: the kernel could be led to execute it",
        );
    }
    if !user && entry & UXN == 0 {
        // Only UXN restricts EL0's fetches; AP restricts loads and stores.
        return Meaning::Malformed("a page of the kernel without UXN: user mode may execute it");
    }
    let memory = match (entry & ATTR_INDEX) >> ATTR_INDEX.trailing_zeros() {
        0 => MemoryType::Normal,
        1 => MemoryType::Device,
        2 => MemoryType::WriteCombining,
        3 => MemoryType::Uncached,
        4 => MemoryType::WriteThrough,
        _ => return Meaning::Malformed("AttrIndx names an attribute that MAIR_EL1 has not"),
    };
    let block = if entry & CONTIGUOUS != 0 { 4 } else { 0 };
    let frame = (entry & ADDRESS) >> 12;
    if block > 0 && (frame >> (size - 12)) & 15 != u64::from(index) & 15 {
        return Meaning::Malformed("the Contiguous bit, and an output address that is not aligned");
    }
    let mut kernel = Permissions::READ;
    // With DBM the hardware may clear AP[2], so that a store is allowed in either case.
    kernel.set(Permissions::WRITE, entry & AP2_READ_ONLY == 0 || entry & DBM != 0);
    let mut to_user = kernel;
    kernel.set(Permissions::EXECUTE, entry & PXN == 0);
    to_user.set(Permissions::EXECUTE, entry & UXN == 0);
    to_user.set(Permissions::USER, user);
    kernel.set(Permissions::BTI, entry & GUARDED != 0);
    to_user.set(Permissions::BTI, entry & GUARDED != 0);
    Meaning::Leaf(Leaf {
        frame,
        rights: Rights { user: to_user, kernel },
        memory,
        accessed: entry & AF != 0,
        dirty: entry & AP2_READ_ONLY == 0,
        key: 0,
        block,
        attributes: entry & (ATTR_INDEX | NS | SH | NOT_GLOBAL | PXN),
    })
}
