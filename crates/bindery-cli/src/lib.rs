//! Code shared by the program `bindery` and its tests: it builds a kernel and programs for a
//! machine inside QEMU, starts the machine, and judges the result; and the drivers of random calls.
//!
//! | module | contents |
//! |---|---|
//! | [`drivers`] | random calls and random threads |
//! | [`guest`] | kernel, programs, initial file system and machine |
//! | [`measured`] | the hosted machine, with a meter in its read sections |
//! | [`size`] | sizes in bytes, as users type and read them |

pub mod drivers;
pub mod guest;
pub mod measured;
pub mod size;
