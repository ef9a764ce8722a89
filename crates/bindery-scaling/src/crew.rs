//! Crews: workers, their address spaces, and the memory behind them.

use bindery::Memory;
use bindery::sync::SpinLock;

use crate::Problem;
use crate::calls::{Calls, OnCore, OnLinux};
use crate::machine::{self, Machine};
use crate::operations::Worker;

/// The state that workers share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// One address space.
    Threads,
    /// One address space per worker, in one memory.
    Processes,
    /// One memory per worker, which shows the limit of the host.
    Nothing,
}

impl Sharing {
    /// The setting's name in the output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Processes => "processes",
            Self::Nothing => "memories",
        }
    }
}

/// Workers, one for each CPU.
pub trait Crew: Sync {
    /// The number of workers.
    fn cpus(&self) -> u16;

    /// Whether each worker is a process of the host.
    fn is_of_processes(&self) -> bool;

    /// Runs `work` on the running thread, as one of the workers.
    fn as_worker(&self, number: u16, work: &mut dyn FnMut(&Worker<'_>));
}

/// The machines on which one number of CPUs is measured. Their memory is never freed, so all
/// operations use the same machines.
pub struct Machines {
    pub cpus: u16,
    shared: &'static Memory<Machine<SpinLock>>,
    apart: Vec<&'static Memory<Machine<SpinLock>>>,
}

impl Machines {
    /// Machines of `cpus` CPUs.
    ///
    /// # Errors
    /// If the host has too little memory.
    pub fn new(cpus: u16) -> Result<Self, Problem> {
        let all: Vec<u16> = (0..cpus).collect();
        // A second CPU is online besides the worker's, because with a single CPU the core need not
        // defer frees. CPU 0 creates the address spaces.
        let of_one = |number: u16| match number {
            0 => machine::memory(&all[..all.len().min(2)]),
            _ => machine::memory(&[0, number]),
        };
        let apart = (0..cpus).map(of_one).collect::<Result<_, _>>()?;
        Ok(Self { cpus, shared: machine::memory(&all)?, apart })
    }
}

/// Workers on the core.
pub struct CoreCrew<'m> {
    machines: &'m Machines,
    sharing: Sharing,
    /// The address spaces: one, or one for each worker.
    programs: Vec<OnCore<SpinLock>>,
}

impl<'m> CoreCrew<'m> {
    /// Creates the workers' address spaces.
    ///
    /// # Errors
    /// If memory is full.
    pub fn new(machines: &'m Machines, sharing: Sharing) -> Result<Self, Problem> {
        let cpus = machines.cpus;
        let programs = match sharing {
            Sharing::Threads => vec![OnCore::new(machines.shared, cpus)?],
            Sharing::Processes => {
                let program = |_| OnCore::new(machines.shared, cpus);
                (0..cpus).map(program).collect::<Result<_, _>>()?
            }
            Sharing::Nothing => {
                let program = |memory: &&'static _| OnCore::new(memory, cpus);
                machines.apart.iter().map(program).collect::<Result<_, _>>()?
            }
        };
        Ok(Self { machines, sharing, programs })
    }
}

impl Crew for CoreCrew<'_> {
    fn cpus(&self) -> u16 {
        self.machines.cpus
    }

    fn is_of_processes(&self) -> bool {
        false
    }

    fn as_worker(&self, number: u16, work: &mut dyn FnMut(&Worker<'_>)) {
        let shares_space = self.sharing == Sharing::Threads;
        let calls = &self.programs[if shares_space { 0 } else { usize::from(number) }];
        let worker = Worker { number, count: self.machines.cpus, shares_space, calls };
        machine::on_cpu(calls.space.memory().platform(), number, || {
            calls.enter();
            work(&worker);
            calls.leave();
        });
    }
}

/// Workers on the host's Linux.
pub struct LinuxCrew {
    cpus: u16,
    sharing: Sharing,
    program: OnLinux,
}

impl LinuxCrew {
    /// Creates the workers' files.
    ///
    /// # Errors
    /// The errors of the system calls.
    pub fn new(cpus: u16, sharing: Sharing) -> Result<Self, Problem> {
        Ok(Self { cpus, sharing, program: OnLinux::new(cpus)? })
    }
}

impl Crew for LinuxCrew {
    fn cpus(&self) -> u16 {
        self.cpus
    }

    fn is_of_processes(&self) -> bool {
        self.sharing == Sharing::Processes
    }

    fn as_worker(&self, number: u16, work: &mut dyn FnMut(&Worker<'_>)) {
        let shares_space = self.sharing == Sharing::Threads;
        work(&Worker { number, count: self.cpus, shares_space, calls: &self.program });
    }
}
