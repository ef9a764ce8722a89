//! x86-64 with four or five levels; no-execute, CR0.WP, SMEP and SMAP on. CR4.PKE is on as well,
//! and PKRU is always 0, so TLBs hold the keys of leaves but no key forbids an access. Intel 64 SDM
//! volume 3A: sections 4.5.4 (formats), 4.6 (access rights), 4.8 (accessed and dirty), 4.9.2 (the
//! memory type by the PAT), 4.10 (caching).
//!
//! `IA32_PAT` is programmed as the core's documentation requires: entries 0 to 3 are write-back,
//! write-combining, write-through, uncacheable. The others are not used.

use bindery::arch::{MemoryType, Permissions, X86_64};

use super::{Denial, Fetches, InvalidEntries, Leaf, Meaning, Mode, Rights, Rules, Walk};

const P: u64 = 0x1;
const RW: u64 = 0x2;
const US: u64 = 0x4;
const PWT: u64 = 0x8;
const PCD: u64 = 0x10;
const A: u64 = 0x20;
const D: u64 = 0x40;
const PS: u64 = 0x80;
const G: u64 = 0x100;
/// In leaves of level 1; above, bit 12.
const PAT: u64 = 0x80;
const PAT_LARGE: u64 = 0x1000;
const XD: u64 = 0x8000_0000_0000_0000;
/// MAXPHYADDR of this processor; the address bits above it are reserved.
const MAX_PHYSICAL_BITS: u32 = 46;

/// Bits `low..high` of the entry.
const fn bits(low: u32, high: u32) -> u64 {
    ((1 << high) - 1) & !((1 << low) - 1)
}

impl<const LEVELS: u8> Walk for X86_64<LEVELS> {
    const RULES: Rules = Rules {
        levels: if LEVELS == 5 { 5 } else { 4 },
        index_bits: 9,
        // Section 4.10.4.1: a page fault invalidates the cached entries for the address.
        denial: Denial::ReadAgain,
        // Section 4.10.2.2 and 4.10.3: nothing is cached for an entry whose P flag is 0.
        invalid: InvalidEntries::NotCached,
        // Volume 3A, "Methods of caching available": no instructions are fetched ahead from memory
        // of type uncacheable.
        fetches: Fetches::OnDemand,
    };

    fn translates(addr: u64, _mode: Mode) -> bool {
        // Canonical: all bits from the highest translated one on are equal.
        let unused = if LEVELS == 5 { 64 - 57 } else { 64 - 48 };
        (((addr << unused) as i64) >> unused) as u64 == addr
    }

    fn decode(entry: u64, level: u8, _index: u32) -> Meaning {
        if entry & P == 0 {
            return Meaning::Invalid;
        }
        if entry & bits(MAX_PHYSICAL_BITS, 52) != 0 {
            return Meaning::Malformed("address bits above MAXPHYADDR are set");
        }
        let mut permissions = Permissions::READ;
        permissions.set(Permissions::WRITE, entry & RW != 0);
        permissions.set(Permissions::EXECUTE, entry & XD == 0);
        permissions.set(Permissions::USER, entry & US != 0);
        let accessed = entry & A != 0;
        if level > 1 && entry & PS == 0 {
            let frame = (entry & bits(12, MAX_PHYSICAL_BITS)) >> 12;
            return Meaning::Table { frame, rights: Rights::same(permissions), accessed };
        }
        if level > 3 {
            return Meaning::Malformed("the PS flag is reserved above level 3");
        }
        // In large leaves bit 12 is PAT and the address begins at a higher bit.
        let low = 12 + 9 * (u32::from(level) - 1);
        if level > 1 && entry & bits(13, low) != 0 {
            return Meaning::Malformed("address bits below the size of the large page are set");
        }
        if entry & (if level == 1 { PAT } else { PAT_LARGE }) != 0 {
            return Meaning::Malformed(
                "the PAT bit chooses an entry of IA32_PAT that is not set up",
            );
        }
        let memory = match (entry & PCD != 0, entry & PWT != 0) {
            (false, false) => MemoryType::Normal,
            (false, true) => MemoryType::WriteCombining,
            (true, false) => MemoryType::WriteThrough,
            (true, true) => MemoryType::Uncached,
        };
        if entry & US != 0 && entry & G != 0 {
            return Meaning::Malformed(
                "a user page is global: it would survive in every address space",
            );
        }
        if entry & (RW | D) == D {
            return Meaning::Malformed("dirty and not writable: a shadow-stack page (section 4.6)");
        }
        Meaning::Leaf(Leaf {
            frame: (entry & bits(low, MAX_PHYSICAL_BITS)) >> 12,
            rights: Rights::same(permissions),
            memory,
            accessed,
            dirty: entry & D != 0,
            key: (entry >> 59 & 0xf) as u8,
            block: 0,
            attributes: 0,
        })
    }

    fn with_accessed(entry: u64) -> u64 {
        entry | A
    }

    fn with_dirty(entry: u64) -> u64 {
        entry | A | D
    }
}
