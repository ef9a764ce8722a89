//! `/proc`: processes and the machine. The core writes the texts about memory
//! (`bindery_linux::proc`).
//!
//! | file | what |
//! |---|---|
//! | [`directories`] | the directories, and the links in them |
//! | [`descriptors`] | what is known of an open descriptor |
//! | [`file`] | the files of a process |
//! | [`texts`] | texts about a process |
//! | [`names`] | the names of mappings |
//! | [`machine`], [`frames`] | files of the machine as a whole |
//! | [`sysctl`] | `/proc/sys`: the kernel's settings |

mod descriptors;
mod directories;
mod file;
mod frames;
mod machine;
mod names;
mod sysctl;
mod texts;

use crate::process;

pub use directories::root;
pub use names::remember;
pub use sysctl::renew_commit_limit;

/// The inode numbers of `/proc`: file 3 of process 5 has the number 5,003 plus a constant.
fn number(process: u32, index: usize) -> u64 {
    (1 << 40) + u64::from(process) * 1000 + index as u64
}

/// The owner of a process's files: the superuser if other processes of the same user may not access
/// the process.
fn owner(process: u32) -> (u32, u32) {
    let process = process::find(process).filter(|process| process.is_dumpable());
    process.map_or((0, 0), |process| {
        let who = process.credentials();
        (who.user.effective, who.group.effective)
    })
}
