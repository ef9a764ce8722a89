//! Tests the command `bindery run` itself: the arguments that it forwards, and its exit. Also tests
//! `bindery compare working-set` and `bindery compare applications`, without Linux.

use std::fs;
use std::process::{Command, Output};

use bindery_cli::guest::Architecture;
use bindery_cli::guest::requirements::Requirement;
use libtest_mimic::{Completion, Failed, Trial};

use crate::guest::is_required;
use crate::options;

/// The expected result of a command.
pub struct Expected {
    /// The command's exit status.
    pub status: i32,
    /// The complete output of the command, if it is known.
    pub output: Option<&'static str>,
    /// A part of the command's messages.
    pub message: &'static str,
}

/// The trials for one architecture.
pub fn trials(architecture: Architecture) -> Vec<Trial> {
    let name = |what: &str| format!("{}::run_{what}", architecture.directory());
    let passes = move || {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("file");
        fs::write(&file, "from the host\n")?;
        let added = format!("{}:/data/added", file.display());
        let script = "cat /data/added; echo \"$NAME $0 $1\"; exit 3";
        let arguments =
            ["--file", &added, "--env", "NAME=a b", "busybox", "sh", "-c", script, "%20", ""];
        let output = Some("from the host\na b %20 \n");
        run(architecture, &arguments, &Expected { status: 3, output, message: "bindery: " })
    };
    let no_terminal = move || {
        let script = "for at in 0 1 2; do [ -t $at ] || echo $at; done; stty size 2>/dev/null || echo none >/dev/stdout";
        let arguments = ["busybox", "sh", "-c", script];
        let output = Some("0\n1\n2\nnone\n");
        run(architecture, &arguments, &Expected { status: 0, output, message: "" })
    };
    let time_is_up = move || {
        let arguments = ["--timeout", "4", "busybox", "sleep", "1000"];
        let message = "error: the machine was stopped after 4 s";
        run(architecture, &arguments, &Expected { status: 124, output: None, message })
    };
    let killed = move || {
        let arguments = ["--check", "busybox", "sh", "-c", "kill -KILL $$"];
        run(architecture, &arguments, &Expected { status: 137, output: Some(""), message: "" })
    };
    let memory_functions = move || {
        let arguments = ["--option", "workload=memory-functions", "busybox", "true"];
        let output =
            Some("[bindery] memcpy, memmove, memset and memcmp do what loops over bytes do\n");
        run(architecture, &arguments, &Expected { status: 0, output, message: "" })
    };
    let kernel_mappings = move || {
        let option = "workload=kernel-map";
        let arguments = ["--check", "--cpus", "2", "--option", option, "busybox", "true"];
        let message = "";
        run(architecture, &arguments, &Expected { status: 0, output: None, message })
    };
    let unused_memory = move || {
        let script = "read name total unit </proc/meminfo; \
                      [ $total -le 65536 ] && [ $total -gt 40960 ] && echo the other half";
        let arguments =
            ["--memory", "128m", "--option", "unused=67108864", "busybox", "sh", "-c", script];
        let output = Some("the other half\n");
        run(architecture, &arguments, &Expected { status: 0, output, message: "" })
    };
    let unknown_model = move || {
        let arguments = ["--cpu", "maxx", "busybox", "true"];
        let message = "has no CPU model \"maxx\": ";
        run(architecture, &arguments, &Expected { status: 2, output: Some(""), message })
    };
    let mut trials = vec![
        Trial::ignorable_test(name("leaves_the_beginning_of_memory_unused"), unused_memory),
        Trial::ignorable_test(name("passes_files_words_output_and_status"), passes),
        Trial::ignorable_test(name("has_no_terminal_where_the_host_has_none"), no_terminal),
        Trial::ignorable_test(name("ends_the_machine_when_the_time_is_up"), time_is_up),
        Trial::ignorable_test(name("gives_128_and_the_signal_of_a_killed_program"), killed),
        Trial::ignorable_test(name("copies_and_compares_every_byte"), memory_functions),
        Trial::ignorable_test(name("maps_for_the_kernel_itself"), kernel_mappings),
        Trial::ignorable_test(name("refuses_a_model_that_does_not_exist"), unknown_model),
        Trial::ignorable_test(
            format!("{}::compare_counts_the_pages_of_a_working_set", architecture.directory()),
            move || working_set(architecture),
        ),
    ];
    for name in APPLICATIONS {
        let trial = format!("{}::application_{name}", architecture.directory());
        trials.push(Trial::ignorable_test(trial, move || application(architecture, name)));
    }
    trials.extend(deaths(architecture));
    trials
}

/// The trials in which the kernel dies.
fn deaths(architecture: Architecture) -> [Trial; 8] {
    let name = |what: &str| format!("{}::run_{what}", architecture.directory());
    let kernel_dies = move || {
        let arguments = ["--option", "init=/nonexistent", "busybox"];
        let message = "cannot be started (errno 2): the initramfs has no such file";
        run(architecture, &arguments, &Expected { status: 101, output: None, message })
    };
    let stack_runs_over = move || {
        let arguments = ["--option", "provoke=stack-overflow", "busybox", "true"];
        let message = "error: the kernel died: the kernel stack of thread 1 has run over";
        run(architecture, &arguments, &Expected { status: 101, output: None, message })
    };
    let use_after_free = move || {
        let arguments = ["--option", "provoke=use-after-free", "busybox", "true"];
        let message = ", which was freed";
        run(architecture, &arguments, &Expected { status: 101, output: None, message })
    };
    let audited_beside_a_wait = move || {
        if let Some(ignored) = missing(&[Requirement::CCompiler], architecture)? {
            return Ok(ignored);
        }
        let program =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../programs/tests/userfault_end_beside.c");
        let arguments = ["--check", "--option", "provoke=audited", program];
        let message = " was audited";
        run(architecture, &arguments, &Expected { status: 101, output: None, message })
    };
    let wrong_control_bit = move || {
        let arguments = ["--option", "provoke=control-bit", "busybox", "true"];
        let message = match architecture {
            Architecture::X86_64 => "the self-test of the machine failed: CR0.WP must be set",
            Architecture::AArch64 => {
                "the self-test of the machine failed: SCTLR_EL1.WXN must be clear"
            }
        };
        run(architecture, &arguments, &Expected { status: 101, output: None, message })
    };
    let processor_is_too_old = move || {
        let (model, message) = match architecture {
            Architecture::X86_64 => {
                ("max,-nx", "error: the kernel died: this processor has no no-execute bit (NX)")
            }
            Architecture::AArch64 => (
                "cortex-a76,vfp=off,neon=off",
                "error: the kernel died: this processor has no floating point",
            ),
        };
        let arguments = ["--cpu", model, "--timeout", "60", "busybox", "true"];
        // The console shows the message as well.
        let output = Some(match architecture {
            Architecture::X86_64 => {
                "this processor has no no-execute bit (NX): the kernel needs it\n"
            }
            Architecture::AArch64 => {
                "this processor has no floating point (ID_AA64PFR0_EL1.FP): programs need it\n"
            }
        });
        run(architecture, &arguments, &Expected { status: 101, output, message })
    };
    let feature_is_missing = move || {
        let models: &[_] = match architecture {
            Architecture::X86_64 => &[
                ("max,-syscall", "this processor has no system calls (SYSCALL)"),
                ("max,-fpu", "this processor has no floating-point unit (FPU)"),
                ("max,-msr", "this processor has no model-specific registers (MSR)"),
                ("max,-pae", "this processor has no physical-address extension (PAE)"),
                ("max,-cx8", "this processor has no CMPXCHG8B (CX8)"),
                ("max,-cmov", "this processor has no conditional moves (CMOV)"),
                ("max,-mmx", "this processor has no MMX"),
                ("max,-sse", "this processor has no SSE"),
            ],
            Architecture::AArch64 => &[],
        };
        for (model, message) in models {
            let arguments = ["--cpu", model, "--timeout", "60", "busybox", "true"];
            let completion =
                run(architecture, &arguments, &Expected { status: 101, output: None, message })?;
            if !matches!(completion, Completion::Completed) {
                return Ok(completion);
            }
        }
        Ok(Completion::Completed)
    };
    let no_long_mode = move || {
        if architecture != Architecture::X86_64 {
            return Ok(Completion::Completed);
        }
        let arguments = ["--cpu", "qemu32", "--timeout", "60", "busybox", "true"];
        let message = "error: the kernel died: this processor has no 64-bit mode";
        run(architecture, &arguments, &Expected { status: 101, output: None, message })
    };
    [
        Trial::ignorable_test(name("tells_that_the_processor_is_too_old"), processor_is_too_old),
        Trial::ignorable_test(name("tells_that_there_is_no_64_bit_mode"), no_long_mode),
        Trial::ignorable_test(name("tells_which_feature_the_processor_lacks"), feature_is_missing),
        Trial::ignorable_test(name("tells_that_the_kernel_died"), kernel_dies),
        Trial::ignorable_test(name("tells_that_a_kernel_stack_has_run_over"), stack_runs_over),
        Trial::ignorable_test(name("tells_whose_address_the_kernel_used"), use_after_free),
        Trial::ignorable_test(name("tells_which_control_bit_is_wrong"), wrong_control_bit),
        Trial::ignorable_test(name("audits_beside_a_wait_for_a_handler"), audited_beside_a_wait),
    ]
}

/// The requirements of `bindery run`.
const TO_RUN: [fn(Architecture) -> Requirement; 3] =
    [Requirement::Emulator, Requirement::Rust, Requirement::BusyBox];

/// A working set of 64 MiB in a machine of 56 MiB: some of its pages have to be swapped out and in.
fn working_set(architecture: Architecture) -> Result<Completion, Failed> {
    if let Some(ignored) =
        missing(&[&TO_RUN[..], &[Requirement::CCompiler]].concat(), architecture)?
    {
        return Ok(ignored);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_bindery"));
    command.args(["compare", "working-set", "--no-linux", "--arch", architecture.name()]);
    command.args(["--size", "64m", "--memory", "56m", "--order", "random"]);
    command.args(["--processes", "2", "--seeds", "2"]);
    let Output { status, stdout, stderr } = command.output()?;
    let (output, messages) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    let lines: Vec<Vec<&str>> =
        output.lines().map(|line| line.split_whitespace().collect()).collect();
    let moved = |seed: &str| {
        let beginning = ["random", "2", seed, "Bindery"];
        let line = lines.iter().find(|line| line.starts_with(&beginning))?;
        line.iter().nth_back(2)?.replace(',', "").parse::<u64>().ok()
    };
    let seeds = [moved("1"), moved("2")];
    // Each page that is not in memory at the end is swapped out and in at least once.
    let (least, most) = (2 * 2_048, 2 * 4 * 16_384);
    let plausible = |pages: Option<u64>| pages.is_some_and(|pages| (least..most).contains(&pages));
    if status.success() && seeds.into_iter().all(plausible) {
        return Ok(Completion::Completed);
    }
    Err(Failed::from(format!(
        "it ended with {status}\n--- output ---\n{output}\n--- messages ---\n{messages}"
    )))
}

/// The applications that take seconds; `bindery compare applications` runs them all.
const APPLICATIONS: [&str; 3] = ["restore", "sort", "sqlite"];

/// A well-known program, in ample memory and in too little. The command compares the program's
/// answers with Linux's recorded one and fails if too little was swapped out.
fn application(architecture: Architecture, name: &str) -> Result<Completion, Failed> {
    let needed = [&TO_RUN[..], &[Requirement::CCompiler, Requirement::GlibcCompiler]].concat();
    if let Some(ignored) = missing(&needed, architecture)? {
        return Ok(ignored);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_bindery"));
    command.args(["compare", "applications", name, "--no-linux", "--arch", architecture.name()]);
    if let Some(processors) = options::processors() {
        command.args(["--cpus", &processors.to_string()]);
    }
    let Output { status, stdout, stderr } = command.output()?;
    if status.success() {
        return Ok(Completion::Completed);
    }
    let (output, messages) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    Err(Failed::from(format!(
        "it ended with {status}\n--- output ---\n{output}\n--- messages ---\n{messages}"
    )))
}

/// The end of a trial that needs a missing requirement.
fn missing(
    needed: &[fn(Architecture) -> Requirement],
    architecture: Architecture,
) -> Result<Option<Completion>, Failed> {
    for requirement in needed.iter().map(|requirement| requirement(architecture)) {
        match requirement.demand() {
            Err(problem) if !is_required() => {
                return Ok(Some(Completion::ignored_with(problem)));
            }
            other => other?,
        }
    }
    Ok(None)
}

/// Runs `bindery run` and judges its end.
pub fn run(
    architecture: Architecture,
    arguments: &[&str],
    expected: &Expected,
) -> Result<Completion, Failed> {
    if let Some(ignored) = missing(&TO_RUN, architecture)? {
        return Ok(ignored);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_bindery"));
    command.args(["run", "--arch", architecture.name()]);
    command.args(options::of_run(architecture, arguments)).args(arguments);
    let Output { status, stdout, stderr } = command.output()?;
    let (output, messages) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    let output = options::expected(architecture, arguments, &output);
    let right = status.code() == Some(expected.status)
        && expected.output.is_none_or(|expected| output == expected)
        && messages.contains(expected.message);
    if right {
        return Ok(Completion::Completed);
    }
    Err(Failed::from(format!(
        "expected status {} and {:?} and {:?}; it ended with {status}\n\
         --- output ---\n{output}\n--- messages ---\n{messages}",
        expected.status, expected.output, expected.message
    )))
}
