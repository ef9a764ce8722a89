//! The stage of a script: processes and files on one hosted machine, and the meanings of names.

use std::collections::{BTreeMap, HashMap};
use std::thread;

use bindery::addr::VirtAddr;
use bindery::arch::Arch;
use bindery::{AddressSpace, Counts, Error, Memory, Object, SpaceOptions};
use bindery_hosted::{Machine, MemoryFiles, Walk};
use bindery_linux::{self as linux, OpenFile};

use super::audit::{self, Findings};
use super::layout::{self, Row};
use super::mistake::{Mistake, Place};
use super::number::Value;
use super::script::{File, MAIN, Process as ProcessArgument};

type Space<'m, A> = AddressSpace<'m, Machine<A>>;

/// The start of the heap, unless a script sets it.
const HEAP: u64 = 0x1000_0000;
/// The first descriptors of files and of processes. They differ, so that a script cannot confuse
/// them.
const FIRST_FILE: i32 = 3;
const FIRST_PROCESS: i32 = 1000;

/// The reason why a script cannot continue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stop {
    /// An error in the script that is detected only at run time.
    Wrong(Mistake),
    /// The script depends on a statement that has failed.
    Lost(Mistake),
}

impl From<Mistake> for Stop {
    fn from(mistake: Mistake) -> Self {
        Self::Wrong(mistake)
    }
}

/// A process: its memory and its open files.
pub struct Process<'m, A: Walk> {
    pub name: String,
    pub space: Space<'m, A>,
    pub files: BTreeMap<i32, OpenFile<'m, Machine<A>>>,
    /// The process's descriptor for `process_madvise`.
    descriptor: i32,
    /// The counts at the last reading.
    counted: Counts,
}

impl<A: Walk> Process<'_, A> {
    /// The work since the last reading.
    pub fn count(&mut self) -> Counts {
        let now = self.space.counts();
        now - std::mem::replace(&mut self.counted, now)
    }
}

/// The process that makes a call, and the others.
pub struct Caller<'s, 'm, A: Walk> {
    fixture: &'s Fixture<'m, A>,
    process: &'s Process<'m, A>,
}

impl<'m, A: Walk> linux::Process<'m, Machine<A>> for Caller<'_, 'm, A> {
    fn space(&self) -> &Space<'m, A> {
        &self.process.space
    }

    fn file(&self, descriptor: i32) -> Option<OpenFile<'m, Machine<A>>> {
        self.process.files.get(&descriptor).cloned()
    }

    fn process(&self, descriptor: i32) -> Option<&Space<'m, A>> {
        let mut all = self.fixture.processes.iter();
        all.find(|process| process.descriptor == descriptor).map(|process| &process.space)
    }
}

/// The value of a name, or the reason why it has none.
type Meaning<T> = Result<T, String>;

/// The complete state of a running script.
pub struct Fixture<'m, A: Walk> {
    pub machine: &'m Machine<A>,
    pub memory: &'m Memory<Machine<A>>,
    /// The storage of files.
    pub disk: &'m MemoryFiles,
    processes: Vec<Process<'m, A>>,
    numbers: HashMap<String, Meaning<u64>>,
    descriptors: HashMap<String, Meaning<i32>>,
    /// The reasons why processes are missing.
    absent: HashMap<String, String>,
    /// The names of objects, by their numbers.
    objects: HashMap<u64, String>,
    next_file: i32,
    next_process: i32,
    next_disk_file: u64,
}

impl<'m, A: Walk> Fixture<'m, A> {
    /// A machine with one process without memory.
    ///
    /// # Errors
    /// If memory for it is lacking.
    pub fn new(
        machine: &'m Machine<A>,
        memory: &'m Memory<Machine<A>>,
        disk: &'m MemoryFiles,
    ) -> Result<Self, Error> {
        let space = AddressSpace::new(memory, SpaceOptions::default())?;
        let heap = if HEAP < A::USER_END { HEAP } else { <A as Arch>::USER_END / 2 };
        space.set_break_start(VirtAddr(heap));
        let mut fixture = Self {
            machine,
            memory,
            disk,
            processes: Vec::new(),
            numbers: HashMap::new(),
            descriptors: HashMap::new(),
            absent: HashMap::new(),
            objects: HashMap::new(),
            next_file: FIRST_FILE,
            next_process: FIRST_PROCESS,
            next_disk_file: 1,
        };
        fixture.add_process(MAIN, space, BTreeMap::new());
        Ok(fixture)
    }

    pub fn add_process(
        &mut self,
        name: &str,
        space: Space<'m, A>,
        files: BTreeMap<i32, OpenFile<'m, Machine<A>>>,
    ) {
        let descriptor = self.next_process;
        self.next_process += 1;
        let (name, counted) = (name.to_owned(), Counts::default());
        self.processes.push(Process { name, space, files, descriptor, counted });
    }

    /// Records why the process of this name is missing.
    pub fn no_process(&mut self, name: &str, why: String) {
        self.absent.insert(name.to_owned(), why);
    }

    /// Removes the process, with all its memory and files.
    pub fn remove_process(&mut self, index: usize) {
        self.processes.remove(index);
    }

    pub fn process(&self, index: usize) -> &Process<'m, A> {
        &self.processes[index]
    }

    pub fn process_mut(&mut self, index: usize) -> &mut Process<'m, A> {
        &mut self.processes[index]
    }

    /// All living processes.
    pub fn processes(&self) -> impl Iterator<Item = &Process<'m, A>> {
        self.processes.iter()
    }

    pub fn caller(&self, index: usize) -> Caller<'_, 'm, A> {
        Caller { fixture: self, process: &self.processes[index] }
    }

    /// The process of this name.
    ///
    /// # Errors
    /// If its fork has failed.
    pub fn index(&self, name: &str, place: Place) -> Result<usize, Stop> {
        self.processes.iter().position(|process| process.name == name).ok_or_else(|| {
            let why = self.absent.get(name).map_or("it has ended", String::as_str);
            Stop::Lost(Mistake::new(place, format!("there is no process `{name}`: {why}")))
        })
    }

    /// Opens a file in a process and gives it a name. No process has the descriptor for another
    /// file.
    pub fn open(&mut self, index: usize, name: &str, file: OpenFile<'m, Machine<A>>) -> i32 {
        let descriptor = self.next_file;
        self.next_file += 1;
        self.processes[index].files.insert(descriptor, file);
        self.descriptors.insert(name.to_owned(), Ok(descriptor));
        descriptor
    }

    /// The number of a new file on the disk.
    pub fn next_disk_file(&mut self) -> u64 {
        self.next_disk_file += 1;
        self.next_disk_file
    }

    /// Records why the file of this name is missing.
    pub fn no_file(&mut self, name: &str, why: String) {
        self.descriptors.insert(name.to_owned(), Err(why));
    }

    /// Sets the object's name in layouts.
    pub fn name_object(&mut self, object: &Object<'m, Machine<A>>, name: String) {
        self.objects.insert(object.identity(), name);
    }

    /// Sets the number of a name, or records why it is missing.
    pub fn name_number(&mut self, name: &str, meaning: Meaning<u64>) {
        self.numbers.insert(name.to_owned(), meaning);
    }

    /// The current value of the sum.
    ///
    /// # Errors
    /// A name without a value; the errors of [`Value::evaluate`].
    pub fn number(&self, value: &Value) -> Result<u64, Stop> {
        value.evaluate(|name, place| self.look_up(name, place))
    }

    /// As [`Fixture::number`], for a byte.
    ///
    /// # Errors
    /// The errors of [`Fixture::number`]; a value that does not fit into a byte.
    pub fn byte(&self, value: &Value) -> Result<u8, Stop> {
        value.byte(|name, place| self.look_up(name, place))
    }

    fn look_up(&self, name: &str, place: Place) -> Result<u64, Stop> {
        known(&self.numbers, name, place)
    }

    /// The file's descriptor, and its text.
    ///
    /// # Errors
    /// A file that could not be created; the errors of [`Fixture::number`].
    pub fn descriptor(&self, file: &File) -> Result<(i32, String), Stop> {
        match file {
            File::Named(name, place) => Ok((known(&self.descriptors, name, *place)?, name.clone())),
            // As in a system call, which uses 32 bits.
            File::Number(value) => {
                let number = self.number(value)? as i32;
                Ok((number, number.to_string()))
            }
        }
    }

    /// The process' descriptor, and its text.
    ///
    /// # Errors
    /// A missing process; the errors of [`Fixture::number`].
    pub fn process_descriptor(&self, process: &ProcessArgument) -> Result<(i32, String), Stop> {
        match process {
            ProcessArgument::Named(name, place) => {
                Ok((self.processes[self.index(name, *place)?].descriptor, name.clone()))
            }
            ProcessArgument::Number(value) => {
                let number = self.number(value)? as i32;
                Ok((number, number.to_string()))
            }
        }
    }

    pub fn layout(&self, index: usize) -> Vec<Row> {
        layout::layout(&self.processes[index].space, &self.objects)
    }

    pub fn audit(&self) -> Findings {
        let spaces: Vec<_> = self.processes.iter().map(|process| &process.space).collect();
        audit::audit(self.machine, self.memory, &spaces)
    }

    /// Ends all processes and checks for leaks; `free` is the number of frames that were free in
    /// the beginning.
    pub fn finish(mut self, free: u64) -> Findings {
        self.processes.clear();
        let findings = self.audit();
        self.memory.trim();
        let now = self.memory.free_frame_count();
        if findings.violations.is_empty() && now != free {
            return Findings::leak(free.saturating_sub(now));
        }
        findings
    }
}

fn known<T: Copy>(
    names: &HashMap<String, Meaning<T>>,
    name: &str,
    place: Place,
) -> Result<T, Stop> {
    let why = match names.get(name) {
        Some(Ok(value)) => return Ok(*value),
        Some(Err(why)) => why,
        None => "it was not given any",
    };
    Err(Stop::Lost(Mistake::new(place, format!("`{name}` has no value: {why}"))))
}

impl<A: Walk> Drop for Fixture<'_, A> {
    fn drop(&mut self) {
        if thread::panicking() {
            // The core has failed in the middle of an operation; dropping the processes would fail
            // again.
            std::mem::forget(std::mem::take(&mut self.processes));
        }
    }
}
