//! The audit: the core's invariants, and the violations that the strict TLB has detected.

use bindery::check::{self, Report};
use bindery::{AddressSpace, Memory};
use bindery_hosted::{Machine, Walk};
use serde::Serialize;

use super::show;

/// The findings of an audit.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Findings {
    /// Empty if nothing is wrong.
    pub violations: Vec<String>,
    /// The extent of the audit, if it was completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    looked_at: Option<LookedAt>,
}

/// As in `bindery::check::Report`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct LookedAt {
    mappings: u64,
    tables: u64,
    pages: u64,
    folios: u64,
    objects: u64,
    object_pages: u64,
    free_frames: u64,
}

impl From<Report> for LookedAt {
    fn from(report: Report) -> Self {
        let Report { mappings, tables, pages, folios, objects, object_pages, free_frames } = report;
        Self { mappings, tables, pages, folios, objects, object_pages, free_frames }
    }
}

/// Audits everything. Violations of the TLB are reported once.
pub fn audit<A: Walk>(
    machine: &Machine<A>,
    memory: &Memory<Machine<A>>,
    spaces: &[&AddressSpace<'_, Machine<A>>],
) -> Findings {
    machine.audit();
    let mut violations: Vec<String> =
        machine.take_violations().iter().map(|violation| format!("TLB: {violation}")).collect();
    let mut scratch = vec![0; check::scratch_words(memory)];
    let looked_at = match check::check(memory, spaces, &mut scratch) {
        Ok(report) => Some(report.into()),
        Err(violation) => {
            violations.push(violation.to_string());
            None
        }
    };
    Findings { violations, looked_at }
}

impl Findings {
    /// Frames are missing at the end.
    pub fn leak(frames: u64) -> Self {
        let all_gone = "are in use though no process and no file is left";
        let violation = format!("{} {all_gone}", show::plural(frames, "frame"));
        Self { violations: vec![violation], looked_at: None }
    }

    pub fn show(&self) -> String {
        match (&*self.violations, &self.looked_at) {
            ([], Some(looked_at)) => format!("nothing wrong in {}", looked_at.show()),
            ([], None) => "nothing wrong".to_owned(),
            (violations, _) => {
                let mut shown = show::plural(violations.len() as u64, "violation");
                for violation in violations {
                    shown.push_str("\n  ");
                    shown.push_str(violation);
                }
                shown
            }
        }
    }
}

impl LookedAt {
    fn show(&self) -> String {
        let mut parts = vec![
            show::plural(self.mappings, "mapping"),
            show::plural(self.tables, "table"),
            show::plural(self.pages, "mapped page"),
            show::plural(self.folios, "folio"),
        ];
        if self.objects > 0 {
            parts.push(show::plural(self.objects, "object"));
            parts.push(show::plural(self.object_pages, "object page"));
        }
        parts.join(", ")
    }
}
