//! Text to ids, and ids to text as they come.
//!
//! With byte-level tokens a character may be spread over several; text is given out once it is whole.

use super::problem::{Result, input};
use std::path::Path;
use tokenizers::Tokenizer;

/// A tokenizer and the token that begins and ends every sequence.
pub struct Text {
    tokenizer: Tokenizer,
    eos: u32,
}

impl Text {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// [`Problem::Input`](super::problem::Problem::Input) for a file that is not there or no tokenizer, or one without the
    /// token `eos` or with more than `vocab` tokens.
    pub fn read(path: &Path, eos: &str, vocab: usize) -> Result<Self> {
        let shown = path.display();
        let bytes = std::fs::read(path).or_else(|e| input(format!("cannot read {shown}: {e}")))?;
        let tokenizer = Tokenizer::from_bytes(bytes).or_else(|e| input(format!("{shown} is no tokenizer: {e}")))?;
        if tokenizer.get_vocab_size(true) > vocab {
            return input(format!("{shown} has more tokens than the {vocab} of config.json"));
        }
        match tokenizer.token_to_id(eos) {
            Some(eos) => Ok(Self { tokenizer, eos }),
            None => input(format!("{shown} has no token \"{eos}\", which config.json calls the end of a text")),
        }
    }

    /// The id of the token that begins and ends a sequence.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// The ids of a prompt: the beginning of a sequence, then the text.
    ///
    /// # Errors
    /// [`Problem::Input`](super::problem::Problem::Input) if the tokenizer cannot encode it.
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(prompt, false).or_else(|e| input(format!("cannot tokenise: {e}")))?;
        Ok(std::iter::once(self.eos).chain(encoding.get_ids().iter().copied()).collect())
    }

    /// The text of ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, true).unwrap_or_default()
    }
}

/// The text of one sequence, growing token by token.
#[derive(Default)]
pub struct Streamed {
    ids: Vec<u32>,
    /// Ids whose text is out, and where the ones start that their text depends on.
    out: usize,
    context: usize,
}

impl Streamed {
    /// Takes the next token; returns the text that is certain now.
    pub fn push(&mut self, text: &Text, id: u32) -> String {
        self.ids.push(id);
        let before = text.decode(&self.ids[self.context..self.out]);
        let now = text.decode(&self.ids[self.context..]);
        // An incomplete character decodes to the replacement character.
        if now.ends_with('\u{fffd}') && self.ids.len() - self.out < 4 {
            return String::new();
        }
        let new = now.strip_prefix(&before).unwrap_or_default().to_string();
        (self.context, self.out) = (self.out, self.ids.len());
        new
    }

    /// What was held back.
    pub fn finish(&self, text: &Text) -> String {
        let before = text.decode(&self.ids[self.context..self.out]);
        text.decode(&self.ids[self.context..]).strip_prefix(&before).unwrap_or_default().to_string()
    }
}
