//! The kernel's mappings in each Linux process: `[vvar]` consists of frames without folios
//! (`VM_PFNMAP`), and the pages of `[vdso]` have folios. Each call runs in its own child on Linux,
//! and on a fresh address space here; results and errno agree.
//!
//! Here `[vvar]` is a private mapping of an object of frames whose memory type denies writes.
//! `[vdso]` is a private mapping of shared memory that never grows. No page is mapped yet, as in a
//! new child on Linux.

use std::ptr;

use bindery::addr::{Order, PAGE_SIZE, VirtAddr};
use bindery::arch::{MemoryType, X86_64};
use bindery::{
    Accounting, AddressSpace, FileAccess, MapFlags, MapObject, MapRequest, Memory, Object, Place,
    Protection, Sealing, Sharing, SpaceOptions,
};
use bindery_hosted::Machine;
use bindery_linux::{Call, Numbers, OpenFile, Process, proc};

use crate::support::devices::Driver;
use crate::support::{MIB, strict};

type Arch = X86_64;

/// The maximum size of one of the mappings in pages.
const MOST: usize = 16;
/// The address of the mapping here, and the address of a page for output.
const AT: u64 = 1 << 30;
const OUTPUT: u64 = 2 << 30;

/// The mapping to which a call applies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Special {
    Vvar,
    Vdso,
}

impl Special {
    fn name(self) -> &'static str {
        match self {
            Self::Vvar => "[vvar]",
            Self::Vdso => "[vdso]",
        }
    }

    /// The mapping's address and length in this process. Linux does not split such mappings, so
    /// calls cover the whole mapping. `None` if Linux has no such mapping, has sealed it
    /// (`CONFIG_MSEAL_SYSTEM_MAPPINGS`), or makes `[vvar]` of pages with folios.
    fn on_linux(self) -> Option<(u64, u64)> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let mut lines = smaps.lines().skip_while(|line| !line.ends_with(self.name()));
        let (start, rest) = lines.next()?.split_once('-')?;
        let (end, _) = rest.split_once(' ')?;
        let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
        let flags = lines.find(|line| line.starts_with("VmFlags:"))?;
        let has = |wanted| flags.split_whitespace().any(|flag| flag == wanted);
        let is_known = !has("sl") && has("pf") == (self == Self::Vvar);
        let fits = (end - start) / PAGE_SIZE <= MOST as u64;
        (is_known && fits).then_some((start, end - start))
    }
}

/// The memory of a call.
#[derive(Clone, Copy)]
struct Places {
    /// The mapping, and its length.
    at: u64,
    whole: u64,
    /// A page that the call may write.
    output: u64,
}

/// A call with its arguments; some are computed from an address.
struct Probe {
    name: String,
    call: Call,
    arguments: Box<dyn Fn(Places) -> [u64; 6]>,
}

fn probes() -> Vec<Probe> {
    let mut probes = Vec::new();
    let mut add = |name: String, call, arguments: Box<dyn Fn(Places) -> [u64; 6]>| {
        probes.push(Probe { name, call, arguments });
    };
    // `MADV_HWPOISON` and `MADV_SOFT_OFFLINE` are outside the core, and 12 and 13 need
    // `CONFIG_KSM`.
    for advice in (0..=25).chain(102..=103).filter(|advice| !matches!(advice, 12 | 13)) {
        let arguments = move |places: Places| [places.at, places.whole, advice, 0, 0, 0];
        add(format!("madvise {advice}"), Call::Madvise, Box::new(arguments));
    }
    for protection in [0, 1, 3] {
        let arguments = move |places: Places| [places.at, places.whole, protection, 0, 0, 0];
        add(format!("mprotect {protection}"), Call::Mprotect, Box::new(arguments));
    }
    for (name, call) in [("mlock", Call::Mlock), ("munlock", Call::Munlock)] {
        add(name.into(), call, Box::new(|places| [places.at, places.whole, 0, 0, 0, 0]));
    }
    for flags in [0, 1] {
        let arguments = move |places: Places| [places.at, places.whole, flags, 0, 0, 0];
        add(format!("mlock2 {flags}"), Call::Mlock2, Box::new(arguments));
    }
    for flags in [1, 2, 4] {
        let arguments = move |places: Places| [places.at, places.whole, flags, 0, 0, 0];
        add(format!("msync {flags}"), Call::Msync, Box::new(arguments));
    }
    let mincore = |places: Places| [places.at, places.whole, places.output, 0, 0, 0];
    add("mincore".into(), Call::Mincore, Box::new(mincore));
    // Growing, duplicating, and moving with `MREMAP_DONTUNMAP`: the old and the new length as
    // multiples of the mapping's.
    for (old, new, flags) in [(1, 64, 1), (0, 1, 1), (1, 1, 5)] {
        let arguments = move |Places { at, whole, .. }| [at, old * whole, new * whole, flags, 0, 0];
        add(format!("mremap {old} {new} {flags}"), Call::Mremap, Box::new(arguments));
    }
    add("munmap".into(), Call::Munmap, Box::new(|places| [places.at, places.whole, 0, 0, 0, 0]));
    probes
}

/// The answer: a result with normalized addresses, and the output of `mincore`.
type Answer = (i64, [u8; MOST]);

fn answer(probe: &Probe, result: i64, output: [u8; MOST]) -> Answer {
    let is_address = probe.call == Call::Mremap && result > 0;
    (if is_address { 1 } else { result }, output)
}

/// Linux's answer, from a child process, since the call may destroy its mapping.
fn ask_linux(probe: &Probe, (at, whole): (u64, u64)) -> Answer {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, which nothing else uses.
    let page = unsafe { libc::mmap(ptr::null_mut(), 4096, protection, flags, -1, 0) };
    assert_ne!(page, libc::MAP_FAILED);
    let output = page as u64;
    let arguments = (probe.arguments)(Places { at, whole, output });
    let number = probe.call.number(Numbers::X86_64) as i64;
    // SAFETY: the child makes two system calls and stores a word, all without the vDSO.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let [a, b, c, d, e, f] = arguments;
        // SAFETY: the call affects only memory of the child that its remaining code does not use.
        unsafe {
            let result = libc::syscall(number, a, b, c, d, e, f);
            let result = if result < 0 { -i64::from(*libc::__errno_location()) } else { result };
            page.cast::<i64>().add(8).write_volatile(result);
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: `status` is written.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert!(waited == child && status == 0, "{}: the child has ended with {status:#x}", probe.name);
    let mut bytes = [0; MOST];
    // SAFETY: the child wrote to the page before it ended, and no code writes to it now.
    let result = unsafe {
        ptr::copy_nonoverlapping(page.cast::<u8>(), bytes.as_mut_ptr(), bytes.len());
        let result = page.cast::<i64>().add(8).read_volatile();
        libc::munmap(page, 4096);
        result
    };
    answer(probe, result, bytes.map(|byte| byte & 1))
}

struct Ours<'s, 'm> {
    space: &'s AddressSpace<'m, Machine<Arch>>,
}

impl<'m> Process<'m, Machine<Arch>> for Ours<'_, 'm> {
    fn space(&self) -> &AddressSpace<'m, Machine<Arch>> {
        self.space
    }

    fn file(&self, _descriptor: i32) -> Option<OpenFile<'m, Machine<Arch>>> {
        None
    }

    fn process(&self, _descriptor: i32) -> Option<&AddressSpace<'m, Machine<Arch>>> {
        None
    }
}

/// An address space with the mapping at [`AT`], whose pages were read, and a page for output.
fn space<'m>(
    memory: &'m Memory<Machine<Arch>>,
    (special, whole): (Special, u64),
    object: &Object<'m, Machine<Arch>>,
) -> AddressSpace<'m, Machine<Arch>> {
    let space = AddressSpace::new(memory, SpaceOptions::default()).unwrap();
    let place = Place::Fixed(VirtAddr(AT));
    let read = Protection::READ;
    let protection = match special {
        Special::Vvar => read,
        Special::Vdso => read | Protection::EXECUTE,
    };
    let flags = MapFlags::DONT_EXPAND;
    let sharing = Sharing::Private;
    let request = MapRequest { length: whole, protection, place, sharing, flags };
    let source = MapObject { object, offset: 0, access: FileAccess::READ };
    space.mmap_object(&request, &source).unwrap();
    space
        .mmap(&MapRequest {
            length: PAGE_SIZE,
            protection: read | Protection::WRITE,
            place: Place::Fixed(VirtAddr(OUTPUT)),
            ..MapRequest::default()
        })
        .unwrap();
    space
}

fn ask_ours<'m>(
    probe: &Probe,
    memory: &'m Memory<Machine<Arch>>,
    (special, whole): (Special, u64),
    object: &Object<'m, Machine<Arch>>,
) -> Answer {
    let space = space(memory, (special, whole), object);
    let arguments = (probe.arguments)(Places { at: AT, whole, output: OUTPUT });
    let result = bindery_linux::call(&Ours { space: &space }, probe.call, arguments);
    let mut bytes = [0; MOST];
    space.read_user(VirtAddr(OUTPUT), &mut bytes).unwrap();
    answer(probe, result, bytes)
}

/// The calls whose answers differ, and the reason.
const DIFFERENCES: [(Special, &str, &str); 5] = [
    (Special::Vvar, "madvise 9", "Linux's mapping has no file; here it is an object's"),
    (Special::Vvar, "madvise 18", "as above: what has no file may be wiped"),
    (Special::Vvar, "mincore", "as above: of what has no file, Linux does not tell"),
    (Special::Vdso, "madvise 9", "as above"),
    (Special::Vdso, "madvise 18", "as above"),
];

/// The mapping in this process, if Linux can judge calls on it; otherwise prints the reason.
fn judged(special: Special) -> Option<(u64, u64)> {
    if let Some(reason) = super::linux::unable() {
        println!("skipped: {reason}");
        return None;
    }
    let found = special.on_linux();
    if found.is_none() {
        println!("skipped: Linux has no such {} here", special.name());
    }
    found
}

fn compare(special: Special) {
    let Some((at, whole)) = judged(special) else { return };
    let (_machine, memory) = strict::<Arch>(16 * MIB);
    let block = memory.allocate_frames(Order(4)).unwrap();
    let driver = Driver::of(&[(0, block.first, block.count)]);
    let object = match special {
        Special::Vvar => memory.frame_object(&driver, whole, MemoryType::Device),
        Special::Vdso => memory.shared_memory(whole, Sealing::Forbidden, Accounting::None),
    };
    let object = object.unwrap();
    let mut wrong = Vec::new();
    for probe in probes() {
        let theirs = ask_linux(&probe, (at, whole));
        let ours = ask_ours(&probe, &memory, (special, whole), &object);
        let known = DIFFERENCES.iter().any(|(of, name, _)| *of == special && *name == probe.name);
        if (theirs == ours) == known {
            wrong.push(format!("{}: Linux {theirs:?}, ours {ours:?}", probe.name));
        }
    }
    let name = special.name();
    assert!(wrong.is_empty(), "{name}: {wrong:#?}");
}

#[test]
fn calls_on_vvar_agree_with_linux() {
    compare(Special::Vvar);
}

#[test]
fn calls_on_vdso_agree_with_linux() {
    compare(Special::Vdso);
}

/// The fields of `/proc/self/smaps` and `/proc/self/pagemap` that do not depend on the protection.
#[test]
fn files_of_proc_agree_with_linux_about_vvar() {
    let Some((at, whole)) = judged(Special::Vvar) else { return };
    let (_machine, memory) = strict::<Arch>(16 * MIB);
    let block = memory.allocate_frames(Order(4)).unwrap();
    let driver = Driver::of(&[(0, block.first, block.count)]);
    let object = memory.frame_object(&driver, whole, MemoryType::Device).unwrap();
    let space = space(&memory, (Special::Vvar, whole), &object);
    let mut ours = String::new();
    proc::smaps(&space, &proc::Unnamed, &mut ours).unwrap();
    let theirs = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let of = |text: &str, start: u64| {
        let head = format!("{start:x}-");
        let lines =
            text.lines().skip_while(|line| !line.trim_start_matches('0').starts_with(&head));
        let lines: Vec<String> = lines.skip(1).take(32).map(str::to_owned).collect();
        let end = lines.iter().position(|line| line.starts_with("VmFlags:")).expect("flags");
        let flags: Vec<String> = lines[end]
            .split_whitespace()
            .filter(|flag| matches!(*flag, "pf" | "io" | "de" | "dd" | "mw" | "lo" | "ac"))
            .map(str::to_owned)
            .collect();
        let counts = ["Rss:", "Pss:", "Referenced:", "Anonymous:", "Swap:", "Locked:"];
        let counts = counts.map(|name| {
            lines[..end].iter().find(|line| line.starts_with(name)).expect("a count").clone()
        });
        (counts, flags)
    };
    assert_eq!(of(&ours, AT), of(&theirs, at));
    let mut words = vec![0; (whole / PAGE_SIZE) as usize];
    proc::pagemap(&space, AT / PAGE_SIZE, proc::PhysicalAddresses::Withheld, &mut words);
    let file = std::fs::File::open("/proc/self/pagemap").unwrap();
    let mut bytes = vec![0; 8 * words.len()];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, at / PAGE_SIZE * 8).unwrap();
    let theirs = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
    let present = |word: u64| word >> 61;
    assert!(theirs.zip(words).all(|(theirs, ours)| present(theirs) == present(ours)));
}
