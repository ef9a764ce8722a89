//! The first program of both kernels: a shell script that runs the tests in its arguments.
//!
//! Lines for the host begin with [`TO_HOST`]; the other lines on the console are the tests' own.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::suite::{TESTS, Test};

/// The directory of the programs in the machine.
pub const DIRECTORY: &str = "/selftests";

const TO_HOST: &str = "conformance: ";

/// The directory of the modules of Linux's swap device, numbered in loading order.
pub const SWAP_MODULES: &str = "/swap-modules";

/// The script. On both kernels huge pages are configured as on a freshly booted Linux. Both have
/// swap: the device is a module on Linux and built into our kernel.
pub fn text() -> String {
    let mut script = String::from(
        r#"#!/bin/busybox sh
box=/bin/busybox
$box mount -t proc proc /proc
$box mount -t sysfs sysfs /sys
$box mount -t devtmpfs devtmpfs /dev
$box mount -t tmpfs tmpfs /tmp
$box mount -t debugfs debugfs /sys/kernel/debug 2> /dev/null
pool=/sys/kernel/mm/hugepages
sizes=/sys/kernel/mm/transparent_hugepage
echo always > $sizes/enabled
echo inherit > $sizes/hugepages-2048kB/enabled
[ -e /sys/block/zram0 ] || for module in /swap-modules/*.ko; do $box insmod $module; done
echo 512M > /sys/block/zram0/disksize
$box mkswap /dev/zram0
$box swapon /dev/zram0 || echo "conformance: refused swapon"
now() {
    read -r up idle < /proc/uptime
    echo ${up%.*}
}
run() {
    name=$1 seconds=$2 program=$3
    shift 3
    echo "conformance: begin $name"
    start=$(now)
    $box timeout -s KILL $seconds "/selftests/$program" "$@" 2>&1
    status=$?
    echo
    echo "conformance: end $status $(($(now) - start))"
}
run_without_pool() {
    $box mount -t tmpfs none $pool 2> /dev/null && hidden=yes || hidden=no
    run "$@"
    [ $hidden = yes ] && $box umount $pool
}
echo "conformance: kernel $($box uname -srv)"
for test in "$@"; do
    case $test in
"#,
    );
    for test in &TESTS {
        let Test { name, program, arguments, seconds, hides_hugetlb } = test;
        let run = if *hides_hugetlb { "run_without_pool" } else { "run" };
        let arguments = arguments.join(" ");
        writeln!(script, "    {name}) {run} {name} {seconds} {program} {arguments} ;;")
            .expect("a string takes all");
    }
    script.push_str("    esac\ndone\n$box poweroff -f\n");
    script
}

/// The output of one test, and its end.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Told {
    /// The whole output of the test.
    pub text: String,
    /// The test's exit status; `None` if the machine ended before the test did.
    pub status: Option<i32>,
    /// The seconds that the test ran, if it ended.
    pub seconds: Option<u64>,
}

/// The outputs on the console, by the tests' names, and the kernel's own name.
pub fn read(console: &str) -> (Option<String>, BTreeMap<String, Told>) {
    let (mut kernel, mut refused) = (None, String::new());
    let mut tests: BTreeMap<String, Told> = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in console.lines() {
        let told = line.split_once(TO_HOST).and_then(|(_, told)| told.trim_end().split_once(' '));
        match (told, &current) {
            (Some(("refused", what)), _) => refused = format!(" (refused {what})"),
            (Some(("kernel", name)), _) => kernel = Some(format!("{name}{refused}")),
            (Some(("begin", name)), _) => {
                tests.insert(name.to_owned(), Told::default());
                current = Some(name.to_owned());
            }
            (Some(("end", status)), Some(name)) => {
                if let Some(test) = tests.get_mut(name) {
                    let (status, seconds) = status.split_once(' ').unwrap_or((status, ""));
                    test.status = status.parse().ok();
                    test.seconds = seconds.parse().ok();
                }
                current = None;
            }
            (_, Some(name)) => {
                if let Some(test) = tests.get_mut(name) {
                    test.text.push_str(line);
                    test.text.push('\n');
                }
            }
            _ => {}
        }
    }
    (kernel, tests)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_each_test_wrote_is_told_apart() {
        let console = "noise\r\nconformance: kernel Linux 7.2\r\nconformance: begin a\r\nok 1\r\n\
                       \r\nconformance: end 0 12\r\nnoise\r\nconformance: begin b\r\nnot ok 1\r\n";
        let told = |text: &str, status, seconds| Told { text: text.to_owned(), status, seconds };
        let (kernel, tests) = read(console);
        assert_eq!(kernel.as_deref(), Some("Linux 7.2"));
        assert_eq!(tests["a"], told("ok 1\n\n", Some(0), Some(12)));
        assert_eq!(tests["b"], told("not ok 1\n", None, None));
        assert_eq!(read(""), (None, BTreeMap::new()));
        let (kernel, _) = read("conformance: refused swapon\nconformance: kernel Linux 7.2\n");
        assert_eq!(kernel.as_deref(), Some("Linux 7.2 (refused swapon)"));
    }

    #[test]
    fn the_script_parses_and_has_all_tests() {
        let script = text();
        for test in &TESTS {
            assert!(script.contains(&format!(" {} {} ", test.name, test.seconds)), "{}", test.name);
            assert!(script.contains(test.program), "{}", test.program);
        }
        assert!(script.contains(DIRECTORY));
        assert_eq!(script.matches(TO_HOST).count(), 4);
        let place = |part: &str| script.find(part).unwrap();
        assert!(place("disksize") < place("swapon") && place("swapon") < place("begin"));
        let checked = Command::new("sh").args(["-n", "-c", &script]).status().unwrap();
        assert!(checked.success());
    }
}
