//! Drawings as SVG.

use std::path::Path;

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use warploom::ep::eplb::Balance;

const BEFORE: RGBColor = RGBColor(0xd9, 0x8c, 0x4a);
const AFTER: RGBColor = RGBColor(0x2f, 0x6d, 0xa8);

/// The GPUs of one case: of the layer that was the least even before.
pub(crate) struct Panel {
    title: String,
    /// Load of each GPU before and after, as a multiple of the mean.
    bars: Vec<[f64; 2]>,
}

impl Panel {
    pub(crate) fn new(name: String, before: &Balance, after: &Balance) -> Self {
        let imbalance = |layer: usize| before.layers[layer].imbalance;
        let worst =
            (0..before.layers.len()).fold(0, |worst, i| if imbalance(i) > imbalance(worst) { i } else { worst });
        let (before, after) = (&before.layers[worst], &after.layers[worst]);
        let mean = before.gpu_loads.iter().sum::<f64>() / before.gpu_loads.len() as f64;
        let relative = |load: f64| if mean > 0.0 { load / mean } else { 0.0 };
        Panel {
            title: format!(
                "{name}, layer {worst}: imbalance {:.3} before, {:.3} after",
                before.imbalance, after.imbalance
            ),
            bars: before.gpu_loads.iter().zip(&after.gpu_loads).map(|(&b, &a)| [relative(b), relative(a)]).collect(),
        }
    }
}

/// Draws the load of each GPU before and after, one panel below the other.
pub(crate) fn balance(path: &Path, panels: &[Panel]) -> Result<(), String> {
    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::new(path, (960, 300 * panels.len().max(1) as u32)).into_drawing_area();
        root.fill(&WHITE)?;
        for (area, panel) in root.split_evenly((panels.len().max(1), 1)).iter().zip(panels) {
            let highest = panel.bars.iter().flatten().copied().fold(1.0, f64::max);
            let mut chart = ChartBuilder::on(area)
                .caption(&panel.title, ("sans-serif", 18))
                .margin(12)
                .x_label_area_size(36)
                .y_label_area_size(48)
                .build_cartesian_2d(-0.5..panel.bars.len() as f64 - 0.5, 0.0..highest * 1.08)?;
            chart
                .configure_mesh()
                .disable_x_mesh()
                .x_desc("GPU")
                .y_desc("load / mean")
                .x_label_formatter(&|x| if x.fract() == 0.0 { format!("{x:.0}") } else { String::new() })
                .max_light_lines(0)
                .draw()?;
            for (i, (label, colour)) in [("before", BEFORE), ("after", AFTER)].into_iter().enumerate() {
                let left = -0.4 + 0.4 * i as f64;
                chart
                    .draw_series(panel.bars.iter().enumerate().map(|(gpu, bar)| {
                        let x = gpu as f64 + left;
                        Rectangle::new([(x, 0.0), (x + 0.4, bar[i])], colour.filled())
                    }))?
                    .label(label)
                    .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
            }
            chart.draw_series(LineSeries::new([(-0.5, 1.0), (panel.bars.len() as f64 - 0.5, 1.0)], BLACK))?;
            legend(&mut chart, SeriesLabelPosition::UpperRight)?;
        }
        Ok(root.present()?)
    };
    draw().map_err(|e| format!("cannot draw {}: {e}", path.display()))
}

/// Draws the mean imbalance of simulated clusters over their size, a line for each strategy.
pub(crate) fn clusters(path: &Path, series: &[(&str, Vec<(usize, f64)>)]) -> Result<(), String> {
    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::new(path, (960, 480)).into_drawing_area();
        root.fill(&WHITE)?;
        let points = || series.iter().flat_map(|(_, points)| points).copied();
        let doublings = |gpus: usize| (gpus.max(1) as f64).log2();
        let (low, high) = points()
            .fold((f64::MAX, 0f64), |(low, high), (gpus, _)| (low.min(doublings(gpus)), high.max(doublings(gpus))));
        let highest = points().map(|(_, imbalance)| imbalance).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(&root)
            .caption("imbalance of simulated clusters", ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(48)
            .build_cartesian_2d(low.min(high) - 0.1..high + 0.1, 1.0..highest * 1.05)?;
        chart
            .configure_mesh()
            .x_desc("GPUs")
            .y_desc("highest load / mean")
            .x_label_formatter(&|x| format!("{:.0}", x.exp2()))
            .max_light_lines(0)
            .draw()?;
        let colours = [RGBColor(0x80, 0x80, 0x80), AFTER, RGBColor(0x3a, 0x92, 0x5a), BEFORE];
        for ((name, points), colour) in series.iter().zip(colours.into_iter().cycle()) {
            let points = points.iter().map(|&(gpus, imbalance)| (doublings(gpus), imbalance));
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        legend(&mut chart, SeriesLabelPosition::MiddleRight)?;
        Ok(root.present()?)
    };
    draw().map_err(|e| format!("cannot draw {}: {e}", path.display()))
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

fn legend<'a, 'b: 'a>(
    chart: &mut Chart<'a, 'b>,
    position: SeriesLabelPosition,
) -> Result<(), Box<dyn std::error::Error>> {
    Ok(chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?)
}
