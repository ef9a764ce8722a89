//! The floating-point state of a thread: V0 to V31, FPCR and FPSR.

use core::arch::global_asm;
use core::mem::offset_of;

/// Floating-point state. The kernel uses no floating point, so the state stays in the CPU until
/// another thread runs.
#[repr(C, align(16))]
#[derive(Clone)]
pub struct FloatingPoint {
    /// V0 to V31.
    pub(super) vectors: [u128; 32],
    pub(super) status: u32,
    pub(super) control: u32,
}

impl FloatingPoint {
    /// The state of a new program.
    pub fn new() -> Self {
        Self { vectors: [0; 32], status: 0, control: 0 }
    }

    /// Stores the CPU's state here.
    pub fn save(&mut self) {
        // SAFETY: writes the structure and nothing else.
        unsafe { store_floating_point(self) };
    }

    /// Loads the CPU's state from here.
    pub fn restore(&self) {
        // SAFETY: the kernel itself has no floating-point state that could be lost.
        unsafe { load_floating_point(self) };
    }
}

const _: () = {
    assert!(offset_of!(FloatingPoint, status) == 512 && offset_of!(FloatingPoint, control) == 516);
};

unsafe extern "C" {
    fn store_floating_point(into: &mut FloatingPoint);
    fn load_floating_point(from: &FloatingPoint);
}

global_asm!(
    r#"
    .arch_extension fp
    .arch_extension simd
    .section .text.floating_point, "ax"
    .macro  vectors_by instruction
    \instruction q0, q1, [x0]
    \instruction q2, q3, [x0, #32]
    \instruction q4, q5, [x0, #64]
    \instruction q6, q7, [x0, #96]
    \instruction q8, q9, [x0, #128]
    \instruction q10, q11, [x0, #160]
    \instruction q12, q13, [x0, #192]
    \instruction q14, q15, [x0, #224]
    \instruction q16, q17, [x0, #256]
    \instruction q18, q19, [x0, #288]
    \instruction q20, q21, [x0, #320]
    \instruction q22, q23, [x0, #352]
    \instruction q24, q25, [x0, #384]
    \instruction q26, q27, [x0, #416]
    \instruction q28, q29, [x0, #448]
    \instruction q30, q31, [x0, #480]
    .endm

    .global store_floating_point
store_floating_point:
    vectors_by stp
    mrs     x1, fpsr
    mrs     x2, fpcr
    str     w1, [x0, #512]
    str     w2, [x0, #516]
    ret

    .global load_floating_point
load_floating_point:
    vectors_by ldp
    ldr     w1, [x0, #512]
    ldr     w2, [x0, #516]
    msr     fpsr, x1
    msr     fpcr, x2
    ret
    "#
);
