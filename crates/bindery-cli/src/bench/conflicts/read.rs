//! The outputs of the program and of the plugin.

use std::fmt;
use std::str::SplitWhitespace;

/// The process that the second operation of a pair belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Sharing {
    /// The two operations are in one address space.
    Threads,
    /// Each operation is in its own address space.
    Processes,
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Threads => "threads",
            Self::Processes => "processes",
        })
    }
}

/// When grace periods are over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Grace {
    /// At once.
    Quiet,
    /// A grace period ends after the next step of the other CPU, which counts as a reader until
    /// then.
    Readers,
}

/// A piece of the program's memory.
#[derive(Debug)]
pub struct Region {
    pub name: String,
    pub start: u64,
    pub end: u64,
}

/// The program's output.
#[derive(Debug)]
pub struct Program {
    /// The address of the program's function `main`.
    pub main: u64,
    pub regions: Vec<Region>,
    /// The number of warm-up repetitions of each operation, whose figures are discarded, and of
    /// measured repetitions.
    pub warm: usize,
    pub counted: usize,
    /// The operations in the order in which they ran.
    pub operations: Vec<(String, Sharing, Grace)>,
}

/// A word of 8 bytes in a line of conflict: for each operation, the addresses of instructions that
/// accessed it, 0 for none.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    pub address: u64,
    /// The first instruction of each operation that read the word, and the first that wrote it.
    pub sides: [Accesses; 2],
}

/// The accesses of one operation to a word.
#[derive(Clone, Copy, Debug)]
pub struct Accesses {
    pub read: u64,
    pub written: u64,
}

/// One repetition of a pair.
#[derive(Default, Debug)]
pub struct Pair {
    /// The lines that each operation touched.
    pub touched: [u64; 2],
    /// Atomic instructions of each operation.
    pub atomics: [u64; 2],
    /// Lines of conflict, each with its touched words.
    pub lines: Vec<Vec<Word>>,
}

/// The bytes of a cache line.
const LINE: u64 = 64;

impl Program {
    /// Reads the standard output of the program.
    ///
    /// # Errors
    /// The first line that is not understood.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut program =
            Self { main: 0, regions: Vec::new(), warm: 0, counted: 0, operations: Vec::new() };
        for line in text.lines() {
            program
                .line(line)
                .ok_or_else(|| format!("cannot read the output of bindery-conflicts: {line:?}"))?;
        }
        Ok(program)
    }

    fn line(&mut self, line: &str) -> Option<()> {
        let mut words = line.split_whitespace();
        match words.next()? {
            "repetitions" => {
                self.warm = words.next()?.parse().ok()?;
                self.counted = words.next()?.parse().ok()?;
            }
            "main" => self.main = hexadecimal(&mut words)?,
            "region" => {
                let name = words.next()?.to_owned();
                let (start, end) = (hexadecimal(&mut words)?, hexadecimal(&mut words)?);
                self.regions.push(Region { name, start, end });
            }
            "operation" => {
                let sharing = match words.next()? {
                    "threads" => Sharing::Threads,
                    "processes" => Sharing::Processes,
                    _ => return None,
                };
                let grace = match words.next()? {
                    "quiet" => Grace::Quiet,
                    "readers" => Grace::Readers,
                    _ => return None,
                };
                let name = words.collect::<Vec<_>>().join(" ");
                self.operations.push((name, sharing, grace));
            }
            _ => return None,
        }
        Some(())
    }

    /// The region of an address.
    pub fn region(&self, address: u64) -> Option<&Region> {
        self.regions.iter().find(|region| (region.start..region.end).contains(&address))
    }
}

/// Reads the output of the plugin.
///
/// # Errors
/// The first line that is not understood.
pub fn pairs(text: &str) -> Result<Vec<Pair>, String> {
    let mut pairs = Vec::new();
    for line in text.lines() {
        add_line(&mut pairs, line)
            .ok_or_else(|| format!("cannot read the output of the plugin: {line:?}"))?;
    }
    Ok(pairs)
}

fn add_line(pairs: &mut Vec<Pair>, line: &str) -> Option<()> {
    let mut words = line.split_whitespace();
    match words.next()? {
        "pair" => {
            let mut count = || words.next()?.parse().ok();
            let touched = [count()?, count()?];
            let atomics = [count()?, count()?];
            pairs.push(Pair { touched, atomics, lines: Vec::new() });
        }
        "word" => {
            let address = hexadecimal(&mut words)?;
            let mut side = || {
                let read = hexadecimal(&mut words)?;
                Some(Accesses { read, written: hexadecimal(&mut words)? })
            };
            let word = Word { address, sides: [side()?, side()?] };
            let lines = &mut pairs.last_mut()?.lines;
            match lines.last_mut() {
                Some(line) if line[0].address / LINE == address / LINE => line.push(word),
                _ => lines.push(vec![word]),
            }
        }
        _ => return None,
    }
    Some(())
}

fn hexadecimal(words: &mut SplitWhitespace<'_>) -> Option<u64> {
    u64::from_str_radix(words.next()?, 16).ok()
}

impl Word {
    /// Whether both operations touch the word and one of them writes it. If no word of a line
    /// satisfies this, only the layout makes the line a line of conflict.
    pub fn conflicts(&self) -> bool {
        let [first, second] = self.sides;
        let touched = |side: Accesses| side.read != 0 || side.written != 0;
        (first.written != 0 && touched(second)) || (second.written != 0 && touched(first))
    }

    /// An instruction that accessed the word, preferably one that wrote it.
    pub fn instruction(&self) -> u64 {
        let [first, second] = self.sides;
        [first.written, second.written, first.read, second.read]
            .into_iter()
            .find(|address| *address != 0)
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_one_line_come_together() {
        let text =
            "pair 9 8 3 4\nword 1000 0 4 5 0\nword 1038 0 6 0 0\nword 1040 1 0 0 2\npair 1 1 0 0\n";
        let pairs = pairs(text).unwrap();
        assert_eq!(pairs.len(), 2);
        assert_eq!((pairs[0].touched, pairs[0].atomics), ([9, 8], [3, 4]));
        assert_eq!(pairs[0].lines.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
        assert!(pairs[1].lines.is_empty());
        let [first, second] = pairs[0].lines[0][..] else { panic!("two words") };
        assert!(first.conflicts() && !second.conflicts(), "only one side touches the second");
        assert_eq!((first.instruction(), second.instruction()), (4, 6));
        assert_eq!(pairs[0].lines[1][0].instruction(), 2, "the write counts first");
    }

    #[test]
    fn a_line_that_is_not_understood_is_reported() {
        assert!(pairs("word 1 2 3 4 5").unwrap_err().contains("word 1 2"), "a word before a pair");
        assert!(pairs("pair 1 2 3").is_err());
        assert!(Program::read("operation both quiet x").is_err());
        assert!(Program::read("main xyz").unwrap_err().contains("main xyz"));
    }

    #[test]
    fn the_program_tells_what_it_ran() {
        let text = "repetitions 10 50\nmain 40a0\nregion Memory 1000 2000\n\
                    operation threads readers mmap, fixed\n";
        let program = Program::read(text).unwrap();
        assert_eq!((program.warm, program.counted, program.main), (10, 50, 0x40a0));
        assert_eq!(
            program.operations,
            [("mmap, fixed".to_owned(), Sharing::Threads, Grace::Readers)]
        );
        assert_eq!(program.region(0x1fff).unwrap().name, "Memory");
        assert!(program.region(0x2000).is_none());
    }
}
