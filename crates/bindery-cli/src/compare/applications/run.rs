//! One run of an application: its script, and the report on its console.

use bindery_cli::guest::Problem;

use super::super::script::{BEGIN, LOAD_SWAP, SWAP_MODULES, TO_HOST, failed, host_lines};
use super::suite::{Application, Build};

/// The size of the swap device in MiB: more than any application needs.
const SWAP: u64 = 256;

/// The report of a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    /// The kernel's own name.
    pub kernel: String,
    /// The application's answer.
    pub answer: String,
    /// The peak memory use minus the memory in use before the run, in KiB.
    pub memory: u64,
    /// The maximum swap space in use, in KiB.
    pub swap: u64,
    /// Pages swapped out.
    pub out: u64,
    /// Pages swapped in.
    pub into_memory: u64,
}

/// The first program of both kernels.
pub fn script(application: &Application) -> String {
    let program = match application.build {
        Build::Script => format!("$box sh /{}", application.source()),
        Build::C
        | Build::Glibc
        | Build::Library { .. }
        | Build::Go
        | Build::QuickJs
        | Build::Redis => {
            format!("/bin/{}", application.name)
        }
    };
    let reads = application.reads.map(|file| format!(" /{file}")).unwrap_or_default();
    let arguments = application.arguments.join(" ");
    format!(
        "{BEGIN}$box mount -t tmpfs tmpfs /tmp\n\
         {LOAD_SWAP}\n\
         $box rm -rf {SWAP_MODULES}\n\
         echo \"{TO_HOST}kernel $($box uname -srv)\"\n\
         /bin/run {SWAP} {program}{reads} {arguments}\n\
         echo \"{TO_HOST}status $?\"\n\
         $box poweroff -f\n"
    )
}

/// Reads the console of a machine that ran [`script`].
///
/// # Errors
/// If the application failed, or did not end.
pub fn judge(console: &str) -> Result<Told, Problem> {
    let (mut kernel, mut succeeded) = (None, false);
    for line in host_lines(console) {
        match line.split_once(' ') {
            Some(("kernel", name)) => kernel = Some(name.to_owned()),
            Some(("status", "0")) => succeeded = true,
            _ => return Err(failed(line, console)),
        }
    }
    let found = |start: &str, end: &str| {
        console.lines().find_map(|line| {
            let (_, rest) = line.split_once(start)?;
            Some(rest.trim_end().split_once(end).map_or(rest.trim_end(), |(found, _)| found))
        })
    };
    let number = |start: &str, end: &str| found(start, end)?.parse::<u64>().ok();
    let all = (|| {
        Some(Told {
            kernel: kernel?,
            answer: found("answer ", "\r")?.to_owned(),
            memory: number("memory ", " kB, swap")?,
            swap: number(" kB, swap ", " kB")?,
            out: number("pages ", " out,")?,
            into_memory: number(" out, ", " in")?,
        })
    })();
    all.filter(|_| succeeded)
        .ok_or_else(|| failed("the machine ended before the workload did", console))
}

#[cfg(test)]
mod tests {
    use super::super::super::script::tests::check;
    use super::super::suite::APPLICATIONS;
    use super::*;

    const GOOD: &str = "noise\r\ncompare: kernel Linux 7.2.13 #1\r\nanswer 0123456789abcdef\r\n\
        memory 29168 kB, swap 1234 kB\r\npages 33 out, 22 in\r\ncompare: status 0\r\n";

    #[test]
    fn a_successful_run_reports_answer_and_memory() {
        let expected = Told {
            kernel: "Linux 7.2.13 #1".to_owned(),
            answer: "0123456789abcdef".to_owned(),
            memory: 29_168,
            swap: 1_234,
            out: 33,
            into_memory: 22,
        };
        assert_eq!(judge(GOOD).unwrap(), expected);
    }

    #[test]
    fn anything_less_is_a_failure() {
        for (from, to) in [
            ("status 0", "status 137"),
            ("compare: status 0", ""),
            ("answer", "error"),
            ("swap 1234", "swap much"),
            ("pages 33", "pages"),
            ("compare: kernel", "kernel"),
            ("noise", "compare: refused /swap-modules/0.ko"),
        ] {
            let console = GOOD.replace(from, to);
            assert_ne!(console, GOOD);
            assert!(judge(&console).is_err(), "{to}");
        }
    }

    #[test]
    fn each_script_parses_and_runs_its_application() {
        for application in &APPLICATIONS {
            let text = script(application);
            check(&text);
            assert!(text.contains(application.name), "{text}");
        }
        let lua = script(Application::from_name("lua").unwrap());
        assert!(lua.contains("/bin/run 256 /bin/lua /tables.lua 80000\n"), "{lua}");
        let sort = script(Application::from_name("sort").unwrap());
        assert!(sort.contains("/bin/run 256 $box sh /sort.sh 40000\n"), "{sort}");
    }
}
