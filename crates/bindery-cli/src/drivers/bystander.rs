//! A process that shares nothing with the others and knows the content of its own memory.

use bindery::addr::{PAGE_SIZE, VirtAddr};
use bindery::{AddressSpace, Advice, FaultError, MapRequest, Place, Protection};
use bindery_hosted::{Machine, Program, Walk};

/// The start of the bystander's memory.
const START: u64 = 1 << 30;

/// The number of the bystander's pages.
const PAGES: usize = 40;

/// The highest 16 bits of each word that the bystander writes. No other process writes this value.
const TAG: u64 = 0xb15d;

/// Whether a word was written by the bystander.
pub(super) fn is_tagged(word: u64) -> bool {
    word >> 48 == TAG
}

/// The process, and the first word of each of its pages; `None` if a failed device may have lost
/// the page.
pub(super) struct Bystander<'m, A: Walk> {
    pub(super) space: AddressSpace<'m, Machine<A>>,
    words: [Option<u64>; PAGES],
    /// The number of the bystander's turns.
    turns: u64,
    may_lose_pages: bool,
}

impl<'m, A: Walk> Bystander<'m, A> {
    /// The process, with its memory mapped but untouched.
    pub(super) fn new(space: AddressSpace<'m, Machine<A>>, may_lose_pages: bool) -> Self {
        let request = MapRequest {
            length: PAGES as u64 * PAGE_SIZE,
            protection: Protection::READ | Protection::WRITE,
            place: Place::Fixed(VirtAddr(START)),
            ..MapRequest::default()
        };
        space.mmap(&request).expect("memory enough");
        Self { space, words: [Some(0); PAGES], turns: 0, may_lose_pages }
    }

    /// Reads a page, which must hold the value written last, and occasionally writes it.
    pub(super) fn run(&mut self, machine: &Machine<A>) {
        self.turns += 1;
        let page = (self.turns * 7) as usize % PAGES;
        let at = VirtAddr(START + page as u64 * PAGE_SIZE);
        let program = Program::new(machine, &self.space);
        match program.load(at) {
            Ok(word) => {
                if let Some(expected) = self.words[page] {
                    assert_eq!(
                        word, expected,
                        "the bystander's page at {at} holds {word:#x}, not {expected:#x}"
                    );
                }
            }
            Err(FaultError::OutOfMemory) => return,
            Err(FaultError::Bus) if self.may_lose_pages => {
                self.words[page] = Some(0);
                let _ = self.space.madvise(at, PAGE_SIZE, Advice::DontNeed);
                return;
            }
            Err(fault) => panic!("the bystander's load at {at} failed: {fault}"),
        }
        if self.turns.is_multiple_of(3) {
            let word = TAG << 48 | self.turns;
            match program.store(at, word) {
                Ok(()) => self.words[page] = Some(word),
                Err(FaultError::OutOfMemory) => {}
                Err(fault) => panic!("the bystander's store at {at} failed: {fault}"),
            }
        }
    }
}
