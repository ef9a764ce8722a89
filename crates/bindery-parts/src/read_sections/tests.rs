use bindery::platform::{Cpu, GracePeriod};
use std::vec::Vec;

use super::*;

fn cpus(count: usize) -> Vec<ReadCpu> {
    (0..count).map(|_| ReadCpu::new()).collect()
}

#[test]
fn a_period_waits_for_earlier_sections_only() {
    let cpus = cpus(3);
    let sections = ReadSections::new(&cpus);
    sections.enter(Cpu(1));
    let period = sections.grace_period();
    sections.advance();
    // A section that began after the period did does not hold it up.
    sections.enter(Cpu(2));
    for _ in 0..130 {
        assert!(!sections.is_over(Cpu(0), period));
    }
    sections.leave(Cpu(1));
    assert!((0..130).any(|_| sections.is_over(Cpu(0), period)));
    assert!(sections.is_inside(Cpu(2)));
}

#[test]
fn nested_sections_end_with_the_outermost() {
    let cpus = cpus(1);
    let sections = ReadSections::new(&cpus);
    sections.enter(Cpu(0));
    sections.enter(Cpu(0));
    let period = sections.grace_period();
    sections.leave(Cpu(0));
    assert!(sections.is_inside(Cpu(0)) && !sections.is_over(Cpu(0), period));
    sections.leave(Cpu(0));
    assert!(!sections.is_inside(Cpu(0)) && sections.is_over(Cpu(0), period));
}

/// The period under way began before the caller unlinked its item.
#[test]
fn a_period_under_way_does_not_count() {
    let cpus = cpus(2);
    let sections = ReadSections::new(&cpus);
    sections.enter(Cpu(1));
    let first = sections.grace_period();
    sections.advance();
    let second = sections.grace_period();
    assert_eq!(second, GracePeriod(first.0 + 1));
    sections.leave(Cpu(1));
    sections.advance();
    assert!(sections.has_passed(first) && !sections.has_passed(second));
    sections.advance();
    assert!(sections.has_passed(second));
}

#[test]
fn synchronize_relaxes_while_a_section_is_open() {
    let cpus = cpus(2);
    let sections = ReadSections::new(&cpus);
    sections.enter(Cpu(1));
    let mut left = 3;
    sections.synchronize(|| {
        left -= 1;
        if left == 0 {
            sections.leave(Cpu(1));
        }
    });
    assert_eq!(left, 0);
}

#[test]
fn offline_cpus_are_not_looked_at() {
    let cpus = cpus(3);
    let sections = ReadSections::new(&cpus);
    sections.cpu_offline(Cpu(1));
    sections.cpu_offline(Cpu(2));
    // With one CPU online, every answer is exact.
    let period = sections.grace_period();
    assert!(sections.is_over(Cpu(0), period));
    sections.cpu_online(Cpu(2));
    sections.enter(Cpu(2));
    let period = sections.grace_period();
    sections.advance();
    sections.advance();
    assert!(!sections.has_passed(period));
}

/// 63 of 64 negative answers read one word, so the period stays where it was.
#[test]
fn one_question_in_64_looks() {
    let cpus = cpus(2);
    let sections = ReadSections::new(&cpus);
    let period = sections.grace_period();
    let asked = (1..).find(|_| sections.is_over(Cpu(0), period));
    assert_eq!(asked, Some(64));
}

#[test]
fn a_period_not_begun_never_passes() {
    let cpus = cpus(1);
    let sections = ReadSections::new(&cpus);
    assert!((0..100).all(|_| !sections.is_over(Cpu(0), GracePeriod(u64::MAX))));
    assert!(sections.has_passed(GracePeriod::default()));
    let none = ReadSections::new(&[]);
    none.synchronize(|| panic!("nothing to wait for"));
    assert!(!none.is_inside(Cpu(9)));
}

#[test]
fn threads_find_no_freed_item() {
    use std::sync::atomic::{AtomicU64 as Word, Ordering::*};

    let cpus = cpus(3);
    let sections = ReadSections::new(&cpus);
    let (current, items) = (Word::new(0), [const { Word::new(0) }; 2]);
    std::thread::scope(|scope| {
        for cpu in [1, 2] {
            let (sections, current, items) = (&sections, &current, &items);
            scope.spawn(move || {
                for _ in 0..20_000 {
                    sections.enter(Cpu(cpu));
                    let found = current.load(Relaxed) as usize;
                    assert_eq!(items[found].load(Relaxed), 0, "found and freed");
                    sections.leave(Cpu(cpu));
                }
            });
        }
        for round in 1..2_000 {
            let old = (round + 1) % 2;
            current.store(round % 2, Relaxed);
            sections.synchronize(std::thread::yield_now);
            items[old as usize].store(1, Relaxed);
            items[old as usize].store(0, Relaxed);
        }
    });
}
