//! The console as a stream of bytes, for a program whose host redirects it to a pipe or a file: no
//! echo, no signals, and `isatty` is false.

use alloc::sync::Arc;

use linux_raw_sys::general::{O_RDONLY, O_WRONLY, POLLIN, POLLOUT};

use crate::console;
use crate::errno::Errno;
use crate::options::{self, Standard};

use super::attributes::{Attributes, Kind, Patience};
use super::console as terminal;
use super::descriptor::{Description, Files};
use super::node::{Node, Place};
use super::root::root;

/// The standard descriptors of the first program: the console, in the form that the command line
/// selects.
///
/// # Errors
/// `ENOMEM`.
pub fn first_files() -> Result<Files, Errno> {
    Files::new(standard()?, root())
}

/// Standard input, output and error of the first program.
///
/// # Errors
/// `ENOMEM`.
fn standard() -> Result<[Arc<Description>; 3], Errno> {
    let (input, output) = options::standard();
    let both = terminal::open()?;
    let read = match input {
        Standard::Terminal => both.clone(),
        Standard::Stream => describe(b"pipe:[0]", O_RDONLY)?,
    };
    let write = match output {
        Standard::Terminal => both,
        Standard::Stream => describe(b"pipe:[1]", O_WRONLY)?,
    };
    Ok([read, write.clone(), write])
}

fn describe(name: &[u8], flags: u32) -> Result<Arc<Description>, Errno> {
    let node: Arc<dyn Node> = Arc::new(Stream);
    Description::new(Place::alone(node.clone(), name), node, flags)
}

struct Stream;

impl Node for Stream {
    fn kind(&self) -> Kind {
        Kind::Pipe
    }

    fn attributes(&self) -> Attributes {
        Attributes::plain(2, 0o600)
    }

    fn read(&self, _: u64, into: &mut [u8], patience: Patience) -> Result<usize, Errno> {
        terminal::read(into, patience)
    }

    fn write(&self, _: u64, from: &[u8], _: Patience) -> Result<usize, Errno> {
        console::write(from);
        Ok(from.len())
    }

    fn ready(&self) -> u32 {
        POLLOUT | if terminal::has_input() { POLLIN } else { 0 }
    }
}
