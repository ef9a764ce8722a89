use core::cell::{Cell, RefCell};
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::vec::Vec;

use bindery::addr::{VirtAddr, VirtRange};
use bindery::platform::Tables;

use super::*;

const P: Frame = Frame(3);
const Q: Frame = Frame(4);

fn page(number: u64) -> Invalidation {
    let range = VirtRange::from_len(VirtAddr(number << 12), 0x1000).unwrap();
    Invalidation { range, stride: 0x1000, tables: Tables::Changed }
}

fn set(cpus: &[u16]) -> CpuSet {
    let mut set = CpuSet::EMPTY;
    cpus.iter().for_each(|cpu| set.insert(Cpu(*cpu)));
    set
}

fn cpus(count: usize) -> Vec<ShootdownCpu> {
    (0..count).map(|_| ShootdownCpu::new()).collect()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Sent(u16),
    Invalidated(Frame, u64),
    Kernel(u64),
    All,
    Ordered,
    Relaxed,
}

/// The events on one CPU, and its work while it waits.
struct Tlb<'a> {
    events: RefCell<Vec<Event>>,
    relax: &'a dyn Fn(),
    send: &'a dyn Fn(Cpu),
}

impl Tlb<'_> {
    fn take(&self) -> Vec<Event> {
        self.events.take()
    }

    fn log(&self, event: Event) {
        self.events.borrow_mut().push(event);
    }
}

fn tlb(relax: &dyn Fn()) -> Tlb<'_> {
    Tlb { events: RefCell::default(), relax, send: &|_| {} }
}

impl LocalTlb for Tlb<'_> {
    fn send(&self, cpu: Cpu) {
        self.log(Event::Sent(cpu.0));
        (self.send)(cpu);
    }

    fn invalidate(&self, root: Frame, what: &Invalidation) {
        self.log(Event::Invalidated(root, what.range.start().0 >> 12));
    }

    fn invalidate_kernel(&self, what: &Invalidation) {
        self.log(Event::Kernel(what.range.start().0 >> 12));
    }

    fn flush_all(&self) {
        self.log(Event::All);
    }

    fn order(&self) {
        self.log(Event::Ordered);
    }

    fn relax(&self) {
        self.log(Event::Relaxed);
        (self.relax)();
    }
}

fn idle() {}

fn start(all: &Shootdowns<'_>, tlbs: &[&Tlb<'_>]) {
    for (cpu, tlb) in (0..).map(Cpu).zip(tlbs) {
        all.on(cpu, *tlb).online();
        assert_eq!(tlb.take(), [Event::All]);
    }
}

#[test]
fn only_cpus_that_run_the_root_are_interrupted() {
    let memory = cpus(5);
    let all = Shootdowns::new(&memory);
    let others: Vec<_> = (0..4).map(|_| tlb(&idle)).collect();
    let serve = || (1..5).for_each(|cpu| all.on(Cpu(cpu), &others[usize::from(cpu) - 1]).serve());
    let me = tlb(&serve);
    start(&all, &[&me, &others[0], &others[1], &others[2], &others[3]]);

    all.on(Cpu(1), &others[0]).run(P, |_| {});
    all.on(Cpu(2), &others[1]).run(P, |_| {});
    all.on(Cpu(2), &others[1]).keep(|| {});
    all.on(Cpu(3), &others[2]).run(Q, |_| {});
    let here = all.on(Cpu(0), &me);
    here.invalidate(P, &set(&[0, 1, 2, 3, 4, 200]), &page(9));
    assert_eq!(me.take(), [Event::Sent(1), Event::Relaxed]);
    assert_eq!(others[0].take(), [Event::Invalidated(P, 9)]);
    assert!(others[1..].iter().all(|tlb| tlb.take().is_empty()));
    let counts = all.counts();
    assert_eq!((counts.interrupts, counts.spared, counts.invalidations), (1, 1, 1));

    // The CPU that kept the tag flushes it, once.
    let lazy = all.on(Cpu(2), &others[1]);
    let told = Cell::new(Translations::Kept);
    lazy.run(P, |translations| told.set(translations));
    assert_eq!(told.get(), Translations::Stale);
    lazy.keep(|| {});
    lazy.run(P, |translations| told.set(translations));
    assert_eq!(told.get(), Translations::Kept);
    // So does the one that ran another program.
    all.on(Cpu(3), &others[2]).run(P, |translations| told.set(translations));
    assert_eq!(told.get(), Translations::Stale);
}

#[test]
fn requests_are_sent_before_any_wait() {
    let memory = cpus(3);
    let all = Shootdowns::new(&memory);
    let (first, second) = (tlb(&idle), tlb(&idle));
    let serve = || {
        all.on(Cpu(1), &first).serve();
        all.on(Cpu(2), &second).serve();
    };
    let me = tlb(&serve);
    start(&all, &[&me, &first, &second]);
    all.on(Cpu(0), &me).run(P, |_| {});
    all.on(Cpu(1), &first).run(P, |_| {});
    all.on(Cpu(2), &second).run(P, |_| {});
    all.on(Cpu(0), &me).invalidate(P, &set(&[0, 1, 2]), &page(1));
    let expected = [Event::Sent(1), Event::Sent(2), Event::Invalidated(P, 1), Event::Relaxed];
    assert_eq!(me.take(), expected);

    all.on(Cpu(0), &me).invalidate_kernel(&page(2));
    assert_eq!(me.take()[..3], [Event::Sent(1), Event::Sent(2), Event::Kernel(2)]);
    assert_eq!(first.take(), [Event::Invalidated(P, 1), Event::Kernel(2)]);
}

#[test]
fn each_other_cpu_online_orders_its_accesses() {
    let memory = cpus(3);
    let all = Shootdowns::new(&memory);
    let (first, second) = (tlb(&idle), tlb(&idle));
    let serve = || {
        all.on(Cpu(1), &first).serve();
        all.on(Cpu(2), &second).serve();
    };
    let me = tlb(&serve);
    start(&all, &[&me, &first]);
    all.on(Cpu(1), &first).run(P, |_| {});
    all.on(Cpu(0), &me).order_others();
    assert_eq!(me.take(), [Event::Sent(1), Event::Relaxed]);
    assert_eq!(first.take(), [Event::Ordered]);
    assert_eq!(second.take(), []);
    assert_eq!(all.counts().invalidations, 0);

    all.on(Cpu(1), &first).offline();
    all.on(Cpu(0), &me).order_others();
    assert_eq!(me.take(), []);
}

/// Each call waits inside the wait of the one before. The last one finds no slot.
#[test]
fn a_full_queue_is_flushed_at_once() {
    let memory = cpus(2);
    let all = Shootdowns::new(&memory);
    let other = tlb(&idle);
    let depth = Cell::new(1);
    let me_in_relax = tlb(&idle);
    let nest: RefCell<Option<&dyn Fn()>> = RefCell::new(None);
    let relax = || {
        if depth.get() > u64::from(queue::SLOTS) {
            return all.on(Cpu(1), &other).serve();
        }
        depth.set(depth.get() + 1);
        let nest = *nest.borrow();
        nest.unwrap()();
    };
    let me = tlb(&relax);
    let again = || all.on(Cpu(0), &me).invalidate(P, &set(&[1]), &page(depth.get()));
    *nest.borrow_mut() = Some(&again);
    start(&all, &[&me_in_relax, &other]);
    all.on(Cpu(1), &other).run(P, |_| {});
    again();
    assert_eq!(depth.get(), u64::from(queue::SLOTS) + 1);
    assert_eq!(other.take(), [Event::All, Event::Ordered]);
    // One interrupt for all requests that waited with it.
    assert_eq!((all.counts().interrupts, all.counts().full_flushes), (1, 1));
    // All slots are free again.
    for _ in 0..20 {
        again();
    }
    assert_eq!(all.counts().full_flushes, 1);
    assert_eq!(all.counts().invalidations, 20);
}

/// The later request may wait for the earlier one, in whose thread it interrupted.
#[test]
fn a_flush_counts_whatever_is_asked_later() {
    let queue = Queue::new();
    let post = || queue.post(&Request::Kernel(page(1)));
    let slots: Vec<_> = (0..queue::SLOTS).map(|_| post()).collect();
    let flush = post();
    let taken = queue.take();
    assert!(taken.is_for_everything());
    queue.full_flush_done(queue.full_flushes_asked());
    queue.finish(taken);
    let later = post();
    assert!(slots.iter().chain([&flush]).all(|ticket| queue.is_done(ticket.awaited())));
    assert!(!queue.is_done(later.awaited()));
}

#[test]
fn a_switching_cpu_flushes_everything() {
    let memory = cpus(2);
    let all = Shootdowns::new(&memory);
    let other = tlb(&idle);
    let serve = || all.on(Cpu(1), &other).serve();
    let me = tlb(&serve);
    start(&all, &[&me, &other]);
    all.on(Cpu(1), &other).run(P, |_| {
        all.on(Cpu(0), &me).invalidate(Q, &set(&[1]), &page(1));
    });
    assert_eq!(other.take(), [Event::All]);
}

/// The request came while the root ran, and is served when only the tag is kept.
#[test]
fn a_request_served_late_makes_the_tag_stale() {
    let memory = cpus(2);
    let all = Shootdowns::new(&memory);
    let other = tlb(&idle);
    let keep_then_serve = || {
        let other = all.on(Cpu(1), &other);
        other.keep(|| {});
        other.serve();
    };
    let me = tlb(&keep_then_serve);
    start(&all, &[&me, &other]);
    all.on(Cpu(1), &other).run(P, |_| {});
    all.on(Cpu(0), &me).invalidate(P, &set(&[1]), &page(1));
    assert_eq!(other.take(), []);
    all.on(Cpu(1), &other).run(P, |translations| assert_eq!(translations, Translations::Stale));
}

/// An interrupt handler invalidates between the requests of the call below it and the interrupts.
/// The other CPUs serve only when they are interrupted.
#[test]
fn a_handler_sends_the_interrupts_it_needs() {
    let memory = cpus(3);
    let all = Shootdowns::new(&memory);
    let others = [tlb(&idle), tlb(&idle)];
    let (polls, arrived) = (Cell::new(0), RefCell::new(Vec::<Cpu>::new()));
    let deliver = || {
        polls.set(polls.get() + 1);
        assert!(polls.get() < 100, "waits for an interrupt that no call sends");
        for cpu in arrived.take() {
            all.on(cpu, &others[usize::from(cpu.0) - 1]).serve();
        }
    };
    let handler: Cell<Option<&dyn Fn()>> = Cell::new(None);
    let send = |cpu| {
        if let Some(handler) = handler.take() {
            handler();
        }
        arrived.borrow_mut().push(cpu);
    };
    let me = Tlb { send: &send, ..tlb(&deliver) };
    start(&all, &[&me, &others[0], &others[1]]);
    let nested = || all.on(Cpu(0), &me).invalidate_kernel(&page(2));
    handler.set(Some(&nested));
    all.on(Cpu(0), &me).invalidate_kernel(&page(1));
    // The handler sends two, and the call below it the one that it was about to send.
    let sent = me.take().iter().filter(|event| matches!(event, Event::Sent(_))).count();
    assert_eq!(sent, 3);
    for other in &others {
        assert_eq!(other.take(), [Event::Kernel(1), Event::Kernel(2)]);
    }
}

/// Its last interrupts are lost, and were to spare others.
#[test]
fn a_cpu_back_online_is_interrupted_again() {
    let memory = cpus(2);
    let all = Shootdowns::new(&memory);
    let other = tlb(&idle);
    let polls = Cell::new(0);
    let stop = || {
        polls.set(polls.get() + 1);
        match polls.get() {
            1 => all.online.remove(Cpu(1), Ordering::Release),
            2 => all.on(Cpu(1), &other).serve(),
            _ => panic!("waits for an interrupt that no call sends"),
        }
    };
    let me = tlb(&stop);
    start(&all, &[&me, &other]);
    let here = all.on(Cpu(0), &me);
    here.invalidate_kernel(&page(1));
    all.on(Cpu(1), &other).online();
    me.take();
    here.invalidate_kernel(&page(2));
    assert_eq!(me.take(), [Event::Sent(1), Event::Kernel(2), Event::Relaxed]);
    assert_eq!(other.take(), [Event::All, Event::Kernel(2)]);
}

#[test]
fn a_cpu_gone_offline_holds_up_no_call() {
    let memory = cpus(2);
    let all = Shootdowns::new(&memory);
    let other = tlb(&idle);
    // It stops without serving.
    let stop = || all.online.remove(Cpu(1), Ordering::Release);
    let me = tlb(&stop);
    start(&all, &[&me, &other]);
    let here = all.on(Cpu(0), &me);
    here.invalidate_kernel(&page(1));
    assert_eq!(me.take(), [Event::Sent(1), Event::Kernel(1), Event::Relaxed]);
    here.invalidate_kernel(&page(2));
    assert_eq!(me.take(), [Event::Kernel(2)]);
    all.on(Cpu(1), &other).online();
    all.on(Cpu(1), &other).serve();
    assert_eq!(other.take(), [Event::All]);
    all.on(Cpu(1), &other).offline();
    assert!(!here.is_online(Cpu(1)));
}

/// No interrupt arrives: each thread has interrupts off.
#[test]
fn cpus_that_shoot_at_each_other_finish() {
    struct Silent;
    static FLUSHED: AtomicUsize = AtomicUsize::new(0);
    impl LocalTlb for Silent {
        fn send(&self, _: Cpu) {}
        fn invalidate(&self, _: Frame, _: &Invalidation) {
            FLUSHED.fetch_add(1, Ordering::Relaxed);
        }
        fn invalidate_kernel(&self, _: &Invalidation) {
            FLUSHED.fetch_add(1, Ordering::Relaxed);
        }
        fn flush_all(&self) {}
        fn order(&self) {}
        fn relax(&self) {
            thread::yield_now();
        }
    }
    let memory = cpus(3);
    let all = Shootdowns::new(&memory);
    let (ready, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for cpu in 0..3 {
            let (all, ready, done) = (&all, &ready, &done);
            scope.spawn(move || {
                let here = all.on(Cpu(cpu), &Silent);
                here.online();
                here.run(P, |_| {});
                ready.fetch_add(1, Ordering::Relaxed);
                while ready.load(Ordering::Relaxed) < 3 {
                    thread::yield_now();
                }
                for round in 0..300 {
                    here.invalidate(P, &set(&[0, 1, 2]), &page(round));
                    here.invalidate_kernel(&page(round));
                }
                done.fetch_add(1, Ordering::Relaxed);
                while done.load(Ordering::Relaxed) < 3 {
                    here.serve();
                    thread::yield_now();
                }
            });
        }
    });
    assert_eq!(FLUSHED.load(Ordering::Relaxed), 3 * 3 * 300 * 2);
}
