//! Copies between arrays whose dims lie in different orders.

/// Side of the squares in which two orders are reconciled: 64 rows of 256 bytes stay in the cache.
const TILE: usize = 64;

/// A dim that is walked in two arrays at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
    /// Elements along the dim.
    pub length: usize,
    /// Elements between neighbours where numbers come from.
    pub from: usize,
    /// Elements between neighbours where numbers go.
    pub to: usize,
}

/// Copies every element from where `load` reads it to its place in `target`.
///
/// Where one dim is the fastest on both sides, `load_run` fills its run of neighbours at once. Else the two
/// innermost loops run over the dim that is fastest in the one array and the one fastest in the other, in
/// squares, so that a transposition touches each cache line once.
pub(super) fn copy_strided(
    dims: &[Walk],
    from: usize,
    to: usize,
    load: impl Fn(usize) -> f32,
    load_run: impl Fn(usize, &mut [f32]),
    target: &mut [f32],
) {
    if dims.iter().any(|dim| dim.length == 0) {
        return;
    }
    let mut outer: Vec<Walk> = dims.iter().copied().filter(|dim| dim.length > 1).collect();
    let column = take_fastest(&mut outer, |dim| dim.to);
    if column.from == 1 && column.to == 1 {
        walk(&outer, from, to, &mut |from, to| load_run(from, &mut target[to..to + column.length]));
        return;
    }
    let row = take_fastest(&mut outer, |dim| dim.from);
    walk(&outer, from, to, &mut |from, to| {
        for (rows, columns) in tiles(row.length, column.length) {
            for r in rows {
                for c in columns.clone() {
                    target[to + r * row.to + c * column.to] = load(from + r * row.from + c * column.from);
                }
            }
        }
    });
}

/// Takes out the dim with the smallest stride; one of a single element if none is left.
fn take_fastest(dims: &mut Vec<Walk>, stride: impl Fn(&Walk) -> usize) -> Walk {
    let fastest = (0..dims.len()).min_by_key(|index| stride(&dims[*index]));
    fastest.map_or(Walk { length: 1, from: 0, to: 0 }, |index| dims.remove(index))
}

fn tiles(
    rows: usize,
    columns: usize,
) -> impl Iterator<Item = (impl Iterator<Item = usize>, impl Iterator<Item = usize> + Clone)> {
    let starts = |length: usize| (0..length).step_by(TILE);
    starts(columns).flat_map(move |column| {
        starts(rows).map(move |row| (row..rows.min(row + TILE), column..columns.min(column + TILE)))
    })
}

/// Calls `visit` with the two places of every index of some dims.
fn walk(dims: &[Walk], from: usize, to: usize, visit: &mut impl FnMut(usize, usize)) {
    match dims.split_first() {
        None => visit(from, to),
        Some((dim, inner)) => {
            (0..dim.length).for_each(|index| walk(inner, from + index * dim.from, to + index * dim.to, visit));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every permutation of dims longer and shorter than a tile gives what indexing one by one gives.
    #[test]
    fn orders_of_dims_are_reconciled() {
        let lengths = [3, 65, 1, 130];
        let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1], [3, 0, 1, 2]];
        let strides = |order: [usize; 4]| {
            let mut strides = [0; 4];
            let mut stride = 1;
            for dim in order.into_iter().rev() {
                strides[dim] = stride;
                stride *= lengths[dim];
            }
            strides
        };
        let total: usize = lengths.iter().product();
        for from in orders {
            for to in orders {
                let (from, to) = (strides(from), strides(to));
                let dims: Vec<Walk> =
                    (0..4).map(|dim| Walk { length: lengths[dim], from: from[dim], to: to[dim] }).collect();
                let mut target = vec![-1.0; total];
                let load_run = |from: usize, run: &mut [f32]| {
                    run.iter_mut().enumerate().for_each(|(index, number)| *number = (from + index) as f32);
                };
                copy_strided(&dims, 0, 0, |index| index as f32, load_run, &mut target);
                let mut expected = vec![-1.0; total];
                walk(&dims, 0, 0, &mut |from, to| expected[to] = from as f32);
                assert!(target == expected, "{from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn nothing_is_copied_along_an_empty_dim() {
        let mut target = vec![1.0; 4];
        copy_strided(&[Walk { length: 0, from: 1, to: 1 }], 0, 0, |_| 2.0, |_, run| run.fill(2.0), &mut target);
        assert_eq!(target, [1.0; 4]);
    }
}
