//! Processor features. CPUID reports them, the kernel enables them on each CPU, and programs find
//! them in `AT_HWCAP`.

use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count, CpuidResult};

use x86_64::registers::control::{Cr4, Cr4Flags};
use x86_64::registers::model_specific::{Efer, EferFlags, Msr};

use super::{floating_point, protection_keys};

/// The number of `IA32_PAT`.
pub(super) const PAGE_ATTRIBUTES: u32 = 0x277;

/// The memory types that table entries select, in the core's order: write-back (6), write-combining
/// (1), write-through (4), uncacheable (0), and the same again.
const PAGE_ATTRIBUTE_TABLE: u64 = 0x0004_0106_0004_0106;

/// A leaf of CPUID; zeroes if the processor lacks it.
#[allow(unused_unsafe, reason = "the intrinsic is safe from Rust 1.96 on")]
pub fn leaf(number: u32, count: u32) -> CpuidResult {
    // SAFETY: every x86-64 processor has the instruction.
    let highest = unsafe { __cpuid(number & 0x8000_0000) }.eax;
    if number > highest {
        return CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };
    }
    // SAFETY: as above.
    unsafe { __cpuid_count(number, count) }
}

/// Whether the CPU has supervisor-mode access prevention.
pub fn has_smap() -> bool {
    leaf(7, 0).ebx & 1 << 20 != 0
}

/// Whether the CPU has pages of 1 GiB.
pub fn has_giant_pages() -> bool {
    leaf(0x8000_0001, 0).edx & 1 << 26 != 0
}

/// The sizes of huge pages that Linux has on this processor, as binary logarithms of bytes.
pub fn huge_page_sizes() -> &'static [u32] {
    if has_giant_pages() { &[21, 30] } else { &[21] }
}

/// No checks of indirect branches, because the kernel does not use CET.
#[inline]
pub fn branch_target_identification() -> bool {
    false
}

/// `AT_HWCAP` (the features of CPUID leaf 1, EDX, that every x86-64 processor has) and `AT_HWCAP2`.
/// Programs ask the processor itself for more.
pub fn hardware_capabilities() -> [u64; 2] {
    [0x078b_fbff, 0]
}

/// A number from the processor's random number generator. `None` if the processor has no generator,
/// or if no number is ready.
pub fn random_word() -> Option<u64> {
    if leaf(1, 0).ecx & 1 << 30 == 0 {
        return None;
    }
    let (word, good): (u64, u8);
    // SAFETY: the processor has the instruction, which changes two registers and the flags.
    unsafe {
        asm!("rdrand {word}", "setc {good}", word = out(reg) word, good = out(reg_byte) good,
            options(nomem, nostack));
    }
    (good != 0).then_some(word)
}

/// Enables all features that the processor has and the kernel uses.
pub fn enable() {
    let (basic, extended) = (leaf(1, 0), leaf(7, 0));
    let mut flags = Cr4Flags::PHYSICAL_ADDRESS_EXTENSION
        | Cr4Flags::PAGE_GLOBAL
        | Cr4Flags::MACHINE_CHECK_EXCEPTION
        | Cr4Flags::OSFXSR
        | Cr4Flags::OSXMMEXCPT_ENABLE;
    for (register, bit, flag) in [
        (basic.ecx, 26, Cr4Flags::OSXSAVE),
        (extended.ebx, 0, Cr4Flags::FSGSBASE),
        (extended.ebx, 7, Cr4Flags::SUPERVISOR_MODE_EXECUTION_PROTECTION),
        (extended.ebx, 20, Cr4Flags::SUPERVISOR_MODE_ACCESS_PREVENTION),
        (extended.ecx, 2, Cr4Flags::USER_MODE_INSTRUCTION_PREVENTION),
        (extended.ecx, 3, Cr4Flags::PROTECTION_KEY_USER),
    ] {
        flags.set(flag, register & 1 << bit != 0);
    }
    if !flags.contains(Cr4Flags::OSXSAVE) {
        // Signal frames have the rights to keys in an `XSAVE` image.
        flags.remove(Cr4Flags::PROTECTION_KEY_USER);
    }
    // SAFETY: paging stays as it is (four levels, PAE); the other bits restrict the kernel, which
    // neither runs nor touches programs' pages, or concern instructions of programs.
    unsafe {
        Cr4::write(flags);
        // Entries 0 and 3, the only ones that existing mappings use, keep their types.
        Msr::new(PAGE_ATTRIBUTES).write(PAGE_ATTRIBUTE_TABLE);
        Efer::update(|efer| {
            efer.insert(EferFlags::SYSTEM_CALL_EXTENSIONS | EferFlags::NO_EXECUTE_ENABLE);
        });
    }
    protection_keys::enable();
    floating_point::enable();
}
