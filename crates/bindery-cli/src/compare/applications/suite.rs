//! The applications: their sources under `programs/applications`, their work, and the memory that
//! is too small for it.

/// The build of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Build {
    /// A script for BusyBox.
    Script,
    /// A single C file.
    C,
    /// A single C file, with glibc.
    Glibc,
    /// A C file, with a static library from one of Debian's packages.
    Library {
        /// The package.
        package: &'static str,
        /// The library's file, in the directory for libraries of the architecture.
        file: &'static str,
    },
    /// A Go file.
    Go,
    /// A C file and the interpreter's sources, from Debian's source package.
    QuickJs,
    /// The server's sources, from Debian's source package, with a C file that contains the client.
    Redis,
}

/// A program that is run in ample memory, and in too little.
#[derive(PartialEq, Eq, Debug)]
pub struct Application {
    /// The application's name for users, which is also its source's name without the ending.
    pub name: &'static str,
    /// How the application is built.
    pub build: Build,
    /// A file next to the source that the application reads, passed as the first argument.
    pub reads: Option<&'static str>,
    /// The application's further arguments, which set the amount of work.
    pub arguments: &'static [&'static str],
    /// The memory that is too small, in MiB.
    pub memory: u64,
    /// The application's answer on Linux.
    pub answer: &'static str,
}

impl Application {
    /// The application of this name.
    pub fn from_name(name: &str) -> Result<&'static Self, String> {
        APPLICATIONS.iter().find(|application| application.name == name).ok_or_else(|| {
            let names: Vec<&str> = APPLICATIONS.iter().map(|known| known.name).collect();
            format!("the applications are {}", names.join(", "))
        })
    }

    /// The name of the application's source.
    pub fn source(&self) -> String {
        let ending = match self.build {
            Build::Script => "sh",
            Build::Go => "go",
            Build::C | Build::Glibc | Build::Library { .. } | Build::QuickJs | Build::Redis => "c",
        };
        format!("{}.{ending}", self.name)
    }
}

/// All applications, in display order.
pub static APPLICATIONS: [Application; 9] = [
    Application {
        name: "sort",
        build: Build::Script,
        reads: None,
        arguments: &["40000"],
        memory: 32,
        answer: "4938944c815896cc",
    },
    Application {
        name: "restore",
        build: Build::C,
        reads: None,
        arguments: &["12", "3"],
        memory: 44,
        answer: "7151eaf12589a3f0",
    },
    Application {
        name: "sqlite",
        build: Build::Library { package: "libsqlite3-dev", file: "libsqlite3.a" },
        reads: None,
        arguments: &["20000"],
        memory: 32,
        answer: "4022a63253b5ebf0",
    },
    Application {
        name: "lua",
        build: Build::Library { package: "liblua5.4-dev", file: "liblua5.4.a" },
        reads: Some("tables.lua"),
        arguments: &["80000"],
        memory: 40,
        answer: "73dc26267887c592",
    },
    Application {
        name: "quickjs",
        build: Build::QuickJs,
        reads: Some("objects.js"),
        arguments: &["50000"],
        memory: 44,
        answer: "78e909f9d137df2c",
    },
    Application {
        name: "trees",
        build: Build::Go,
        reads: None,
        arguments: &["40000", "3"],
        memory: 42,
        answer: "3b8b8116c3df5b22",
    },
    Application {
        name: "redis",
        build: Build::Redis,
        reads: None,
        arguments: &["40000"],
        memory: 44,
        answer: "ae0de8a22610f99c",
    },
    Application {
        name: "connections",
        build: Build::Library { package: "libsqlite3-dev", file: "libsqlite3.a" },
        reads: None,
        arguments: &["9000", "4"],
        memory: 32,
        answer: "aecd3d8372f9735d",
    },
    Application {
        name: "malloc",
        build: Build::Glibc,
        reads: None,
        arguments: &["150000", "4"],
        memory: 32,
        answer: "3ec0d1bd0797fe3c",
    },
];
