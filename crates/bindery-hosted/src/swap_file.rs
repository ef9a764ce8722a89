//! A swap device in a file of the host: [`SwapFile`].
//!
//! Requests wait in a queue. The device's threads, or the test itself, serve and complete them one
//! by one. To the core, each completion is an interrupt. Transfers can fail, take time, and
//! complete in any order.

use std::collections::{HashSet, VecDeque};
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use std::{env, fmt, io, process, thread};

use bindery::addr::PAGE_SIZE;
use bindery::{Memory, Platform, SwapDevice, SwapDeviceError, SwapOperation, SwapRequest};
use parking_lot::{Condvar, Mutex};
use rustix::fs::{FallocateFlags, fallocate};

use crate::{Machine, Walk};

const PAGE: usize = PAGE_SIZE as usize;

/// The time and order in which the device serves requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwapService {
    /// Before [`SwapDevice::submit`] returns.
    AtOnce,
    /// When a thread serves them ([`SwapFile::serve`], [`SwapFile::serve_one`]), oldest first.
    InOrder,
    /// Like `InOrder`, but in an order that the number determines; each request takes this long.
    Shuffled(u64, Duration),
}

/// The work of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapFileCounts {
    /// Read requests, including failed ones.
    pub reads: u64,
    /// Pages that the read requests cover.
    pub pages_read: u64,
    /// Write requests, including failed ones.
    pub writes: u64,
    /// Pages that the write requests cover.
    pub pages_written: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Writes whose pages changed during the transfer. A device with checksums could not read them.
    pub unstable: u64,
    /// Discarded slots, which are holes in the file.
    pub discarded: u64,
}

/// Decides which requests fail.
type Fails = dyn Fn(&SwapRequest) -> bool + Send + Sync;

struct Queue {
    waiting: VecDeque<SwapRequest>,
    /// First slots and pages of the requests that threads are serving.
    served: Vec<(u64, u32)>,
    /// Slots without content in the file.
    holes: HashSet<u64>,
    service: SwapService,
    fails: Box<Fails>,
    stopped: bool,
    counts: SwapFileCounts,
}

/// A swap device in a temporary file, which is deleted when the device is dropped.
///
/// ```
/// use bindery::arch::X86_64;
/// use bindery_hosted::{Config, Machine, SwapFile, SwapService};
///
/// let memory = Machine::<X86_64>::new(Config::default()).memory()?;
/// let device: &SwapFile = Box::leak(Box::new(SwapFile::new(1024, SwapService::InOrder)?));
/// let area = memory.swap_on_device(device, 0).unwrap();
/// std::thread::scope(|scope| {
///     scope.spawn(|| device.serve(&memory)); // completes requests from a thread of its own
///     assert_eq!(memory.swap_off(&area), Ok(()));
///     device.stop();
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SwapFile {
    file: File,
    slots: u64,
    needs_stable_pages: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl fmt::Debug for SwapFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapFile").field("slots", &self.slots).finish_non_exhaustive()
    }
}

impl SwapFile {
    /// A device with this number of slots.
    ///
    /// # Errors
    /// The host's, for a temporary file.
    pub fn new(slots: u64, service: SwapService) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let path = env::temp_dir().join(format!("bindery-swap-{}-{number}", process::id()));
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).open(&path)?;
        fs::remove_file(&path)?;
        file.set_len(slots * PAGE_SIZE)?;
        let queue = Queue {
            waiting: VecDeque::new(),
            served: Vec::new(),
            holes: HashSet::new(),
            service,
            fails: Box::new(|_| false),
            stopped: false,
            counts: SwapFileCounts::default(),
        };
        let (queue, changed) = (Mutex::new(queue), Condvar::new());
        Ok(Self { file, slots, needs_stable_pages: true, queue, changed })
    }

    /// Allows pages to change while the device writes them ([`SwapDevice::needs_stable_pages`]).
    #[must_use]
    pub fn without_stable_pages(self) -> Self {
        Self { needs_stable_pages: false, ..self }
    }

    /// Makes requests fail for which `fails` returns true. `fails` is called once for each request,
    /// in the order of service.
    pub fn fail(&self, fails: impl Fn(&SwapRequest) -> bool + Send + Sync + 'static) {
        self.queue.lock().fails = Box::new(fails);
    }

    /// The counts so far.
    pub fn counts(&self) -> SwapFileCounts {
        self.queue.lock().counts
    }

    /// The number of pages that the file occupies on the host's disk, if known.
    pub fn pages_on_disk(&self) -> Option<u64> {
        Some(self.file.metadata().ok()?.blocks() * 512 / PAGE_SIZE)
    }

    /// The number of requests that wait to be served.
    pub fn waiting(&self) -> usize {
        self.queue.lock().waiting.len()
    }

    /// Waits until a request waits to be served.
    pub fn wait_for_request(&self) {
        let mut queue = self.queue.lock();
        self.changed.wait_while(&mut queue, |queue| queue.waiting.is_empty());
    }

    /// Serves requests until [`SwapFile::stop`], including all requests that are still queued at
    /// that time.
    pub fn serve<A: Walk>(&self, memory: &Memory<Machine<A>>) {
        loop {
            {
                let mut queue = self.queue.lock();
                let idle = |queue: &mut Queue| queue.waiting.is_empty() && !queue.stopped;
                self.changed.wait_while(&mut queue, idle);
            }
            if !self.serve_one(memory) && self.queue.lock().stopped {
                return;
            }
        }
    }

    /// Allows threads to serve again after [`SwapFile::stop`].
    pub fn start(&self) {
        self.queue.lock().stopped = false;
    }

    /// Makes the threads in [`SwapFile::serve`] return.
    pub fn stop(&self) {
        self.queue.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Serves a request, if one waits.
    pub fn serve_one<A: Walk>(&self, memory: &Memory<Machine<A>>) -> bool {
        let (request, delay) = {
            let mut queue = self.queue.lock();
            let Queue { waiting, service, .. } = &mut *queue;
            let request = match service {
                SwapService::Shuffled(seed, _) if !waiting.is_empty() => {
                    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    waiting.remove((*seed >> 33) as usize % waiting.len())
                }
                SwapService::AtOnce | SwapService::InOrder | SwapService::Shuffled(..) => {
                    waiting.pop_front()
                }
            };
            let Some(request) = request else { return false };
            let delay = match *service {
                SwapService::Shuffled(_, delay) => delay,
                SwapService::AtOnce | SwapService::InOrder => Duration::ZERO,
            };
            queue.begin(&request);
            (request, delay)
        };
        self.transfer(memory, request, delay);
        true
    }

    /// Transfers the pages of a request that was taken from the queue.
    fn transfer<A: Walk>(
        &self,
        memory: &Memory<Machine<A>>,
        request: SwapRequest,
        delay: Duration,
    ) {
        let failed = (self.queue.lock().fails)(&request);
        let before = bytes_of(memory, &request);
        if !delay.is_zero() {
            thread::sleep(delay);
        }
        let at = request.slot() * PAGE_SIZE;
        let done = match request.operation() {
            _ if failed => Err(SwapDeviceError),
            SwapOperation::Write => {
                self.file.write_all_at(&before, at).map_err(|_| SwapDeviceError)
            }
            SwapOperation::Read => {
                let mut bytes = before.clone();
                let read = self.file.read_exact_at(&mut bytes, at).map_err(|_| SwapDeviceError);
                read.map(|()| store_bytes(memory, &request, &bytes))
            }
        };
        let write = request.operation() == SwapOperation::Write;
        let unstable = write && bytes_of(memory, &request) != before;
        self.queue.lock().end(&request, done.is_err(), unstable);
        memory.complete_swap_request(request, done);
    }
}

impl Queue {
    /// Whether a request covers any of the slots.
    fn has(&self, slots: &Range<u64>) -> bool {
        let is_used =
            |first: u64, pages: u32| first < slots.end && slots.start < first + u64::from(pages);
        self.served.iter().any(|(first, pages)| is_used(*first, *pages))
            || self.waiting.iter().any(|request| is_used(request.slot(), request.pages()))
    }

    fn begin(&mut self, request: &SwapRequest) {
        let (first, pages) = (request.slot(), request.pages());
        self.served.push((first, pages));
        let slots = first..first + u64::from(pages);
        match request.operation() {
            SwapOperation::Read => assert!(
                !slots.clone().any(|slot| self.holes.contains(&slot)),
                "slot {first} is read after it was free",
            ),
            SwapOperation::Write => slots.for_each(|slot| {
                self.holes.remove(&slot);
            }),
        }
        let counts = &mut self.counts;
        let (requests, moved) = match request.operation() {
            SwapOperation::Read => (&mut counts.reads, &mut counts.pages_read),
            SwapOperation::Write => (&mut counts.writes, &mut counts.pages_written),
        };
        *requests += 1;
        *moved += u64::from(pages);
    }

    fn discard(&mut self, first: u64, count: u64) {
        let slots = first..first + count;
        assert!(!self.has(&slots), "slot {first} is discarded while a request has it");
        self.holes.extend(slots);
        self.counts.discarded += count;
    }

    fn end(&mut self, request: &SwapRequest, failed: bool, unstable: bool) {
        self.served.retain(|(first, _)| *first != request.slot());
        self.counts.failed += u64::from(failed);
        self.counts.unstable += u64::from(unstable);
    }
}

impl<A: Walk> SwapDevice<Machine<A>> for SwapFile {
    fn slots(&self) -> u64 {
        self.slots
    }

    fn needs_stable_pages(&self) -> bool {
        self.needs_stable_pages
    }

    fn discards(&self) -> bool {
        true
    }

    fn discard(&self, _memory: &Memory<Machine<A>>, first: u64, count: u64) {
        let mut queue = self.queue.lock();
        queue.discard(first, count);
        // The queue stays locked, because a transfer that begins before the hole is punched would
        // lose its content.
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A file system without holes keeps the content, which is not needed.
        let _ = fallocate(&self.file, punch, first * PAGE_SIZE, count * PAGE_SIZE);
    }

    fn submit(&self, memory: &Memory<Machine<A>>, request: SwapRequest) {
        let mut queue = self.queue.lock();
        let first = request.slot();
        let slots = first..first + u64::from(request.pages());
        assert!(!queue.has(&slots), "slot {first} has two requests at once");
        if queue.service == SwapService::AtOnce {
            queue.begin(&request);
            drop(queue);
            return self.transfer(memory, request, Duration::ZERO);
        }
        queue.waiting.push_back(request);
        self.changed.notify_all();
    }
}

/// The content of the request's frames.
fn bytes_of<A: Walk>(memory: &Memory<Machine<A>>, request: &SwapRequest) -> Vec<u8> {
    let mut bytes = vec![0; request.pages() as usize * PAGE];
    for (page, bytes) in (0..).zip(bytes.chunks_mut(PAGE)) {
        let from = memory.platform().direct_map(request.frame().plus(page));
        // SAFETY: the request owns the frame until it completes, and no reference to its bytes
        // exists. A program that writes to it at the same time does so by atomics, like this read.
        unsafe { memory.platform().read_bytes(from, bytes) };
    }
    bytes
}

fn store_bytes<A: Walk>(memory: &Memory<Machine<A>>, request: &SwapRequest, bytes: &[u8]) {
    for (page, bytes) in (0..).zip(bytes.chunks(PAGE)) {
        let to = memory.platform().direct_map(request.frame().plus(page));
        // SAFETY: as in `bytes_of`.
        unsafe { memory.platform().write_bytes(to, bytes) };
    }
}
