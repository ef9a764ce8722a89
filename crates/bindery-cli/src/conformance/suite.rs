//! The Linux tests that are run, and the cases that are set apart.

use std::fmt;

/// One of the programs under `tools/testing/selftests/mm`, and its arguments.
#[derive(PartialEq, Eq, Debug)]
pub struct Test {
    /// The test's name.
    pub name: &'static str,
    /// The name of the test's source, without the ending; several tests may share a source.
    pub program: &'static str,
    /// The arguments of the test's program.
    pub arguments: &'static [&'static str],
    /// The time limit in seconds, after which it has failed.
    pub seconds: u64,
    /// Whether to hide Linux's pool of huge pages from the test, so that both kernels run the same
    /// cases. Such a test mixes its cases about `hugetlb` with the other cases.
    pub hides_hugetlb: bool,
}

const fn test(name: &'static str, arguments: &'static [&'static str]) -> Test {
    Test { name, program: name, arguments, seconds: 300, hides_hugetlb: false }
}

/// All tests, in display order.
pub static TESTS: [Test; 27] = [
    // The seed of the test's pattern, by default the time of day.
    test("mremap_test", &["-p", "1"]),
    test("mremap_dontunmap", &[]),
    test("map_fixed_noreplace", &[]),
    test("map_populate", &[]),
    test("mlock2-tests", &[]),
    test("droppable", &[]),
    test("madv_populate", &[]),
    test("mkdirty", &[]),
    test("mseal_test", &[]),
    test("merge", &[]),
    test("process_madv", &[]),
    test("mrelease_test", &[]),
    test("mdwe_test", &[]),
    test("prctl_thp_disable", &[]),
    // Runs for 10 seconds, repeatedly through 256 MiB.
    test("transhuge-stress", &["-d", "10", "256"]),
    test("khugepaged", &["all:anon"]),
    Test { program: "khugepaged", ..test("khugepaged-shmem", &["all:shmem"]) },
    Test { hides_hugetlb: true, ..test("cow", &[]) },
    test("guard-regions", &[]),
    test("folio_split_race_test", &[]),
    test("va_high_addr_switch", &[]),
    test("uffd-unit-tests", &[]),
    // Runs in 20 MiB, 16 times.
    test("uffd-stress", &["anon", "20", "16"]),
    Test { program: "uffd-stress", ..test("uffd-stress-shmem", &["shmem", "20", "16"]) },
    Test { hides_hugetlb: true, ..test("uffd-wp-mremap", &[]) },
    test("pagemap_ioctl", &[]),
    test("soft-dirty", &[]),
];

impl Test {
    /// The test of this name.
    ///
    /// # Errors
    /// If no test has this name; the text lists all tests.
    pub fn from_name(name: &str) -> Result<&'static Self, String> {
        TESTS.iter().find(|test| test.name == name).ok_or_else(|| {
            let known: Vec<&str> = TESTS.iter().map(|test| test.name).collect();
            format!("the tests are {}", known.join(", "))
        })
    }
}

/// The reason why a case does not count against us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// The case needs `hugetlb`'s pool of huge pages, which we do not have.
    Hugetlb,
    /// The case needs probes in programs (`perf_event_open`), which are not part of memory
    /// management.
    Uprobe,
    /// The case writes to read-only memory through `/proc/self/mem`. Debian's Linux refuses that
    /// unless it is booted with `proc_mem.force_override=always`, and so do we.
    ForcedWrite,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hugetlb => "it needs hugetlb, which is not there",
            Self::Uprobe => "it needs uprobes (perf_event_open), which are tracing, not memory",
            Self::ForcedWrite => "Debian's Linux refuses forced writes by /proc/self/mem as well",
        })
    }
}

/// The cases, each by its program and a part of its name.
const SET_APART: [(&str, &str, Reason); 5] = [
    ("mkdirty", "PTRACE write access", Reason::ForcedWrite),
    ("merge", "handle_uprobe_upon_merged_vma", Reason::Uprobe),
    ("va_high_addr_switch", "HUGETLB", Reason::Hugetlb),
    ("uffd-unit-tests", " on hugetlb", Reason::Hugetlb),
    ("pagemap_ioctl", "Hugetlb ", Reason::Hugetlb),
];

/// The reason why this case is set apart, if it is.
pub fn set_apart(test: &Test, case: &str) -> Option<Reason> {
    let fits =
        |(name, part, _): &&(&str, &str, Reason)| *name == test.program && case.contains(part);
    SET_APART.iter().find(fits).map(|(.., reason)| *reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_found_by_their_names() {
        for test in &TESTS {
            assert_eq!(Test::from_name(test.name), Ok(test));
        }
        let error = Test::from_name("mremap").unwrap_err();
        assert!(error.contains("mremap_dontunmap"), "{error}");
    }

    #[test]
    fn cases_are_set_apart_by_test_and_name() {
        let mkdirty = Test::from_name("mkdirty").unwrap();
        let reason = set_apart(mkdirty, "PTRACE write access: THP");
        assert_eq!(reason, Some(Reason::ForcedWrite));
        assert_eq!(set_apart(mkdirty, "Page migration: SIGSEGV generated"), None);
        let apart = |test, case| set_apart(Test::from_name(test).unwrap(), case);
        assert_eq!(apart("uffd-unit-tests", "minor-wp on hugetlb"), Some(Reason::Hugetlb));
        assert_eq!(apart("uffd-unit-tests", "minor-wp on shmem"), None);
        let merge = "merge.handle_uprobe_upon_merged_vma";
        assert_eq!(apart("merge", merge), Some(Reason::Uprobe));
        assert_eq!(apart("madv_populate", merge), None);
    }
}
