//! QEMU's command line.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::Command;

use super::{Clock, Machine, Output};
use crate::guest::Architecture;

/// The input and output files of a machine.
pub struct Files<'a> {
    /// The archive of the initial file system.
    pub initramfs: &'a Path,
    /// The path of the control channel.
    pub control: &'a Path,
}

/// The command that starts a machine.
pub fn command(machine: &Machine, files: &Files<'_>, output: Output) -> Command {
    let mut command = Command::new(machine.architecture.emulator());
    command.args(["-no-user-config", "-nodefaults", "-accel", "tcg"]);
    command.arg("-chardev").arg(with_value("file,id=control,path=", files.control.as_os_str()));
    match machine.architecture {
        Architecture::X86_64 => {
            command.args(["-M", "q35", "-cpu", machine.processor.as_deref().unwrap_or("max")]);
            // The guest ends QEMU by a write to this port.
            command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
            command.args(["-device", "isa-debugcon,iobase=0xe9,chardev=control"]);
        }
        Architecture::AArch64 => {
            // 52-bit addresses are disabled, because not all current arm64 kernels of Linux support
            // them.
            let processor = machine.processor.as_deref().unwrap_or("max,lpa2=off");
            command.args(["-M", "virt,gic-version=3", "-cpu", processor]);
            let semihosting = "enable=on,target=native,chardev=control";
            command.args(["-semihosting-config", semihosting]);
        }
    }
    command.args(["-m", &format!("{}k", machine.memory.div_ceil(1024))]);
    command.args(["-smp", &machine.processors.to_string()]);
    command.args(["-display", "none", "-no-reboot"]);
    // Ctrl-A commands are enabled only at a terminal, because in a pipe Ctrl-A is an ordinary byte.
    let console = match output {
        Output::Terminal => "stdio,id=console,mux=on,signal=off",
        Output::PassThrough | Output::Capture => "stdio,id=console",
    };
    command.args(["-chardev", console, "-serial", "chardev:console"]);
    match machine.clock {
        Clock::Host => {}
        Clock::Instructions => {
            command.args(["-icount", "shift=0,sleep=off"]);
            command.args(["-rtc", "base=2026-01-01,clock=vm", "-seed", "1"]);
        }
    }
    if let Some(disk) = &machine.disk {
        let cache = if machine.syncs_disk { "writeback" } else { "unsafe" };
        let start = format!("id=disk,if=none,format=raw,cache={cache},file=");
        let drive = with_value(&start, disk.as_os_str());
        command.arg("-drive").arg(drive);
        match machine.architecture {
            Architecture::X86_64 => {
                command.args(["-device", "virtio-blk-pci,drive=disk,disable-legacy=on"]);
            }
            Architecture::AArch64 => {
                command.args(["-global", "virtio-mmio.force-legacy=false"]);
                command.args(["-device", "virtio-blk-device,drive=disk"]);
            }
        }
    }
    if let Some(plugin) = &machine.plugin {
        let mut argument = with_value("", plugin.path.as_os_str());
        for (name, value) in &plugin.arguments {
            argument.push(with_value(&format!(",{name}="), value));
        }
        command.arg("-plugin").arg(argument);
    }
    command.arg("-kernel").arg(&machine.kernel);
    command.arg("-initrd").arg(files.initramfs);
    command.args(["-append", &machine.command_line]);
    command
}

/// Appends a value to a word that lists values; a comma in the value is doubled.
fn with_value(start: &str, value: &OsStr) -> OsString {
    let mut word = start.as_bytes().to_vec();
    for &byte in value.as_bytes() {
        word.push(byte);
        if byte == b',' {
            word.push(byte);
        }
    }
    OsString::from_vec(word)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::Plugin;
    use super::*;

    fn words(machine: &Machine) -> Vec<String> {
        let files = Files { initramfs: Path::new("/t/files,1"), control: Path::new("/t/a,b") };
        let command = command(machine, &files, Output::Terminal);
        command.get_args().map(|word| word.to_str().unwrap().to_owned()).collect()
    }

    fn has(words: &[String], option: &str, value: &str) -> bool {
        words.windows(2).any(|pair| pair[0] == option && pair[1] == value)
    }

    #[test]
    fn every_architecture_has_a_channel_and_a_console() {
        for architecture in Architecture::ALL {
            let words = words(&Machine::new(architecture, PathBuf::from("kernel")));
            assert!(has(&words, "-chardev", "file,id=control,path=/t/a,,b"), "{words:?}");
            assert!(words.iter().any(|word| word.contains("chardev=control")), "{words:?}");
            assert!(has(&words, "-serial", "chardev:console") && has(&words, "-kernel", "kernel"));
            assert!(has(&words, "-initrd", "/t/files,1"));
            assert!(has(&words, "-chardev", "stdio,id=console,mux=on,signal=off"));
            assert!(!words.contains(&"-icount".to_owned()));
        }
    }

    #[test]
    fn a_counted_clock_and_a_plugin_are_requested() {
        let mut machine = Machine::new(Architecture::X86_64, PathBuf::from("kernel"));
        machine.clock = Clock::Instructions;
        machine.processors = 2;
        machine.processor = Some("qemu64,-nx".to_owned());
        machine.plugin = Some(Plugin {
            path: PathBuf::from("/t/count.so"),
            arguments: vec![("out".to_owned(), "/t/x,y".into())],
        });
        let words = words(&machine);
        assert!(has(&words, "-icount", "shift=0,sleep=off") && has(&words, "-smp", "2"));
        assert!(has(&words, "-cpu", "qemu64,-nx"));
        assert!(has(&words, "-plugin", "/t/count.so,out=/t/x,,y"));
    }
}
