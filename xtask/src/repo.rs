//! Where things are in the repository.

use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};

/// The repository's root: of the package that cargo runs, as a target folder may be shared between checkouts.
pub(crate) fn root() -> PathBuf {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&xtask).parent().expect("xtask lies in the root").to_path_buf()
}

/// Where compilers, wheels and sources go that the machine does not have.
pub(crate) fn device_toolchain() -> PathBuf {
    std::env::var_os("WARPLOOM_DEVICE_TOOLCHAIN").map_or_else(|| root().join("target/device-toolchain"), PathBuf::from)
}

/// The committed PTX.
pub(crate) fn ptx_dir() -> PathBuf {
    root().join("host/ptx")
}

/// The kernel families: the features of the kernel crate.
pub(crate) fn families() -> Result<Vec<String>> {
    let manifest = root().join("kernels-gpu/Cargo.toml");
    let text = std::fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
    parse_families(&text)
}

fn parse_families(manifest: &str) -> Result<Vec<String>> {
    let table: toml::Table = manifest.parse()?;
    let features = table.get("features").and_then(|f| f.as_table()).context("the kernel crate has no features")?;
    let mut families: Vec<String> = features.keys().filter(|f| *f != "default").cloned().collect();
    families.sort();
    Ok(families)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_features() {
        let manifest = "[package]\nname = 'k'\n[features]\ndefault = ['norm']\nrope = []\nnorm = []\n";
        assert_eq!(parse_families(manifest).unwrap(), ["norm", "rope"]);
        assert!(parse_families("[package]").is_err());
        assert!(families().unwrap().contains(&"norm".into()));
    }
}
