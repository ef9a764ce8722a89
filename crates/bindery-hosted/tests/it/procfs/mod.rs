//! What `/proc` says of address spaces and frames.

mod clear_refs;
mod fixture;
mod host;
mod kpageflags;
mod listings;
mod maps_entries;
mod pagemap;
