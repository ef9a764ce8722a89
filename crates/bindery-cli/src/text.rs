//! `bindery size`: the text of the kernel, with and without the core's features.

use std::fs;
use std::io::{self, Write};
use std::process::ExitCode;

use bindery_cli::guest::kernel::text::{self, Text};
use bindery_cli::guest::kernel::{Features, build_with};
use bindery_cli::guest::{Architecture, Problem};

/// Show the bytes of the kernel's functions, with all features of the core and with none
///
/// The kernel is built twice. `core` counts the core's own functions, without the auditor and
/// without those that were inlined into the kernel's.
#[derive(clap::Args)]
pub struct Arguments {
    /// The architecture of the kernel
    #[arg(long, value_name = "ARCH", default_value_t = Architecture::X86_64)]
    arch: Architecture,
}

/// Builds both and shows the table.
///
/// # Errors
/// If the kernel does not build.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Problem> {
    // The default build comes last, so that it remains.
    let without = text_of(arguments.arch, Features::None)?;
    let with = text_of(arguments.arch, Features::All)?;
    let row = |name: &str, text: Text| format!("{name:<16}{:>10}{:>10}\n", text.whole, text.core);
    let table = format!(
        "{:<16}{:>10}{:>10}\n{}{}",
        "features",
        "kernel",
        "core",
        row("all", with),
        row("none", without),
    );
    io::stdout()
        .write_all(table.as_bytes())
        .map_err(|error| Problem::Failed(format!("cannot write to standard output: {error}")))?;
    if without.core >= with.core {
        return Err(Problem::Failed(format!(
            "without features the core has {} bytes, and with all of them {}: a feature removes no \
             code any more; compare the functions of both builds (`nm -S --size-sort`)",
            without.core, with.core
        )));
    }
    Ok(ExitCode::SUCCESS)
}

fn text_of(architecture: Architecture, features: Features) -> Result<Text, Problem> {
    let kernel = build_with(architecture, features)?;
    let elf = fs::read(&kernel.elf).map_err(|error| Problem::io("read", &kernel.elf, &error))?;
    text::of(&elf)
}
