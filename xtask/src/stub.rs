//! `cargo xtask cuda-stub`: a libcuda to link with where no CUDA is installed.
//!
//! It exports every function that `cust` may call, as the stubs directory of a CUDA toolkit does, and each of them
//! says what those say: CUDA_ERROR_STUB_LIBRARY. A program linked with it takes the driver's library at run time.

use crate::repo;
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds a libcuda for linking where there is none, and prints what CUDA_LIBRARY_PATH must be
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {}

/// CUDA_ERROR_STUB_LIBRARY.
const STUB_LIBRARY: u32 = 34;

/// Runs `cargo xtask cuda-stub`.
pub(crate) fn run(_: &Args) -> Result<()> {
    println!("{}", build()?.display());
    Ok(())
}

/// Builds the stub: the folder for CUDA_LIBRARY_PATH, in whose `lib64` it is.
pub(crate) fn build() -> Result<PathBuf> {
    let folder = repo::target_dir().join("cuda-stub");
    let lib = folder.join("lib64");
    fs::create_dir_all(&lib)?;
    let functions = functions()?;
    let source = source(&functions);
    let (file, library) = (lib.join("cuda.c"), lib.join("libcuda.so.1"));
    if library.exists() && fs::read_to_string(&file).is_ok_and(|old| old == source) {
        return Ok(folder);
    }
    fs::write(&file, source)?;
    let flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"];
    let compilers = ["cc", "gcc", "clang"];
    let mut compile = compilers.iter().map(|cc| Command::new(cc).args(flags).arg(&library).arg(&file).status());
    match compile.find_map(Result::ok) {
        Some(status) => ensure!(status.success(), "the C compiler rejected {}", file.display()),
        None => bail!("no C compiler to build the libcuda stub with: tried {}", compilers.join(", ")),
    }
    // The name that `-lcuda` looks for.
    fs::copy(&library, lib.join("libcuda.so"))?;
    Ok(folder)
}

/// The C source of a library with these functions.
fn source(functions: &BTreeSet<String>) -> String {
    let body = |f: &String| format!("int {f}(void) {{ return {STUB_LIBRARY}; }}\n");
    functions.iter().map(body).collect()
}

/// Every function that the raw bindings declare.
fn functions() -> Result<BTreeSet<String>> {
    let folder = repo::package_folder("cust_raw")?;
    let mut functions = BTreeSet::new();
    for file in fs::read_dir(folder.join("src"))?.flatten().map(|e| e.path()) {
        functions.extend(declared(&fs::read_to_string(&file).with_context(|| file.display().to_string())?));
    }
    ensure!(functions.contains("cuInit"), "{} declares no cuInit", Path::new("cust_raw").display());
    Ok(functions)
}

/// The driver functions that `bindings` declares.
fn declared(bindings: &str) -> BTreeSet<String> {
    let names = bindings.split("pub fn ").skip(1).filter_map(|rest| {
        let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let driver = name.strip_prefix("cu").is_some_and(|r| r.starts_with(|c: char| c.is_ascii_uppercase()));
        driver.then_some(name)
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_functions_are_found() {
        let bindings = "extern \"C\" {\n    #[must_use]\n    pub fn cuInit(Flags: u32) -> CUresult;\n    \
            pub fn cuMemAlloc_v2(\n  p: *mut u64,\n    ) -> CUresult;\n}\npub fn current() {}\nfn cuPrivate() {}\n";
        let functions = declared(bindings);
        assert_eq!(functions.iter().map(String::as_str).collect::<Vec<_>>(), ["cuInit", "cuMemAlloc_v2"]);
        assert!(source(&functions).contains("int cuInit(void) { return 34; }\n"));
    }
}
