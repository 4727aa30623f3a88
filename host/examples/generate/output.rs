//! What is shown: text as it comes, a progress display on a terminal, JSON at the end.

use super::arguments::Arguments;
use super::runtime::engine::{Event, Finish};
use super::runtime::problem::{Problem, Result};
use super::runtime::text::{Streamed, Text};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{IsTerminal, Write};

/// Logits of an object.
const TOP: usize = 32;

/// The largest logits of a position, largest first.
#[derive(Serialize)]
struct TopLogits {
    ids: Vec<usize>,
    values: Vec<f32>,
}

/// One sequence, as JSON.
#[derive(Serialize)]
struct Object<'a> {
    prompt_ids: &'a [u32],
    ids: &'a [u32],
    text: String,
    last_logits_top32: TopLogits,
    finish: Option<Finish>,
}

/// Receives what the engine does.
pub struct Output<'a> {
    text: &'a Text,
    prompts: &'a [Vec<u32>],
    ids: Vec<Vec<u32>>,
    finish: Vec<Option<Finish>>,
    json: bool,
    batch: bool,
    /// The text of a single prompt.
    streamed: Streamed,
    bar: ProgressBar,
    done: usize,
}

fn written<T>(result: std::io::Result<T>) -> Result<T> {
    result.map_err(|e| Problem::Failure(format!("cannot write: {e}")))
}

impl<'a> Output<'a> {
    /// Starts the display.
    pub fn new(arguments: &Arguments, prompts: &'a [Vec<u32>], text: &'a Text) -> Self {
        let (json, batch) = (arguments.json, arguments.is_batch());
        let bar = ProgressBar::new(prompts.len().saturating_mul(arguments.tokens) as u64);
        let shown =
            if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        bar.set_draw_target(shown);
        let style = "{spinner} {msg} {wide_bar} {pos}/{len} tokens, {per_sec}";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
        bar.set_message(if batch { format!("0/{} prompts", prompts.len()) } else { "loading".into() });
        bar.enable_steady_tick(std::time::Duration::from_millis(100));
        let ids = vec![vec![]; prompts.len()];
        let finish = vec![None; prompts.len()];
        Self { text, prompts, ids, finish, json, batch, streamed: Streamed::default(), bar, done: 0 }
    }

    /// Takes the events of a step.
    ///
    /// # Errors
    /// If standard output is closed.
    pub fn take(&mut self, events: &[Event]) -> Result<()> {
        for event in events {
            match *event {
                Event::Token(id, token) => {
                    self.ids[id].push(token);
                    self.bar.inc(1);
                    if !self.json && !self.batch {
                        self.stream(token)?;
                    } else if !self.batch {
                        self.bar.set_message("writing");
                    }
                }
                Event::Prefilled(_) => {}
                Event::Finished(id, finish) => {
                    self.finish[id] = Some(finish);
                    self.done += 1;
                    if self.batch {
                        self.bar.set_message(format!("{}/{} prompts", self.done, self.prompts.len()));
                    }
                }
            }
        }
        Ok(())
    }

    /// One more token of the only prompt, on standard output.
    fn stream(&mut self, token: u32) -> Result<()> {
        let mut out = std::io::stdout().lock();
        if self.ids[0].len() == 1 {
            // The text has the terminal to itself from here on.
            self.bar.finish_and_clear();
            written(write!(out, "{}", self.text.decode(&self.prompts[0])))?;
        }
        let new = self.streamed.push(self.text, token);
        written(write!(out, "{new}").and_then(|()| out.flush()))
    }

    /// Tokens generated so far.
    pub fn generated(&self) -> usize {
        self.ids.iter().map(Vec::len).sum()
    }

    /// Writes what is left to write, and on standard error which texts had no room; `logits` are those of the prompts' last positions.
    ///
    /// # Errors
    /// If standard output is closed.
    pub fn finish(&mut self, logits: &[Vec<f32>]) -> Result<()> {
        self.write(logits)?;
        let full = |why| self.finish.iter().filter(|f| **f == Some(why)).count();
        for (n, what) in [
            (full(Finish::Cache), "the cache is full: --blocks makes it larger"),
            (full(Finish::Context), "the model's context is full"),
        ] {
            if n > 0 {
                eprintln!("note: {n} of {} texts end early, since {what}", self.prompts.len());
            }
        }
        Ok(())
    }

    fn write(&mut self, logits: &[Vec<f32>]) -> Result<()> {
        self.bar.finish_and_clear();
        let mut out = std::io::stdout().lock();
        if self.json {
            let object = |i: usize| Object {
                prompt_ids: &self.prompts[i],
                ids: &self.ids[i],
                text: self.text.decode(&self.ids[i]),
                last_logits_top32: top(&logits[i]),
                finish: self.finish[i],
            };
            let objects: Vec<Object<'_>> = (0..self.prompts.len()).map(object).collect();
            let json = if self.batch { serde_json::to_string(&objects) } else { serde_json::to_string(&objects[0]) };
            let json = json.map_err(|e| Problem::Failure(format!("cannot write JSON: {e}")))?;
            return written(writeln!(out, "{json}"));
        }
        if !self.batch {
            return written(writeln!(out, "{}", self.streamed.finish(self.text)));
        }
        for (prompt, ids) in self.prompts.iter().zip(&self.ids) {
            written(writeln!(out, "{}{}\n", self.text.decode(prompt), self.text.decode(ids)))?;
        }
        Ok(())
    }
}

/// The largest logits; of equal ones the lower id first.
fn top(logits: &[f32]) -> TopLogits {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    ids.truncate(TOP);
    TopLogits { values: ids.iter().map(|&i| logits[i]).collect(), ids }
}
