//! Descriptions of the differences between Linux and another runner of the same sequence.

use std::fmt::Write;

use super::names::errno;
use super::observation::{
    ANONYMOUS, Area, FIRST_FILE, LETTERS, OTHER_OBJECT, Observation, Outcome, Snapshot, Stretch,
    digest_in_words,
};
use super::operation::Operation;
use super::place::{PAGE, REGION, REGION_END};

/// A difference of another runner from Linux.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The call and the differing part. Differences with one cause mostly have one kind.
    pub kind: String,
    /// The full description, for readers.
    pub text: String,
}

/// The first observation that differs, with a description; `None` if all agree.
pub fn difference(
    operations: &[Operation],
    linux: &[Observation],
    ours: &[Observation],
) -> Option<Difference> {
    let place = linux.iter().zip(ours).position(|(linux, ours)| linux != ours);
    let Some(place) = place else {
        assert_eq!(linux.len(), ours.len(), "one player has stopped early");
        return None;
    };
    let (theirs, ours) = (&linux[place], &ours[place]);
    assert_eq!((theirs.step, theirs.process), (ours.step, ours.process), "other orders of events");
    let operation = operations.get(theirs.step);
    let name = operation.map_or("the end", |operation| operation.operation.name());
    let mut kind = name.to_owned();
    let mut text = match operation {
        Some(operation) => format!("step {}: {operation:?}", theirs.step),
        None => "the end of a process".to_owned(),
    };
    text += if theirs.process == 0 { "\n" } else { " (by the child)\n" };
    let (linux_says, we_say) = (outcome(theirs.outcome), outcome(ours.outcome));
    if theirs.outcome == ours.outcome {
        let _ = writeln!(text, "  both: {linux_says}");
    } else {
        let _ = writeln!(text, "  Linux: {linux_says}\n  ours:  {we_say}");
        let _ = write!(kind, ", {} for {}", sort(ours.outcome), sort(theirs.outcome));
    }
    if theirs.data != ours.data {
        kind += ", data";
        data(theirs, ours, &mut text);
    }
    snapshots(&theirs.snapshot, &ours.snapshot, &mut kind, &mut text);
    let before = linux[..place].iter().rev().find(|before| before.process == theirs.process);
    if let Some(before) = before.filter(|_| theirs.outcome != Outcome::Looked) {
        let _ = writeln!(text, "  before, on both:");
        let snapshot = &before.snapshot;
        snapshot.areas.iter().for_each(|one| line("      ", &area(one), &mut text));
        snapshot.stretches.iter().for_each(|one| line("      ", &stretch(one), &mut text));
    }
    Some(Difference { kind, text })
}

/// An outcome without the details that differ in every sequence.
fn sort(from: Outcome) -> String {
    match from {
        Outcome::Returned(-4095..0) | Outcome::Signaled(_) => outcome(from),
        Outcome::Returned(_) | Outcome::Accessed(_) => "success".to_owned(),
        Outcome::Elsewhere | Outcome::Looked => outcome(from),
    }
}

fn outcome(outcome: Outcome) -> String {
    match outcome {
        Outcome::Returned(error @ -4095..0) => errno(-error),
        Outcome::Returned(value) => address(value as u64),
        Outcome::Elsewhere => "an address outside of the region".to_owned(),
        Outcome::Accessed(value) => format!("the value {value:#x}"),
        Outcome::Signaled(signal) => format!("the signal {signal:?}"),
        Outcome::Looked => "all contents".to_owned(),
    }
}

/// An address in the notation of the sequences.
fn address(at: u64) -> String {
    if !(REGION..=REGION_END).contains(&at) {
        return format!("{at:#x}");
    }
    let (number, rest) = ((at - REGION) / PAGE, at % PAGE);
    if rest == 0 { format!("page({number})") } else { format!("page({number}) + {rest}") }
}

fn area(area: &Area) -> String {
    let mut letters = String::new();
    for (bit, letter) in LETTERS.iter().enumerate().filter(|(bit, _)| area.letters >> bit & 1 == 1)
    {
        let _ = write!(letters, "{}{letter}", if bit == 0 { "" } else { " " });
    }
    let backing = match area.backing {
        ANONYMOUS => "anonymous".to_owned(),
        file @ FIRST_FILE..OTHER_OBJECT => {
            format!("FILES[{}] from page {}", file - FIRST_FILE, area.offset / PAGE)
        }
        other => {
            format!("object {} from page {}", other - OTHER_OBJECT, area.offset / PAGE)
        }
    };
    let (start, end) = (address(area.start), address(area.end));
    format!("{start} to {end}: {letters}; {backing}")
}

fn stretch(stretch: &Stretch) -> String {
    let (start, end) = (address(stretch.start), address(stretch.end));
    format!("{start} to {end}: {:?} present", stretch.presence)
}

fn line(before: &str, what: &str, text: &mut String) {
    let _ = writeln!(text, "{before}{what}");
}

/// The elements that only one of two lists has, in their order.
fn lists<T: PartialEq>(theirs: &[T], ours: &[T], say: fn(&T) -> String, text: &mut String) {
    for one in theirs.iter().filter(|one| !ours.contains(one)) {
        line("  Linux: ", &say(one), text);
    }
    for one in ours.iter().filter(|one| !theirs.contains(one)) {
        line("  ours:  ", &say(one), text);
    }
}

fn snapshots(theirs: &Snapshot, ours: &Snapshot, kind: &mut String, text: &mut String) {
    if theirs.areas != ours.areas {
        *kind += ", mappings";
        lists(&theirs.areas, &ours.areas, area, text);
    }
    if theirs.stretches != ours.stretches {
        *kind += ", pages";
        lists(&theirs.stretches, &ours.stretches, stretch, text);
    }
    for (number, (theirs, ours)) in theirs.files.iter().zip(&ours.files).enumerate() {
        if theirs != ours {
            *kind += ", files";
            let _ =
                writeln!(text, "  FILES[{number}]: Linux {theirs:?}\n            ours  {ours:?}");
        }
    }
    if theirs.counters != ours.counters {
        *kind += ", counters";
        let _ = writeln!(text, "  Linux: {:?}\n  ours:  {:?}", theirs.counters, ours.counters);
    }
}

fn data(theirs: &Observation, ours: &Observation, text: &mut String) {
    if theirs.outcome != Outcome::Looked {
        let _ = writeln!(text, "  Linux read: {:x?}\n  ours read:  {:x?}", theirs.data, ours.data);
        return;
    }
    let pairs = |data: &[u64]| -> Vec<(u64, u64)> {
        data.as_chunks::<2>().0.iter().map(|[at, digest]| (*at, *digest)).collect()
    };
    let say = |(at, digest): &(u64, u64)| {
        // The pages of files are below the region.
        let at = match *at {
            at if at >= REGION => address(at),
            at => format!("FILES[{}], page {}", at >> 32, (at as u32) / PAGE as u32),
        };
        format!("{at} holds {}", digest_in_words(*digest))
    };
    lists(&pairs(&theirs.data), &pairs(&ours.data), say, text);
}
