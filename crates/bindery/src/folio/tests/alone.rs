//! Notes of walks that found other mappings of a folio.

use super::super::handle::MAX_FOLIO_ORDER;
use super::{fresh, new_frames, release, unmap};
use crate::addr::Order;

#[test]
fn excessive_counts_and_references_are_answers() {
    let frames = new_frames(1024);
    let folio = frames.new_folio(Order(4)).unwrap().leave();
    fresh(&frames, folio).map(16);
    assert!(frames.folio(folio).other_mappings().may_be_none(16));
    assert!(!frames.folio(folio).other_mappings().may_be_none(15), "room for 15 entries");
    frames.folio(folio).map(1).unwrap();
    assert!(!frames.folio(folio).other_mappings().may_be_none(512), "17 mappings of 16 pages");
    unmap(&frames, folio, 1);
    assert!(frames.folio(folio).try_get());
    assert!(!frames.folio(folio).other_mappings().may_be_none(16), "a reference");
    frames.folio(folio).other_mappings().note(16);
    release(&frames, folio);
    assert!(frames.folio(folio).other_mappings().may_be_none(16), "the reference is not noted");
}

/// One of two processes unmaps its pages one by one while the other keeps `others`.
fn walks(order: Order, others: u32) -> u32 {
    let frames = new_frames(2048);
    let folio = frames.new_folio(order).unwrap().leave();
    let pages = folio.pages();
    fresh(&frames, folio).map(pages);
    let mut walks = 0;
    for left in (others + 1..=pages).rev() {
        if frames.folio(folio).other_mappings().may_be_none(pages) {
            walks += 1;
            frames.folio(folio).other_mappings().note(left - others);
        }
        unmap(&frames, folio, 1);
    }
    frames.folio(folio).other_mappings().forget();
    assert!(frames.folio(folio).other_mappings().may_be_none(pages), "the note is forgotten");
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
fn a_folios_parts_begin_without_a_note() {
    let frames = new_frames(1024);
    let folio = frames.new_folio(Order(4)).unwrap().leave();
    fresh(&frames, folio).map(16);
    frames.folio(folio).other_mappings().note(1);
    assert!(!frames.folio(folio).other_mappings().may_be_none(16));
    assert!(frames.folio(folio).try_get());
    assert_eq!(frames.folio(folio).split(Order(2), |_| 1), Ok(()));
    for first in (0..16).step_by(4) {
        let part = frames.folio_of(folio.head.plus(first)).unwrap();
        release(&frames, part);
        assert!(
            frames.folio(part).other_mappings().may_be_none(4),
            "the part from page {first} on"
        );
    }
}
