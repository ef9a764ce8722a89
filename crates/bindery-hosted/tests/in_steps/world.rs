//! The machine of a sequence, its processes, and the events between their calls.

use std::cell::OnceCell;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{AddressSpace, CallReady, FileAccess, Memory, Object};
use bindery_hosted::Machine;
use bindery_linux::{OpenFile, Process};

use super::action::{LARGE, LARGE_PAGES, Step};
use super::flight::Flight;
use super::model::{CELL, CELLS, Model, Space, filled};
use super::server::Server;
use crate::support::{GIB, options};

pub type P = Machine<X86_64<4>>;

/// The address of the arena.
pub const AT: u64 = GIB;
pub const PAGE: u64 = CELL * CELLS;
/// The most processes.
pub const PROCESSES: usize = 4;
/// The most calls in steps at once.
const FLIGHTS: usize = 8;

/// A process, whose descriptor 3 is the file and 4 the shared memory.
pub struct Caller<'m> {
    pub space: AddressSpace<'m, P>,
    objects: [Object<'m, P>; 2],
}

impl<'m> Process<'m, P> for Caller<'m> {
    fn space(&self) -> &AddressSpace<'m, P> {
        &self.space
    }

    fn file(&self, descriptor: i32) -> Option<OpenFile<'m, P>> {
        let object = self.objects.get(usize::try_from(descriptor - 3).ok()?)?.clone();
        Some(OpenFile { object, access: FileAccess::READ | FileAccess::WRITE })
    }

    fn process(&self, _descriptor: i32) -> Option<&AddressSpace<'m, P>> {
        None
    }
}

pub type Callers<'m> = [OnceCell<Caller<'m>>; PROCESSES];

pub struct World<'w, 'm> {
    pub machine: &'w P,
    pub memory: &'m Memory<P>,
    pub server: &'w Server<'m>,
    pub callers: &'w Callers<'m>,
    /// The file and the shared memory.
    pub objects: [Object<'m, P>; 2],
    pub model: Model,
    /// The calls in steps.
    pub flights: Vec<Flight<'w, 'm>>,
    /// The end of a wait that its call did not get.
    pub spare: Option<CallReady<'m, P>>,
}

pub fn address(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

impl<'w, 'm> World<'w, 'm> {
    pub fn new(
        (machine, memory): (&'w P, &'m Memory<P>),
        server: &'w Server<'m>,
        callers: &'w Callers<'m>,
        objects: [Object<'m, P>; 2],
    ) -> Self {
        let (model, flights) = (Model::new(), Vec::new());
        let world = Self { machine, memory, server, callers, objects, model, flights, spare: None };
        let space = AddressSpace::new(memory, options()).unwrap();
        world.add(0, space);
        world
    }

    fn add(&self, number: usize, space: AddressSpace<'m, P>) {
        let caller = Caller { space, objects: self.objects.clone() };
        assert!(self.callers[number].set(caller).is_ok());
    }

    pub fn caller(&self, by: usize) -> &'w Caller<'m> {
        self.callers[by].get().expect("a process")
    }

    pub fn space(&self, by: usize) -> &'w AddressSpace<'m, P> {
        &self.caller(by).space
    }

    pub fn step(&mut self, step: Step) {
        self.model.now += 1;
        let process = |by: u8| usize::from(by) % self.model.spaces.len();
        match step {
            Step::Make(by, what, in_steps, seed) => {
                let by = process(by);
                self.server.seed(seed);
                if in_steps && self.flights.len() < FLIGHTS {
                    self.begin(by, what);
                } else {
                    self.block(by, what);
                }
            }
            Step::Advance(which, way, seed) => {
                self.server.seed(seed);
                if let Some(which) = usize::from(which).checked_rem(self.flights.len()) {
                    self.advance(which, way);
                }
            }
            Step::Cancel(which) => {
                if let Some(which) = usize::from(which).checked_rem(self.flights.len()) {
                    let flight = self.flights.swap_remove(which);
                    self.server.with(|| drop(flight));
                }
            }
            Step::Fork(by, seed) => {
                let by = process(by);
                self.fork(by, seed);
            }
            Step::Exit(by, seed) => {
                let by = process(by);
                self.server.seed(seed);
                let all = (LARGE + LARGE_PAGES) * PAGE;
                let space = self.space(by);
                self.server.with(|| space.munmap(address(0), all)).unwrap();
                self.model.spaces[by].clear();
                self.disturb(Some(by));
            }
            Step::Poke(by, cell, value) => {
                let by = process(by);
                self.poke(by, cell, value);
            }
            event => self.happen(event),
        }
        self.observe();
        self.peek();
    }

    /// An event that is no call of a process.
    fn happen(&mut self, event: Step) {
        let (server, files) = (self.server, self.server.files);
        match event {
            Step::Answer(seed) => {
                server.seed(seed);
                server.answer();
            }
            Step::Serve => {
                server.serve_device();
            }
            Step::Keep(reads, writes) => {
                files.keep_reads(reads);
                files.keep_writes(writes);
            }
            Step::Resize(object, pages, seed) => {
                server.seed(seed);
                let failed = server.failed_reads.get();
                match server.with(|| self.objects[object].set_size(pages * PAGE)) {
                    Ok(()) => self.model.resize(object, pages),
                    Err(error) => {
                        assert!(failed < server.failed_reads.get(), "a resize fails: {error}");
                    }
                }
                self.disturb(None);
            }
            Step::Punch(object, page, seed) => {
                server.seed(seed);
                let hole = server.with(|| self.objects[object].punch_hole(page * PAGE, 3 * PAGE));
                assert_eq!(hole, Ok(()));
                self.model.punch(object, page..page + 3);
            }
            Step::ReadAhead(page) => self.objects[0].read_ahead(page * PAGE, 4 * PAGE),
            Step::Evict => {
                server.with(|| self.memory.drop_clean_pages());
            }
            Step::Reclaim(pages, seed) => {
                server.seed(seed);
                server.with(|| self.memory.reclaim(pages));
            }
            Step::Make(..)
            | Step::Advance(..)
            | Step::Cancel(_)
            | Step::Fork(..)
            | Step::Exit(..)
            | Step::Poke(..) => unreachable!("a call"),
        }
    }

    /// Notes that the mappings of a process have changed, or an object of all of them.
    pub fn disturb(&mut self, by: Option<usize>) {
        for flight in &mut self.flights {
            if by.is_none_or(|by| by == flight.by) {
                flight.is_disturbed = true;
            }
        }
    }

    /// Applies a write of the cells `done` of a call, the first of which goes to `first`. A write
    /// may make the object larger, and pages accessible.
    pub fn write(&mut self, object: usize, first: u64, value: u8, done: std::ops::Range<u64>) {
        let size = self.model.objects[object].size;
        for index in done {
            self.model.write(object, first + index, Some(filled(value, index)));
        }
        if self.model.objects[object].size > size {
            self.disturb(None);
        }
    }

    fn fork(&mut self, by: usize, seed: u64) {
        let number = self.model.spaces.len();
        if number == PROCESSES {
            return;
        }
        self.server.seed(seed);
        let space = self.space(by);
        let child = self.server.with(|| space.fork()).unwrap();
        self.add(number, child);
        let mut model: Space = self.model.spaces[by].clone();
        model.values_mut().for_each(|page| page.is_locked = false);
        self.model.spaces.push(model);
    }

    /// A store of the program that needs no fault.
    fn poke(&mut self, by: usize, cell: u64, value: u8) {
        let (space, at) = (self.space(by), VirtAddr(AT + cell * CELL));
        space.enter();
        let bytes = [filled(value, cell); CELL as usize];
        if self.machine.write_user(space.root(), at, &bytes, Err).is_ok() {
            self.model.store(by, cell, Some(bytes[0]));
        }
    }
}
