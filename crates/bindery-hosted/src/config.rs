//! [`Config`]: the configuration of a machine.

use std::time::Duration;

use bindery::addr::Frame;
#[cfg(doc)]
use bindery::platform::Platform;

use crate::control::BrokenControl;
use crate::instructions::InstructionCache;
use crate::tlb::TlbKind;

/// The configuration of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of physical memory; rounded down to whole frames.
    pub memory: u64,
    /// The initial content of memory: zeroes by default.
    pub contents: Contents,
    /// CPUs, at least one.
    pub cpus: u16,
    /// The behavior of the TLBs.
    pub tlb: TlbKind,
    /// The number of the first frame. Not 0 by default, to expose code that takes a frame number
    /// for an offset, or a zero for a frame.
    pub first_frame: Frame,
    /// The value of [`Platform::seed`]. Always the same by default, so that a failed test fails
    /// again.
    pub seed: u64,
    /// The value of [`Platform::protection_keys`]: 1, so only key 0, by default.
    pub protection_keys: u8,
    /// The value of [`Platform::branch_target_identification`]: false by default.
    pub branch_target_identification: bool,
    /// The value of [`Platform::page_based_memory_types`]: true by default.
    pub page_based_memory_types: bool,
    /// Whether programs may have leaves of 1 GiB ([`Platform::largest_shown_leaf`]): true by
    /// default.
    pub gibibyte_leaves: bool,
    /// A control bit that has the wrong value; none by default.
    pub broken: Option<BrokenControl>,
    /// The behavior of instruction fetches; coherent by default.
    pub instructions: InstructionCache,
    /// The longest that a thread may be parked ([`Platform::park`]): 30 s by default. After that,
    /// its wake-up counts as lost: the machine reports the thread and its word to the standard
    /// error, and aborts the process. A limit beyond the range of the clock means none.
    pub park_limit: Duration,
    /// The length of a brief sleep ([`Platform::park_briefly`]), by default as long as
    /// `park_limit`, for tests in which each such sleep is ended. Zero for none.
    pub brief_park: Duration,
}

/// The content of a machine's memory at the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contents {
    /// Zeroes: tables may be written by hand.
    Zeroes,
    /// Arbitrary, as on hardware: the core must not rely on zeroes. Up to 64 MiB may be the content
    /// of an earlier machine, so the host need not clear it. In a test of a few calls, this saves a
    /// third of the time.
    Anything,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            memory: 64 << 20,
            contents: Contents::Zeroes,
            cpus: 1,
            tlb: TlbKind::Strict,
            first_frame: Frame(0x8_0000),
            seed: 0,
            protection_keys: 1,
            branch_target_identification: false,
            page_based_memory_types: true,
            gibibyte_leaves: true,
            broken: None,
            instructions: InstructionCache::Coherent,
            park_limit: Duration::from_secs(30),
            brief_park: Duration::from_secs(30),
        }
    }
}
