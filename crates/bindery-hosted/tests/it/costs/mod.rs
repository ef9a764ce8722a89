//! Work, counted: entries, tables, invalidations, steps.

mod counts;
mod large_folio_effort;
mod scale;
mod sections;
