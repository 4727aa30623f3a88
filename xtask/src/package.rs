//! `cargo xtask check --only package`: what would be published, packed, unpacked, and compiled as a user's cargo would find it.

use crate::repo;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The registry takes no larger ones.
const MOST_BYTES: u64 = 10_000_000;

/// Packs every package that is published, and checks what is in them against one another.
///
/// `cargo package` would compile each by itself, and the kernels with it: minutes that tell nothing that `cargo check` of the packed
/// files does not, since the tests have compiled the same code. With the examples, which are packed, and with which dependencies have the features that
/// they have in other steps.
pub(crate) fn check() -> Result<()> {
    let names = published()?;
    let packed = repo::target_dir().join("package");
    let mut package = repo::cargo();
    package.args(["package", "--quiet", "--allow-dirty", "--no-verify", "--target-dir"]).arg(repo::target_dir());
    for name in &names {
        package.args(["-p", name]);
    }
    run(package)?;

    let folder = packed.join("unpacked");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(&folder)?;
    let version = repo::version()?;
    for name in &names {
        let file = packed.join(format!("{name}-{version}.crate"));
        let bytes = fs::metadata(&file).with_context(|| file.display().to_string())?.len();
        println!("{name} {:.2} MB", bytes as f64 / 1e6);
        ensure!(bytes < MOST_BYTES, "{name} is too large to publish");
        let mut unpack = Command::new("tar");
        // As of now: with the date that all packages bear, cargo would take a changed file for the one that it has compiled.
        unpack.arg("-xmzf").arg(&file).arg("-C").arg(&folder);
        run(unpack)?;
        let lacks = lacks(&folder.join(format!("{name}-{version}")))?;
        ensure!(lacks.is_empty(), "{name} lacks {}", lacks.join(", "));
    }
    fs::write(folder.join("Cargo.toml"), workspace(&names, &version)?)?;
    fs::copy(repo::root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    let mut check = repo::cargo();
    check.current_dir(&folder).args(["check", "--quiet", "--workspace", "--lib", "--examples", "--target-dir"]);
    check.arg(repo::target_dir());
    run(check)
}

/// What a package in `folder` has not of what a registry shows and a licence demands: both licences, whole; a readme of its own, without links
/// to files, which lead nowhere there; a description and words to find it by.
fn lacks(folder: &Path) -> Result<Vec<String>> {
    let mut lacks = vec![];
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        let ours = fs::read_to_string(repo::root().join(name)).context(name)?;
        if fs::read_to_string(folder.join(name)).ok().as_ref() != Some(&ours) {
            lacks.push(format!("the text of {name}"));
        }
    }
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).with_context(|| folder.display().to_string())?;
    let manifest: toml::Table = manifest.parse()?;
    let package = manifest["package"].as_table().context("no package")?;
    for key in ["description", "license", "keywords", "categories", "readme"] {
        if !package.contains_key(key) {
            lacks.push(format!("`{key}` in its manifest"));
        }
    }
    match fs::read_to_string(folder.join("README.md")) {
        Ok(readme) => {
            let dead = crate::guide::links(&readme);
            lacks.extend(dead.iter().map(|link| format!("{link}, which its readme links to, on a registry")));
        }
        Err(_) => lacks.push("a readme".into()),
    }
    Ok(lacks)
}

/// A workspace of the unpacked packages, which find each other here and not in the registry. Its profiles are ours, so that what they
/// depend on is not compiled again.
fn workspace(names: &[String], version: &str) -> Result<String> {
    let manifest = fs::read_to_string(repo::root().join("Cargo.toml")).context("Cargo.toml")?;
    let ours: toml::Table = manifest.parse()?;
    let members: Vec<_> = names.iter().map(|name| format!("{name}-{version}")).collect();
    let path = |(name, folder): (&String, &String)| {
        (name.clone(), toml::Value::Table(toml::Table::from_iter([("path".into(), folder.clone().into())])))
    };
    let patch: toml::Table = names.iter().zip(&members).map(path).collect();
    let mut theirs = toml::Table::new();
    let resolver = ours["workspace"]["resolver"].clone();
    theirs.insert(
        "workspace".into(),
        toml::Table::from_iter([("resolver".into(), resolver), ("members".into(), members.into())]).into(),
    );
    theirs.insert("patch".into(), toml::Table::from_iter([("crates-io".into(), patch.into())]).into());
    theirs.insert("profile".into(), ours["profile"].clone());
    Ok(theirs.to_string())
}

/// The workspace's packages that are published, dependencies before what needs them.
pub(crate) fn published() -> Result<Vec<String>> {
    let metadata = repo::metadata()?;
    let members = metadata["workspace_members"].as_array().context("no members")?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let published = packages.iter().filter(|p| {
        members.contains(&p["id"]) && p["publish"].as_array().is_none_or(|registries| !registries.is_empty())
    });
    Ok(published.filter_map(|p| p["name"].as_str()).map(String::from).collect())
}

fn run(mut command: Command) -> Result<()> {
    let program = Path::new(command.get_program()).display().to_string();
    let status = command.status().with_context(|| format!("cannot run {program}"))?;
    ensure!(status.success(), "{program} failed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_packages_are_complete() {
        for name in published().unwrap() {
            assert_eq!(lacks(&repo::package_folder(&name).unwrap()).unwrap(), Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn what_lacks_is_found() {
        let lacks = lacks(&repo::root().join("xtask")).unwrap();
        let expected = ["the text of LICENSE-MIT", "the text of LICENSE-APACHE", "`description` in its manifest"];
        assert!(lacks.starts_with(&expected.map(String::from)) && lacks.contains(&"a readme".into()), "{lacks:?}");
    }
}
