//! Statistics of repeated measurements.

use serde::Serialize;

/// Nanoseconds of repeated measurements. Percentiles are *nearest rank*: each is a measured time,
/// and with ten samples or fewer p10 is the minimum and p90 the last but one or the maximum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Summary {
    /// The number of measurements.
    pub samples: usize,
    /// The minimum.
    pub minimum: u64,
    /// A tenth of the samples are not above this.
    pub p10: u64,
    /// Half of the samples are not above this.
    pub median: u64,
    /// Nine tenths of the samples are not above this.
    pub p90: u64,
    /// The maximum.
    pub maximum: u64,
}

impl Summary {
    /// `None` without measurements.
    pub fn of(samples: &[u64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable();
        let (&minimum, &maximum) = (sorted.first()?, sorted.last()?);
        let percentile = |percent: usize| {
            let rank = (percent * sorted.len()).div_ceil(100);
            sorted[rank.max(1) - 1]
        };
        Some(Self {
            samples: sorted.len(),
            minimum,
            p10: percentile(10),
            median: percentile(50),
            p90: percentile(90),
            maximum,
        })
    }
}

/// `of` divided by `than`; `None` if that is meaningless.
pub fn ratio(of: u64, than: u64) -> Option<f64> {
    (than > 0).then(|| of as f64 / than as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_has_no_summary() {
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn one_sample_is_all_of_its_percentiles() {
        let summary = Summary::of(&[7]).unwrap();
        let Summary { samples, minimum, p10, median, p90, maximum } = summary;
        assert_eq!((samples, [minimum, p10, median, p90, maximum]), (1, [7; 5]));
    }

    #[test]
    fn percentiles_are_samples_whatever_their_order() {
        let samples: Vec<u64> = (1..=100).rev().collect();
        let summary = Summary::of(&samples).unwrap();
        assert_eq!((summary.p10, summary.median, summary.p90), (10, 50, 90));
        let summary = Summary::of(&[4, 1, 3, 2]).unwrap();
        assert_eq!((summary.p10, summary.median, summary.p90), (1, 2, 4));
    }

    #[test]
    fn an_outlier_moves_the_maximum_alone() {
        let mut samples = vec![100; 99];
        samples.push(1_000_000);
        let summary = Summary::of(&samples).unwrap();
        assert_eq!((summary.median, summary.p90, summary.maximum), (100, 100, 1_000_000));
    }

    #[test]
    fn a_ratio_to_nothing_is_none() {
        assert_eq!((ratio(3, 2), ratio(3, 0)), (Some(1.5), None));
    }
}
