//! CPUs that keep the translations of a program while they idle, and are spared its invalidations
//! ([`bindery_parts::Shootdowns`]). Processors walk on their own account, so an idle CPU must have
//! the kernel's root loaded.

#[macro_use]
extern crate bindery_scenarios as support;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use bindery::addr::{Frame, VirtAddr};
use bindery::platform::{Cpu, CpuSet, GracePeriod, Invalidation, Platform};
use bindery::sync::RawLock;
use bindery::{Access, AddressSpace, Advice, FaultError, FrameRange, Memory};
use bindery_hosted::{AccessKind, Config, Machine, MmuFault, Violation, Walk};
use bindery_parts::{LocalTlb, OnCpu, ShootdownCpu, Shootdowns, Translations};

use support::{GIB, MIB, fixed, options};

const AT: u64 = GIB;
const PAGE: u64 = 4096;
const CPUS: u16 = 3;

/// A machine whose invalidations go by [`Shootdowns`]. A CPU serves the requests to it whenever it
/// waits, as if the interrupt arrived then.
struct Sparing<A: Walk> {
    tlb: LocalTlbs<A>,
    shootdowns: &'static Shootdowns<'static>,
}

thread_local! {
    /// Serves the requests to the CPU of this thread.
    static SERVE: RefCell<Box<dyn Fn()>> = RefCell::new(Box::new(|| ()));
}

/// A lock whose waiters serve requests.
struct Serving(AtomicBool);

// SAFETY: 1. the exchange lets one caller in until `unlock`; its orderings are acquire and release.
// 2. Nothing panics, since no waiter is interrupted in `SERVE`.
unsafe impl RawLock for Serving {
    type State = ();

    const UNLOCKED: Self = Self(AtomicBool::new(false));

    fn lock(&self) {
        while self.try_lock().is_none() {
            SERVE.with_borrow(|serve| serve());
            thread::yield_now();
        }
    }

    fn try_lock(&self) -> Option<()> {
        (!self.0.swap(true, Ordering::Acquire)).then_some(())
    }

    unsafe fn unlock(&self, (): ()) {
        self.0.store(false, Ordering::Release);
    }
}

/// The TLB of the calling thread's CPU.
struct LocalTlbs<A: Walk> {
    machine: Machine<A>,
}

type Space<'m, A> = AddressSpace<'m, Sparing<A>>;

impl<A: Walk> Sparing<A> {
    fn here(&self) -> OnCpu<'_, 'static, LocalTlbs<A>> {
        self.shootdowns.on(self.tlb.machine.cpu(), &self.tlb)
    }

    /// The calling thread is CPU `cpu` while it does the work.
    fn on_cpu<R>(&self, cpu: u16, work: impl FnOnce() -> R) -> R {
        let tlb = LocalTlbs { machine: self.tlb.machine.clone() };
        let shootdowns = self.shootdowns;
        let serve = move || shootdowns.on(tlb.machine.cpu(), &tlb).serve();
        SERVE.set(Box::new(serve));
        self.tlb.machine.on_cpu(Cpu(cpu), || {
            self.here().online();
            let outcome = work();
            self.here().offline();
            outcome
        })
    }

    /// Loads the root of a program.
    fn run(&self, space: &Space<'_, A>) {
        space.enter();
        self.here().run(space.root(), |translations| {
            if translations == Translations::Stale {
                self.tlb.machine.flush_root(Some(space.root()));
            }
            self.tlb.machine.load_root(Some(space.root()));
        });
    }

    /// Idles, and keeps the translations of the program.
    fn keep(&self) {
        self.here().keep(|| self.tlb.machine.load_root(None));
    }

    /// Idles, and gives the translations up.
    fn leave(&self, space: &Space<'_, A>) {
        self.here().leave(|| {
            self.tlb.machine.load_root(None);
            self.tlb.machine.flush_root(Some(space.root()));
        });
        // SAFETY: 1. and 2. by the lines above. 3. The thread is bound to its CPU.
        unsafe { space.leave() };
    }

    fn load(&self, space: &Space<'_, A>, at: u64) -> Result<u64, FaultError> {
        let mut bytes = [0; 8];
        let resolve = |fault| resolve(space, fault);
        self.tlb.machine.read_user(space.root(), VirtAddr(at), &mut bytes, resolve)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn store(&self, space: &Space<'_, A>, at: u64, value: u64) {
        let resolve = |fault| resolve(space, fault);
        let bytes = value.to_le_bytes();
        self.tlb.machine.write_user(space.root(), VirtAddr(at), &bytes, resolve).unwrap();
    }
}

fn resolve<A: Walk>(space: &Space<'_, A>, fault: MmuFault) -> Result<(), FaultError> {
    let access = match fault.access {
        AccessKind::Read => Access::Read,
        AccessKind::Write => Access::Write,
        AccessKind::Execute => Access::Execute,
    };
    space.fault(fault.addr, access).map(|_| ())
}

impl<A: Walk> LocalTlb for LocalTlbs<A> {
    fn send(&self, _cpu: Cpu) {}

    fn invalidate(&self, root: Frame, what: &Invalidation) {
        self.machine.invalidate_local(root, what);
    }

    fn invalidate_kernel(&self, _what: &Invalidation) {}

    fn flush_all(&self) {
        self.machine.flush_root(None);
    }

    fn order(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

// SAFETY: `Shootdowns` meets the obligations of `invalidate`, as long as each CPU says which root
// it has loaded. The machine meets the others.
unsafe impl<A: Walk> Platform for Sparing<A> {
    type Arch = A;
    type Mutex = Serving;
    type SpinLock = Serving;

    fn direct_map(&self, frame: Frame) -> std::ptr::NonNull<u8> {
        self.tlb.machine.direct_map(frame)
    }

    fn zero(&self, first: Frame, count: u32) {
        self.tlb.machine.zero(first, count);
    }

    fn copy(&self, from: Frame, to: Frame, count: u32) {
        self.tlb.machine.copy(from, to, count);
    }

    fn invalidate(&self, root: Frame, cpus: &CpuSet, what: &Invalidation) {
        self.tlb.machine.speculate();
        self.here().invalidate(root, cpus, what);
    }

    fn invalidate_local(&self, root: Frame, what: &Invalidation) {
        self.tlb.machine.invalidate_local(root, what);
    }

    fn invalidate_kernel(&self, _root: Frame, _what: &Invalidation) {}

    fn publish_entries(&self) {
        self.tlb.machine.publish_entries();
    }

    fn cpu(&self) -> Cpu {
        self.tlb.machine.cpu()
    }

    fn relax(&self) {
        self.here().serve();
        self.tlb.machine.relax();
    }

    fn enter_read(&self) {
        self.tlb.machine.enter_read();
    }

    fn leave_read(&self) {
        self.tlb.machine.leave_read();
    }

    fn synchronize(&self) {
        let period = self.tlb.machine.grace_period();
        while !self.tlb.machine.is_over(period) {
            self.relax();
        }
    }

    fn grace_period(&self) -> GracePeriod {
        self.tlb.machine.grace_period()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        self.tlb.machine.is_over(period)
    }

    fn frames_released(&self, first: Frame, count: u32) {
        self.tlb.machine.frames_released(first, count);
    }
}

/// Runs `test` on CPU 0, in a program that has loaded its root there.
fn on_machine<A: Walk>(test: impl FnOnce(&Sparing<A>, &Space<'_, A>)) {
    let machine = Machine::<A>::new(Config { memory: 32 * MIB, cpus: CPUS, ..Config::default() });
    let (first, count) = machine.frames();
    let cpus = (0..CPUS).map(|_| ShootdownCpu::new()).collect::<Vec<_>>();
    let shootdowns = Box::leak(Box::new(Shootdowns::new(cpus.leak())));
    let tlb = LocalTlbs { machine: machine.clone() };
    let platform = Sparing { tlb, shootdowns };
    // SAFETY: 1. the frames of a machine that has no other memory; 2. it has no table yet.
    let memory = unsafe { Memory::new(platform, &[FrameRange { first, count }]) }.unwrap();
    // Only base pages, unless the caller chooses.
    memory.folio_policy().set_global(bindery::SizeMode::Never);
    let space = AddressSpace::new(&memory, options()).unwrap();
    let platform = memory.platform();
    platform.on_cpu(0, || {
        platform.run(&space);
        test(platform, &space);
        platform.leave(&space);
    });
}

/// Maps a table's pages, and stores `value` to the first four.
fn map<A: Walk>(platform: &Sparing<A>, space: &Space<'_, A>, value: u64) {
    space.mmap(&fixed(AT, 2 * MIB)).unwrap();
    (0..4).for_each(|page| platform.store(space, AT + page * PAGE, value + page));
}

fn values<A: Walk>(platform: &Sparing<A>, space: &Space<'_, A>) -> Vec<u64> {
    (0..4).map(|page| platform.load(space, AT + page * PAGE).unwrap()).collect()
}

/// CPU 1 uses pages, and idles by `idle`. CPU 0 then unmaps the pages with their table, maps
/// others, and CPU 1 runs the program again. Returns the violations until CPU 1 runs again.
fn unmap_beside<A: Walk>(
    platform: &Sparing<A>,
    space: &Space<'_, A>,
    idle: impl FnOnce() + Send,
) -> Vec<Violation> {
    let step = AtomicU32::new(0);
    let wait = |expected| {
        while step.load(Ordering::Acquire) != expected {
            platform.relax();
        }
    };
    map(platform, space, 10);
    let other = || {
        platform.on_cpu(1, || {
            platform.run(space);
            assert_eq!(values(platform, space), [10, 11, 12, 13]);
            idle();
            step.store(1, Ordering::Release);
            wait(2);
            platform.run(space);
            let found = values(platform, space);
            platform.leave(space);
            found
        })
    };
    thread::scope(|scope| {
        let other = scope.spawn(other);
        wait(1);
        space.munmap(VirtAddr(AT), 2 * MIB).unwrap();
        platform.synchronize();
        space.memory().trim();
        let violations = platform.tlb.machine.take_violations();
        map(platform, space, 20);
        step.store(2, Ordering::Release);
        while !other.is_finished() {
            platform.relax();
        }
        assert_eq!(other.join().unwrap(), [20, 21, 22, 23]);
        violations
    })
}

fn spares<A: Walk>() {
    on_machine::<A>(|platform, space| {
        let violations = unmap_beside(platform, space, || platform.keep());
        assert_eq!(violations, []);
        platform.tlb.machine.assert_clean();
        let counts = platform.shootdowns.counts();
        assert_eq!((counts.interrupts, counts.spared), (0, 1), "{counts:?}");
    });
}

/// Whether one of the violations is a table that was freed while CPU 1 could still walk it.
fn has_walked_table(violations: &[Violation]) -> bool {
    let of_cpu_1 = |seen: &Violation| matches!(seen, Violation::ReleasedTable { place, .. } if place.cpu == Cpu(1));
    violations.iter().any(of_cpu_1)
}

fn keeps_wrong_root<A: Walk>() {
    on_machine::<A>(|platform, space| {
        let violations = unmap_beside(platform, space, || platform.here().keep(|| ()));
        assert!(has_walked_table(&violations), "{violations:?}");
    });
}

fn walks_while_idle<A: Walk>() {
    on_machine::<A>(|platform, space| {
        // With an empty TLB, but with the program's root still loaded.
        let idle = || platform.here().keep(|| platform.tlb.machine.flush_root(None));
        let violations = unmap_beside(platform, space, idle);
        assert!(has_walked_table(&violations), "{violations:?}");
    });
}

fn does_not_flush<A: Walk>() {
    on_machine::<A>(|platform, space| {
        let machine = &platform.tlb.machine;
        map(platform, space, 10);
        machine.load_root(None);
        space.munmap(VirtAddr(AT), 2 * MIB).unwrap();
        // The CPU has performed the invalidation, so nothing is left.
        machine.load_root(Some(space.root()));
        machine.assert_clean();
        map(platform, space, 10);
        machine.load_root(None);
        // SAFETY: not met, on purpose. The hosted machine reports each use of a freed frame.
        unsafe { space.leave() };
        space.munmap(VirtAddr(AT), 2 * MIB).unwrap();
        assert_eq!(machine.take_violations(), [], "nothing uses a dormant translation");
        space.enter();
        machine.load_root(Some(space.root()));
        let violations = machine.take_violations();
        assert_eq!(violations.len(), 1, "{violations:?}");
        machine.flush_root(Some(space.root()));
    });
}

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// The page of a random address.
fn any_page(numbers: &mut Numbers) -> u64 {
    AT + numbers.below(3) * 2 * MIB + numbers.below(4) * PAGE
}

/// One CPU changes mappings; the others run the program, idle and leave.
fn come_and_go<A: Walk>() {
    const STEPS: u32 = 400;
    on_machine::<A>(|platform, space| {
        let over = AtomicBool::new(false);
        let other = |cpu: u16| {
            let mut numbers = Numbers(u64::from(cpu));
            platform.run(space);
            while !over.load(Ordering::Acquire) {
                match numbers.below(8) {
                    0 => platform.keep(),
                    1 => platform.leave(space),
                    _ => {
                        platform.run(space);
                        let at = any_page(&mut numbers);
                        // Unmapped now, not written yet, or written.
                        let found = platform.load(space, at).unwrap_or(0);
                        assert!(found == 0 || found == at, "{found:#x} at {at:#x}");
                    }
                }
                platform.relax();
            }
            platform.leave(space);
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..CPUS)
                .map(|cpu| {
                    let other = &other;
                    scope.spawn(move || platform.on_cpu(cpu, || other(cpu)))
                })
                .collect();
            let mut numbers = Numbers(0);
            for _ in 0..STEPS {
                let at = any_page(&mut numbers);
                let area = VirtAddr(at & !(2 * MIB - 1));
                match numbers.below(4) {
                    0 => space.munmap(area, 2 * MIB).unwrap(),
                    1 if space.mapping_count() > 0 => {
                        // Fails if a part of the range is not mapped.
                        let _ = space.madvise(area, 2 * MIB, Advice::DontNeed);
                    }
                    _ => {
                        let _ = space.mmap(&fixed(area.0, 2 * MIB)).unwrap();
                        platform.store(space, at, at);
                    }
                }
                platform.relax();
            }
            over.store(true, Ordering::Release);
            while !others.iter().all(|other| other.is_finished()) {
                platform.relax();
            }
        });
        platform.tlb.machine.assert_clean();
    });
}

on_every_architecture! {
    a_cpu_that_keeps_a_tag_is_spared => spares;
    a_lazy_cpu_with_the_programs_root => keeps_wrong_root;
    a_lazy_cpu_walks_with_an_empty_tlb => walks_while_idle;
    a_dormant_translation_that_is_not_flushed => does_not_flush;
    lazy_cpus_beside_random_changes => come_and_go;
}
