//! Settings of processes and of the machine.

use bindery::addr::{Order, PAGE_SHIFT, PAGE_SIZE, VirtAddr};
use bindery::{FolioPolicy, SizeMode};
use bindery_hosted::Walk;

use crate::check::fixture::{Fixture, Stop};
use crate::check::outcome::Outcome;
use crate::check::script::{
    FOLIO_KINDS, FOLIO_MODES, FolioKind, OVERCOMMITS, RESOURCES, Resource, Setting, name_of,
};
use crate::check::show;

impl<A: Walk> Fixture<'_, A> {
    pub(super) fn setting(
        &self,
        index: usize,
        setting: &Setting,
    ) -> Result<(String, Outcome), Stop> {
        let call = match setting {
            Setting::Heap(at) => {
                let at = self.number(at)?;
                self.process(index).space.set_break_start(VirtAddr(at));
                format!("heap({})", show::hexadecimal(at))
            }
            Setting::Limit(resource, bound) => {
                let bound = bound.as_ref().map(|bound| self.number(bound)).transpose()?;
                self.limit(index, *resource, bound.unwrap_or(u64::MAX));
                let shown = bound.map_or("unlimited".to_owned(), show::size);
                format!("limit({}, {shown})", name_of(RESOURCES, resource))
            }
            Setting::Policy { orders, mode, kind } => {
                for order in orders {
                    self.policy(*kind).set(Order(*order), *mode);
                }
                let sizes: Vec<String> =
                    orders.iter().map(|order| show::size(PAGE_SIZE << order)).collect();
                let (mode, kind) = (name_of(FOLIO_MODES, mode), name_of(FOLIO_KINDS, kind));
                format!("policy({}, {mode}, {kind})", sizes.join("|"))
            }
            Setting::Overcommit(mode, limit) => {
                let limit = limit.as_ref().map(|limit| self.number(limit)).transpose()?;
                let commitment = self.memory.commitment();
                commitment.set_mode(*mode);
                let mut shown = name_of(OVERCOMMITS, mode).to_owned();
                if let Some(limit) = limit {
                    commitment.set_limit(limit >> PAGE_SHIFT);
                    shown = format!("{shown}, {}", show::size(limit));
                }
                format!("overcommit({shown})")
            }
        };
        Ok((call, Outcome::Done))
    }

    fn limit(&self, index: usize, resource: Resource, bound: u64) {
        let space = &self.process(index).space;
        let mut limits = space.limits();
        let limit = match resource {
            Resource::AddressSpace => &mut limits.address_space,
            Resource::Data => &mut limits.data,
            Resource::Locked => &mut limits.locked,
            Resource::Stack => &mut limits.stack,
        };
        *limit = bound;
        space.set_limits(&limits);
    }

    fn policy(&self, kind: FolioKind) -> &FolioPolicy {
        match kind {
            FolioKind::Anonymous => self.memory.folio_policy(),
            FolioKind::Shared => self.memory.shared_folio_policy(),
            FolioKind::File => self.memory.file_folio_policy(),
        }
    }

    /// Allows first touches folios of this order, for all kinds of memory.
    pub fn use_folios(&self, order: u8) {
        for (_, kind) in FOLIO_KINDS {
            self.policy(*kind).set(Order(order), SizeMode::Always);
        }
    }
}
