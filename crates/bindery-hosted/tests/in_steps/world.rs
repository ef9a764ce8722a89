//! The machine of a sequence, its processes, and the events between their calls.

use std::cell::{Cell, OnceCell, RefCell};
use std::ops::Range;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::{AddressSpace, CallReady, FileAccess, Memory, Object, Platform, SwapArea};
use bindery_hosted::Machine;
use bindery_linux::{OpenFile, Process};

use super::action::{Copied, HEAP, LARGE, LARGE_PAGES, Step, What};
use super::flight::Flight;
use super::handlers::{Filling, Handler};
use super::model::{CELL, CELLS, Heap, Model, Space, filled};
use super::server::Server;
use crate::support::{GIB, options};

pub type P = Machine<X86_64<4>>;

/// The address of the arena.
pub const AT: u64 = GIB;
pub const PAGE: u64 = CELL * CELLS;
/// The cells that a copy between processes moves at once.
const PIECE: u64 = 1024 / CELL;
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
    pub area: SwapArea,
    /// The calls in steps.
    pub flights: Vec<Flight<'w, 'm>>,
    /// The end of a wait that its call did not get.
    pub spare: Option<CallReady<'m, P>>,
    /// The userfaultfds, and what they have filled since the model was last told.
    pub handlers: RefCell<Vec<Handler<'m>>>,
    pub fillings: RefCell<Vec<Filling>>,
    /// A fatal signal comes during the next call or step, after this many questions for it.
    pub kill: Cell<Option<u64>>,
    /// As above, a signal that is not fatal.
    pub signal: Cell<Option<u64>>,
    /// The blocking calls during which a signal came.
    pub killed: Cell<u64>,
}

pub fn address(page: u64) -> VirtAddr {
    VirtAddr(AT + page * PAGE)
}

impl<'w, 'm> World<'w, 'm> {
    pub fn new(
        (machine, memory, area): (&'w P, &'m Memory<P>, SwapArea),
        server: &'w Server<'m>,
        callers: &'w Callers<'m>,
        objects: [Object<'m, P>; 2],
    ) -> Self {
        let (model, flights) = (Model::new(), Vec::new());
        let (spare, killed) = (None, Cell::new(0));
        let [kill, signal] = [const { Cell::new(None) }; 2];
        let (handlers, fillings) = Default::default();
        let world = Self {
            machine,
            memory,
            server,
            callers,
            objects,
            model,
            area,
            flights,
            spare,
            handlers,
            fillings,
            kill,
            signal,
            killed,
        };
        let space = AddressSpace::new(memory, options()).unwrap();
        space.set_break_start(VirtAddr(AT + HEAP * CELL));
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
                    self.with(|| drop(flight));
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
                self.with(|| space.munmap(address(0), all)).unwrap();
                self.model.spaces[by].clear();
                self.disturb(Some(by));
            }
            Step::Kill(questions) => {
                self.kill.set(Some(questions.into()));
                return;
            }
            Step::Signal(questions) => {
                self.signal.set(Some(questions.into()));
                return;
            }
            Step::Register(by, span) => {
                let by = process(by);
                self.register(by, span);
            }
            Step::Unregister(by, span) => {
                let by = process(by);
                self.unregister(by, span);
            }
            Step::Handle(seed) => {
                self.server.seed(seed);
                self.handle();
            }
            Step::FillEarly(by, page, service) => {
                let by = process(by);
                self.fill_early(by, page, service);
            }
            Step::CloseHandler(by, dies) => {
                let by = process(by);
                self.close_handler(by, dies);
            }
            Step::Poke(by, cell, value) => {
                let by = process(by);
                self.poke(by, cell, value);
            }
            event => self.happen(event),
        }
        self.apply_fillings();
        self.observe();
        self.peek();
    }

    /// Sends the signals of the next call, if it gets some.
    pub fn send_signals(&self) {
        if self.kill.get().is_some() {
            self.machine.fatal_signal_after(self.kill.get());
        }
        if self.signal.get().is_some() {
            self.machine.signal_after(self.signal.get());
        }
    }

    /// Ends the signals of [`World::send_signals`]. Returns whether the call was to see one. Most calls
    /// do not see a signal that is not fatal.
    pub fn take_back_signals(&self, what: What) -> bool {
        let has_come = self.signal.get().is_some() && self.machine.signal();
        let is_seen = matches!(what, What::SwapIn | What::SwapInObjects | What::Touch(..));
        let is_killed = self.kill.get().is_some() && self.machine.fatal_signal();
        self.kill.set(None);
        self.signal.set(None);
        self.machine.fatal_signal_after(None);
        self.machine.signal_after(None);
        is_killed || has_come && is_seen
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
            Step::Resize(object, size, seed) => {
                server.seed(seed);
                let failed = self.failed();
                match self.with(|| self.objects[object].set_size(size * CELL)) {
                    Ok(()) => self.model.resize(object, size),
                    Err(error) => assert!(failed < self.failed(), "a resize fails: {error}"),
                }
                self.disturb(None);
            }
            Step::Punch(object, cells, seed) => {
                server.seed(seed);
                let (failed, first) = (self.failed(), cells.first);
                let (offset, length) = (first * CELL, cells.count * CELL);
                match self.with(|| self.objects[object].punch_hole(offset, length)) {
                    Ok(()) => self.model.punch(object, first..first + cells.count),
                    Err(error) => assert!(failed < self.failed(), "a punch fails: {error}"),
                }
            }
            Step::ReadAhead(page) => self.objects[0].read_ahead(page * PAGE, 4 * PAGE),
            Step::Evict => {
                self.with(|| self.memory.drop_clean_pages());
            }
            Step::Reclaim(pages, seed) => {
                server.seed(seed);
                self.with(|| self.memory.reclaim(pages));
            }
            Step::Make(..)
            | Step::Advance(..)
            | Step::Cancel(_)
            | Step::Kill(_)
            | Step::Signal(_)
            | Step::Register(..)
            | Step::Unregister(..)
            | Step::Handle(_)
            | Step::FillEarly(..)
            | Step::CloseHandler(..)
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

    /// The other process of a copy.
    pub fn other(&self, copied: Copied) -> usize {
        usize::from(copied.other) % self.model.spaces.len()
    }

    /// Applies the cells `done` of a copy. What its first piece holds is not known, unless a first
    /// step has read it.
    pub fn copied(&mut self, by: usize, copied: Copied, done: Range<u64>, is_first: bool) {
        let other = self.other(copied);
        let (here, there) = (copied.here.first, copied.there);
        let (mut at, mut is_known) = (done.start, is_first);
        while at < done.end {
            let left_in_page = |first: u64| CELLS - (first + at) % CELLS;
            let piece = left_in_page(here).min(left_in_page(there)).min(PIECE);
            let piece = at..(at + piece).min(done.end);
            let (source, target) = if copied.is_from_other {
                ((other, there), (by, here))
            } else {
                ((by, here), (other, there))
            };
            let value = |index: u64| {
                let cell = source.1 + index;
                let page = self.model.find(source.0, cell / CELLS, false);
                page.expect("a page that was copied")[(cell % CELLS) as usize]
            };
            let values: Vec<_> =
                piece.clone().map(|index| if is_known { value(index) } else { None }).collect();
            for (index, value) in piece.clone().zip(values) {
                self.model.store(target.0, target.1 + index, value);
            }
            (at, is_known) = (piece.end, true);
        }
    }

    /// Whether a copy finds its cell `index` on both sides.
    pub fn is_copied(&self, by: usize, copied: Copied, index: u64) -> bool {
        let other = self.other(copied);
        let page = |first: u64| (first + index) / CELLS;
        let is_there = |by, first, writes| self.model.find(by, page(first), writes).is_some();
        is_there(by, copied.here.first, copied.is_from_other)
            && is_there(other, copied.there, !copied.is_from_other)
    }

    fn fork(&mut self, by: usize, seed: u64) {
        let number = self.model.spaces.len();
        if number == PROCESSES {
            return;
        }
        self.server.seed(seed);
        let space = self.space(by);
        let child = self.with(|| space.fork()).unwrap();
        self.add(number, child);
        let mut model: Space = self.model.spaces[by].clone();
        model.values_mut().for_each(|page| page.is_locked = false);
        self.model.spaces.push(model);
        let heap = Heap { locks_new: false, ..self.model.heaps[by] };
        self.model.heaps.push(heap);
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
