//! The words of a script for numbers: flags, protections, advice.

use linux_raw_sys::general as raw;

/// A word that is not in its vocabulary.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unknown {
    pub message: String,
    pub help: String,
}

/// The value of the word; `one` is the kind of word expected, as in "an advice".
pub fn choose<T: Copy>(one: &str, table: &[(&str, T)], word: &str) -> Result<T, Unknown> {
    let known = table.iter().find(|(known, _)| *known == word).map(|(_, meaning)| *meaning);
    known.ok_or_else(|| {
        let words: Vec<&str> = table.iter().map(|(known, _)| *known).collect();
        Unknown { message: format!("`{word}` is no {one}"), help: suggest(&words, word) }
    })
}

/// The most similar word, or else all words.
pub fn suggest(words: &[&str], word: &str) -> String {
    match nearest(words, word) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("there are {}", words.join(", ")),
    }
}

/// The most similar word.
pub fn nearest<'w>(words: &[&'w str], word: &str) -> Option<&'w str> {
    let distance = |known: &&str| strsim::damerau_levenshtein(known, word);
    let near = words.iter().copied().min_by_key(distance)?;
    (distance(&near) * 3 <= near.len().max(word.len())).then_some(near)
}

/// The relation of words and numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Each word is one or more bits.
    Bits,
    /// One word is the whole number.
    Choice,
    /// As `Bits`, but letters in any order come first: `rw`.
    Letters,
}

const LETTERS: &str = "protections are letters of rwx, or none; growsdown, growsup, sem";

/// Words for the bits of one argument, or for its values.
#[derive(Debug)]
pub struct Vocabulary {
    /// The kind of its words.
    one: &'static str,
    kind: Kind,
    words: &'static [(&'static str, u64)],
}

impl Vocabulary {
    /// The number of the word, or the sum of the letters of a protection.
    fn word(&self, word: &str) -> Result<u64, Unknown> {
        let letter = |letter: char| match letter {
            'r' => Some(u64::from(raw::PROT_READ)),
            'w' => Some(u64::from(raw::PROT_WRITE)),
            'x' => Some(u64::from(raw::PROT_EXEC)),
            _ => None,
        };
        let letters = || word.chars().try_fold(0, |sum, c| Some(sum | letter(c)?));
        if self.kind == Kind::Letters
            && let Some(bits) = letters()
        {
            return Ok(bits);
        }
        let chosen = choose(self.one, self.words, word);
        chosen.map_err(|unknown| match self.kind {
            Kind::Letters => Unknown { help: LETTERS.to_owned(), ..unknown },
            Kind::Bits | Kind::Choice => unknown,
        })
    }

    /// The number for words joined by commas or bars; `number` reads the parts that are numbers. An
    /// error gives the first and last byte of the wrong part.
    pub fn read<E: From<Unknown>>(
        &self,
        text: &str,
        number: impl Fn(&str) -> Result<u64, E>,
    ) -> Result<u64, (std::ops::Range<usize>, E)> {
        let mut bits = 0;
        let mut start = 0;
        for part in text.split([',', '|']) {
            let end = start + part.len();
            let value = if part.starts_with(|c: char| c.is_ascii_digit()) {
                number(part)
            } else {
                self.word(part).map_err(E::from)
            };
            let value = value.map_err(|error| (start..end, error))?;
            if self.kind == Kind::Choice && start > 0 {
                let message = format!("there can be only one {}", self.one);
                let help = "leave the others out".to_owned();
                return Err((start..end, Unknown { message, help }.into()));
            }
            bits |= value;
            start = end + 1;
        }
        Ok(bits)
    }

    /// The number in words; bits without a word are shown in hexadecimal digits.
    pub fn show(&self, number: u64) -> String {
        let found = self.words.iter().find(|(_, bits)| *bits == number);
        if self.kind == Kind::Choice {
            return found.map_or_else(|| number.to_string(), |(word, _)| (*word).to_owned());
        }
        let (mut shown, mut left) = (Vec::new(), number);
        if self.kind == Kind::Letters {
            let letters = [(raw::PROT_READ, 'r'), (raw::PROT_WRITE, 'w'), (raw::PROT_EXEC, 'x')];
            let set = letters.into_iter().filter(|(bit, _)| number & u64::from(*bit) != 0);
            let letters: String = set.map(|(_, letter)| letter).collect();
            shown.extend((!letters.is_empty()).then_some(letters));
            left &= !u64::from(raw::PROT_READ | raw::PROT_WRITE | raw::PROT_EXEC);
        }
        for (word, bits) in self.words.iter().filter(|(_, bits)| *bits != 0) {
            if left & bits == *bits {
                shown.push((*word).to_owned());
                left &= !bits;
            }
        }
        if left != 0 {
            shown.push(format!("{left:#x}"));
        }
        match (shown.is_empty(), found) {
            (true, Some((zero, _))) => (*zero).to_owned(),
            (true, None) => "0".to_owned(),
            (false, _) => shown.join("|"),
        }
    }
}

/// A vocabulary of constants of Linux, which have 32 bits.
macro_rules! vocabulary {
    ($(#[$doc:meta])* $name:ident: $kind:ident, $one:literal { $($word:literal = $value:ident,)* }) => {
        $(#[$doc])*
        pub static $name: Vocabulary = Vocabulary {
            one: $one,
            kind: Kind::$kind,
            words: &[$(($word, raw::$value as u64),)*],
        };
    };
}

vocabulary! {
    /// `prot` of `mmap` and `mprotect`.
    PROTECTION: Letters, "protection" {
        "none" = PROT_NONE,
        "growsdown" = PROT_GROWSDOWN,
        "growsup" = PROT_GROWSUP,
        "sem" = PROT_SEM,
    }
}

vocabulary! {
    /// `flags` of `mmap`. Flags of two bits come before those of one.
    MAP: Bits, "flag of mmap" {
        "shared_validate" = MAP_SHARED_VALIDATE,
        "shared" = MAP_SHARED,
        "private" = MAP_PRIVATE,
        "droppable" = MAP_DROPPABLE,
        "anonymous" = MAP_ANONYMOUS,
        "fixed" = MAP_FIXED,
        "fixed_noreplace" = MAP_FIXED_NOREPLACE,
        "populate" = MAP_POPULATE,
        "nonblock" = MAP_NONBLOCK,
        "locked" = MAP_LOCKED,
        "noreserve" = MAP_NORESERVE,
        "growsdown" = MAP_GROWSDOWN,
        "stack" = MAP_STACK,
        "hugetlb" = MAP_HUGETLB,
    }
}

vocabulary! {
    /// `flags` of `mremap`.
    REMAP: Bits, "flag of mremap" {
        "maymove" = MREMAP_MAYMOVE,
        "fixed" = MREMAP_FIXED,
        "dontunmap" = MREMAP_DONTUNMAP,
    }
}

vocabulary! {
    /// `advice` of `madvise` and `process_madvise`.
    ADVICE: Choice, "advice" {
        "normal" = MADV_NORMAL,
        "random" = MADV_RANDOM,
        "sequential" = MADV_SEQUENTIAL,
        "willneed" = MADV_WILLNEED,
        "dontneed" = MADV_DONTNEED,
        "dontneed_locked" = MADV_DONTNEED_LOCKED,
        "free" = MADV_FREE,
        "cold" = MADV_COLD,
        "pageout" = MADV_PAGEOUT,
        "remove" = MADV_REMOVE,
        "dontfork" = MADV_DONTFORK,
        "dofork" = MADV_DOFORK,
        "wipeonfork" = MADV_WIPEONFORK,
        "keeponfork" = MADV_KEEPONFORK,
        "dontdump" = MADV_DONTDUMP,
        "dodump" = MADV_DODUMP,
        "hugepage" = MADV_HUGEPAGE,
        "nohugepage" = MADV_NOHUGEPAGE,
        "collapse" = MADV_COLLAPSE,
        "populate_read" = MADV_POPULATE_READ,
        "populate_write" = MADV_POPULATE_WRITE,
        "guard_install" = MADV_GUARD_INSTALL,
        "guard_remove" = MADV_GUARD_REMOVE,
        "mergeable" = MADV_MERGEABLE,
        "unmergeable" = MADV_UNMERGEABLE,
        "hwpoison" = MADV_HWPOISON,
        "soft_offline" = MADV_SOFT_OFFLINE,
    }
}

vocabulary! {
    /// `flags` of `mlock2`.
    LOCK: Bits, "flag of mlock2" {
        "onfault" = MLOCK_ONFAULT,
    }
}

vocabulary! {
    /// `flags` of `mlockall`.
    LOCK_ALL: Bits, "flag of mlockall" {
        "current" = MCL_CURRENT,
        "future" = MCL_FUTURE,
        "onfault" = MCL_ONFAULT,
    }
}

vocabulary! {
    /// `flags` of `msync`.
    SYNC: Bits, "flag of msync" {
        "async" = MS_ASYNC,
        "invalidate" = MS_INVALIDATE,
        "sync" = MS_SYNC,
    }
}

vocabulary! {
    /// `flags` of `memfd_create`.
    MEMFD: Bits, "flag of memfd" {
        "allow_sealing" = MFD_ALLOW_SEALING,
        "cloexec" = MFD_CLOEXEC,
        "noexec_seal" = MFD_NOEXEC_SEAL,
        "exec" = MFD_EXEC,
        "hugetlb" = MFD_HUGETLB,
    }
}

vocabulary! {
    /// `mode` of `fallocate`.
    ALLOCATE: Bits, "flag of allocate" {
        "keep_size" = FALLOC_FL_KEEP_SIZE,
        "punch_hole" = FALLOC_FL_PUNCH_HOLE,
        "collapse_range" = FALLOC_FL_COLLAPSE_RANGE,
        "zero_range" = FALLOC_FL_ZERO_RANGE,
        "insert_range" = FALLOC_FL_INSERT_RANGE,
        "unshare_range" = FALLOC_FL_UNSHARE_RANGE,
    }
}

vocabulary! {
    /// Seals of `fcntl` with `F_ADD_SEALS`.
    SEALS: Bits, "seal" {
        "seal" = F_SEAL_SEAL,
        "shrink" = F_SEAL_SHRINK,
        "grow" = F_SEAL_GROW,
        "write" = F_SEAL_WRITE,
        "future_write" = F_SEAL_FUTURE_WRITE,
        "exec" = F_SEAL_EXEC,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vocabulary: &Vocabulary, text: &str) -> Result<u64, (std::ops::Range<usize>, Unknown)> {
        vocabulary.read(text, |digits| {
            digits.parse().map_err(|_| Unknown { message: String::new(), help: String::new() })
        })
    }

    #[test]
    fn every_word_is_shown_as_it_is_read() {
        let all = [
            &PROTECTION,
            &MAP,
            &REMAP,
            &ADVICE,
            &LOCK,
            &LOCK_ALL,
            &SYNC,
            &MEMFD,
            &ALLOCATE,
            &SEALS,
        ];
        for vocabulary in all {
            for (word, bits) in vocabulary.words {
                assert_eq!(read(vocabulary, word), Ok(*bits));
                assert_eq!(vocabulary.show(*bits), *word);
            }
        }
    }

    #[test]
    fn flags_are_words_or_numbers_joined_by_commas() {
        assert_eq!(read(&MAP, "private,fixed|64"), Ok(2 | 0x10 | 64));
        assert_eq!(MAP.show(2 | 0x10 | 64), "private|fixed|0x40");
        assert_eq!(MAP.show(0), "0");
    }

    #[test]
    fn protections_are_letters() {
        assert_eq!((read(&PROTECTION, "rw"), read(&PROTECTION, "xr")), (Ok(3), Ok(5)));
        assert_eq!(PROTECTION.show(0x0100_0003), "rw|growsdown");
        assert_eq!(PROTECTION.show(0), "none");
    }

    #[test]
    fn an_unknown_word_gets_a_suggestion() {
        let (at, unknown) = read(&MAP, "shared,privat").unwrap_err();
        assert_eq!((at, &*unknown.message), (7..13, "`privat` is no flag of mmap"));
        assert_eq!(unknown.help, "did you mean `private`?");
        let (_, unknown) = read(&REMAP, "sideways").unwrap_err();
        assert_eq!(unknown.help, "there are maymove, fixed, dontunmap");
        assert!(read(&ADVICE, "cold,free").is_err());
    }
}
