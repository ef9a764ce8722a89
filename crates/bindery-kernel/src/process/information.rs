//! The information that a signal carries.

use super::{Process, scheduler};

/// The sender of a signal (`si_code`).
pub(super) mod code {
    pub const USER: i32 = 0;
    pub const KERNEL: i32 = 128;
    pub const TIMER: i32 = -2;
    pub const THREAD: i32 = -6;
    pub const EXITED: i32 = 1;
    pub const KILLED: i32 = 2;
    pub const STOPPED: i32 = 5;
    pub const CONTINUED: i32 = 6;
}

/// The information of a signal: the beginning of `siginfo_t`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Information {
    pub signal: u32,
    pub code: i32,
    /// The bytes from offset 16 on. Their meaning depends on the signal and the code.
    pub fields: [u64; 4],
    /// The timer of `timer_create` that sent the signal. Programs can claim only the code of one.
    timer: Option<i32>,
}

impl Information {
    /// The information with these fields.
    pub(super) fn new(signal: u32, code: i32, fields: [u64; 4]) -> Self {
        Self { signal, code, fields, timer: None }
    }

    /// From the kernel, without details.
    pub(super) fn of_kernel(signal: u32) -> Self {
        Self::new(signal, code::KERNEL, [0; 4])
    }

    /// From the running process.
    pub(super) fn of_program(signal: u32, code: i32) -> Self {
        let thread = scheduler::current();
        let (sender, user) = (thread.process.id, thread.credentials().user.real);
        Self::new(signal, code, [u64::from(sender) | u64::from(user) << 32, 0, 0, 0])
    }

    /// About a child whose state has changed: its exit status or the signal, and the CPU time in
    /// hundredths of a second.
    pub(super) fn of_child(
        signal: u32,
        code: i32,
        child: &Process,
        status: u32,
        time: u64,
    ) -> Self {
        let user = child.credentials().user.real;
        let fields = [u64::from(child.id) | u64::from(user) << 32, u64::from(status), time, 0];
        Self::new(signal, code, fields)
    }

    /// From a timer of `timer_create`, with this value.
    pub(super) fn of_timer(signal: u32, timer: i32, value: u64, overrun: u64) -> Self {
        let fields = [u64::from(timer as u32), value, 0, 0];
        let mut information = Self::new(signal, code::TIMER, fields);
        information.timer = Some(timer);
        information.set_overrun(overrun);
        information
    }

    /// The timer that sent the signal.
    pub(super) fn timer(&self) -> Option<i32> {
        self.timer
    }

    /// The expirations of the timer beyond the first one, until the signal is taken.
    pub(super) fn overrun(&self) -> u32 {
        (self.fields[0] >> 32) as u32
    }

    /// Sets [`Information::overrun`], at most to the largest number that programs can see.
    pub(super) fn set_overrun(&mut self, overrun: u64) {
        self.fields[0] = self.fields[0] & 0xffff_ffff | overrun.min(i32::MAX as u64) << 32;
    }

    /// The information as programs see it.
    pub(super) fn bytes(&self) -> [u8; 128] {
        let mut bytes = [0; 128];
        bytes[..4].copy_from_slice(&self.signal.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.code.to_le_bytes());
        for (index, field) in self.fields.iter().enumerate() {
            bytes[16 + 8 * index..24 + 8 * index].copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }
}
