//! What the PTX of a family is compiled from, found without compiling it: so that a family whose sources are those that its mark was made of
//! need not be compiled to know that it would be the same ([`crate::mark`]).
//!
//! Too much among the sources costs a compilation, too little would pass over a change. So everything that may be read is taken for read, and each
//! compilation compares the list with what the compiler did read ([`missing`]).

use crate::{mark, repo};
use anyhow::{Context as _, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The roots of the crates that kernels are made of.
const ROOTS: [&str; 2] = ["kernels-gpu/src/lib.rs", "kernels-gpu/cuda_std/src/lib.rs"];

/// What says how they are compiled, and how the text is made of what the compiler emits.
const RECIPE: [&str; 9] = [
    ".cargo/config.toml",
    "kernels-gpu/Cargo.toml",
    "kernels-gpu/cuda_std/Cargo.toml",
    "xtask/device-toolchain.toml",
    "xtask/cuda_builder/src/builder.rs",
    "xtask/cuda_builder/src/pin.rs",
    "xtask/cuda_builder/src/ptx.rs",
    "xtask/cuda_builder/src/rust_src.rs",
    "xtask/cuda_builder/src/toolchain.rs",
];

/// What the workspace's manifest has to do with kernels.
const MANIFEST: [&[&str]; 5] = [
    &["patch"],
    &["profile", "release"],
    &["workspace", "dependencies", "half"],
    &["workspace", "package", "edition"],
    &["workspace", "resolver"],
];

/// The dependencies of device code from a registry; what they need in turn is looked up.
const DEPENDENCIES: [&str; 1] = ["half"];

/// The source files of `family`, from the repository's `root`.
pub(crate) fn files(root: &Path, family: &str, families: &[String]) -> Result<BTreeSet<PathBuf>> {
    let others: Vec<String> =
        families.iter().filter(|f| *f != family).map(|f| format!("#[cfg(feature = \"{f}\")]")).collect();
    let mut found = BTreeSet::new();
    let mut work: Vec<PathBuf> = ROOTS.iter().map(PathBuf::from).collect();
    while let Some(file) = work.pop() {
        let text = fs::read_to_string(root.join(&file)).with_context(|| file.display().to_string())?;
        // Modules of `lib.rs` and `mod.rs` lie beside them, those of `x.rs` in the folder `x`.
        let folder = if file.ends_with("lib.rs") || file.ends_with("mod.rs") {
            file.parent().context("no folder")?.to_path_buf()
        } else {
            file.with_extension("")
        };
        for name in modules(&text, &others) {
            let candidates = [folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")];
            let Some(module) = candidates.into_iter().find(|c| root.join(c).is_file()) else {
                bail!("{}: no file for `mod {name};`", file.display());
            };
            work.push(module);
        }
        found.insert(file);
    }
    Ok(found)
}

/// The modules in files of their own that a file declares, but for those under one of the attributes `left_out`.
fn modules<'a>(text: &'a str, left_out: &[String]) -> Vec<&'a str> {
    let mut names = vec![];
    let mut is_left_out = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[") {
            is_left_out |= left_out.iter().any(|attribute| line == attribute);
            continue;
        }
        let item = line.strip_prefix("pub").map_or(line, |rest| match rest.strip_prefix('(') {
            Some(rest) => rest.split_once(')').map_or("", |(_, item)| item),
            None => rest,
        });
        let name = item.trim_start().strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';'));
        names.extend(name.filter(|_| !is_left_out));
        is_left_out = false;
    }
    names
}

/// A fingerprint of all that makes `family`'s text, whatever the architecture.
pub(crate) fn fingerprint(root: &Path, family: &str, families: &[String]) -> Result<String> {
    let read = |file: &Path| fs::read_to_string(root.join(file)).with_context(|| file.display().to_string());
    let mut parts: Vec<String> = vec![];
    for file in files(root, family, families)? {
        parts.extend([file.display().to_string(), without_comments(&read(&file)?)]);
    }
    for file in RECIPE {
        parts.extend([file.into(), read(Path::new(file))?]);
    }
    let manifest: toml::Table = read(Path::new("Cargo.toml"))?.parse()?;
    for path in MANIFEST {
        let (first, rest) = path.split_first().context("an empty path")?;
        let value = rest.iter().fold(manifest.get(*first), |value, key| value.and_then(|v| v.get(*key)));
        parts.extend([path.join("."), value.map(toml::Value::to_string).unwrap_or_default()]);
    }
    parts.extend(locked(&read(Path::new("Cargo.lock"))?)?);
    Ok(mark::fingerprint(&parts))
}

/// A source without the lines that are comments; those that begin as markers in PTX do ([`cuda_builder::ptx`]) stay, wherever they are.
fn without_comments(source: &str) -> String {
    let is_comment = |line: &&str| {
        let line = line.trim_start();
        line.starts_with("//") && !line.starts_with("//@")
    };
    source.split_inclusive('\n').filter(|line| !is_comment(line)).collect()
}

/// What a lock file says of the packages that [`DEPENDENCIES`] come to.
fn locked(lock: &str) -> Result<BTreeSet<String>> {
    let lock: toml::Table = lock.parse()?;
    let packages = lock.get("package").and_then(toml::Value::as_array).context("no packages in Cargo.lock")?;
    let mut work: Vec<String> = DEPENDENCIES.map(String::from).to_vec();
    let mut found = BTreeSet::new();
    while let Some(name) = work.pop() {
        // Of several versions all are taken.
        for package in packages.iter().filter(|p| p.get("name").and_then(toml::Value::as_str) == Some(&name)) {
            if found.insert(package.to_string()) {
                let needs = package.get("dependencies").and_then(toml::Value::as_array);
                let names = needs.into_iter().flatten().filter_map(|n| n.as_str()?.split(' ').next());
                work.extend(names.map(String::from));
            }
        }
    }
    Ok(found)
}

/// What the compiler read for `family` and [`files`] does not know of.
pub(crate) fn missing(read: &[PathBuf], family: &str, families: &[String]) -> Result<Vec<PathBuf>> {
    let root = repo::root();
    let known = files(&root, family, families)?;
    let root = root.canonicalize()?;
    let read = read.iter().map(|file| file.canonicalize().unwrap_or_else(|_| file.clone()));
    let read = read.map(|file| file.strip_prefix(&root).map(PathBuf::from).unwrap_or(file));
    Ok(read.filter(|file| !known.contains(file)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy of what kernels are made of, in a folder of the test's own.
    fn copy(name: &str) -> PathBuf {
        let (root, copy) = (repo::root(), repo::target_dir().join("tmp").join(name));
        let _ = fs::remove_dir_all(&copy);
        let families = repo::families().unwrap();
        let sources = families.iter().flat_map(|family| files(&root, family, &families).unwrap());
        let others = RECIPE.iter().chain(&["Cargo.toml", "Cargo.lock"]).map(PathBuf::from);
        for file in sources.chain(others) {
            fs::create_dir_all(copy.join(&file).parent().unwrap()).unwrap();
            fs::copy(root.join(&file), copy.join(&file)).unwrap();
        }
        copy
    }

    #[test]
    fn modules_are_found_but_those_of_other_families() {
        let text = "//! mod no;\npub mod a;\nmod b;\npub(crate) mod c;\n#[cfg(feature = \"x\")]\n#[doc(hidden)]\npub mod d;\n\
            mod e {\n}\n#[cfg(feature = \"y\")]\npub mod f;\nmodels;\n";
        assert_eq!(modules(text, &["#[cfg(feature = \"x\")]".into()]), ["a", "b", "c", "f"]);
        assert_eq!(modules(text, &[]), ["a", "b", "c", "d", "f"]);
    }

    #[test]
    fn comments_do_not_count() {
        let source = "//! Doc.\n/// Item.\nfn f() {} // here\n    // Not this.\n    //@trap\nlet url = \"x://y\";";
        assert_eq!(without_comments(source), "fn f() {} // here\n    //@trap\nlet url = \"x://y\";");
    }

    #[test]
    fn a_family_has_its_files_and_the_shared_ones() {
        let families = repo::families().unwrap();
        let found = files(&repo::root(), "norm", &families).unwrap();
        for file in ["norm/rms_norm.rs", "norm/mod.rs", "chunk.rs", "row/mod.rs", "kv_cache/layout.rs"] {
            assert!(found.contains(&Path::new("kernels-gpu/src").join(file)), "{file}");
        }
        for file in ["warp.rs", "float/fast.rs", "ptx.rs"] {
            assert!(found.contains(&Path::new("kernels-gpu/cuda_std/src").join(file)), "{file}");
        }
        for file in ["gemm/mod.rs", "kv_cache/swap.rs", "rope/rotary.rs"] {
            assert!(!found.contains(&Path::new("kernels-gpu/src").join(file)), "{file}");
        }
    }

    #[test]
    fn fingerprints_change_with_what_makes_the_text() {
        let root = copy("fingerprints");
        let families = repo::families().unwrap();
        let of = |family: &str| fingerprint(&root, family, &families).unwrap();
        let (norm, rope) = (of("norm"), of("rope"));
        assert_eq!(norm, fingerprint(&repo::root(), "norm", &families).unwrap());
        // What is changed, by what, and whether that is one of `norm`, of `rope`.
        let cases = [
            ("kernels-gpu/src/norm/rms_norm.rs", "fn ", "fn  ", (true, false)),
            ("kernels-gpu/src/norm/rms_norm.rs", "", "// A comment.\n", (false, false)),
            ("kernels-gpu/src/rope/rotary.rs", "fn ", "fn  ", (false, true)),
            ("kernels-gpu/src/kv_cache/layout.rs", "fn ", "fn  ", (true, true)),
            ("kernels-gpu/cuda_std/src/warp.rs", "fn ", "fn  ", (true, true)),
            ("xtask/cuda_builder/src/builder.rs", "-unroll-threshold=20000", "-unroll-threshold=2000", (true, true)),
            ("Cargo.toml", "half = { version = \"2.7\"", "half = { version = \"2.6\"", (true, true)),
            ("Cargo.toml", "[profile.release]\n", "[profile.release]\noverflow-checks = true\n", (true, true)),
            ("Cargo.toml", "anyhow = \"1\"", "anyhow = \"1.0\"", (false, false)),
            ("Cargo.lock", "name = \"half\"\nversion = \"", "name = \"half\"\nversion = \"1", (true, true)),
            ("Cargo.lock", "name = \"cfg-if\"\nversion = \"", "name = \"cfg-if\"\nversion = \"1", (true, true)),
            ("Cargo.lock", "name = \"anyhow\"\nversion = \"", "name = \"anyhow\"\nversion = \"1", (false, false)),
        ];
        for (file, old, new, expected) in cases {
            let text = fs::read_to_string(root.join(file)).unwrap();
            assert!(text.contains(old), "{file} has no {old}");
            fs::write(root.join(file), text.replacen(old, new, 1)).unwrap();
            assert_eq!((of("norm") != norm, of("rope") != rope), expected, "{file}: {old} to {new}");
            fs::write(root.join(file), text).unwrap();
        }
        fs::remove_file(root.join("kernels-gpu/src/norm/rms_norm.rs")).unwrap();
        assert!(fingerprint(&root, "norm", &families).unwrap_err().to_string().contains("no file for `mod rms_norm;`"));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_the_compiler_read_besides_is_found() {
        let (root, families) = (repo::root(), repo::families().unwrap());
        let read = ["kernels-gpu/src/norm/mod.rs", "kernels-gpu/src/rope/rotary.rs"].map(|file| root.join(file));
        assert_eq!(missing(&read, "norm", &families).unwrap(), [Path::new("kernels-gpu/src/rope/rotary.rs")]);
    }
}
