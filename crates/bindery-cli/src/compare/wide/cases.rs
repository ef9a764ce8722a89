//! Operations that no workload covers, each as a short program for the interpreter.

use super::super::interpreter::step::{Class, Step};
use crate::size::{GIB, KIB, MIB};

/// A program with some steps that form an operation of the table.
#[derive(Clone, Debug)]
pub struct Case {
    pub steps: Vec<Step>,
    /// The operation of each step.
    pub names: Vec<Option<&'static str>>,
}

const PAGE: u64 = 4 * KIB;
/// The place of most mappings: a multiple of 1 GiB.
const AT: u64 = 64 * GIB;
/// Another place.
const TO: u64 = 96 * GIB;
const PRIVATE: u64 = 0x32;
const SHARED: u64 = 0x31;
const PRIVATE_FILE: u64 = 0x12;
const SHARED_FILE: u64 = 0x11;
const READ_WRITE: u64 = 3;
/// The repetitions of each operation. The first repetitions are cold.
const ROUNDS: usize = 8;

#[derive(Default)]
struct Builder(Vec<Step>, Vec<Option<&'static str>>);

impl Builder {
    fn step(&mut self, process: usize, operation: char, arguments: &[u64]) -> &mut Self {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        let class = Class { operation: "", memory: "" };
        self.0.push(Step { process, operation, arguments: all, class, detail: String::new() });
        self.1.push(None);
        self
    }

    /// Makes the last step part of this operation.
    fn is(&mut self, name: &'static str) -> &mut Self {
        if let Some(last) = self.1.last_mut() {
            *last = Some(name);
        }
        self
    }

    fn map(&mut self, at: u64, length: u64, flags: u64) -> &mut Self {
        let file = u64::from(flags & 0x20 == 0);
        self.step(0, 'M', &[at, length, READ_WRITE, flags, file, 0])
    }

    fn write(&mut self, at: u64, length: u64) -> &mut Self {
        self.step(0, 'W', &[at, length, PAGE, 1])
    }

    fn read(&mut self, at: u64, length: u64) -> &mut Self {
        self.step(0, 'D', &[at, length, PAGE])
    }

    fn advise(&mut self, at: u64, length: u64, advice: u64) -> &mut Self {
        self.step(0, 'A', &[at, length, advice])
    }

    fn unmap(&mut self, at: u64, length: u64) -> &mut Self {
        self.step(0, 'U', &[at, length])
    }

    fn done(self) -> Case {
        Case { steps: self.0, names: self.1 }
    }
}

const WILLNEED: u64 = 3;
const DONTNEED: u64 = 4;
const FREE: u64 = 8;
const COLD: u64 = 20;
const PAGEOUT: u64 = 21;

/// A case with repeated rounds.
fn repeated(round: impl Fn(&mut Builder)) -> Case {
    let mut builder = Builder::default();
    for _ in 0..ROUNDS {
        round(&mut builder);
    }
    builder.done()
}

/// All cases.
pub fn all() -> Vec<Case> {
    let mut cases = vec![
        repeated(|case| {
            case.map(AT, GIB, PRIVATE).advise(AT, GIB, DONTNEED);
            case.is("MADV_DONTNEED of 1 GiB, untouched").unmap(AT, GIB);
        }),
        repeated(|case| {
            case.map(AT, MIB, PRIVATE).write(AT, MIB);
            case.advise(AT, MIB, FREE).is("MADV_FREE of 1 MiB").unmap(AT, MIB);
        }),
        repeated(|case| {
            case.map(AT, MIB, PRIVATE).write(AT, MIB);
            case.advise(AT, MIB, COLD).is("MADV_COLD of 1 MiB").unmap(AT, MIB);
        }),
        repeated(|case| {
            case.map(AT, 32 * MIB, PRIVATE).write(AT, 32 * MIB);
            case.advise(AT, 32 * MIB, COLD).is("MADV_COLD of 32 MiB").unmap(AT, 32 * MIB);
        }),
        reuse(),
        reuse_all(),
        repeated(|case| {
            case.map(AT, PAGE, PRIVATE).write(AT, PAGE);
            case.advise(AT, PAGE, DONTNEED).is("MADV_DONTNEED of a table's only page");
            case.write(AT, PAGE).is("first touch of a table's only page").unmap(AT, PAGE);
            case.is("munmap of one page");
        }),
        repeated(|case| {
            case.map(AT, MIB, PRIVATE).write(AT, MIB).step(0, 'P', &[AT, MIB, 1]);
            case.is("mprotect of 1 MiB to read").step(0, 'P', &[AT, MIB, READ_WRITE]);
            case.is("mprotect of 1 MiB to read and write").unmap(AT, MIB);
        }),
        repeated(|case| {
            case.map(AT, MIB, PRIVATE).write(AT, MIB).step(0, 'I', &[AT, MIB]);
            case.is("mincore of 1 MiB").unmap(AT, MIB);
        }),
        files(),
        swapped_shared(),
        will_need(),
        sparse_swap_in(),
        realistic(),
        mixed(),
        brought_back_here_and_there(),
        every_second_folio(),
        swapped_after_fork(),
        read_by_a_child(),
        userfaults(),
        many_mappings(),
        repeated(|case| {
            case.step(0, 'C', &[]).is("null call");
        }),
    ];
    cases.extend([
        fork(MIB, "fork, exit and wait, 1 MiB"),
        fork(64 * MIB, "fork, exit and wait, 64 MiB"),
        fork(GIB, "fork, exit and wait, 1 GiB"),
    ]);
    cases
}

/// A child has exited, so its parent's pages are exclusive again.
fn reuse() -> Case {
    repeated(|case| {
        case.map(AT, MIB, PRIVATE).write(AT, MIB);
        case.step(0, 'F', &[1]).step(0, 'X', &[1]);
        case.write(AT, PAGE).is("write to a page after the other sharer has gone").unmap(AT, MIB);
    })
}

/// As [`reuse`], for many pages, which are written in order.
fn reuse_all() -> Case {
    const LENGTH: u64 = 64 * MIB;
    repeated(|case| {
        case.map(AT, LENGTH, PRIVATE).write(AT, LENGTH);
        case.step(0, 'F', &[1]).step(0, 'X', &[1]);
        case.write(AT, LENGTH).is("writes to 64 MiB after the other sharer has gone");
        case.unmap(AT, LENGTH);
    })
}

fn files() -> Case {
    let mut case = Builder::default();
    case.step(0, 'K', &[0, 16 * MIB]);
    case.map(AT, 16 * MIB, SHARED_FILE).write(AT, 16 * MIB).unmap(AT, 16 * MIB);
    for _ in 0..ROUNDS {
        case.map(AT, MIB, PRIVATE_FILE).read(AT, MIB).is("reads of 1 MiB of a private file");
        case.unmap(AT, MIB);
        case.map(AT, MIB, SHARED_FILE).read(AT, MIB).is("reads of 1 MiB of a memfd, mapped again");
        case.unmap(AT, MIB);
    }
    case.step(0, 'H', &[0, 0, 16 * MIB]).is("a hole of 16 MiB in a memfd");
    case.done()
}

/// Shared memory is swapped out and in.
fn swapped_shared() -> Case {
    let mut case = Builder::default();
    case.map(AT, 16 * MIB, SHARED);
    for _ in 0..4 {
        case.step(0, 'W', &[AT, 16 * MIB, PAGE, 0]).advise(AT, 16 * MIB, PAGEOUT);
        case.is("pageout of 16 MiB of shared memory").read(AT, 16 * MIB);
        case.is("swap-in of 16 MiB of shared memory");
    }
    case.done()
}

/// Pages in swap are announced before they are read.
fn will_need() -> Case {
    let mut case = Builder::default();
    case.map(AT, 16 * MIB, PRIVATE).map(TO, 16 * MIB, SHARED);
    for _ in 0..4 {
        case.step(0, 'W', &[AT, 16 * MIB, PAGE, 0]).step(0, 'W', &[TO, 16 * MIB, PAGE, 0]);
        case.advise(AT, 16 * MIB, PAGEOUT).advise(AT, 16 * MIB, WILLNEED);
        case.is("MADV_WILLNEED of 16 MiB in swap").read(AT, 16 * MIB);
        case.is("reads of 16 MiB after MADV_WILLNEED");
        case.advise(TO, 16 * MIB, PAGEOUT).advise(TO, 16 * MIB, WILLNEED);
        case.is("MADV_WILLNEED of 16 MiB of shared memory in swap").read(TO, 16 * MIB);
        case.is("reads of 16 MiB of shared memory after MADV_WILLNEED");
    }
    case.done()
}

/// Pages that were swapped out one by one are swapped in at scattered places.
fn sparse_swap_in() -> Case {
    let mut case = Builder::default();
    const COUNT: u64 = 64;
    case.map(AT, 16 * MIB, PRIVATE).step(0, 'W', &[AT, 16 * MIB, PAGE, 0]);
    for page in 0..COUNT {
        case.advise(AT + page * 64 * KIB, PAGE, PAGEOUT).is("pageout of a page");
    }
    for page in 0..COUNT {
        case.read(AT + page * 64 * KIB, PAGE).is("read of a page that went out alone");
    }
    case.done()
}

/// Pages whose content resembles that of programs.
fn realistic() -> Case {
    let mut case = Builder::default();
    case.map(AT, 4 * MIB, PRIVATE).step(0, 'W', &[AT, 4 * MIB, PAGE, 2]);
    for _ in 0..4 {
        case.advise(AT, 4 * MIB, PAGEOUT).is("pageout of 4 MiB of realistic content");
        case.read(AT, 4 * MIB).is("swap-in of 4 MiB of realistic content");
    }
    case.done()
}

/// Pages of text, of pointers, of random words and of zeroes.
fn mixed() -> Case {
    let mut case = Builder::default();
    case.map(AT, 32 * MIB, PRIVATE).step(0, 'W', &[AT, 32 * MIB, PAGE, 3]);
    for _ in 0..2 {
        case.advise(AT, 32 * MIB, PAGEOUT).is("pageout of 32 MiB of mixed content");
        case.read(AT, 32 * MIB).is("swap-in of 32 MiB of mixed content");
    }
    case.done()
}

/// Pages that were swapped out by calls of 4 KiB, and are mostly not needed again.
fn brought_back_here_and_there() -> Case {
    let mut case = Builder::default();
    case.map(AT, 8 * MIB, PRIVATE).step(0, 'W', &[AT, 8 * MIB, PAGE, 3]);
    case.step(0, 'G', &[AT, 8 * MIB, PAGEOUT, PAGE]).is("pageout of 8 MiB by calls of 4 KiB");
    case.step(0, 'D', &[AT + 5 * PAGE, 8 * MIB, 2 * MIB]).is("a byte in each 2 MiB of it");
    case.done()
}

/// Every second 64 KiB of the swapped-out memory are swapped in.
fn every_second_folio() -> Case {
    let mut case = Builder::default();
    case.map(AT, 8 * MIB, PRIVATE).step(0, 'W', &[AT, 8 * MIB, PAGE, 3]);
    case.advise(AT, 8 * MIB, PAGEOUT);
    for folio in (0..128).step_by(2) {
        case.read(AT + folio * 64 * KIB, 64 * KIB).is("swap-in of every second 64 KiB");
    }
    case.done()
}

/// The child reads pages that were in swap at the fork.
fn read_by_a_child() -> Case {
    let mut case = Builder::default();
    case.map(AT, 8 * MIB, PRIVATE).step(0, 'W', &[AT, 8 * MIB, PAGE, 3]);
    case.advise(AT, 8 * MIB, PAGEOUT).step(0, 'F', &[1]).step(1, 'D', &[AT, 8 * MIB, PAGE]);
    case.is("a child's reads of 8 MiB in swap").step(0, 'X', &[1]);
    case.done()
}

fn swapped_after_fork() -> Case {
    let mut case = Builder::default();
    case.map(AT, 32 * MIB, PRIVATE).write(AT, 32 * MIB).step(0, 'F', &[1]);
    for _ in 0..4 {
        case.advise(AT, 32 * MIB, PAGEOUT).is("pageout of 32 MiB that two processes map");
    }
    case.step(0, 'X', &[1]);
    case.done()
}

fn userfaults() -> Case {
    let mut case = Builder::default();
    const PAGES: u64 = 64;
    const LENGTH: u64 = PAGES * PAGE;
    const MISSING_AND_WRITE_PROTECT: u64 = 3;
    case.map(TO, LENGTH, PRIVATE).step(0, 'O', &[TO, LENGTH, MISSING_AND_WRITE_PROTECT]);
    for page in 0..PAGES {
        case.step(0, 'Z', &[TO + page * PAGE, PAGE, 0]).is("UFFDIO_ZEROPAGE of a page");
    }
    case.advise(TO, LENGTH, DONTNEED);
    for page in 0..PAGES {
        case.step(0, 'Z', &[TO + page * PAGE, PAGE, 0]);
        case.step(0, 'E', &[TO + page * PAGE, PAGE, 1]).is("UFFDIO_WRITEPROTECT of a page");
    }
    for page in 0..PAGES {
        case.step(0, 'E', &[TO + page * PAGE, PAGE, 0])
            .is("UFFDIO_WRITEPROTECT of a page, removed");
    }
    case.done()
}

/// Calls among 30,000 mappings.
fn many_mappings() -> Case {
    let mut case = Builder::default();
    const COUNT: u64 = 30_000;
    // Every other page, so that no two are merged.
    case.step(0, 'B', &[AT, COUNT, 2 * PAGE]);
    for round in 0..32 {
        let at = AT + (round * 937 * 2 + 1) * PAGE;
        case.step(0, 'M', &[at, PAGE, 1, PRIVATE, 0, 0]).is("mmap among 30,000 mappings");
        case.unmap(at, PAGE).is("munmap among 30,000 mappings");
    }
    case.done()
}

fn fork(bytes: u64, name: &'static str) -> Case {
    let mut case = Builder::default();
    case.map(AT, bytes, PRIVATE).write(AT, bytes);
    for _ in 0..4 {
        case.step(0, 'F', &[1]).is(name).step(0, 'X', &[1]).is(name);
    }
    case.done()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_case_has_an_operation_and_fits() {
        for case in all() {
            assert!(case.names.iter().any(Option::is_some));
            assert!(case.steps.len() <= 1024 && case.steps.len() == case.names.len());
        }
    }

    #[test]
    fn no_operation_is_in_two_cases() {
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        for (number, case) in all().iter().enumerate() {
            for name in case.names.iter().flatten() {
                assert_eq!(*places.entry(name).or_insert(number), number, "{name}");
            }
        }
        assert!(places.len() >= 24, "{}", places.len());
    }
}
