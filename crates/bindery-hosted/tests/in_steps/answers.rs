//! The answers of `mincore`.

use bindery::addr::VirtAddr;

use super::action::{Cells, Span};
use super::calls::{EFAULT, EINTR, ENOMEM, Expected};
use super::model::{CELL, Source};
use super::verify::Seen;
use super::world::{AT, PAGE, World, address};

/// The bits of the answers that a page may have.
const ABSENT: u8 = 1;
const RESIDENT: u8 = 2;

/// The answers that a call may give.
pub struct Answers {
    span: Span,
    /// The place of the answers, in bytes of the arena.
    at: u64,
    /// By page.
    allowed: Vec<u8>,
    /// Whether one mapping has all pages. The first step then asks about all of them.
    is_at_once: bool,
}

impl World<'_, '_> {
    /// The results that a call may have that begins now.
    pub fn expected_answers(&self, by: usize, span: Span, at: u64) -> Expected {
        let is_mapped = |page: &u64| self.model.spaces[by].contains_key(page);
        // The answers before a hole are written.
        let known = span.all().take_while(is_mapped).count() as u64;
        let mut written = (at..at + known).map(|byte| byte / PAGE);
        let alone = if !written.all(|page| self.model.find(by, page, true).is_some()) {
            EFAULT
        } else if known < span.pages {
            ENOMEM
        } else {
            0
        };
        Expected { alone: vec![alone], otherwise: vec![0, ENOMEM, EFAULT, EINTR] }
    }

    /// The answers of a call that begins now.
    pub fn answers(&self, by: usize, span: Span, at: u64) -> Answers {
        let first = address(span.first);
        let end = self.space(by).view_mapping(first, |view| {
            if view.range().contains(first) { view.range().end() } else { first }
        });
        let is_at_once = end.is_some_and(|end| end >= address(span.first + span.pages));
        let allowed = vec![0; span.pages as usize];
        let mut answers = Answers { span, at, allowed, is_at_once };
        self.allow_answers(by, &mut answers);
        answers
    }

    /// Allows the answers that are right now.
    pub fn allow_answers(&self, by: usize, answers: &mut Answers) {
        let seen = self.entries(by);
        for (page, allowed) in answers.span.all().zip(&mut answers.allowed) {
            *allowed |= match seen.get(&page) {
                Some(Seen::Own | Seen::Object | Seen::Zero) => RESIDENT,
                // A page of an object or of the swap cache may be in memory without an entry.
                Some(Seen::Swapped) => ABSENT | RESIDENT,
                None => match self.model.spaces[by].get(&page).map(|page| page.source) {
                    Some(Source::Anonymous) => ABSENT,
                    _ => ABSENT | RESIDENT,
                },
            };
        }
    }

    /// Notes that the call may have written answers.
    pub fn forget_answers(&mut self, by: usize, answers: &Answers) {
        let (first, end) = (answers.at / CELL, (answers.at + answers.span.pages).div_ceil(CELL));
        let cells = Cells { first, count: end - first };
        self.forget(by, cells, self.accessible(by, cells, true));
    }

    /// Compares the answers of a call that has succeeded. Those in the last of their pages come
    /// from its last step, the only one if `is_first`.
    pub fn check_answers(&self, by: usize, answers: &Answers, is_first: bool) {
        if !(is_first || answers.is_at_once) {
            return;
        }
        let (space, last) = (self.space(by), answers.at + answers.span.pages - 1);
        space.enter();
        for ((page, allowed), at) in answers.span.all().zip(&answers.allowed).zip(answers.at..) {
            let (mut byte, is_of_last) = ([0], at / PAGE == last / PAGE);
            let read = self.machine.read_user(space.root(), VirtAddr(AT + at), &mut byte, Err);
            if read.is_ok() && (is_first || is_of_last) {
                let is_right = byte[0] < 2 && allowed & (ABSENT << byte[0]) != 0;
                assert!(is_right, "the answer for page {page} of {by} is {}", byte[0]);
            }
        }
    }
}
