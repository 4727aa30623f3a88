//! Marks of files in `host/ptx/resources.md`: what was compiled and assembled before, and need not be again.
//!
//! A text is a function of its sources, of the compiler, and of how that is called and what it emits is brought into form ([`crate::sources`]). A mark
//! has a fingerprint of these and of the text, and is given to files in which nothing at all was found wrong.
//!
//! What ptxas says of a file is a function of the text, of the machines, and of ptxas; so is what is made of it, of the code that reads what it says. A
//! mark has a fingerprint of all that and of the file's rows in the table, and is given to files of which nothing was found but what is in those rows. What
//! of that is allowed can then be looked up in the rows: the exceptions are no part of a mark.

use crate::table::Table;
use cuda_builder::ptx::Problem;
use cuda_builder::ptxas::{Report, Resources};
use sha1_smol::Sha1;

/// How ptxas is called, and what it says is read: up to the tests.
const READING: &str = include_str!("../cuda_builder/src/ptxas.rs");

/// The machines that the PTX of an architecture is assembled for; the table records those marked.
pub(crate) fn machines(arch: &str) -> &'static [(&'static str, bool)] {
    match arch {
        "sm_90a" => &[("sm_90a", true)],
        _ => &[("sm_80", true), ("sm_90", true), ("sm_89", false), ("sm_100", false), ("sm_120", false)],
    }
}

/// Whether a machine gets the instruction that widens e4m3 in texts for `sm_80`.
pub(crate) fn has_e4m3(sm: &str) -> bool {
    matches!(sm, "sm_89" | "sm_100" | "sm_120")
}

/// Those of an architecture that the table records.
fn recorded(arch: &str) -> impl Iterator<Item = &'static str> {
    machines(arch).iter().filter(|(_, recorded)| *recorded).map(|(sm, _)| *sm)
}

/// What a mark says was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Done {
    Compiled,
    Assembled,
}

impl Done {
    /// What the mark `text` says was done.
    pub(crate) fn of(text: &str) -> Option<Self> {
        match text.split(' ').next() {
            Some("compiled") => Some(Self::Compiled),
            Some("assembled") => Some(Self::Assembled),
            _ => None,
        }
    }
}

/// A fingerprint of `parts`.
pub(crate) fn fingerprint<S: AsRef<str>>(parts: &[S]) -> String {
    let mut hash = Sha1::new();
    for part in parts.iter().map(AsRef::as_ref) {
        // With its length, so that nothing moves from part to part unseen.
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.digest().to_string()
}

/// The mark of a file with this `text`, compiled for `arch` from `sources` of this fingerprint.
pub(crate) fn compiled(arch: &str, sources: &str, text: &str) -> String {
    format!("compiled without complaints from the sources of its family: {}", fingerprint(&[arch, sources, text]))
}

/// The mark of a file with this `text` and its rows in `table`, of ptxas' `release`.
pub(crate) fn assembled(table: &Table, family: &str, arch: &str, release: &str, text: &str) -> String {
    let rows: Vec<Vec<&Resources>> = recorded(arch).map(|sm| table.rows(family, sm).collect()).collect();
    let reading = READING.split("\n#[cfg(test)]\n").next().unwrap_or_default();
    let parts = [reading, release, &format!("{:?}", machines(arch)), text, &format!("{rows:?}")];
    let machines: Vec<&str> = machines(arch).iter().map(|(sm, _)| *sm).collect();
    format!("assembled for {} by ptxas {release}: {}", machines.join(", "), fingerprint(&parts))
}

/// What the table's rows say is wrong with a file, each with the machine.
pub(crate) fn problems(table: &Table, family: &str, arch: &str) -> Vec<(&'static str, Problem)> {
    recorded(arch).flat_map(|sm| table.rows(family, sm).filter_map(Resources::problem).map(move |p| (sm, p))).collect()
}

/// Whether rows have all that was found.
pub(crate) fn rows_tell(report: &Report) -> bool {
    report.problems.iter().eq(report.kernels.iter().filter_map(Resources::problem).collect::<Vec<_>>().iter())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_builder::ptx::Kind;
    use cuda_builder::ptxas::parse_report;

    fn table(registers: u32, spills: u32) -> Table {
        let mut table = Table::default();
        let kernel =
            |registers, spill_loads| Resources { entry: "k".into(), registers, spill_loads, ..Resources::default() };
        table.set("norm", "sm_80", vec![kernel(8, 0)]);
        table.set("norm", "sm_90", vec![kernel(registers, spills)]);
        table.set("norm", "sm_90a", vec![kernel(20, 0)]);
        table.set("rope", "sm_90", vec![kernel(20, 0)]);
        table
    }

    #[test]
    fn marks_are_of_text_rows_machines_and_release() {
        let first = assembled(&table(10, 0), "norm", "sm_80", "1.2.3", "add;");
        assert!(first.starts_with("assembled for sm_80, sm_90, sm_89, sm_100, sm_120 by ptxas 1.2.3: "), "{first}");
        assert_eq!(assembled(&Table::parse(&table(10, 0).text()), "norm", "sm_80", "1.2.3", "add;"), first);
        assert_ne!(assembled(&table(10, 0), "norm", "sm_80", "1.2.3", "adc;"), first);
        assert_ne!(assembled(&table(11, 0), "norm", "sm_80", "1.2.3", "add;"), first);
        assert_ne!(assembled(&table(10, 4), "norm", "sm_80", "1.2.3", "add;"), first);
        assert_ne!(assembled(&table(10, 0), "norm", "sm_80", "1.2.4", "add;"), first);
        assert_ne!(assembled(&table(10, 0), "norm", "sm_90a", "1.2.3", "add;"), first);
        // Rows of other families and machines belong to other files.
        let mut others = table(10, 0);
        others.set("rope", "sm_90", vec![]);
        others.set("norm", "sm_90a", vec![]);
        assert_eq!(assembled(&others, "norm", "sm_80", "1.2.3", "add;"), first);
        others.set("norm", "sm_80", vec![]);
        assert_ne!(assembled(&others, "norm", "sm_80", "1.2.3", "add;"), first);
    }

    #[test]
    fn marks_say_what_was_done() {
        assert_eq!(Done::of(&assembled(&table(10, 0), "norm", "sm_80", "1.2.3", "add;")), Some(Done::Assembled));
        assert_eq!(Done::of(&compiled("sm_80", "0123", "add;")), Some(Done::Compiled));
        assert_eq!(Done::of("published"), None);
    }

    #[test]
    fn marks_are_of_sources_text_and_architecture() {
        let first = compiled("sm_80", "0123", "add;");
        assert_eq!(compiled("sm_80", "0123", "add;"), first);
        for other in
            [compiled("sm_90a", "0123", "add;"), compiled("sm_80", "012", "3add;"), compiled("sm_80", "0123", "adc;")]
        {
            assert_ne!(other, first);
        }
    }

    #[test]
    fn marks_are_of_the_code_that_calls_ptxas_without_its_tests() {
        let code = READING.split("\n#[cfg(test)]\n").next().unwrap();
        assert!(code.contains("\"-O3\"") && code.contains("fn parse_report"));
        assert!(code.len() < READING.len() && !code.contains("assert"));
    }

    #[test]
    fn problems_are_found_in_rows() {
        assert!(problems(&table(10, 0), "norm", "sm_80").is_empty());
        let found = problems(&table(10, 4), "norm", "sm_80");
        assert_eq!(found.iter().map(|(sm, p)| (*sm, p.kind)).collect::<Vec<_>>(), [("sm_90", Kind::Spill)]);
        assert!(
            problems(&table(10, 4), "norm", "sm_90a").is_empty() && problems(&table(10, 4), "rope", "sm_80").is_empty()
        );
    }

    #[test]
    fn warnings_are_in_no_row() {
        let kernel = "ptxas info    : Compiling entry function 'k' for 'sm_90'\n    8 bytes stack frame, 4 bytes spill stores, \
            4 bytes spill loads\n";
        assert!(rows_tell(&parse_report(kernel)));
        assert!(!rows_tell(&parse_report(&format!("ptxas warning : something in 'k'\n{kernel}"))));
    }

    #[test]
    fn portable_files_are_assembled_for_every_machine() {
        assert_eq!(machines("sm_90a"), [("sm_90a", true)]);
        assert!(machines("sm_80").contains(&("sm_120", false)));
    }
}
