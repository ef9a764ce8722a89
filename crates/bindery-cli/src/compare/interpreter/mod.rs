//! Programs of steps, which `programs/workloads/random.c` performs on both kernels while the plugin
//! counts each step.
//!
//! | file | contents |
//! |---|---|
//! | `step` | one call or access, and its class |
//! | `machines` | several programs in one machine, and their counts |

pub mod machines;
pub mod step;

use bindery_cli::guest::{Architecture, Problem, busybox, linux};

use super::guests::Kernel;
use super::{parallel, programs};
use crate::plugin::{self, Emulator, Plugin};
use crate::size::FolioSize;
use machines::{Bench, Measured};
use step::Step;

/// The number of programs per machine, since booting takes as long as several programs.
const BATCH: usize = 20;

/// A program's steps, and the folio size of its first touches.
#[derive(Clone, Debug)]
pub struct Program {
    pub seed: u64,
    pub folio: FolioSize,
    pub steps: Vec<Step>,
}

impl Program {
    /// The input file of `programs/workloads/random.c`.
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.steps.iter().for_each(|step| step.write(&mut text));
        text
    }
}

/// Debian's newest Linux, with a swap device.
///
/// # Errors
/// If Linux or its swap device cannot be fetched.
pub fn linux(architecture: Architecture) -> Result<Kernel, Problem> {
    Ok(Kernel::Linux {
        image: linux::newest(architecture)?,
        modules: Default::default(),
        swap: linux::ready_made::modules(architecture, "zram")?,
    })
}

/// Builds the inputs of both kernels; the second value is the C library in the programs.
///
/// # Errors
/// If QEMU or a compiler is missing.
pub fn prepare(architecture: Architecture) -> Result<(Bench, String), Problem> {
    let emulator = Emulator::installed(architecture)?;
    let workload = programs::build(architecture, machines::WORKLOAD)?;
    let bench = Bench {
        architecture,
        plugin: plugin::build(Plugin::Count, &emulator)?,
        emulator: emulator.version,
        busybox: busybox::program(architecture)?,
        program: workload.path,
    };
    Ok((bench, workload.library))
}

/// Runs all programs on both kernels, several machines at a time.
///
/// # Errors
/// If a machine failed.
pub fn measure(
    bench: &Bench,
    kernels: [&Kernel; 2],
    programs: &[Program],
) -> Result<[Measured; 2], Problem> {
    let batches = programs.chunks(BATCH);
    let tasks: Vec<_> = batches.flat_map(|batch| kernels.map(|kernel| (kernel, batch))).collect();
    let results =
        parallel::all(bench.architecture, &tasks, |(kernel, batch)| bench.measure(kernel, batch));
    let nothing = || Measured { kernel: String::new(), programs: Vec::new() };
    let mut all = [nothing(), nothing()];
    for (number, result) in results.into_iter().enumerate() {
        let Measured { kernel, programs } = result?;
        let sum = &mut all[number % 2];
        sum.kernel = kernel;
        sum.programs.extend(programs);
    }
    Ok(all)
}
