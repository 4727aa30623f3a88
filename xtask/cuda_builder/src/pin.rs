//! The pinned versions of everything that makes PTX.

use crate::error::{Error, Result, at};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A target of the compiler: a GPU architecture and the PTX ISA version of the text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arch {
    name: String,
    isa: u32,
}

impl Arch {
    /// `name` as compilers spell it (`sm_90a`), `isa` as ten times the version (86 for PTX 8.6).
    pub fn new(name: impl Into<String>, isa: u32) -> Self {
        Self { name: name.into(), isa }
    }

    /// `sm_80`, `sm_90a`, …
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Ten times the PTX ISA version.
    pub fn isa(&self) -> u32 {
        self.isa
    }
}

/// A Python wheel with a CUDA tool in it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wheel {
    /// Name of the package.
    pub wheel: String,
    /// Its exact version.
    pub version: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RustPin {
    pub(crate) channel: String,
    pub(crate) commit: String,
    pub(crate) library: String,
}

/// The pinned versions, as one file says them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    pub(crate) rust: RustPin,
    isa: BTreeMap<String, u32>,
    pub(crate) cuda: BTreeMap<String, Wheel>,
}

impl Pin {
    /// Reads the TOML file at `path`.
    ///
    /// # Errors
    /// A file that cannot be read, or says something else.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(at(path))?;
        Self::parse(&text).map_err(|reason| Error::Pin { path: path.into(), reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let pin: Self = toml::from_str(text).map_err(|e| e.to_string())?;
        if pin.rust.commit.len() != 40 || !pin.rust.commit.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(format!("`{}` is no commit of 40 hexadecimal digits", pin.rust.commit));
        }
        for tool in ["ptxas", "cuobjdump", "nvdisasm"] {
            if !pin.cuda.contains_key(tool) {
                return Err(format!("[cuda] names no wheel for {tool}"));
            }
        }
        Ok(pin)
    }

    /// The wheel with the assembler, whose release it is that counts, wherever it comes from.
    pub fn ptxas(&self) -> &Wheel {
        &self.cuda["ptxas"]
    }

    /// Every architecture that has a PTX file, in order.
    pub fn archs(&self) -> Vec<Arch> {
        self.isa.iter().map(|(name, isa)| Arch::new(name, *isa)).collect()
    }

    /// The architecture called `name`.
    ///
    /// # Errors
    /// An architecture that the file does not name.
    pub fn arch(&self, name: &str) -> Result<Arch> {
        let isa = self.isa.get(name).ok_or_else(|| Error::Arch {
            arch: name.into(),
            known: self.isa.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
        })?;
        Ok(Arch::new(name, *isa))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        [rust]
        channel = "nightly-2026-05-20"
        commit = "e50aa6fba4e63ab34c72bf9acfd2c307c1155d1a"
        library = "1.97"
        [isa]
        sm_90a = 86
        sm_80 = 71
        [cuda]
        ptxas = { wheel = "a", version = "1" }
        cuobjdump = { wheel = "b", version = "2" }
        nvdisasm = { wheel = "c", version = "3" }
    "#;

    #[test]
    fn reads_architectures_in_order() {
        let pin = Pin::parse(TEXT).unwrap();
        assert_eq!(pin.archs(), [Arch::new("sm_80", 71), Arch::new("sm_90a", 86)]);
        assert_eq!(pin.arch("sm_90a").unwrap().isa(), 86);
        assert_eq!(pin.ptxas().version, "1");
        let error = pin.arch("sm_70").unwrap_err().to_string();
        assert!(error.contains("`sm_70`") && error.contains("sm_80, sm_90a"), "{error}");
    }

    #[test]
    fn rejects_what_makes_no_sense() {
        assert!(Pin::parse(&TEXT.replace("e50aa6fba4", "")).unwrap_err().contains("no commit"));
        assert!(Pin::parse(&TEXT.replace("nvdisasm", "other")).unwrap_err().contains("nvdisasm"));
        assert!(Pin::parse(&TEXT.replace("library", "libary")).unwrap_err().contains("libary"));
    }
}
