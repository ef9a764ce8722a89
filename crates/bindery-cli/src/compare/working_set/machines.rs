//! The machines of both kernels, with equal numbers of frames for programs.
//!
//! `MemAvailable` does not show this number, because a kernel subtracts frames that it prefers to
//! keep free but uses them under pressure. So a run of the workload counts the frames that hold its
//! pages while memory is short.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use bindery_cli::guest::initramfs::EXECUTABLE;
use bindery_cli::guest::machine::Machine;
use bindery_cli::guest::{Architecture, Problem};

use super::super::cache::{self, Record};
use super::super::guests::{self, Kernel};
use super::run::{Lists, Moved, Run, Told, WORKLOAD, judge, script};
use crate::size::{KIB, MIB};

/// Bytes of a frame.
const FRAME: u64 = 4 * KIB;

/// A machine that takes longer counts as hung.
const TIMEOUT: Duration = Duration::from_secs(6 * 60 * 60);

/// The search ends at this difference between the frames of both kernels.
const CLOSE: u64 = 32;

/// The allowed difference between the kernels' frames, in thousandths. One page of memory more or
/// less can change the frames of Linux's working set by a hundredth.
const TOLERANCE: u64 = 10;

/// The maximum number of machines tried in search of one with a given number of frames.
const TRIES: u32 = 8;

/// The first guess of the extra memory that a kernel needs compared with ours.
const SUPPOSED: u64 = 64 * MIB;

/// The common parts of all machines of one architecture.
pub struct Bench {
    pub architecture: Architecture,
    /// The version of QEMU.
    pub emulator: String,
    pub busybox: PathBuf,
    pub program: PathBuf,
}

/// A kernel, the memory of its machine, and its report.
pub struct Booted {
    pub name: &'static str,
    /// The version, as the kernel reports it.
    pub version: String,
    /// Bytes of the machine's memory.
    pub memory: u64,
    /// Frames that hold pages of the working set while memory is short.
    pub frames: u64,
    kernel: Kernel,
}

impl Bench {
    /// A kernel in a machine of this much memory. The run reports its number of frames.
    ///
    /// # Errors
    /// If the run fails, or memory was never short.
    pub fn boot(
        &self,
        name: &'static str,
        kernel: Kernel,
        memory: u64,
        run: Run,
    ) -> Result<Booted, Problem> {
        let told = self.start(name, &kernel, memory, &[run], &[Lists::Own])?;
        let (version, moved) = first(told)?;
        if moved.out == 0 {
            let text = format!("{} MiB of memory hold the working set", memory / MIB);
            return Err(Problem::Failed(text));
        }
        Ok(Booted { name, version, memory, frames: moved.frames, kernel })
    }

    /// A kernel in a machine that gives the run the same number of frames as another kernel's
    /// machine.
    ///
    /// # Errors
    /// If the run fails, or no such machine was found.
    pub fn boot_like(
        &self,
        other: &Booted,
        name: &'static str,
        kernel: Kernel,
        run: Run,
    ) -> Result<Booted, Problem> {
        let mut version = String::new();
        let (memory, frames) = fit(other.frames, other.memory + SUPPOSED, |memory| {
            let told = self.start(name, &kernel, memory, &[run], &[Lists::Own])?;
            let (told_version, moved) = first(told)?;
            version = told_version;
            Ok(moved.frames)
        })?;
        Ok(Booted { name, version, memory, frames, kernel })
    }

    /// Performs all runs in one boot of the kernel; on Linux, once with each of its lists. Returns
    /// the pages that each run has moved.
    ///
    /// # Errors
    /// If QEMU does not start, the kernel dies, or the workload fails or finds wrong contents.
    pub fn measure(
        &self,
        booted: &Booted,
        runs: &[Run],
    ) -> Result<Vec<(Lists, Run, Moved)>, Problem> {
        let lists: &[Lists] = match booted.kernel {
            Kernel::Bindery { .. } => &[Lists::Own],
            Kernel::Linux { .. } => &[Lists::Generations, Lists::Classic],
        };
        let told = self.start(booted.name, &booted.kernel, booted.memory, runs, lists)?;
        let all = lists.iter().flat_map(|lists| runs.iter().map(move |run| (*lists, *run)));
        Ok(all.zip(told.moved).map(|((lists, run), moved)| (lists, run, moved)).collect())
    }

    /// Performs the runs, or reads the report of the same machine from the cache.
    fn start(
        &self,
        name: &str,
        kernel: &Kernel,
        memory: u64,
        runs: &[Run],
        lists: &[Lists],
    ) -> Result<Told, Problem> {
        let machine = self.machine(kernel, memory, script(runs, lists))?;
        let count = runs.len() * lists.len();
        let place = cache::place(&machine, &self.emulator)?;
        let known = cache::read(&place).and_then(|record| judge(&record.counts, count).ok());
        if let Some(told) = known {
            return Ok(told);
        }
        let what = format!("{name} on {} with {} MiB", self.architecture, memory / MIB);
        let console = guests::console(&machine, &what)?;
        let told = judge(&console, count)
            .map_err(|problem| Problem::Failed(format!("{what}: {problem}")))?;
        let record = Record { kernel: told.kernel.clone(), counts: console };
        cache::write(&place, &record)?;
        Ok(told)
    }

    fn machine(&self, kernel: &Kernel, memory: u64, script: String) -> Result<Machine, Problem> {
        let mut files = guests::file_system(&self.busybox)?;
        let program =
            fs::read(&self.program).map_err(|error| Problem::io("read", &self.program, &error))?;
        files.file(&format!("/bin/{WORKLOAD}"), EXECUTABLE, program)?;
        files.file("/init", EXECUTABLE, script)?;
        if let Kernel::Linux { swap, .. } = kernel {
            guests::add_swap_modules(&mut files, swap)?;
        }
        let mut machine = guests::machine(self.architecture, kernel, files, &guests::CALM)?;
        machine.memory = memory;
        machine.timeout = Some(TIMEOUT);
        Ok(machine)
    }
}

/// The kernel's version, and the report of the only run.
fn first(told: Told) -> Result<(String, Moved), Problem> {
    let moved = told.moved.first().copied();
    let moved = moved.ok_or_else(|| {
        Problem::Failed(
            "the workload printed no result; remove target/guest/compare to run it again"
                .to_owned(),
        )
    })?;
    Ok((told.kernel, moved))
}

/// The memory of a machine with about `wanted` frames, and its number of frames. A kernel reserves
/// a part of its memory that grows with the memory, so this function tries several sizes, starting
/// with `first`.
///
/// # Errors
/// The errors of `frames`, and an error if no such memory was found.
fn fit(
    wanted: u64,
    first: u64,
    mut frames: impl FnMut(u64) -> Result<u64, Problem>,
) -> Result<(u64, u64), Problem> {
    let mut memory = first;
    let mut best: Option<(u64, u64, u64)> = None;
    for _ in 0..TRIES {
        let found = frames(memory)?;
        let difference = found.abs_diff(wanted);
        if best.is_none_or(|(least, ..)| difference < least) {
            best = Some((difference, memory, found));
        }
        if difference <= CLOSE {
            break;
        }
        memory = (memory + wanted * FRAME).saturating_sub(found * FRAME);
    }
    match best {
        Some((difference, memory, found)) if difference <= wanted * TOLERANCE / 1_000 => {
            Ok((memory, found))
        }
        _ => {
            let closest = best.map_or(0, |(_, _, found)| found);
            let text = format!(
                "{TRIES} sizes of memory were tried, and none has {wanted} frames (the closest has \
                 {closest}); choose another --memory"
            );
            Err(Problem::Failed(text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: u64 = 120_000;

    #[test]
    fn the_memory_for_equal_frames_is_found() {
        // The kernel takes 80 MiB for itself and a sixteenth of the rest.
        let frames = |memory: u64| (memory - 80 * MIB) / 16 * 15 / FRAME;
        let mut tries = 0;
        let (memory, found) = fit(WANTED, 576 * MIB, |memory| {
            tries += 1;
            Ok(frames(memory))
        })
        .unwrap();
        assert!(found.abs_diff(WANTED) <= CLOSE && found == frames(memory));
        assert!((2..=4).contains(&tries), "{tries}");
        assert!(memory.is_multiple_of(FRAME));
    }

    #[test]
    fn the_closest_of_distant_kernels_is_taken() {
        let mut found =
            [121_500, 119_500, 120_300, 120_700, 119_000, 119_400, 120_500, 121_000].into_iter();
        let mut memory = Vec::new();
        let fitting = fit(WANTED, 576 * MIB, |tried| {
            memory.push(tried);
            Ok(found.next().unwrap())
        });
        assert_eq!(fitting.unwrap(), (memory[2], 120_300));
        assert_eq!(memory.len() as u32, TRIES);
    }

    #[test]
    fn a_kernel_without_enough_ends_the_search() {
        let mut tries = 0;
        let problem = fit(WANTED, 576 * MIB, |_| {
            tries += 1;
            Ok(25_000)
        });
        assert!(problem.unwrap_err().to_string().contains("120000 frames"));
        assert_eq!(tries, TRIES);
        let dead = fit(WANTED, MIB, |_| Err(Problem::Failed("no kernel".to_owned())));
        assert_eq!(dead.unwrap_err().to_string(), "no kernel");
    }
}
