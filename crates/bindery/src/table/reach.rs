//! The maximum length of a run. This is the only place that selects page-by-page work.
//!
//! A product always works on the largest possible run. Benchmarks and tests compare this with the
//! same code on shorter runs (feature `baseline`). Without the feature, all results here are
//! constants and the slow code is not compiled.

/// The maximum length of a run.
#[cfg(feature = "baseline")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reach {
    /// One base page: the baseline that benchmarks compare with the default.
    Page,
    /// Up to the end of one folio in one table.
    Folio,
    /// As far as a table entry can cover: whole tables by one entry.
    #[default]
    Table,
}

/// The reach of a tree or of a kernel map.
#[derive(Clone, Copy)]
pub(crate) struct RunLimit(#[cfg(feature = "baseline")] Reach);

impl RunLimit {
    /// Up to the largest size that a table entry can map.
    pub(crate) const NONE: Self = Self(
        #[cfg(feature = "baseline")]
        Reach::Table,
    );

    /// The limit that a benchmark or a test requests.
    #[cfg(feature = "baseline")]
    pub(crate) fn of(reach: Reach) -> Self {
        Self(reach)
    }

    /// Whether each run is one base page.
    #[inline(always)]
    pub(crate) fn is_page(self) -> bool {
        #[cfg(feature = "baseline")]
        return self.0 == Reach::Page;
        #[cfg(not(feature = "baseline"))]
        false
    }

    /// The maximum number of entries in one run.
    #[inline(always)]
    pub(crate) fn longest_run(self) -> u32 {
        if self.is_page() { 1 } else { u32::MAX }
    }

    /// Whether whole tables are moved and detached by one entry.
    #[inline(always)]
    pub(crate) fn takes_tables(self) -> bool {
        #[cfg(feature = "baseline")]
        return self.0 == Reach::Table;
        #[cfg(not(feature = "baseline"))]
        true
    }
}
