//! A cache of measurements.
//!
//! A machine whose clock counts instructions behaves the same every time, so the same QEMU, plugin,
//! kernel and files are not run again. The cache stores the plugin's own output under a name that
//! is a hash of all inputs.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use bindery_cli::guest::machine::Machine;
use bindery_cli::guest::{Problem, workspace};

/// The kernel's name, and the plugin's counts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    pub kernel: String,
    pub counts: String,
}

/// The path of a machine's measurement.
///
/// # Errors
/// If the repository is not found, or an input of the machine cannot be read.
pub fn place(machine: &Machine, emulator: &str) -> Result<PathBuf, Problem> {
    let mut hasher = DefaultHasher::new();
    let Machine { architecture, processors, memory, .. } = machine;
    (architecture.name(), processors, memory, emulator).hash(&mut hasher);
    (&machine.initramfs, &machine.command_line).hash(&mut hasher);
    let plugin = machine.plugin.as_ref().map(|plugin| &plugin.path);
    for path in [Some(&machine.kernel), plugin].into_iter().flatten() {
        fs::read(path).map_err(|error| Problem::io("read", path, &error))?.hash(&mut hasher);
    }
    Ok(workspace::target("guest/compare")?.join(format!("{:016x}", hasher.finish())))
}

/// The measurement at the path, if it is complete.
pub fn read(place: &Path) -> Option<Record> {
    let text = fs::read_to_string(place).ok()?;
    let (kernel, counts) = text.split_once('\n')?;
    Some(Record { kernel: kernel.to_owned(), counts: counts.to_owned() })
}

/// Stores a measurement.
///
/// # Errors
/// If the file cannot be written.
pub fn write(place: &Path, record: &Record) -> Result<(), Problem> {
    let text = format!("{}\n{}", record.kernel, record.counts);
    workspace::write_if_changed(place, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use bindery_cli::guest::Architecture;

    use super::*;

    #[test]
    fn a_record_survives_a_round_trip() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("record");
        assert_eq!(read(&place), None);
        let record = Record { kernel: "Linux 7".to_owned(), counts: "a\nb\n".to_owned() };
        write(&place, &record).unwrap();
        assert_eq!(read(&place), Some(record));
    }

    #[test]
    fn the_place_depends_on_all_machine_inputs() {
        let directory = tempfile::tempdir().unwrap();
        let kernel = directory.path().join("kernel");
        fs::write(&kernel, "first").unwrap();
        let machine = Machine::new(Architecture::X86_64, kernel.clone());
        let first = place(&machine, "7.2").unwrap();
        assert_eq!(place(&machine, "7.2").unwrap(), first);
        assert_ne!(place(&machine, "10.0").unwrap(), first);
        for change in [
            |machine: &mut Machine| machine.architecture = Architecture::AArch64,
            |machine: &mut Machine| machine.memory += 1,
            |machine: &mut Machine| machine.initramfs.push(0),
            |machine: &mut Machine| machine.command_line.push('x'),
        ] {
            let mut other = machine.clone();
            change(&mut other);
            assert_ne!(place(&other, "7.2").unwrap(), first);
        }
        fs::write(&kernel, "second").unwrap();
        assert_ne!(place(&machine, "7.2").unwrap(), first);
    }
}
