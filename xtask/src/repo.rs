//! Where things are in the repository.

use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root: of the package that cargo runs, as a target folder may be shared between checkouts.
pub(crate) fn root() -> PathBuf {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&xtask).parent().expect("xtask lies in the root").to_path_buf()
}

/// Where compilers, wheels and sources go that the machine does not have.
pub(crate) fn device_toolchain() -> PathBuf {
    std::env::var_os("WARPLOOM_DEVICE_TOOLCHAIN").map_or_else(|| target_dir().join("device-toolchain"), PathBuf::from)
}

/// Where this repository's own cargo builds.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |t| root().join(t))
}

/// The cargo that runs this task, in the root.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// What `cargo metadata` says of this workspace and everything it depends on.
pub(crate) fn metadata() -> Result<serde_json::Value> {
    let out =
        cargo().args(["metadata", "--format-version", "1", "--all-features"]).output().context("cannot run cargo")?;
    ensure!(out.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&out.stderr).trim());
    Ok(serde_json::from_slice(&out.stdout)?)
}

/// The folder of the package `name`, one of ours or a dependency.
pub(crate) fn package_folder(name: &str) -> Result<PathBuf> {
    let metadata = metadata()?;
    let package = metadata["packages"].as_array().into_iter().flatten().find(|p| p["name"] == name);
    let manifest = package.and_then(|p| p["manifest_path"].as_str()).with_context(|| format!("no package {name}"))?;
    Ok(Path::new(manifest).parent().context("a manifest lies in a folder")?.to_path_buf())
}

/// The workspace's version.
pub(crate) fn version() -> Result<String> {
    let manifest: toml::Table = std::fs::read_to_string(root().join("Cargo.toml")).context("Cargo.toml")?.parse()?;
    Ok(manifest["workspace"]["package"]["version"].as_str().context("no version")?.into())
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
