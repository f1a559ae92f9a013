//! What the kernels are made of: tiles that come into shared memory, products of tiles, folds over a row.
//!
//! Of 16 rows and 8 columns unit u of a plane holds columns 2 · (u mod 4) and the next, of row u / 4 and of the row 8
//! further.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;

use super::{COLUMNS, OWN, PLANE, Products, ROWS, Shape};

/// Two numbers that lie side by side in a register.
type Pair = Const<2>;

/// The plane's first row of its cube's.
#[cube]
pub(super) fn first_row(#[comptime] shape: Shape) -> usize {
    UNIT_POS as usize / PLANE * comptime!(shape.tiles * ROWS)
}

/// The row of its cube's that a unit's half tile holds.
#[cube]
pub(super) fn row_of(#[comptime] half: usize, #[comptime] shape: Shape) -> usize {
    first_row(shape) + UNIT_POS as usize % PLANE / 4 + comptime!(half / 2 * ROWS + half % 2 * COLUMNS)
}

/// The first of two columns of an accumulator.
#[cube]
pub(super) fn column_of(#[comptime] accumulator: usize) -> usize {
    UNIT_POS as usize % 4 * 2 + comptime!(accumulator * COLUMNS)
}

/// Where a unit keeps the first of two numbers: half a tile, and one of so many accumulators beside each other.
pub(super) const fn place(half: usize, accumulator: usize, beside: usize) -> usize {
    (half / 2 * beside + accumulator) * OWN + half % 2 * 2
}

/// Zeros.
#[cube]
pub(super) fn zeros(#[comptime] count: usize) -> Array<f32> {
    let mut sums = Array::<f32>::new(count);
    #[unroll]
    for at in 0..count {
        sums[at] = 0.0;
    }
    sums
}

/// Starts filling a tile of `count` rows, which begins at vector `target`, with rows of `source` from vector `start` on,
/// `step` vectors apart; zeros for rows from `rows` on and for columns beyond `width`. The first row exists.
#[cube]
pub(super) fn fetch<F: Float, N: Size>(
    source: &[Vector<F, N>],
    tile: &mut Shared<[Vector<F, N>]>,
    target: usize,
    start: usize,
    step: usize,
    rows: u32,
    #[comptime] count: usize,
    #[comptime] width: usize,
    #[comptime] shape: Shape,
) {
    let vectors = comptime!(Shape::columns(width)) / N::value();
    let used = comptime!(width) / N::value();
    let stride = comptime!(shape.vectors(1, width));
    let mut at = UNIT_POS as usize;
    while at < count * vectors {
        let row = at / vectors;
        let column = at % vectors;
        let exists = (row as u32) < rows && column < used;
        let to = target + row * stride + column;
        if comptime!(shape.products == Products::Instructions) {
            let from = select(exists, start + row * step + column, start);
            let length = select(exists, 1usize, 0usize);
            copy_async_checked(&source[from..from + length], &mut tile[to..to + 1], 8u32);
        } else {
            let mut numbers = Vector::<F, N>::new(F::new(0.0));
            if exists {
                numbers = source[start + row * step + column];
            }
            tile[to] = numbers;
        }
        at += shape.units();
    }
}

/// Starts filling `count` numbers from `target` on, with numbers of `source` from `start` on, of which the first
/// `rows` exist, at least one.
#[cube]
pub(super) fn fetch_numbers(
    source: &[f32],
    numbers: &mut Shared<[f32]>,
    target: usize,
    start: usize,
    rows: u32,
    #[comptime] shape: Shape,
) {
    let at = UNIT_POS as usize;
    if at < shape.block {
        let exists = (at as u32) < rows;
        let from = select(exists, start + at, start);
        if comptime!(shape.products == Products::Instructions) {
            copy_async_checked(&source[from..from + 1], &mut numbers[target + at..target + at + 1], 1u32);
        } else {
            numbers[target + at] = source[from];
        }
    }
}

/// Waits until what was fetched is there for all units, and all units are here.
#[cube]
pub(super) fn arrive(#[comptime] shape: Shape) {
    if comptime!(shape.products == Products::Instructions) {
        gpu_asm!("cp.async.wait_all;");
    }
    sync_cube();
}

/// Adds a · bᵀ of the plane's rows of tile `a`, and a block's rows of `b` from vector `start` on.
#[cube]
pub(super) fn multiply_rows<F: Float, N: Size>(
    a: &Shared<[Vector<F, N>]>,
    b: &Shared<[Vector<F, N>]>,
    start: usize,
    sums: &mut Array<f32>,
    #[comptime] width: usize,
    #[comptime] shape: Shape,
) {
    let stride = comptime!(shape.vectors(1, width));
    let first = first_row(shape);
    let beside = comptime!(shape.block / COLUMNS);
    if comptime!(shape.products == Products::Instructions) {
        // Each unit gives a row of 8 numbers: of the left operand rows 0 to 7 and 8 to 15 of the first 8 numbers, then
        // of the next; of the right one both halves of rows 0 to 7, then of rows 8 to 15.
        let lane = UNIT_POS as usize % PLANE;
        let left_at = (first + lane % 16) * stride + lane / 16;
        let right_at = start + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2;
        #[unroll]
        for depth in 0..comptime!(Shape::columns(width) / ROWS) {
            let mut left = Array::<Vector<F, Pair>>::new(comptime!(4 * shape.tiles));
            #[unroll]
            for tile in 0..shape.tiles {
                let rows = load(a, left_at + comptime!(tile * ROWS) * stride + comptime!(depth * 2), false);
                #[unroll]
                for part in 0..4usize {
                    left[comptime!(tile * 4 + part)] = rows[part];
                }
            }
            #[unroll]
            for two in 0..comptime!(beside / 2) {
                let right = load(b, right_at + comptime!(two * ROWS) * stride + comptime!(depth * 2), false);
                multiply_both(&left, &right, sums, comptime!(two * 2), beside, shape);
            }
        }
    } else {
        for inner in 0..width {
            let mut right = Array::<f32>::new(comptime!(beside * 2));
            #[unroll]
            for column in 0..comptime!(beside * 2) {
                let row = column_of(comptime!(column / 2)) + comptime!(column % 2);
                right[column] = f32::cast_from(b[start + row * stride + inner].extract(0usize));
            }
            #[unroll]
            for half in 0..comptime!(shape.tiles * 2) {
                let left = f32::cast_from(a[row_of(half, shape) * stride + inner].extract(0usize));
                #[unroll]
                for column in 0..comptime!(beside * 2) {
                    sums[comptime!(place(half, column / 2, beside) + column % 2)] += left * right[column];
                }
            }
        }
    }
}

/// Adds weights · b, for the plane's rows of weights in registers, a column for each of a block's rows of `b` from vector
/// `start` on.
#[cube]
pub(super) fn multiply_weights<F: Float, N: Size>(
    weights: &Array<f32>,
    b: &Shared<[Vector<F, N>]>,
    start: usize,
    sums: &mut Array<f32>,
    #[comptime] width: usize,
    #[comptime] shape: Shape,
) {
    let stride = comptime!(shape.vectors(1, width));
    let among = comptime!(shape.block / COLUMNS);
    let beside = comptime!(Shape::columns(width) / COLUMNS);
    if comptime!(shape.products == Products::Instructions) {
        // Rows of the right operand run along the sum, and are turned as they are loaded.
        let lane = UNIT_POS as usize % PLANE;
        let right_at = start + lane % 16 * stride + lane / 16;
        #[unroll]
        for depth in 0..comptime!(shape.block / ROWS) {
            let mut left = Array::<Vector<F, Pair>>::new(comptime!(4 * shape.tiles));
            #[unroll]
            for part in 0..comptime!(4 * shape.tiles) {
                // Of two accumulators side by side: both halves of the first one, then of the second.
                let at = comptime!(place(part / 4 * 2 + part % 2, depth * 2 + part % 4 / 2, among));
                left[part] = pair::<F>(weights[at], weights[comptime!(at + 1)]);
            }
            #[unroll]
            for two in 0..comptime!(beside / 2) {
                let right = load(b, right_at + comptime!(depth * ROWS) * stride + comptime!(two * 2), true);
                multiply_both(&left, &right, sums, comptime!(two * 2), beside, shape);
            }
        }
    } else {
        let mut all = Shared::<[f32]>::new_slice(comptime!(shape.rows() * (shape.block + 1)));
        let row_length = comptime!(shape.block + 1);
        #[unroll]
        for half in 0..comptime!(shape.tiles * 2) {
            #[unroll]
            for column in 0..comptime!(among * 2) {
                let at = row_of(half, shape) * row_length + column_of(comptime!(column / 2)) + comptime!(column % 2);
                all[at] = weights[comptime!(place(half, column / 2, among) + column % 2)];
            }
        }
        sync_cube();
        for inner in 0..shape.block {
            #[unroll]
            for half in 0..comptime!(shape.tiles * 2) {
                let left = all[row_of(half, shape) * row_length + inner];
                #[unroll]
                for column in 0..comptime!(beside * 2) {
                    let right_at = start + inner * stride + column_of(comptime!(column / 2)) + comptime!(column % 2);
                    let right = f32::cast_from(b[right_at].extract(0usize));
                    sums[comptime!(place(half, column / 2, beside) + column % 2)] += left * right;
                }
            }
        }
        sync_cube();
    }
}

/// Four matrices of 8 rows of 8 numbers, unit u giving the vector of row u mod 8 of matrix u / 8.
#[cube]
fn load<F: Float, N: Size>(
    tile: &Shared<[Vector<F, N>]>,
    at: usize,
    #[comptime] turned: bool,
) -> Array<Vector<F, Pair>> {
    let instruction = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    instruction.load_matrix::<Vector<F, N>, Pair>(&tile[at..at + 1], MatrixIdent::A, 4usize, turned)
}

/// Adds the products of each tile's left operand and two right ones beside each other.
#[cube]
fn multiply_both<F: Float>(
    left: &Array<Vector<F, Pair>>,
    right: &Array<Vector<F, Pair>>,
    sums: &mut Array<f32>,
    #[comptime] accumulator: usize,
    #[comptime] beside: usize,
    #[comptime] shape: Shape,
) {
    let instruction = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    #[unroll]
    for which in 0..comptime!(shape.tiles * 2) {
        let tile = comptime!(which / 2);
        let at = comptime!(place(tile * 2, accumulator + which % 2, beside));
        let mut a = Array::<Vector<F, Pair>>::new(4usize);
        #[unroll]
        for part in 0..4usize {
            a[part] = left[comptime!(tile * 4 + part)];
        }
        let mut b = Array::<Vector<F, Pair>>::new(2usize);
        let mut c = Array::<Vector<f32, Pair>>::new(2usize);
        #[unroll]
        for part in 0..2usize {
            b[part] = right[comptime!(which % 2 * 2 + part)];
            let mut two = Vector::<f32, Pair>::new(0.0);
            two.insert(0usize, sums[comptime!(at + part * 2)]);
            two.insert(1usize, sums[comptime!(at + part * 2 + 1)]);
            c[part] = two;
        }
        let d = instruction.execute(&a, &b, &c);
        #[unroll]
        for part in 0..2usize {
            sums[comptime!(at + part * 2)] = d[part].extract(0usize);
            sums[comptime!(at + part * 2 + 1)] = d[part].extract(1usize);
        }
    }
}

/// Two numbers rounded to bf16, in one register.
#[cube]
fn pair<F: Float>(low: f32, high: f32) -> Vector<F, Pair> {
    let both: u32;
    gpu_asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(_) both, in(_) high, in(_) low, options(pure, nomem));
    Vector::<F, Pair>::reinterpret(both)
}

/// Turns products of the plane's rows and a block's into scores, as powers of two have them: `own` and `streamed` are the
/// positions of the first row of the cube and of the block. The least number, WGSL having no infinity, for keys that a
/// query does not see.
#[cube]
pub(super) fn score(
    scores: &mut Array<f32>,
    scale: f32,
    slope: f32,
    own: u32,
    streamed: u32,
    #[comptime] of_keys: bool,
    #[comptime] shape: Shape,
) {
    let first = own + first_row(shape) as u32;
    // Whether a key of these lies behind a query.
    let hides = if comptime!(of_keys) {
        first + comptime!((shape.tiles * ROWS) as u32) > streamed + 1
    } else {
        streamed + comptime!(shape.block as u32) > first + 1
    };
    if hides {
        scale_scores(scores, scale, slope, own, streamed, true, of_keys, shape);
    } else {
        scale_scores(scores, scale, slope, own, streamed, false, of_keys, shape);
    }
}

#[cube]
fn scale_scores(
    scores: &mut Array<f32>,
    scale: f32,
    slope: f32,
    own: u32,
    streamed: u32,
    #[comptime] hides: bool,
    #[comptime] of_keys: bool,
    #[comptime] shape: Shape,
) {
    let among = comptime!(shape.block / COLUMNS);
    #[unroll]
    for column in 0..comptime!(among * 2) {
        let beside = streamed + column_of(comptime!(column / 2)) as u32 + comptime!(column as u32 % 2);
        #[unroll]
        for half in 0..comptime!(shape.tiles * 2) {
            let below = own + row_of(half, shape) as u32;
            let key = if comptime!(of_keys) { below } else { beside };
            let position = if comptime!(of_keys) { beside } else { below };
            let at = comptime!(place(half, column / 2, among) + column % 2);
            let mut number = scores[at] * scale + slope * f32::cast_from(key);
            if comptime!(hides) {
                number = select(key <= position, number, f32::MIN);
            }
            scores[at] = number;
        }
    }
}

/// 2ˣ.
#[cube]
pub(super) fn power_of_two(x: f32, #[comptime] shape: Shape) -> f32 {
    if comptime!(shape.products == Products::Instructions) {
        let power: f32;
        gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) power, in(_) x, options(pure, nomem));
        power
    } else {
        (x * std::f32::consts::LN_2).exp()
    }
}

/// The sum, or the largest, of the numbers of the four units that hold the same rows, known to each.
#[cube]
pub(super) fn over_row(value: f32, #[comptime] largest: bool, #[comptime] shape: Shape) -> f32 {
    if comptime!(shape.products == Products::Instructions) {
        let near = fold(value, neighbour(value, 1u32), largest);
        fold(near, neighbour(near, 2u32), largest)
    } else {
        let mut all = Shared::<[f32]>::new_slice(comptime!(shape.units()));
        let unit = UNIT_POS as usize;
        sync_cube();
        all[unit] = value;
        sync_cube();
        let first = unit / 4 * 4;
        let mut total = all[first];
        #[unroll]
        for other in 1..4usize {
            total = fold(total, all[first + other], largest);
        }
        total
    }
}

#[cube]
fn fold(a: f32, b: f32, #[comptime] largest: bool) -> f32 {
    if comptime!(largest) { max(a, b) } else { a + b }
}

/// The number of the unit whose place in the plane differs in the bits of `mask`; all units of the plane take part. What
/// is handed to an instruction is a value: of a variable its address would be.
#[cube]
fn neighbour(value: f32, #[comptime] mask: u32) -> f32 {
    let other: f32;
    gpu_asm!(
        "shfl.sync.bfly.b32 {}, {}, {mask}, 31, 0xffffffff;",
        out(_) other, in(_) value, mask = const mask, options(nomem)
    );
    other
}

/// Writes the rows that a plane holds, those below `rows`, times a factor for each half tile; the first row's numbers
/// begin at `start`, and rows are `step` numbers apart.
#[cube]
pub(super) fn put<F: Float, N: Size>(
    sums: &Array<f32>,
    factors: &Array<f32>,
    target: &mut [Vector<F, N>],
    start: usize,
    step: usize,
    rows: u32,
    #[comptime] width: usize,
    #[comptime] shape: Shape,
) {
    let beside = comptime!(Shape::columns(width) / COLUMNS);
    #[unroll]
    for half in 0..comptime!(shape.tiles * 2) {
        let row = row_of(half, shape);
        let factor = factors[half];
        if (row as u32) < rows {
            #[unroll]
            for accumulator in 0..comptime!(width.div_ceil(COLUMNS)) {
                let column = column_of(accumulator);
                let at = start + row * step + column;
                let from = comptime!(place(half, accumulator, beside));
                let (low, high) = (sums[from] * factor, sums[comptime!(from + 1)] * factor);
                if comptime!(shape.products == Products::Instructions) {
                    let pairs = target.with_vector_size_mut::<Pair>();
                    pairs[at / 2] = pair::<F>(low, high);
                } else {
                    if column < width {
                        target[at] = Vector::new(F::cast_from(low));
                    }
                    if column + 1 < width {
                        target[at + 1] = Vector::new(F::cast_from(high));
                    }
                }
            }
        }
    }
}
