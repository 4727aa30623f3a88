//! The test suite.
