//! Options in the environment that change the machines of all trials.
//!
//! | variable | effect |
//! |---|---|
//! | `BINDERY_KERNEL_CPUS` | the number of CPUs of each machine, at least |
//! | `BINDERY_KERNEL_AARCH64` | the model of the CPUs of AArch64, as QEMU names it |
//! | `BINDERY_KERNEL_SECONDS` | how long each storm lasts |

use std::borrow::Cow;
use std::env;
use std::sync::OnceLock;
use std::time::Duration;

use bindery_cli::guest::Architecture;
use bindery_cli::guest::directives::Directives;
use bindery_cli::guest::machine::Clock;

/// The programs whose first argument is the machine's number of CPUs.
const TOLD_THE_PROCESSORS: [&str; 9] = [
    "cpus_faults",
    "cpus_fork",
    "cpus_handover",
    "cpus_memory",
    "cpus_oom",
    "cpus_processes",
    "cpus_swap",
    "cpus_userfault",
    "sys_cpu",
];

/// The programs that also take the seconds of each of their storms, as their second argument.
const STORMS: [&str; 4] = ["cpus_fork", "cpus_oom", "cpus_swap", "cpus_userfault"];

/// Why a trial does not run with [`processors`].
pub const COUNTS_INSTRUCTIONS: &str =
    "its machine's clock counts instructions, which one CPU at a time executes";

/// The greatest number of storms of such a program.
const STORMS_OF_A_PROGRAM: u32 = 4;

/// The number of CPUs that all machines must have; `None` if each trial chooses.
///
/// # Panics
/// If the variable is not a number above 0.
pub fn processors() -> Option<u32> {
    static NUMBER: OnceLock<Option<u32>> = OnceLock::new();
    *NUMBER.get_or_init(|| number("BINDERY_KERNEL_CPUS"))
}

/// How long each storm lasts, in seconds; `None` if the program chooses.
///
/// # Panics
/// If the variable is not a number above 0.
fn seconds() -> Option<u32> {
    number("BINDERY_KERNEL_SECONDS")
}

/// The number above 0 of a variable, `None` without the variable.
fn number(name: &str) -> Option<u32> {
    let text = env::var(name).ok()?;
    let number = text.parse().ok().filter(|&number| number > 0);
    Some(number.unwrap_or_else(|| panic!("{name} is no number above 0: {text:?}")))
}

/// The model of CPU that all machines of the architecture must have; `None` if each trial chooses.
pub fn model(architecture: Architecture) -> Option<String> {
    match architecture {
        Architecture::X86_64 => None,
        Architecture::AArch64 => env::var("BINDERY_KERNEL_AARCH64").ok(),
    }
}

/// The directives of a program under these options.
pub fn applied(architecture: Architecture, name: &str, directives: &Directives) -> Directives {
    let mut directives = directives.clone();
    if directives.processor.is_none() {
        directives.processor = model(architecture);
    }
    if let Some(processors) = processors() {
        directives.processors = directives.processors.max(processors);
        if TOLD_THE_PROCESSORS.contains(&name) {
            directives.arguments = vec![directives.processors.to_string()];
        }
    }
    if STORMS.contains(&name)
        && let Some(seconds) = seconds()
    {
        directives.arguments = vec![directives.processors.to_string(), seconds.to_string()];
        directives.timeout += STORMS_OF_A_PROGRAM * Duration::from_secs(seconds.into());
    }
    directives
}

/// Whether the options leave a trial out: the number of its CPUs is the option's, and its clock
/// counts instructions.
pub fn leave_out(directives: &Directives) -> bool {
    processors().is_some() && directives.clock == Clock::Instructions
}

/// The output of `bindery run`, without the lines in which CPUs that only these options add
/// announce themselves.
pub fn expected<'a>(architecture: Architecture, given: &[&str], output: &'a str) -> Cow<'a, str> {
    if !of_run(architecture, given).iter().any(|option| option == "--cpus") {
        return output.into();
    }
    let announces = |line: &&str| line.starts_with("[bindery] CPU ") && line.ends_with(" is up\n");
    output.split_inclusive('\n').filter(|line| !announces(line)).collect::<String>().into()
}

/// The options of `bindery run` for these options, except those that `given` already has.
pub fn of_run(architecture: Architecture, given: &[&str]) -> Vec<String> {
    let mut options = Vec::new();
    if let Some(processors) = processors()
        && !given.contains(&"--cpus")
    {
        options.extend(["--cpus".to_owned(), processors.to_string()]);
    }
    if let Some(model) = model(architecture)
        && !given.contains(&"--cpu")
    {
        options.extend(["--cpu".to_owned(), model]);
    }
    options
}
