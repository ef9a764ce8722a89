//! System-call numbers.

use bindery::arch::Arch;

/// The table of system-call numbers of a program.
///
/// ```
/// use bindery::arch::{AArch64, X86_64};
/// use bindery_linux::{Call, Numbers};
///
/// assert_eq!(Call::from_number(Numbers::of::<X86_64>(), 9), Some(Call::Mmap));
/// assert_eq!(Call::Mmap.number(Numbers::of::<AArch64>()), 222);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Numbers {
    /// The table of x86-64.
    X86_64,
    /// The generic table: AArch64 and RISC-V.
    Generic,
}

impl Numbers {
    /// The table of an architecture.
    ///
    /// Context: any.
    pub fn of<A: Arch>() -> Self {
        if A::NAME.starts_with("x86") { Self::X86_64 } else { Self::Generic }
    }
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $x86:literal, $generic:literal;)*) => {
        /// The calls about memory.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum Call {
            $($(#[$doc])* $name,)*
        }

        impl Call {
            /// All calls.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The call with this number; `None` if the number is not that of a memory call.
            ///
            /// Context: any.
            pub fn from_number(numbers: Numbers, number: u64) -> Option<Self> {
                // The compiler makes a jump table of this form. Kernels look up every system call.
                match numbers {
                    Numbers::X86_64 => match number {
                        $($x86 => Some(Self::$name),)*
                        _ => None,
                    },
                    Numbers::Generic => match number {
                        $($generic => Some(Self::$name),)*
                        _ => None,
                    },
                }
            }

            /// The call's number.
            ///
            /// Context: any.
            pub fn number(self, numbers: Numbers) -> u64 {
                let (x86, generic) = match self {
                    $(Self::$name => ($x86, $generic),)*
                };
                match numbers {
                    Numbers::X86_64 => x86,
                    Numbers::Generic => generic,
                }
            }

            /// The call's name, as programs write it.
            ///
            /// Context: any.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

calls! {
    /// `mmap(2)`.
    Mmap = "mmap", 9, 222;
    /// `mprotect(2)`.
    Mprotect = "mprotect", 10, 226;
    /// `munmap(2)`.
    Munmap = "munmap", 11, 215;
    /// `brk(2)`.
    Brk = "brk", 12, 214;
    /// `mremap(2)`.
    Mremap = "mremap", 25, 216;
    /// `msync(2)`.
    Msync = "msync", 26, 227;
    /// `mincore(2)`.
    Mincore = "mincore", 27, 232;
    /// `madvise(2)`.
    Madvise = "madvise", 28, 233;
    /// `mlock(2)`.
    Mlock = "mlock", 149, 228;
    /// `munlock(2)`.
    Munlock = "munlock", 150, 229;
    /// `mlockall(2)`.
    Mlockall = "mlockall", 151, 230;
    /// `munlockall(2)`.
    Munlockall = "munlockall", 152, 231;
    /// `mlock2(2)`.
    Mlock2 = "mlock2", 325, 284;
    /// `remap_file_pages(2)`.
    RemapFilePages = "remap_file_pages", 216, 234;
    /// `pkey_mprotect(2)`.
    PkeyMprotect = "pkey_mprotect", 329, 288;
    /// `pkey_alloc(2)`.
    PkeyAlloc = "pkey_alloc", 330, 289;
    /// `pkey_free(2)`.
    PkeyFree = "pkey_free", 331, 290;
    /// `process_madvise(2)`.
    ProcessMadvise = "process_madvise", 440, 440;
    /// `mseal(2)`.
    Mseal = "mseal", 462, 462;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_leads_back_to_its_call() {
        for numbers in [Numbers::X86_64, Numbers::Generic] {
            for call in Call::ALL {
                assert_eq!(Call::from_number(numbers, call.number(numbers)), Some(*call));
            }
            assert_eq!(Call::from_number(numbers, u64::MAX), None);
        }
    }

    #[test]
    fn the_numbers_are_those_of_the_host() {
        use linux_raw_sys::general as host;
        let numbers = if cfg!(target_arch = "x86_64") { Numbers::X86_64 } else { Numbers::Generic };
        let pairs = [
            (Call::Mmap, host::__NR_mmap),
            (Call::Mprotect, host::__NR_mprotect),
            (Call::Munmap, host::__NR_munmap),
            (Call::Brk, host::__NR_brk),
            (Call::Mremap, host::__NR_mremap),
            (Call::Msync, host::__NR_msync),
            (Call::Mincore, host::__NR_mincore),
            (Call::Madvise, host::__NR_madvise),
            (Call::Mlock, host::__NR_mlock),
            (Call::Munlock, host::__NR_munlock),
            (Call::Mlockall, host::__NR_mlockall),
            (Call::Munlockall, host::__NR_munlockall),
            (Call::Mlock2, host::__NR_mlock2),
            (Call::RemapFilePages, host::__NR_remap_file_pages),
            (Call::PkeyMprotect, host::__NR_pkey_mprotect),
            (Call::PkeyAlloc, host::__NR_pkey_alloc),
            (Call::PkeyFree, host::__NR_pkey_free),
            (Call::ProcessMadvise, host::__NR_process_madvise),
            (Call::Mseal, host::__NR_mseal),
        ];
        assert_eq!(pairs.len(), Call::ALL.len());
        for (call, number) in pairs {
            assert_eq!(call.number(numbers), u64::from(number), "{}", call.name());
        }
    }
}
