//! The source of the standard library, which `-Zbuild-std=core` compiles for the GPU.
//!
//! It belongs to the compiler, and rustup has it as the component `rust-src`. Where rustup's servers are out of
//! reach, Debian's package of a release that the pinned compiler can build serves as well: it is fetched with the
//! machine's own apt sources, the suite's name replaced, into a folder of ours, which needs no root. What remains is
//! an archive that a person names.

use crate::error::{Error, Result, at};
use crate::pin::Pin;
use crate::toolchain::{Options, output, own_library, rustup};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) struct Source {
    /// `library`, unless it is where the toolchain looks by itself.
    pub(crate) library: Option<PathBuf>,
    pub(crate) origin: String,
}

/// Finds the source for the toolchain `name` or fetches it.
pub(crate) fn obtain(name: &str, pin: &Pin, options: &Options) -> Result<Source> {
    let release = &pin.rust.library;
    if let Some(archive) = &options.rust_src {
        let library = unpack(archive, &options.folder.join("rust-src-archive"), release)?;
        return Ok(Source { library: Some(library), origin: archive.display().to_string() });
    }
    if own_library(name).is_some() {
        return Ok(Source { library: None, origin: "rustup".into() });
    }
    let folder = options.folder.join("rust-src-debian");
    if let Ok(library) = find_library(&folder, release) {
        return Ok(Source { library: Some(library), origin: "Debian".into() });
    }
    let mut tried = vec![];
    match output(rustup(&["component", "add", "rust-src", "--toolchain", name])) {
        Ok(_) if own_library(name).is_some() => return Ok(Source { library: None, origin: "rustup".into() }),
        Ok(_) => tried.push("rustup added it, but it is not there".into()),
        Err(reason) => tried.push(reason),
    }
    eprintln!("rustup cannot add rust-src; trying Debian's package");
    match debian(&folder, &options.folder, release) {
        Ok(library) => Ok(Source { library: Some(library), origin: "Debian".into() }),
        Err(reason) => {
            tried.push(reason);
            tried.push("name an archive of it with --rust-src FILE or WARPLOOM_RUST_SRC".into());
            Err(Error::RustSrc { tried })
        }
    }
}

fn unpack(archive: &Path, folder: &Path, release: &str) -> Result<PathBuf> {
    let fail = |reason| Error::RustSrc { tried: vec![format!("{}: {reason}", archive.display())] };
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(at(folder))?;
    }
    fs::create_dir_all(folder).map_err(at(folder))?;
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(archive).arg("-C").arg(folder);
    output(tar).map_err(fail)?;
    find_library(folder, release).map_err(fail)
}

/// The folder `library` below `root`, checked for its release.
fn find_library(root: &Path, release: &str) -> Result<PathBuf, String> {
    let mut level = vec![root.to_path_buf()];
    for _ in 0..8 {
        if let Some(library) = level.iter().find(|p| p.join("core/src/lib.rs").is_file()) {
            return check_release(library, release).map(|()| library.clone());
        }
        let entries = level.iter().filter_map(|p| fs::read_dir(p).ok()).flatten().flatten();
        level = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect();
    }
    Err("it holds no `library/core`".into())
}

/// A library says which release it is in the file `version` above it, or in a folder called `rustc-1.97.1`.
fn check_release(library: &Path, release: &str) -> Result<(), String> {
    let above = library.parent().unwrap_or(library);
    let version = fs::read_to_string(above.join("version")).ok();
    let folder = above.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_prefix("rustc-")).map(String::from);
    match version.or(folder) {
        Some(v) if !is_release(v.trim(), release) => Err(format!("it is of release {}, not {release}", v.trim())),
        _ => Ok(()),
    }
}

/// Whether `1.97.1+dfsg1-1` is a release of `1.97`.
fn is_release(version: &str, release: &str) -> bool {
    version.strip_prefix(release).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Where the machine's apt gets Debian's packages from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AptSource {
    uris: String,
    suite: String,
    signed_by: Option<String>,
}

const CODENAMES: [&str; 9] =
    ["bullseye", "bookworm", "trixie", "forky", "duke", "sid", "stable", "testing", "unstable"];

impl AptSource {
    /// Debian proper: not its security archive, and no third party.
    fn is_debian(&self) -> bool {
        CODENAMES.contains(&self.suite.as_str()) && !self.uris.contains("security")
    }

    fn with_suite(&self, suite: &str) -> String {
        let mut text = format!("Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\n", self.uris);
        if let Some(key) = &self.signed_by {
            text += &format!("Signed-By: {key}\n");
        }
        text
    }
}

/// Parses a file of apt's old format: `deb [signed-by=KEY] URI SUITE COMPONENTS`.
fn parse_list(text: &str) -> Vec<AptSource> {
    let parse = |line: &str| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?,
            None => ("", rest),
        };
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        words.any(|w| w == "main").then(|| AptSource {
            uris: uri.into(),
            suite: suite.into(),
            signed_by: options.split_whitespace().find_map(|o| o.strip_prefix("signed-by=")).map(String::from),
        })
    };
    text.lines().filter_map(parse).collect()
}

/// Parses a file of apt's new format: paragraphs of fields.
fn parse_sources(text: &str) -> Vec<AptSource> {
    let mut sources = vec![];
    let text: String = text.lines().filter(|l| !l.starts_with('#')).map(|l| format!("{}\n", l.trim_end())).collect();
    for paragraph in text.split("\n\n") {
        let field = |name: &str| {
            paragraph.lines().find_map(|l| {
                let (key, value) = l.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim().to_string())
            })
        };
        let (Some(uris), Some(suites), Some(components)) = (field("URIs"), field("Suites"), field("Components")) else {
            continue;
        };
        let usable = components.split_whitespace().any(|c| c == "main")
            && field("Types").is_none_or(|t| t.split_whitespace().any(|t| t == "deb"))
            && field("Enabled").is_none_or(|e| e != "no");
        if usable {
            // A key that is spelled out takes several lines; apt's own keys must do then.
            let signed_by = field("Signed-By").filter(|k| k.starts_with('/'));
            let of_suite = |s: &str| AptSource { uris: uris.clone(), suite: s.into(), signed_by: signed_by.clone() };
            sources.extend(suites.split_whitespace().map(of_suite));
        }
    }
    sources
}

fn machine_source() -> Option<AptSource> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    let mut parts: Vec<PathBuf> =
        fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|e| e.path()).collect();
    parts.sort();
    files.extend(parts);
    let sources = files.iter().flat_map(|file| {
        let text = fs::read_to_string(file).unwrap_or_default();
        match file.extension().and_then(|e| e.to_str()) {
            Some("list") => parse_list(&text),
            Some("sources") => parse_sources(&text),
            _ => vec![],
        }
    });
    sources.into_iter().find(AptSource::is_debian)
}

/// The newest version of `release` in what `apt-cache madison` prints.
fn pick_version(madison: &str, release: &str) -> Option<String> {
    let versions = madison.lines().filter_map(|l| l.split('|').nth(1)).map(str::trim);
    versions.into_iter().find(|v| is_release(v, release)).map(String::from)
}

/// Fetches Debian's `rust-src` into `into`.
fn debian(into: &Path, scratch: &Path, release: &str) -> Result<PathBuf, String> {
    let source = machine_source().ok_or("no Debian archive among the machine's apt sources")?;
    let apt = scratch.join("apt");
    let io = |e: std::io::Error| format!("{}: {e}", apt.display());
    fs::create_dir_all(apt.join("cache/archives/partial")).map_err(io)?;
    let apt = fs::canonicalize(&apt).map_err(io)?;
    let command = |program: &str, args: &[&str]| {
        let mut c = Command::new(program);
        c.current_dir(&apt).arg("-q");
        for (key, value) in [
            ("Dir::State::Lists", apt.join("lists").display().to_string()),
            ("Dir::Cache", apt.join("cache").display().to_string()),
            ("Dir::Etc::SourceList", apt.join("rust.sources").display().to_string()),
            ("Dir::Etc::SourceParts", "-".into()),
            ("Acquire::Languages", "none".into()),
            ("Acquire::Retries", "1".into()),
            ("Acquire::http::Timeout", "20".into()),
            ("Acquire::https::Timeout", "20".into()),
            ("APT::Sandbox::User", String::new()),
        ] {
            c.arg("-o").arg(format!("{key}={value}"));
        }
        c.args(args);
        c
    };
    let mut tried = vec![];
    // Backports before the development suites, which move on.
    for suite in ["trixie-backports", "forky-backports", "forky", "sid", "trixie", "bookworm-backports"] {
        let _ = fs::remove_dir_all(apt.join("lists"));
        fs::create_dir_all(apt.join("lists/partial")).map_err(io)?;
        fs::write(apt.join("rust.sources"), source.with_suite(suite)).map_err(io)?;
        if let Err(reason) = output(command("apt-get", &["update", "--error-on=any"])) {
            if reason.contains("404") || reason.contains("does not have a Release file") {
                tried.push(format!("{suite} does not exist"));
                continue;
            }
            // No network: the other suites are on the same server.
            tried.push(reason);
            break;
        }
        let madison = output(command("apt-cache", &["madison", "rust-src"])).unwrap_or_default();
        let Some(version) = pick_version(&madison, release) else {
            tried.push(format!("{suite} has no rust-src {release}"));
            continue;
        };
        eprintln!("fetching Debian's rust-src {version} of {suite}");
        output(command("apt-get", &["download", &format!("rust-src={version}")]))?;
        let deb = fs::read_dir(&apt).map_err(io)?.flatten().map(|e| e.path());
        let deb = deb.into_iter().find(|p| p.extension().is_some_and(|e| e == "deb")).ok_or("apt left no package")?;
        let fresh = apt.join("unpacked");
        let _ = fs::remove_dir_all(&fresh);
        let mut dpkg = Command::new("dpkg-deb");
        dpkg.arg("-x").arg(&deb).arg(&fresh);
        output(dpkg)?;
        fs::remove_file(&deb).map_err(io)?;
        find_library(&fresh, release)?;
        let _ = fs::remove_dir_all(into);
        fs::rename(&fresh, into).map_err(io)?;
        let _ = fs::remove_dir_all(apt.join("lists"));
        return find_library(into, release);
    }
    Err(format!("Debian: {}", tried.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_of_apt_sources() {
        let list = "# deb http://old bookworm main\ndeb [arch=amd64 signed-by=/k.gpg] http://m/debian bookworm main x\n\
            deb http://m/debian-security bookworm-security main\ndeb-src http://m/debian sid main\n";
        let sources = parse_list(list);
        assert_eq!(sources.len(), 2);
        assert!(sources[0].is_debian() && !sources[1].is_debian());
        assert_eq!(sources[0].signed_by.as_deref(), Some("/k.gpg"));

        let deb822 = "Types: deb\n# note\nURIs: http://m/debian\nSuites: bookworm bookworm-updates\nComponents: main\n\
            Signed-By: /d.gpg\n\nTypes: deb\nURIs: http://n/\nSuites: nodistro\nComponents: main\n";
        let sources = parse_sources(deb822);
        assert_eq!(sources.iter().filter(|s| s.is_debian()).count(), 1);
        assert_eq!(
            sources[0].with_suite("sid"),
            "Types: deb\nURIs: http://m/debian\nSuites: sid\nComponents: main\nSigned-By: /d.gpg\n"
        );
    }

    #[test]
    fn releases_are_compared_by_part() {
        assert!(is_release("1.97.1+dfsg1-1", "1.97") && is_release("1.97", "1.97"));
        assert!(!is_release("1.970.0", "1.97") && !is_release("1.96.1", "1.97"));
        let madison =
            " rust-src | 1.98.0+dfsg1-1 | http://m sid/main\n rust-src | 1.97.1+dfsg1-1 | http://m sid/main\n";
        assert_eq!(pick_version(madison, "1.97").as_deref(), Some("1.97.1+dfsg1-1"));
        assert_eq!(pick_version(madison, "1.85"), None);
        assert_eq!(pick_version("", "1.97"), None);
    }

    #[test]
    fn a_library_is_found_and_checked() {
        let root = std::env::temp_dir().join(format!("warploom-rust-src-{}", std::process::id()));
        let core = root.join("usr/src/rustc-1.97.1/library/core/src");
        fs::create_dir_all(&core).unwrap();
        fs::write(core.join("lib.rs"), "").unwrap();
        assert!(find_library(&root, "1.97").unwrap().ends_with("rustc-1.97.1/library"));
        assert!(find_library(&root, "1.96").unwrap_err().contains("1.97.1"));
        assert!(find_library(&core, "1.97").is_err());
        fs::remove_dir_all(&root).unwrap();
    }
}
