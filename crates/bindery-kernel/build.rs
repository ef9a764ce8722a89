//! Passes the linker script of the target architecture to the linker.

use std::env;
use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=link");
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let folder = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    // A host build (lints) links nothing.
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("none") {
        let script = folder.join("link").join(format!("{architecture}.ld"));
        println!("cargo:rustc-link-arg=-T{}", script.display());
    }
}
