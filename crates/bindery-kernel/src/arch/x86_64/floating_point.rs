//! The floating-point state: x87, SSE, and AVX if the processor has it. AVX-512 stays disabled. The
//! rights to protection keys are switched along with the floating-point state, by separate
//! instructions.
//!
//! The kernel uses no floating-point registers, so a program's state stays in the processor until
//! another thread runs.

use core::arch::asm;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use bindery::arch::KeyRights;
use x86_64::VirtAddr;
use x86_64::registers::control::{Cr4, Cr4Flags};
use x86_64::registers::model_specific::KernelGsBase;
use x86_64::registers::xcontrol::{XCr0, XCr0Flags};

use super::{cpu_features, protection_keys};

/// The size of the image of `FXSAVE`.
pub const LEGACY_SIZE: usize = 512;
/// The header that `XSAVE` adds behind the legacy image.
pub const HEADER_SIZE: usize = 64;
/// With AVX: the maximum size that is ever stored.
pub const MOST: usize = LEGACY_SIZE + HEADER_SIZE + 256;

/// Offsets in the image: the x87 control word, MXCSR, and the bits of MXCSR that may be set.
const CONTROL_WORD: usize = 0;
const MXCSR: usize = 24;
const MXCSR_MASK: usize = 28;

/// x87 and SSE, in the bits of the header.
const LEGACY_PARTS: u64 = 3;
/// AVX too: all that the kernel requests of `XSAVE`.
const ALL_PARTS: u32 = 7;

/// The bits of MXCSR that may be set; the initial value is for processors that do not report these
/// bits.
static MXCSR_ALLOWED: AtomicU32 = AtomicU32::new(0xffbf);

/// The number of bytes that this processor stores; [`LEGACY_SIZE`] without `XSAVE`.
static SIZE: AtomicUsize = AtomicUsize::new(LEGACY_SIZE);

/// The number of meaningful bytes in an image.
pub fn size() -> usize {
    SIZE.load(Ordering::Relaxed)
}

/// Whether images are those of `XSAVE`.
pub fn has_header() -> bool {
    size() != LEGACY_SIZE
}

/// The state components that an image can have, in the processor's bits.
pub fn parts() -> u64 {
    if size() == MOST { LEGACY_PARTS | 4 } else { LEGACY_PARTS }
}

/// Enables the features that the CPU has. Part of [`cpu_features::enable`].
pub(super) fn enable() {
    let mut state = FloatingPoint::new();
    // `FXSAVE`, until XSAVE is detected.
    state.save();
    let allowed = u32::from_le_bytes(state.word(MXCSR_MASK));
    if allowed != 0 {
        MXCSR_ALLOWED.store(allowed, Ordering::Relaxed);
    }
    if !Cr4::read().contains(Cr4Flags::OSXSAVE) {
        return;
    }
    let basic = XCr0Flags::X87 | XCr0Flags::SSE;
    let avx = cpu_features::leaf(1, 0).ecx & 1 << 28 != 0;
    let parts = if avx { basic | XCr0Flags::AVX } else { basic };
    // SAFETY: the processor has the parts; the kernel uses none.
    unsafe { XCr0::write(parts) };
    let size = cpu_features::leaf(13, 0).ebx as usize;
    assert!(
        size <= MOST,
        "the processor's AVX state of {size} bytes is larger than expected: try another `--cpu`"
    );
    SIZE.store(size, Ordering::Relaxed);
    if protection_keys::protection_keys() > 1 {
        // For programs that ask for the layout of signal frames. SAFETY: as above; the kernel never
        // saves the keys with `XSAVE`.
        unsafe { XCr0::write(parts | XCr0Flags::MPK) };
    }
}

/// Floating-point state in memory, and the registers switched with it: the base of GS and the
/// rights to protection keys.
#[derive(Clone)]
#[repr(C, align(64))]
pub struct FloatingPoint {
    image: [u8; MOST],
    gs_base: u64,
    pub(super) key_rights: KeyRights,
}

impl FloatingPoint {
    /// The state of a new program: all exceptions masked, 64 bits of precision, to the nearest; no
    /// access by any key but key 0.
    pub fn new() -> Self {
        let mut image = [0; MOST];
        image[CONTROL_WORD..][..2].copy_from_slice(&0x37f_u16.to_le_bytes());
        image[MXCSR..][..4].copy_from_slice(&0x1f80_u32.to_le_bytes());
        Self { image, gs_base: 0, key_rights: protection_keys::INITIAL }
    }

    /// Stores the CPU's state here.
    pub fn save(&mut self) {
        let at = self.image.as_mut_ptr();
        // SAFETY: the image is aligned to 64 and as long as what is stored (see `enable`).
        unsafe {
            if has_header() {
                asm!("xsave64 [{}]", in(reg) at, in("eax") ALL_PARTS, in("edx") 0,
                    options(nostack, preserves_flags));
            } else {
                asm!("fxsave64 [{}]", in(reg) at, options(nostack, preserves_flags));
            }
        }
        // SAFETY: the register exists. Read raw: a program may have written any number to it
        // (`wrgsbase`), where the emulator lets it.
        self.gs_base = unsafe { KernelGsBase::MSR.read() };
        self.key_rights = protection_keys::key_rights();
    }

    /// Loads the CPU's state from here.
    pub fn restore(&self) {
        self.restore_image();
        KernelGsBase::write(VirtAddr::new_truncate(self.gs_base));
        protection_keys::set_key_rights(self.key_rights);
    }

    /// As [`FloatingPoint::restore`], without GS and the rights to keys.
    pub(super) fn restore_image(&self) {
        let at = self.image.as_ptr();
        // SAFETY: the image came from `save`, `new` or `from_program`, so the processor takes it.
        unsafe {
            if has_header() {
                asm!("xrstor64 [{}]", in(reg) at, in("eax") ALL_PARTS, in("edx") 0,
                    options(nostack, readonly, preserves_flags));
            } else {
                asm!("fxrstor64 [{}]", in(reg) at, options(nostack, readonly, preserves_flags));
            }
        }
    }

    /// The meaningful bytes of the image.
    pub(super) fn image(&self) -> &[u8] {
        &self.image[..size()]
    }

    /// The state components in the image, a subset of [`parts`].
    pub(super) fn present_parts(&self) -> u64 {
        u64::from_le_bytes(self.word(LEGACY_SIZE))
    }

    /// Loads bytes that a program has written and clears bits that the processor would reject with
    /// a fault in the kernel. Without `parts` the bytes have no header, only the legacy part.
    /// Missing bytes have their initial value.
    pub(super) fn from_program(bytes: &[u8], parts: Option<u64>) -> Self {
        let mut new = Self::new();
        new.image[..bytes.len()].copy_from_slice(bytes);
        let mxcsr = u32::from_le_bytes(new.word(MXCSR)) & MXCSR_ALLOWED.load(Ordering::Relaxed);
        new.image[MXCSR..][..4].copy_from_slice(&mxcsr.to_le_bytes());
        // Only the header's first word, which lists the components, may be nonzero.
        let given = u64::from_le_bytes(new.word(LEGACY_SIZE));
        new.image[LEGACY_SIZE..][..HEADER_SIZE].fill(0);
        let present = parts.map_or(LEGACY_PARTS, |parts| given & parts);
        new.image[LEGACY_SIZE..][..8].copy_from_slice(&present.to_le_bytes());
        new
    }

    fn word<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut word = [0; N];
        word.copy_from_slice(&self.image[at..][..N]);
        word
    }
}
