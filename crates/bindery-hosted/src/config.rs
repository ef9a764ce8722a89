//! [`Config`]: what a machine is made of.

use std::time::Duration;

use bindery::addr::Frame;
#[cfg(doc)]
use bindery::platform::Platform;

use crate::control::BrokenControl;
use crate::instructions::InstructionCache;
use crate::tlb::TlbKind;

/// What the machine is made of.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of physical memory; rounded down to whole frames.
    pub memory: u64,
    /// What the memory holds at first: zeroes by default.
    pub contents: Contents,
    /// CPUs, at least one.
    pub cpus: u16,
    /// How the TLBs behave.
    pub tlb: TlbKind,
    /// The number of the first frame. Not 0 by default, so that a frame number that is mistaken
    /// for an offset, or a zero for a frame, is noticed.
    pub first_frame: Frame,
    /// What [`Platform::seed`] says. Always the same by default, so that a test that failed fails
    /// again.
    pub seed: u64,
    /// What [`Platform::protection_keys`] says: 1, so none to choose from, by default.
    pub protection_keys: u8,
    /// What [`Platform::branch_target_identification`] says: false by default.
    pub branch_target_identification: bool,
    /// A control bit that has the wrong value; none by default.
    pub broken: Option<BrokenControl>,
    /// What instruction fetches see; coherent by default.
    pub instructions: InstructionCache,
    /// The longest that a thread may be parked ([`Platform::park`]): 30 s by default. Beyond, its
    /// wake-up counts as lost. The standard error then says which thread sleeps on which word, and
    /// the process aborts. A limit beyond what the clock can show is none.
    pub park_limit: Duration,
}

/// What the memory of a machine holds when it starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contents {
    /// Zeroes: tables may be written by hand.
    Zeroes,
    /// Anything, as on hardware: the core must not count on zeroes. Up to 64 MiB may be what a machine
    /// before this one left, which the host need not clear: a test of a few calls takes two thirds of
    /// the time.
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
            broken: None,
            instructions: InstructionCache::Coherent,
            park_limit: Duration::from_secs(30),
        }
    }
}
