//! Pages that are not in memory.
//!
//! | file | contents |
//! |---|---|
//! | `compressed` | a store of compressed pages |

#[cfg_attr(not(test), allow(dead_code, reason = "the devices of swap name what they need"))]
pub(crate) mod compressed;
