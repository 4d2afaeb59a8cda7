//! K and V of a page by strides. A page is the part of a block with one layer's KV of one shard.
//!
//! Arrays are dense: [heads, tokens, dim], the last axis innermost.

use std::ops::Range;

pub use shm_protocol::page_form::{Page, PagePlace};

use crate::EngineError;

/// A type for the elements of K and V.
pub trait Element: Copy + Default + private::Bytes {
    /// The names of the pages' element types for `Self`.
    const DTYPES: &'static [&'static str];
}

mod private {
    /// Conversions by bytes, in the machine's order.
    pub trait Bytes: Sized {
        const BYTES: usize;
        fn of_bytes(bytes: &[u8]) -> Self;
        fn put_bytes(self, bytes: &mut [u8]);
    }
}

macro_rules! elements {
    ($($type:ty: $dtypes:expr;)*) => {$(
        impl private::Bytes for $type {
            const BYTES: usize = size_of::<Self>();

            fn of_bytes(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(bytes.try_into().expect("its length"))
            }

            fn put_bytes(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
        }

        impl Element for $type {
            const DTYPES: &'static [&'static str] = &$dtypes;
        }
    )*};
}

elements! {
    f64: ["float64"];
    f32: ["float32"];
    // The bits of 16-bit floats: convert them with the engine's own type.
    u16: ["float16", "bfloat16"];
    u8: ["uint8", "float8_e4m3fn", "float8_e5m2"];
    i8: ["int8"];
}

/// The place of K or of V in a page, in elements.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Axes {
    offset: usize,
    strides: [usize; 4],
    /// Heads, kernel blocks, tokens of a kernel block, dim.
    lengths: [usize; 4],
}

// === impl Axes ===

impl Axes {
    /// The axes of K.
    pub fn keys(page: &Page) -> Self {
        Self::new(page.k, page.lengths(page.keys))
    }

    /// The axes of V.
    pub fn values(page: &Page) -> Self {
        Self::new(page.v, page.lengths(page.values))
    }

    fn new(place: PagePlace, lengths: [u32; 4]) -> Self {
        let strides = place.strides.map(|stride| stride as usize);
        Self { offset: place.offset as usize, strides, lengths: lengths.map(|length| length as usize) }
    }

    /// Heads of one shard.
    pub fn heads(&self) -> usize {
        self.lengths[0]
    }

    /// Tokens of a page.
    pub fn tokens(&self) -> usize {
        self.lengths[1] * self.lengths[2]
    }

    /// Elements of a key or value of one head.
    pub fn dim(&self) -> usize {
        self.lengths[3]
    }

    /// The last element, counted from the page's start.
    fn last(&self) -> usize {
        self.offset
            + self
                .strides
                .iter()
                .zip(self.lengths)
                .map(|(stride, length)| stride * (length - 1))
                .sum::<usize>()
    }

    /// Calls with each element of these tokens: its place in the page, and its place in an array of `all` tokens, where they begin at
    /// `first`.
    fn for_each(
        &self,
        tokens: Range<usize>,
        (first, all): (usize, usize),
        mut call: impl FnMut(usize, usize),
    ) {
        let [head_stride, block_stride, token_stride, stride] = self.strides;
        for head in 0..self.heads() {
            for (at, token) in tokens.clone().enumerate() {
                let (block, token) = (token / self.lengths[2], token % self.lengths[2]);
                let start = self.offset + head * head_stride + block * block_stride + token * token_stride;
                let dense = (head * all + first + at) * self.dim();
                (0..self.dim()).for_each(|element| call(start + element * stride, dense + element));
            }
        }
    }

    /// The tokens of an array of `elements`, which must have room for `tokens` of a page of `bytes` from its token `first` on.
    fn fit<T: Element>(
        &self,
        bytes: usize,
        tokens: &Range<usize>,
        elements: usize,
        first: usize,
    ) -> Result<usize, EngineError> {
        let each = self.heads() * self.dim();
        let all = elements / each;
        if !elements.is_multiple_of(each)
            || first + tokens.len() > all
            || tokens.end > self.tokens()
            || (self.last() + 1) * T::BYTES > bytes
        {
            return Err(EngineError::Shape(format!(
                "tokens {tokens:?} of a page of {} tokens and {bytes} bytes do not fit token {first} of an array of {elements} elements: \
                 pass a whole page, and an array [{} heads, tokens, {}]",
                self.tokens(),
                self.heads(),
                self.dim()
            )));
        }
        Ok(all)
    }
}

/// Copies `tokens` of a page into a dense array of K or V, from the array's token `first` on. The array is [heads of the shard, tokens,
/// dim]. Fails if the page is not whole, or the array too short.
pub fn read_tokens<T: Element>(
    page: &[u8],
    axes: &Axes,
    tokens: Range<usize>,
    array: &mut [T],
    first: usize,
) -> Result<(), EngineError> {
    let all = axes.fit::<T>(page.len(), &tokens, array.len(), first)?;
    axes.for_each(tokens, (first, all), |at, dense| {
        array[dense] = T::of_bytes(&page[at * T::BYTES..(at + 1) * T::BYTES]);
    });
    Ok(())
}

/// Copies tokens of a dense array of K or V, from the array's token `first` on, into `tokens` of a page: [`read_tokens`] the other way.
pub fn write_tokens<T: Element>(
    page: &mut [u8],
    axes: &Axes,
    tokens: Range<usize>,
    array: &[T],
    first: usize,
) -> Result<(), EngineError> {
    let all = axes.fit::<T>(page.len(), &tokens, array.len(), first)?;
    axes.for_each(tokens, (first, all), |at, dense| {
        array[dense].put_bytes(&mut page[at * T::BYTES..(at + 1) * T::BYTES]);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use shm_protocol::page_form;

    use super::*;

    const KEYS_THEN_VALUES: &str = "layers=1 tokens=8 kv_heads=2 keys=6 values=4 dtype=float32 \
                                    k=kv_heads*80+keys*8+tokens v=48+kv_heads*80+tokens*4+values packing=none";
    const KERNEL_BLOCKS: &str = "layers=1 tokens=8 kernel_block=4 kv_heads=2 keys=3 values=3 dtype=float32 \
                                 k=kernel_blocks*48+kv_heads*24+tokens*6+keys v=3+kernel_blocks*48+kv_heads*24+tokens*6+values packing=none";

    fn page(text: &str) -> Page {
        page_form::parse_pages(text).unwrap().remove(0)
    }

    /// Written in two parts, and read from a token in their midst on.
    #[test]
    fn an_array_comes_back_from_any_tokens_of_a_page() {
        for text in [KEYS_THEN_VALUES, KERNEL_BLOCKS] {
            let page = page(text);
            let mut bytes = vec![0; page.page_bytes() as usize];
            let both = [Axes::keys(&page), Axes::values(&page)];
            let arrays = both.map(|axes| {
                let elements = axes.heads() * axes.tokens() * axes.dim();
                (0..elements).map(|at| (axes.offset * 1000 + at) as f32).collect::<Vec<_>>()
            });
            for (axes, array) in both.iter().zip(&arrays) {
                write_tokens(&mut bytes, axes, 0..3, array, 0).unwrap();
                write_tokens(&mut bytes, axes, 3..8, array, 3).unwrap();
            }
            for (axes, array) in both.iter().zip(&arrays) {
                let mut found = vec![-1.0_f32; axes.heads() * 5 * axes.dim()];
                read_tokens(&bytes, axes, 2..6, &mut found, 1).unwrap();
                let at = |head: usize, token: usize, all: usize| (head * all + token) * axes.dim();
                for head in 0..axes.heads() {
                    let right = &array[at(head, 2, 8)..at(head, 6, 8)];
                    assert_eq!(&found[at(head, 1, 5)..at(head, 5, 5)], right, "{text}");
                    assert_eq!(found[at(head, 0, 5)], -1.0);
                }
            }
        }
    }

    /// Bytes are placed as the text of PROTOCOL.md says.
    #[test]
    fn an_element_lies_where_its_strides_say() {
        let page = page(KEYS_THEN_VALUES);
        let mut bytes = vec![0; page.page_bytes() as usize];
        let mut keys = vec![0.0_f32; 2 * 8 * 6];
        keys[(8 + 5) * 6 + 2] = 7.0;
        write_tokens(&mut bytes, &Axes::keys(&page), 0..8, &keys, 0).unwrap();
        let at = 4 * (80 + 2 * 8 + 5);
        assert_eq!(bytes[at..at + 4], 7.0_f32.to_ne_bytes());
        assert_eq!(
            bytes.iter().filter(|byte| **byte != 0).count(),
            7.0_f32.to_ne_bytes().iter().filter(|b| **b != 0).count()
        );
    }

    #[test]
    fn arrays_and_pages_of_another_size_are_refused() {
        let page = page(KEYS_THEN_VALUES);
        let axes = Axes::keys(&page);
        let bytes = vec![0; page.page_bytes() as usize];
        let mut array = vec![0.0_f32; 2 * 8 * 6];
        assert!(read_tokens(&bytes, &axes, 0..8, &mut array, 0).is_ok());
        for (bytes, tokens, first) in [(&bytes[..], 0..9, 0), (&bytes, 0..8, 1), (&bytes[..80 * 4], 0..8, 0)]
        {
            assert!(matches!(
                read_tokens(bytes, &axes, tokens, &mut array, first),
                Err(EngineError::Shape(_))
            ));
        }
        assert!(matches!(read_tokens(&bytes, &axes, 0..8, &mut array[1..], 0), Err(EngineError::Shape(_))));
    }
}
