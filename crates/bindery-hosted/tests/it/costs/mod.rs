//! Work, counted: entries, tables, invalidations, steps.

mod counts;
mod large_folio_effort;
mod nothing_there;
mod scale;
mod sections;
