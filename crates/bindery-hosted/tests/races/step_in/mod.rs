//! One call is held at each of its steps, another call runs, and the guarantees of the second are
//! audited when it returns: a third CPU, whose TLB already holds every page, must not be able to
//! perform revoked accesses.
//!
//! ```text
//! CPU 0   A ........ held at step n ............................. goes on ... over
//! CPU 2       stores at all probes         loads and stores: audit              audit, sync, check
//! CPU 1                            B ... returns
//! ```
//!
//! If B waits for A, the run counts as blocked; if B fails, as refused. Neither counts as passed.
//! See [`step_in::stops`] for the steps.
//!
//! By default a subset of the runs is executed, selected by `BINDERY_STEP_SEED`; with
//! `BINDERY_STEP_IN=all`, all pairs of calls run at all steps. `BINDERY_STEP_HELD` then restricts
//! the held call, and `BINDERY_STEP_RUNS` sets the size of the subset.
//!
//! | file in `step_in/` | contents |
//! |---|---|
//! | `stops`, `stepped` | the steps, and a platform that passes them |
//! | `world`, `operations`, `calls_in_steps` | the initial state of a run, and the calls |
//! | `promises`, `run` | the audited guarantees; one run |
//! | `plan`, `blocked` | the choice of runs; pairs that never succeed |
//! | `named` | meetings that failed once |
//! | `rechecked` | pages that are replaced between the decision about them and the change |
//! | `reclaim` | calls that step into reclaim and keep their page |
//! | `areas_off` | a swap area that is removed while a call has found a cluster of it |
//! | `commitment` | calls at the limit of committed memory, and a process that takes free pages |
//! | `cached` | pages of the swap cache, swapped out again or with their last mapping removed |
//! | `no_access` | swapped-out memory without access, and similar entries that are not |
//! | `triples`, `late_device` | three calls: stopped swap areas, reused folios, `PROT_NONE` fills |
//! | `page_moves` | moves of pages between two places, and concurrent calls |
//! | `shown_frames` | revokes of frames that are not the core's, and concurrent calls |
//! | `gibibyte_leaves` | leaves of 1 GiB that are cut or moved, and concurrent calls |
//! | `userfaults` | waiting faults, with closes, dying handlers, moves and unread messages |

mod areas_off;
pub mod blocked;
mod cached;
mod calls_in_steps;
mod commitment;
mod gibibyte_leaves;
mod late_device;
mod named;
mod no_access;
pub mod operations;
mod page_moves;
pub mod plan;
pub mod promises;
mod rechecked;
mod reclaim;
pub mod run;
mod shown_frames;
pub mod stepped;
pub mod stops;
mod triples;
mod userfaults;
pub mod world;

use bindery::arch::{AArch64, Riscv64, X86_64};
use plan::calls_meet;

#[test]
fn concurrent_calls_keep_their_promises_on_x86_64() {
    calls_meet::<X86_64<4>>(0);
}

#[test]
fn concurrent_calls_keep_their_promises_on_aarch64() {
    calls_meet::<AArch64>(4);
}

#[test]
fn calls_that_meet_keep_their_promises_on_riscv64() {
    calls_meet::<Riscv64<3>>(0);
}
