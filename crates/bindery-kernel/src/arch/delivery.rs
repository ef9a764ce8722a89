//! The delivery of a signal, in the form that the architecture needs.

/// The contents of a signal frame: everything from which the architecture builds one.
pub struct Delivery {
    /// The signal's number.
    pub signal: u32,
    /// The bytes of `siginfo_t`.
    pub information: [u8; 128],
    /// The handler's return address: `sa_restorer`, or the trampoline's address (AArch64). 0: no
    /// address (x86-64).
    pub handler: u64,
    /// The handler's return address: `sa_restorer`; 0 for none (x86-64), or the address of the
    /// trampoline (AArch64).
    pub restorer: u64,
    /// Whether the handler asks for `siginfo_t` (`SA_SIGINFO`).
    pub with_information: bool,
    /// The signal mask to restore.
    pub mask: u64,
    /// The top of the stack to use: the alternate one, or the program's stack pointer.
    pub stack: u64,
    /// Whether the frame must lie within the alternate stack.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "as on Linux, AArch64 does not check that")
    )]
    pub on_alternate: bool,
    /// The alternate stack in `uc_stack`: base, flags, size.
    pub alternate: (u64, u32, u64),
    /// The address that caused the signal; 0 if none did.
    pub fault: u64,
}
