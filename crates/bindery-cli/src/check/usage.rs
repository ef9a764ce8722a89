//! Every statement in one line, for `bindery help check` and for error messages.

/// The syntax of a statement, and its effect.
pub struct Usage {
    /// The statement's first word.
    pub word: &'static str,
    pub arguments: &'static str,
    pub what: &'static str,
}

const fn usage(word: &'static str, arguments: &'static str, what: &'static str) -> Usage {
    Usage { word, arguments, what }
}

/// Groups of statements, with headings.
pub const GROUPS: &[(&str, &[Usage])] = &[
    (
        "Calls of Linux, with Linux's arguments",
        &[
            usage("mmap", "ADDRESS LENGTH PROT FLAGS [FILE [OFFSET]]", "without FILE: anonymous"),
            usage("munmap", "ADDRESS LENGTH", ""),
            usage("mremap", "ADDRESS LENGTH NEW_LENGTH [FLAGS [NEW_ADDRESS]]", ""),
            usage("mprotect", "ADDRESS LENGTH PROT", ""),
            usage("brk", "ADDRESS", "returns the end of the heap"),
            usage("mseal", "ADDRESS LENGTH [FLAGS]", ""),
            usage("madvise", "ADDRESS LENGTH ADVICE", ""),
            usage("process_madvise", "PROCESS VECTOR COUNT ADVICE [FLAGS]", "VECTOR is an address"),
            usage("mlock", "ADDRESS LENGTH", ""),
            usage("mlock2", "ADDRESS LENGTH FLAGS", ""),
            usage("munlock", "ADDRESS LENGTH", ""),
            usage("mlockall", "FLAGS", ""),
            usage("munlockall", "", ""),
            usage("mincore", "ADDRESS LENGTH VECTOR", "a byte for each page, at VECTOR"),
            usage("msync", "ADDRESS LENGTH FLAGS", ""),
        ],
    ),
    (
        "Shared memory and files",
        &[
            usage("memfd", "NAME [FLAGS]", "memfd_create, with allow_sealing"),
            usage("file", "NAME [LENGTH]", "a file on a disk, full of zeroes"),
            usage("open", "NAME FILE r|w|rw", "opens a file again"),
            usage("close", "FILE", ""),
            usage("truncate", "FILE LENGTH", ""),
            usage("allocate", "FILE OFFSET LENGTH [FLAGS]", "fallocate"),
            usage("punch", "FILE OFFSET LENGTH", "fallocate of a hole"),
            usage("seal", "FILE SEALS", ""),
            usage("seals", "FILE", "returns the seals"),
            usage("pread", "FILE OFFSET [LENGTH]", "8 bytes, or LENGTH"),
            usage("pwrite", "FILE OFFSET VALUE...", "8 bytes for each VALUE"),
        ],
    ),
    (
        "What a program does, through its MMU",
        &[
            usage("read", "ADDRESS [LENGTH]", "8 bytes, or LENGTH"),
            usage("write", "ADDRESS VALUE...", "8 bytes for each VALUE"),
            usage("fetch", "ADDRESS", "an instruction"),
            usage("fill", "ADDRESS LENGTH BYTE", ""),
            usage("fork", "NAME", "creates the child NAME"),
            usage("exit", "", ""),
        ],
    ),
    (
        "Settings",
        &[
            usage("heap", "ADDRESS", "the start of the heap"),
            usage("limit", "memlock|as|data|stack LENGTH|unlimited", ""),
            usage("policy", "SIZE,... always|madvise|never [shared|file]", "folio sizes"),
            usage("overcommit", "heuristic|always|never [LENGTH]", "with the commit limit"),
        ],
    ),
    (
        "Output",
        &[
            usage("layout", "", "as /proc/self/maps; returns their number"),
            usage("counts", "", "work on page tables since the last one"),
            usage("audit", "", "all invariants, and the TLB"),
        ],
    ),
];

/// All statements.
pub fn all() -> impl Iterator<Item = &'static Usage> {
    GROUPS.iter().flat_map(|(_, group)| *group)
}

impl Usage {
    /// `munmap ADDRESS LENGTH`.
    pub fn line(&self) -> String {
        format!("{} {}", self.word, self.arguments).trim_end().to_owned()
    }
}

/// The format of scripts, in short.
pub fn help() -> String {
    let mut help = String::from(
        "Scripts
  One statement a line; # begins a comment. Before a statement, `in PROCESS:` selects the process
  (the first process is main), and `let NAME =` names the result. After it, `expect` gives the
  expected outcome:
    expect VALUE         this number           expect bytes B B ...  these bytes
    expect ok            no failure            expect all B          all bytes are B
    expect EINVAL        this errno            expect SIGSEGV        or SEGV_MAPERR, SIGBUS, OOM
  Numbers are decimal with K, M, G or T, or hexadecimal. Each may be a sum of numbers and names:
  a+2M-4K. Flags are words or numbers, joined by commas or bars: private,fixed.
",
    );
    for (heading, group) in GROUPS {
        help.push_str(&format!("\n{heading}\n"));
        for usage in *group {
            let line = usage.line();
            let text = match usage.what {
                "" => format!("  {line}\n"),
                what => format!("  {line:<51}  {what}\n"),
            };
            help.push_str(&text);
        }
    }
    help.push_str(
        "
Example
  let a = mmap 0x40000000 2M rw private,fixed
  write a 5
  fork child
  in child: write a 6
  read a expect 5
  munmap a+1 4K expect EINVAL

docs/script.md has all details, with an example for every statement",
    );
    help
}
