//! `host/ptx/resources.md`: what each kernel takes of a multiprocessor, as ptxas says.

use cuda_builder::ptxas::Resources;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The rows, by family, machine architecture and kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table(BTreeMap<(String, String, String), Resources>);

const HEAD: &str = "\
# What each kernel takes

Made by `cargo xtask ptx` with the pinned ptxas; not to be edited. The file for sm_80 is assembled for sm_80 and sm_90,
that for sm_90a for sm_90a. Registers are a thread's; shared memory is the static part, in bytes; stack and spills
(stored / loaded) are bytes of a thread.
";
const COLUMNS: &str = "| kernel | for | registers | shared | barriers | stack | spills |\n\
    | --- | --- | ---: | ---: | ---: | ---: | ---: |\n";

impl Table {
    /// Replaces the rows of `family` on `sm`.
    pub(crate) fn set(&mut self, family: &str, sm: &str, kernels: Vec<Resources>) {
        self.0.retain(|(f, s, _), _| f != family || s != sm);
        self.0.extend(kernels.into_iter().map(|k| ((family.into(), sm.into(), k.entry.clone()), k)));
    }

    /// Removes what belongs to none of `families`.
    pub(crate) fn retain(&mut self, families: &[String]) {
        self.0.retain(|(f, _, _), _| families.contains(f));
    }

    /// As Markdown.
    pub(crate) fn text(&self) -> String {
        let mut text = String::from(HEAD);
        let mut family = "";
        // By kernel, so that the machines stand side by side.
        let mut rows: Vec<_> = self.0.iter().collect();
        rows.sort_by(|((f, s, k), _), ((g, t, l), _)| (f, k, s).cmp(&(g, l, t)));
        for ((f, sm, kernel), r) in rows {
            if f != family {
                write!(text, "\n## {f}\n{COLUMNS}").expect("strings take everything");
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

    /// Reads what [`text`](Self::text) writes; lines that are no rows are passed over.
    pub(crate) fn parse(text: &str) -> Self {
        let mut table = Self::default();
        let mut family = String::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("## ") {
                family = name.trim().into();
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
                table.0.insert((family.clone(), sm.into(), kernel.into()), r);
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
        let text = table.text();
        assert_eq!(Table::parse(&text), table);
        assert!(text.find("## gemm") < text.find("## norm"));
        assert!(text.contains("| a | sm_80 | 11 | 48 | 0 | 0 | 4 / 8 |\n| a | sm_90 | 10 |"), "{text}");
    }

    #[test]
    fn a_family_is_replaced_as_a_whole() {
        let mut table = Table::default();
        table.set("norm", "sm_90", vec![kernel("old", 20)]);
        table.set("rope", "sm_90", vec![kernel("rope", 20)]);
        table.set("norm", "sm_90", vec![kernel("new", 20)]);
        assert!(!table.text().contains("old") && table.text().contains("new"));
        table.retain(&["norm".into()]);
        assert!(!table.text().contains("rope"));
    }
}
