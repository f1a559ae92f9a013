//! A box of a whole row-major array, walked as runs of neighbouring elements.

use std::ops::Range;

/// A part of one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Extent of the dim in the whole array.
    pub whole: u64,
    /// First index of the part.
    pub start: u64,
    /// Indices of the part.
    pub length: u64,
}

/// A box of a whole array: a part of each dim, outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Parts of the dims.
    pub spans: Vec<Span>,
}

impl Span {
    /// A whole dim.
    pub fn whole(extent: u64) -> Span {
        Span { whole: extent, start: 0, length: extent }
    }

    /// Part `index` of `ways` equal parts of a dim.
    pub fn part(extent: u64, index: u64, ways: u64) -> Span {
        Span { whole: extent, start: index * (extent / ways), length: extent / ways }
    }
}

impl Region {
    /// A whole array.
    pub fn whole(extents: &[u64]) -> Region {
        Region { spans: extents.iter().map(|extent| Span::whole(*extent)).collect() }
    }

    /// Elements of the region; 1 for an array without dims.
    pub fn elements(&self) -> u64 {
        self.spans.iter().map(|span| span.length).product()
    }

    /// Calls `f` for elements `range` of the region, counted row-major, run by run: index of the run's first
    /// element in the whole array, and length.
    pub fn for_each_run(&self, range: Range<u64>, mut f: impl FnMut(u64, u64)) {
        assert!(range.end <= self.elements(), "the range must lie in the region");
        let (run, outer) = self.split_run();
        let mut at = range.start;
        while at < range.end {
            let inside = at % run.length;
            let length = (run.length - inside).min(range.end - at);
            f(run.start + inside + outer_offset(outer, run.whole, at / run.length), length);
            at += length;
        }
    }

    /// Innermost dims that form one run, and the dims around them.
    fn split_run(&self) -> (Span, &[Span]) {
        let mut outer = self.spans.as_slice();
        let mut run = Span::whole(1);
        while run.start == 0 && run.length == run.whole {
            let Some((span, around)) = outer.split_last() else { break };
            outer = around;
            let inner = run.whole;
            run = Span { whole: span.whole * inner, start: span.start * inner, length: span.length * inner };
        }
        (run, outer)
    }
}

/// Where the run with a row-major number starts in the whole array, the part inside a run apart.
fn outer_offset(outer: &[Span], run: u64, number: u64) -> u64 {
    let (mut rest, mut stride, mut offset) = (number, run, 0);
    for span in outer.iter().rev() {
        offset += (span.start + rest % span.length) * stride;
        rest /= span.length;
        stride *= span.whole;
    }
    offset
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span((whole, start, length): (u64, u64, u64)) -> Span {
        Span { whole, start, length }
    }

    #[test]
    fn runs_cover_the_region_in_order() {
        type Row<'a> = (&'a str, &'a [(u64, u64, u64)], Range<u64>, &'a [(u64, u64)]);
        let rows: [Row; 9] = [
            ("no dims", &[], 0..1, &[(0, 1)]),
            ("whole", &[(3, 0, 3), (4, 0, 4)], 0..12, &[(0, 12)]),
            ("rows", &[(4, 2, 2), (3, 0, 3)], 0..6, &[(6, 6)]),
            ("columns", &[(2, 0, 2), (6, 3, 3)], 0..6, &[(3, 3), (9, 3)]),
            ("middle", &[(2, 0, 2), (4, 1, 2), (5, 0, 5)], 0..20, &[(5, 10), (25, 10)]),
            ("corner", &[(3, 1, 2), (3, 2, 1)], 0..2, &[(5, 1), (8, 1)]),
            ("part of a run", &[(2, 0, 2), (6, 3, 3)], 1..5, &[(4, 2), (9, 2)]),
            ("second run only", &[(2, 0, 2), (6, 3, 3)], 3..4, &[(9, 1)]),
            ("nothing", &[(2, 0, 2)], 1..1, &[]),
        ];
        for (name, spans, range, expected) in rows {
            let region = Region { spans: spans.iter().copied().map(span).collect() };
            let mut runs = Vec::new();
            region.for_each_run(range, |start, length| runs.push((start, length)));
            assert_eq!(runs, expected, "{name}");
        }
    }

    #[test]
    #[should_panic(expected = "the range must lie in the region")]
    fn a_range_outside_is_refused() {
        Region::whole(&[2, 2]).for_each_run(0..5, |_, _| {});
    }

    #[test]
    fn equal_parts_cover_a_dim() {
        assert_eq!([0, 1, 2].map(|index| Span::part(12, index, 3).start), [0, 4, 8]);
    }
}
