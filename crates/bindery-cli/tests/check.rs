//! The output of `bindery check`.

use std::collections::HashSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::{env, fs, process};

use serde_json::Value;

const ARCHITECTURES: [&str; 5] = ["x86-64", "x86-64-la57", "aarch64", "riscv64", "riscv64-sv39"];

/// Runs a script from standard input.
fn check(script: &str, arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_bindery"))
        .args(["check", "--script", "-"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = program.stdin.take().expect("standard input is a pipe");
    // The write may fail, since a program that refuses its command line reads nothing.
    let _ = stdin.write_all(script.as_bytes());
    drop(stdin);
    program.wait_with_output().expect("the program ends")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

/// The output of a successful script.
#[track_caller]
fn prints(script: &str, arguments: &[&str]) -> String {
    let output = check(script, arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments:?}:\n{script}\nprints\n{out}\n{err}");
    assert!(err.is_empty(), "{err}");
    out
}

/// The two outputs of a script that ends with this status.
#[track_caller]
fn fails(script: &str, status: i32) -> (String, String) {
    let output = check(script, &[]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "{script}\nprints\n{out}\n{err}");
    (out, err)
}

fn docs(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

/// The blocks of the documentation in this language.
fn blocks(language: &str) -> Vec<String> {
    let page = fs::read_to_string(docs("script.md")).expect("docs/script.md is there");
    let fence = format!("```{language}\n");
    let blocks = page.split(&fence).skip(1);
    blocks.map(|block| block.split("```").next().unwrap_or_default().to_owned()).collect()
}

fn help() -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_bindery"))
        .args(["help", "check"])
        .output()
        .expect("the program starts");
    text(&output.stdout)
}

#[test]
fn every_documented_example_runs_on_every_architecture() {
    let examples = blocks("bindery");
    assert!(examples.len() >= 9);
    for arch in ARCHITECTURES {
        for example in &examples {
            prints(example, &["--arch", arch]);
        }
    }
}

#[test]
fn every_example_script_runs_on_every_architecture() {
    let scripts = fs::read_dir(docs("examples")).expect("docs/examples is there");
    let scripts: Vec<_> = scripts.map(|entry| entry.expect("it can be read").path()).collect();
    assert!(scripts.len() >= 4);
    for script in scripts {
        for arch in ARCHITECTURES {
            let output = Command::new(env!("CARGO_BIN_EXE_bindery"))
                .args(["check", "--arch", arch, "--script"])
                .arg(&script)
                .output()
                .expect("the program starts");
            let (out, err) = (text(&output.stdout), text(&output.stderr));
            assert!(output.status.success(), "{arch}, {}:\n{out}\n{err}", script.display());
        }
    }
}

#[test]
fn the_first_example_prints_what_the_documentation_shows() {
    let shown = blocks("text");
    assert_eq!(prints(&blocks("bindery")[0], &[]), shown[0]);
}

#[test]
fn every_statement_is_in_example_and_help() {
    let examples = blocks("bindery").join("\n");
    let tried: HashSet<&str> = examples
        .lines()
        .flat_map(|line| line.rsplit([':', '=']).next())
        .filter_map(|statement| statement.split_whitespace().next())
        .collect();
    let help = help();
    let (_, statements) = help.split_once("Calls of Linux").expect("there is a list");
    let (statements, _) = statements.split_once("Example").expect("an example follows");
    let listed: Vec<&str> = statements
        .lines()
        .filter_map(|line| line.strip_prefix("  "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(listed.len() >= 39, "{listed:?}");
    for statement in &listed {
        assert!(tried.contains(statement), "{statement} is in no example of docs/script.md");
    }
    assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
}

#[test]
fn every_advice_works_on_every_kind_of_memory() {
    let page = fs::read_to_string(docs("script.md")).expect("docs/script.md is there");
    let (_, advice) = page.split_once("\nAdvice: ").expect("the page lists advice");
    let (advice, _) = advice.split_once(".\n").expect("the list ends");
    let advice: Vec<&str> = advice.split('`').skip(1).step_by(2).collect();
    assert_eq!(advice.len(), 27);
    let mut script = String::from(
        "memfd m\ntruncate m 2M\n\
         let a = mmap 0x40000000 2M rw private,fixed\nlet b = mmap 0x40200000 2M rw shared,fixed m\n\
         let c = mmap 0x40400000 2M rw private,fixed m\n",
    );
    for advice in advice {
        for name in ["a", "b", "c"] {
            script.push_str(&format!("write {name}+64K 1\nmadvise {name} 2M {advice}\n"));
        }
    }
    for arch in ARCHITECTURES {
        for folios in ["8k", "64k", "2m"] {
            let out = prints(&script, &["--arch", arch, "--folios", folios]);
            assert!(out.contains("audit() = nothing wrong"), "{out}");
        }
    }
}

#[test]
fn calls_are_shown_as_strace_shows_them() {
    let out = prints(
        "mmap 0x40000000 1M rw private,fixed\nmunmap 0x40000001 4K\nmmap 0 4K 0x8 0x42\n\
         read 0\nmadvise 0x40000000 1000 77\nbrk -1\n",
        &[],
    );
    let lines: Vec<&str> = out.lines().collect();
    let wanted = [
        "mmap(0x40000000, 1M, rw, private|anonymous|fixed) = 0x40000000",
        "munmap(0x40000001, 4K) = -1 EINVAL (Invalid argument)",
        "mmap(0, 4K, sem, private|0x40) = -1 EBADF (Bad file descriptor)",
        "read(0) = SIGSEGV (SEGV_MAPERR: nothing is mapped at the address)",
        "madvise(0x40000000, 1000, 77) = -1 EINVAL (Invalid argument)",
        "brk(0xffffffffffffffff) = 0x10000000",
        "layout() = 1 mapping",
        "40000000-40100000 rw-p 00000000 00:00 0",
        "audit() = nothing wrong in 1 mapping, 1 table, 0 mapped pages, 0 folios",
    ];
    assert_eq!(lines, wanted);
}

#[test]
fn the_layout_has_names_like_linux() {
    let out = prints(
        "memfd m\ntruncate m 1M\nfile f 64K\nmmap 0x40000000 64K r shared,fixed m 512K\n\
         mmap 0x50000000 4K rx private,fixed f\nmmap 0x60000000 4K rw shared,anonymous,fixed\n",
        &[],
    );
    let rows: Vec<&str> = out.lines().filter(|line| line.contains("00:01")).collect();
    let names = " ".repeat(26);
    let wanted = [
        format!("40000000-40010000 r--s 00080000 00:01 1 {names}       /memfd:m (deleted)"),
        format!("50000000-50001000 r-xp 00000000 00:01 2 {names}       /f"),
        format!("60000000-60001000 rw-s 00000000 00:01 3 {names}       /dev/zero (deleted)"),
    ];
    assert_eq!(rows, wanted);
}

#[test]
fn a_failed_expectation_shows_both_outcomes() {
    let script = "let a = mmap 0x40000000 64K rw private,fixed\n\
                  munmap a+64K 4K expect EINVAL\n\
                  write a 5 expect SIGSEGV\n\
                  read a expect 6\n\
                  read a 4 expect bytes 5 0 1 0\n\
                  read a 4K expect all 0\n\
                  munmap a+1 4K expect ok\n\
                  counts expect entries_written 100, invalidations 0\n\
                  memfd m\n\
                  seals m expect write\n\
                  read a expect 5\n";
    let (out, err) = fails(script, 1);
    for line in [
        "munmap(0x40010000, 4K) = 0\n  line 2: expected EINVAL, got 0\n",
        "write(0x40000000, 5) = ok\n  line 3: expected SIGSEGV, got ok\n",
        "read(0x40000000) = 5\n  line 4: expected 6, got 5\n",
        "  line 5: expected byte 2 to be 0x01, got 0x00\n",
        "  line 6: expected byte 0 to be 0x00, got 0x05\n",
        "  line 7: expected ok, got -1 EINVAL (Invalid argument)\n",
        "  line 8: expected entries_written 100, got ",
        "get_seals(m) = 0\n  line 10: expected write, got 0\n",
        "read(0x40000000) = 5\nlayout()",
    ] {
        assert!(out.contains(line), "{line:?} is missing in\n{out}");
    }
    assert_eq!(err, "error: 8 of 9 expectations were not met: line 2, 3, 4, 5, 6, 7, 8, 10\n");
}

#[test]
fn who_builds_upon_what_failed_is_told_so() {
    let script = "let a = mmap 0 0 rw private\nwrite a 5\nread 0\n";
    let (out, err) = fails(script, 1);
    assert!(!out.contains("read("), "nothing runs behind it: {out}");
    assert!(out.contains("audit() = nothing wrong"), "{out}");
    assert_eq!(
        err,
        "error: `a` has no value: line 1 ended with -1 EINVAL (Invalid argument)\n \
         --> standard input:2:7\n  |\n2 | write a 5\n  |       ^\n"
    );
    let script = "overcommit never 16K\nmmap 0 16K rw private\nfork child expect ENOMEM\n\
                  in child: read 0";
    let (_, err) = fails(script, 1);
    let why = "there is no process `child`: line 3 ended with -1 ENOMEM (Cannot allocate memory)";
    assert!(err.starts_with(&format!("error: {why}\n --> standard input:4:1\n")), "{err}");
}

/// Checks the whole message for a script with one wrong line.
#[track_caller]
fn wrong(script: &str, message: &str) {
    let (out, err) = fails(script, 2);
    assert!(out.is_empty(), "a wrong script does not begin to run: {out}");
    assert_eq!(err, format!("error: {message}\n"), "{script}");
}

#[test]
fn a_wrong_line_is_shown_with_the_expectation() {
    wrong(
        "layout\nmunmap 0x40000000 # all\n",
        "expected a length, but the line ends\n --> standard input:2:18\n  |\n\
         2 | munmap 0x40000000 # all\n  |                  ^\n  = munmap ADDRESS LENGTH",
    );
    wrong(
        "  in main: let a = mmap 0 4K rw private, fixed",
        "expected flags of mmap (such as private,fixed), found `private,`\n \
         --> standard input:1:33\n  |\n\
         1 |   in main: let a = mmap 0 4K rw private, fixed\n  |                                 ^^^^^^^^\n  \
         = mmap ADDRESS LENGTH PROT FLAGS [FILE [OFFSET]]",
    );
    wrong(
        "munmap 0 4K 5",
        "expected the end of the line or `expect`, found `5`\n --> standard input:1:13\n  |\n\
         1 | munmap 0 4K 5\n  |             ^\n  = munmap ADDRESS LENGTH",
    );
}

/// Checks the message, the column and the help for a script whose last line is wrong.
#[track_caller]
fn wrong_at(script: &str, message: &str, column: usize, help: &str) {
    let (_, err) = fails(script, 2);
    let line = script.lines().count();
    let place = format!("error: {message}\n --> standard input:{line}:{column}\n");
    assert!(err.starts_with(&place), "{script}: {err}");
    let said = err.rsplit_once("  = ").map_or("", |(_, help)| help.trim_end());
    assert_eq!(said, help, "{script}");
}

#[test]
fn what_the_grammar_refuses_is_named_in_words() {
    let all = "`bindery help check` lists the statements";
    wrong_at("mmpa 0 4K", "`mmpa` is no statement", 1, "did you mean `mmap`?");
    wrong_at("frobnicate", "`frobnicate` is no statement", 1, all);
    wrong_at("let a = mmpa 0", "`mmpa` is no statement", 9, "did you mean `mmap`?");
    let number = "expected a number or a statement, found `5x`";
    wrong_at("let a = 5x", number, 9, "");
    wrong_at("munmap,0 4K", "`munmap,0` is no statement", 1, "did you mean `munmap`?");
    let behind = "it stands behind one: read a expect 5";
    wrong_at("expect read 0 = 5", "`expect` is no statement", 1, behind);
    wrong_at("let a mmap 0 4K rw private", "expected `=`, found `mmap`", 7, "");
    wrong_at("in main write 0 5", "expected `:`, found `write`", 9, "");
    let read = "read ADDRESS [LENGTH]";
    wrong_at("read", "expected an address, but the line ends", 5, read);
    wrong_at("read 0+", "expected an address, found `0+`", 6, read);
    wrong_at("read 4KB", "expected an address, found `4KB`", 6, read);
    let outcome = "a value, ok, bytes, all, an errno or a signal";
    wrong_at("read 0 expect", &format!("expected {outcome}, but the line ends"), 14, read);
    let name = "expected a new name (small letters, digits and _), found `ABC`";
    wrong_at("memfd ABC", name, 7, "memfd NAME [FLAGS]");
    let protection = "expected a protection (letters of rwx, or none), but the line ends";
    wrong_at("mprotect 0 4K", protection, 14, "mprotect ADDRESS LENGTH PROT");
}

#[test]
fn meaningless_words_are_refused_with_known_ones() {
    let private = "`privat` is no flag of mmap";
    wrong_at("mmap 0 4K rw fixed,privat", private, 20, "did you mean `private`?");
    let letters = "protections are letters of rwx, or none; growsdown, growsup, sem";
    wrong_at("mmap 0 4K rwz private", "`rwz` is no protection", 11, letters);
    wrong_at("madvise 0 4K dontned", "`dontned` is no advice", 14, "did you mean `dontneed`?");
    let one = "there can be only one advice";
    wrong_at("madvise 0 4K cold,free", one, 19, "leave the others out");
    wrong_at("limit memlok 4K", "`memlok` is no limit", 7, "did you mean `memlock`?");
    wrong_at("policy 64K yes", "`yes` is no mode", 12, "there are always, madvise, never");
    let sizes = "their sizes are powers of two from 8K to 2M; pages of 4K are always used where \
                 nothing else fits";
    wrong_at("policy 64K,3K always", "no folios of `3K` can be chosen", 12, sizes);
    let entries = "did you mean `entries_written`?";
    wrong_at("counts expect entries_writen 5", "`entries_writen` is no count", 15, entries);
    let errno = "no errno or signal is called `ENIVAL`";
    wrong_at("munmap 0 4K expect ENIVAL", errno, 20, "did you mean `EINVAL`?");
}

#[test]
fn names_are_checked_before_anything_runs() {
    let number = "`let NAME = …` gives a name to a number or a result";
    wrong_at("read 4K+a", "nothing is called `a` here", 9, number);
    wrong_at("let base = 1\nread bsae", "nothing is called `bsae` here", 6, "did you mean `base`?");
    let fork = "`fork NAME` makes a process";
    wrong_at("in child: layout", "nothing is called `child` here", 4, fork);
    let file = "`memfd NAME` or `file NAME` makes a file";
    wrong_at("truncate m 5", "nothing is called `m` here", 10, file);
    wrong_at("memfd m\nread m", "`m` is a file (line 1), not a number", 6, "");
    wrong_at("memfd m\n\nfile m", "`m` is a file already (line 1)", 6, "choose another name");
    wrong_at("fork main", "`main` is a process already", 6, "choose another name");
    let gone = "`c` is a process that has exited (line 2), not a process";
    wrong_at("fork c\nin c: exit\nin c: read 0", gone, 4, "");
    wrong_at("let ok = 5", "`ok` has a meaning of its own", 5, "choose another name");
    let nothing = "this statement returns nothing that `let` could name";
    wrong_at("let a = write 0 5", nothing, 5, "leave `let` out");
}

#[test]
fn what_can_never_be_met_is_not_expected() {
    let never = "this statement never ends so";
    wrong_at("read 0 expect EINVAL", never, 15, "it ends with ok, a value, a signal");
    wrong_at("munmap 0 4K expect SIGSEGV", never, 20, "it ends with ok, a value, an errno");
    wrong_at("write 0 1 expect 8", never, 18, "it ends with ok, a signal");
    wrong_at("read 0 expect all 0", never, 15, "it ends with ok, a value, a signal");
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    let wide = "`99999999999999999999` does not fit into 64 bits";
    wrong_at("read 99999999999999999999", wide, 6, "");
    // The values of names are known only when the script runs.
    let sum = "the sum does not fit into 64 bits: 0x10000000000000000";
    wrong_at("let a = -1\nread a+1", sum, 6, "");
    wrong_at("let a = 4K\nread a-8K", "the sum is below zero: -0x1000", 6, "");
    wrong_at("fill 0 4K 0x100", "0x100 does not fit into a byte", 11, "");
    wrong_at("read 0 17M", "17M are too many bytes for one read", 8, "read at most 16M at once");
}

#[test]
fn all_wrong_lines_are_shown_once() {
    // The second line would have defined `a`, so its use is not an error.
    let (_, err) = fails("mmpa\nlet a = mmap 0 4K\nread a\nread\n", 2);
    let places: Vec<&str> = err.lines().filter(|line| line.starts_with(" -->")).collect();
    let wanted = [1, 2, 4].map(|line| format!("standard input:{line}:"));
    assert_eq!(places.len(), wanted.len(), "{err}");
    for (place, wanted) in places.iter().zip(&wanted) {
        assert!(place.contains(wanted), "{err}");
    }
    let (_, err) = fails(&"mmpa\n".repeat(23), 2);
    assert!(err.ends_with("error: 3 more lines are wrong\n"), "{err}");
}

#[test]
fn a_command_line_that_is_wrong_is_refused() {
    for (arguments, word) in [
        (["--memory", "1k"], "256k"),
        (["--arch", "vax"], "aarch64"),
        (["--folios", "3k"], "64k"),
        (["--script", "/nowhere/at.all"], "cannot be used multiple times"),
    ] {
        let output = check("layout", &arguments);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains(word), "{arguments:?}: {word:?} is missing in {err}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_bindery"))
        .args(["check", "--script", "/nowhere/at.all"])
        .output()
        .expect("the program starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).starts_with("error: cannot read /nowhere/at.all: "));
}

#[test]
fn out_of_memory_is_an_outcome_like_others() {
    let script = "overcommit always\nlet a = mmap 0x40000000 1M rw private,fixed\n\
                  fill a 1M 1 expect OOM\nmlock a 1M expect EAGAIN\nread a expect 0x0101010101010101\n";
    for arch in ARCHITECTURES {
        let out = prints(script, &["--arch", arch, "--memory", "512k"]);
        assert!(out.contains("= OOM (physical memory ran out)"), "{out}");
    }
}

#[test]
fn an_unwritable_document_is_noticed_before_the_script() {
    let output = check("audit", &["--json", "/nowhere/at/all.json"]);
    assert_eq!(output.status.code(), Some(2));
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("/nowhere/at/all.json") && err.contains("directory"), "{err}");
    assert!(output.stdout.is_empty());
}

#[test]
fn the_document_says_what_was_printed() {
    let path = env::temp_dir().join(format!("bindery-check-{}.json", process::id()));
    let file = path.to_str().expect("the path is UTF-8");
    let script = "let a = mmap 0x40000000 4K rw private,fixed\nwrite a 7 expect ok\nread a 4\n\
                  read 0 expect SIGSEGV\nmunmap 1 1 expect 0\ncounts\n";
    let output = check(script, &["--json", file, "--arch", "riscv64"]);
    assert_eq!(output.status.code(), Some(1));
    let document = fs::read_to_string(&path).expect("the file is written");
    fs::remove_file(&path).expect("the file is there");
    let document: Value = serde_json::from_str(&document).expect("it is JSON");
    let events = document["events"].as_array().expect("there are events");
    assert_eq!(events.len(), 6 + 2, "the layout and the audit follow");
    assert_eq!(events[0]["result"]["value"], 0x4000_0000);
    assert_eq!((&events[1]["met"], &events[1]["result"]["kind"]), (&true.into(), &"done".into()));
    assert_eq!(events[2]["result"]["bytes"], "07000000");
    assert_eq!(events[3]["result"]["code"], "SEGV_MAPERR");
    assert_eq!(
        (&events[4]["met"], &events[4]["result"]["name"]),
        (&false.into(), &"EINVAL".into())
    );
    assert_eq!(events[4]["unmet"], "expected 0, got -1 EINVAL (Invalid argument)");
    assert!(events[5]["result"]["counts"]["entries_written"].as_u64() > Some(0));
    assert_eq!(events[6]["result"]["mappings"][0]["permissions"], "rw-p");
    assert_eq!(events[7]["result"]["violations"], Value::Array(Vec::new()));
    assert_eq!(document["expectations_unmet"][0], 5);
    assert_eq!(
        (&document["architecture"], &document["violations"]),
        (&"riscv64-sv48".into(), &0.into())
    );
}
