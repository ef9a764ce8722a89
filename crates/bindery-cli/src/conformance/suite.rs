//! Which of Linux's own tests are run, and which of their cases are set apart.

use std::fmt;

/// One of the programs under `tools/testing/selftests/mm`.
#[derive(PartialEq, Eq, Debug)]
pub struct Test {
    /// Its name, which is also that of its source.
    pub name: &'static str,
    /// What it is started with.
    pub arguments: &'static [&'static str],
    /// After how many seconds it hangs.
    pub seconds: u64,
}

const fn test(name: &'static str, arguments: &'static [&'static str]) -> Test {
    Test { name, arguments, seconds: 300 }
}

/// All tests, in the order in which they are shown.
pub static TESTS: [Test; 9] = [
    // The seed of its pattern, which else would be the time of day.
    test("mremap_test", &["-p", "1"]),
    test("mremap_dontunmap", &[]),
    test("map_fixed_noreplace", &[]),
    test("map_populate", &[]),
    test("mlock2-tests", &[]),
    test("droppable", &[]),
    test("madv_populate", &[]),
    test("mkdirty", &[]),
    test("mseal_test", &[]),
];

impl Test {
    /// The test of this name.
    ///
    /// # Errors
    /// There is none; the text lists those that there are.
    pub fn from_name(name: &str) -> Result<&'static Self, String> {
        TESTS.iter().find(|test| test.name == name).ok_or_else(|| {
            let known: Vec<&str> = TESTS.iter().map(|test| test.name).collect();
            format!("the tests are {}", known.join(", "))
        })
    }
}

/// Why a case does not count against us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// It needs `userfaultfd`, which we do not have yet.
    Userfaultfd,
    /// It writes to what it may only read, through `/proc/self/mem`. Debian's Linux refuses that
    /// unless it is booted with `proc_mem.force_override=always`, and so do we.
    ForcedWrite,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Userfaultfd => "it needs userfaultfd, which is another issue's",
            Self::ForcedWrite => "Debian's Linux refuses forced writes by /proc/self/mem as well",
        })
    }
}

/// By the test, and a part of the case's name.
const SET_APART: [(&str, &str, Reason); 3] = [
    ("mremap_test", "mremap move multiple invalid vmas", Reason::Userfaultfd),
    ("mkdirty", "UFFDIO_COPY", Reason::Userfaultfd),
    ("mkdirty", "PTRACE write access", Reason::ForcedWrite),
];

/// Why this case is set apart, if it is.
pub fn set_apart(test: &Test, case: &str) -> Option<Reason> {
    let fits = |(name, part, _): &&(&str, &str, Reason)| *name == test.name && case.contains(part);
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
    fn cases_are_set_apart_by_their_test_and_name() {
        let mkdirty = Test::from_name("mkdirty").unwrap();
        let reason = set_apart(mkdirty, "UFFDIO_COPY: SIGSEGV generated, page not modified");
        assert_eq!(reason, Some(Reason::Userfaultfd));
        assert_eq!(set_apart(mkdirty, "Page migration: SIGSEGV generated"), None);
        let populate = Test::from_name("madv_populate").unwrap();
        assert_eq!(set_apart(populate, "UFFDIO_COPY"), None);
    }
}
