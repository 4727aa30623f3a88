//! What can go wrong, as one sentence for whoever sits at the terminal.

use std::fmt;

/// A result with [`Problem`].
pub type Result<T> = std::result::Result<T, Problem>;

/// Why there is no text.
#[derive(Debug)]
pub enum Problem {
    /// What was asked for cannot be done: a wrong path, a broken file, a prompt that is too long.
    Input(String),
    /// It could, but something failed on the way.
    Failure(String),
}

impl Problem {
    /// The exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Failure(_) => 1,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Input(sentence) | Self::Failure(sentence)) = self;
        f.write_str(sentence)
    }
}

impl From<warploom::Error> for Problem {
    fn from(e: warploom::Error) -> Self {
        Self::Failure(e.to_string())
    }
}

impl From<warploom::kv_cache::AllocatorError> for Problem {
    fn from(e: warploom::kv_cache::AllocatorError) -> Self {
        Self::Failure(format!("KV cache: {e}"))
    }
}

/// A [`Problem::Input`], to return.
pub fn input<T>(sentence: impl Into<String>) -> Result<T> {
    Err(Problem::Input(sentence.into()))
}
