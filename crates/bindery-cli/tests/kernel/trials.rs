//! The list of trials: the programs under `programs/`, for each architecture.

use std::fs;
use std::path::{Path, PathBuf};

use bindery_cli::guest::directives::{self, Directives};
use bindery_cli::guest::{Architecture, workspace};
use libtest_mimic::Trial;

use crate::command;
use crate::damaged_disk;
use crate::guest::{Program, stem, trial};
use crate::terminal;

/// The arguments with which each workload verifies contents, in a short time and with little
/// memory.
const WORKLOADS: [(&str, &[&str]); 13] = [
    ("cold_reads", &["--verify", "--mib", "8"]),
    ("compaction", &["--verify", "--mib", "8", "--accesses", "512"]),
    ("conflicts", &["--rounds", "8"]),
    ("copy", &["--verify"]),
    ("fork", &["--verify", "--mib", "4", "--rounds", "1"]),
    ("interrupts", &["--verify", "--rounds", "8"]),
    ("proc", &["--verify"]),
    ("random", &["--verify"]),
    ("system1", &["--verify", "--iterations", "8"]),
    ("system2", &["--verify", "--mib", "48", "--moves", "2"]),
    ("system3", &["--verify", "--mib", "8", "--random", "--swap"]),
    ("system4", &["--verify", "--mib", "4", "--rounds", "1"]),
    (
        "working_set",
        &["--verify", "--moved", "--mib", "96", "--passes", "1", "--pattern", "zipf", "--swap"],
    ),
];

/// The programs that are also run on a machine with more CPUs, whose number is their argument: the
/// names of these trials, and the number.
const ON_MORE_PROCESSORS: [(&str, &str, u32); 9] = [
    ("cpus_faults", "cpus_faults_on_four", 4),
    ("cpus_fork", "cpus_fork_on_four", 4),
    ("cpus_memory", "cpus_memory_on_four", 4),
    ("cpus_oom", "cpus_oom_on_four", 4),
    ("cpus_processes", "cpus_processes_on_four", 4),
    ("cpus_swap", "cpus_swap_on_four", 4),
    ("cpus_userfault", "cpus_userfault_on_four", 4),
    ("sys_cpu", "two_processors_listed", 2),
    ("threads", "two_processors", 2),
];

/// Models of AArch64 before ARMv8.1, on small boards: they have no atomic instructions (FEAT_LSE),
/// no hardware that marks entries accessed and dirty (FEAT_HAFDBS), and no PAN.
const OLD_PROCESSORS: [&str; 2] = ["cortex-a53", "cortex-a72"];

/// The programs that also run there: each depends on one of these features.
const ON_OLD_PROCESSORS: [&str; 14] = [
    "branch_targets",
    "copy_faults",
    "float_switch",
    "futex_wait",
    "khugepaged",
    "memory_mmap",
    "memory_mremap",
    "process_fork",
    "signal_faults",
    "signal_handlers",
    "swap",
    "threads",
    "userfault_missing",
    "userfault_protect",
];

/// The program that also runs with more memory, and the memory's size. Freeing memory must not take
/// longer there.
const IN_MORE_MEMORY: (&str, u64) = ("pressure_gap", 1 << 30);

/// All trials.
///
/// # Errors
/// If the files under `programs/` cannot be read, or have invalid directives.
pub fn all() -> Result<Vec<Trial>, String> {
    let programs = workspace::root().map_err(|problem| problem.to_string())?.join("programs");
    let mut trials = Vec::new();
    for source in sources(&programs.join("tests"))? {
        let text = fs::read_to_string(&source).map_err(|error| unreadable(&source, &error))?;
        let mut directives =
            directives::read(&text).map_err(|why| format!("{}: {why}", source.display()))?;
        let name = stem(&source);
        add(&mut trials, &name, &Program::C(source.clone()), &directives);
        if name == IN_MORE_MEMORY.0 {
            let directives = Directives { memory: IN_MORE_MEMORY.1, ..directives.clone() };
            let program = Program::C(source.clone());
            add(&mut trials, &format!("{name}_in_more_memory"), &program, &directives);
        }
        if ON_OLD_PROCESSORS.contains(&name.as_str()) {
            trials.extend(on_old_processors(&name, &source, &directives));
        }
        if let Some((trial, processors)) = on_more_processors(&name) {
            directives.processors = processors;
            directives.arguments = vec![processors.to_string()];
            add(&mut trials, trial, &Program::C(source), &directives);
        }
    }
    let script = programs.join("tests/busybox.sh");
    add(&mut trials, "busybox", &Program::Script(script), &Directives::default());
    for source in sources(&programs.join("workloads"))? {
        let name = stem(&source);
        let arguments = WORKLOADS.iter().find(|(workload, _)| *workload == name);
        let (_, arguments) = arguments
            .ok_or_else(|| format!("{name}: with which arguments does this workload verify?"))?;
        let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
        let text = fs::read_to_string(&source).map_err(|error| unreadable(&source, &error))?;
        let directives =
            directives::read(&text).map_err(|why| format!("{}: {why}", source.display()))?;
        let directives = Directives { arguments, ..directives };
        add(&mut trials, &format!("workload_{name}"), &Program::C(source), &directives);
    }
    trials.extend(Architecture::ALL.into_iter().flat_map(command::trials));
    trials.push(damaged_disk::trial());
    trials.extend(Architecture::ALL.into_iter().flat_map(terminal::trials));
    Ok(trials)
}

/// The trial of a program on more CPUs, and their number.
fn on_more_processors(name: &str) -> Option<(&'static str, u32)> {
    let found = ON_MORE_PROCESSORS.iter().find(|(program, ..)| *program == name);
    found.map(|(_, trial, processors)| (*trial, *processors))
}

fn add(trials: &mut Vec<Trial>, name: &str, program: &Program, directives: &Directives) {
    for architecture in Architecture::ALL {
        let (program, directives) = (program.clone(), directives.clone());
        let name = format!("{}::{name}", architecture.directory());
        trials
            .push(Trial::ignorable_test(name, move || trial(architecture, &program, &directives)));
    }
}

fn on_old_processors<'a>(
    name: &'a str,
    source: &'a Path,
    directives: &'a Directives,
) -> impl Iterator<Item = Trial> + 'a {
    OLD_PROCESSORS.into_iter().map(move |processor| {
        let program = Program::C(source.to_owned());
        let mut directives = directives.clone();
        directives.processor = Some(processor.to_owned());
        if let Some((_, processors)) = on_more_processors(name) {
            directives.processors = processors;
        }
        let architecture = Architecture::AArch64;
        let name = format!("{}::{name}_on_{processor}", architecture.directory());
        Trial::ignorable_test(name, move || trial(architecture, &program, &directives))
    })
}

/// The C files of a directory, sorted. Finding none is an error, because nothing would be tested.
fn sources(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(directory).map_err(|error| unreadable(directory, &error))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
    let mut paths = paths.map_err(|error| unreadable(directory, &error))?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "c"));
    paths.sort();
    if paths.is_empty() {
        return Err(format!("there are no programs in {}", directory.display()));
    }
    Ok(paths)
}

fn unreadable(path: &Path, error: &std::io::Error) -> String {
    format!("cannot read {}: {error}", path.display())
}
