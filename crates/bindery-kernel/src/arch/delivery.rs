//! Delivery of a signal, as the architecture has to know it.

/// The contents of a signal frame: all that the architecture needs to make one.
pub struct Delivery {
    /// The signal's number.
    pub signal: u32,
    /// The bytes of `siginfo_t`.
    pub information: [u8; 128],
    /// The handler's address.
    pub handler: u64,
    /// The handler's return address: `sa_restorer`; 0 for none (x86-64), or the address of the
    /// trampoline (AArch64).
    pub restorer: u64,
    /// Whether the handler has asked for `information` (`SA_SIGINFO`).
    pub with_information: bool,
    /// The mask of signals to come back to.
    pub mask: u64,
    /// The top of the stack to use: the alternate one, or the program's stack pointer.
    pub stack: u64,
    /// The alternate stack in `uc_stack`: base, flags, size.
    pub alternate: (u64, u32, u64),
    /// The address that the signal is about; 0 where it is about none.
    pub fault: u64,
}
