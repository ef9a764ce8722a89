//! Files: an in-memory file system that starts with the contents of the initramfs, and all other
//! things that have descriptors.
//!
//! | file | what |
//! |---|---|
//! | [`attributes`], [`inode`] | kinds and attributes; those of nodes in memory |
//! | [`node`] | files and directories of every kind, and their places |
//! | [`root`], [`tree`] | the root of the file system; the tree at boot, and its end |
//! | [`program`] | programs to be run |
//! | [`memory`] | directories, regular files, symbolic links |
//! | [`store`] | the storage of a directory's files, where that is not memory |
//! | [`path`] | from a path to a node |
//! | [`permission`] | owner, group and permission bits |
//! | [`descriptor`] | descriptors and what they share |
//! | [`console`], [`stream`], [`device`], [`frame_buffer`], [`silent_file`], [`pipe`], [`socket`], [`event`], [`epoll`] | everything else that is read and written |
//! | [`disk`] | the files of the disk, under `/disk` |
//! | [`generated`], [`proc`], [`sys`] | files whose text is made when it is read |
//! | [`sequence`] | the part of such a text that one read asks for |
//! | [`huge_pages`] | the pools of huge pages, which are empty |
//! | [`swap`] | swap areas and their device |
//! | [`listing`] | texts that are made entry by entry, for `/proc` |
//! | [`userfault`] | descriptors of userfaultfds |
//! | [`segments`] | the memory of a program that a call reads or writes |
//! | [`manner`] | flags of one transfer, and the largest size of a file |
//! | [`calls`], [`transfer`], [`splice`], [`names`], [`status`], [`poll`] | the system calls |

mod attributes;
pub mod calls;
mod console;
mod descriptor;
mod device;
pub mod disk;
mod epoll;
mod event;
pub mod frame_buffer;
mod generated;
mod huge_pages;
mod inode;
mod listing;
mod manner;
mod memory;
mod names;
mod node;
mod path;
mod permission;
mod pipe;
pub mod poll;
mod proc;
mod program;
mod root;
mod segments;
mod sequence;
mod silent_file;
mod socket;
mod splice;
mod status;
mod store;
mod stream;
pub mod swap;
mod sys;
mod transfer;
mod tree;
mod userfault;

pub use attributes::Patience;
pub use calls::{insert_process, process_behind, process_to_wait_for};
pub use console::listen;
pub use descriptor::{Files, Inherited};
pub use node::Mappable;
pub use poll::changed;
pub use program::{Program, open_program, program_of};
pub use silent_file::{end_silence, give_up_silent};
pub use stream::first_files;
pub use tree::{begin, end};
