//! `bindery compare cold-reads`: reads a file of the disk with none of its pages in memory, and
//! counts the requests that reach the disk and the instructions of the kernel.
//!
//! Linux is not measured, because it does not know the layout of our disk.

use std::fs::{self, File};
use std::process::ExitCode;

use bindery_cli::guest::initramfs::EXECUTABLE;
use bindery_cli::guest::machine::Plugin;
use bindery_cli::guest::{Architecture, Problem, busybox};

use super::counts::{self, Counter};
use super::script::{BEGIN, TO_HOST, failed, host_lines};
use super::{guests, ours, programs};
use crate::output::{show, thousands};
use crate::plugin::{self, Emulator};
use crate::size::MIB;

/// The workload, and its source under `programs/workloads`.
const WORKLOAD: &str = "cold_reads";

/// The names of the runs, as the workload prints them, with their phases (`mark.h`).
const RUNS: [(&str, u16); 4] = [
    ("read in order", 176),
    ("read at random", 177),
    ("mapped in order", 178),
    ("mapped at random", 179),
];

/// The memory of the machine, which holds the whole file.
const MEMORY: u64 = 256 * MIB;
/// The part of the disk beyond the file.
const SPARE: u64 = 16 * MIB;

/// Count the requests and instructions that reads of a file on the disk take
#[derive(clap::Args)]
pub struct Arguments {
    /// The architectures, separated by commas [default: all]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    arch: Vec<Architecture>,

    /// The size of the file in MiB
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u64).range(1..=128))]
    mib: u64,
}

/// Runs the workload and prints a table for each architecture.
///
/// # Errors
/// If a requirement is missing, or a machine failed.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    let architectures = match &*arguments.arch {
        [] => Architecture::ALL.to_vec(),
        chosen => chosen.to_vec(),
    };
    for architecture in architectures {
        measure(architecture, arguments.mib)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(architecture: Architecture, mib: u64) -> Result<(), Problem> {
    let emulator = Emulator::installed(architecture)?;
    let program = programs::build(architecture, WORKLOAD)?;
    let directory = guests::temporary_directory()?;
    let [counts, disk] = ["counts", "disk"].map(|name| directory.path().join(name));
    let made = File::create(&disk).and_then(|file| file.set_len(mib * MIB + SPARE));
    made.map_err(|error| Problem::io("write", &disk, &error))?;

    let mut files = guests::file_system(&busybox::program(architecture)?)?;
    let bytes = fs::read(&program.path);
    let bytes = bytes.map_err(|error| Problem::io("read", &program.path, &error))?;
    files.file(&format!("/bin/{WORKLOAD}"), EXECUTABLE, bytes)?;
    files.file("/init", EXECUTABLE, script(mib))?;
    let options = [&guests::CALM[..], &[("disk", "virtio")]].concat();
    let mut machine = guests::machine(architecture, &ours(architecture)?, files, &options)?;
    machine.memory = MEMORY;
    machine.disk = Some(disk);
    let arguments = vec![("out".to_owned(), counts.clone().into())];
    let path = plugin::build(plugin::Plugin::Count, &emulator)?;
    machine.plugin = Some(Plugin { path, arguments });

    let console = guests::console(&machine, &format!("{WORKLOAD} on {architecture}"))?;
    let counts =
        fs::read_to_string(&counts).map_err(|error| Problem::io("read", &counts, &error))?;
    let table = table(&console, &counts)?;
    let (version, library) = (&emulator.version, &program.library);
    show(&format!(
        "\n{architecture}, QEMU {version} (TCG, one CPU, -icount), linked with {library}\n\
         {WORKLOAD} --mib {mib}: pages of 4 KiB, none of which is in memory\n\n{table}"
    ))
}

/// The first program. It leaves the kernel's thread that stores dirty pages idle.
fn script(mib: u64) -> String {
    format!(
        "{BEGIN}echo 0 > /proc/sys/vm/dirty_writeback_centisecs\n\
         /bin/{WORKLOAD} --mib {mib}\n\
         echo \"{TO_HOST}status $?\"\n\
         $box poweroff -f\n"
    )
}

/// A line for each run. The instructions are the kernel's, including its interrupts and its idle
/// loop.
fn table(console: &str, counts: &str) -> Result<String, Problem> {
    if host_lines(console).any(|line| line != "status 0") || host_lines(console).count() != 1 {
        return Err(failed("the machine ended before the workload did", console));
    }
    let phases = counts::read(counts)?;
    let mut text = "run                requests      pages    in kernel  a page\n".to_owned();
    for (name, phase) in RUNS {
        let found = console.lines().find_map(|line| requests(line, name)).zip(phases.get(&phase));
        let ((requests, pages), summary) = found.ok_or_else(|| {
            Problem::Failed(format!("{WORKLOAD} printed no line for `{name}`, or did not mark it"))
        })?;
        let of = |counter| summary.mean.of(counter) as u64;
        let kernel = of(Counter::Kernel) + of(Counter::KernelString);
        let a_page = kernel / pages.max(1);
        let [requests, pages, kernel, a_page] = [requests, pages, kernel, a_page].map(thousands);
        text += &format!("{name:17} {requests:>9} {pages:>10} {kernel:>12} {a_page:>7}\n");
    }
    Ok(text)
}

/// `cold_reads: read in order: 10 requests for 20 pages`
fn requests(line: &str, name: &str) -> Option<(u64, u64)> {
    let line = line.trim_end().strip_prefix("cold_reads: ")?.strip_prefix(name)?;
    let (requests, pages) = line.strip_prefix(": ")?.split_once(" requests for ")?;
    Some((requests.parse().ok()?, pages.strip_suffix(" pages")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::script::tests::check;
    use super::*;

    fn console() -> String {
        let lines =
            RUNS.map(|(name, _)| format!("cold_reads: {name}: 520 requests for 16384 pages\r\n"));
        lines.concat() + "compare: status 0\r\n"
    }

    fn counts() -> String {
        let lines =
            RUNS.map(|(_, phase)| format!("{phase}{}\n", "\t8192000".repeat(counts::NAMES.len())));
        format!("phase\t{}\n", counts::NAMES.join("\t")) + &lines.concat()
    }

    #[test]
    fn each_run_has_a_line() {
        let text = table(&console(), &counts()).unwrap();
        assert_eq!(text.lines().count(), 1 + RUNS.len());
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words, ["read", "in", "order", "520", "16,384", "16,384,000", "1,000"]);
        let widths: Vec<usize> = text.lines().map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
    }

    #[test]
    fn a_failure_has_no_table() {
        for (from, to) in [("status 0", "status 1"), ("mapped in order", "mapped"), ("520", "some")]
        {
            assert!(table(&console().replace(from, to), &counts()).is_err(), "{to}");
        }
        assert!(table(&console(), &counts().replace("179\t", "180\t")).is_err());
        assert!(table("", &counts()).is_err());
    }

    #[test]
    fn phases_are_those_of_the_marks() {
        let marks = include_str!("../../../../programs/include/mark.h");
        let names = ["READ", "READ_RANDOM", "MAP", "MAP_RANDOM"];
        for (name, (_, phase)) in names.into_iter().zip(RUNS) {
            assert!(marks.contains(&format!("PHASE_COLD_{name} = {phase},")), "{name}");
        }
    }

    #[test]
    fn the_script_parses() {
        check(&script(64));
    }
}
