//! Work, counted: entries, tables, invalidations, steps.

mod copy_on_write;
mod counts;
mod faults;
mod large_folio_effort;
mod nothing_there;
mod scale;
mod sections;
