use core::cell::{Cell, RefCell};
use std::sync::atomic::AtomicU16;
use std::vec::Vec;

use super::*;

fn words(count: usize) -> Vec<TagWord> {
    (0..count).map(|_| TagWord::new()).collect()
}

fn cpus(count: usize) -> Vec<TagCpu> {
    (0..count).map(|_| TagCpu::new()).collect()
}

fn numbers(tags: &[Tag]) -> Vec<u16> {
    tags.iter().map(Tag::number).collect()
}

fn take_all(tags: &Tags<'_>) -> Vec<Tag> {
    core::iter::from_fn(|| tags.take()).collect()
}

#[test]
fn each_tag_is_handed_out_once() {
    let words = words(2);
    let tags = Tags::new(&words, &[]);
    let taken = take_all(&tags);
    assert_eq!(numbers(&taken), (1..128).collect::<Vec<_>>());
    assert_eq!((tags.in_use(), tags.generation()), (127, FIRST));
    let none = Tags::new(&[], &[]);
    assert!(none.take().is_none() && none.in_use() == 0);
}

/// A collection costs every CPU a flush, so few tags are not worth one.
#[test]
fn few_retired_tags_are_not_collected() {
    let words = words(1);
    let tags = Tags::new(&words, &[]);
    let mut taken = take_all(&tags);
    taken.drain(..3).for_each(|tag| tags.retire(tag));
    assert!(tags.take().is_none() && tags.generation() == FIRST);
    tags.retire(taken.remove(6));
    let again = take_all(&tags);
    assert_eq!(numbers(&again), [1, 2, 3, 10]);
    assert_eq!((tags.in_use(), tags.generation()), (63, FIRST + 1));
}

#[test]
fn reserved_tags_do_not_count() {
    let words = words(1024);
    let tags = Tags::new(&words, &[]);
    // The machine has 8 bits.
    tags.reserve(256..=u16::MAX);
    tags.reserve(200..=255);
    tags.reserve(0..=0);
    let taken = take_all(&tags);
    assert_eq!(numbers(&taken), (1..200).collect::<Vec<_>>());
    for (retired, tag) in (1..).zip(taken) {
        tags.retire(tag);
        if retired == 12 {
            break;
        }
        assert!(tags.take().is_none());
    }
    assert_eq!(take_all(&tags).len(), 12);
}

#[test]
fn a_cpu_flushes_once_for_each_generation() {
    let (words, cpus) = (words(1), cpus(2));
    let tags = Tags::new(&words, &cpus);
    let flushes = Cell::new(0);
    let load = |cpu, tag: &Tag| tags.load(Cpu(cpu), tag, || flushes.set(flushes.get() + 1));
    let mut taken = take_all(&tags);
    assert_eq!((load(0, &taken[4]), load(0, &taken[5]), flushes.get()), (5, 6, 1));
    taken.drain(..10).for_each(|tag| tags.retire(tag));
    load(0, &taken[0]);
    assert_eq!(flushes.get(), 1);
    let new = tags.take().unwrap();
    assert_eq!(new.number(), 1);
    assert_eq!((load(0, &new), load(0, &taken[0]), flushes.get()), (1, 11, 2));
    assert_eq!((load(1, &new), load(1, &taken[0]), flushes.get()), (1, 11, 3));
}

/// A switch of the same CPU between the flush and its end.
#[test]
fn a_preempted_check_flushes_once_more() {
    let (words, cpus) = (words(1), cpus(1));
    let tags = Tags::new(&words, &cpus);
    let taken = RefCell::new(take_all(&tags));
    let last = taken.borrow_mut().pop().unwrap();
    tags.load(Cpu(0), &last, || {
        let tag = taken.borrow_mut().remove(0);
        tags.load(Cpu(0), &tag, || {});
        tags.retire(tag);
        taken.borrow_mut().drain(..9).for_each(|tag| tags.retire(tag));
        taken.borrow_mut().insert(0, tags.take().unwrap());
    });
    let is_flushed = Cell::new(false);
    tags.load(Cpu(0), &taken.borrow()[0], || is_flushed.set(true));
    assert!(is_flushed.get());
}

/// Each thread is a CPU with a TLB. No space finds a translation of another under its tag.
#[test]
fn threads_find_no_translation_of_others() {
    const CPUS: u16 = 3;
    let (words, cpus, next) = (words(1), cpus(CPUS as usize), AtomicU16::new(1));
    let tags = Tags::new(&words, &cpus);
    tags.reserve(9..=63);
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (tags, next) = (&tags, &next);
            scope.spawn(move || {
                let tlb = RefCell::new([0; 64]);
                for _ in 0..10_000 {
                    let space = next.fetch_add(1, Ordering::Relaxed);
                    let Some(tag) = tags.take() else { continue };
                    let number = tags.load(Cpu(cpu), &tag, || *tlb.borrow_mut() = [0; 64]);
                    let found = core::mem::replace(&mut tlb.borrow_mut()[number as usize], space);
                    assert_eq!(found, 0);
                    tags.retire(tag);
                }
            });
        }
    });
    assert!(tags.generation() > 1_000);
    assert_eq!(take_all(&tags).len(), 8);
}
