//! `cargo xtask report`: tables and plots of our times and peers', measured in one run on one GPU.
//!
//! A folder of JSON lines goes in: records of the bench binary (`benches/harness.rs`) and of `benches/peers/peers.py`, which
//! name cases alike; `bundle/run.sh report` writes such a folder. Markdown and SVG come out. What a case moves and
//! computes, and the least time that an H200 could take, are the bench binary's.

mod plot;

use crate::repo;
use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Makes tables and plots of the times that `bundle/run.sh report` measured, ours and peers'
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The folder that `bundle/run.sh report` wrote
    #[arg(value_name = "FOLDER")]
    from: PathBuf,
    /// Where to
    #[arg(long, default_value = "docs/benchmarks", value_name = "FOLDER")]
    out: PathBuf,
}

/// A line of the bench binary's or of a peer's file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Machine { machine: Machine },
    Missing { missing: String, why: String },
    Record(Record),
}

#[derive(Clone, Debug, Deserialize)]
struct Machine {
    cpu: String,
    versions: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Record {
    device: String,
    driver: String,
    date: String,
    case: String,
    /// Not there in our own records.
    peer: Option<String>,
    median_us: f64,
    #[serde(default)]
    floor_us: f64,
    #[serde(default)]
    burst: bool,
}

/// One case: our time, and those of the peers that were measured.
#[derive(Debug)]
struct Row {
    case: String,
    ours: f64,
    /// The least time that an H200 could take.
    floor: Option<f64>,
    peers: Vec<(String, f64)>,
}

impl Row {
    /// The quickest peer and its time.
    fn best(&self) -> Option<(&str, f64)> {
        self.peers.iter().map(|(name, us)| (name.as_str(), *us)).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// How many times as long the best peer takes.
    fn speed_up(&self) -> Option<f64> {
        self.best().map(|(_, us)| us / self.ours)
    }

    /// Whether every peer is put together from PyTorch's operations, launched one by one.
    fn only_eager(&self) -> bool {
        self.peers.iter().all(|(name, _)| name.starts_with("torch") && name != "torch.compile")
    }

    /// Which part of the ceiling is reached.
    fn share(&self) -> Option<f64> {
        self.floor.map(|floor| floor / self.ours)
    }

    /// The case without its shape, and the shape.
    fn split(&self) -> (&str, &str) {
        self.case.rsplit_once('/').unwrap_or(("", &self.case))
    }
}

/// Everything that one run said.
#[derive(Debug, Default)]
struct Run {
    device: String,
    driver: String,
    date: String,
    machine: Option<Machine>,
    missing: Vec<(String, String)>,
    /// What was built, if the folder says.
    version: Option<String>,
    rows: Vec<Row>,
    /// Cases measured in bursts.
    bursts: Vec<Row>,
}

impl Run {
    fn rows_of(&mut self, burst: bool) -> &mut Vec<Row> {
        if burst { &mut self.bursts } else { &mut self.rows }
    }
}

/// Runs `cargo xtask report`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut texts = vec![];
    for entry in std::fs::read_dir(&args.from).with_context(|| args.from.display().to_string())?.flatten() {
        if entry.path().extension().is_some_and(|e| e == "jsonl") {
            texts.push((entry.path(), std::fs::read_to_string(entry.path())?));
        }
    }
    ensure!(!texts.is_empty(), "{} holds no *.jsonl", args.from.display());
    texts.sort();
    let mut run = read(&texts)?;
    run.version = std::fs::read_to_string(args.from.join("version.txt")).ok().map(|v| v.trim().into());

    let out = repo::root().join(&args.out);
    std::fs::create_dir_all(&out).with_context(|| format!("{} cannot be a folder", out.display()))?;
    let slug = slug(&run.device);
    let plots = plot::all(&run, &out, &slug)?;
    let file = out.join(format!("{slug}.md"));
    std::fs::write(&file, markdown(&run, &plots)?)?;
    println!("{}: {} cases, {} plots", file.display(), run.rows.len(), plots.len());
    Ok(())
}

/// Reads records; the last one of a case and a peer counts.
fn read(files: &[(PathBuf, String)]) -> Result<Run> {
    let mut run = Run::default();
    let mut peers: Vec<Record> = vec![];
    for (file, text) in files {
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let parsed = serde_json::from_str(line);
            match parsed.with_context(|| format!("{}, line {}", file.display(), number + 1))? {
                Line::Machine { machine } => run.machine = Some(machine),
                Line::Missing { missing, why } => {
                    run.missing.retain(|(name, _)| *name != missing);
                    run.missing.push((missing, why));
                }
                Line::Record(record) => {
                    ensure!(record.median_us > 0.0, "{}: a time of {} µs", record.case, record.median_us);
                    if run.device.is_empty() {
                        (run.device, run.driver) = (record.device.clone(), record.driver.clone());
                    }
                    if record.device != run.device {
                        bail!("records of {} and of {}: one run is on one GPU", run.device, record.device);
                    }
                    run.date = run.date.max(record.date.clone());
                    if record.peer.is_some() {
                        peers.push(record);
                        continue;
                    }
                    let rows = run.rows_of(record.burst);
                    rows.retain(|row| row.case != record.case);
                    let floor = Some(record.floor_us).filter(|us| *us > 0.0 && record.device.contains("H200"));
                    rows.push(Row { case: record.case, ours: record.median_us, floor, peers: vec![] });
                }
            }
        }
    }
    for record in peers {
        let rows = run.rows_of(record.burst);
        let Some(row) = rows.iter_mut().find(|row| row.case == record.case) else { continue };
        let name = record.peer.unwrap_or_default();
        row.peers.retain(|(known, _)| *known != name);
        row.peers.push((name, record.median_us));
    }
    ensure!(!run.rows.is_empty(), "no records of the bench binary, but perhaps of bursts, which go with the others");
    Ok(run)
}

/// `cuda:0 (NVIDIA H200)` is `h200`.
fn slug(device: &str) -> String {
    let name = device.rsplit_once('(').map_or(device, |(_, name)| name.trim_end_matches(')'));
    let name = name.trim_start_matches("NVIDIA ").to_lowercase();
    name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
}

/// A time in µs to three figures.
fn micros(us: f64) -> String {
    match us {
        us if us >= 99.95 => format!("{us:.0}"),
        us if us >= 9.995 => format!("{us:.1}"),
        us => format!("{us:.2}"),
    }
}

fn markdown(run: &Run, plots: &[plot::Plot]) -> Result<String> {
    let mut out = String::new();
    let name = run.device.rsplit_once('(').map_or(run.device.as_str(), |(_, name)| name.trim_end_matches(')'));
    writeln!(out, "# {name}\n")?;
    writeln!(out, "Made by `cargo xtask report`; do not edit. To measure again, on a machine with this GPU:\n")?;
    writeln!(out, "```sh")?;
    writeln!(out, "cargo xtask bundle                        # anywhere; copy bundle/ to the machine")?;
    writeln!(
        out,
        "bundle/run.sh report FOLDER               # there: ours, then the peers that are installed, on one GPU;"
    )?;
    writeln!(out, "                                          # then exchange and NCCL, where there are several")?;
    writeln!(out, "cargo xtask report FOLDER                 # anywhere: this page\n```\n")?;

    writeln!(out, "| | |\n| --- | --- |")?;
    writeln!(out, "| date | {} |\n| driver | {} |", run.date.split('T').next().unwrap_or_default(), run.driver)?;
    if let Some(version) = &run.version {
        writeln!(out, "| warploom | {version} |")?;
    }
    if let Some(machine) = &run.machine {
        for (what, version) in &machine.versions {
            writeln!(out, "| {what} | {version} |")?;
        }
        writeln!(out, "| CPU | {} |", machine.cpu)?;
    }
    out.push_str(
        "\nMedians of one launch in µs, replays of a CUDA graph that launches on up to twenty sets of inputs in turn; peers are timed in\n\
         the same way, for as long, on inputs of the same kind, after all of ours ([`harness.rs`](../../benches/harness.rs), \
         [`peers.py`](../../benches/peers/peers.py); they have four to twenty sets\nof inputs, at least 200 MB). *Best peer* is its time by \
         ours: above 1\nwe are quicker. *Of the ceiling* is the least time that an H200 could take by ours: bytes moved once at 4.64 TB/s \
         read, 3.9 TB/s copied,\nor products at 807 TFLOP/s in bf16 and 1513 in e4m3; it may be a little above 100 %, as those are rates of plain copies and of cuBLAS. `torch` is PyTorch's eager mode, `triton` the small kernels in \
         [`kernels.py`](../../benches/peers/kernels.py),\n`flash` and `cudnn` PyTorch's attention over contiguous keys (ours reads pages).\n",
    );
    let compared: Vec<f64> = run.rows.iter().filter_map(Row::speed_up).collect();
    if !compared.is_empty() {
        let mean = geometric_mean(&compared);
        let behind = compared.iter().filter(|x| **x < 0.98).count();
        let level = compared.iter().filter(|x| (0.98..=1.02).contains(*x)).count();
        let (ahead, all) = (compared.len() - behind - level, compared.len());
        write!(
            out,
            "\nOf {all} cases with a peer {ahead} are more than 2 % quicker than the best one, {level} within 2 %, {behind} slower; the \
             geometric mean is {mean:.2}."
        )?;
        let tuned: Vec<f64> = run.rows.iter().filter(|row| !row.only_eager()).filter_map(Row::speed_up).collect();
        if !tuned.is_empty() && tuned.len() < all {
            let (eager, mean) = (all - tuned.len(), geometric_mean(&tuned));
            write!(out, " {eager} have no peer but eager PyTorch; the mean of the others is {mean:.2}.")?;
        }
        out.push_str("\n\n");
    }
    summary(&mut out, run)?;
    for plot in plots {
        writeln!(out, "![{}]({})\n", plot.title, plot.file)?;
    }

    let mut families: Vec<&str> = vec![];
    for family in run.rows.iter().map(|row| row.case.split('/').next().unwrap_or_default()) {
        if !families.contains(&family) {
            families.push(family);
        }
    }
    for family in families {
        writeln!(out, "## {family}\n")?;
        let rows: Vec<&Row> = run.rows.iter().filter(|row| row.case.split('/').next() == Some(family)).collect();
        tables(&mut out, &rows)?;
    }
    if !run.bursts.is_empty() {
        out.push_str(
            "## In bursts\n\nLarge products, replayed on and on, bring a GPU to its power limit: the times above. Here it rests for 0.1 s before each \
             replay of some 5 ms, or\none launch, ours and peers' alike; the median of ten.\n\n",
        );
        tables(&mut out, &run.bursts.iter().collect::<Vec<_>>())?;
    }
    if !run.missing.is_empty() {
        writeln!(out, "## Not measured\n")?;
        for (what, why) in &run.missing {
            writeln!(out, "- {what}: {why}")?;
        }
    }
    Ok(out)
}

/// `moe/gate/sigmoid/bf16/..` is `moe/gate`.
fn operation(case: &str) -> &str {
    case.match_indices('/').nth(1).map_or(case, |(at, _)| &case[..at])
}

fn geometric_mean(values: &[f64]) -> f64 {
    (values.iter().map(|x| x.ln()).sum::<f64>() / values.len() as f64).exp()
}

/// A row for each operation that has peers.
fn summary(out: &mut String, run: &Run) -> Result<()> {
    let mut operations: Vec<&str> = vec![];
    for row in run.rows.iter().filter(|row| row.best().is_some()) {
        if !operations.contains(&operation(&row.case)) {
            operations.push(operation(&row.case));
        }
    }
    if operations.is_empty() {
        return Ok(());
    }
    writeln!(out, "| operation | cases | best peer, mean | worst | best | of the ceiling, mean |")?;
    writeln!(out, "| --- | ---: | ---: | ---: | ---: | ---: |")?;
    for name in operations {
        let rows = || run.rows.iter().filter(|row| operation(&row.case) == name);
        let mut speed_ups: Vec<f64> = rows().filter_map(Row::speed_up).collect();
        speed_ups.sort_by(f64::total_cmp);
        let shares: Vec<f64> = rows().filter(|row| row.best().is_some()).filter_map(Row::share).collect();
        let share = if shares.is_empty() { String::new() } else { format!("{:.0} %", 100.0 * geometric_mean(&shares)) };
        let (worst, best) = (speed_ups[0], speed_ups[speed_ups.len() - 1]);
        let (count, mean) = (speed_ups.len(), geometric_mean(&speed_ups));
        writeln!(out, "| {name} | {count} | {mean:.2} | {worst:.2} | {best:.2} | {share} |")?;
    }
    out.push('\n');
    Ok(())
}

/// A table for each operation.
fn tables(out: &mut String, rows: &[&Row]) -> Result<()> {
    let mut groups: Vec<&str> = vec![];
    for (group, _) in rows.iter().map(|row| row.split()) {
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups.into_iter().try_for_each(|group| {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.split().0 == group).copied().collect();
        table(out, group, &rows)
    })
}

/// The cases of one operation, a column for each peer.
fn table(out: &mut String, group: &str, rows: &[&Row]) -> Result<()> {
    let mut peers: Vec<&str> = vec![];
    for (name, _) in rows.iter().flat_map(|row| &row.peers) {
        if !peers.contains(&name.as_str()) {
            peers.push(name);
        }
    }
    let any = !peers.is_empty();
    let heads: String = peers.iter().map(|name| format!(" {name} |")).collect();
    writeln!(out, "| {group} | ours |{heads}{} of the ceiling |", if any { " best peer |" } else { "" })?;
    writeln!(out, "| --- | ---: |{} ---: |", " ---: |".repeat(peers.len() + usize::from(any)))?;
    for row in rows {
        write!(out, "| {} | {} |", row.split().1, micros(row.ours))?;
        for peer in &peers {
            let us = row.peers.iter().find(|(name, _)| name == peer).map(|(_, us)| micros(*us));
            write!(out, " {} |", us.unwrap_or_default())?;
        }
        if any {
            write!(out, " {} |", row.speed_up().map(|x| format!("{x:.2}")).unwrap_or_default())?;
        }
        writeln!(out, " {} |", row.share().map(|x| format!("{:.0} %", 100.0 * x)).unwrap_or_default())?;
    }
    out.push('\n');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = r#"{"device":"cuda:0 (NVIDIA H200)","driver":"580.1","date":"2026-11-20T12:00:00Z","case":"norm/rms_norm/bf16/16x8192","median_us":3.0,"floor_us":0.5,"sets":20}
{"device":"cuda:0 (NVIDIA H200)","driver":"580.1","date":"2026-11-21T12:00:00Z","case":"norm/rms_norm/bf16/16x8192","median_us":2.0,"floor_us":0.5,"sets":20}
{"device":"cuda:0 (NVIDIA H200)","driver":"580.1","date":"2026-11-21T12:00:00Z","case":"norm/rms_norm/bf16/256x8192","median_us":4.0,"floor_us":2.0,"sets":20}
"#;
    const PEERS: &str = r#"{"machine":{"device":"cuda:0 (NVIDIA H200)","driver":"580.1","cpu":"a CPU","memory_bytes":1,"versions":{"torch":"2.11"}}}
{"missing":"triton","why":"not installed"}
{"device":"cuda:0 (NVIDIA H200)","driver":"580.1","date":"2026-11-21T12:00:00Z","case":"norm/rms_norm/bf16/16x8192","peer":"torch","median_us":5.0}
{"device":"cuda:0 (NVIDIA H200)","driver":"580.1","date":"2026-11-21T12:00:00Z","case":"other","peer":"torch","median_us":5.0}
"#;

    fn files(texts: &[&str]) -> Vec<(PathBuf, String)> {
        texts.iter().map(|t| (PathBuf::from("a.jsonl"), (*t).to_string())).collect()
    }

    #[test]
    fn records_of_one_case_meet() {
        let run = read(&files(&[PEERS, OURS])).unwrap();
        assert_eq!(run.rows.len(), 2);
        let row = run.rows.iter().find(|r| r.case.ends_with("16x8192")).unwrap();
        assert_eq!(
            (row.ours, row.best(), row.speed_up(), row.share()),
            (2.0, Some(("torch", 5.0)), Some(2.5), Some(0.25))
        );
        let text = markdown(&run, &[]).unwrap();
        assert!(text.contains("| 16x8192 | 2.00 | 5.00 | 2.50 | 25 % |"), "{text}");
        assert!(text.contains("| 256x8192 | 4.00 |  |  | 50 % |"), "{text}");
        assert!(text.contains("| norm/rms_norm | 1 | 2.50 | 2.50 | 2.50 | 25 % |"), "{text}");
        assert!(text.contains("- triton: not installed") && text.contains("| torch | 2.11 |"), "{text}");
    }

    #[test]
    fn bursts_are_apart() {
        let burst = |text: &str| text.replace("\"median_us\":", "\"burst\":true,\"median_us\":");
        let run = read(&files(&[OURS, PEERS, &burst(OURS), &burst(PEERS)])).unwrap();
        assert_eq!((run.rows.len(), run.bursts.len(), run.bursts[0].peers.len()), (2, 2, 1));
        let text = markdown(&run, &[]).unwrap();
        let (above, below) = text.split_once("## In bursts").unwrap();
        assert!(above.contains("| 16x8192 |") && below.contains("| 16x8192 |"), "{text}");
        assert!(above.contains("Of 1 cases with a peer"), "{text}");
    }

    #[test]
    fn bad_input_is_refused() {
        assert!(read(&files(&[PEERS])).unwrap_err().to_string().contains("no records"));
        assert!(read(&files(&["{}"])).unwrap_err().to_string().contains("line 1"));
        let other = OURS.replace("H200", "H100");
        assert!(read(&files(&[OURS, &other])).unwrap_err().to_string().contains("one run is on one GPU"));
    }

    #[test]
    fn names_and_numbers() {
        assert_eq!(slug("cuda:0 (NVIDIA H200)"), "h200");
        assert_eq!(slug("cuda:1 (NVIDIA GeForce RTX 4090)"), "geforce-rtx-4090");
        assert_eq!([1.234, 12.34, 123.4].map(micros), ["1.23", "12.3", "123"]);
    }
}
