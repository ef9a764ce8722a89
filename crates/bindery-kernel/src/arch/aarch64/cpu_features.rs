//! Processor features that programs may use: `AT_HWCAP` and `AT_HWCAP2`.
//!
//! Programs may use the CPU's features that need no kernel support, and branch targets (BTI), but
//! not SVE, SME, memory tags or pointer authentication. A program that reads an identification
//! register gets `SIGILL`.

use core::arch::asm;

use aarch64_cpu::registers::{
    ID_AA64ISAR0_EL1, ID_AA64ISAR1_EL1, ID_AA64MMFR2_EL1, ID_AA64PFR0_EL1, ID_AA64PFR1_EL1,
    Readable,
};

/// A field of an identification register: its lowest bit, the minimum value that indicates the
/// capability, and the bit of the capability (Linux, arch/arm64/include/uapi/asm/hwcap.h).
type Field = (u32, u64, u32);

const INSTRUCTIONS_0: [Field; 16] = [
    (4, 1, 3),        // AES
    (4, 2, 4),        // PMULL
    (8, 1, 5),        // SHA1
    (12, 1, 6),       // SHA2
    (12, 2, 21),      // SHA512
    (16, 1, 7),       // CRC32
    (20, 2, 8),       // ATOMICS
    (28, 1, 12),      // ASIMDRDM
    (32, 1, 17),      // SHA3
    (36, 1, 18),      // SM3
    (40, 1, 19),      // SM4
    (44, 1, 20),      // ASIMDDP
    (48, 1, 23),      // ASIMDFHM
    (52, 1, 27),      // FLAGM
    (52, 2, 32 + 7),  // FLAGM2
    (60, 1, 32 + 16), // RNG
];

const INSTRUCTIONS_1: [Field; 10] = [
    (0, 1, 16),       // DCPOP
    (0, 2, 32),       // DCPODP
    (12, 1, 13),      // JSCVT
    (16, 1, 14),      // FCMA
    (20, 1, 15),      // LRCPC
    (20, 2, 26),      // ILRCPC
    (32, 1, 32 + 8),  // FRINT
    (36, 1, 29),      // SB
    (44, 1, 32 + 14), // BF16
    (52, 1, 32 + 13), // I8MM
];

/// `AT_HWCAP` and `AT_HWCAP2`.
pub fn hardware_capabilities() -> [u64; 2] {
    let mut capabilities = 0_u64;
    let mut add = |register: u64, fields: &[Field]| {
        for (shift, least, bit) in fields {
            if register >> shift & 0xf >= *least {
                capabilities |= 1 << bit;
            }
        }
    };
    add(ID_AA64ISAR0_EL1.get(), &INSTRUCTIONS_0);
    add(ID_AA64ISAR1_EL1.get(), &INSTRUCTIONS_1);
    let processor = ID_AA64PFR0_EL1.get();
    // FP and ASIMD: all ones mean absent; 1 adds half precision (FPHP, ASIMDHP).
    if processor >> 16 & 0xf != 0xf {
        add(processor, &[(16, 0, 0), (20, 0, 1), (16, 1, 9), (20, 1, 10)]);
    }
    add(processor, &[(48, 1, 24)]); // DIT
    add(ID_AA64PFR1_EL1.get(), &[(0, 1, 32 + 17), (4, 2, 28)]); // BTI, SSBS
    add(ID_AA64MMFR2_EL1.get(), &[(32, 1, 25)]); // USCAT
    // The upper half of each word belongs to the other list.
    [capabilities & 0xffff_ffff, capabilities >> 32]
}

/// The sizes of huge pages that Linux has with base pages of 4 KiB, as binary logarithms of bytes:
/// leaves and contiguous runs of two levels.
pub fn huge_page_sizes() -> &'static [u32] {
    &[16, 21, 25, 30]
}

/// Whether the CPU checks the targets of indirect branches into guarded pages (FEAT_BTI).
#[inline]
pub fn branch_target_identification() -> bool {
    ID_AA64PFR1_EL1.get() & 0xf != 0
}

/// Whether the CPU has the atomic instructions that the kernel is built with (FEAT_LSE).
pub(super) fn atomics() -> bool {
    ID_AA64ISAR0_EL1.get() >> 20 & 0xf >= 2
}

/// A number from the processor's random number generator. `None` if the processor has no generator,
/// or if no number is ready.
pub fn random_word() -> Option<u64> {
    if ID_AA64ISAR0_EL1.get() >> 60 & 0xf == 0 {
        return None;
    }
    let (word, good): (u64, u64);
    // SAFETY: the processor has the register (RNDR), whose reading changes two registers and the
    // flags.
    unsafe {
        asm!("mrs {word}, s3_3_c2_c4_0", "cset {good}, ne", word = out(reg) word,
            good = out(reg) good, options(nomem, nostack));
    }
    (good != 0).then_some(word)
}
