//! Threads as CPUs, and read sections.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::kernel::Finished;
use bindery::arch::Tiny;
use bindery::platform::{Cpu, Platform};
use bindery_hosted::{Config, Machine};

fn machine(cpus: u16) -> Machine<Tiny> {
    Machine::new(Config { cpus, memory: 1 << 20, ..Config::default() })
}

#[test]
fn an_unbound_thread_is_cpu_zero() {
    let machine = machine(2);
    assert_eq!(machine.cpu(), Cpu(0));
    assert_eq!(machine.on_cpu(Cpu(1), || machine.cpu()), Cpu(1));
    assert_eq!(machine.cpu(), Cpu(0));
    let cpu = thread::scope(|scope| scope.spawn(|| machine.cpu()).join().unwrap());
    assert_eq!(cpu, Cpu(0));
}

#[test]
fn a_thread_has_one_cpu_on_each_machine() {
    let (one, two) = (machine(4), machine(4));
    let _on_one = one.bind(Cpu(1));
    let on_two = two.bind(Cpu(2));
    assert_eq!((one.cpu(), two.cpu()), (Cpu(1), Cpu(2)));
    drop(on_two);
    assert_eq!((one.cpu(), two.cpu()), (Cpu(1), Cpu(0)));
}

#[test]
fn clones_are_the_same_machine() {
    let machine = machine(2);
    let clone = machine.clone();
    machine.on_cpu(Cpu(1), || assert_eq!(clone.cpu(), Cpu(1)));
    drop(machine);
    assert_eq!(clone.frames().1, 256);
}

#[test]
fn two_threads_are_never_one_cpu() {
    let machine = machine(2);
    let _on_cpu = machine.bind(Cpu(1));
    let other = thread::scope(|scope| scope.spawn(|| machine.on_cpu(Cpu(1), || ())).join());
    let message = *other.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("two threads are CPU 1"), "{message}");
}

#[test]
fn two_unbound_threads_cannot_both_be_in_sections() {
    let machine = machine(2);
    machine.enter_read();
    let other = thread::scope(|scope| scope.spawn(|| machine.enter_read()).join());
    assert!(other.is_err());
    machine.leave_read();
    thread::scope(|scope| {
        scope.spawn(|| {
            machine.enter_read();
            machine.leave_read();
        });
    });
}

#[test]
fn the_makers_idle_thread_leaves_cpu_zero() {
    let machine = machine(3);
    machine.enter_read();
    machine.leave_read();
    thread::scope(|scope| {
        for cpu in 0..3 {
            let machine = &machine;
            scope.spawn(move || {
                machine.on_cpu(Cpu(cpu), || {
                    machine.enter_read();
                    assert_eq!(machine.cpu(), Cpu(cpu));
                    machine.leave_read();
                });
            });
        }
    });
}

#[test]
fn synchronize_waits_for_the_sections_that_exist() {
    let machine = machine(2);
    let (entered, left) = (Barrier::new(2), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            machine.on_cpu(Cpu(1), || {
                machine.enter_read();
                machine.enter_read();
                entered.wait();
                machine.leave_read();
                // A thread that does not wait for this section would be done by then.
                (0..10_000).for_each(|_| thread::yield_now());
                left.store(true, Ordering::SeqCst);
                machine.leave_read();
            });
        });
        entered.wait();
        machine.synchronize();
        assert!(left.load(Ordering::SeqCst));
    });
}

#[test]
fn synchronize_does_not_wait_for_later_sections() {
    let machine = machine(2);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _finished = Finished(&stop);
        scope.spawn(|| {
            machine.on_cpu(Cpu(1), || {
                while !stop.load(Ordering::Relaxed) {
                    machine.enter_read();
                    machine.leave_read();
                }
            });
        });
        for _ in 0..1000 {
            machine.synchronize();
        }
    });
}

#[test]
fn a_grace_period_ends_with_its_initial_sections() {
    let machine = machine(3);
    let before = machine.grace_period();
    assert!(machine.is_over(before), "nobody is inside");
    let step = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            machine.on_cpu(Cpu(1), || {
                machine.enter_read();
                step.wait();
                step.wait();
                machine.leave_read();
                machine.enter_read();
                step.wait();
                step.wait();
                machine.leave_read();
            });
        });
        step.wait();
        let inside = machine.grace_period();
        assert!(machine.is_over(before), "the section began later");
        assert!(!machine.is_over(inside));
        step.wait();
        step.wait();
        assert!(machine.is_over(inside), "that section was left, though another was entered");
        assert!(!machine.is_over(machine.grace_period()));
        step.wait();
    });
    assert!(machine.is_over(machine.grace_period()));
}

#[test]
#[should_panic(expected = "asked after inside a read section")]
fn asking_for_a_period_in_a_section_panics() {
    let machine = machine(1);
    let period = machine.grace_period();
    machine.enter_read();
    machine.is_over(period);
}

#[test]
#[should_panic(expected = "synchronize inside a read section")]
fn synchronize_inside_a_section_is_a_mistake() {
    let machine = machine(1);
    machine.enter_read();
    machine.synchronize();
}

#[test]
#[should_panic(expected = "might sleep inside a read section")]
fn a_sleeping_lock_in_a_section_panics() {
    let machine = machine(1);
    machine.enter_read();
    machine.might_sleep();
}

#[test]
#[should_panic(expected = "never entered")]
fn leaving_what_was_not_entered_is_a_mistake() {
    machine(1).leave_read();
}

#[test]
fn a_panicked_thread_in_a_section_blocks_none() {
    let machine = machine(2);
    let gone = thread::scope(|scope| {
        let panics = || {
            machine.on_cpu(Cpu(1), || {
                machine.enter_read();
                panic!("a test of the test machine")
            })
        };
        scope.spawn(panics).join()
    });
    assert!(gone.map(|(): ()| ()).is_err());
    machine.synchronize();
    machine.on_cpu(Cpu(1), || ());
}

#[test]
fn four_gibibytes_cost_nothing_until_they_are_used() {
    let machine = Machine::<Tiny>::new(Config { memory: 4 << 30, ..Config::default() });
    let (first, count) = machine.frames();
    assert_eq!(count, 1 << 20);
    machine.zero(first.plus(count - 1), 1);
}
