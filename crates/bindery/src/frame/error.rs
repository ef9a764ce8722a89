//! The reasons why the machine's memory cannot be used.

use core::fmt;

/// The reason why ranges of memory cannot be used.
///
/// ```
/// use bindery::FramesError;
///
/// /// For the boot log.
/// fn reason(error: FramesError) -> &'static str {
///     match error {
///         FramesError::Empty => "the firmware reports no memory",
///         FramesError::Overlapping => "two ranges of the memory map overlap",
///         FramesError::TooHigh | FramesError::TooSmall => "the memory map is out of bounds",
///         FramesError::DirectMap => "the direct map is not contiguous",
///     }
/// }
/// assert_eq!(reason(FramesError::Empty), "the firmware reports no memory");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FramesError {
    /// No range is given, or all ranges are empty.
    Empty,
    /// Two ranges share a frame.
    Overlapping,
    /// A range includes the last 32-bit frame number, which means "none", or higher frames.
    TooHigh,
    /// The largest range is too small for the metadata of all frames, or no other frame would
    /// remain.
    TooSmall,
    /// The platform's direct map breaks its promise: a frame's bytes are not aligned to a page, or
    /// not consecutive across two adjacent ranges (a block of frames may span both).
    DirectMap,
}

impl fmt::Display for FramesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "no range of memory holds a frame",
            Self::Overlapping => "two ranges of memory overlap",
            Self::TooHigh => "a range of memory lies beyond 16 TiB",
            Self::TooSmall => "the memory has no room for its own metadata",
            Self::DirectMap => {
                "the direct map of physical memory is not aligned or not consecutive"
            }
        })
    }
}

impl core::error::Error for FramesError {}
