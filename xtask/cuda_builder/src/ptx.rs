//! Post-processing and checks of the PTX that rustc emits.
//!
//! Kernels carry what rustc cannot express as PTX comments inside their bodies:
//!
//! | marker | effect |
//! | --- | --- |
//! | `//@launch_bounds T B` | `.maxntid T, 1, 1` and, unless B is 0, `.minnctapersm B` |
//! | `//@cluster X` | `.reqnctapercluster X, 1, 1` |
//! | `//@param_align NAME A` | the by-value parameter NAME is aligned to A bytes |
//! | `//@arch Sm90a` | the entry is left out of every file but that of sm_90a; `Sm80` keeps it everywhere |
//! | `//@trap` | the trap that follows in the same basic block is meant, and no panic |
//!
//! What is found wrong is a [`Problem`]: local memory (a register array that was indexed at run time, or a loop that
//! did not unroll), calls, panics, and collective inline assembly that LLVM was free to duplicate.
//!
//! The text is canonical: entries in the order of their names, labels numbered within their function, data that the
//! compiler named by hashes renamed, no comments. So it depends on nothing but source, compiler and flags.

use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// A module after [`process`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module {
    /// The canonical text.
    pub text: String,
    /// Its entries, in the order of their names.
    pub entries: Vec<Entry>,
    /// What must not be, in the order of the entries.
    pub problems: Vec<Problem>,
}

/// A kernel entry point.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its symbol.
    pub name: String,
    /// The most threads of a block.
    pub max_threads: u32,
    /// Traps that the kernel asks for itself.
    pub traps: u32,
    /// Memory instructions that do not know what memory they go to, and so are slower: pointers that came out of
    /// structs or out of memory.
    pub generic: u32,
}

/// Something wrong with an entry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The entry, or the function it calls.
    pub entry: String,
    /// What kind of problem.
    pub kind: Kind,
    /// The details.
    pub detail: String,
}

/// The kinds of [`Problem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// An array lives in local memory.
    LocalMemory,
    /// A function was not inlined, or does not exist on the GPU.
    Call,
    /// A panic remains.
    Panic,
    /// Collective inline assembly without a convergent instruction that pins it.
    Unpinned,
    /// A marker that is unknown, missing or contradicts another.
    Marker,
    /// A store of the low bits of a floating-point result.
    NarrowStore,
    /// The assembler spilled registers.
    Spill,
    /// The assembler put something on the stack.
    Stack,
    /// The assembler serialised asynchronous instructions, or warned of something else.
    Performance,
}

impl Kind {
    /// As lists of exceptions spell it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::LocalMemory => "local-memory",
            Kind::Call => "call",
            Kind::Panic => "panic",
            Kind::Unpinned => "unpinned",
            Kind::Marker => "marker",
            Kind::NarrowStore => "narrow-store",
            Kind::Spill => "spill",
            Kind::Stack => "stack",
            Kind::Performance => "performance",
        }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}: {}", self.entry, self.kind.name(), self.detail)
    }
}

/// One top-level statement of a module.
#[derive(Debug)]
struct Item {
    symbol: String,
    kind: ItemKind,
    lines: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemKind {
    Entry,
    Function,
    /// A function that is declared and not defined.
    Declaration,
    Data,
}

/// What goes before `//`.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

fn is_symbol(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$'
}

/// The words of a line that may be symbols.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c| !is_symbol(c)).filter(|w| !w.is_empty())
}

/// Symbol and kind of a top-level statement, from its first line.
fn classify(line: &str) -> (String, ItemKind) {
    for (keyword, kind) in [(".entry", ItemKind::Entry), (".func", ItemKind::Function)] {
        let Some(at) = line.find(keyword) else { continue };
        let mut rest = line[at + keyword.len()..].trim_start();
        if rest.starts_with('(') {
            rest = rest.find(')').map_or("", |i| rest[i + 1..].trim_start());
        }
        return (rest.chars().take_while(|c| is_symbol(*c)).collect(), kind);
    }
    // `.visible .global .align 4 .b8 name[64] = {…};`
    let left = line.split('=').next().unwrap_or_default();
    let left = left.split('[').next().unwrap_or_default().trim_end().trim_end_matches(';');
    let symbol = left.rsplit(|c| !is_symbol(c)).next().unwrap_or_default();
    (symbol.into(), ItemKind::Data)
}

/// Splits a module into its directives (`.version` and so on) and its items.
fn split(ptx: &str) -> Result<(Vec<String>, Vec<Item>)> {
    let (mut head, mut items): (Vec<String>, Vec<Item>) = (vec![], vec![]);
    let mut open: Vec<String> = vec![];
    let (mut start, mut depth, mut braces) = (0, 0i32, false);
    for (number, line) in ptx.lines().enumerate() {
        let code = code(line);
        if open.is_empty() {
            if code.trim().is_empty() {
                continue;
            }
            if [".version", ".target", ".address_size"].iter().any(|d| code.starts_with(d)) {
                head.push(code.trim_end().into());
                continue;
            }
            (start, depth, braces) = (number + 1, 0, false);
        }
        open.push(line.trim_end().into());
        for c in code.chars() {
            depth += i32::from(c == '{') - i32::from(c == '}');
            braces |= c == '{';
        }
        let (symbol, kind) = classify(&open[0]);
        let body = matches!(kind, ItemKind::Entry | ItemKind::Function) && braces;
        if depth == 0 && (body || code.trim_end().ends_with(';')) {
            if symbol.is_empty() {
                return Err(Error::Parse { line: start, reason: "expected an entry, a function or data".into() });
            }
            let kind = if kind == ItemKind::Function && !body { ItemKind::Declaration } else { kind };
            items.push(Item { symbol, kind, lines: std::mem::take(&mut open) });
        }
    }
    if !open.is_empty() {
        return Err(Error::Parse { line: start, reason: "the statement that begins here does not end".into() });
    }
    if !head.iter().any(|l| l.starts_with(".target")) {
        return Err(Error::Parse { line: 1, reason: "no .target".into() });
    }
    Ok((head, items))
}

/// The markers in a body, as words.
fn markers(item: &Item) -> impl Iterator<Item = Vec<&str>> {
    item.lines.iter().filter_map(|l| l.find("//@").map(|at| l[at + 3..].split_whitespace().collect()))
}

/// Whether an entry belongs into the file of `arch`.
fn belongs(item: &Item, arch: &str) -> bool {
    !markers(item).any(|m| m == ["arch", "Sm90a"]) || arch == "sm_90a"
}

/// Whether an opcode involves several threads.
fn collective(op: &str) -> bool {
    let mut parts = op.trim_end_matches(';').split('.');
    let first = parts.next().unwrap_or_default();
    matches!(first, "bar" | "barrier") || parts.any(|p| p == "sync" || p == "aligned")
}

/// Whether an opcode accesses memory of any kind, to be found out by the hardware.
fn generic(op: &str) -> bool {
    let mut parts = op.split('.');
    let access = matches!(parts.next(), Some("ld" | "st" | "atom" | "red")) && op.contains('.');
    let space = |p: &str| ["global", "shared", "param", "const", "local"].iter().any(|s| p.starts_with(s));
    access && !parts.any(space)
}

/// Whether a name was made by the compiler, from hashes that differ between machines.
fn is_generated(symbol: &str) -> bool {
    ["_ZN", "_R", "alloc_", "anon", "__unnamed", "switch_table"].iter().any(|p| symbol.starts_with(p))
        || symbol.contains('$')
}

/// Post-processes and checks the PTX that rustc emitted for `arch`.
///
/// # Errors
/// PTX that is not as expected, and what a kernel must not have.
pub fn process(ptx: &str, arch: &str) -> Result<Module> {
    let (head, mut items) = split(ptx)?;
    items.retain(|i| i.kind != ItemKind::Entry || belongs(i, arch));

    let live = reachable(&items);
    items.retain(|i| live.contains(&i.symbol));
    let mut module = Module::default();
    let names = data_names(&items);

    let mut text = head.join("\n") + "\n";
    let mut data: Vec<&Item> = items.iter().filter(|i| i.kind == ItemKind::Data).collect();
    // Data may refer only to what is above it, so the compiler's order stays among what refers to other data.
    data.sort_by_key(|i| {
        let refers = refers_to_data(i, &items);
        (refers, (!refers).then(|| names.get(&i.symbol).unwrap_or(&i.symbol)))
    });
    for item in data {
        for line in &item.lines {
            let line = code(line).trim_end();
            if !line.trim().is_empty() {
                writeln!(text, "{}", rename(line, &names)).expect("strings take everything");
            }
        }
    }
    for item in items.iter().filter(|i| matches!(i.kind, ItemKind::Function | ItemKind::Declaration)) {
        let detail = if item.kind == ItemKind::Declaration { "does not exist on the GPU" } else { "was not inlined" };
        module.problems.push(Problem { entry: item.symbol.clone(), kind: Kind::Call, detail: detail.into() });
        text += &(item.lines.join("\n") + "\n");
    }
    let mut entries: Vec<&Item> = items.iter().filter(|i| i.kind == ItemKind::Entry).collect();
    entries.sort_by(|a, b| a.symbol.cmp(&b.symbol));
    for item in entries {
        text.push('\n');
        text += &rename(&entry(item, &mut module), &names);
    }
    module.problems.dedup();
    module.text = text;
    Ok(module)
}

/// Symbols that the entries need, and their own.
fn reachable(items: &[Item]) -> BTreeSet<String> {
    let by_symbol: BTreeMap<&str, &Item> = items.iter().map(|i| (i.symbol.as_str(), i)).collect();
    let mut work: Vec<&str> = items.iter().filter(|i| i.kind == ItemKind::Entry).map(|i| i.symbol.as_str()).collect();
    let mut live: BTreeSet<&str> = work.iter().copied().collect();
    while let Some(symbol) = work.pop() {
        for word in by_symbol[symbol].lines.iter().flat_map(|l| words(code(l))) {
            if let Some((&word, _)) = by_symbol.get_key_value(word)
                && live.insert(word)
            {
                work.push(word);
            }
        }
    }
    live.into_iter().map(String::from).collect()
}

fn refers_to_data(item: &Item, items: &[Item]) -> bool {
    item.lines
        .iter()
        .flat_map(|l| words(code(l)))
        .any(|w| w != item.symbol && items.iter().any(|other| other.kind == ItemKind::Data && other.symbol == w))
}

/// Names for the data that the compiler named: numbered in the order of the contents.
fn data_names(items: &[Item]) -> BTreeMap<String, String> {
    let mut generated: Vec<(String, &str)> = items
        .iter()
        .filter(|i| i.kind == ItemKind::Data && is_generated(&i.symbol))
        .map(|i| (i.lines.join("\n").replace(&i.symbol, ""), i.symbol.as_str()))
        .collect();
    generated.sort_by(|a, b| a.0.cmp(&b.0));
    generated.iter().enumerate().map(|(n, (_, symbol))| ((*symbol).into(), format!("data_{n}"))).collect()
}

/// Replaces whole words.
fn rename(text: &str, names: &BTreeMap<String, String>) -> String {
    if names.is_empty() {
        return text.into();
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(is_symbol) {
        let len = rest[start..].find(|c| !is_symbol(c)).unwrap_or(rest.len() - start);
        let word = &rest[start..start + len];
        out.push_str(&rest[..start]);
        out.push_str(names.get(word).map_or(word, String::as_str));
        rest = &rest[start + len..];
    }
    out + rest
}

/// How often the register `reg` occurs.
fn uses(body: &str, reg: &str) -> usize {
    body.match_indices(reg).filter(|(i, _)| !body[i + reg.len()..].starts_with(|c: char| c.is_ascii_digit())).count()
}

/// An `activemask` whose result nothing reads: it only kept LLVM from duplicating its block.
fn is_anchor(line: &str, body: &str) -> bool {
    line.strip_prefix("activemask.b32").is_some_and(|r| uses(body, r.trim().trim_end_matches(';')) == 1)
}

/// Stores of 8 or 16 bits of a register that floating-point arithmetic wrote. The assembler takes such a register for a number and
/// stores it converted to an integer of that size, saturating (`F2IP.U8`), where the low bits of the number are meant.
fn narrow_stores(lines: &[String]) -> Vec<&str> {
    let arithmetic = |op: &str| {
        let mut parts = op.split('.');
        matches!(parts.next(), Some("add" | "sub" | "mul" | "fma" | "mad" | "min" | "max" | "abs" | "neg" | "rcp"))
            && op.split('.').any(|part| part == "f32")
    };
    // The instruction's name and its operands, without a predicate.
    let parts = |statement: &str| -> Vec<String> {
        let words = statement.split_whitespace().skip_while(|w| w.starts_with('@') || *w == "{");
        words.map(|w| w.trim_matches(|c| ",{}[]".contains(c)).to_string()).collect()
    };
    let statements = || lines.iter().flat_map(|line| code(line).split(';')).map(str::trim);
    let mut sums = BTreeSet::new();
    for mut parts in statements().map(parts).filter(|parts| parts.len() > 1) {
        if arithmetic(&parts[0]) {
            sums.insert(parts.swap_remove(1));
        }
    }
    let stored = |statement: &&str| {
        parts(statement).split_first().is_some_and(|(op, operands)| {
            op.starts_with("st.")
                && (op.ends_with(".b8") || op.ends_with(".b16"))
                && operands.iter().skip(1).any(|operand| sums.contains(operand))
        })
    };
    statements().filter(stored).collect()
}

/// Numbers the labels of a function by first appearance.
struct Labels(BTreeMap<String, String>);

impl Labels {
    fn renumber(&mut self, line: &str) -> String {
        let mut out = String::with_capacity(line.len());
        let mut rest = line;
        while let Some(start) = rest.find("$L") {
            let len = rest[start..].find(|c| !is_symbol(c)).unwrap_or(rest.len() - start);
            let next = format!("$L{}", self.0.len());
            out.push_str(&rest[..start]);
            out.push_str(self.0.entry(rest[start..start + len].into()).or_insert(next));
            rest = &rest[start + len..];
        }
        out + rest
    }
}

/// Directives of an entry, from its markers.
#[derive(Default)]
struct Directives {
    bounds: Option<(u32, u32)>,
    cluster: Option<u32>,
    aligns: Vec<(String, u32)>,
}

impl Directives {
    fn add(&mut self, marker: &[&str]) -> Result<(), String> {
        let unknown = || format!("unknown marker `{}`", marker.join(" "));
        let number = |s: &str| s.parse::<u32>().map_err(|_| unknown());
        fn once<T: PartialEq>(slot: &mut Option<T>, value: T, what: &str) -> Result<(), String> {
            match slot {
                Some(old) if *old != value => Err(format!("two different markers for {what}")),
                _ => {
                    *slot = Some(value);
                    Ok(())
                }
            }
        }
        match marker {
            ["launch_bounds", threads, blocks] => {
                once(&mut self.bounds, (number(threads)?, number(blocks)?), "launch bounds")
            }
            ["cluster", x] => once(&mut self.cluster, number(x)?, "the cluster size"),
            ["param_align", name, align] => {
                self.aligns.push(((*name).into(), number(align)?));
                Ok(())
            }
            ["arch", "Sm80" | "Sm90a"] | ["trap"] => Ok(()),
            _ => Err(unknown()),
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        if let Some((threads, blocks)) = self.bounds {
            text += &format!(".maxntid {threads}, 1, 1\n");
            if blocks > 0 {
                text += &format!(".minnctapersm {blocks}\n");
            }
        }
        if let Some(x) = self.cluster {
            text += &format!(".reqnctapercluster {x}, 1, 1\n");
        }
        text
    }

    /// The parameter declaration `line` with its alignment raised.
    fn align(&self, line: &str) -> String {
        for (name, align) in &self.aligns {
            if let Some(at) = line.find(".align ")
                && line.trim_start().starts_with(".param")
                && line.contains(&format!(" {name}["))
            {
                let number = at + ".align ".len();
                let end = number + line[number..].find(' ').unwrap_or(0);
                return format!("{}{align}{}", &line[..number], &line[end..]);
            }
        }
        line.into()
    }
}

/// The text of an entry; adds its facts and problems to `module`.
fn entry(item: &Item, module: &mut Module) -> String {
    let mut directives = Directives::default();
    let mut facts = Entry { name: item.symbol.clone(), ..Entry::default() };
    let mut problem = |kind, detail: String| {
        module.problems.push(Problem { entry: item.symbol.clone(), kind, detail });
    };
    for marker in markers(item) {
        if let Err(detail) = directives.add(&marker) {
            problem(Kind::Marker, detail);
        }
    }
    match directives.bounds {
        Some((threads, _)) => facts.max_threads = threads,
        None => problem(Kind::Marker, "no launch bounds".into()),
    }

    // Of the current basic block: whether it holds a convergent instruction of LLVM's own, and a trap that is meant.
    let (mut pinned, mut meant) = (false, false);
    let (mut in_asm, mut panics) = (false, 0);
    for line in &item.lines {
        let t = line.trim_start();
        facts.generic += code(t).split([' ', '\t', ';', '{']).filter(|op| generic(op)).count() as u32;
        if t.starts_with("// begin inline asm") {
            in_asm = true;
        } else if t.starts_with("// end inline asm") {
            in_asm = false;
        } else if t.starts_with("//@trap") {
            meant = true;
        } else if in_asm {
            if code(t).split([' ', '\t', ';']).any(collective) && !pinned {
                problem(Kind::Unpinned, format!("collective assembly outside `sync_ptx!`: {t}"));
            }
        } else if t.starts_with("$L") || words(t).any(|w| w == "bra" || w == "brx") {
            (pinned, meant) = (false, false);
        } else if t.starts_with("activemask") {
            pinned = true;
        } else if t.starts_with("trap;") {
            facts.traps += u32::from(meant);
            panics += u32::from(!meant);
        } else if t.starts_with("call") {
            problem(Kind::Call, code(t).trim_end().into());
        } else if t.starts_with(".local ") {
            problem(Kind::LocalMemory, code(t).trim_end().into());
        }
    }
    for store in narrow_stores(&item.lines) {
        problem(Kind::NarrowStore, format!("an integer instruction belongs between the arithmetic and: {store}"));
    }
    if panics > 0 {
        problem(Kind::Panic, format!("{panics} traps that no `trap()` asks for: bounds checks or divisions"));
    }

    let mut labels = Labels(BTreeMap::new());
    let body = item.lines.join("\n");
    let mut text = String::new();
    let mut opened = false;
    for line in &item.lines {
        let line = code(line).trim_end();
        if line.trim().is_empty() || is_anchor(line.trim_start(), &body) {
            continue;
        }
        if !opened && line.starts_with('{') {
            opened = true;
            text += &directives.text();
        }
        let line = if opened { labels.renumber(line) } else { directives.align(line) };
        text.push_str(&line);
        text.push('\n');
    }
    module.entries.push(facts);
    text
}

/// Names of the entries of a PTX file, in its order.
pub fn entry_names(text: &str) -> Vec<String> {
    text.lines().filter(|l| code(l).contains(".entry ")).map(|l| classify(l).0).collect()
}

/// The text of one entry of a PTX file.
pub fn entry_text<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let start = [".visible .entry ", ".entry "].iter().find_map(|p| text.find(&format!("{p}{name}(")))?;
    let rest = &text[start..];
    Some(&rest[..rest.find("\n}\n").map_or(rest.len(), |end| end + 3)])
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "//\n// Generated by LLVM NVPTX Back-End\n//\n\n.version 8.6\n.target sm_90a\n\
        .address_size 64\n\n";

    fn kernel(name: &str, body: &str) -> String {
        format!(
            "\t// .globl\t{name}\n.visible .entry {name}(\n\t.param .align 16 .b8 {name}_param_0[128]\n)\n{{\n\
             \t.reg .b32 \t%r<30>;\n\n\
             \t// begin inline asm\n\t//@launch_bounds 384 1\n\t//@arch Sm80\n\t// end inline asm\n{body}\tret;\n\n}}\n"
        )
    }

    fn asm(text: &str) -> String {
        format!("\t// begin inline asm\n\t{text}\n\t// end inline asm\n")
    }

    fn module(body: &str) -> Module {
        process(&(HEAD.to_string() + &kernel("k", body)), "sm_90a").unwrap()
    }

    fn kinds(m: &Module) -> Vec<Kind> {
        m.problems.iter().map(|p| p.kind).collect()
    }

    #[test]
    fn markers_become_directives() {
        let m = module(&(asm("//@cluster 2") + &asm("//@param_align k_param_0 64\n\tmov.b64 %rd1, k_param_0;")));
        assert_eq!(m.problems, []);
        assert!(m.text.contains(")\n.maxntid 384, 1, 1\n.minnctapersm 1\n.reqnctapercluster 2, 1, 1\n{"), "{}", m.text);
        assert!(m.text.contains(".param .align 64 .b8 k_param_0[128]"));
        assert!(m.text.contains("mov.b64 %rd1, k_param_0;"));
        assert!(!m.text.contains("//"));
        assert_eq!(m.entries, [Entry { name: "k".into(), max_threads: 384, traps: 0, generic: 0 }]);
    }

    #[test]
    fn no_least_number_of_blocks() {
        let text = HEAD.to_string() + &kernel("k", "").replace("384 1", "384 0");
        let m = process(&text, "sm_90a").unwrap();
        assert!(m.text.contains(".maxntid 384, 1, 1\n{"));
    }

    #[test]
    fn bad_markers_are_found() {
        assert_eq!(kinds(&module(&asm("//@lunch_bounds 1 2"))), [Kind::Marker]);
        assert_eq!(kinds(&module(&asm("//@launch_bounds 128 1"))), [Kind::Marker]);
        assert_eq!(kinds(&module(&asm("//@launch_bounds 384 1"))), []);
        let text = HEAD.to_string() + &kernel("k", "").replace("//@launch_bounds 384 1", "");
        assert_eq!(kinds(&process(&text, "sm_90a").unwrap()), [Kind::Marker]);
    }

    #[test]
    fn entries_for_hopper_are_dropped_elsewhere() {
        let hopper = kernel("h", "\tmov.u64 \t%rd1, table_h;\n").replace("Sm80", "Sm90a");
        let text = HEAD.to_string()
            + ".global .align 4 .b8 table_h[4] = {1, 2, 3, 4};\n.global .align 4 .b8 table_k[4] = {1, 2, 3, 4};\n"
            + &hopper
            + &kernel("k", "\tmov.u64 \t%rd1, table_k;\n");
        let names = |arch| process(&text, arch).unwrap().entries.into_iter().map(|e| e.name).collect::<Vec<_>>();
        assert_eq!(names("sm_90a"), ["h", "k"]);
        assert_eq!(names("sm_80"), ["k"]);
        let portable = process(&text, "sm_80").unwrap().text;
        assert!(portable.contains("table_k[4]") && !portable.contains("table_h"));
    }

    #[test]
    fn only_what_entries_reach_stays() {
        let text = HEAD.to_string()
            + ".func unused()\n{\n\tret;\n}\n"
            + ".global .align 8 .u64 outer[1] = {inner};\n"
            + ".visible .global .align 1 .b8 inner[3] = {\n1, 2,\n3};\n"
            + ".global .align 1 .b8 nobody[1] = {0};\n"
            + ".extern .shared .align 1024 .b8 dynamic[];\n"
            + &kernel("k", "\tmov.u64 \t%rd1, outer;\n\tmov.u64 \t%rd2, dynamic;\n");
        let m = process(&text, "sm_90a").unwrap();
        assert_eq!(m.problems, []);
        for part in ["outer[1] = {inner};", "inner[3] = {\n1, 2,\n3};", ".extern .shared .align 1024 .b8 dynamic[];"] {
            assert!(m.text.contains(part), "{part} not in {}", m.text);
        }
        assert!(!m.text.contains("unused") && !m.text.contains("nobody"));
    }

    #[test]
    fn calls_are_found() {
        let text = HEAD.to_string()
            + ".extern .func panic\n(\n\t.param .b64 a\n)\n;\n"
            + ".func (.param .b32 r) helper(\n\t.param .b64 a\n)\n{\n\tret;\n}\n"
            + &kernel("k", "\tcall.uni panic, (a);\n\tcall.uni (r), helper, (a);\n");
        let m = process(&text, "sm_90a").unwrap();
        let all = m.problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        for part in ["panic: call: does not exist", "helper: call: was not inlined", "k: call: call.uni panic, (a);"] {
            assert!(all.contains(part), "{part} not in {all}");
        }
    }

    #[test]
    fn local_memory_is_found() {
        let m = module("\t.local .align 16 .b8 \t__local_depot0[512];\n");
        assert_eq!(kinds(&m), [Kind::LocalMemory]);
        assert!(m.problems[0].detail.contains("[512]"));
    }

    #[test]
    fn panics_are_told_from_traps() {
        assert_eq!(kinds(&module("\ttrap;\n")), [Kind::Panic]);
        let meant = module(&(asm("//@trap") + "\ttrap;\n\t// end\n\texit;\n"));
        assert_eq!((kinds(&meant), meant.entries[0].traps), (vec![], 1));
        // The marker counts for its own block only.
        assert_eq!(kinds(&module(&(asm("//@trap") + "$L__BB0_1:\n\ttrap;\n"))), [Kind::Panic]);
    }

    #[test]
    fn narrow_stores_of_sums_are_found() {
        let fma = "\tfma.rn.f32 \t%r4, %r1, %r2, 0f4B400000;\n";
        let store = "\t@%p1 st.global.b8 \t[%rd1], %r4;\n";
        assert_eq!(kinds(&module(&format!("{fma}{store}"))), [Kind::NarrowStore]);
        assert_eq!(kinds(&module(&format!("{}{fma}", asm("st.shared.b16 [%rd1], %r4;")))), [Kind::NarrowStore]);
        // Bits of an integer, of a conversion, and of another register; a whole number.
        let prmt = "\tprmt.b32 \t%r5, %r4, 0, 17472;\n\tst.global.b8 \t[%rd1], %r5;\n";
        assert_eq!(kinds(&module(&format!("{fma}{prmt}"))), []);
        assert_eq!(kinds(&module(&format!("\tcvt.rni.sat.s8.f32 \t%r4, %r1;\n{store}"))), []);
        assert_eq!(kinds(&module(&format!("{fma}\tst.global.b8 \t[%rd1], %r40;\n"))), []);
        assert_eq!(kinds(&module(&format!("{fma}\tst.global.b32 \t[%rd1], %r4;\n"))), []);
    }

    #[test]
    fn generic_accesses_are_counted() {
        let with_space = "\tld.global.nc.b32 \t%r1, [%rd1];\n\tst.shared::cta.b32 \t[%r2], %r1;\n\
            \tld.param.b64 \t%rd1, [k_param_0];\n\tatom.acq_rel.gpu.global.add.u32 \t%r1, [%rd1], 1;\n";
        assert_eq!(module(with_space).entries[0].generic, 0);
        let without = "\t@%p1 ld.b32 \t%r1, [%rd1];\n\tst.v4.b32 \t[%rd1], {%r1, %r1, %r1, %r1};\n";
        assert_eq!(
            module(&(without.to_string() + &asm("{ red.release.gpu.add.u32 [%rd1], 1; }"))).entries[0].generic,
            3
        );
    }

    #[test]
    fn collective_assembly_must_be_pinned() {
        let (anchor, fence) = ("\tactivemask.b32 \t%r1;\n", asm("wgmma.fence.sync.aligned;"));
        let pinned = module(&(anchor.to_string() + &fence));
        assert_eq!(kinds(&pinned), []);
        assert!(!pinned.text.contains("activemask"), "an anchor costs nothing");
        assert_eq!(kinds(&module(&fence)), [Kind::Unpinned]);
        assert_eq!(kinds(&module(&format!("{anchor}$L__BB0_2:\n{fence}"))), [Kind::Unpinned]);
        assert_eq!(kinds(&module(&format!("{anchor}\t@%p1 bra \t$L__BB0_2;\n{fence}$L__BB0_2:\n"))), [Kind::Unpinned]);
        assert_eq!(kinds(&module(&asm("{.reg .pred p; bar.sync 0;}"))), [Kind::Unpinned]);
        for single in ["mbarrier.arrive.shared.b64 _, [%r1];", "membar.gl;", "cp.async.mbarrier.arrive.b64 [%r1];"] {
            assert_eq!(kinds(&module(&asm(single))), [], "{single}");
        }
        let read = module("\tactivemask.b32 \t%r1;\n\tst.global.b32 \t[%rd1], %r1;\n");
        assert!(read.text.contains("activemask"), "its result is used");
    }

    #[test]
    fn assembly_may_hold_braces_in_the_first_column() {
        let m = module("\t// begin inline asm\n\t{\n.reg .b32 t;\n}\n\t// end inline asm\n\tadd.s32 %r1, %r2, %r3;\n");
        assert!(m.text.contains("add.s32") && m.entries.len() == 1);
    }

    #[test]
    fn the_same_bytes_whatever_the_compiler_calls_things() {
        let build = |hash: &str, block: u32, swap: bool| {
            let data = [
                format!(".global .align 4 .b8 anon_$_{hash}_$_0[4] = {{1, 2, 3, 4}};\n"),
                format!(".global .align 4 .b8 _ZN3foo3BAR17h{hash}E[4] = {{4, 2, 3, 4}};\n"),
            ];
            let a = kernel(
                "a",
                &format!("\tmov.u64 \t%rd1, anon_$_{hash}_$_0;\n\tbra.uni \t$L__BB{block}_3;\n$L__BB{block}_3:\n"),
            );
            let b = kernel("b", &format!("\tmov.u64 \t%rd1, _ZN3foo3BAR17h{hash}E;\n$L__BB{block}1_1:\n"));
            let parts = if swap { [&data[1], &data[0], &b, &a] } else { [&data[0], &data[1], &a, &b] };
            process(&(HEAD.to_string() + &parts.map(String::as_str).concat()), "sm_90a").unwrap().text
        };
        let text = build("0123456789abcdef", 0, false);
        assert_eq!(text, build("fedcba9876543210", 7, true));
        assert!(text.contains("mov.u64 \t%rd1, data_0;\n\tbra.uni \t$L0;\n$L0:\n"), "{text}");
        assert_eq!(entry_names(&text), ["a", "b"]);
    }

    #[test]
    fn a_module_without_entries_is_its_head() {
        let m = process(&(HEAD.to_string() + ".global .align 1 .b8 x[1] = {0};\n"), "sm_80").unwrap();
        assert_eq!(m.text, ".version 8.6\n.target sm_90a\n.address_size 64\n");
    }

    #[test]
    fn broken_text_is_an_error() {
        let cut = HEAD.to_string() + ".visible .entry k(\n)\n{\n\tret;\n";
        assert!(process(&cut, "sm_80").unwrap_err().to_string().starts_with("PTX line 9:"));
        assert!(process("", "sm_80").is_err());
    }

    #[test]
    fn entries_are_cut_out() {
        let text = module("\tadd.s32 %r1, %r2, %r3;\n").text;
        assert!(entry_text(&text, "k").unwrap().ends_with("\tret;\n}\n"));
        assert_eq!(entry_text(&text, "nope"), None);
    }
}
