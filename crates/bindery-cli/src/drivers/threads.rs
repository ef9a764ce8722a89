//! The driver of random calls on several CPUs.
//!
//! A machine runs a few rounds. In a round each CPU performs a number of steps on processes that
//! all CPUs share. All CPUs except the first sometimes go offline and come back. After a round all
//! CPUs are quiet and everything is verified. Neither the driver nor the core can continue after a
//! panic of one thread, because other threads may wait for it forever. So the first failure prints
//! all known facts and ends the program.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bindery::check;
use bindery::platform::Cpu;
use bindery::{Events, Memory};
use bindery_hosted::{Machine, Walk};

use super::calls::Target;
use super::generate::{Generator, Mix};
use super::panics;
use super::rng::Rng;
use super::step::{PROCESSES, Step};
use super::trace::Trace;
use super::world::{Outside, Setup, World, lock, machine};

/// CPUs of a machine.
const CPUS: u16 = 3;

/// Rounds of a machine.
const ROUNDS: u64 = 6;

/// Steps of a CPU in a round.
const STEPS: u64 = 250;

/// The maximum number of steps of a CPU before it goes offline.
const MOST_AT_ONCE: u64 = 60;

/// The maximum time offline, in microseconds.
const LONGEST_PAUSE: u64 = 300;

/// The longest time without any activity.
const PATIENCE: Duration = Duration::from_secs(30);

/// The longest time in which no CPU finishes a step, although frames are allocated, or pages are
/// swapped out and in. A step allocates many times, and each allocation scans all memory repeatedly
/// while swap is full, which takes more than half a minute on a busy host.
const PATIENCE_IN_SHORTAGE: Duration = Duration::from_secs(300);

/// Called with the text of a failure; the program ends after it.
pub type OnFailure = Arc<dyn Fn(&str) + Send + Sync>;

/// [`run`] on some architecture.
pub type Run = fn(&Arc<Scene>, &Setup, Instant) -> u64;

/// The state of one machine that a failure report needs.
pub struct Scene {
    name: &'static str,
    user_end: u64,
    seed: u64,
    round: AtomicU64,
    /// The steps, and other signs of progress.
    trace: Trace,
    verified: AtomicU64,
    /// Whether a failure has occurred. Only the first failure is printed, and it ends the program.
    has_failed: AtomicBool,
    on_failure: OnFailure,
}

impl Scene {
    /// Reports a failure and ends the program.
    fn fail(&self, message: &str) -> ! {
        if self.has_failed.swap(true, Relaxed) {
            // The thread of the first failure ends the program.
            loop {
                thread::park();
            }
        }
        let Self { name, seed, round, trace, .. } = self;
        (self.on_failure)(&format!(
            "random threads, seed {seed}, {name}, round {}: {message}\n\
             the last steps of each CPU (the seed does not repeat the schedule):\n{trace}",
            round.load(Relaxed)
        ));
        std::process::exit(1)
    }

    fn progress(&self) -> u64 {
        self.trace.count() + self.verified.load(Relaxed)
    }

    /// Fails if there is no progress, until `over`.
    fn watch<A: Walk>(&self, memory: &Memory<Machine<A>>, over: &AtomicBool) {
        let (mut steps, mut activity) = (self.progress(), Activity::of(memory));
        let (mut step_since, mut active_since) = (Instant::now(), Instant::now());
        while !over.load(Relaxed) {
            thread::sleep(Duration::from_millis(20));
            let now = (self.progress(), Activity::of(memory));
            if now.0 != steps {
                (step_since, active_since) = (Instant::now(), Instant::now());
            } else if now.1 != activity {
                active_since = Instant::now();
            }
            (steps, activity) = now;
            if active_since.elapsed() > PATIENCE {
                let areas: Vec<_> = memory.swap_areas().collect();
                self.fail(&format!(
                    "no call and no background work for {} s; {activity:?}, {areas:?}",
                    PATIENCE.as_secs()
                ));
            }
            if step_since.elapsed() > PATIENCE_IN_SHORTAGE {
                self.fail(&format!(
                    "no CPU finished a step for {} s; {activity:?}",
                    PATIENCE_IN_SHORTAGE.as_secs()
                ));
            }
        }
    }
}

/// Counters of activity in long calls.
#[derive(PartialEq, Eq, Debug)]
struct Activity {
    frames_allocated: u64,
    pages_swapped_in: u64,
    pages_swapped_out: u64,
    free_frames: u64,
}

impl Activity {
    fn of<A: Walk>(memory: &Memory<Machine<A>>) -> Self {
        let Events { frames_allocated, pages_swapped_in, pages_swapped_out, .. } = memory.events();
        let free_frames = memory.free_frame_count();
        Self { frames_allocated, pages_swapped_in, pages_swapped_out, free_frames }
    }
}

/// Runs the machine of a seed. Returns the number of steps taken.
pub fn run_seed(
    target: &Target,
    seed: u64,
    setup: impl FnOnce(&mut Setup),
    deadline: Instant,
    on_failure: &OnFailure,
) -> u64 {
    let mut random = Setup::random(&mut Rng::new(seed), CPUS);
    setup(&mut random);
    let scene = Arc::new(Scene {
        name: target.name,
        user_end: target.user_end,
        seed,
        round: AtomicU64::new(0),
        trace: Trace::new(CPUS),
        verified: AtomicU64::new(0),
        has_failed: AtomicBool::new(false),
        on_failure: Arc::clone(on_failure),
    });
    static SCENE: Mutex<Option<Arc<Scene>>> = Mutex::new(None);
    *lock(&SCENE) = Some(Arc::clone(&scene));
    panics::die_by(|message| {
        let scene = lock(&SCENE).clone();
        if let Some(scene) = scene {
            scene.fail(message);
        }
    });
    (target.run_threads)(&scene, &random, deadline)
}

/// Runs the rounds of a machine and ends all processes.
pub fn run<A: Walk>(scene: &Arc<Scene>, setup: &Setup, deadline: Instant) -> u64 {
    let _dies = panics::Dies::new();
    let machine = machine::<A>(setup);
    let outside = Outside::new(setup);
    let memory = machine.memory().expect("memory enough for its own metadata");
    let world = World::new(setup, &machine, &memory, &outside, 2);
    let (device, pager) = (world.device, &outside.pager);
    pager.keep_reads(setup.pager_keeps);
    pager.keep_writes(setup.pager_keeps);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| scene.watch(&memory, &over));
        for _ in 0..2 {
            scope.spawn(|| {
                let _dies = panics::Dies::new();
                device.serve(&memory);
            });
        }
        scope.spawn(|| {
            let _dies = panics::Dies::new();
            pager.serve(&memory, Duration::from_micros(20));
        });
        for round in 0..ROUNDS {
            if Instant::now() > deadline {
                break;
            }
            scene.round.store(round, Relaxed);
            thread::scope(|scope| {
                for cpu in 0..CPUS {
                    let world = &world;
                    scope.spawn(move || world.run_cpu(scene, cpu, deadline));
                }
            });
            world.verify_quiet(scene);
        }
        world.finish_quiet(scene);
        over.store(true, Relaxed);
        device.stop();
        pager.stop();
    });
    scene.trace.count()
}

impl<A: Walk> World<'_, A> {
    /// The steps of a CPU in a round.
    fn run_cpu(&self, scene: &Scene, cpu: u16, deadline: Instant) {
        let _dies = panics::Dies::new();
        let number = scene.round.load(Relaxed) * u64::from(CPUS) + u64::from(cpu);
        let mut rng = Rng::new(scene.seed ^ (number + 1).wrapping_mul(0xd6e8_feb8_6659_fd93));
        let mut generator = Generator::new(rng.fork(), Mix::Crowded, scene.user_end);
        let mut result = 0;
        let mut left = STEPS;
        while left > 0 && Instant::now() <= deadline {
            // CPU 0 stays online, because threads without a CPU use it.
            let steps = if cpu == 0 { left } else { left.min(1 + rng.below(MOST_AT_ONCE)) };
            left -= steps;
            self.machine.on_cpu(Cpu(cpu), || {
                for _ in 0..steps {
                    if Instant::now() > deadline {
                        break;
                    }
                    let step = generator.next(result);
                    result = scene.trace.take(cpu, step, |step| self.perform(step));
                    if rng.once_in(8)
                        && let Ok(mut bystander) = self.bystander.try_lock()
                    {
                        bystander.run(self.machine);
                    }
                }
            });
            // A machine with too little memory for the records of CPUs has none online.
            if cpu > 0 && self.memory.online_cpus() > 0 {
                self.replace_cpu(Cpu(cpu), Duration::from_micros(rng.below(LONGEST_PAUSE)));
            }
        }
    }

    /// Verifies all invariants, while no CPU runs.
    fn verify_quiet(&self, scene: &Scene) {
        let _ = self.memory.wait_for_swap_writes();
        for process in 0..PROCESSES {
            self.look_all_over(process);
        }
        for _ in 0..8 {
            lock(&self.bystander).run(self.machine);
        }
        let _ = self.memory.wait_for_swap_writes();
        self.pager.wait_until_idle();
        self.machine.assert_clean();
        let mut scratch = vec![0; check::scratch_words(self.memory)];
        self.with_spaces(|spaces| {
            if let Err(violation) = check::check(self.memory, spaces, &mut scratch) {
                panic!("audit: {violation}");
            }
        });
        scene.verified.fetch_add(1, Relaxed);
    }

    /// Ends all processes.
    fn finish_quiet(self, scene: &Scene) {
        let _ = self.memory.wait_for_swap_writes();
        self.perform(&Step::Trim);
        scene.verified.fetch_add(1, Relaxed);
        self.finish();
    }
}
