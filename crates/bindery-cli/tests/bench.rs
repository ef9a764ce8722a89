//! The output of `bindery bench`. Counts are checked, times never.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs, process};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bindery"))
        .arg("bench")
        .args(arguments)
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

/// A file that is removed after the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("bindery-test-{}-{name}", process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("the path is UTF-8")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The file may not have been written.
        let _missing = fs::remove_file(&self.0);
    }
}

/// Runs a workload and returns its standard output and its figures.
fn figures(name: &str, arguments: &[&str]) -> (String, Value) {
    let file = Scratch::new(name);
    let output = bench(&[arguments, &["--quick", "--json", file.path()]].concat());
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    let json = fs::read_to_string(Path::new(file.path())).expect("the file is written");
    (out, serde_json::from_str(&json).expect("it is JSON"))
}

fn phase<'a>(result: &'a Value, name: &str) -> &'a Value {
    let phases = result["phases"].as_array().expect("there are phases");
    phases.iter().find(|phase| phase["phase"] == name).unwrap_or_else(|| panic!("no phase {name}"))
}

/// Some counts of one phase, in the requested order.
fn counts<const N: usize>(result: &Value, name: &str, who: &str, of: [&str; N]) -> [u64; N] {
    let counts = &phase(result, name)[who]["counts"];
    of.map(|field| counts[field].as_u64().unwrap_or_else(|| panic!("{name} {who} has no {field}")))
}

fn narrow(out: &str) {
    for line in out.lines() {
        assert!(line.chars().count() <= 120, "more than 120 columns: {line}");
    }
}

const MOVE: [&str; 4] = ["entries_read", "entries_written", "invalidations", "pages_invalidated"];

fn results(document: &Value) -> &[Value] {
    document["results"].as_array().expect("there are results")
}

/// Checks all counts of one table of `remap-1m`.
fn check_loop(result: &Value, what: &str, has_blocks: bool) {
    // With an offset of 4 KiB, the last page needs a table of its own.
    let off = result["variant"].as_str().is_some_and(|variant| variant.contains('+'));
    let moved = [256, 512 + u64::from(off), 1, 256];
    assert_eq!(counts(result, "mremap", "table", MOVE), moved, "{what}");
    // Page by page, each contiguous run is broken, which costs an invalidation.
    let blocks = if has_blocks { result["folio_bytes"].as_u64() == Some(65_536) } else { false };
    let [invalidations] = counts(result, "mremap", "page", ["invalidations"]);
    assert_eq!(invalidations, if blocks { 1 + 16 } else { 1 }, "{what}");
    for who in ["page", "table"] {
        assert_eq!(counts(result, "mmap", who, ["entries_written"]), [0], "{what}");
        let hooks = phase(result, "first touch")["floor"]["tables_installed"].as_u64().unwrap_or(0);
        let touched = counts(result, "first touch", who, ["entries_written", "tables_allocated"]);
        assert_eq!(touched, [256 + hooks, hooks], "{what}, {who}");
        for phase in result["phases"].as_array().expect("there are phases") {
            assert_eq!(phase[who]["counts_steady"], true, "{what}, {who}: {phase}");
        }
    }
    let unmap = counts(result, "munmap", "table", ["entries_written", "invalidations"]);
    assert_eq!(unmap, [1, 1], "{what}");
}

#[test]
fn system_1_counts_the_same_on_every_architecture() {
    let blocks = ["aarch64", "riscv64", "riscv64-sv39"].map(|arch| (arch, true));
    for (arch, has_blocks) in [("x86-64", false), ("x86-64-la57", false)].into_iter().chain(blocks)
    {
        let (out, document) = figures(&format!("loop-{arch}"), &["remap-1m", "--arch", arch]);
        narrow(&out);
        assert_eq!(results(&document).len(), 4, "two folio sizes, two distances");
        for result in results(&document) {
            let what = format!("{arch}, {} in {}", result["variant"], result["folio_bytes"]);
            check_loop(result, &what, has_blocks);
        }
    }
}

#[test]
fn tables_fit_into_120_columns() {
    let (out, document) = figures("columns", &["remap-1m", "--folio", "4k", "--full"]);
    narrow(&out);
    for word in ["page by page", "whole tables", "Linux", "floor", "published", "first touch"] {
        assert!(out.contains(word), "{word} is missing in {out}");
    }
    let kernel = document["host"]["kernel"].as_str().expect("the host has a kernel");
    assert!(out.contains(kernel), "{kernel} is missing in {out}");
    assert_eq!((&document["architecture"], &document["quick"]), (&"x86-64".into(), &true.into()));
}

/// All measured calls of a document.
fn phases(document: &Value) -> Vec<&Value> {
    let phases = results(document).iter().map(|result| result["phases"].as_array());
    phases.flat_map(|phases| phases.expect("there are phases")).collect()
}

#[test]
fn three_sentences_sum_the_figures_up() {
    let (out, document) = figures("sentences", &["remap-1m", "kernel-map"]);
    narrow(&out);
    for absent in ["p10", "descended", "How to read this"] {
        assert!(!out.contains(absent), "{absent} needs --full: {out}");
    }
    let phases = phases(&document);
    let number = |phase: &Value, path: &str| phase.pointer(path).and_then(Value::as_u64);
    let least = |phase: &Value| {
        Some(number(phase, "/floor/entries_written")? + number(phase, "/floor/tables_installed")?)
    };
    let written = |phase: &Value| number(phase, "/table/counts/entries_written");
    let fewest = phases.iter().filter(|phase| written(phase) <= least(phase)).count();
    let all = phases.len();
    assert!(0 < fewest && fewest < all, "both kinds of calls are in it: {fewest} of {all}");
    // 17 entries, although the floor is 16, because the purge also detaches a table.
    let floor = format!(
        "{fewest} of {all} calls write the fewest entries possible, the others at \
                         most 6.2 % more (vfree 16 MiB, huge)."
    );
    let paragraph = out.trim_end().rsplit("\n\n").next().expect("there is text");
    let mut sentences = paragraph.lines();
    assert_eq!(sentences.next(), Some(&*floor), "{out}");
    let pieces = sentences.next().expect("a second sentence");
    assert!(pieces.starts_with("Pieces larger than a page speed ") && pieces.ends_with("x)."));
    let [linux, next] = [sentences.next(), sentences.next()].map(Option::unwrap_or_default);
    assert!(linux.starts_with("Linux "), "{linux}");
    assert!(next.contains("--full") && next.contains("docs/compare.md"), "{next}");
    assert_eq!(sentences.next(), None, "{out}");
}

#[test]
fn a_gigabyte_moves_by_its_fewest_entries() {
    let (out, document) = figures("gigabyte", &["remap-1g", "--folio", "4k,64k"]);
    narrow(&out);
    for result in results(&document) {
        assert_eq!(counts(result, "mremap by 1 GiB", "table", MOVE), [1, 2, 1, 262_144]);
        let moved = counts(result, "mremap by 2 MiB", "table", ["tables_moved", "entries_read"]);
        assert_eq!(moved, [512, 512]);
        for name in ["mremap off by 64 KiB", "mremap off by 4 KiB"] {
            let floor = &phase(result, name)["floor"];
            assert_eq!(
                (floor["entries_written"].as_u64(), floor["invalidations"].as_u64()),
                (Some(524_288), Some(1))
            );
            let [written] = counts(result, name, "table", ["entries_written"]);
            assert!(written < 524_288 + 1_500, "{name}: {written} entries written");
        }
        assert_eq!(counts(result, "munmap", "table", ["entries_written", "invalidations"]), [1, 1]);
    }
}

#[test]
fn pageout_flushes_once_for_each_span_of_locks() {
    let (out, document) = figures("pageout", &["pageout"]);
    narrow(&out);
    assert_eq!(results(&document).len(), 2, "two folio sizes");
    let of = ["entries_written", "invalidations"];
    for result in results(&document) {
        // Each of 16,384 pages has an entry; one span covers two of 32 tables.
        assert_eq!(
            counts(result, "pageout", "table", of),
            [16_384, 16],
            "{}",
            result["folio_bytes"]
        );
        assert_eq!(counts(result, "pageout", "page", of), [16_384, 16_384]);
        assert_eq!(counts(result, "munmap, swapped", "table", of), [1, 1]);
    }
}

#[test]
fn compaction_by_move_copies_nothing() {
    let file = Scratch::new("compaction");
    let output = bench(&["compaction", "--quick", "--json", file.path()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    narrow(&text(&output.stdout));
    let json = fs::read_to_string(Path::new(file.path())).expect("the file is written");
    let document: Value = serde_json::from_str(&json).expect("it is JSON");
    assert_eq!(results(&document).len(), 12);
    for result in results(&document) {
        let whole = |field: &str| result["whole"][field].as_u64().expect("a count");
        let (copied, zeroed) = (whole("bytes_copied"), whole("bytes_zeroed"));
        let heap = 4 << 20;
        match (result["call"].as_str(), result["pages"].as_str()) {
            (Some("MOVE"), Some("recycled")) => assert_eq!((copied, zeroed), (0, 0)),
            (Some("MOVE"), _) => assert_eq!((copied, zeroed), (0, heap)),
            _ => assert_eq!((copied, zeroed), (heap, 0)),
        }
        // One flush for each range that is moved or freed.
        let ranges = heap / result["range_bytes"].as_u64().expect("a size");
        assert!(whole("invalidations") <= 2 * ranges.max(8), "{result}");
    }
}

/// Checks all counts of `kernel-map`, each against its floor.
fn check_kernel_map(result: &Value, what: &str, has_blocks: bool) {
    let work = ["entries_written", "invalidations", "tables_freed"];
    for phase in result["phases"].as_array().expect("there are phases") {
        let name = phase["phase"].as_str().expect("phases have names");
        let what = format!("{what}, {name}");
        let floor = |field: &str| phase["floor"][field].as_u64().expect("the floor is a number");
        let [entries, hooks] = ["entries_written", "tables_installed"].map(floor);
        for who in ["page", "table"] {
            assert_eq!(phase[who]["counts_steady"], true, "{what}, {who}");
        }
        let [written, invalidations, freed] = counts(result, name, "table", work);
        // The purge also removes tables, which takes one entry for the highest of them.
        assert!(
            (entries + hooks..=entries + hooks + freed).contains(&written),
            "{what}: {written}"
        );
        assert!(freed == 0 || written > entries, "{what}: tables are detached one by one");
        let fewest = floor("invalidations");
        if name == "protect, huge" && has_blocks {
            // One invalidation for each table with paused entries; 1 MiB may span two tables.
            assert!((fewest..=2 * fewest).contains(&invalidations), "{what}: {invalidations}");
        } else {
            assert_eq!(invalidations, fewest, "{what}");
            assert_eq!(counts(result, name, "page", ["invalidations"]), [fewest], "{what}");
        }
        assert_eq!(phase["linux"]["nanoseconds"], Value::Null, "{what}");
    }
    // Page by page, each page has its own entry, since there are no huge leaves.
    let name = "vmalloc 16 MiB, huge";
    assert_eq!(phase(result, name)["calls"], 2, "{what}");
    assert_eq!(phase(result, name)["floor"]["entries_written"], 16, "{what}");
    let [written, allocated] =
        counts(result, name, "page", ["entries_written", "tables_allocated"]);
    assert_eq!(written, 8_192 + allocated, "{what}");
}

#[test]
fn kernel_mappings_take_no_more_than_their_floor() {
    let blocks = ["aarch64", "riscv64", "riscv64-sv39"].map(|arch| (arch, true));
    for (arch, has_blocks) in [("x86-64", false), ("x86-64-la57", false)].into_iter().chain(blocks)
    {
        // Folios are user memory, so their size has no effect here.
        let arguments = ["kernel-map", "--full", "--folio", "64k,2m", "--arch", arch];
        let (out, document) = figures(&format!("kernel-{arch}"), &arguments);
        narrow(&out);
        for word in ["none: kernel-internal", "published", "vmap 100 MiB, order 8", "x 32"] {
            assert!(out.contains(word), "{arch}: {word} is missing in {out}");
        }
        let [result] = results(&document) else { panic!("{arch}: not one table") };
        assert_eq!(result["linux_problem"], "none: kernel-internal");
        assert_eq!(phase(result, "vmap 1 MiB, order 8")["ratio_published"], 5.6);
        check_kernel_map(result, arch, has_blocks);
    }
}

#[test]
fn latency_fails_for_calls_beyond_the_bounds() {
    for arch in ["x86-64", "aarch64", "riscv64"] {
        let file = Scratch::new(&format!("latency-{arch}"));
        let arguments = ["latency", "--quick", "--arch", arch, "--json", file.path()];
        let output = bench(&arguments);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        narrow(&out);
        let json = fs::read_to_string(Path::new(file.path())).expect("the file is written");
        let document: Value = serde_json::from_str(&json).expect("it is JSON");
        let bounds = &document["bounds"];
        let measures = ["entries", "tables_marked", "bytes", "reverse_map_entries"];
        let limits = measures.map(|field| bounds[field].as_u64().expect("a number"));
        assert_eq!(limits, [1024, 512, 65_536, 1152]);
        let mut beyond = 0;
        for row in results(&document) {
            let call = row["call"].as_str().expect("a name");
            assert!(out.contains(call), "{arch}: {call} is missing in {out}");
            let longest = measures.map(|field| row["longest"][field].as_u64().expect("a number"));
            let within = longest.iter().zip(limits).all(|(most, limit)| *most <= limit);
            assert_eq!(row["within_bounds"], within, "{arch}: {row}");
            beyond += u64::from(!within);
        }
        assert_eq!(output.status.code(), Some(i32::from(beyond > 0)), "{arch}: {err}");
        for call in ["mmap over it", "mremap, off by 4 KiB", "fork, pinned folios", "truncate"] {
            assert!(out.contains(call), "{arch}: nobody has called {call}");
        }
    }
}

#[test]
fn scale_shows_that_no_call_exceeds_a_logarithm() {
    for arch in ["x86-64", "aarch64"] {
        let file = Scratch::new(&format!("scale-{arch}"));
        let arguments = ["scale", "--quick", "--arch", arch, "--json", file.path()];
        let output = bench(&arguments);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{arch}: {err}{out}");
        narrow(&out);
        let json = fs::read_to_string(Path::new(file.path())).expect("the file is written");
        let document: Value = serde_json::from_str(&json).expect("it is JSON");
        let calls = [
            ("space", &["mmap", "fault", "fork", "munmap"][..]),
            ("object", &["mmap", "fault", "fork", "punch a page", "truncate", "munmap", "sync"]),
        ];
        let mut met = 0;
        for (scene, calls) in calls {
            for call in calls {
                let row = results(&document)
                    .iter()
                    .find(|row| row["scene"] == scene && row["call"] == *call)
                    .unwrap_or_else(|| panic!("{arch}: nobody has called {call} of a {scene}"));
                let samples = row["samples"].as_array().expect("a list");
                let mappings = samples.iter().map(|sample| sample["mappings"].as_u64());
                assert!(mappings.is_sorted() && samples.len() == 3, "{arch}: {row}");
                let steps = |sample: &Value| sample["steps"].as_u64().expect("a number");
                assert!(steps(&samples[2]) > 0, "{arch}: {row}");
                assert_eq!(row["logarithmic"], true, "{arch}: {row}");
                met += 1;
            }
        }
        assert_eq!(met, results(&document).len());
    }
}

/// Checks that the command line is refused, and that the message contains all of `words`.
fn refused(arguments: &[&str], words: &[&str]) {
    let output = bench(arguments);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {err}");
    for word in words {
        assert!(err.contains(word), "{arguments:?}: {word:?} is missing in {err}");
    }
    assert!(output.stdout.is_empty(), "nothing runs before the command line is understood");
}

#[test]
fn a_wrong_command_line_gets_a_correction() {
    refused(&["remap-2m"], &["remap-2m", "remap-1m", "remap-1g", "pageout", "kernel-map"]);
    refused(&["--folio", "3k"], &["3k", "power of two", "64k"]);
    refused(&["--folio", "4m"], &["4m", "2m"]);
    refused(&["--arch", "vax"], &["vax", "aarch64", "riscv64"]);
    refused(&["--arch", "tiny"], &["tiny", "x86-64"]);
    refused(&["latency", "--arch", "vax"], &["vax", "aarch64", "riscv64"]);
}

#[test]
fn an_unwritable_file_is_noticed_before_the_work() {
    for workload in ["remap-1m", "latency", "scale", "compaction"] {
        let output = bench(&[workload, "--quick", "--json", "/nowhere/at/all.json"]);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{workload}: {err}");
        assert!(err.contains("/nowhere/at/all.json") && err.contains("directory"), "{err}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn help_explains_the_workloads_and_the_figures() {
    let output = bench(&["--help"]);
    let out = text(&output.stdout);
    assert!(output.status.success());
    for word in
        ["remap-1m", "remap-1g", "kernel-map", "floor", "MMU", "p10", "median", "--quick", "--full"]
    {
        assert!(out.contains(word), "{word} is missing in {out}");
    }
}
