//! The data structures of the core. Each is intrusive or allocates from slabs, never from a heap.
//!
//! | file | contents |
//! |---|---|
//! | `range_skip_list` | disjoint ranges by address, read without locks: VMAs, kernel areas |
//! | `heights` | the random heights of its nodes |
//! | `page_tree` | frames by page number: the page index of an object |
//! | `interval_tree` | overlapping intervals of pages: the VMAs of the reverse map |

pub(crate) mod heights;
pub(crate) mod interval_tree;
pub(crate) mod page_tree;
pub(crate) mod range_skip_list;
