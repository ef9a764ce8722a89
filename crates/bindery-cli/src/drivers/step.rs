//! The steps of a sequence: calls with all their arguments.

use bindery_linux::{Call, UserfaultRequest};

/// The processes of a world.
pub const PROCESSES: usize = 4;

/// One call or access. The number of a process, a file, a pin, an area or a userfaultfd is taken
/// modulo the number of such items. A step on a process that has exited has no effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the fields are arguments, under the names that the calls have")]
pub enum Step {
    /// A call by number ([`bindery_linux::call`]).
    Call { process: usize, call: Call, arguments: [u64; 6] },
    /// `process_madvise` of one range, with the vector at `vector`.
    AdviseOther { process: usize, other: u64, vector: u64, start: u64, length: u64, advice: u64 },
    /// A store of eight bytes, followed by a load of the same bytes.
    Store { process: usize, at: u64, value: u64 },
    /// A load of eight bytes.
    Load { process: usize, at: u64 },
    /// A store to each of `pages` pages.
    Fill { process: usize, at: u64, pages: u64, value: u64 },
    /// `fork`: the child replaces another process.
    Fork { process: usize, child: usize },
    /// The process exits, unless it is the last.
    Exit { process: usize },
    /// A driver pins pages.
    Pin { process: usize, at: u64, pages: u32, write: bool, long: bool },
    /// A driver unpins pages.
    Unpin { number: usize },
    /// `userfaultfd` with these features, always including `SIGBUS`.
    Userfault { process: usize, features: u32 },
    /// `close` of a userfaultfd.
    CloseUserfault { process: usize, number: usize },
    /// `ioctl_userfaultfd`, with the structure in `words`; a copy's source is in the memory of
    /// `caller`.
    Control {
        process: usize,
        number: usize,
        caller: usize,
        request: UserfaultRequest,
        words: [u64; 5],
    },
    /// `ioctl(PAGEMAP_SCAN)`, with the structure in `words`.
    PagemapScan { process: usize, words: [u64; 12] },
    /// A call on a file by descriptor.
    File { file: usize, call: FileCall, offset: u64, length: u64 },
    /// Closes a file and replaces it by a new one.
    NewFile { file: usize },
    /// `process_vm_readv` or `process_vm_writev`.
    ProcessVm { process: usize, other: usize, write: bool, arguments: [u64; 6] },
    /// A call of System V shared memory.
    Segment { process: usize, call: SegmentCall, arguments: [u64; 3] },
    /// Reclaim of `pages` pages.
    Reclaim { pages: u64 },
    /// `swapon` of `slots` slots, of the device or of compressed memory.
    SwapOn { device: bool, slots: u64, priority: i16 },
    /// `swapoff`, with all its preparations. After each process' pages were swapped in, `between`
    /// pages are reclaimed, as can happen at any time.
    SwapOff { number: usize, between: u64 },
    /// The first step of `swapoff`; the others follow later or never.
    StopSwapping { number: usize },
    /// Undoes [`Step::StopSwapping`].
    ResumeSwapping { number: usize },
    /// Reads files of `/proc/self` and writes to `clear_refs`.
    Proc { process: usize, first: u64, clear: u64 },
    /// Sets the only size of large folios from here on; 0 for none.
    Folios { order: u8 },
    /// Splits the folio at an address.
    Split { process: usize, at: u64, order: u8 },
    /// Limits of locked memory.
    Limit { process: usize, locked: u64, privileged: bool },
    /// `madvise` that a fatal signal ends after `after` checks for it.
    Kill { process: usize, after: u64, start: u64, length: u64, advice: u64 },
    /// A device shows a new block of 2^`order` frames in a slot, starting at page `page` of the
    /// slot, or no block for an order above 10. The slot's earlier block is revoked.
    Show { device: usize, slot: usize, order: u8, page: u64 },
    /// Frees all memory kept for later.
    Trim,
}

/// Calls on files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileCall {
    /// `ftruncate` to the offset.
    Truncate,
    /// `fallocate`.
    Allocate,
    /// `fallocate` that keeps the size.
    AllocateBeyond,
    /// `fallocate` that makes a hole.
    Punch,
    /// `pread`.
    Read,
    /// `pwrite`.
    Write,
    /// `fsync` of a range.
    Sync,
    /// Pages of the file system are stored, at most the length.
    WriteBack,
    /// Discards pages that failed to be stored.
    DiscardFailed,
    /// The clean pages of a range are dropped.
    Evict,
    /// `fcntl(F_ADD_SEALS)` of the length's low bits.
    Seal,
    /// `lseek` to the next data and the next hole.
    Seek,
}

/// Calls of System V shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SegmentCall {
    /// `shmget`.
    Get,
    /// `shmat`.
    Attach,
    /// `shmdt`.
    Detach,
    /// `shmctl`.
    Control,
}

impl Step {
    /// The step as Rust code, with its numbers in hexadecimal.
    pub fn code(&self) -> String {
        // Only the alternate form writes `0x` before numbers, but it also breaks lines.
        let mut code = String::new();
        for word in format!("{self:#x?}").split_whitespace() {
            if matches!(word, "]" | "],") && code.ends_with(", ") {
                code.truncate(code.len() - 2);
            }
            code.push_str(word);
            if !word.ends_with('[') && !matches!(word, "]") {
                code.push(' ');
            }
        }
        code.trim_end().replace(", }", " }")
    }

    /// The process that takes the step, and its addresses.
    pub(super) fn touches(&self) -> (Option<usize>, [u64; 4]) {
        match *self {
            Self::Call { process, arguments: [a, b, _, _, e, _], .. } => {
                (Some(process), [a, a.wrapping_add(b).wrapping_sub(1), e, e.wrapping_add(b)])
            }
            Self::AdviseOther { process, start, length, .. } => {
                (Some(process), [start, start.wrapping_add(length), start, start])
            }
            Self::Store { process, at, .. }
            | Self::Load { process, at }
            | Self::Fill { process, at, .. }
            | Self::Pin { process, at, .. }
            | Self::Split { process, at, .. } => {
                (Some(process), [at, at.wrapping_add(0x1000), at.wrapping_add(0x5000), at])
            }
            Self::Fork { child, .. } => (Some(child), [1 << 30, 0x10000, 2 << 30, 1 << 30]),
            Self::Control { process, words: [a, b, c, ..], .. } => {
                (Some(process), [a, b, a.wrapping_add(c), a.wrapping_add(b)])
            }
            Self::PagemapScan { process, words } => {
                (Some(process), [words[2], words[3], words[5], words[2]])
            }
            Self::Kill { process, start, length, .. } => {
                (Some(process), [start, start.wrapping_add(length), start, start])
            }
            Self::Segment { process, arguments: [_, at, _], .. } => (Some(process), [at; 4]),
            Self::ProcessVm { process, .. }
            | Self::Exit { process }
            | Self::Userfault { process, .. }
            | Self::CloseUserfault { process, .. }
            | Self::Proc { process, .. }
            | Self::Limit { process, .. } => (Some(process), [1 << 30; 4]),
            Self::Unpin { .. }
            | Self::File { .. }
            | Self::NewFile { .. }
            | Self::Reclaim { .. }
            | Self::SwapOn { .. }
            | Self::SwapOff { .. }
            | Self::StopSwapping { .. }
            | Self::ResumeSwapping { .. }
            | Self::Folios { .. }
            | Self::Show { .. }
            | Self::Trim => (None, [0; 4]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_printed_as_code() {
        let step = Step::Call {
            process: 1,
            call: Call::Mremap,
            arguments: [0x4000_0000, 0x1000, u64::MAX, 1, 0, 0],
        };
        assert_eq!(
            step.code(),
            "Call { process: 0x1, call: Mremap, arguments: [0x40000000, 0x1000, \
             0xffffffffffffffff, 0x1, 0x0, 0x0] }"
        );
        assert_eq!(Step::Trim.code(), "Trim");
    }
}
