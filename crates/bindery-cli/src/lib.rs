//! What the program `bindery` and its tests share: building a kernel and programs for a machine
//! inside QEMU, starting it, and judging how it went; and the drivers of random calls.
//!
//! | module | what |
//! |---|---|
//! | [`drivers`] | random calls and random threads |
//! | [`guest`] | kernel, programs, initial file system and machine |
//! | [`measured`] | the hosted machine, with a meter in its read sections |
//! | [`size`] | sizes in bytes, as users type and read them |

pub mod drivers;
pub mod guest;
pub mod measured;
pub mod size;
