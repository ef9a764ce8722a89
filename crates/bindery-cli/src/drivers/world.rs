//! A machine with processes, files and swap, on which sequences of steps run.
//!
//! The single-threaded and the multi-threaded driver share this world. Each process has a lock,
//! which a step on the process acquires for reading, and which `exit` and a `fork` that replaces
//! the process acquire for writing.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::thread;
use std::time::Duration;

use bindery::platform::Cpu;
use bindery::{
    AddressSpace, DirtyLimit, FileAccess, FileSystem, Memory, Overcommit, Pinned, SizeMode,
    SpaceOptions, SwapArea, SwapOperation, Userfault,
};
use bindery_hosted::{
    BrokenControl, Config, Contents, DelayedFiles, Machine, SwapFile, SwapService, Walk,
};
use bindery_linux::{self as linux, IpcClock, OpenFile, SegmentSlot, Segments};

use super::bystander::Bystander;
use super::devices::{self, DEVICES, Device};
use super::rng::Rng;
use super::step::PROCESSES;

/// Slots of the swap device.
const DEVICE_SLOTS: u64 = 4096;

/// The machine before the first step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setup {
    /// Bytes of memory.
    pub memory: u64,
    /// CPUs. With more than one, the device serves requests from threads, slowly and in any order.
    pub cpus: u16,
    /// Whether the huge zero page is used.
    pub huge_zero_page: bool,
    /// Whether the swap device needs stable pages.
    pub stable_pages: bool,
    /// Whether the pager of the files holds requests and answers them from a thread.
    pub pager_keeps: bool,
    /// One request to the device in this number fails; 0 means that none fails.
    pub device_fails: u64,
    /// Slots of compressed memory that are on from the start; only few, so that swap is soon full.
    pub slots: u64,
    /// The limit of compressed memory in frames, if not half of the memory. With a limit of a few
    /// frames, compressed memory refuses pages while slots are free.
    pub compressed_limit: Option<u64>,
    /// The maximum number of dirty pages in the files' file system.
    pub dirty_limit: u64,
    /// One write of the files' pages in this number fails; 0 means that none fails.
    pub pager_fails: u64,
    /// A defect of the machine, for tests of the drivers.
    pub broken: Option<BrokenControl>,
}

impl Setup {
    /// The machine of a seed.
    pub(super) fn random(rng: &mut Rng, cpus: u16) -> Self {
        // A CPU keeps a 64th of the memory divided by the CPUs that are online, and nothing if that
        // is below 16 frames.
        let sizes = if cpus > 1 { &[8, 12, 16, 32][..] } else { &[12, 24, 48] };
        Self {
            memory: rng.one(sizes) << 20,
            cpus,
            huge_zero_page: rng.once_in(3),
            stable_pages: rng.once_in(2),
            device_fails: rng.one(&[0, 0, 7, 31, 2]),
            pager_keeps: cpus > 1 && rng.once_in(2),
            slots: rng.one(&[0, 8192, 8192, 1000, 71]),
            compressed_limit: rng.one(&[None, None, None, Some(40)]),
            dirty_limit: rng.one(&[u64::MAX, 1, 5, 40]),
            pager_fails: rng.one(&[0, 0, 0, 5]),
            broken: None,
        }
    }
}

/// A process. Its userfaultfds are closed before its memory is dropped.
pub(super) struct Process<'m, A: Walk> {
    pub(super) userfaults: RwLock<Vec<Userfault<'m, Machine<A>>>>,
    pub(super) space: AddressSpace<'m, Machine<A>>,
}

impl<'m, A: Walk> Process<'m, A> {
    pub(super) fn new(space: AddressSpace<'m, Machine<A>>) -> Self {
        Self { userfaults: RwLock::default(), space }
    }
}

/// The contents of objects, which outlive the memory.
#[derive(Debug)]
pub(super) struct Outside {
    pub(super) pager: DelayedFiles,
    dirty_limit: DirtyLimit,
    devices: [Device; DEVICES],
}

impl Outside {
    pub(super) fn new(setup: &Setup) -> Self {
        let pager = DelayedFiles::default();
        pager.fail_writes(setup.pager_fails);
        let dirty_limit = DirtyLimit::new(setup.dirty_limit);
        Self { pager, dirty_limit, devices: Default::default() }
    }
}

/// Everything that steps act on.
pub(super) struct World<'m, A: Walk> {
    pub(super) machine: &'m Machine<A>,
    pub(super) memory: &'m Memory<Machine<A>>,
    pub(super) segments: &'m Segments<'m, Machine<A>>,
    pub(super) device: &'static SwapFile,
    pub(super) processes: [RwLock<Option<Process<'m, A>>>; PROCESSES],
    pub(super) bystander: Mutex<Bystander<'m, A>>,
    pub(super) files: RwLock<Vec<OpenFile<'m, Machine<A>>>>,
    pub(super) pager: &'m DelayedFiles,
    /// The files of the pager.
    pub(super) disk: FileSystem<'m, Machine<A>>,
    /// The devices, and their open files.
    pub(super) devices: &'m [Device; DEVICES],
    pub(super) shown: Vec<OpenFile<'m, Machine<A>>>,
    pub(super) pins: Mutex<Vec<Pinned<'m, Machine<A>>>>,
    pub(super) areas: Mutex<Vec<SwapArea>>,
    setup: Setup,
    /// Frames that were free before the first process.
    free: u64,
}

/// A lock's guard, even if a thread has panicked, because the driver notices panics itself.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// As [`lock`], for a shared lock.
pub(super) fn read<T>(rw_lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    rw_lock.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The machine of a setup.
pub(super) fn machine<A: Walk>(setup: &Setup) -> Machine<A> {
    let Setup { memory, cpus, broken, .. } = *setup;
    let contents = Contents::Anything;
    Machine::new(Config { memory, contents, cpus, broken, ..Config::default() })
}

impl<'m, A: Walk> World<'m, A> {
    /// A world with `first` processes.
    pub(super) fn new(
        setup: &Setup,
        machine: &'m Machine<A>,
        memory: &'m Memory<Machine<A>>,
        outside: &'m Outside,
        first: usize,
    ) -> Self {
        memory.folio_policy().set_global(SizeMode::Never);
        memory.commitment().set_mode(Overcommit::Always);
        memory.set_huge_zero_page(setup.huge_zero_page);
        let free = memory.free_frame_count();
        let space = || AddressSpace::new(memory, SpaceOptions::default()).expect("memory enough");
        let processes = [(); PROCESSES].map(|()| RwLock::new(None));
        for process in &processes[..first] {
            *process.write().expect("no thread has it") = Some(Process::new(space()));
        }
        if let Some(frames) = setup.compressed_limit {
            memory.set_compressed_limit(frames);
        }
        let mut areas = Vec::new();
        if setup.slots > 0 {
            areas.push(memory.swap_on(setup.slots, 0).expect("memory enough"));
        }
        let device = Devices::take(setup);
        if setup.cpus > 1 {
            areas.push(memory.swap_on_device(device, 1).expect("memory enough"));
        }
        let disk = memory.file_system_within(&outside.pager, &outside.dirty_limit);
        Self {
            machine,
            memory,
            segments: segments(memory),
            device,
            processes,
            bystander: Mutex::new(Bystander::new(space(), setup.device_fails > 0)),
            files: RwLock::new(files(memory, &disk)),
            pager: &outside.pager,
            disk,
            devices: &outside.devices,
            shown: devices::open(memory, &outside.devices),
            pins: Mutex::default(),
            areas: Mutex::new(areas),
            setup: *setup,
            free,
        }
    }

    /// Takes a CPU offline, and online again after `pause`. No thread runs on the CPU.
    pub(super) fn replace_cpu(&self, cpu: Cpu, pause: Duration) {
        self.memory.cpu_offline(cpu).expect("the CPU is online");
        thread::sleep(pause);
        self.memory.cpu_online(cpu).expect("the CPU has its records");
    }

    /// The process with this number, while the guard lives.
    pub(super) fn process(&self, number: usize) -> RwLockReadGuard<'_, Option<Process<'m, A>>> {
        read(&self.processes[number % PROCESSES])
    }

    /// Calls `f` with all address spaces; none is created or dropped during the call.
    pub(super) fn with_spaces<R>(
        &self,
        f: impl FnOnce(&[&AddressSpace<'m, Machine<A>>]) -> R,
    ) -> R {
        let guards: Vec<_> = self.processes.iter().map(read).collect();
        let bystander = lock(&self.bystander);
        let processes = guards.iter().filter_map(|guard| guard.as_ref());
        let mut spaces: Vec<_> = processes.map(|process| &process.space).collect();
        spaces.push(&bystander.space);
        f(&spaces)
    }

    /// Whether an area that is on has room for another page.
    pub(super) fn swap_has_room(&self) -> bool {
        self.memory.swap_areas().any(|area| area.taken + 64 < area.slots)
    }

    /// Ends all processes and verifies that they leave nothing behind. The caller has waited for
    /// the device.
    pub(super) fn finish(self) {
        let Self { machine, memory, segments, device, setup, free, .. } = self;
        lock(&self.pins).clear();
        drop(self.processes);
        drop(self.bystander);
        drop(self.files);
        drop(self.shown);
        self.devices.iter().for_each(|device| device.finish(memory));
        segments.clear();
        for area in lock(&self.areas).iter() {
            memory.stop_swapping_to(area);
            memory.swap_off(area).unwrap_or_else(|error| {
                panic!("swapoff failed with {error:?} after the last process: slots have leaked")
            });
        }
        memory.drain_deferred();
        memory.trim();
        let kept = memory.huge_zero_page().map_or(0, |page| u64::from(page.count));
        let now = memory.free_frame_count() + kept;
        assert_eq!(now, free, "frames have leaked");
        assert_eq!(memory.commitment().committed(), 0, "committed memory has leaked");
        machine.assert_clean();
        Devices::put_back(&setup, device);
    }

    /// Leaks a world after a failure: dropping it would fail too.
    pub(super) fn forget(self) {
        if self.setup.cpus == 1 {
            Devices::put_back(&self.setup, self.device);
        }
        mem::forget(self);
    }
}

/// Room for segments. The value borrows itself, so it lives until the program ends;
/// [`Segments::clear`] frees the memory of its segments.
fn segments<'m, A: Walk>(memory: &'m Memory<Machine<A>>) -> &'m Segments<'m, Machine<A>> {
    let slots: Vec<_> = (0..8).map(|_| SegmentSlot::new()).collect();
    let clock = IpcClock { now: || 0, process: || 1 };
    Box::leak(Box::new(Segments::new(memory, Box::leak(slots.into_boxed_slice()), clock)))
}

/// Two memfds that can be sealed, one that cannot, files with a pager, secret memory.
fn files<'m, A: Walk>(
    memory: &'m Memory<Machine<A>>,
    disk: &FileSystem<'m, Machine<A>>,
) -> Vec<OpenFile<'m, Machine<A>>> {
    let both = FileAccess::READ | FileAccess::WRITE;
    let file = |number| disk.file(number, 0x60_0005).expect("memory enough");
    let memfd = |flags| linux::memfd_create(memory, flags).expect("memory enough");
    let files = vec![
        OpenFile { object: memfd(2), access: both },
        OpenFile { object: memfd(2), access: both },
        OpenFile { object: memfd(0), access: both },
        OpenFile { object: file(1), access: both },
        OpenFile { object: file(2), access: FileAccess::READ },
        OpenFile { object: linux::memfd_secret(memory, 0).expect("memory enough"), access: both },
    ];
    for file in &files[..2] {
        linux::ftruncate(file, 8 << 20);
    }
    files
}

/// The number on the disk of the file at this index of [`files`].
pub(super) fn number_on_disk(place: usize) -> Option<u64> {
    match place {
        3 => Some(1),
        4 => Some(2),
        _ => None,
    }
}

/// Swap devices. The core keeps a reference to each forever, so they are reused.
struct Devices;

/// Idle devices: each device, whether it serves requests from threads, and whether it needs stable
/// pages.
static IDLE: Mutex<Vec<(&SwapFile, bool, bool)>> = Mutex::new(Vec::new());

impl Devices {
    fn take(setup: &Setup) -> &'static SwapFile {
        let kind = (setup.cpus > 1, setup.stable_pages);
        let mut idle = lock(&IDLE);
        let found = idle.iter().position(|(_, slow, stable)| (*slow, *stable) == kind);
        let device = found.map(|at| idle.swap_remove(at).0).unwrap_or_else(|| {
            let service = match kind.0 {
                true => SwapService::Shuffled(1, Duration::from_micros(20)),
                false => SwapService::AtOnce,
            };
            let device = SwapFile::new(DEVICE_SLOTS, service).expect("room for a temporary file");
            let device = if kind.1 { device } else { device.without_stable_pages() };
            Box::leak(Box::new(device))
        });
        let (every, served) = (setup.device_fails, AtomicU64::new(0));
        device.fail(move |request| {
            // A failed read loses a page, and too many failed reads leave no content to check.
            let every = match request.operation() {
                SwapOperation::Write => every,
                SwapOperation::Read => every * 4,
            };
            every > 0 && served.fetch_add(1, Relaxed) % every == every - 1
        });
        device.start();
        device
    }

    fn put_back(setup: &Setup, device: &'static SwapFile) {
        lock(&IDLE).push((device, setup.cpus > 1, setup.stable_pages));
    }
}
