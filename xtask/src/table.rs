//! `host/ptx/resources.md`: what each kernel takes of a multiprocessor, as ptxas says.

use crate::mark::Done;
use cuda_builder::ptxas::Resources;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What was compiled and assembled, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    /// By family, machine architecture and kernel.
    rows: BTreeMap<(String, String, String), Resources>,
    /// By family, the architecture of the file, and what was done without complaints: its mark ([`crate::mark`]).
    marks: BTreeMap<(String, String, Done), String>,
}

const HEAD: &str = "\
# What each kernel takes

Made by `cargo xtask ptx` with the pinned ptxas; not to be edited. The file for sm_80 is assembled for sm_80 and sm_90,
that for sm_90a for sm_90a. Registers are a thread's; shared memory is the static part, in bytes; stack and spills
(stored / loaded) are bytes of a thread. A file whose number below is that of its text and of its rows here was assembled without
complaints for the machines said: `cargo xtask ptx --check` assembles those of other numbers. Where the number of its sources and
its text is that below, it was compiled from these sources: `--changed` compiles those of other numbers.
";
const COLUMNS: &str = "| kernel | for | registers | shared | barriers | stack | spills |\n\
    | --- | --- | ---: | ---: | ---: | ---: | ---: |\n";

impl Table {
    /// Replaces the rows of `family` on `sm`.
    pub(crate) fn set(&mut self, family: &str, sm: &str, kernels: Vec<Resources>) {
        self.rows.retain(|(f, s, _), _| f != family || s != sm);
        self.rows.extend(kernels.into_iter().map(|k| ((family.into(), sm.into(), k.entry.clone()), k)));
    }

    /// The rows of `family` on `sm`.
    pub(crate) fn rows(&self, family: &str, sm: &str) -> impl Iterator<Item = &Resources> {
        self.rows.iter().filter(move |((f, s, _), _)| f == family && s == sm).map(|(_, resources)| resources)
    }

    /// Replaces the mark of what was `done` with the file of `family` for `arch`.
    pub(crate) fn set_mark(&mut self, family: &str, arch: &str, done: Done, mark: Option<String>) {
        let key = (family.into(), arch.into(), done);
        match mark {
            Some(mark) => self.marks.insert(key, mark),
            None => self.marks.remove(&key),
        };
    }

    /// The mark of what was `done` with the file of `family` for `arch`.
    pub(crate) fn mark(&self, family: &str, arch: &str, done: Done) -> Option<&str> {
        self.marks.get(&(family.into(), arch.into(), done)).map(String::as_str)
    }

    /// Removes what belongs to none of `families`.
    pub(crate) fn retain(&mut self, families: &[String]) {
        self.rows.retain(|(f, _, _), _| families.contains(f));
        self.marks.retain(|(f, _, _), _| families.contains(f));
    }

    /// As Markdown.
    pub(crate) fn text(&self) -> String {
        let mut text = String::from(HEAD);
        let mut family = "";
        // By kernel, so that the machines stand side by side.
        let mut rows: Vec<_> = self.rows.iter().collect();
        rows.sort_by(|((f, s, k), _), ((g, t, l), _)| (f, k, s).cmp(&(g, l, t)));
        for ((f, sm, kernel), r) in rows {
            if f != family {
                write!(text, "\n## {f}\n").expect("strings take everything");
                for ((_, arch, _), mark) in self.marks.iter().filter(|((marked, _, _), _)| marked == f) {
                    writeln!(text, "- {arch}: {mark}").expect("strings take everything");
                }
                write!(text, "\n{COLUMNS}").expect("strings take everything");
                family = f;
            }
            let spills = format!("{} / {}", r.spill_stores, r.spill_loads);
            writeln!(
                text,
                "| {kernel} | {sm} | {} | {} | {} | {} | {spills} |",
                r.registers, r.shared, r.barriers, r.stack
            )
            .expect("strings take everything");
        }
        text
    }

    /// Reads what [`text`](Self::text) writes; lines that are neither rows nor marks are passed over.
    pub(crate) fn parse(text: &str) -> Self {
        let mut table = Self::default();
        let mut family = String::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("## ") {
                family = name.trim().into();
            }
            if let Some((arch, mark)) = line.strip_prefix("- ").and_then(|l| l.split_once(": "))
                && let Some(done) = Done::of(mark)
            {
                table.set_mark(&family, arch, done, Some(mark.into()));
            }
            let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
            let [kernel, sm, registers, shared, barriers, stack, spills] = cells[..] else { continue };
            let number = |s: &str| s.parse::<u32>().ok();
            let resources = || {
                let (stores, loads) = spills.split_once(" / ")?;
                Some(Resources {
                    entry: kernel.into(),
                    registers: number(registers)?,
                    shared: number(shared)?,
                    barriers: number(barriers)?,
                    stack: number(stack)?,
                    spill_stores: number(stores)?,
                    spill_loads: number(loads)?,
                })
            };
            if let Some(r) = resources() {
                table.rows.insert((family.clone(), sm.into(), kernel.into()), r);
            }
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(entry: &str, registers: u32) -> Resources {
        Resources {
            entry: entry.into(),
            registers,
            shared: 48,
            spill_stores: 4,
            spill_loads: 8,
            ..Resources::default()
        }
    }

    #[test]
    fn text_and_back() {
        let mut table = Table::default();
        table.set("norm", "sm_90", vec![kernel("b", 20), kernel("a", 10)]);
        table.set("norm", "sm_80", vec![kernel("a", 11)]);
        table.set("gemm", "sm_90a", vec![kernel("g", 168)]);
        table.set_mark("norm", "sm_80", Done::Assembled, Some("assembled for sm_80, sm_90 by ptxas 1.2: 0123".into()));
        table.set_mark("norm", "sm_80", Done::Compiled, Some("compiled from these: 4567".into()));
        let text = table.text();
        assert_eq!(Table::parse(&text), table);
        assert!(text.find("## gemm") < text.find("## norm"));
        assert!(text.contains("| a | sm_80 | 11 | 48 | 0 | 0 | 4 / 8 |\n| a | sm_90 | 10 |"), "{text}");
        assert!(
            text.contains(
                "## norm\n- sm_80: compiled from these: 4567\n- sm_80: assembled for sm_80, sm_90 by ptxas 1.2: 0123\n\n| kernel |"
            ),
            "{text}"
        );
        assert_eq!((table.rows("norm", "sm_90").count(), table.rows("gemm", "sm_90").count()), (2, 0));
    }

    #[test]
    fn a_family_is_replaced_as_a_whole() {
        let mut table = Table::default();
        table.set("norm", "sm_90", vec![kernel("old", 20)]);
        table.set("rope", "sm_90", vec![kernel("rope", 20)]);
        table.set("norm", "sm_90", vec![kernel("new", 20)]);
        assert!(!table.text().contains("old") && table.text().contains("new"));
        table.set_mark("rope", "sm_80", Done::Assembled, Some("mark".into()));
        table.retain(&["norm".into()]);
        assert!(!table.text().contains("rope"));
        assert_eq!(table.mark("rope", "sm_80", Done::Assembled), None);
    }
}
