//! One row for each operation: its lines of conflict in four settings, and their data.

use std::collections::BTreeMap;

use super::names::Names;
use super::read::{Grace, Pair, Program, Sharing};

/// The settings, in the order of the columns.
pub const SETTINGS: [(Sharing, Grace); 4] = [
    (Sharing::Threads, Grace::Quiet),
    (Sharing::Processes, Grace::Quiet),
    (Sharing::Threads, Grace::Readers),
    (Sharing::Processes, Grace::Readers),
];

/// The figures of one operation.
pub struct Row {
    pub operation: String,
    /// The median of the lines of conflict in each setting; `None` if the operation does not run.
    pub lines: [Option<f64>; 4],
    /// The median of the atomic instructions of one operation, in the first setting in which it
    /// runs.
    pub atomics: f64,
}

/// Data that operations share, and the mean lines of each operation's repetitions.
pub type Data = BTreeMap<String, Vec<(String, f64)>>;

/// The rows in the order in which the program ran the operations, and the data of one setting.
///
/// # Errors
/// If the plugin has missed a repetition, or all accesses of one.
pub fn rows(program: &Program, pairs: &[Pair]) -> Result<Vec<Row>, String> {
    let each = program.warm + program.counted;
    if pairs.len() != program.operations.len() * each {
        return Err(format!(
            "the plugin recorded {} repetitions of {} operations, and not {each} of each",
            pairs.len(),
            program.operations.len()
        ));
    }
    let mut rows: Vec<Row> = Vec::new();
    for ((name, sharing, grace), pairs) in program.operations.iter().zip(pairs.chunks(each)) {
        let pairs = &pairs[program.warm..];
        // Between the marks of an empty operation there are only function calls.
        if pairs.iter().any(|pair| pair.touched.contains(&0)) {
            return Err(format!("no access to memory was recorded between the marks of {name:?}"));
        }
        let column = SETTINGS.iter().position(|setting| *setting == (*sharing, *grace));
        let column = column.ok_or("a setting has no column")?;
        let at = rows.iter().position(|row| row.operation == *name).unwrap_or_else(|| {
            let atomics = median(pairs.iter().flat_map(|pair| pair.atomics).map(|n| n as f64));
            rows.push(Row { operation: name.clone(), lines: [None; 4], atomics });
            rows.len() - 1
        });
        rows[at].lines[column] = Some(median(pairs.iter().map(|pair| pair.lines.len() as f64)));
    }
    // Operations that need two address spaces are not among the first.
    let order =
        |row: &Row| program.operations.iter().rposition(|(name, ..)| *name == row.operation);
    rows.sort_by_key(order);
    Ok(rows)
}

/// The data of all operations in one setting.
pub fn data(
    program: &Program,
    pairs: &[Pair],
    names: &mut Names<'_>,
    setting: (Sharing, Grace),
) -> Data {
    let each = program.warm + program.counted;
    let mut data = Data::new();
    for ((operation, sharing, grace), pairs) in program.operations.iter().zip(pairs.chunks(each)) {
        if (*sharing, *grace) != setting {
            continue;
        }
        let mut sums = BTreeMap::<String, u64>::new();
        for line in pairs[program.warm..].iter().flat_map(|pair| &pair.lines) {
            *sums.entry(names.of_line(line)).or_default() += 1;
        }
        for (name, sum) in sums {
            let mean = sum as f64 / program.counted as f64;
            data.entry(name).or_default().push((operation.clone(), mean));
        }
    }
    data
}

/// The middle value, or the mean of the two in the middle.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        count => f64::midpoint(values[(count - 1) / 2], values[count / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(operations: &[(&str, Sharing)]) -> Program {
        let operations = operations.iter();
        let operations =
            operations.map(|(name, sharing)| ((*name).to_owned(), *sharing, Grace::Quiet));
        Program {
            main: 0,
            regions: Vec::new(),
            warm: 1,
            counted: 2,
            operations: operations.collect(),
        }
    }

    fn pair(lines: usize) -> Pair {
        Pair { touched: [1, 1], atomics: [2, 4], lines: (0..lines).map(|_| Vec::new()).collect() }
    }

    #[test]
    fn repetitions_that_fill_caches_do_not_count() {
        let operations =
            [("a", Sharing::Threads), ("b", Sharing::Threads), ("a", Sharing::Processes)];
        let pairs: Vec<Pair> = [9, 1, 2, 9, 3, 3, 9, 0, 0].map(pair).into();
        let rows = rows(&program(&operations), &pairs).unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].operation, "b", "the last operation of the program is the last row");
        assert_eq!(rows[1].lines, [Some(1.5), Some(0.0), None, None]);
        assert_eq!((rows[1].atomics, rows[0].lines[0]), (3.0, Some(3.0)));
    }

    #[test]
    fn a_run_that_ended_early_is_reported() {
        let program = program(&[("a", Sharing::Threads)]);
        assert!(rows(&program, &[pair(1), pair(1)]).is_err());
        let unseen = Pair { touched: [1, 0], ..pair(0) };
        assert!(rows(&program, &[pair(0), pair(0), unseen]).is_err());
    }
}
