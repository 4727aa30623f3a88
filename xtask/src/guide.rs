//! The step `guide` of `cargo xtask check`: the mdBook sources in `docs/guide` are whole, and mdBook builds them.
//!
//! The examples themselves are tests of documentation: `tests/guide.rs`.

use crate::{repo, tool};
use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The release of mdBook that is installed where there is none: without its server.
const MDBOOK: &str = "0.5.4";

/// Checks chapters and links, and builds the book to `target/guide`.
pub(crate) fn check() -> Result<()> {
    let folder = repo::root().join("docs/guide");
    let mut faults = faults(&folder.join("src"), &std::fs::read_to_string(repo::root().join("tests/guide.rs"))?)?;
    faults.extend(unexplained()?);
    ensure!(faults.is_empty(), "the guide:\n  {}", faults.join("\n  "));

    let program = tool::obtain("mdbook", MDBOOK)?;
    let book = repo::target_dir().join("guide");
    let mut build = Command::new(&program);
    build.args(["build", "--dest-dir"]).arg(&book).arg(&folder).env("MDBOOK_LOG", "warn");
    let built = build.output().with_context(|| format!("cannot run {}", program.display()))?;
    let said = String::from_utf8_lossy(&built.stdout).into_owned() + &String::from_utf8_lossy(&built.stderr);
    // A chapter or an included file that is not there is a message to mdBook, and no failure.
    let complains = said.contains("WARN") || said.contains("ERROR");
    ensure!(built.status.success() && !complains, "mdbook:\n{said}");
    println!("{}", book.join("index.html").display());
    Ok(())
}

/// Chapters that the summary does not list or that are not there, links that lead nowhere, and chapters with Rust that is
/// not tested.
fn faults(src: &Path, tested: &str) -> Result<Vec<String>> {
    let mut faults = vec![];
    let summary = std::fs::read_to_string(src.join("SUMMARY.md")).context("docs/guide/src/SUMMARY.md")?;
    let listed: Vec<String> = links(&summary);
    for file in chapters(src)? {
        let name = file.strip_prefix(src)?.to_string_lossy().replace('\\', "/");
        let text = std::fs::read_to_string(&file)?;
        if name != "SUMMARY.md" && !listed.contains(&name) {
            faults.push(format!("{name} is not in SUMMARY.md"));
        }
        if text.lines().any(is_tested) && !tested.contains(&format!("\"{name}\"")) {
            faults.push(format!("{name} has examples and is not in tests/guide.rs"));
        }
        let folder = file.parent().context("a chapter lies in a folder")?;
        for link in links(&text) {
            if !folder.join(&link).exists() {
                faults.push(format!("{name}: no file {link}"));
            }
        }
    }
    Ok(faults)
}

/// Whether a line opens Rust that is compiled with the tests.
fn is_tested(line: &str) -> bool {
    line.strip_prefix("```rust").is_some_and(|attributes| !attributes.contains("ignore"))
}

/// Messages of the library's errors that the chapter on troubleshooting does not have.
fn unexplained() -> Result<Vec<String>> {
    let chapter = repo::root().join("docs/guide/src/troubleshooting.md");
    let chapter = std::fs::read_to_string(&chapter).with_context(|| chapter.display().to_string())?;
    let mut missing = vec![];
    let mut seen = 0;
    for file in files(&repo::root().join("host/src"), "rs")? {
        for message in messages(&std::fs::read_to_string(&file)?) {
            seen += 1;
            if !explains(&chapter, &message) {
                missing.push(format!("troubleshooting.md lacks `{message}` of {}", file.display()));
            }
        }
    }
    ensure!(seen > 0, "no errors are found in host/src");
    Ok(missing)
}

/// The texts of `thiserror`'s attributes in a source.
fn messages(source: &str) -> Vec<String> {
    let texts = source.split("#[error(").skip(1).filter(|rest| !rest.starts_with("transparent"));
    texts.filter_map(|rest| Some(rest.split_once('"')?.1.split_once('"')?.0.to_string())).collect()
}

/// Whether a line has all of a message that is neither filled in nor after a semicolon, where remedies begin. The beginning of a part may be
/// left out: `… for another stream`.
fn explains(chapter: &str, message: &str) -> bool {
    let end = message.find(';').unwrap_or(message.len());
    // Between the braces are names, and behind every other one a part.
    let parts = message[..end].split('{').map(|part| part.split_once('}').map_or(part, |(_, text)| text));
    let parts: Vec<String> = parts
        .map(|part| part.replace('`', "").trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_string())
        .filter(|part| part.contains(|c: char| c.is_ascii_alphabetic()))
        .collect();
    let has = |line: &str, part: &str| {
        let tails = part.match_indices(' ').map(|(at, _)| &part[at + 1..]).filter(|tail| tail.contains(' '));
        line.contains(part) || tails.into_iter().any(|tail| line.contains(&format!("… {tail}")))
    };
    let line_has = |line: &str| parts.iter().all(|part| has(line, part));
    chapter.lines().filter(|line| line.starts_with('|')).map(|line| line.replace('`', "")).any(|line| line_has(&line))
}

/// All Markdown files of a folder and the folders in it.
fn chapters(folder: &Path) -> Result<Vec<PathBuf>> {
    files(folder, "md")
}

/// All files of a folder and the folders in it whose names end like this.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files = vec![];
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(self::files(&path, extension)?);
        } else if path.extension().is_some_and(|e| e == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Files that a text links to or includes, without fragments; not what is in code.
pub(crate) fn links(text: &str) -> Vec<String> {
    let mut fenced = false;
    let mut links = vec![];
    for line in text.lines() {
        if line.starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        if let Some(file) = line.strip_prefix("{{#include ").and_then(|l| l.strip_suffix("}}")) {
            links.push(file.to_string());
        }
        // Every other piece between backquotes is code.
        for (_, text) in line.split('`').enumerate().filter(|(i, _)| i % 2 == 0) {
            for rest in text.split("](").skip(1) {
                let target = rest.split([')', '#']).next().unwrap_or_default();
                if !target.is_empty() && !target.contains("://") {
                    links.push(target.to_string());
                }
            }
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found() {
        let text = "See [a](a.md), [b](x/b.md#top), [c](https://c) and `v[0](d)`.\n```rust\nlet x = y[0](z);\n```\n{{#include ../e.md}}\n";
        assert_eq!(links(text), ["a.md", "x/b.md", "../e.md"]);
    }

    #[test]
    fn messages_are_explained() {
        let source = "#[error(\"{op}: `{arg}` has {got}; use more\")]\nA,\n#[error(transparent)]\nB,\n#[error(\n    \"no CUDA device {n}\"\n)]\nC,";
        assert_eq!(messages(source), ["{op}: `{arg}` has {got}; use more", "no CUDA device {n}"]);
        let chapter = "no CUDA device 1\n| ``OP: `x` has 1; …`` | `… for another stream` | `eplb: 3 of 4` |\n";
        assert!(explains(chapter, "{op}: `{arg}` has {got}; use more"));
        assert!(explains(chapter, "{op}: borrowed for another stream"));
        assert!(explains(chapter, "eplb: {a} of {b}"));
        assert!(!explains(chapter, "no CUDA device {n}"), "not in a table");
        assert!(!explains(chapter, "eplb: {a} from {b}") && !explains(chapter, "{op}: borrowed by another stream"));
    }

    #[test]
    fn all_messages_are_explained() {
        let missing = unexplained().unwrap();
        assert!(missing.is_empty(), "{missing:#?}");
    }

    #[test]
    fn the_guide_is_whole() {
        let tested = std::fs::read_to_string(repo::root().join("tests/guide.rs")).unwrap();
        let faults = faults(&repo::root().join("docs/guide/src"), &tested).unwrap();
        assert!(faults.is_empty(), "{faults:#?}");
    }
}
