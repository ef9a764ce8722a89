//! CPUs with a TLB and a walker each, and a page that one of them frees.

use core::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool as Flag, Ordering::Relaxed};
use std::vec::Vec;

use bindery::addr::{Frame, VirtAddr, VirtRange};
use bindery::platform::{Cpu, CpuSet, Invalidation, Tables};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::super::{LocalTlb, OnCpu, ShootdownCpu, Shootdowns, Translations};
use crate::atomic::Ordering;
use crate::rule::{Rule, omit};

pub(super) const P: Frame = Frame(3);
pub(super) const Q: Frame = Frame(4);
const CPUS: usize = 3;

#[derive(Default)]
pub(super) struct Seen {
    pub(super) used: Flag,
    pub(super) freed: Flag,
    pub(super) served: Flag,
}

pub(super) struct World {
    all: Shootdowns<'static>,
    /// Whether P maps the page.
    entry: AtomicBool,
    frame: UnsafeCell<u32>,
    interrupts: [AtomicBool; CPUS],
    /// Words of CPUs 0 and 1, and whether one has missed the other's.
    words: [AtomicBool; 2],
    missed: [AtomicBool; 2],
    /// Whether CPU 0 needs CPU 1 no more.
    pub(super) finished: AtomicBool,
    seen: Arc<Seen>,
}

// SAFETY: the model runs one thread at a time, and the cell reports concurrent accesses.
unsafe impl Sync for World {}

/// One CPU with its TLB.
pub(super) struct Machine {
    pub(super) world: &'static World,
    cpu: Cpu,
    /// An interrupt that arrives before the next one is sent.
    pub(super) handler: Cell<Option<fn(&Self)>>,
    /// Whether root P is loaded.
    loaded: Cell<bool>,
    /// Whether the TLB has the kernel's translation.
    kernel: Cell<bool>,
    /// Whether the TLB has the translation, under P's tag.
    cached: Cell<bool>,
}

impl LocalTlb for Machine {
    fn send(&self, cpu: Cpu) {
        if let Some(handler) = self.handler.take() {
            handler(self);
        }
        // In one step, so that a poll before it clears nothing after it.
        self.world.interrupts[usize::from(cpu.0)].swap(true, Ordering::Release);
    }

    /// Acts on the tag that is loaded.
    fn invalidate(&self, root: Frame, _: &Invalidation) {
        if root == P && self.loaded.get() {
            self.cached.set(false);
        }
        self.world.seen.served.store(true, Relaxed);
    }

    fn invalidate_kernel(&self, _: &Invalidation) {
        self.kernel.set(false);
    }

    fn flush_all(&self) {
        self.cached.set(false);
        self.kernel.set(false);
    }

    fn order(&self) {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

impl Machine {
    pub(super) fn here(&self) -> OnCpu<'_, 'static, Self> {
        self.world.all.on(self.cpu, self)
    }

    /// An access of the program, or one of the walker.
    pub(super) fn touch(&self) {
        if self.loaded.get() && !self.cached.get() {
            self.cached.set(self.world.entry.load(Ordering::Relaxed));
        }
        if self.cached.get() && self.loaded.get() {
            self.use_frame();
        }
    }

    /// An access of the kernel, whose page it is in some models.
    pub(super) fn touch_kernel(&self) {
        if !self.kernel.get() {
            self.kernel.set(self.world.entry.load(Ordering::Relaxed));
        }
        if self.kernel.get() {
            self.use_frame();
        }
    }

    fn use_frame(&self) {
        // SAFETY: the cell reports a concurrent write.
        let freed = self.world.frame.with(|freed| unsafe { *freed });
        assert_eq!(freed, 0, "used and freed");
        self.world.seen.used.store(true, Relaxed);
    }

    pub(super) fn run(&self, root: Frame) {
        self.here().run(root, |translations| {
            // The walker of the old root is at work until the new one is loaded.
            self.touch();
            if translations == Translations::Stale {
                self.cached.set(false);
            }
            self.loaded.set(root == P);
            self.touch();
        });
    }

    pub(super) fn keep(&self) {
        self.here().keep(|| {
            self.touch();
            self.loaded.set(false);
        });
    }

    /// Writes the CPU's own word before `barrier`, and reads the other one after it.
    pub(super) fn write_and_read(&self, barrier: impl FnOnce()) {
        let own = usize::from(self.cpu.0);
        self.world.words[own].store(true, Ordering::Relaxed);
        barrier();
        let is_missed = !self.world.words[1 - own].load(Ordering::Relaxed);
        self.world.missed[own].store(is_missed, Ordering::Relaxed);
    }

    pub(super) fn poll_interrupt(&self) {
        if self.world.interrupts[usize::from(self.cpu.0)].swap(false, Ordering::Acquire) {
            self.here().serve();
        }
    }

    pub(super) fn lose_interrupts(&self) {
        self.world.interrupts[usize::from(self.cpu.0)].swap(false, Ordering::Acquire);
    }

    /// Ends a thread: other CPUs do not wait for this one.
    pub(super) fn stop(&self) {
        self.here().leave(|| {
            self.touch();
            self.loaded.set(false);
            self.cached.set(false);
        });
        self.here().offline();
    }

    pub(super) fn unmap(&self, cpus: &[u16]) {
        self.world.entry.store(false, Ordering::Relaxed);
        self.invalidate(cpus);
        self.free();
    }

    pub(super) fn unmap_kernel(&self) {
        self.world.entry.store(false, Ordering::Relaxed);
        self.here().invalidate_kernel(&page());
        self.free();
    }

    fn free(&self) {
        // SAFETY: the cell reports a concurrent access.
        self.world.frame.with_mut(|freed| unsafe { *freed += 1 });
        self.world.seen.freed.store(true, Relaxed);
    }

    pub(super) fn invalidate(&self, cpus: &[u16]) {
        let mut set = CpuSet::EMPTY;
        cpus.iter().for_each(|cpu| set.insert(Cpu(*cpu)));
        self.here().invalidate(P, &set, &page());
    }
}

pub(super) fn page() -> Invalidation {
    let range = VirtRange::from_len(VirtAddr(0x1000), 0x1000).unwrap();
    Invalidation { range, stride: 0x1000, tables: Tables::Unchanged }
}

pub(super) fn explore<const N: usize>(
    rule: Option<Rule>,
    preemptions: Option<usize>,
    work: [fn(&Machine); N],
) -> Arc<Seen> {
    let seen = Arc::new(Seen::default());
    let all = Arc::clone(&seen);
    omit::check(rule, preemptions, move || {
        let seen = Arc::clone(&all);
        let cpus: [ShootdownCpu; N] = core::array::from_fn(|_| ShootdownCpu::new());
        omit::lend(cpus, |cpus| {
            let world = World {
                all: Shootdowns::new(cpus),
                entry: AtomicBool::new(true),
                frame: UnsafeCell::new(0),
                interrupts: core::array::from_fn(|_| AtomicBool::new(false)),
                words: core::array::from_fn(|_| AtomicBool::new(false)),
                missed: core::array::from_fn(|_| AtomicBool::new(false)),
                finished: AtomicBool::new(false),
                seen,
            };
            omit::lend(world, |world| {
                let machine = move |cpu| Machine {
                    world,
                    cpu: Cpu(cpu as u16),
                    handler: Cell::new(None),
                    loaded: Cell::new(false),
                    cached: Cell::new(false),
                    kernel: Cell::new(false),
                };
                (0..N).for_each(|cpu| machine(cpu).here().online());
                let mut others = Vec::new();
                for (cpu, work) in work.into_iter().enumerate().skip(1) {
                    others.push(thread::spawn(move || work(&machine(cpu))));
                }
                work[0](&machine(0));
                others.into_iter().for_each(|thread| thread.join().unwrap());
                let missed = |word: &AtomicBool| word.load(Ordering::Relaxed);
                assert!(!world.missed.iter().all(missed), "each missed the other's word");
            });
        });
    });
    seen
}

pub(super) fn is_used_and_freed(seen: &Seen) -> bool {
    seen.used.load(Relaxed) && seen.freed.load(Relaxed)
}
