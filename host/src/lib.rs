//! warploom
