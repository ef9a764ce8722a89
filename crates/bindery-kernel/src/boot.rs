//! The boot information in one form for all architectures: memory, initramfs, command line, CPUs.

use bindery::FrameRange;

/// The maximum number of memory ranges; further ones stay unused.
pub const MAX_RANGES: usize = 32;

/// A range of physical memory, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stretch {
    /// The address of the first byte.
    pub start: u64,
    /// The address one past the last byte.
    pub end: u64,
}

/// The facts about the machine that the entry code passes to [`crate::start`].
#[derive(Clone, Copy, Debug)]
pub struct Information {
    /// The usable memory that the firmware reports. The kernel's image, the initramfs and other
    /// memory in use lie in it; [`Information::free_memory`] excludes them.
    pub memory: [Stretch; MAX_RANGES],
    /// The parts of `memory` in use: the image, the initramfs, boot data that is still read, the
    /// trampoline.
    pub reserved: [Stretch; 8],
    /// The initramfs; empty if there is none.
    pub initramfs: Stretch,
    /// The command line, in memory that is never reused.
    pub command_line: &'static str,
    /// The number of CPUs.
    pub cpus: usize,
}

impl Information {
    /// No information yet.
    pub const EMPTY: Self = Self {
        memory: [Stretch { start: 0, end: 0 }; MAX_RANGES],
        reserved: [Stretch { start: 0, end: 0 }; 8],
        initramfs: Stretch { start: 0, end: 0 },
        command_line: "",
        cpus: 1,
    };

    /// The same machine without the first `bytes` of its memory, which stay unused.
    pub fn without_first(mut self, bytes: u64) -> Self {
        let used = self.memory.iter().filter(|stretch| stretch.start < stretch.end);
        let first = used.map(|stretch| stretch.start).min().unwrap_or(0).saturating_add(bytes);
        for stretch in &mut self.memory {
            stretch.start = stretch.start.max(first);
        }
        self
    }

    /// Whole free frames, in rising order. `taken` is one more range in use (the heap).
    pub fn free_memory(&self, taken: Stretch, out: &mut [FrameRange; MAX_RANGES]) -> usize {
        let mut count = 0;
        let mut memory = self.memory;
        // Picks the lowest range each time: the ranges are few, and a sort would need more code.
        while let Some(stretch) =
            memory.iter_mut().filter(|left| left.start < left.end).min_by_key(|left| left.start)
        {
            let stretch = core::mem::take(stretch);
            let mut at = stretch.start.next_multiple_of(4096);
            let end = stretch.end & !4095;
            while at < end && count < MAX_RANGES {
                let used =
                    || self.reserved.iter().chain([&taken]).filter(|used| used.start < used.end);
                if let Some(inside) = used().find(|used| used.start <= at && at < used.end) {
                    at = inside.end.next_multiple_of(4096);
                    continue;
                }
                let next = used().filter(|used| used.start > at).map(|used| used.start & !4095);
                let until = next.min().unwrap_or(end).min(end);
                if until > at {
                    let first = bindery::addr::Frame((at >> 12) as u32);
                    out[count] = FrameRange { first, count: ((until - at) >> 12) as u32 };
                    count += 1;
                }
                at = until.max(at + 4096);
            }
        }
        count
    }
}
