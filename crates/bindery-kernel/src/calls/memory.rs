//! The calls about memory: the core answers them; descriptors are ours.

use bindery::linux::{self, Call, Numbers, OpenFile};
use linux_raw_sys::general::{MAP_ANONYMOUS, MAP_LOCKED, MAP_POPULATE};

use crate::errno::{Errno, Outcome, from_raw};
use crate::files::Mappable;
use crate::memory::{Space, memory};
use crate::platform::Machine;
use crate::process;

/// The running process, as the core has to know it.
struct Caller<'a> {
    space: &'a Space,
    file: Option<OpenFile<'static, Machine>>,
    other: Option<&'a Space>,
}

impl linux::Process<'static, Machine> for Caller<'_> {
    fn space(&self) -> &Space {
        self.space
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'static, Machine>> {
        self.file.clone()
    }

    fn process(&self, _descriptor: i32) -> Option<&Space> {
        self.other
    }
}

/// Makes a call about memory; `None` where the number is another call's.
pub fn call(number: u64, mut arguments: [u64; 6]) -> Option<Outcome> {
    let call = Call::from_number(const { numbers() }, number)?;
    let (mut file, mut other) = (None, None);
    match call {
        Call::Mmap if arguments[3] as u32 & MAP_ANONYMOUS == 0 => {
            match process::current().process.files().mappable(arguments[4] as i32) {
                Ok(Mappable::File(open)) => file = Some(open),
                // As Linux: a mapping of /dev/zero is anonymous, shared or not.
                Ok(Mappable::Zeroes) => arguments[3] |= u64::from(MAP_ANONYMOUS),
                // The core's own checks of the arguments come first, as on Linux.
                Err(Errno::EBADF) => {}
                Err(errno) => return Some(Err(errno)),
            }
        }
        Call::ProcessMadvise => match process::space_behind(arguments[0] as i32) {
            Ok(space) => other = Some(space),
            // As above.
            Err(Errno::EBADF) => {}
            Err(errno) => return Some(Err(errno)),
        },
        _ => {}
    }
    let outcome = process::with_space(|space| {
        let caller = Caller { space, file, other: other.as_deref() };
        from_raw(linux::call(&caller, call, arguments))
    });
    // As Linux: `mmap` does not tell that there was no memory for pages in advance, but somebody has
    // to make room.
    if call == Call::Mmap
        && arguments[3] as u32 & (MAP_POPULATE | MAP_LOCKED) != 0
        && memory().free_frames() < NEARLY_NONE
    {
        process::memory_ran_out();
    }
    Some(outcome)
}

/// So few free frames mean that pages in advance were not all there.
const NEARLY_NONE: u64 = 64;

const fn numbers() -> Numbers {
    if cfg!(target_arch = "x86_64") { Numbers::X86_64 } else { Numbers::Generic }
}
