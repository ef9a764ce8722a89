//! A concurrent compactor: live objects of a heap move together, range by range, while two threads
//! read and write them at their new addresses.
//!
//! ```text
//! old      | a . b . | c . d . | ...    every second object is dead
//!       gather |
//! buffer   | a b c d |
//!     MOVE, COPY |
//! new      | a b c d | ...              registered for missing pages
//! ```
//!
//! A thread that accesses an absent page waits; the compactor reads its message and serves that
//! range first. COPY copies a buffer to new pages. MOVE moves the buffer's pages themselves; the
//! next buffer is a part of the old heap without live objects.
//!
//!     cargo run --release -p bindery-hosted --example compactor

use std::thread;
use std::time::Instant;

use bindery::addr::VirtAddr;
use bindery::arch::X86_64;
use bindery::platform::Cpu;
use bindery::{
    AddressSpace, FillMode, MapRequest, Memory, MoveMode, Place, Protection, SpaceOptions,
    Userfault, UserfaultFeatures, UserfaultMessage, UserfaultModes, UserfaultScope,
};
use bindery_hosted::{Config, Machine, Program};

type Arch = X86_64<4>;
type Space<'m> = AddressSpace<'m, Machine<Arch>>;

const OLD: u64 = 1 << 30;
const NEW: u64 = 2 << 30;
const BUFFERS: u64 = 3 << 30;

const OBJECT: u64 = 256;
const LIVE: u64 = 16_384;
const THREADS: u64 = 2;
const ACCESSES: u64 = 20_000;

/// How objects reach their new place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Manner {
    Copy,
    Move,
}

fn old(object: u64) -> VirtAddr {
    VirtAddr(OLD + 2 * object * OBJECT)
}

fn new(object: u64) -> VirtAddr {
    VirtAddr(NEW + object * OBJECT)
}

/// The first word of an object.
fn key(object: u64) -> u64 {
    (object + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

struct Compactor<'a, 'm> {
    space: &'a Space<'m>,
    userfault: &'a Userfault<'m, Machine<Arch>>,
    program: Program<'a, 'm, Arch>,
    manner: Manner,
    /// Bytes that are gathered and served at once.
    range: u64,
    served: Vec<bool>,
    /// The objects left in an old range.
    left: Vec<u64>,
    /// Addresses of free buffers.
    buffers: Vec<u64>,
}

impl Compactor<'_, '_> {
    /// Serves all ranges in order, except that ranges for which a thread waits come first.
    fn compact(&mut self) {
        for range in 0..self.served.len() {
            while let Some(message) = self.userfault.try_read() {
                if let UserfaultMessage::Fault(fault) = message {
                    self.serve(((fault.address.0 - NEW) / self.range) as usize);
                }
            }
            self.serve(range);
        }
    }

    fn serve(&mut self, range: usize) {
        if std::mem::replace(&mut self.served[range], true) {
            return;
        }
        let to = VirtAddr(NEW + range as u64 * self.range);
        let mut gathered = vec![0; self.range as usize];
        let first = range as u64 * self.range / OBJECT;
        let buffer = self.buffers.last().copied();
        let objects = gathered.chunks_exact_mut(OBJECT as usize).zip(first..LIVE);
        for (bytes, object) in objects {
            self.program.read(old(object), bytes).expect("the old heap is there");
            let emptied = ((old(object).0 - OLD) / self.range) as usize;
            self.left[emptied] -= 1;
            if self.left[emptied] == 0 {
                self.buffers.insert(0, OLD + emptied as u64 * self.range);
            }
        }
        match self.manner {
            Manner::Copy => {
                let mut source = |offset: u64, piece: &mut [u8]| {
                    let start = offset as usize;
                    piece.copy_from_slice(&gathered[start..start + piece.len()]);
                    Ok(())
                };
                let mode = FillMode::empty();
                self.space.handler(self.userfault).fill_copy(to, self.range, mode, &mut source)
            }
            Manner::Move => {
                let buffer = buffer.expect("each old range that is empty is another buffer");
                self.buffers.pop();
                let from = VirtAddr(buffer);
                self.program.write(from, &gathered).expect("the buffer can be written");
                let mode = MoveMode::empty();
                self.space.handler(self.userfault).move_pages(to, from, self.range, mode)
            }
        }
        .expect("nobody else fills the new heap");
    }
}

/// Reads and writes objects at their new places, wherever their content is now.
fn use_objects(program: &Program<'_, '_, Arch>, thread: u64) -> Vec<u64> {
    let mut writes = vec![0; LIVE as usize];
    for access in 0..ACCESSES {
        let object = key(access * THREADS + thread) % LIVE;
        let at = new(object);
        assert_eq!(program.load(at), Ok(key(object)), "object {object}");
        let count = VirtAddr(at.0 + 8 + 8 * thread);
        assert_eq!(program.load(count), Ok(writes[object as usize]), "object {object}");
        writes[object as usize] += 1;
        program.store(count, writes[object as usize]).expect("the new heap can be written");
    }
    writes
}

/// Makes a heap, compacts it while threads use it, and checks each object.
fn run(manner: Manner, range: u64) {
    let machine = Machine::<Arch>::new(Config { memory: 64 << 20, cpus: 4, ..Config::default() });
    let memory: Memory<_> = machine.memory().expect("the machine's memory is good");
    let space = AddressSpace::new(&memory, SpaceOptions::default()).expect("there is memory");
    let protection = Protection::READ | Protection::WRITE;
    let buffers = if manner == Manner::Move { LIVE * OBJECT / range / 2 + 2 } else { 0 };
    for (at, length) in
        [(OLD, 2 * LIVE * OBJECT), (NEW, LIVE * OBJECT), (BUFFERS, (buffers + 1) * range)]
    {
        let place = Place::FixedNoReplace(VirtAddr(at));
        let request = MapRequest { length, protection, place, ..MapRequest::default() };
        space.mmap(&request).expect("the addresses are free");
    }
    let userfault = space.userfault(UserfaultFeatures::empty(), UserfaultScope::All);
    let userfault = userfault.expect("there is memory");
    let modes = UserfaultModes::MISSING;
    let registered = space.register_userfault(&userfault, VirtAddr(NEW), LIVE * OBJECT, modes);
    registered.expect("the new heap is anonymous memory");

    let begin = Instant::now();
    let program = |cpu: u16| (Cpu(cpu), Program::new(&machine, &space));
    let writes: Vec<Vec<u64>> = thread::scope(|scope| {
        let compactor = scope.spawn(|| {
            let (cpu, program) = program(0);
            machine.on_cpu(cpu, || {
                let ranges = (LIVE * OBJECT / range) as usize;
                for object in 0..LIVE {
                    let filled = program.fill(old(object), 2 * OBJECT, 0);
                    filled.and_then(|()| program.store(old(object), key(object))).expect("memory");
                }
                Compactor {
                    space: &space,
                    userfault: &userfault,
                    program,
                    manner,
                    range,
                    served: vec![false; ranges],
                    left: vec![range / OBJECT / 2; 2 * ranges],
                    buffers: (0..buffers).map(|number| BUFFERS + number * range).collect(),
                }
                .compact();
            });
        });
        let users: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (machine, space) = (&machine, &space);
                scope.spawn(move || {
                    machine.on_cpu(Cpu(1 + thread as u16), || {
                        use_objects(&Program::new(machine, space), thread)
                    })
                })
            })
            .collect();
        compactor.join().expect("the compactor is well");
        users.into_iter().map(|user| user.join().expect("all objects were right")).collect()
    });
    let time = begin.elapsed();
    let (_, program) = program(0);
    machine.on_cpu(Cpu(0), || {
        for object in 0..LIVE {
            assert_eq!(program.load(new(object)), Ok(key(object)), "object {object}");
            for (thread, writes) in (0..).zip(&writes) {
                let count = program.load(VirtAddr(new(object).0 + 8 + 8 * thread));
                assert_eq!(count, Ok(writes[object as usize]), "object {object}");
            }
        }
    });
    space.close_userfault(userfault);
    println!(
        "{manner:?} in ranges of {:>4} KiB: {time:.1?}, {LIVE} objects are right",
        range >> 10
    );
}

fn main() {
    for range in [4 << 10, 64 << 10, 2 << 20] {
        run(Manner::Copy, range);
        run(Manner::Move, range);
    }
}
