//! Pairs of calls whose second call is never audited, at whatever step the first is held. At some
//! steps it waits for the first call; at the others it finds memory that the first call has
//! removed. A pair that is not listed must be audited at one step or more.

/// Held calls, and calls that cannot succeed in between.
const NEVER: &[(&[&str], &[&str])] = &[
    // User copies hold the VMA for reading.
    (&["move anon", "move anon, congruent", "munmap anon"], &["read_user", "write_user to anon"]),
    (
        &["move file", "move file, congruent", "mprotect none", "munmap all", "munmap part"],
        &["read_user"],
    ),
    (&["drop child"], &["drop child"]),
    (
        &["move file", "move file, congruent", "munmap all"],
        &["move file", "move file, congruent", "guard install in file"],
    ),
    (
        &["move file", "move file, congruent", "move part of file", "munmap part", "munmap all"],
        &[
            "move part of file",
            "mprotect none",
            "mprotect none, one table",
            "mprotect read",
            "mprotect read and back",
            "dontneed file",
            "cold file",
        ],
    ),
    (
        &["move anon", "move anon, congruent", "munmap anon"],
        &[
            "move anon",
            "move anon, congruent",
            "dontneed anon",
            "free anon",
            "guard install in anon",
            "fault anon, read",
        ],
    ),
    (&["munmap all"], &["move private, leaving the mapping"]),
    (
        &[
            "move anon",
            "move anon, congruent",
            "munmap anon",
            "grow and lock",
            "guard install in anon",
        ],
        &["grow and lock"],
    ),
    (
        &["move file", "move file, congruent", "move anon", "move anon, congruent", "munmap all"],
        &["guard remove"],
    ),
    (
        &[
            "move file",
            "move file, congruent",
            "move part of file",
            "munmap part",
            "munmap all",
            "map over",
            "sync",
            "truncate",
            "punch",
            "punch all",
            "write file",
        ],
        &["collapse file"],
    ),
    (
        &["sync", "truncate", "punch", "punch all", "write file"],
        &["sync", "truncate", "punch", "punch all", "write file"],
    ),
    (
        &[
            "move file",
            "move file, congruent",
            "move part of file",
            "munmap part",
            "munmap all",
            "mprotect none",
            "mprotect none, one table",
            "mprotect read",
            "sync",
            "truncate",
            "punch",
            "punch all",
        ],
        &["fault file, write"],
    ),
    (&["sync", "truncate", "punch", "punch all"], &["fault file in the other space, write"]),
    (
        &[
            "move file",
            "move file, congruent",
            "move part of file",
            "munmap part",
            "munmap all",
            "mprotect none",
            "mprotect none, one table",
            "sync",
            "truncate",
            "punch",
            "punch all",
        ],
        &["fault file, read"],
    ),
    (
        &["munmap all", "sync", "truncate", "punch", "punch all"],
        &["fault private, write", "fault private, read"],
    ),
    (
        &["move anon", "move anon, congruent", "munmap anon", "guard install in anon"],
        &["fault anon, write"],
    ),
    (
        &[
            "move file",
            "move file, congruent",
            "munmap part",
            "munmap all",
            "mprotect none",
            "mprotect read",
            "sync",
            "truncate",
            "punch",
            "punch all",
        ],
        &["write_user to file"],
    ),
    (
        &[
            "move file",
            "move file, congruent",
            "move anon",
            "move anon, congruent",
            "munmap anon",
            "munmap all",
            "mprotect none",
            "mprotect read",
            "sync",
            "truncate",
            "punch",
            "punch all",
        ],
        &["pin"],
    ),
    (
        &[
            "move anon",
            "move anon, congruent",
            "munmap anon",
            "dontneed anon",
            "guard install in anon",
        ],
        &["collapse anon"],
    ),
    (
        &["drop child", "page out the child's", "swap in at the child's"],
        &["page out the child's", "swap in at the child's"],
    ),
    (
        &["guard install in anon", "move anon", "move anon, congruent", "munmap anon"],
        &["try fault anon"],
    ),
    (
        &[
            "map over",
            "move file",
            "move file, congruent",
            "move part of file",
            "munmap all",
            "munmap part",
        ],
        &["punch"],
    ),
    (&["mlock"], &["dontneed anon", "free anon", "grow and lock"]),
    (
        &["mlock", "move anon", "move anon, congruent", "munmap anon"],
        &["dontneed swapped", "page out anon"],
    ),
    (
        &["move anon", "move anon, congruent", "munmap anon"],
        &["copy to anon", "mlock", "swap in, read", "swap in, write"],
    ),
    (
        &[
            "move file",
            "move file, congruent",
            "move part of file",
            "mprotect none",
            "mprotect none, one table",
            "mprotect read",
            "munmap all",
            "munmap part",
        ],
        &["try fault file"],
    ),
    (
        &["move file", "move file, congruent", "move part of file", "munmap all", "munmap part"],
        &["msync"],
    ),
    (&["munmap all"], &["try fault private", "write_forced to private"]),
    (&["write_forced to private"], &["fault private, write", "try fault private"]),
    (&["munmap anon"], &["guard remove"]),
    (&["page out the child's", "swap in at the child's"], &["drop child"]),
    (
        &["punch shared"],
        &["read shared", "swap in shared at the other's, write", "swap in shared, read", "swapoff"],
    ),
    (&["punch shared", "read shared", "truncate shared"], &["punch shared", "truncate shared"]),
    (&["read shared"], &["reclaim"]),
];

/// Whether `stepped_in` cannot succeed at any step of `held`. A call in steps holds at some steps
/// what its blocking form holds.
pub fn is_expected(held: &str, stepped_in: &str) -> bool {
    let [held, stepped_in] =
        [held, stepped_in].map(|name| name.strip_suffix(", in steps").unwrap_or(name));
    NEVER.iter().any(|(a, b)| a.contains(&held) && b.contains(&stepped_in))
}
