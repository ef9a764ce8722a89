//! The inputs of the machine for one run: the program, added files and the command line.

use std::path::{Path, PathBuf};

use super::Arguments;
use super::terminal::Terminal;
use crate::guest::command_line::CommandLine;
use crate::guest::initramfs::{EXECUTABLE, Initramfs};
use crate::guest::requirements::Requirement;
use crate::guest::{Architecture, Problem, busybox, executable, programs};

/// The name for Debian's static BusyBox.
const BUSYBOX: &str = "busybox";

/// A file of the host that is copied into the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AddedFile {
    source: PathBuf,
    target: String,
}

/// Reads `PATH[:TARGET]`. A target begins with a slash, so that paths may have colons.
pub fn parse_file(text: &str) -> Result<AddedFile, String> {
    if let Some((source, target)) = text.rsplit_once(':')
        && target.starts_with('/')
        && !source.is_empty()
    {
        return Ok(AddedFile { source: PathBuf::from(source), target: target.to_owned() });
    }
    let source = PathBuf::from(text);
    match source.file_name().and_then(|name| name.to_str()) {
        Some(name) => Ok(AddedFile { target: format!("/{name}"), source }),
        None => Err(
            "the path does not end in a file name; give PATH, or PATH:TARGET with a TARGET that \
             begins with a slash"
                .to_owned(),
        ),
    }
}

/// The inputs of the machine, apart from the kernel.
pub struct Boot {
    pub architecture: Architecture,
    pub files: Initramfs,
    pub command_line: CommandLine,
}

impl Boot {
    /// Finds or builds the program and collects all its inputs.
    pub fn prepare(arguments: &Arguments, terminal: &Terminal) -> Result<Self, Problem> {
        let program = Program::find(&arguments.program, arguments.arch)?;
        // Checked first, because the build takes minutes.
        Requirement::Emulator(program.architecture).demand()?;
        let mut files = Initramfs::new();
        let path = format!("/bin/{}", program.name);
        let contents = std::fs::read(&program.file)
            .map_err(|error| Problem::io("read", &program.file, &error))?;
        files.file(&path, EXECUTABLE, contents)?;
        if program.name == BUSYBOX {
            files.symlink("/bin/sh", BUSYBOX)?;
        }
        for added in &arguments.files {
            files.host_file(&added.target, &added.source)?;
        }
        let command_line = command_line(arguments, terminal, &path);
        Ok(Self { architecture: program.architecture, files, command_line })
    }
}

fn command_line(arguments: &Arguments, terminal: &Terminal, program: &str) -> CommandLine {
    let mut line = CommandLine::new();
    if arguments.check {
        line.option("check", "exit");
    }
    if arguments.log_calls {
        line.option("log", "calls");
    }
    if arguments.disk.is_some() {
        line.option("disk", "virtio");
    }
    for option in &arguments.options {
        let (key, value) = option.split_once('=').unwrap_or((option, ""));
        line.option(key, value);
    }
    for variable in &arguments.environment {
        line.option("env", variable);
    }
    terminal.describe(&mut line);
    line.argument(program);
    for argument in &arguments.arguments {
        line.argument(argument);
    }
    line
}

struct Program {
    architecture: Architecture,
    file: PathBuf,
    /// The program's name in the machine.
    name: String,
}

impl Program {
    fn find(path: &Path, wanted: Option<Architecture>) -> Result<Self, Problem> {
        let default = wanted.or_else(Architecture::host).unwrap_or(Architecture::X86_64);
        if path == Path::new(BUSYBOX) && !path.exists() {
            let file = busybox::program(default)?;
            return Ok(Self { architecture: default, file, name: BUSYBOX.to_owned() });
        }
        let is_source = path.extension().is_some_and(|extension| extension == "c");
        let name = if is_source { path.file_stem() } else { path.file_name() };
        let name = name.and_then(|name| name.to_str()).map(str::to_owned).ok_or_else(|| {
            Problem::Wrong(format!(
                "{} does not end in a file name; give a static ELF program, a C file or \
                 `busybox`",
                path.display()
            ))
        })?;
        if is_source {
            let file = programs::build(default, path)?;
            return Ok(Self { architecture: default, file, name });
        }
        let architecture = executable::read_static(path)?;
        match wanted {
            Some(wanted) if wanted != architecture => Err(Problem::Wrong(format!(
                "{} is a program for {architecture}, not for {wanted}; build it for {wanted}, or leave \
                 --arch out",
                path.display()
            ))),
            _ => Ok(Self { architecture, file: path.to_owned(), name }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(source: &str, target: &str) -> AddedFile {
        AddedFile { source: PathBuf::from(source), target: target.to_owned() }
    }

    #[test]
    fn added_files_go_to_root_or_target() {
        assert_eq!(parse_file("a/b.txt"), Ok(file("a/b.txt", "/b.txt")));
        assert_eq!(parse_file("a/b.txt:/etc/c"), Ok(file("a/b.txt", "/etc/c")));
        assert_eq!(parse_file("a:b"), Ok(file("a:b", "/a:b")), "a colon in a name");
        assert_eq!(parse_file("a:b:/c"), Ok(file("a:b", "/c")));
        assert!(parse_file("").is_err() && parse_file("..").is_err());
    }
}
