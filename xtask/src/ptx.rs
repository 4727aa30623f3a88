//! `cargo xtask ptx`: kernels to PTX, and `cargo xtask sass`: PTX to machine code.

use crate::allow::AllowList;
use crate::e4m3::with_e4m3;
use crate::folded::{MARKS, number, rewrite, unfold};
use crate::mark::{self, Done, machines};
use crate::table::Table;
use crate::{repo, sources};
use anyhow::{Context as _, Result, bail, ensure};
use cuda_builder::ptx::{Module, Problem, entry_names, entry_text};
use cuda_builder::ptxas::Report;
use cuda_builder::{Arch, CudaBuilder, CudaTools, DeviceToolchain, Error, Options, Pin};
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, mpsc};
use std::time::Instant;

/// Builds the kernels to host/ptx/ARCH/FAMILY.folded.zst, checks them, and records what ptxas says in host/ptx/resources.md
///
/// The files are packed, and stay as they are where the text in them is what the source gives. What was built is in target/ptx/built, as text.
///
/// The compiler is pinned in xtask/device-toolchain.toml; what the machine lacks of it is fetched into
/// target/device-toolchain, or where WARPLOOM_DEVICE_TOOLCHAIN says.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Only this family (repeatable); all unless given
    #[arg(long, value_name = "NAME")]
    pub(crate) family: Vec<String>,
    /// Only this architecture (repeatable): sm_80, sm_90a; all unless given
    #[arg(long, value_name = "ARCH")]
    pub(crate) arch: Vec<String>,
    /// Change nothing; fail if the committed files are not what the source gives
    #[arg(long)]
    pub(crate) check: bool,
    /// Compile only what has other sources than its mark in host/ptx/resources.md, and `conformance` for the newest architecture, which tries the compiler
    #[arg(long, conflicts_with = "table_only")]
    pub(crate) changed: bool,
    /// Compile nothing; only assemble the PTX there is and write the table
    #[arg(long, conflicts_with = "check")]
    pub(crate) table_only: bool,
    /// Assemble every file, also those that were assembled before as they are: the table has their marks
    #[arg(long)]
    pub(crate) assemble: bool,
    /// Only print the committed PTX of a family, for the newest architecture unless `--arch` says another
    #[arg(long, value_name = "FAMILY", conflicts_with_all = ["check", "table_only", "family"])]
    pub(crate) text: Option<String>,
    /// Of that, only this kernel
    #[arg(long, value_name = "NAME", requires = "text", conflicts_with_all = ["check", "table_only", "family"])]
    pub(crate) entry: Option<String>,
    /// Fail where no ptxas is to be had, instead of leaving the table as it is
    #[arg(long)]
    pub(crate) require_ptxas: bool,
    /// A tar archive of the standard library's source, for machines that can fetch it from nowhere
    #[arg(long, value_name = "FILE", env = "WARPLOOM_RUST_SRC")]
    pub(crate) rust_src: Option<PathBuf>,
}

/// Prints the machine code of a kernel, as ptxas makes it from the committed PTX
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SassArgs {
    /// Name of the kernel, or part of it if that names only one
    entry: String,
    /// The machine; what needs Hopper exists for sm_90a only
    #[arg(long, default_value = "sm_90a", value_name = "SM")]
    sm: String,
    /// Print the PTX instead
    #[arg(long)]
    ptx: bool,
}

/// The device toolchain, which is found or installed.
pub(crate) fn toolchain(rust_src: Option<PathBuf>) -> Result<(Pin, DeviceToolchain)> {
    let pin = Pin::read(&repo::root().join("xtask/device-toolchain.toml"))?;
    let options = Options::new(repo::device_toolchain()).rust_src(rust_src);
    let toolchain = DeviceToolchain::obtain(&pin, &options)?;
    Ok((pin, toolchain))
}

/// What is done for one file.
struct Job {
    arch: Arch,
    family: String,
}

impl Job {
    /// The text, below `base`.
    fn file(&self, base: &Path) -> PathBuf {
        base.join(self.arch.name()).join(format!("{}.ptx", self.family))
    }

    /// What a machine gets instead, below `base`.
    fn other_file(&self, base: &Path, sm: &str) -> PathBuf {
        base.join(sm).join(format!("{}.ptx", self.family))
    }

    /// Writes what machines get instead of this text.
    fn write_others(&self, base: &Path, text: &str) -> Result<()> {
        for (sm, _) in machines(self.arch.name()).iter().filter(|(sm, _)| mark::has_e4m3(sm)) {
            let file = self.other_file(base, sm);
            match with_e4m3(text) {
                Some(text) => write_if_changed(&file, &text)?,
                None if file.exists() => fs::remove_file(&file)?,
                None => {}
            }
        }
        Ok(())
    }

    /// The text that a machine gets.
    fn file_for(&self, base: &Path, sm: &str) -> PathBuf {
        let other = self.other_file(base, sm);
        if mark::has_e4m3(sm) && other.exists() { other } else { self.file(base) }
    }

    /// Whether `table` says that its `text` was assembled before, and what came of it.
    fn is_marked(&self, table: &Table, release: &str, text: &str) -> bool {
        let (family, arch) = (&self.family, self.arch.name());
        table.mark(family, arch, Done::Assembled) == Some(&mark::assembled(table, family, arch, release, text))
    }

    /// The committed file.
    fn committed(&self) -> PathBuf {
        committed(self.arch.name(), &self.family)
    }
}

/// The committed file of a family.
fn committed(arch: &str, family: &str) -> PathBuf {
    repo::ptx_dir().join(arch).join(format!("{family}{PACKED}"))
}

/// How the names of committed files end.
const PACKED: &str = ".folded.zst";

/// Higher ones need more memory to unpack, for a thousandth less.
const LEVEL: i32 = 19;

fn pack(text: &str) -> Result<Vec<u8>> {
    ensure!(!text.contains(MARKS), "{MARKS:?} mark folded numbers, and are in the PTX");
    zstd::bulk::compress(fold(text).as_bytes(), LEVEL).context("zstd")
}

fn unpack(packed: &[u8]) -> Result<String> {
    let bytes = zstd::stream::decode_all(packed)?;
    Ok(unfold(std::str::from_utf8(&bytes)?))
}

/// With numbers as differences, as the crate unfolds them.
fn fold(text: &str) -> String {
    rewrite(text, |rest, last, out| {
        let (digits, number) = number(rest)?;
        out.push(MARKS[usize::from(number < last)]);
        *out += &number.abs_diff(last).to_string();
        Some((digits, number))
    })
}

/// The text in a committed file.
fn read_packed(file: &Path) -> Result<String> {
    let name = || file.display().to_string();
    unpack(&fs::read(file).with_context(name)?).with_context(name)
}

/// Writes a committed file, unless the text in it is this one: another release of the encoder may pack the same text in other bytes.
fn write_packed(file: &Path, text: &str) -> Result<()> {
    if read_packed(file).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::create_dir_all(file.parent().context("no folder")?)?;
    fs::write(file, pack(text)?).with_context(|| file.display().to_string())
}

/// What is wrong, in the order found.
#[derive(Default)]
struct Complaints {
    errors: Mutex<Vec<String>>,
}

impl Complaints {
    fn add(&self, complaint: String) {
        println!("    {complaint}");
        self.errors.lock().expect("no panics").push(complaint);
    }

    /// The compiler's warnings, which come once for each file.
    fn warn(&self, warnings: &str) {
        for warning in warnings.split("\n\n").filter(|w| !w.is_empty()) {
            if !self.errors.lock().expect("no panics").iter().any(|known| known == warning) {
                self.add(warning.into());
            }
        }
    }
}

/// Runs `cargo xtask ptx`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let pin = Pin::read(&repo::root().join("xtask/device-toolchain.toml"))?;
    let all = repo::families()?;
    for family in &args.family {
        ensure!(all.contains(family), "no family `{family}`; there are {}", all.join(", "));
    }
    let families: Vec<&String> = all.iter().filter(|f| args.family.is_empty() || args.family.contains(f)).collect();
    let archs = match args.arch.as_slice() {
        [] => pin.archs(),
        names => names.iter().map(|n| pin.arch(n)).collect::<Result<_, _>>()?,
    };
    if let Some(family) = &args.text {
        return print_text(family, args.entry.as_deref(), &all, &archs);
    }
    let whole = args.family.is_empty() && args.arch.is_empty();
    let complaints = Complaints::default();
    let allow = Mutex::new(AllowList::read()?);
    let built = repo::target_dir().join("ptx/built");

    let jobs: Vec<Job> = archs
        .iter()
        .flat_map(|arch| families.iter().map(|f| Job { arch: arch.clone(), family: (*f).clone() }))
        .collect();
    let tools = ptxas(&pin, args.require_ptxas)?;
    let release = &pin.ptxas().version;
    let table = read_table();
    let known = |job: &Job, text: &str| !args.assemble && job.is_marked(&table, release, text);
    let marks = Mutex::new(vec![]);
    let ready = Ready::default();
    let (sender, results) = mpsc::channel();
    let assemble = |sender: mpsc::Sender<_>| {
        while let (Some(tools), Some((job, sm, recorded))) = (&tools, ready.next()) {
            let cubin = repo::target_dir().join(format!("ptx/cubin/{sm}/{}-{}.cubin", job.arch.name(), job.family));
            let report = tools.assemble(&job.file_for(&built, sm), sm, &cubin);
            sender.send((job, sm, recorded, report)).expect("the receiver outlives the threads");
        }
    };
    if args.table_only {
        for job in &jobs {
            let text = read_packed(&job.committed())?;
            write_if_changed(&job.file(&built), &text)?;
            if !known(job, &text) {
                job.write_others(&built, &text)?;
                ready.add(job);
            }
        }
        std::thread::scope(|scope| {
            for _ in 0..cores() {
                let (assemble, sender) = (&assemble, sender.clone());
                scope.spawn(move || assemble(sender));
            }
        });
    } else {
        let (_, toolchain) = toolchain(args.rust_src.clone())?;
        println!("device compiler: {} with the library from {}", toolchain.name(), toolchain.library_origin());
        let compiler = Compiler {
            toolchain: &toolchain,
            families: &all,
            base: &built,
            check: args.check,
            known: args.changed.then_some(&table),
            newest: archs.last(),
            allow: &allow,
            complaints: &complaints,
        };
        ready.expect(archs.len());
        let build = |arch: &Arch, sender| -> Result<()> {
            let mut jobs = jobs.iter().filter(|job| job.arch == *arch);
            let result = jobs.try_for_each(|job| {
                let Compiled { text, mark } = compiler.text(job)?;
                marks.lock().expect("no panics").push((job, mark));
                if let Some(text) = text.filter(|text| !known(job, text)) {
                    job.write_others(&built, &text)?;
                    ready.add(job);
                }
                Ok(())
            });
            ready.compiled();
            assemble(sender);
            result
        };
        // One cargo for each architecture: in one folder, one would wait for the other's lock. Threads that have compiled what they had to
        // assemble, as those do that the machine has cores for.
        std::thread::scope(|scope| {
            for _ in archs.len()..cores() {
                let (assemble, sender) = (&assemble, sender.clone());
                scope.spawn(move || assemble(sender));
            }
            let start = |arch| {
                let (build, sender) = (&build, sender.clone());
                scope.spawn(move || build(arch, sender))
            };
            let threads: Vec<_> = archs.iter().map(start).collect();
            threads.into_iter().try_for_each(|t| t.join().expect("no panics"))
        })?;
    }
    drop(sender);
    let results: Vec<_> = results.into_iter().collect();
    // What nobody took out is not assembled: there is no assembler.
    let table = if ready.is_empty() {
        let mut table = table;
        for (job, mark) in marks.into_inner().expect("no panics") {
            table.set_mark(&job.family, job.arch.name(), Done::Compiled, mark);
        }
        Some(record(table, &jobs, results, &built, release, &allow, &complaints)?)
    } else {
        None
    };
    let entries = jobs.iter().flat_map(|j| entry_names(&fs::read_to_string(j.file(&built)).unwrap_or_default()));
    let entries: BTreeSet<String> = entries.collect();
    if let Some(table) = table {
        // What only the assembler finds is known now.
        for idle in allow.lock().expect("no panics").unused(&entries.iter().cloned().collect::<Vec<_>>()) {
            complaints.add(format!("xtask/ptx-allow.toml: nothing needs the exception for {idle}"));
        }
        finish_table(table, args, &all, whole, &complaints)?;
    }
    if args.check {
        for job in &jobs {
            compare(&job.committed(), &job.file(&built), &complaints);
        }
    }
    if whole {
        strangers(&all, args.check, &pin, &complaints)?;
    }
    let complaints = complaints.errors.into_inner().expect("no panics");
    match complaints.len() {
        0 => println!("PTX: {} entries in {} files, all checks passed", entries.len(), jobs.len()),
        n => bail!("{n} complaints:\n  {}", complaints.join("\n  ")),
    }
    Ok(())
}

/// What is compiled how, and where it goes.
struct Compiler<'a> {
    toolchain: &'a DeviceToolchain,
    families: &'a [String],
    /// Texts go below this folder and, unless only to `check`, into the committed files.
    base: &'a Path,
    check: bool,
    /// The table whose marks are believed, if any are.
    known: Option<&'a Table>,
    /// The architecture for which [`ALWAYS`] is compiled all the same.
    newest: Option<&'a Arch>,
    allow: &'a Mutex<AllowList>,
    complaints: &'a Complaints,
}

/// What a file's sources give.
struct Compiled {
    /// `None` if something is wrong with it.
    text: Option<String>,
    /// The mark, if nothing at all is.
    mark: Option<String>,
}

impl Compiler<'_> {
    /// The text of a file: the committed one, if its mark says that these sources gave it.
    fn text(&self, job: &Job) -> Result<Compiled> {
        let (family, arch) = (&job.family, job.arch.name());
        let sources = sources::fingerprint(&repo::root(), family, self.families)?;
        let tries = family == ALWAYS && Some(&job.arch) == self.newest;
        let known = self.known.filter(|_| !tries).and_then(|t| t.mark(family, arch, Done::Compiled));
        if let Some(known) = known
            && let Ok(text) = read_packed(&job.committed())
        {
            let mark = mark::compiled(arch, &sources, &text);
            if known == mark {
                println!("{arch:8} {family:12} {:4} entries as compiled before", entry_names(&text).len());
                write_if_changed(&job.file(self.base), &text)?;
                return Ok(Compiled { text: Some(text), mark: Some(mark) });
            }
        }
        self.compile(job, &sources)
    }

    fn compile(&self, job: &Job, sources: &str) -> Result<Compiled> {
        let start = Instant::now();
        let (family, arch) = (&job.family, job.arch.name());
        let built = CudaBuilder::new(repo::root().join("kernels-gpu"))
            .toolchain(self.toolchain)
            .arch(job.arch.clone())
            .features([family])
            .target_dir(repo::target_dir().join("ptx"))
            .build()?;
        let Module { text, entries, problems } = &built.module;
        println!(
            "{arch:8} {family:12} {:4} entries {:7.1} KiB {:6.1} s",
            entries.len(),
            text.len() as f64 / 1024.0,
            start.elapsed().as_secs_f64()
        );
        self.complaints.warn(&built.warnings);
        for e in entries.iter().filter(|e| e.generic > 0) {
            println!("    note: {} has {} accesses to memory of unknown kind", e.name, e.generic);
        }
        let unknown = sources::missing(&built.sources, family, self.families)?;
        for file in &unknown {
            self.complaints.add(format!("xtask/src/sources.rs: does not know that {family} has {}", file.display()));
        }
        let mut bad = 0;
        for problem in problems {
            if !self.allow.lock().expect("no panics").allows(problem, None) {
                self.complaints.add(format!("{arch} {family}: {problem}"));
                bad += 1;
            }
        }
        if bad > 0 {
            // What an earlier source gave is not to be taken for it.
            let _ = fs::remove_file(job.file(self.base));
            let rejected = job.file(&repo::target_dir().join("ptx/rejected"));
            println!("    rejected; the text is in {}", rejected.display());
            write_if_changed(&rejected, text)?;
            return Ok(Compiled { text: None, mark: None });
        }
        write_if_changed(&job.file(self.base), text)?;
        if !self.check {
            write_packed(&job.committed(), text)?;
        }
        // Exceptions and warnings would have to be looked at again, and what is in unknown files could change unseen.
        let clean = problems.is_empty() && built.warnings.is_empty() && unknown.is_empty();
        let mark = clean.then(|| mark::compiled(arch, sources, text));
        Ok(Compiled { text: Some(built.module.text), mark })
    }
}

/// The family that is compiled for the newest architecture whatever its mark says: small, and with a bit of everything in `cuda_std`.
const ALWAYS: &str = "conformance";

fn write_if_changed(file: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(file).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::create_dir_all(file.parent().context("no folder")?)?;
    fs::write(file, text).with_context(|| file.display().to_string())
}

/// The assembler; none where there is none, unless it is `required`.
fn ptxas(pin: &Pin, required: bool) -> Result<Option<CudaTools>> {
    let tools = CudaTools::new(pin, repo::device_toolchain());
    match tools.find("ptxas") {
        Ok(_) => Ok(Some(tools)),
        Err(error) if required => Err(error.into()),
        Err(error) => {
            println!("skipping ptxas: {error}");
            Ok(None)
        }
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(8)
}

/// A file to assemble, for which machine, and whether the table records what comes of it.
type Assembly<'a> = (&'a Job, &'static str, bool);

/// What there is to assemble, while others still compile.
#[derive(Default)]
struct Ready<'a> {
    state: Mutex<(VecDeque<Assembly<'a>>, usize)>,
    changed: Condvar,
}

impl<'a> Ready<'a> {
    /// As many threads will say `compiled`.
    fn expect(&self, compiling: usize) {
        self.state.lock().expect("no panics").1 = compiling;
    }

    /// A file is there.
    fn add(&self, job: &'a Job) {
        let machines = machines(job.arch.name()).iter().map(|&(sm, recorded)| (job, sm, recorded));
        self.state.lock().expect("no panics").0.extend(machines);
        self.changed.notify_all();
    }

    /// A thread compiles nothing more.
    fn compiled(&self) {
        self.state.lock().expect("no panics").1 -= 1;
        self.changed.notify_all();
    }

    /// What to assemble next, which may have to be waited for; `None` if nothing will come any more.
    fn next(&self) -> Option<Assembly<'a>> {
        let state = self.state.lock().expect("no panics");
        let nothing = |state: &mut (VecDeque<_>, usize)| state.0.is_empty() && state.1 > 0;
        self.changed.wait_while(state, nothing).expect("no panics").0.pop_front()
    }

    /// Whether nothing waits to be assembled.
    fn is_empty(&self) -> bool {
        self.state.lock().expect("no panics").0.is_empty()
    }
}

/// What came of assembling a file for a machine, and whether the table records it.
type Assembled<'a> = (&'a Job, &'static str, bool, cuda_builder::Result<Report>);

/// The table with what the assembler said, and its marks of the texts below `base` that it has no complaint about. What is wrong with files that were marked
/// before, their rows say.
fn record(
    mut table: Table,
    jobs: &[Job],
    mut results: Vec<Assembled>,
    base: &Path,
    release: &str,
    allow: &Mutex<AllowList>,
    complaints: &Complaints,
) -> Result<Table> {
    let allow = allow.lock().expect("no panics");
    results.sort_by_key(|&(_, sm, ..)| sm);
    for job in jobs {
        let (family, arch) = (&job.family, job.arch.name());
        let complain = |sm: &str, problem: &Problem| {
            let allowed = allow.allows(problem, Some(sm));
            if !allowed {
                complaints.add(format!("{sm} {family}: {problem}"));
            }
            allowed
        };
        let mut results = results.extract_if(.., |result| std::ptr::eq(result.0, job)).peekable();
        if results.peek().is_none() {
            for (sm, problem) in mark::problems(&table, family, arch) {
                complain(sm, &problem);
            }
            continue;
        }
        let mut marked = true;
        for (_, sm, recorded, report) in results {
            let report = match report {
                Ok(report) => report,
                Err(error @ Error::Ptxas { .. }) => {
                    complaints.add(error.to_string());
                    marked = false;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            if recorded {
                // All of them are looked at, so that exceptions are known to be needed.
                let refused = report.problems.iter().filter(|problem| !complain(sm, problem)).count();
                marked &= refused == 0 && mark::rows_tell(&report);
                table.set(family, sm, report.kernels);
            }
        }
        let text = fs::read_to_string(job.file(base)).with_context(|| job.file(base).display().to_string())?;
        let mark = marked.then(|| mark::assembled(&table, family, arch, release, &text));
        table.set_mark(family, arch, Done::Assembled, mark);
    }
    Ok(table)
}

fn table_file() -> PathBuf {
    repo::ptx_dir().join("resources.md")
}

fn read_table() -> Table {
    Table::parse(&fs::read_to_string(table_file()).unwrap_or_default())
}

fn finish_table(mut table: Table, args: &Args, all: &[String], whole: bool, complaints: &Complaints) -> Result<()> {
    if whole {
        table.retain(all);
    }
    if !args.check {
        return write_if_changed(&table_file(), &table.text());
    }
    let committed = fs::read_to_string(table_file()).unwrap_or_default();
    let (old, new) = (committed.lines().collect::<BTreeSet<_>>(), table.text());
    let new = new.lines().collect::<BTreeSet<_>>();
    for (sign, lines) in [('-', old.difference(&new)), ('+', new.difference(&old))] {
        for line in lines {
            complaints.add(format!("host/ptx/resources.md: {sign} {line}"));
        }
    }
    if old != new {
        complaints.add("host/ptx/resources.md is of other sources or texts: run `cargo xtask ptx --changed`".into());
    }
    Ok(())
}

/// Complains of every difference between the committed file and the one just built.
fn compare(committed: &Path, built: &Path, complaints: &Complaints) {
    let name = committed.strip_prefix(repo::root()).unwrap_or(committed).display().to_string();
    let Ok(new) = fs::read_to_string(built) else { return };
    let old = match read_packed(committed) {
        Ok(old) => old,
        Err(error) => return complaints.add(format!("{error:#}: run `cargo xtask ptx`")),
    };
    for difference in differences(&old, &new) {
        complaints.add(format!("{name}: {difference}"));
    }
}

/// How two PTX files differ, entry by entry.
fn differences(old: &str, new: &str) -> Vec<String> {
    if old == new {
        return vec![];
    }
    let (before, after) = (entry_names(old), entry_names(new));
    let mut out = vec![];
    for name in &before {
        if !after.contains(name) {
            out.push(format!("{name} is no longer in the source"));
        }
    }
    for name in &after {
        let (Some(a), Some(b)) = (entry_text(old, name), entry_text(new, name)) else {
            out.push(format!("{name} is not committed"));
            continue;
        };
        if a != b {
            let at = a.lines().zip(b.lines()).position(|(x, y)| x != y);
            let line = |t: &str| at.and_then(|i| t.lines().nth(i)).unwrap_or("(end)").trim().to_string();
            let (x, y) = (a.lines().count(), b.lines().count());
            out.push(format!("{name} differs ({x} lines, now {y}), first in `{}`, now `{}`", line(a), line(b)));
        }
    }
    if out.is_empty() {
        out.push("differs outside of entries".into());
    }
    out
}

/// Files of families or architectures that are no more.
fn strangers(families: &[String], check: bool, pin: &Pin, complaints: &Complaints) -> Result<()> {
    let archs: Vec<Arch> = pin.archs();
    for folder in fs::read_dir(repo::ptx_dir())?.flatten().map(|e| e.path()).filter(|p| p.is_dir()) {
        let known = archs.iter().any(|a| folder.ends_with(a.name()));
        for file in fs::read_dir(&folder)?.flatten().map(|e| e.path()) {
            let name = file.file_name().and_then(|s| s.to_str()).unwrap_or_default();
            let stem = name.strip_suffix(PACKED).unwrap_or_default();
            if known && families.iter().any(|f| f == stem) {
                continue;
            }
            if check {
                complaints.add(format!("{} belongs to no family", file.display()));
            } else {
                fs::remove_file(&file)?;
            }
        }
    }
    Ok(())
}

/// Prints a text, of which readers such as `head` need not read to the end.
fn show(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Prints committed PTX: of the last of `archs`.
fn print_text(family: &String, entry: Option<&str>, families: &[String], archs: &[Arch]) -> Result<()> {
    ensure!(families.contains(family), "no family `{family}`; there are {}", families.join(", "));
    let arch = archs.last().context("no architecture")?.name();
    let text = read_packed(&committed(arch, family))?;
    let text = match entry {
        Some(name) => entry_text(&text, name).with_context(|| format!("no kernel `{name}` in {family} for {arch}"))?,
        None => &text,
    };
    show(text)
}

/// Machine code without its encoding.
fn readable(sass: &str) -> String {
    let lines = sass.lines().map(|l| l.rfind("/* 0x").map_or(l, |at| &l[..at]).trim_end());
    lines.filter(|l| !l.is_empty()).map(|l| format!("{l}\n")).collect()
}

/// The text of a PTX file with one of its entries, and with what is outside of all of them: a file by itself.
fn with_one_entry(text: &str, name: &str) -> Option<String> {
    let mut out = String::new();
    let (mut found, mut within, mut wanted) = (false, false, false);
    for line in text.split_inclusive('\n') {
        let begins = [".visible .entry ", ".entry "].iter().find_map(|p| line.strip_prefix(p));
        if let Some(rest) = begins {
            within = true;
            wanted = rest.strip_prefix(name).is_some_and(|r| r.starts_with('('));
            found |= wanted;
        }
        if wanted || !within {
            out.push_str(line);
        }
        if line.trim_end() == "}" {
            (within, wanted) = (false, false);
        }
    }
    found.then_some(out)
}

/// Runs `cargo xtask sass`.
pub(crate) fn sass(args: &SassArgs) -> Result<()> {
    let pin = Pin::read(&repo::root().join("xtask/device-toolchain.toml"))?;
    let arch = if args.sm == "sm_90a" { "sm_90a" } else { "sm_80" };
    let mut hits = vec![];
    for family in repo::families()? {
        let text = read_packed(&committed(arch, &family))?;
        let names = entry_names(&text);
        hits.extend(names.into_iter().filter(|n| n.contains(&args.entry)).map(|n| (family.clone(), n)));
    }
    let exact = hits.iter().position(|(_, n)| *n == args.entry);
    let (family, entry) = match (exact, hits.as_slice()) {
        (Some(i), _) => &hits[i],
        (None, [hit]) => hit,
        (None, []) => bail!("no kernel `{}` in the PTX of {arch}", args.entry),
        (None, many) => bail!("several: {}", many.iter().map(|h| h.1.as_str()).collect::<Vec<_>>().join(", ")),
    };
    let text = read_packed(&committed(arch, family))?;
    if args.ptx {
        show(entry_text(&text, entry).context("no such entry")?)?;
        return Ok(());
    }
    let tools = CudaTools::new(&pin, repo::device_toolchain());
    // By itself, since ptxas takes minutes for all of a family.
    let file = repo::target_dir().join(format!("ptx/committed/{arch}/{entry}.ptx"));
    write_if_changed(&file, &with_one_entry(&text, entry).context("no such entry")?)?;
    let cubin = repo::target_dir().join(format!("ptx/cubin/{}/{arch}-{entry}.cubin", args.sm));
    let report = tools.assemble(&file, &args.sm, &cubin)?;
    show(&readable(&tools.disassemble(&cubin, Some(entry))?))?;
    for k in &report.kernels {
        println!("{k:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(entries: &[(&str, &str)]) -> String {
        let entries = entries.iter().map(|(n, body)| format!("\n.visible .entry {n}(\n)\n{{\n\t{body}\n\tret;\n}}\n"));
        format!(".version 7.1\n.target sm_80\n{}", entries.collect::<String>())
    }

    #[test]
    fn differences_name_the_entry() {
        let old = file(&[("a", "add;"), ("b", "mul;"), ("c", "x;")]);
        let new = file(&[("a", "add;"), ("b", "fma;"), ("d", "x;")]);
        let all = differences(&old, &new);
        assert_eq!(all.len(), 3, "{all:?}");
        assert_eq!(all[0], "c is no longer in the source");
        assert_eq!(all[1], "b differs (6 lines, now 6), first in `mul;`, now `fma;`");
        assert_eq!(all[2], "d is not committed");
        assert_eq!(differences(&old, &old), Vec::<String>::new());
        assert_eq!(differences(&old, &old.replace("7.1", "7.2")), ["differs outside of entries"]);
    }

    #[test]
    fn one_entry_is_a_file_by_itself() {
        let global = ".global .align 4 .b8 table[8];\n";
        let text = file(&[("k", "add;"), ("k2", "mul;")]) + global + &file(&[("j", "x;")]);
        let one = with_one_entry(&text, "k2").unwrap();
        assert_eq!(entry_names(&one), ["k2"]);
        assert_eq!(entry_text(&one, "k2"), entry_text(&text, "k2"));
        assert!(one.starts_with(".version") && one.contains(global), "{one}");
        assert_eq!(with_one_entry(&text, "k3"), None);
    }

    #[test]
    fn texts_are_packed_and_unpacked() {
        let text = file(&[("a", &"add;".repeat(1000)), ("b", "mul;")]);
        let packed = pack(&text).unwrap();
        assert!(packed.len() < text.len() / 10);
        assert_eq!(unpack(&packed).unwrap(), text);
        assert!(unpack(&packed[1..]).is_err() && unpack(text.as_bytes()).is_err());
        assert!(pack("add.s32 %r^1, %r~2;").is_err());
    }

    #[test]
    fn numbers_are_folded() {
        let text = ".visible .entry a(\n)\n\t.reg .b32 \t%r<9>;\n\tadd.s32 \t%r5, %r3, 7;\n\tadd.s32 \t%r6, %rd4, 8;\n$L2:\n\
                    \tadd.s32 \t%r7, %r4, 9;\n\t@%p1 bra \t$L3;\n";
        let folded = ".visible .entry a(\n)\n\t.reg .b32 \t%r<9>;\n\tadd.s32 \t%r^5, %r~2, 7;\n\tadd.s32 \t%r^1, %rd^4, 8;\n$L^2:\n\
                      \tadd.s32 \t%r^1, %r~3, 9;\n\t@%p^1 bra \t$L^1;\n";
        assert_eq!(fold(text), folded);
        // Entries begin anew.
        assert_eq!(fold(&[text, text].concat()), [folded, folded].concat());
    }

    #[test]
    fn numbers_that_others_write_are_unfolded() {
        for text in [
            "%r4294967295 %r0 %r4294967295 %r4294967296 %r99999999999",
            "%r007 %r0 %r00 %r5 %r007\n%r007 %r0 %r00 %r5",
            "%%r1 $%p2 %_3 %é4 %by_36608 {.reg .b32 %e4m3; mov %e4m3, %a+16, %r7a}",
            "%r1\n%r2\r\n\n%",
        ] {
            assert_eq!(unfold(&fold(text)), text);
        }
    }

    /// What texts are made of, some of which is no PTX.
    const PIECES: &[&str] = &[
        "%r",
        "%rd",
        "$L",
        "%",
        "$",
        "_",
        "0",
        "1",
        "12",
        "429496729",
        "\n",
        "\n.visible .entry k(",
        "add ",
        "<",
        "é",
    ];

    proptest::proptest! {
        #[test]
        fn whatever_is_folded_is_unfolded(pieces in proptest::collection::vec(proptest::sample::select(PIECES), 0..60)) {
            let text = pieces.concat();
            proptest::prop_assert_eq!(unfold(&fold(&text)), text);
        }
    }

    #[test]
    fn a_file_with_the_same_text_stays() {
        let file = repo::target_dir().join("tmp/same-text.folded.zst");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let other_bytes = zstd::bulk::compress(b"text", 1).unwrap();
        fs::write(&file, &other_bytes).unwrap();
        write_packed(&file, "text").unwrap();
        assert_eq!(fs::read(&file).unwrap(), other_bytes);
        write_packed(&file, "texts").unwrap();
        assert_eq!(read_packed(&file).unwrap(), "texts");
        fs::remove_file(file).unwrap();
    }

    /// A table after `norm` for sm_90a was assembled with `found`, or left alone, what was complained of, and whether an exception for spills of `k` idled.
    fn recorded(
        table: &Table,
        found: Option<cuda_builder::Result<Report>>,
        allowed: bool,
    ) -> (Table, Vec<String>, bool) {
        let jobs = [Job { arch: Arch::new("sm_90a", 86), family: "norm".into() }];
        let base = repo::target_dir().join(format!("tmp/recorded-{:?}", std::thread::current().id()));
        write_if_changed(&jobs[0].file(&base), "add;").unwrap();
        let exception = "[[allow]]\nentry = 'k'\nkind = 'spill'\nreason = 'x'\n";
        let allow = Mutex::new(AllowList::parse(if allowed { exception } else { "" }).unwrap());
        let complaints = Complaints::default();
        let results = found.map(|report| (&jobs[0], "sm_90a", true, report)).into_iter().collect();
        let table = record(table.clone(), &jobs, results, &base, "1.2", &allow, &complaints).unwrap();
        fs::remove_dir_all(base).unwrap();
        let idle = !allow.into_inner().unwrap().unused(&["k".into()]).is_empty();
        (table, complaints.errors.into_inner().unwrap(), idle)
    }

    fn report(spills: u32, warning: &str) -> cuda_builder::Result<Report> {
        Ok(cuda_builder::ptxas::parse_report(&format!(
            "{warning}ptxas info    : Compiling entry function 'k' for 'sm_90a'\n    {spills} bytes stack frame, {spills} bytes \
             spill stores, {spills} bytes spill loads\nptxas info    : Used 24 registers\n"
        )))
    }

    fn is_known(table: &Table, text: &str) -> bool {
        Job { arch: Arch::new("sm_90a", 86), family: "norm".into() }.is_marked(table, "1.2", text)
    }

    #[test]
    fn files_without_complaints_are_marked() {
        let (table, complaints, _) = recorded(&Table::default(), Some(report(0, "")), false);
        assert!(complaints.is_empty() && is_known(&table, "add;") && !is_known(&table, "adc;"));
        // The mark goes with the table's text, and a number changed there is another.
        assert!(is_known(&Table::parse(&table.text()), "add;"));
        assert!(!is_known(&Table::parse(&table.text().replace("| 24 |", "| 23 |")), "add;"));
        let failed = Error::Ptxas { file: "k.ptx".into(), sm: "sm_90a".into(), output: "no".into() };
        for found in [report(4, ""), Err(failed)] {
            let (table, complaints, _) = recorded(&table, Some(found), false);
            assert!(complaints.len() == 1 && table.mark("norm", "sm_90a", Done::Assembled).is_none(), "{complaints:?}");
        }
    }

    #[test]
    fn exceptions_are_looked_up_for_marked_files_as_well() {
        let (spilling, complaints, idle) = recorded(&Table::default(), Some(report(4, "")), true);
        assert!(complaints.is_empty() && !idle && is_known(&spilling, "add;"));
        let (table, complaints, idle) = recorded(&spilling, None, true);
        assert!(complaints.is_empty() && !idle && table == spilling);
        let (_, complaints, _) = recorded(&spilling, None, false);
        assert_eq!(complaints.len(), 1, "the exception is no longer there");
        let (clean, complaints, idle) = recorded(&spilling, Some(report(0, "")), true);
        assert!(complaints.is_empty() && idle && is_known(&clean, "add;"));
        assert!(recorded(&clean, None, true).2, "nothing needs the exception");
    }

    #[test]
    fn files_with_warnings_are_assembled_each_time() {
        let warning = "ptxas warning : registers are few in 'k'\n";
        let (table, complaints, _) = recorded(&Table::default(), Some(report(0, warning)), false);
        assert!(complaints.len() == 1 && table.mark("norm", "sm_90a", Done::Assembled).is_none());
    }

    #[test]
    fn machine_code_without_its_encoding() {
        let sass = "\t\tFunction : k\n        /*0000*/       MOV R1, R2 ;   /* 0x00fe */\n        /* 0x000fc */\n";
        assert_eq!(readable(sass), "\t\tFunction : k\n        /*0000*/       MOV R1, R2 ;\n");
    }
}
