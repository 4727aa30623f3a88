//! The report's plots, as SVG.

use super::{Row, Run};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

/// A plot that was written.
#[derive(Debug)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) file: String,
}

/// Cases that differ in one number only: `{prefix}{number}{suffix}`.
struct Series {
    name: &'static str,
    title: &'static str,
    prefix: &'static str,
    suffix: &'static str,
    x: &'static str,
}

const fn series(
    name: &'static str,
    title: &'static str,
    prefix: &'static str,
    suffix: &'static str,
    x: &'static str,
) -> Series {
    Series { name, title, prefix, suffix, x }
}

const TOKENS: &str = "tokens";
/// Of memory alone: [`MEMORY`]; of weights, keys and products: [`PRODUCTS`]. The gate and the sort are neither: they take no time to speak of.
const SERIES: [Series; 17] = [
    series("silu_and_mul", "silu_and_mul, 14336", "activation/silu_and_mul/bf16/", "x14336", TOKENS),
    series("rms_norm", "rms_norm, 8192", "norm/rms_norm/bf16/", "x8192", TOKENS),
    series("fused_add_rms_norm", "fused_add_rms_norm, 8192", "norm/fused_add_rms_norm/bf16/", "x8192", TOKENS),
    series("rotary", "rotary, 32 + 8 heads of 128", "rope/rotary/neox_bf16_angles_bf16/", "x32+8x128", TOKENS),
    series(
        "reshape_and_cache",
        "reshape_and_cache, 8 heads of 128",
        "kv_cache/reshape_and_cache/nhd_bf16_bf16/",
        "x8x128",
        TOKENS,
    ),
    series("sampling", "sampling, k 20, p 0.9, of 128256", "sampling/top_k_top_p/bf16/k20/p0.9/", "x128256", "rows"),
    series("linear", "linear, 4096 to 14336", "gemm/linear/auto/bf16/", "x4096x14336", TOKENS),
    series("linear_logits", "linear, 4096 to 128256", "gemm/linear/auto/bf16/", "x4096x128256", TOKENS),
    series("linear_quant", "linear, e4m3, 4096 to 14336", "gemm/linear_quant/auto/e4m3/rows/", "x4096x14336", TOKENS),
    series("decode", "decode, one sequence, 32 / 8 heads", "attention/decode/bf16/32-8/1x", "", "cached tokens"),
    series("decode_32", "decode, contexts of 4096, 32 / 8 heads", "attention/decode/bf16/32-8/", "x4096", "sequences"),
    series("prefill", "prefill, one prompt, 32 / 8 heads", "attention/prefill/bf16/32-8-128/1x", "", TOKENS),
    series("fused_mixtral", "fused MoE, Mixtral", "moe/fused/auto/mixtral/", "", TOKENS),
    series("fused_qwen3", "fused MoE, Qwen3-30B", "moe/fused/auto/qwen3-30b/", "", TOKENS),
    series("fused_deepseek", "fused MoE, DeepSeek-V3", "moe/fused/auto/deepseek-v3/", "", TOKENS),
    series("gate", "gate, 256 experts in 8 groups", "moe/gate/sigmoid/bf16/256-8-4-8/", "", TOKENS),
    series("sort", "sorting by expert, 8 of 256", "moe/sort/flat/", "x8-256", TOKENS),
];

const MEMORY: &[Series] = SERIES.split_at(6).0;
const PRODUCTS: &[Series] = SERIES.split_at(6).1.split_at(9).0;

impl Series {
    /// Its cases by the number.
    fn rows<'a>(&self, run: &'a Run) -> Vec<(f64, &'a Row)> {
        let number = |case: &str| case.strip_prefix(self.prefix)?.strip_suffix(self.suffix)?.parse::<u32>().ok();
        let mut rows: Vec<_> = run.rows.iter().filter_map(|row| Some((f64::from(number(&row.case)?), row))).collect();
        rows.sort_by(|a, b| a.0.total_cmp(&b.0));
        rows
    }
}

const OURS: RGBColor = RGBColor(0xb0, 0x3a, 0x2e);
const FLOOR: RGBColor = RGBColor(0x99, 0x99, 0x99);
const PALETTE: [RGBColor; 8] = [
    RGBColor(0x1f, 0x4e, 0x79),
    RGBColor(0x2e, 0x8b, 0x57),
    RGBColor(0xc9, 0x8a, 0x1b),
    RGBColor(0x6a, 0x3d, 0x9a),
    RGBColor(0x00, 0x8b, 0x8b),
    RGBColor(0xb2, 0x5d, 0x7d),
    RGBColor(0x55, 0x6b, 0x2f),
    RGBColor(0x70, 0x80, 0x90),
];

/// Draws all plots of which there are points; overviews first.
pub(super) fn all(run: &Run, out: &Path, slug: &str) -> Result<Vec<Plot>> {
    let mut plots = vec![];
    let mut plot = |name: &str, title: String, draw: &dyn Fn(&Path) -> Drawn| -> Result<()> {
        let file = format!("{slug}-{name}.svg");
        draw(&out.join(&file)).map_err(|e| anyhow!("cannot draw {file}: {e}"))?;
        plots.push(Plot { title, file });
        Ok(())
    };
    if run.rows.iter().any(|row| row.speed_up().is_some()) {
        plot("speedup", "time of the best peer by ours".into(), &|file| speed_ups(file, run))?;
    }
    for (name, what, series) in [("ceiling", "bandwidth", MEMORY), ("ceiling-products", "bandwidth or FLOP", PRODUCTS)]
    {
        let there = |s: &&Series| s.rows(run).iter().filter(|(_, row)| row.floor.is_some()).count() > 1;
        let series: Vec<&Series> = series.iter().filter(there).collect();
        if !series.is_empty() {
            let title = format!("percent of the {what} ceiling");
            plot(name, title.clone(), &|file| ceilings(file, &title, run, &series))?;
        }
    }
    for series in &SERIES {
        let rows = series.rows(run);
        if rows.len() > 1 {
            plot(series.name, format!("{}: time", series.title), &|file| times(file, series, &rows))?;
        }
    }
    Ok(plots)
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn power(x: &f64) -> String {
    if *x >= 1.0 { format!("{x:.0}") } else { format!("{x}") }
}

/// One party's times.
struct Line<'a> {
    name: &'a str,
    colour: RGBColor,
    width: u32,
    points: Vec<(f64, f64)>,
}

/// Time against size: ours, every peer, and the floor.
fn times(file: &Path, series: &Series, rows: &[(f64, &Row)]) -> Drawn {
    let mut lines: Vec<Line> = vec![];
    let floor: Vec<_> = rows.iter().filter_map(|(x, row)| Some((*x, row.floor?))).collect();
    let mut peers: Vec<&str> = vec![];
    for (name, _) in rows.iter().flat_map(|(_, row)| &row.peers) {
        if !peers.contains(&name.as_str()) {
            peers.push(name);
        }
    }
    for (i, peer) in peers.iter().enumerate() {
        let time = |row: &Row| row.peers.iter().find(|(name, _)| name == peer).map(|(_, us)| *us);
        let points = rows.iter().filter_map(|(x, row)| Some((*x, time(row)?))).collect();
        lines.push(Line { name: peer, colour: PALETTE[i % PALETTE.len()], width: 2, points });
    }
    let ours = rows.iter().map(|(x, row)| (*x, row.ours)).collect();
    lines.push(Line { name: "warploom", colour: OURS, width: 3, points: ours });

    let ys = || lines.iter().flat_map(|l| &l.points).map(|p| p.1);
    let (low, high) = (ys().fold(f64::MAX, f64::min), ys().fold(0.0, f64::max));
    let (first, last) = (rows[0].0, rows[rows.len() - 1].0);
    let root = SVGBackend::new(file, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("{}, bf16", series.title), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d((first * 0.85..last * 1.2).log_scale(), (low * 0.6..high * 1.6).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(series.x)
        .y_desc("µs")
        .x_label_formatter(&power)
        .y_label_formatter(&power)
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    // Far below what a launch takes, the floor says nothing.
    let floor: Vec<_> = floor.into_iter().filter(|p| p.1 >= low * 0.6).collect();
    if floor.len() > 1 {
        chart
            .draw_series(LineSeries::new(floor, FLOOR.stroke_width(2)))?
            .label("ceiling")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], FLOOR.stroke_width(2)));
    }
    for Line { name, colour, width, points } in lines {
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(width)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(width)));
        chart.draw_series(points.iter().map(|p| Circle::new(*p, 3, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .label_font(("sans-serif", 13))
        .draw()?;
    Ok(root.present()?)
}

/// Percent of the ceiling against size, a line for each operation.
fn ceilings(file: &Path, title: &str, run: &Run, series: &[&Series]) -> Drawn {
    let root = SVGBackend::new(file, (960, 400)).into_drawing_area();
    root.fill(&WHITE)?;
    let lines: Vec<(&Series, Vec<(f64, f64)>)> = series
        .iter()
        .map(|s| (*s, s.rows(run).iter().filter_map(|(x, row)| Some((*x, 100.0 * row.share()?))).collect()))
        .collect();
    let last = lines.iter().flat_map(|l| &l.1).map(|p| p.0).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .margin_right(280)
        .x_label_area_size(40)
        .y_label_area_size(48)
        .build_cartesian_2d((0.85..last * 1.2).log_scale(), 0.0..112.0)?;
    chart
        .configure_mesh()
        .x_desc("tokens, rows or sequences")
        .y_desc("%")
        .x_label_formatter(&power)
        .y_label_formatter(&|y| format!("{y:.0}"))
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    chart.draw_series(LineSeries::new([(0.85, 100.0), (last * 1.2, 100.0)], FLOOR.stroke_width(1)))?;
    for (i, (series, points)) in lines.iter().enumerate() {
        let colour = PALETTE[i % PALETTE.len()];
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(points.iter().map(|p| Circle::new(*p, 3, colour.filled())))?;
        let y = 52 + 24 * i as i32;
        root.draw(&PathElement::new([(690, y), (716, y)], colour.stroke_width(2)))?;
        let style = ("sans-serif", 13).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw(&Text::new(series.title, (724, y), style))?;
    }
    Ok(root.present()?)
}

/// How many times as long the best peer takes: a line for each operation, a dot for each shape.
fn speed_ups(file: &Path, run: &Run) -> Drawn {
    let mut operations: Vec<(String, Vec<f64>)> = vec![];
    for row in &run.rows {
        let Some(speed_up) = row.speed_up() else { continue };
        let name: Vec<&str> = row.case.split('/').take(if row.case.starts_with("moe/fused") { 4 } else { 2 }).collect();
        let name = name.join("/").replace("moe/fused/auto", "moe/fused");
        match operations.iter_mut().find(|(known, _)| *known == name) {
            Some((_, dots)) => dots.push(speed_up),
            None => operations.push((name, vec![speed_up])),
        }
    }
    let all = || operations.iter().flat_map(|(_, dots)| dots).copied();
    let (low, high) = (all().fold(0.8, f64::min), all().fold(2.0, f64::max));
    let count = operations.len();
    let root = SVGBackend::new(file, (960, 90 + 26 * count as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(
            "time of the best peer / time of warploom (right of the line: warploom is quicker)",
            ("sans-serif", 16),
        )
        .margin(12)
        .margin_left(250)
        .x_label_area_size(36)
        .build_cartesian_2d((low * 0.9..high * 1.1).log_scale(), 0.0..count as f64)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_label_formatter(&|x| if *x < 1.0 { format!("{x:.1}") } else { format!("{x:.0}") })
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    chart.draw_series(LineSeries::new([(1.0, 0.0), (1.0, count as f64)], OURS.stroke_width(1)))?;
    for (i, (name, dots)) in operations.iter().enumerate() {
        let y = count as f64 - 0.5 - i as f64;
        let (left, right) = (dots.iter().copied().fold(f64::MAX, f64::min), dots.iter().copied().fold(0.0, f64::max));
        chart.draw_series(LineSeries::new([(left, y), (right, y)], FLOOR.stroke_width(1)))?;
        chart.draw_series(dots.iter().map(|x| Circle::new((*x, y), 4, PALETTE[0].mix(0.6).filled())))?;
        let (_, row) = chart.backend_coord(&(1.0, y));
        let style = ("sans-serif", 13).into_font().color(&BLACK).pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(name.as_str(), (242, row), style))?;
    }
    Ok(root.present()?)
}
