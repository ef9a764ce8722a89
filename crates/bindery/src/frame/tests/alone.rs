//! Notes of walks that found other mappings of a folio.

use super::super::folio::MAX_FOLIO_ORDER;
use super::machine;
use crate::addr::Order;

#[test]
fn counts_that_are_too_high_and_references_are_answers() {
    let (machine, frames) = machine(1024);
    let folio = frames.new_folio(Order(4)).unwrap();
    frames.first_map(folio, 16);
    assert!(frames.may_be_mapped_by_one(folio, 16));
    assert!(!frames.may_be_mapped_by_one(folio, 15), "room for 15 entries");
    frames.map(folio, 1).unwrap();
    assert!(!frames.may_be_mapped_by_one(folio, 512), "17 mappings of 16 pages");
    frames.unmap(&machine, folio, 1);
    assert!(frames.try_get(folio));
    assert!(!frames.may_be_mapped_by_one(folio, 16), "a reference");
    frames.note_other_mappings(folio, 16);
    frames.release(&machine, folio);
    assert!(frames.may_be_mapped_by_one(folio, 16), "the reference is not noted");
}

/// One of two processes gives up its pages one by one while the other keeps `others`.
fn walks(order: Order, others: u32) -> u32 {
    let (machine, frames) = machine(2048);
    let folio = frames.new_folio(order).unwrap();
    let pages = folio.pages();
    frames.first_map(folio, pages);
    let mut walks = 0;
    for left in (others + 1..=pages).rev() {
        if frames.may_be_mapped_by_one(folio, pages) {
            walks += 1;
            frames.note_other_mappings(folio, left - others);
        }
        frames.unmap(&machine, folio, 1);
    }
    frames.forget_other_mappings(folio);
    assert!(frames.may_be_mapped_by_one(folio, pages), "the note is forgotten");
    walks
}

#[test]
fn no_more_than_eight_walks_find_others() {
    for order in Order::PAGE.above().up_to(MAX_FOLIO_ORDER) {
        let pages = order.pages();
        for others in [1, pages / 8, pages / 3, pages / 2, pages - 1].map(|count| count.max(1)) {
            let walks = walks(order, others);
            assert!((1..=8).contains(&walks), "{order:?}, {others} others: {walks}");
        }
    }
}

#[test]
fn the_parts_of_a_folio_begin_without_a_note() {
    let (machine, frames) = machine(1024);
    let folio = frames.new_folio(Order(4)).unwrap();
    frames.first_map(folio, 16);
    frames.note_other_mappings(folio, 1);
    assert!(!frames.may_be_mapped_by_one(folio, 16));
    assert!(frames.try_get(folio));
    assert_eq!(frames.split(folio, Order(2), |_| 1), Ok(()));
    for first in (0..16).step_by(4) {
        let part = frames.folio_of(folio.head.plus(first)).unwrap();
        frames.release(&machine, part);
        assert!(frames.may_be_mapped_by_one(part, 4), "the part from page {first} on");
    }
}
