//! Rows of a table.

/// `table[ids[t]]` for each `t`, zeros where there is no such row: `table` is `[rows, width]`, the result `[ids, width]`.
pub fn embedding(table: &[f64], ids: &[i32], rows: usize, width: usize) -> Vec<f64> {
    let row = |&id: &i32| match usize::try_from(id) {
        Ok(id) if id < rows => table[id * width..][..width].to_vec(),
        _ => vec![0.0; width],
    };
    ids.iter().flat_map(row).collect()
}
