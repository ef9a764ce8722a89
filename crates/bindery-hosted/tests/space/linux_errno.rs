//! The same bad calls to the host's Linux and to an address space: results, errno and the mappings
//! afterwards agree.
//!
//! Both have the same layout in a window of 64 pages, far from everything else in the process:
//!
//! ```text
//! pages   0        8        12       16       20                          64
//!         | rw     |        | r      | rw     |                            |
//! ```
//!
//! Calls that Linux would perform elsewhere are left out: the process needs its mappings.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::ffi::c_void;
use std::{fs, io};

use bindery::addr::VirtAddr;
use bindery::arch::{Arch, X86_64};
use bindery::{AddressSpace, Error, MapRequest, Operation, Place, Protection, Remap, SpaceOptions};
use bindery_hosted::Machine;
use rustix::mm::{self, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::support::alone::ran_alone;
use crate::support::{READ_WRITE, READ_WRITE_EXECUTE, audit, fixed, strict};

type Space<'m> = AddressSpace<'m, Machine<X86_64<4>>>;

const PAGE: u64 = 4096;
const WINDOW: u64 = 0x2000_0000_0000;
const END: u64 = X86_64::<4>::USER_END;
/// The distance around the window in which the process maps nothing of its own.
const AROUND: u64 = 1 << 30;

/// The addresses of the calls.
const ADDRESSES: [u64; 27] = [
    0,
    1,
    PAGE - 1,
    PAGE,
    WINDOW,
    WINDOW + 1,
    WINDOW + 3 * PAGE,
    WINDOW + 7 * PAGE,
    WINDOW + 8 * PAGE,
    WINDOW + 10 * PAGE,
    WINDOW + 12 * PAGE,
    WINDOW + 15 * PAGE,
    WINDOW + 16 * PAGE,
    WINDOW + 19 * PAGE,
    WINDOW + 20 * PAGE,
    END - 2 * PAGE,
    END - PAGE,
    END - 1,
    END,
    END + 1,
    END + PAGE,
    1 << 48,
    1 << 63,
    0xffff_8000_0000_0000,
    u64::MAX - PAGE + 1,
    u64::MAX - 1,
    u64::MAX,
];

const LENGTHS: [u64; 17] = [
    0,
    1,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    2 * PAGE,
    8 * PAGE,
    9 * PAGE,
    20 * PAGE,
    END,
    END + 1,
    END + PAGE,
    1 << 48,
    1 << 63,
    u64::MAX - PAGE + 1,
    u64::MAX - PAGE + 2,
    u64::MAX,
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Map { place: Place, length: u64 },
    Unmap { start: u64, length: u64 },
    Protect { start: u64, length: u64, protection: Protection },
    Remap { old: u64, old_length: u64, length: u64, remap: Remap },
}

/// The result of a call: an address (0 if the call returns none or chooses one), or an errno.
type Outcome = Result<u64, i32>;

/// A range of the window and its permissions.
type Layout = Vec<(u64, u64, Protection)>;

impl Call {
    fn operation(self) -> Operation {
        match self {
            Self::Map { .. } => Operation::Mmap,
            Self::Unmap { .. } => Operation::Munmap,
            Self::Protect { .. } => Operation::Mprotect,
            Self::Remap { .. } => Operation::Mremap,
        }
    }

    /// Whether the call chooses the address that it returns.
    fn chooses(self) -> bool {
        match self {
            Self::Map { place, .. } => matches!(place, Place::Anywhere | Place::Near(_)),
            Self::Remap { remap, .. } => matches!(remap, Remap::MayMove | Remap::Leave(_)),
            _ => false,
        }
    }

    fn make(self, space: &Space<'_>) -> Result<u64, Error> {
        match self {
            Self::Map { place, length } => {
                let request =
                    MapRequest { length, protection: READ_WRITE, place, ..MapRequest::default() };
                space.mmap(&request).map(|at| at.0)
            }
            Self::Unmap { start, length } => space.munmap(VirtAddr(start), length).map(|()| 0),
            Self::Protect { start, length, protection } => {
                space.mprotect(VirtAddr(start), length, protection).map(|()| 0)
            }
            Self::Remap { old, old_length, length, remap } => {
                space.mremap(VirtAddr(old), old_length, length, remap).map(|at| at.0)
            }
        }
    }

    /// Makes the call on Linux.
    fn make_to_linux(self) -> Outcome {
        let read_write = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a call is either refused or changes only memory in or around the window, which
        // only this test uses (`harmless` ensures this).
        let done = unsafe {
            match self {
                Self::Map { place, length } => {
                    let (at, flags) = match place {
                        Place::Anywhere => (0, MapFlags::empty()),
                        Place::Near(at) => (at.0, MapFlags::empty()),
                        Place::Fixed(at) => (at.0, MapFlags::FIXED),
                        Place::FixedNoReplace(at) => (at.0, MapFlags::FIXED_NOREPLACE),
                    };
                    let flags = flags | MapFlags::PRIVATE;
                    mm::mmap_anonymous(pointer(at), length as usize, read_write, flags).map(address)
                }
                Self::Unmap { start, length } => {
                    mm::munmap(pointer(start), length as usize).map(|()| 0)
                }
                Self::Protect { start, length, protection } => {
                    let flags = MprotectFlags::from_bits_retain(u32::from(protection.bits()));
                    mm::mprotect(pointer(start), length as usize, flags).map(|()| 0)
                }
                Self::Remap { old, old_length, length, remap } => {
                    let (old, old_length) = (pointer(old), old_length as usize);
                    let length = length as usize;
                    let flags = MremapFlags::MAYMOVE;
                    match remap {
                        Remap::InPlace => {
                            mm::mremap(old, old_length, length, MremapFlags::empty()).map(address)
                        }
                        Remap::MayMove => mm::mremap(old, old_length, length, flags).map(address),
                        Remap::To(to) => {
                            mm::mremap_fixed(old, old_length, length, flags, pointer(to.0))
                                .map(address)
                        }
                        Remap::LeaveTo(to) => {
                            let flags = flags | MremapFlags::DONTUNMAP;
                            mm::mremap_fixed(old, old_length, length, flags, pointer(to.0))
                                .map(address)
                        }
                        Remap::Leave(hint) => {
                            let flags = (flags | MremapFlags::DONTUNMAP).bits();
                            // rustix has no call with a hint.
                            let at = libc::syscall(
                                libc::SYS_mremap,
                                old,
                                old_length,
                                length,
                                flags as usize,
                                hint.0,
                            );
                            match at {
                                -1 => {
                                    return Err(io::Error::last_os_error().raw_os_error().unwrap());
                                }
                                at => Ok(at as u64),
                            }
                        }
                    }
                }
            }
        };
        done.map_err(|errno| errno.raw_os_error())
    }

    /// Whether Linux would change only the surroundings of the window or addresses that are
    /// certainly free, and need not find more memory than a machine has.
    fn harmless(self) -> bool {
        match self {
            // Linux mistakes a fixed address in the last page for an error number and returns it.
            Self::Map { place: Place::Fixed(at) | Place::FixedNoReplace(at), length } => {
                free(at.0, length) && at.0 <= u64::MAX - PAGE + 1
            }
            Self::Map { .. } => true,
            Self::Unmap { start, length } | Self::Protect { start, length, .. } => {
                free(start, length)
                    || (WINDOW..WINDOW + AROUND).contains(&start)
                        && matches!(self, Self::Protect { .. })
            }
            Self::Remap { old, old_length, length, remap } => {
                let shrinks_elsewhere = old_length > length && !free(old, old_length);
                let to = match remap {
                    Remap::To(to) | Remap::LeaveTo(to) => Some(to),
                    Remap::InPlace | Remap::MayMove | Remap::Leave(_) => None,
                };
                let replaces_elsewhere = to.is_some_and(|to| !free(to.0, length));
                !shrinks_elsewhere && !replaces_elsewhere
            }
        }
    }
}

fn pointer(at: u64) -> *mut c_void {
    core::ptr::without_provenance_mut(at as usize)
}

fn address(pointer: *mut c_void) -> u64 {
    pointer.addr() as u64
}

/// Whether the range, rounded up to pages, is in user space.
fn valid(start: u64, length: u64) -> bool {
    let end = length.checked_next_multiple_of(PAGE).and_then(|length| start.checked_add(length));
    end.is_some_and(|end| end <= END)
}

/// Whether the process maps nothing in the range, or the range is invalid.
fn free(start: u64, length: u64) -> bool {
    let end = start.saturating_add(length);
    let around = start >= WINDOW - AROUND && end <= WINDOW + AROUND;
    // Programs are not loaded at such low addresses, and the layout of the top gigabytes of user
    // space is random.
    let low = end <= 64 * PAGE;
    let high = start >= END - 4 * PAGE && end <= END;
    !valid(start, length) || around || low || high
}

/// The initial mappings of both sides, pages and protection.
const PARTS: [(u64, u64, Protection); 3] =
    [(0, 8, READ_WRITE), (12, 4, Protection::READ), (16, 4, READ_WRITE)];

fn lay_out(space: &Space<'_>) {
    let around = VirtAddr(WINDOW - AROUND);
    space.munmap(around, 2 * AROUND).unwrap();
    // SAFETY: only this test uses the memory around the window.
    unsafe { mm::munmap(pointer(around.0), 2 * AROUND as usize).unwrap() };
    for (first, pages, protection) in PARTS {
        let at = WINDOW + first * PAGE;
        space.mmap(&MapRequest { protection, ..fixed(at, pages * PAGE) }).unwrap();
        let map = Call::Map { place: Place::Fixed(VirtAddr(at)), length: pages * PAGE };
        assert_eq!(map.make_to_linux(), Ok(at));
        let protect = Call::Protect { start: at, length: pages * PAGE, protection };
        assert_eq!(protect.make_to_linux(), Ok(0));
    }
}

/// Merges adjacent ranges with equal permissions: whether Linux merges two mappings depends on
/// invisible state.
fn joined(parts: impl Iterator<Item = (u64, u64, Protection)>) -> Layout {
    let mut layout = Layout::new();
    for (start, end, protection) in parts {
        match layout.last_mut() {
            Some(last) if last.1 == start && last.2 == protection => last.1 = end,
            _ => layout.push((start, end, protection)),
        }
    }
    layout
}

fn layout(space: &Space<'_>) -> Layout {
    let mut parts = Vec::new();
    space.for_each_mapping(|mapping| {
        parts.push((mapping.range.start().0, mapping.range.end().0, mapping.protection));
    });
    joined(parts.into_iter().filter(near))
}

fn layout_of_linux() -> Layout {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let parts = maps.lines().map(|line| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        let mut protection = Protection::empty();
        protection.set(Protection::READ, rest.as_bytes()[0] == b'r');
        protection.set(Protection::WRITE, rest.as_bytes()[1] == b'w');
        protection.set(Protection::EXECUTE, rest.as_bytes()[2] == b'x');
        (number(start), number(end), protection)
    });
    joined(parts.filter(near))
}

fn near(part: &(u64, u64, Protection)) -> bool {
    part.0 >= WINDOW - AROUND && part.1 <= WINDOW + AROUND
}

/// Both sides, compared call by call.
fn compare(calls: impl Iterator<Item = Call>) {
    let (machine, memory) = strict::<X86_64<4>>(64 << 20);
    // This thread drops its privileges, so that low addresses are forbidden.
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::SYS_RAWIO);
    set_capabilities(None, sets).unwrap();
    let minimum = fs::read_to_string("/proc/sys/vm/mmap_min_addr").unwrap();
    let minimum_address = VirtAddr(minimum.trim().parse().unwrap());
    let space = AddressSpace::new(&memory, SpaceOptions { minimum_address, ..Default::default() });
    let space = space.unwrap();
    let mut differences = Vec::new();
    let (mut made, mut refused) = (0, 0);
    for call in calls.filter(|call| call.harmless()) {
        lay_out(&space);
        let before = layout(&space);
        assert_eq!(before, layout_of_linux());
        let ours = call.make(&space);
        let theirs = call.make_to_linux();
        let now = (layout(&space), layout_of_linux());
        let outcome: Outcome = ours.map_err(|error| error.errno(call.operation()) as i32);
        let alike = match (outcome, theirs) {
            (Ok(_), Ok(_)) if call.chooses() => true,
            (ours, theirs) => ours == theirs,
        };
        // Linux has already shrunk a mapping when the move to a low address fails. The core changes
        // nothing.
        let expected = match ours {
            Err(Error::BelowMinimum { .. }) => &before,
            _ => &now.1,
        };
        if !alike || (!call.chooses() && now.0 != *expected) {
            differences.push(format!("{call:x?}\n  ours {ours:x?} Linux {theirs:x?}\n  {now:x?}"));
        }
        made += 1;
        refused += u32::from(ours.is_err());
        tidy(call, &space, ours.ok(), theirs.ok());
    }
    audit(&machine, &memory, &[&space]);
    let (count, shown) = (differences.len(), differences.len().min(12));
    assert_eq!(count, 0, "{count} of {made} calls differ:\n{}", differences[..shown].join("\n"));
    assert!(refused * 2 > made, "{refused} of {made} calls were refused");
}

/// Unmaps memory that a call has mapped outside the window.
fn tidy(call: Call, space: &Space<'_>, ours: Option<u64>, theirs: Option<u64>) {
    let (Call::Map { length, .. } | Call::Remap { length, .. }) = call else { return };
    let elsewhere = |at: &u64| !(WINDOW - AROUND..WINDOW + AROUND).contains(at);
    if let Some(at) = ours.filter(elsewhere) {
        space.munmap(VirtAddr(at), length).unwrap();
    }
    if let Some(at) = theirs.filter(elsewhere) {
        // SAFETY: the call has just mapped this range, and no other code knows it.
        unsafe { mm::munmap(pointer(at), length as usize).unwrap() };
    }
}

#[test]
fn mmap_refuses_what_linux_refuses() {
    if ran_alone(module_path!(), "mmap_refuses_what_linux_refuses") {
        return;
    }
    compare(LENGTHS.into_iter().flat_map(|length| {
        let places = ADDRESSES
            .into_iter()
            .map(VirtAddr)
            .flat_map(|at| [Place::Fixed(at), Place::FixedNoReplace(at), Place::Near(at)]);
        places.chain([Place::Anywhere]).map(move |place| Call::Map { place, length })
    }));
}

#[test]
fn munmap_refuses_what_linux_refuses() {
    if ran_alone(module_path!(), "munmap_refuses_what_linux_refuses") {
        return;
    }
    compare(
        LENGTHS.into_iter().flat_map(|length| {
            ADDRESSES.into_iter().map(move |start| Call::Unmap { start, length })
        }),
    );
}

#[test]
fn mprotect_refuses_what_linux_refuses() {
    if ran_alone(module_path!(), "mprotect_refuses_what_linux_refuses") {
        return;
    }
    compare(LENGTHS.into_iter().flat_map(|length| {
        ADDRESSES.into_iter().flat_map(move |start| {
            [Protection::empty(), Protection::READ, READ_WRITE, READ_WRITE_EXECUTE]
                .map(|protection| Call::Protect { start, length, protection })
        })
    }));
}

/// Whether the host's Linux is at least 6.17, whose `mremap` checks its arguments in a different
/// order than before.
fn has_the_new_mremap() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
    version >= (6, 17)
}

#[test]
fn mremap_refuses_what_linux_refuses() {
    if ran_alone(module_path!(), "mremap_refuses_what_linux_refuses") {
        return;
    }
    if !has_the_new_mremap() {
        eprintln!("skipped: this Linux is older than 6.17");
        return;
    }
    // All lengths at one address, then all addresses with a few lengths.
    let lengths = LENGTHS
        .into_iter()
        .flat_map(|old_length| LENGTHS.into_iter().map(move |length| (old_length, length)));
    let few = [0, PAGE, 8 * PAGE, 9 * PAGE, u64::MAX];
    let kinds = |to| [Remap::To(to), Remap::LeaveTo(to), Remap::Leave(to)];
    let targets = move || ADDRESSES.into_iter().map(VirtAddr).flat_map(kinds);
    let remaps = move || targets().chain([Remap::InPlace, Remap::MayMove]);
    let in_place = lengths.flat_map(move |(old_length, length)| {
        let elsewhere = kinds(VirtAddr(WINDOW + 24 * PAGE));
        let remaps = [Remap::InPlace, Remap::MayMove].into_iter().chain(elsewhere);
        remaps.map(move |remap| Call::Remap { old: WINDOW, old_length, length, remap })
    });
    let elsewhere = ADDRESSES.into_iter().flat_map(move |old| {
        few.into_iter().flat_map(move |old_length| {
            few.into_iter().flat_map(move |length| {
                remaps().map(move |remap| Call::Remap { old, old_length, length, remap })
            })
        })
    });
    compare(in_place.chain(elsewhere));
}
