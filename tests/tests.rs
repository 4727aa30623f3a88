//! The test suite: one binary, a file for each operation, each test on every device there is.

mod attention;
