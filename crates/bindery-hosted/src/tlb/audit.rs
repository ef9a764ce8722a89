//! Verifies that all entries of a strict TLB are still valid.
//!
//! A cached translation may be narrower than the tables (a denied access faults, and software reads
//! the tables); it must not be wider. It must not be *dirty* if the table's entry is clean, because
//! a write through the cached translation would not be recorded. It must not have another size,
//! because the next access to an uncovered page would load a second translation. It may be
//! *accessed* while the table's entry is not; all kernels tolerate this.
//!
//! Dormant entries ([`super::loaded`]) may differ from the tables.

use bindery::addr::{Frame, PAGE_SIZE};
use bindery::arch::Permissions;

use super::strict::Strict;
use crate::mmu::walk::{End, Table, World};
use crate::mmu::{Translation, Walk};
use crate::violation::{Place, Violation};

impl<A: Walk> Strict<A> {
    pub(crate) fn audit(&self, world: World<'_>) {
        for (root, space) in &self.spaces {
            let root = Frame(*root);
            if !self.loaded.allows(root) {
                continue;
            }
            for leaf in space.leaves.values() {
                self.audit_leaf(world, root, leaf);
            }
            for (level, tables) in (0..).zip(&space.tables) {
                for (start, table) in tables {
                    self.audit_table(world, root, level, *start, *table);
                }
            }
        }
    }

    /// Reads the current tables in the translation's range.
    fn audit_leaf(&self, world: World<'_>, root: Frame, cached: &Translation) {
        let mut addr = cached.start;
        while cached.covers(addr) {
            let now = match self.look(world, root, addr).end {
                End::Leaf(now) | End::Denied(now) => Some(now),
                End::Invalid(_) | End::Malformed => None,
            };
            let wrong = match &now {
                None => Some("the address is not mapped"),
                Some(now) => disagreement(cached, now, addr),
            };
            if let Some(why) = wrong {
                let place = Place { cpu: self.cpu, root, addr };
                let cached = *cached;
                world.log.report(Violation::StaleLeaf { place, cached, now, why });
                return;
            }
            addr = now.map_or(addr.wrapping_add(PAGE_SIZE), |now| now.end());
        }
    }

    fn audit_table(&self, world: World<'_>, root: Frame, level: u8, start: u64, cached: Table) {
        let now = self.look(world, root, start).table(level);
        let why = match now {
            None => "the entry names no table",
            Some(now) if now.frame != cached.frame => "the entry names another table",
            Some(now) if !now.rights.contains(cached.rights) => "its permissions shrank",
            Some(_) => return,
        };
        let place = Place { cpu: self.cpu, root, addr: start };
        let (cached, now) = (cached.frame, now.map(|now| now.frame));
        world.log.report(Violation::StaleTable { place, level, cached, now, why });
    }
}

fn disagreement(cached: &Translation, now: &Translation, addr: u64) -> Option<&'static str> {
    if cached.translate(addr) != now.translate(addr) {
        Some("the address is mapped elsewhere")
    } else if !now.permissions.contains(cached.permissions) {
        Some("the permissions shrank")
    } else if (now.permissions - cached.permissions).contains(Permissions::BTI) {
        Some("branches into it are checked now")
    } else if cached.order != now.order {
        Some("the size is another: a translation of the new size would be in conflict")
    } else if cached.memory != now.memory {
        Some("the memory type is another: accesses of both kinds would meet")
    } else if cached.key != now.key {
        Some("the protection key is another")
    } else if cached.dirty && !now.dirty {
        Some("the entry is clean, so that a write would not be recorded")
    } else {
        None
    }
}
