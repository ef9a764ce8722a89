//! The tables: rates and their ratios, and the model.

use super::model::{HostSpeed, Limit, Operation};
use super::read::{Figures, Sharing};
use super::rows::{MODELLED, Modelled};
use crate::bench::report::table;
use crate::output::thousands;

/// The CPUs that the model predicts.
const PREDICTED: [u32; 2] = [64, 384];
/// The difference between model and measurement above which a row is marked.
const CLOSE: f64 = 0.25;

pub const LEGEND: &str = "
Rates are operations a second of one CPU; \"speedup\" is the rate of all CPUs divided by it, \"control\"
that of CPUs with a memory each, \"part\" the first as a part of the second, \"T\" the part that is
wanted. Medians of samples in which no thread was preempted; the others are left out and counted.

Model: ns alone, lines that two CPUs exchange (docs/figures/conflicts.txt), the longest hold of a
common lock, and the control; \"!\": more than 25 % off. More CPUs are taken to slow each other down by
these only: the model knows neither sockets nor memory channels. The limit is the first part that would
be busy all the time, and from how many CPUs on.
";

/// Rates on `cpus` CPUs next to the rates on one.
pub fn rates(cpus: u16, core: &Figures, linux: Option<&Figures>) -> String {
    let speedup = format!("speedup of {cpus}");
    let header = [
        "operation",
        "CPUs share",
        "core: rate",
        &speedup,
        "control",
        "part",
        "T",
        "left out",
        "Linux: rate",
        "speedup",
    ];
    let mut table = table(&header, 2);
    let rows = core.rates.iter().filter(|rate| rate.cpus == cpus);
    for rate in rows.filter(|rate| rate.sharing != Sharing::Memories) {
        let (operation, sharing) = (&*rate.operation, rate.sharing);
        let ratio = core.ratio(operation, sharing, cpus);
        let control = core.ratio(operation, Sharing::Memories, cpus);
        let part = ratio.zip(control).map(|(ratio, control)| ratio / control);
        let of_linux = |rate: &dyn Fn(&Figures) -> Option<f64>| linux.and_then(rate);
        let linux_rate = of_linux(&|linux| linux.rate(operation, sharing, 1));
        let linux_ratio = of_linux(&|linux| linux.ratio(operation, sharing, cpus));
        table.add_row([
            operation.to_owned(),
            sharing.name().to_owned(),
            per_second(core.rate(operation, sharing, 1)),
            figure(ratio),
            figure(control),
            figure(part),
            figure(Modelled::target(operation, sharing)),
            format!("{} of {}", rate.left_out, rate.left_out + rate.used),
            per_second(linux_rate),
            figure(linux_ratio),
        ]);
    }
    format!("{}\n", table.trim_fmt())
}

/// The model compared with the measurement on two CPUs, and its prediction for more. `lines_of`
/// returns the lines of a row of conflicts.
pub fn model(core: &Figures, lines_of: impl Fn(&str) -> Option<[Option<f64>; 2]>) -> String {
    let Some(line) = core.line else {
        return "No model: it needs the cost of a line between two CPUs\n".to_owned();
    };
    let [first, last] = PREDICTED.map(|cpus| format!("{cpus} CPUs"));
    let header = [
        "model",
        "CPUs share",
        "ns alone",
        "lines",
        "hold",
        "speedup of 2",
        "measured",
        "",
        &first,
        &last,
        "first limit",
    ];
    let mut table = table(&header, 2);
    for modelled in MODELLED {
        for sharing in [Sharing::Threads, Sharing::Processes] {
            let name = modelled.operation;
            let lines = modelled.lines(sharing, &lines_of);
            let alone = core.rate(name, sharing, 1).map(|rate| 1e9 / rate);
            let Some((lines, alone)) = lines.zip(alone) else { continue };
            let longest = core.longest_hold(name, sharing);
            let hold = longest.map_or(0.0, |hold| hold.nanoseconds);
            let operation = Operation { alone, lines, line, hold };
            let control = core.ratio(name, Sharing::Memories, 2);
            let host = HostSpeed(control.map_or(1.0, |control| control / 2.0));
            let (predicted, measured) = (operation.speedup(2, host), core.ratio(name, sharing, 2));
            let far = measured.is_some_and(|measured| (predicted / measured - 1.0).abs() > CLOSE);
            let place = longest.map_or("", |hold| &*hold.place);
            let speedups =
                PREDICTED.map(|cpus| format!("{:.1}", operation.speedup(cpus, HostSpeed::FULL)));
            let [first, last] = speedups;
            table.add_row([
                name.to_owned(),
                sharing.name().to_owned(),
                format!("{alone:.0}"),
                format!("{lines:.1}"),
                format!("{hold:.0}"),
                format!("{predicted:.2}"),
                figure(measured),
                if far { "!" } else { "" }.to_owned(),
                first,
                last,
                limit(operation.limit(), place),
            ]);
        }
    }
    format!("A line that two CPUs exchange costs {line:.0} ns\n\n{}\n", table.trim_fmt())
}

fn limit(limit: Limit, place: &str) -> String {
    match limit {
        Limit::None => "none counted".to_owned(),
        Limit::Lock(cpus) => format!("a lock of {place}: {cpus:.1}"),
        Limit::Line(cpus) => format!("a line: {cpus:.0}"),
    }
}

fn per_second(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| thousands(rate as u64))
}

fn figure(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "line\t20\n\
        hold\tmprotect\tthreads\tthe address space\t500\n\
        rate\tmprotect\tthreads\t1\t1000000\t80\t0\n\
        rate\tmprotect\tthreads\t2\t800000\t60\t20\n\
        rate\tmprotect\tmemories\t1\t1000000\t80\t0\n\
        rate\tmprotect\tmemories\t2\t1600000\t80\t0\n";

    fn row<'t>(text: &'t str, name: &str) -> Vec<&'t str> {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn a_speedup_is_a_part_of_the_control() {
        let core = Figures::read(TEXT).unwrap();
        let cells = ["mprotect", "threads", "1,000,000", "0.80", "1.60", "0.50", "0.45"];
        let text = rates(2, &core, None);
        assert_eq!(row(&text, "mprotect")[..7], cells);
        assert_eq!(row(&text, "mprotect")[7..], ["20 of 80", "-", "-"]);
        let with_linux = rates(2, &core, Some(&core));
        assert_eq!(row(&with_linux, "mprotect")[8..], ["1,000,000", "0.80"]);
    }

    #[test]
    fn the_model_stands_beside_the_measurement() {
        let core = Figures::read(TEXT).unwrap();
        let text = model(&core, |_| Some([Some(3.0), Some(0.0)]));
        // 500 ns outside and 500 ns inside the lock, each 625 ns on a host whose two CPUs work like
        // 1.6; then 60 ns for the lines.
        let cells = row(&text, "mprotect");
        assert_eq!(cells[..5], ["mprotect", "threads", "1000", "3.0", "500"]);
        assert_eq!(cells[6..8], ["0.80", "!"], "the model says {}", cells[5]);
        assert!(cells.last().unwrap().starts_with("a lock of the address space: 1.9"), "{cells:?}");
    }

    #[test]
    fn no_model_without_the_cost_of_lines() {
        let text = model(&Figures::default(), |_| None);
        assert!(text.starts_with("No model"));
    }
}
