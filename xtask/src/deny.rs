//! `cargo xtask check --only deny`: licences, sources and requirements of all dependencies, held against `deny.toml`.
//!
//! The file is cargo-deny's, and what is asked here it answers as well: `cargo deny check licenses bans sources`. To compile that program takes
//! minutes, though, and what these three questions need is in `cargo metadata`. Settings that this does not know are errors rather than
//! silently another answer.

use crate::repo;
use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;

/// The only registry that `unknown-registry = "deny"` lets pass, in both protocols.
const CRATES_IO: [&str; 2] =
    ["registry+https://github.com/rust-lang/crates.io-index", "sparse+https://index.crates.io/"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    graph: Graph,
    licenses: Licences,
    bans: Bans,
    sources: Sources,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Graph {
    all_features: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Licences {
    allow: BTreeSet<String>,
    /// Of texts without an expression, which are not guessed at here: such a package is an error.
    #[serde(rename = "confidence-threshold")]
    _confidence_threshold: f32,
    unused_allowed_license: Level,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Bans {
    multiple_versions: Level,
    wildcards: Level,
    allow_wildcard_paths: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sources {
    unknown_registry: Level,
    unknown_git: Level,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Level {
    Allow,
    Deny,
}

impl Rules {
    fn parse(text: &str) -> Result<Self> {
        let rules: Self = toml::from_str(text)?;
        let known = rules.graph.all_features
            && rules.licenses.unused_allowed_license == Level::Allow
            && rules.bans.multiple_versions == Level::Allow
            && rules.bans.wildcards == Level::Deny
            && rules.bans.allow_wildcard_paths
            && rules.sources.unknown_registry == Level::Deny
            && rules.sources.unknown_git == Level::Deny;
        ensure!(known, "a setting has a value that this check does not know; `cargo deny check` may");
        Ok(rules)
    }
}

/// Fails if something that this workspace is built from is not as `deny.toml` demands.
pub(crate) fn check() -> Result<()> {
    let rules = std::fs::read_to_string(repo::root().join("deny.toml")).context("deny.toml")?;
    let rules = Rules::parse(&rules).context("deny.toml")?;
    // What cargo resolved, for all targets and with all features; more is locked only where cargo knows of no use.
    let metadata = repo::metadata()?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let complaints: Vec<_> = packages.iter().flat_map(|package| complaints(package, &rules.licenses.allow)).collect();
    ensure!(complaints.is_empty(), "{} complaints:\n  {}", complaints.len(), complaints.join("\n  "));
    println!("{} packages: licences, requirements and sources are as deny.toml demands", packages.len());
    Ok(())
}

/// What is wrong with a package of `cargo metadata`.
fn complaints(package: &Value, allowed: &BTreeSet<String>) -> Vec<String> {
    let text = |key: &str| package[key].as_str();
    let name = format!("{} {}", text("name").unwrap_or_default(), text("version").unwrap_or_default());
    let mut out = vec![];
    match text("license") {
        None => out.push(format!("{name} has no licence expression")),
        Some(licence) => match satisfied(licence, allowed) {
            Ok(true) => {}
            Ok(false) => out.push(format!("{name}: `{licence}` is not on the list")),
            Err(error) => out.push(format!("{name}: `{licence}`: {error}")),
        },
    }
    if let Some(source) = text("source").filter(|source| !CRATES_IO.contains(source)) {
        out.push(format!("{name} comes from {source}"));
    }
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        if dependency["req"] == "*" && dependency["path"].is_null() {
            out.push(format!("{name} takes any version of {}", dependency["name"].as_str().unwrap_or_default()));
        }
    }
    out
}

/// Whether an SPDX expression lets one choose licences of which all are `allowed`.
fn satisfied(expression: &str, allowed: &BTreeSet<String>) -> Result<bool> {
    // Before there were expressions, a slash meant `OR`.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let answer = any_of(&mut words, allowed)?;
    ensure!(words.next().is_none(), "more than an expression");
    Ok(answer)
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> Result<bool> {
    let mut answer = all_of(words, allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        answer |= all_of(words, allowed)?;
    }
    Ok(answer)
}

fn all_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> Result<bool> {
    let mut answer = licence(words, allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        answer &= licence(words, allowed)?;
    }
    Ok(answer)
}

fn licence(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> Result<bool> {
    let word = words.next().context("an expression ends too early")?;
    if word == "(" {
        let answer = any_of(words, allowed)?;
        ensure!(words.next() == Some(")"), "a parenthesis is not closed");
        return Ok(answer);
    }
    ensure!(![")", "OR", "AND", "WITH"].contains(&word), "`{word}` where a licence should be");
    if words.next_if_eq(&"WITH").is_none() {
        return Ok(allowed.contains(word));
    }
    let exception = words.next().context("an expression ends too early")?;
    Ok(allowed.contains(&format!("{word} WITH {exception}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn allowed() -> BTreeSet<String> {
        ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Zlib"].map(String::from).into()
    }

    #[test]
    fn expressions() {
        for good in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0 OR MIT",
            "MIT/GPL-3.0",
            "MIT AND Zlib",
            "(MIT OR GPL-3.0) AND Zlib",
            "GPL-3.0 OR MIT AND Zlib",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
        ] {
            assert!(satisfied(good, &allowed()).unwrap(), "{good}");
        }
        for bad in [
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "(MIT OR Zlib) AND GPL-3.0",
            "MIT WITH LLVM-exception",
            "GPL-3.0 OR MIT AND BSD",
        ] {
            assert!(!satisfied(bad, &allowed()).unwrap(), "{bad}");
        }
        for broken in ["", "MIT OR", "(MIT", "MIT)", "OR MIT", "MIT Zlib", "MIT WITH"] {
            assert!(satisfied(broken, &allowed()).is_err(), "{broken}");
        }
    }

    #[test]
    fn packages_that_are_not_as_demanded() {
        let good = json!({"name": "a", "version": "1.0.0", "license": "MIT", "source": CRATES_IO[0],
            "dependencies": [{"name": "b", "req": "^1"}, {"name": "c", "req": "*", "path": "/c"}]});
        assert_eq!(complaints(&good, &allowed()), Vec::<String>::new());
        let with = |key: &str, value: Value| {
            let mut package = good.clone();
            package[key] = value;
            complaints(&package, &allowed())
        };
        assert_eq!(with("license", json!("GPL-3.0")), ["a 1.0.0: `GPL-3.0` is not on the list"]);
        assert_eq!(with("license", Value::Null), ["a 1.0.0 has no licence expression"]);
        assert_eq!(with("source", json!("git+https://host/a")), ["a 1.0.0 comes from git+https://host/a"]);
        assert_eq!(with("source", json!("registry+https://host/index")).len(), 1);
        assert_eq!(with("source", Value::Null), Vec::<String>::new());
        let any = json!([{"name": "b", "req": "*", "path": null}]);
        assert_eq!(with("dependencies", any), ["a 1.0.0 takes any version of b"]);
    }

    #[test]
    fn settings_that_are_not_known_are_errors() {
        let rules = std::fs::read_to_string(repo::root().join("deny.toml")).unwrap();
        assert!(Rules::parse(&rules).unwrap().licenses.allow.contains("MIT"));
        assert!(Rules::parse(&rules.replace("wildcards = \"deny\"", "wildcards = \"allow\"")).is_err());
        assert!(Rules::parse(&rules.replace("[bans]", "[bans]\nskip = []")).is_err());
    }
}
