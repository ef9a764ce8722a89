//! The models of CPUs that QEMU has.

use std::process::Command;

use strsim::damerau_levenshtein;

use crate::guest::{Architecture, Problem, process};

/// Has no effect if QEMU has the model of a CPU, which may be followed by a comma and properties
/// (`max,sve=off`). Starts QEMU once.
///
/// # Errors
/// If QEMU is not installed, or has no such model; the problem names a similar one, if any.
pub fn demand(architecture: Architecture, processor: &str) -> Result<(), Problem> {
    let emulator = architecture.emulator();
    let listed = process::output(Command::new(emulator).args(["-cpu", "help"]))?;
    let model = processor.split(',').next().unwrap_or_default();
    let known = || models(&listed);
    if known().any(|name| name == model) {
        return Ok(());
    }
    let distance = |name: &&str| damerau_levenshtein(name, model);
    let meant = known().filter(|name| distance(name) <= 2).min_by_key(distance);
    let meant = meant.map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
    Err(Problem::Wrong(format!(
        "QEMU for {architecture} has no CPU model {model:?}: `{emulator} -cpu help` lists its \
         models{meant}"
    )))
}

/// The names in QEMU's list. A line has the name first, or second behind `x86`; behind the models
/// of x86-64 there is a list of features.
fn models(listed: &str) -> impl Iterator<Item = &str> {
    let lines = listed.lines().skip(1).take_while(|line| !line.starts_with("Recognized"));
    lines.filter_map(|line| line.split_whitespace().find(|&word| word != "x86"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_both_architectures_are_read() {
        let arm = "Available CPUs:\n  cortex-a53\n  max\n";
        assert_eq!(models(arm).collect::<Vec<_>>(), ["cortex-a53", "max"]);
        let x86 = "Available CPUs:\nx86 486   (alias configured by machine type)\nx86 qemu64-v1\n\n\
                   Recognized CPUID flags:\n  3dnow avx\n";
        assert_eq!(models(x86).collect::<Vec<_>>(), ["486", "qemu64-v1"]);
    }
}
