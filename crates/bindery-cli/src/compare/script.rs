//! The first program of both kernels: a shell script that sets the folio size, runs a workload, and
//! reports the result on the console. A module runs a workload of the kernel on Linux; our kernel
//! has run it before this script begins.
//!
//! Lines for the host begin with [`TO_HOST`]; the other lines on the console are the kernel's and
//! the workload's own.

use std::fmt::Write;

use bindery_cli::guest::Problem;

use super::rows::{Runner, Workload};
use crate::size::{FolioSize, KIB};

/// The beginning of a line for the host.
pub const TO_HOST: &str = "compare: ";

/// The beginning of every script: mounts the kernel's file systems and allows only base pages.
pub const BEGIN: &str = r#"#!/bin/busybox sh
box=/bin/busybox
$box mount -t proc proc /proc
$box mount -t sysfs sysfs /sys
$box mount -t devtmpfs devtmpfs /dev
# A kernel shows a choice as one of several words, in brackets.
choose() {
    echo "$1" > "$2"
    $box grep -qF "[$1]" "$2" || echo "compare: refused $1 > $2"
}
sizes=/sys/kernel/mm/transparent_hugepage
for size in $sizes/hugepages-*kB/enabled; do choose never $size; done
choose never $sizes/enabled
[ ! -e $sizes/khugepaged/defrag ] || echo 0 > $sizes/khugepaged/defrag
"#;

/// Loads the swap device, which is a module on Linux but built into our kernel.
pub const LOAD_SWAP: &str = r#"for module in /swap-modules/*.ko; do
    [ ! -e $module ] || $box insmod $module || echo "compare: refused $module"
done"#;

/// Makes a swap area of 512 MiB, twice the size that a workload needs. Disables readahead.
pub const SWAP_AREA: &str = r#"echo 512M > /sys/block/zram0/disksize
$box mkswap /dev/zram0
$box swapon /dev/zram0 || echo "compare: refused swapon"
cluster=/proc/sys/vm/page-cluster
[ "$($box cat $cluster)" = 0 ] || echo 0 > $cluster"#;

/// The path of the module for a kernel whose workload is a module.
pub const MODULE: &str = "/workload.ko";

/// The directory of the modules of a kernel's swap device, numbered in loading order.
pub const SWAP_MODULES: &str = "/swap-modules";

/// The script. Linux gets three seconds for the work that continues after its boot.
pub fn text(workload: Workload, folio: Option<FolioSize>) -> String {
    let mut script = String::from(BEGIN);
    let mut line = |text: &str| writeln!(script, "{text}").expect("a string takes all");
    if let Some(folio) = folio.filter(|folio| *folio != FolioSize::BASE) {
        line(&format!("choose always $sizes/hugepages-{}kB/enabled", folio.bytes() / KIB));
    }
    if workload.swaps() {
        line(LOAD_SWAP);
        line(SWAP_AREA);
    }
    line("$box sleep 3");
    line(&format!("echo \"{TO_HOST}kernel $($box uname -srv)\""));
    let mut run = |command: &str| line(&format!("{command}\necho \"{TO_HOST}status $?\""));
    match workload.runner() {
        Runner::Program(runs) => {
            for arguments in runs {
                run(&format!("/bin/{} {}", workload.name(), arguments.join(" ")));
            }
        }
        Runner::Kernel => run(&format!("[ ! -e {MODULE} ] || $box insmod {MODULE}")),
    }
    line("$box poweroff -f");
    script
}

/// Reads the script's report: the kernel's name and version.
///
/// # Errors
/// If a setting was refused, or a run of the workload failed or did not end.
pub fn judge(console: &str, workload: Workload) -> Result<String, Problem> {
    let mut kernel = None;
    let mut successes = 0;
    let runs = match workload.runner() {
        Runner::Program(runs) => runs.len(),
        Runner::Kernel => 1,
    };
    for line in host_lines(console) {
        match line.split_once(' ') {
            Some(("kernel", name)) => kernel = Some(name.to_owned()),
            Some(("status", "0")) => successes += 1,
            _ => return Err(failed(line, console)),
        }
    }
    match kernel {
        Some(kernel) if successes == runs => Ok(kernel),
        _ => Err(failed("the machine ended before the workload did", console)),
    }
}

/// The lines for the host. A message of the kernel may precede such a line's text.
pub fn host_lines(console: &str) -> impl Iterator<Item = &str> {
    console.lines().filter_map(|line| Some(line.split_once(TO_HOST)?.1.trim_end()))
}

/// A problem with the end of the console, which most likely shows the reason.
pub fn failed(what: &str, console: &str) -> Problem {
    const LINES: usize = 12;
    let lines: Vec<&str> = console.lines().collect();
    let end = lines[lines.len().saturating_sub(LINES)..].join("\n");
    Problem::Failed(format!("{what}; the console ends with:\n{end}"))
}

#[cfg(test)]
pub mod tests {
    use std::process::Command;

    use super::*;

    const GOOD: &str = "[    0.1] noise\r\ncompare: kernel Linux 7.2.13 #1 SMP\r\n\
                        compare: status 0\r\n[ 9.9] x compare: status 0\r\n";

    #[test]
    fn a_successful_workload_names_its_kernel() {
        assert_eq!(judge(GOOD, Workload::System1).unwrap(), "Linux 7.2.13 #1 SMP");
    }

    #[test]
    fn a_failure_shows_the_console() {
        let once = GOOD.replacen("status 0", "status 1", 1);
        let short = GOOD.rsplit_once("compare").unwrap().0.to_owned();
        let refused = format!("compare: refused always > x\n{GOOD}");
        let nameless = GOOD.replace("kernel Linux", "kernel");
        for console in
            [once, short, refused, nameless.replace("compare: kernel", ""), String::new()]
        {
            let problem = judge(&console, Workload::System1).unwrap_err().to_string();
            assert!(problem.contains(console.lines().last().unwrap_or_default()), "{problem}");
        }
    }

    #[test]
    fn the_script_parses_and_sets_the_folio_size() {
        let script = text(Workload::System1, Some(FolioSize::KIB_64));
        assert!(script.contains("choose always $sizes/hugepages-64kB/enabled"));
        assert!(!text(Workload::System2, Some(FolioSize::BASE)).contains("always"));
        assert_eq!(script.matches("/bin/system1 --iterations").count(), 2);
        check(&script);
    }

    #[test]
    fn the_swapping_workload_has_an_area_first() {
        let script = text(Workload::System3, Some(FolioSize::KIB_64));
        let place = |word: &str| script.find(word).unwrap_or_else(|| panic!("no {word}"));
        assert!(LOAD_SWAP.contains(SWAP_MODULES) && place("insmod") < place("disksize"));
        assert!(place("disksize") < place("mkswap") && place("swapon") < place("/bin/system3"));
        assert!(!text(Workload::System2, Some(FolioSize::KIB_64)).contains("swapon"));
        check(&script);
    }

    #[test]
    fn a_kernel_workload_on_linux_is_a_module() {
        let script = text(Workload::KernelMap, None);
        assert!(script.contains("insmod /workload.ko") && !script.contains("always"), "{script}");
        check(&script);
        let once = GOOD.lines().take(3).collect::<Vec<_>>().join("\n");
        assert_eq!(judge(&once, Workload::KernelMap).unwrap(), "Linux 7.2.13 #1 SMP");
        assert!(judge(GOOD, Workload::KernelMap).is_err());
    }

    pub fn check(script: &str) {
        let checked = Command::new("sh").args(["-n", "-c", script]).status().unwrap();
        assert!(checked.success());
    }
}
