//! Random steps. Addresses and lengths are close to each other, close to the bounds of tables and
//! of user space, or extreme.

use bindery_linux::{Call, UserfaultRequest};

use super::rng::Rng;
use super::step::{FileCall, PROCESSES, SegmentCall, Step};

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;

/// Addresses for mappings. All but the last are in the user space of each architecture.
const BASES: [u64; 8] = [
    0x10000,
    1 << 30,
    (1 << 30) + 3 * HUGE,
    (1 << 30) + 511 * HUGE,
    2 << 30,
    (64 << 30) - 4 * PAGE,
    (1 << 32) - 8 * PAGE,
    7 << 30,
];

/// `MAP_LOCKED`.
const LOCKED: u64 = 0x2000;
/// `MAP_POPULATE`.
const POPULATE: u64 = 0x8000;
/// `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE`.
const POPULATES: [u64; 2] = [22, 23];

/// Mappings longer than this are almost empty.
const VAST: u64 = 1 << 36;

/// The number of addresses from earlier calls that are used again.
const MOST_HOT: usize = 24;

/// The mix of steps, and the extremeness of their arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mix {
    /// For one CPU: all steps, at all addresses.
    Extreme,
    /// For several CPUs: few addresses, so that threads meet.
    Crowded,
}

/// A source of random steps.
#[derive(Clone, Debug)]
pub(super) struct Generator {
    rng: Rng,
    mix: Mix,
    user_end: u64,
    /// Addresses that calls have returned, with their lengths.
    hot: Vec<(u64, u64)>,
    /// The process of the last step and the requested length, if the step returns an address.
    asked: Option<(usize, u64)>,
    /// Steps to take before new ones.
    planned: Vec<Step>,
}

impl Generator {
    pub(super) fn new(rng: Rng, mix: Mix, user_end: u64) -> Self {
        Self { rng, mix, user_end, hot: Vec::new(), asked: None, planned: Vec::new() }
    }

    /// The next step, after the result of the last.
    pub(super) fn next(&mut self, result: i64) -> Step {
        if let Some((process, length)) = self.asked
            && result > PAGE as i64
        {
            if length > VAST && self.rng.once_in(2) {
                // Calls that are linear in the number of addresses rather than pages take long
                // here.
                let advice = self.rng.one(&[20, 21, 21, 4, 8, 14, 25, 102]);
                let arguments = [result as u64, length, advice, 0, 0, 0];
                self.planned.push(Step::Call { process, call: Call::Madvise, arguments });
            }
            if self.hot.len() == MOST_HOT {
                let old = self.rng.index(MOST_HOT);
                self.hot.swap_remove(old);
            }
            self.hot.push((result as u64, length));
        }
        let step = self.planned.pop().unwrap_or_else(|| self.step());
        self.asked = asked_length(&step);
        step
    }

    fn address(&mut self) -> u64 {
        match self.mix {
            Mix::Crowded => self.crowded_address(),
            Mix::Extreme => self.any_address(),
        }
    }

    fn crowded_address(&mut self) -> u64 {
        let bases = [1 << 30, (1 << 30) + 2 * HUGE, 0x10000, (1 << 30) + 510 * HUGE];
        match self.rng.below(10) {
            0..6 => self.rng.one(&bases) + self.rng.below(24) * PAGE,
            6 | 7 => self.rng.one(&bases) + self.rng.below(4) * HUGE,
            _ => (1 << 30) + self.rng.below(64) * 16 * PAGE,
        }
    }

    fn any_address(&mut self) -> u64 {
        let end = self.user_end;
        let extremes = [0, 1, PAGE, u64::MAX, u64::MAX - PAGE + 1, 1 << 63, 1 << 47, 1 << 38];
        match self.rng.below(24) {
            0 => self.rng.next(),
            1 => self.rng.one(&extremes),
            2 => end - self.rng.below(6) * PAGE,
            3 => end - self.rng.below(3) * HUGE,
            4..10 if !self.hot.is_empty() => {
                let hot = self.rng.index(self.hot.len());
                self.hot[hot].0.wrapping_add(self.rng.below(5) * PAGE)
            }
            5..13 => self.rng.one(&BASES) + self.rng.below(40) * PAGE,
            13..16 => self.rng.one(&BASES) + self.rng.below(8) * HUGE,
            16 => self.rng.one(&BASES) + self.rng.below(40 * PAGE),
            _ => (1 << 30) + self.rng.below(64) * 16 * PAGE,
        }
    }

    fn page(&mut self) -> u64 {
        self.address() & !(PAGE - 1)
    }

    fn length(&mut self) -> u64 {
        let few = [1, 1, 2, 3, 4, 8, 16, 17, 32, 64, 128, 512, 513, 1024];
        if self.mix == Mix::Crowded {
            return match self.rng.below(8) {
                0 | 1 => (1 + self.rng.below(3)) * HUGE,
                _ => self.rng.one(&few[..12]) * PAGE,
            };
        }
        let extremes = [0, 1, u64::MAX, u64::MAX - PAGE + 1, 1 << 63, i64::MAX as u64, 1 << 56];
        match self.rng.below(20) {
            0 => self.rng.one(&extremes),
            1 => self.rng.next() >> self.rng.below(64),
            2..6 => self.rng.below(6) * HUGE,
            6 => self.rng.below(3) << 30,
            7 => self.rng.below(40 * PAGE),
            8 => match self.rng.below(3) {
                0 => PAGE << self.rng.below(34),
                1 => (self.user_end >> self.rng.below(12)) & !(PAGE - 1),
                _ => HUGE << self.rng.below(10),
            },
            _ => self.rng.one(&few) * PAGE,
        }
    }

    /// A length to fill at once. A call that fills all memory and fails costs about the same as a
    /// thousand other calls.
    fn filled_length(&mut self) -> u64 {
        let length = self.length();
        if self.rng.once_in(24) { length } else { length % (4 * HUGE) }
    }

    /// A word to store. Its highest bits are never the bystander's.
    fn value(&mut self) -> u64 {
        self.rng.next() >> 16 | 1 << 62
    }

    fn process(&mut self) -> usize {
        self.rng.index(PROCESSES)
    }

    fn step(&mut self) -> Step {
        let process = self.process();
        match self.rng.below(100) {
            0..12 => self.mmap(process),
            12..16 if self.mix == Mix::Extreme || self.rng.once_in(3) => {
                self.call(process, Call::Munmap)
            }
            12..23 => self.mremap(process),
            23..27 => {
                let protections = [0, 0, 1, 3, 3, 3, 5, 7, 1 << 24 | 3, 1 << 25 | 1];
                let protection = self.rng.one(&protections);
                self.three(process, Call::Mprotect, protection)
            }
            27..39 => {
                let advice = self.advice();
                let mut step = self.three(process, Call::Madvise, advice);
                if let Step::Call { arguments, .. } = &mut step
                    && POPULATES.contains(&advice)
                {
                    arguments[1] = self.filled_length();
                }
                step
            }
            39..44 => self.rare_call(process),
            44..57 => Step::Store { process, at: self.address(), value: self.value() },
            57..60 => Step::Load { process, at: self.address() },
            60..63 => {
                let pages = self.rng.one(&[4, 16, 64, 512, 700]);
                Step::Fill { process, at: self.page(), pages, value: self.value() }
            }
            63..66 => Step::Fork { process, child: self.process() },
            66 if self.rng.once_in(2) => Step::Exit { process },
            66 => self.show(),
            67..70 => {
                let pages = self.rng.one(&[1, 1, 2, 3, 16, 16, 512, u32::MAX]);
                let (write, long) = (self.rng.once_in(2), self.rng.once_in(2));
                Step::Pin { process, at: self.address(), pages, write, long }
            }
            70..72 => Step::Unpin { number: self.rng.index(16) },
            72..74 => {
                let features = self.rng.next() as u32 & (1 << 8 | 1 << 11 | 1 << 13 | 1 << 15);
                let number = self.rng.index(4);
                match self.rng.below(4) {
                    0 => Step::CloseUserfault { process, number },
                    _ => Step::Userfault { process, features },
                }
            }
            74..83 => self.control(process),
            83..85 => self.scan(process),
            85..90 => self.file(),
            90 => {
                let (other, write) = (self.process(), self.rng.once_in(2));
                let (local, remote) = (self.address(), self.address());
                let counts = [self.rng.below(4), self.rng.below(4)];
                let arguments = [1, local, counts[0], remote, counts[1], 0];
                Step::ProcessVm { process, other, write, arguments }
            }
            91 | 92 => self.segment(process),
            93 => Step::Reclaim { pages: self.rng.one(&[1, 32, 500, 100_000]) },
            94 | 95 => self.swap(),
            96 => match self.rng.below(3) {
                0 => Step::Folios { order: self.rng.one(&[0, 0, 2, 4, 9]) },
                _ => Step::Split { process, at: self.address(), order: self.rng.below(10) as u8 },
            },
            97 if self.mix == Mix::Extreme => {
                let advice = self.rng.one(&[22, 23, 21, 25, 4]);
                let (start, length) = (self.address(), self.length());
                Step::Kill { process, after: self.rng.below(60), start, length, advice }
            }
            98 if self.mix == Mix::Extreme => {
                let locked = self.rng.one(&[0, PAGE, 64 * PAGE, u64::MAX]);
                Step::Limit { process, locked, privileged: self.rng.once_in(2) }
            }
            99 => match self.rng.below(3) {
                0 => Step::NewFile { file: self.rng.index(8) },
                _ => Step::Trim,
            },
            _ => {
                let first = self.page() / PAGE;
                Step::Proc { process, first, clear: self.rng.below(7) }
            }
        }
    }

    fn call(&mut self, process: usize, call: Call) -> Step {
        self.three(process, call, 0)
    }

    /// A call on a range, with a third argument.
    fn three(&mut self, process: usize, call: Call, third: u64) -> Step {
        let (start, length) = self.range();
        Step::Call { process, call, arguments: [start, length, third, 0, 0, 0] }
    }

    /// A start and a length; occasionally those of a whole mapping.
    fn range(&mut self) -> (u64, u64) {
        if !self.hot.is_empty() && self.rng.once_in(4) {
            return self.hot[self.rng.index(self.hot.len())];
        }
        (self.address(), self.length())
    }

    fn advice(&mut self) -> u64 {
        self.rng.one(&[
            0, 1, 2, 3, 4, 4, 8, 9, 10, 11, 14, 15, 18, 19, 20, 21, 21, 21, 22, 23, 24, 25, 102,
            103, 12, 13,
        ])
    }

    fn mmap(&mut self, process: usize) -> Step {
        let mut flags = self.rng.one(&[1, 2, 2, 2, 2, 3, 8]);
        let rare = [
            (0x10, 2),
            (0x20, 2),
            (0x100, 8),
            (LOCKED, 12),
            (0x4000, 4),
            (POPULATE, 6),
            (0x10000, 8),
            (0x20000, 8),
            (0x40000, 30),
            (0x80000, 20),
            (0x10_0000, 8),
        ];
        for (flag, times) in rare {
            if self.rng.once_in(times) {
                flags |= flag;
            }
        }
        let protection = match self.rng.below(4) {
            0 => self.rng.below(16),
            1 => self.rng.one(&[0, 1, 7]),
            _ => 3,
        };
        let offsets = [0, 0, 0, PAGE, HUGE, 3 * PAGE, i64::MAX as u64 & !(PAGE - 1), 1 << 43];
        let offset = self.rng.one(&offsets[..if self.mix == Mix::Crowded { 5 } else { 8 }]);
        let descriptor = 2 + self.rng.below(10);
        let is_filled = flags & (POPULATE | LOCKED) != 0;
        let start = self.address();
        let length = match is_filled {
            true => self.filled_length(),
            false if self.mix == Mix::Extreme && self.rng.once_in(24) => {
                (self.user_end >> (1 + self.rng.below(6))) & !(PAGE - 1)
            }
            false => self.length(),
        };
        let arguments = [start, length, protection, flags, descriptor, offset];
        Step::Call { process, call: Call::Mmap, arguments }
    }

    fn mremap(&mut self, process: usize) -> Step {
        let (from, old) = (self.address(), self.length());
        let new = if self.rng.once_in(3) { old } else { self.length() };
        let arguments = [from, old, new, self.rng.below(8), self.address(), 0];
        Step::Call { process, call: Call::Mremap, arguments }
    }

    fn rare_call(&mut self, process: usize) -> Step {
        use Call::*;
        let (a, b) = (self.address(), self.length());
        let (call, arguments) = match self.rng.below(12) {
            0 => (Mlockall, [self.rng.below(8), 0, 0, 0, 0, 0]),
            1 => (Munlockall, [0; 6]),
            2 | 3 => {
                let b = self.filled_length();
                (self.rng.one(&[Mlock, Munlock, Mlock2]), [a, b, self.rng.below(2), 0, 0, 0])
            }
            4 => (Mincore, [a, b, self.address(), 0, 0, 0]),
            5 => (Msync, [a, b, self.rng.below(8), 0, 0, 0]),
            6 | 7 => {
                let flags = self.rng.below(2) << 16;
                (RemapFilePages, [a, b, 0, self.rng.below(64), flags, 0])
            }
            8 if self.rng.once_in(8) => (Mseal, [a, b, 0, 0, 0, 0]),
            8 | 9 => (Brk, [a, 0, 0, 0, 0, 0]),
            _ => {
                let other = self.process() as u64;
                let advice = self.rng.one(&[4, 8, 20, 21, 3, 25]);
                let vector = self.address();
                return Step::AdviseOther { process, other, vector, start: a, length: b, advice };
            }
        };
        Step::Call { process, call, arguments }
    }

    fn control(&mut self, process: usize) -> Step {
        use UserfaultRequest::*;
        let requests = [
            Register,
            Register,
            Register,
            Unregister,
            Wake,
            Copy,
            Copy,
            ZeroPage,
            Move,
            Move,
            Move,
            Move,
            WriteProtect,
            WriteProtect,
            Continue,
            Continue,
            Poison,
            Api,
        ];
        let request = self.rng.one(&requests);
        let mut words = match request {
            Register => {
                let modes = self.rng.one(&[1, 1, 1, 2, 3, 4, 5, 7, 8]);
                let (start, length) = self.range();
                [start, length, modes, 0, 0]
            }
            Copy | Move => [self.page(), self.page(), self.length(), self.rng.below(4), 0],
            Api | Unregister | Wake | ZeroPage | WriteProtect | Continue | Poison => {
                [self.page(), self.length(), self.rng.below(4), 0, 0]
            }
        };
        if self.rng.once_in(20) {
            words = [self.address(), self.address(), self.length(), self.rng.next() >> 60, 0];
        }
        let caller = if self.rng.once_in(12) { self.process() } else { process };
        Step::Control { process, number: self.rng.index(4), caller, request, words }
    }

    fn scan(&mut self, process: usize) -> Step {
        let start = self.page();
        let end = start.wrapping_add(self.length());
        let mut words = [96, self.rng.below(4), start, end, 0, 0, 0, 0, 0, 0, 0, 0x3f];
        if self.rng.once_in(2) {
            words[5] = self.address();
            words[6] = self.rng.one(&[0, 1, 5, 100, u64::MAX / 24]);
        }
        words[7] = self.rng.one(&[0, 1, 5, 600]);
        for categories in &mut words[8..11] {
            if self.rng.once_in(3) {
                *categories = self.rng.below(512);
            }
        }
        Step::PagemapScan { process, words }
    }

    fn file(&mut self) -> Step {
        use FileCall::*;
        let calls =
            [Truncate, Truncate, Allocate, AllocateBeyond, Punch, Punch, Read, Write, Write, Sync];
        let call = match self.rng.below(40) {
            0 => Seal,
            1 | 2 => Seek,
            3 => WriteBack,
            4 => DiscardFailed,
            5 => Evict,
            _ => self.rng.one(&calls),
        };
        let max = i64::MAX as u64;
        let extremes = [max, max - PAGE, 1 << 62, 1 << 44];
        let offset = match self.rng.below(12) {
            0 => self.rng.one(&extremes),
            1 => self.length(),
            2..5 => self.rng.below(8 * HUGE),
            _ => self.rng.one(&[0, 1, PAGE, HUGE, HUGE - 1, 5 * PAGE + 3, 16 * PAGE, 4 * HUGE]),
        };
        Step::File { file: self.rng.index(8), call, offset, length: self.length() }
    }

    fn show(&mut self) -> Step {
        Step::Show {
            device: self.rng.index(2),
            slot: self.rng.one(&[0, 0, 0, 1, 1, 2, 3, 7]),
            order: self.rng.one(&[0, 2, 4, 5, 6, 6, 7, 9, 11, 11]),
            page: self.rng.one(&[0, 0, 16, 64, 3]),
        }
    }

    fn segment(&mut self, process: usize) -> Step {
        let (call, arguments) = match self.rng.below(5) {
            0 => {
                let flags = self.rng.one(&[0o1666, 0o666, 0o3666, 0o11666]);
                (SegmentCall::Get, [self.rng.below(4), self.length(), flags])
            }
            1 | 2 => {
                let at = self.rng.one(&[0, BASES[2], BASES[4]]);
                let flags = self.rng.one(&[0, 0o10000, 0o20000, 0o40000]);
                (SegmentCall::Attach, [self.rng.below(6), at, flags])
            }
            3 => (SegmentCall::Detach, [0, self.address(), 0]),
            _ => {
                let command = self.rng.one(&[0, 1, 2, 3, 11, 12, 13, 14, 15]);
                (SegmentCall::Control, [self.rng.below(8), command, self.address()])
            }
        };
        Step::Segment { process, call, arguments }
    }

    fn swap(&mut self) -> Step {
        let number = self.rng.index(4);
        match self.rng.below(8) {
            0..3 => {
                let slots = self.rng.one(&[64, 4000, 4000]);
                let priority = self.rng.below(3) as i16;
                Step::SwapOn { device: self.rng.once_in(2), slots, priority }
            }
            3 | 4 => Step::SwapOff { number, between: self.rng.one(&[0, 1, 32, 200]) },
            5 => {
                // Pages leave the area while it is stopped.
                self.planned.push(Step::ResumeSwapping { number });
                for _ in 0..self.rng.below(3) {
                    let process = self.process();
                    let advice = self.three(process, Call::Madvise, 21);
                    self.planned.push(advice);
                }
                Step::StopSwapping { number }
            }
            _ => Step::Reclaim { pages: self.rng.one(&[1, 32, 500]) },
        }
    }
}

/// The process and the length of a step that requests a place for a mapping.
fn asked_length(step: &Step) -> Option<(usize, u64)> {
    if let Step::Segment { process, call: SegmentCall::Attach, .. } = *step {
        return Some((process, HUGE));
    }
    let Step::Call { process, call, arguments } = *step else { return None };
    if call == Call::Mmap {
        Some((process, arguments[1]))
    } else if call == Call::Mremap {
        Some((process, arguments[2]))
    } else {
        None
    }
}
