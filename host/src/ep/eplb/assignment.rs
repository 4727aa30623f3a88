//! Assignment of rows to columns with the greatest total value.
//!
//! The Hungarian method with potentials (Kuhn 1955, Munkres 1957; the O(n^3) form by shortest augmenting paths of
//! Jonker and Volgenant 1987). Above `EXACT` rows a greedy choice takes over: an exact one would need minutes.

/// The most rows that are assigned exactly.
const EXACT: usize = 512;

/// The column of each row of the square matrix `value[row * n + column]`, such that the total value is the greatest
/// (for at most [`EXACT`] rows), or high (for more).
pub(super) fn assign(n: usize, value: &[u32]) -> Vec<usize> {
    if n <= EXACT { exact(n, value) } else { greedy(n, value) }
}

/// Adds one row after another along the cheapest augmenting path, with cost = -value. `row_potential[r] +
/// column_potential[c] <= cost(r, c)` holds throughout, with equality for assigned pairs.
fn exact(n: usize, value: &[u32]) -> Vec<usize> {
    let cost = |row: usize, column: usize| -i64::from(value[row * n + column]);
    let mut row_potential = vec![0i64; n];
    let mut column_potential = vec![0i64; n];
    let mut row_of = vec![None::<usize>; n];
    for new_row in 0..n {
        // Dijkstra over columns: distance from `new_row`, the column before on the path, and whether it is final.
        let mut distance = vec![i64::MAX; n];
        let mut before = vec![None::<usize>; n];
        let mut is_final = vec![false; n];
        let (mut row, mut length, mut last) = (new_row, 0, None);
        let free = loop {
            let mut nearest = None;
            for column in (0..n).filter(|&column| !is_final[column]) {
                let through = length + cost(row, column) - row_potential[row] - column_potential[column];
                if through < distance[column] {
                    (distance[column], before[column]) = (through, last);
                }
                if nearest.is_none_or(|nearest: usize| distance[column] < distance[nearest]) {
                    nearest = Some(column);
                }
            }
            let nearest = nearest.expect("a column is free: fewer rows than columns are assigned");
            is_final[nearest] = true;
            (length, last) = (distance[nearest], Some(nearest));
            match row_of[nearest] {
                Some(next) => row = next,
                None => break nearest,
            }
        };
        row_potential[new_row] += length;
        for column in (0..n).filter(|&column| is_final[column] && column != free) {
            if let Some(row) = row_of[column] {
                row_potential[row] += length - distance[column];
            }
            column_potential[column] -= length - distance[column];
        }
        // Every column on the path passes its row on to its successor.
        let mut column = free;
        while let Some(previous) = before[column] {
            row_of[column] = row_of[previous];
            column = previous;
        }
        row_of[column] = Some(new_row);
    }
    let mut column_of = vec![0; n];
    for (column, row) in row_of.into_iter().enumerate() {
        if let Some(row) = row {
            column_of[row] = column;
        }
    }
    column_of
}

/// Pairs by descending value, ties to the lowest row and column.
fn greedy(n: usize, value: &[u32]) -> Vec<usize> {
    let mut pairs: Vec<usize> = (0..n * n).filter(|&pair| value[pair] > 0).collect();
    pairs.sort_by_key(|&pair| std::cmp::Reverse(value[pair]));
    let mut column_of = vec![None; n];
    let mut taken = vec![false; n];
    for (row, column) in pairs.into_iter().map(|pair| (pair / n, pair % n)) {
        if column_of[row].is_none() && !taken[column] {
            (column_of[row], taken[column]) = (Some(column), true);
        }
    }
    let mut left = (0..n).filter(|&column| !taken[column]);
    column_of.into_iter().map(|column| column.or_else(|| left.next()).unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::{assign, greedy};

    /// The best total over all permutations.
    fn best(n: usize, value: &[u32], row: usize, taken: &mut Vec<usize>) -> u32 {
        let mut most = 0;
        for column in 0..n {
            if !taken.contains(&column) {
                taken.push(column);
                most = most.max(value[row * n + column] + if row + 1 < n { best(n, value, row + 1, taken) } else { 0 });
                taken.pop();
            }
        }
        most
    }

    #[test]
    fn assignment_is_optimal() {
        let mut state = 1u64;
        for n in 1..7 {
            for bound in [2, 3, 10, 1000] {
                let mut random = || {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 33) as u32 % bound
                };
                let value: Vec<u32> = (0..n * n).map(|_| random()).collect();
                let column_of = assign(n, &value);
                let total: u32 = column_of.iter().enumerate().map(|(row, &column)| value[row * n + column]).sum();
                let mut columns = column_of.clone();
                columns.sort_unstable();
                assert_eq!(columns, (0..n).collect::<Vec<_>>());
                assert_eq!(total, best(n, &value, 0, &mut Vec::new()), "{n} {value:?}");
                let mut columns = greedy(n, &value);
                columns.sort_unstable();
                assert_eq!(columns, (0..n).collect::<Vec<_>>());
            }
        }
    }
}
