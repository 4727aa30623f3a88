//! Exceptions to the PTX checks: `xtask/ptx-allow.toml`.

use anyhow::{Context as _, Result, ensure};
use cuda_builder::ptx::Problem;
use serde::Deserialize;
use std::cell::Cell;

/// One exception.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Allowance {
    entry: String,
    kind: String,
    sm: Option<String>,
    reason: String,
    #[serde(skip)]
    used: Cell<bool>,
}

/// All exceptions.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllowList {
    #[serde(default)]
    allow: Vec<Allowance>,
}

impl AllowList {
    /// Reads the repository's list.
    pub(crate) fn read() -> Result<Self> {
        let file = crate::repo::root().join("xtask/ptx-allow.toml");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        Self::parse(&text).with_context(|| file.display().to_string())
    }

    pub(crate) fn parse(text: &str) -> Result<Self> {
        let list: Self = toml::from_str(text)?;
        for a in &list.allow {
            ensure!(!a.reason.trim().is_empty(), "the exception for {} gives no reason", a.entry);
        }
        Ok(list)
    }

    /// Whether `problem` is allowed; `sm` if the assembler found it.
    pub(crate) fn allows(&self, problem: &Problem, sm: Option<&str>) -> bool {
        let hit = self.allow.iter().find(|a| {
            a.entry == problem.entry && a.kind == problem.kind.name() && (a.sm.is_none() || a.sm.as_deref() == sm)
        });
        hit.inspect(|a| a.used.set(true)).is_some()
    }

    /// Exceptions for one of `entries` that nothing needed.
    pub(crate) fn unused(&self, entries: &[String]) -> Vec<String> {
        let idle = self.allow.iter().filter(|a| !a.used.get() && entries.contains(&a.entry));
        idle.map(|a| format!("{} ({})", a.entry, a.kind)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_builder::ptx::Kind;

    #[test]
    fn exceptions_match_by_entry_kind_and_machine() {
        let text = "[[allow]]\nentry = 'gemm'\nkind = 'spill'\nsm = 'sm_90'\nreason = 'x'\n\
            [[allow]]\nentry = 'old'\nkind = 'stack'\nreason = 'y'\n";
        let list = AllowList::parse(text).unwrap();
        let problem = |kind| Problem { entry: "gemm".into(), kind, detail: String::new() };
        assert!(list.allows(&problem(Kind::Spill), Some("sm_90")));
        assert!(!list.allows(&problem(Kind::Spill), Some("sm_80")));
        assert!(!list.allows(&problem(Kind::Stack), Some("sm_90")));
        assert_eq!(list.unused(&["gemm".into(), "old".into()]), ["old (stack)"]);
        assert!(list.unused(&["gemm".into()]).is_empty());
    }

    #[test]
    fn exceptions_need_a_reason() {
        assert!(AllowList::parse("[[allow]]\nentry = 'a'\nkind = 'spill'\nreason = ' '\n").is_err());
        assert!(AllowList::parse("[[allow]]\nentry = 'a'\nkind = 'spill'\n").is_err());
        assert!(AllowList::read().is_ok());
    }
}
