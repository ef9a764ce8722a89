//! The fixture of runners: the initial state of a sequence.

use std::fs;
use std::slice;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::thread::{CapabilitySet, capabilities};

use super::super::observation::{Counters, LONGEST};
use super::super::operation::Operation;
use super::super::place::{
    BREAK, FILES, FIRST_PROCESS, PAGE, READ_ONLY, SCRATCH, SCRATCH_PAGES, USERFAULTFD, WRITE_ONLY,
    ZEROES, page,
};
use super::super::words::{Shared, Sink};
use super::access::{self, handle_signals};
use super::look::{Eyes, decimal};
use super::runner::{Runner, call};

/// Memory for the observations of one sequence.
const ROOM: usize = 8 << 20;

/// The time in seconds after which a runner counts as hung.
const PATIENCE: u64 = 60;

/// The oldest Linux that can be the judge. Earlier versions behave differently, above all in
/// `mremap`.
const OLDEST: (u32, u32) = (6, 18);

/// The reason why Linux cannot be the judge here, if any.
pub fn unable() -> Option<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < OLDEST {
        return Some(format!("this Linux is {release}, and older than {OLDEST:?}"));
    }
    // The counterparts of the core's settings in `ours`. Any overcommit mode that allows some
    // overcommit is acceptable.
    const SETTINGS: [(&str, &str); 2] = [
        ("/sys/kernel/mm/transparent_hugepage/enabled", "[madvise]"),
        ("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "[never]"),
    ];
    for (file, wanted) in SETTINGS {
        let text = fs::read_to_string(file).unwrap_or_default();
        if !text.contains(wanted) {
            return Some(format!("{file} says {:?}, not {wanted}", text.trim()));
        }
    }
    if fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2") {
        return Some("memory may not be overcommitted".to_owned());
    }
    let able =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    (!able).then(|| "not being limited in what is locked needs to be root".to_owned())
}

/// The common parts of all runners of a judge.
pub struct Fixture {
    shared: Shared<'static>,
    buffer: Box<[u8]>,
    eyes: Option<Eyes>,
}

impl Fixture {
    /// Prepares the judge's process, which must have no other use.
    pub fn new() -> Self {
        std::panic::set_hook(Box::new(|panic| {
            eprintln!("{panic}");
            // SAFETY: the process ends at once and shares no state that would be left inconsistent.
            unsafe { libc::_exit(101) };
        }));
        handle_signals();
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let room = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                ROOM,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        };
        let room = room.expect("memory that is shared").cast::<AtomicU64>();
        // SAFETY: the mapping is never removed, and all processes access it only through this
        // slice, atomically.
        let words = unsafe { slice::from_raw_parts(room, ROOM / 8) };
        let buffer = vec![1; LONGEST as usize].into_boxed_slice();
        Self { shared: Shared(words), buffer, eyes: Some(Eyes::new()) }
    }

    /// Runs a sequence in a new process. Returns its observations.
    pub fn run(&mut self, operations: &[Operation]) -> Vec<u64> {
        self.shared.clear();
        // SAFETY: the child needs no other thread, and allocates nothing.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork");
        if child == 0 {
            self.begin(operations);
        }
        let mut status = 0;
        // SAFETY: there is room for the status.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!((waited, status), (child, 0), "the runner has failed at {operations:#?}");
        self.shared.read()
    }

    /// In the new process: sets up the initial state and runs the sequence.
    fn begin(&mut self, operations: &[Operation]) -> ! {
        call(libc::SYS_alarm, [PATIENCE, 0, 0, 0, 0, 0]);
        open_files();
        unmap_what_cannot_be_locked();
        move_the_break();
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED) as u64;
        let length = SCRATCH_PAGES * PAGE;
        let scratch = call(libc::SYS_mmap, [SCRATCH, length, protection, flags, u64::MAX, 0]);
        assert_eq!(scratch as u64, SCRATCH);
        for at in (SCRATCH..SCRATCH + length).step_by(PAGE as usize) {
            assert_eq!(access::store(at, 0), Ok(()));
        }
        let mut eyes = self.eyes.take().unwrap_or_else(Eyes::new);
        eyes.open();
        let Counters { mapped, data, locked } = eyes.begin_to_count();
        assert_eq!(locked, 0);
        for word in [mapped, data, hard_limit(libc::RLIMIT_MEMLOCK) / PAGE] {
            self.shared.put(word);
        }
        let (shared, buffer) = (self.shared, &mut *self.buffer);
        Runner { operations, shared, eyes, buffer, words: [0; 5], number: 0, other: None }.run();
        // SAFETY: the process ends at once, as a forked copy should.
        unsafe { libc::_exit(0) }
    }
}

/// The limit that the limits of a process can never exceed.
pub fn hard_limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure matches the kernel's layout, and this function owns it.
    assert_eq!(unsafe { libc::getrlimit(resource, &mut limit) }, 0, "getrlimit");
    limit.rlim_max
}

/// Opens the files, each under its number.
fn open_files() {
    for (index, number) in [FILES[0], FILES[1], FILES[2], WRITE_ONLY].into_iter().enumerate() {
        let flags = if index == 2 { 0 } else { libc::MFD_ALLOW_SEALING };
        // SAFETY: the name is a string that ends in a zero.
        let file = unsafe { libc::memfd_create(c"file".as_ptr(), flags) };
        rename(file, number);
    }
    // The files are opened together; the second descriptor replaces the combined one. SAFETY: the
    // path is a string that ends in a zero.
    let [reading, writing] = [libc::O_RDONLY, libc::O_WRONLY]
        .map(|flags| unsafe { libc::open(c"/proc/self/fd/204".as_ptr(), flags) });
    rename(reading, READ_ONLY);
    rename(writing, WRITE_ONLY);
    for (flags, number) in [libc::O_RDWR, libc::O_RDONLY].into_iter().zip(ZEROES) {
        // SAFETY: the path is a string that ends in a zero.
        rename(unsafe { libc::open(c"/dev/zero".as_ptr(), flags) }, number);
    }
    // SAFETY: `getpid` does not access memory.
    let this = unsafe { libc::getpid() } as u64;
    rename(call(libc::SYS_pidfd_open, [this, 0, 0, 0, 0, 0]) as i32, FIRST_PROCESS);
    let flags = (libc::O_NONBLOCK | libc::O_CLOEXEC) as u64;
    rename(call(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]) as i32, USERFAULTFD);
}

/// Moves an open file to another descriptor.
fn rename(file: i32, number: u64) {
    assert!(file >= 0, "file {number} cannot be opened");
    // SAFETY: the descriptors are ours; none of the numbers was in use.
    let renamed = unsafe { libc::dup2(file, number as i32) };
    assert_eq!(renamed as u64, number);
    // SAFETY: this descriptor is no longer used.
    unsafe { libc::close(file) };
}

/// The kernel maps its own pages (vDSO) into the process, and `mlockall` skips them. They are
/// unmapped because the process does not use the vDSO.
fn unmap_what_cannot_be_locked() {
    let text = fs::read_to_string("/proc/self/maps").expect("the mappings");
    for line in text.lines().filter(|line| line.contains("[vvar") || line.contains("[vdso]")) {
        let (range, _) = line.split_once(' ').expect("a range");
        let (start, end) = range.split_once('-').expect("two ends");
        let number = |text| u64::from_str_radix(text, 16).expect("a number");
        let (start, end) = (number(start), number(end));
        assert_eq!(call(libc::SYS_munmap, [start, end - start, 0, 0, 0, 0]), 0, "{line}");
    }
}

/// The structure of `PR_SET_MM_MAP`, as in `prctl(2)`.
#[repr(C)]
struct MemoryMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_break: u64,
    program_break: u64,
    start_stack: u64,
    arguments: [u64; 2],
    environment: [u64; 2],
    auxiliary: u64,
    auxiliary_size: u32,
    executable: u32,
}

/// Moves the program break to the region. The size of the program's own data counts towards its
/// limit, so it is set to zero.
fn move_the_break() {
    let text = fs::read("/proc/self/stat").expect("the status");
    // The name, in parentheses, may contain anything; the fields behind it have numbers from 3.
    let behind = text.iter().rposition(|byte| *byte == b')').expect("a name") + 2;
    let fields: Vec<_> = text[behind..].split(|byte| *byte == b' ').map(decimal).collect();
    let field = |number: usize| fields[number - 3];
    let map = MemoryMap {
        start_code: field(26),
        end_code: field(27),
        start_data: field(46),
        end_data: field(46),
        start_break: page(BREAK),
        program_break: page(BREAK),
        start_stack: field(28),
        arguments: [field(48), field(49)],
        environment: [field(50), field(51)],
        auxiliary: 0,
        auxiliary_size: 0,
        executable: u32::MAX,
    };
    let (map, size) = ((&raw const map) as u64, size_of::<MemoryMap>() as u64);
    let (set, what) = (libc::PR_SET_MM as u64, libc::PR_SET_MM_MAP as u64);
    assert_eq!(call(libc::SYS_prctl, [set, what, map, size, 0, 0]), 0, "PR_SET_MM_MAP");
}
