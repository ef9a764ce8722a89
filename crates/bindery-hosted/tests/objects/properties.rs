//! Random sequences on an object that two address spaces map shared and a third maps privately.
//! Programs and callers see the model's content, and the auditor finds nothing after any step.

use std::collections::BTreeMap;

use bindery::addr::VirtAddr;
use bindery::{
    AddressSpace, FaultError, FileAccess, MapObject, MapRequest, Object, Place, Seals, Sharing,
};
use bindery_hosted::{Machine, MemoryFiles, Program, Walk};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use crate::support::objects::{self, Model, Op, PAGE, apply, content, memfd, op};
use crate::support::{GIB, MIB, READ_WRITE, audit, options, strict};

on_every_architecture! {
    mapped_shared_memory_agrees_with_the_model => shared_memory;
    a_mapped_file_agrees_with_the_model => file;
}

const AT: u64 = GIB;
/// Beyond the reach of every operation.
const PAGES: u64 = 300;
/// The address space that maps the object privately, and the number of address spaces.
const PRIVATE: usize = 2;
const SPACES: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Step {
    Object(Op),
    /// In a space, the word of this number.
    Load(usize, u64),
    Store(usize, u64, u64),
    /// In a space, unmaps this number of pages from a page on and maps them again.
    Unmap(usize, u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let page = prop_oneof![
        3 => prop::sample::select(vec![0_u64, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 63, 64, 128]),
        1 => 0..140_u64,
    ];
    let word = (page.clone(), prop::sample::select(vec![0_u64, 1, 12, 13, 511]))
        .prop_map(|(page, word)| page * 512 + word);
    // The mappings are writable, so most seals would be refused.
    let op = op().prop_filter("no seals", |op| !matches!(op, Op::AddSeals(_)));
    prop_oneof![
        8 => op.prop_map(Step::Object),
        5 => (0..SPACES, word.clone()).prop_map(|(space, word)| Step::Load(space, word)),
        8 => (0..SPACES, word, 1..=u64::MAX).prop_map(|(s, word, value)| Step::Store(s, word, value)),
        1 => (0..SPACES, page, 1..40_u64).prop_map(|(s, page, count)| Step::Unmap(s, page, count)),
    ]
}

/// The object's bytes up to the end of its last page, and the private mapping's pages.
#[derive(Default)]
struct Expected {
    object: Model,
    /// Bytes that programs wrote beyond the end, up to the end of the page.
    tail: Vec<u8>,
    copies: BTreeMap<u64, Vec<u8>>,
}

impl Expected {
    fn page(&self, page: u64) -> Option<Vec<u8>> {
        let bytes = self.object.bytes.iter().chain(&self.tail);
        let there: Vec<_> =
            bytes.skip((page * PAGE) as usize).take(PAGE as usize).copied().collect();
        (!there.is_empty()).then_some(there)
    }

    fn set_page(&mut self, page: u64, content: &[u8]) {
        for (at, byte) in (page * PAGE..).zip(content) {
            let at = at as usize;
            match at.checked_sub(self.object.bytes.len()) {
                Some(behind) => self.tail[behind] = *byte,
                None => self.object.bytes[at] = *byte,
            }
        }
    }

    /// The content that an access through the private mapping or another one sees.
    fn seen(&self, space: usize, page: u64) -> Option<Vec<u8>> {
        let copy = self.copies.get(&page).filter(|_| space == PRIVATE);
        copy.cloned().or_else(|| self.page(page))
    }

    fn apply(&mut self, op: Op) -> objects::Outcome {
        let old = self.object.bytes.len();
        let outcome = self.object.apply(op);
        let new = self.object.bytes.len();
        let room = new.next_multiple_of(PAGE as usize) - new;
        let cut = matches!(op, Op::SetSize(_)) && new <= old;
        if cut || self.object.is_file && new > old {
            self.tail = vec![0; room];
        } else if new > old {
            // When shared memory grows, bytes written beyond its old end become visible, except
            // where the call itself wrote.
            let written = match op {
                Op::Write(offset, ..) => offset as usize,
                _ => new,
            };
            let shown = self.tail.len().min(new - old);
            for at in 0..shown {
                if old + at < written {
                    self.object.bytes[old + at] = self.tail[at];
                }
            }
            self.tail.drain(..shown);
            self.tail.resize(room, 0);
        } else if let Op::Punch(offset, length) = op
            && length > 0
            && !self.object.is_file
        {
            // Holes may extend beyond the end.
            for at in 0..self.tail.len() {
                let place = (new + at) as u64;
                if (offset..offset + length).contains(&place) {
                    self.tail[at] = 0;
                }
            }
        } else if let Op::Punch(offset, length) = op
            && length > 0
            && (offset..offset + length).contains(&(new as u64).saturating_sub(1))
            && new > 0
        {
            // A hole up to the end of the file also removes the bytes beyond the end.
            self.tail.fill(0);
        }
        if cut {
            self.copies.retain(|page, _| *page < (new as u64).div_ceil(PAGE));
        }
        outcome
    }
}

struct Fixture<'s, 'm, A: Walk> {
    programs: [Program<'s, 'm, A>; SPACES],
    spaces: [&'s AddressSpace<'m, Machine<A>>; SPACES],
    expected: Expected,
}

impl<'m, A: Walk> Fixture<'_, 'm, A> {
    fn map(&self, space: usize, object: &Object<'m, Machine<A>>, first: u64, pages: u64) {
        let request = MapRequest {
            length: pages * PAGE,
            protection: READ_WRITE,
            place: Place::Fixed(VirtAddr(AT + first * PAGE)),
            sharing: if space == PRIVATE { Sharing::Private } else { Sharing::Shared },
            ..MapRequest::default()
        };
        let access = FileAccess::READ | FileAccess::WRITE;
        let source = MapObject { object, offset: first * PAGE, access };
        self.spaces[space].mmap_object(&request, &source).unwrap();
    }

    fn load(&self, space: usize, word: u64) -> Result<(), TestCaseError> {
        let there = self.programs[space].load(VirtAddr(AT + word * 8));
        let (page, inside) = (word / 512, (word % 512 * 8) as usize);
        let expected = self.expected.seen(space, page).ok_or(FaultError::Bus).map(|bytes| {
            u64::from_ne_bytes(bytes[inside..inside + 8].try_into().expect("eight bytes"))
        });
        prop_assert_eq!(there, expected);
        Ok(())
    }

    fn store(&mut self, space: usize, word: u64, value: u64) -> Result<(), TestCaseError> {
        let done = self.programs[space].store(VirtAddr(AT + word * 8), value);
        let (page, inside) = (word / 512, (word % 512 * 8) as usize);
        let Some(mut bytes) = self.expected.seen(space, page) else {
            prop_assert_eq!(done, Err(FaultError::Bus));
            return Ok(());
        };
        prop_assert_eq!(done, Ok(()));
        bytes[inside..inside + 8].copy_from_slice(&value.to_ne_bytes());
        if space == PRIVATE {
            self.expected.copies.insert(page, bytes);
        } else {
            self.expected.set_page(page, &bytes);
        }
        Ok(())
    }
}

fn agree<A: Walk>(steps: &[Step], is_file: bool) -> Result<(), TestCaseError> {
    let files = MemoryFiles::new();
    let (machine, memory) = strict::<A>(16 * MIB);
    let free = memory.free_frame_count();
    let stored = {
        let spaces: Vec<_> =
            (0..SPACES).map(|_| AddressSpace::new(&memory, options()).unwrap()).collect();
        let object = if is_file { memory.file(&files, 1, 0).unwrap() } else { memfd(&memory, 0) };
        let mut fixture = Fixture {
            programs: std::array::from_fn(|n| Program::new(&machine, &spaces[n])),
            spaces: std::array::from_fn(|n| &spaces[n]),
            expected: Expected {
                object: Model { is_file, ..Model::default() },
                ..Default::default()
            },
        };
        (0..SPACES).for_each(|space| fixture.map(space, &object, 0, PAGES));
        for step in steps {
            match *step {
                Step::Object(op) => {
                    prop_assert_eq!(
                        apply(&object, &memory, op),
                        fixture.expected.apply(op),
                        "{:?}",
                        op
                    );
                }
                Step::Load(space, word) => fixture.load(space, word)?,
                Step::Store(space, word, value) => fixture.store(space, word, value)?,
                Step::Unmap(space, first, count) => {
                    let at = VirtAddr(AT + first * PAGE);
                    fixture.spaces[space].munmap(at, count * PAGE).unwrap();
                    fixture.map(space, &object, first, count);
                    if space == PRIVATE {
                        let gone = first..first + count;
                        fixture.expected.copies.retain(|page, _| !gone.contains(page));
                    }
                }
            }
            audit(&machine, &memory, &fixture.spaces);
        }
        prop_assert_eq!(&content(&object), &fixture.expected.object.bytes);
        for word in (0..PAGES).flat_map(|page| [page * 512, page * 512 + 511]) {
            (0..SPACES).try_for_each(|space| fixture.load(space, word))?;
        }
        prop_assert_eq!(object.seals(), Seals::empty());
        fixture.expected.object.bytes
    };
    if is_file {
        prop_assert_eq!(files.content(1), stored);
    }
    audit::<A>(&machine, &memory, &[]);
    memory.trim();
    prop_assert_eq!(memory.free_frame_count(), free, "frames have leaked");
    prop_assert_eq!(memory.commitment().committed(), 0);
    Ok(())
}

fn run<A: Walk>(is_file: bool) {
    let config = Config { failure_persistence: None, ..Config::default() };
    let steps = prop::collection::vec(step(), 1..50);
    let result = TestRunner::new(config).run(&steps, |steps| agree::<A>(&steps, is_file));
    match result {
        Ok(()) => {}
        Err(TestError::Fail(why, steps)) => panic!("{why}\n{steps:#?}"),
        Err(error) => panic!("{error}"),
    }
}

fn shared_memory<A: Walk>() {
    run::<A>(false);
}

fn file<A: Walk>() {
    run::<A>(true);
}
