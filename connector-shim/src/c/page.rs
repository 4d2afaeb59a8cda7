//! `pillion_page_form`: the places of K and V in a page, from the fact `page_form`.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use shm_protocol::page_form;

use super::error::{CallFailure, Status, require_pointer, run_call};
use super::raw::Text;

/// The places of K's or V's elements in a page, in bytes. A stride is 0 if its axis has the length 1.
#[repr(C)]
#[derive(Debug, PartialEq)]
pub struct Place {
    /// Offset of the first element from the begin of the page.
    pub offset: u64,
    /// Stride from one head to the next.
    pub kv_heads: u64,
    /// Stride from one kernel block to the next.
    pub kernel_blocks: u64,
    /// Stride from one token of a kernel block to the next.
    pub tokens: u64,
    /// Stride from one element of a key or of a value to the next.
    pub elements: u64,
}

/// The page of one layer. Token `t` is number `t % kernel_block_tokens` of kernel block `t / kernel_block_tokens`.
#[repr(C)]
#[derive(Debug)]
pub struct Page {
    /// Layers of a block, this layer included.
    pub layers: u32,
    /// Tokens of a block.
    pub tokens: u32,
    /// Tokens of a kernel block; equal to `tokens` if attention kernels do not divide blocks.
    pub kernel_block_tokens: u32,
    /// Heads of one shard.
    pub kv_heads: u32,
    /// Elements of a key.
    pub keys: u32,
    /// Elements of a value.
    pub values: u32,
    /// Type of an element, such as "bfloat16". Valid for ever.
    pub dtype: *const c_char,
    /// Length of an element.
    pub element_bytes: u64,
    /// Offset of this page in its shard of a block.
    pub begin: u64,
    /// Length of this page.
    pub bytes: u64,
    /// Length of a shard of a block: the pages of all layers.
    pub shard_bytes: u64,
    /// The place of K.
    pub k: Place,
    /// The place of V.
    pub v: Place,
}

// === exported ===

/// Returns the places of K and V in the page of layer `layer`, counted from 0, from the text of the fact
/// `page_form`. Fails with PILLION_STATUS_ARGUMENT for pages without strides (any `packing` but "none") and
/// for a layer that does not exist; the text names the cause.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_page_form(
    page_form: Text,
    layer: u32,
    page: Option<&mut MaybeUninit<Page>>,
) -> Status {
    run_call(|| {
        let out = require_pointer("page", page)?;
        let pages = page_form::parse_pages(page_form.get("page_form")?)
            .map_err(|error| CallFailure::argument(error.to_string()))?;
        let (layers, shard_bytes) = end_of(&pages);
        let mut layers_before = 0;
        for (at, found) in pages.iter().enumerate() {
            if layer < layers_before + found.layers {
                let begin = end_of(&pages[..at]).1 + u64::from(layer - layers_before) * found.page_bytes();
                out.write(Page::new(found, layers, begin, shard_bytes));
                return Ok(());
            }
            layers_before += found.layers;
        }
        Err(CallFailure::argument(format!(
            "page_form: layer {layer} does not exist: pass a number below {layers}, the \
             number of layers"
        )))
    })
}

/// Number of layers, and bytes, of `pages`.
fn end_of(pages: &[page_form::Page]) -> (u32, u64) {
    pages.iter().fold((0, 0), |(layers, bytes), page| {
        (layers + page.layers, bytes + u64::from(page.layers) * page.page_bytes())
    })
}

// === impl Page ===

impl Page {
    fn new(page: &page_form::Page, layers: u32, begin: u64, shard_bytes: u64) -> Self {
        Self {
            layers,
            tokens: page.tokens,
            kernel_block_tokens: page.kernel_block,
            kv_heads: page.kv_heads,
            keys: page.keys,
            values: page.values,
            dtype: page.dtype.name.as_ptr(),
            element_bytes: page.dtype.bytes,
            begin,
            bytes: page.page_bytes(),
            shard_bytes,
            k: Place::new(&page.k, page.dtype.bytes),
            v: Place::new(&page.v, page.dtype.bytes),
        }
    }
}

// === impl Place ===

impl Place {
    fn new(place: &page_form::PagePlace, element_bytes: u64) -> Self {
        let [kv_heads, kernel_blocks, tokens, elements] = place.strides.map(|stride| stride * element_bytes);
        Self { offset: place.offset * element_bytes, kv_heads, kernel_blocks, tokens, elements }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::super::error::last_text;
    use super::super::raw::take_result;
    use super::*;

    const FORM: &CStr = c"layers=2 tokens=4 kv_heads=2 keys=2 values=2 dtype=float32 k=kv_heads*16+tokens*4+keys v=2+kv_heads*16+tokens*4+values packing=none; layers=1 tokens=4 kernel_block=2 kv_heads=1 keys=3 values=1 dtype=bfloat16 k=kernel_blocks*8+tokens*4+keys v=3+kernel_blocks*8+tokens*4 packing=none";

    fn page(form: Text, layer: u32) -> Result<Page, Status> {
        take_result(|page| pillion_page_form(form, layer, page))
    }

    #[test]
    fn layers_of_two_forms_follow_each_other_and_strides_are_bytes() {
        for (layer, begin) in [(0, 0), (1, 128), (2, 256)] {
            let found = page(Text::of_static(FORM), layer).unwrap();
            assert_eq!((found.layers, found.begin, found.shard_bytes), (3, begin, 288));
        }
        let [first, last] = [1, 2].map(|layer| page(Text::of_static(FORM), layer).unwrap());
        assert_eq!((first.element_bytes, first.bytes, first.kernel_block_tokens), (4, 128, 4));
        assert_eq!(first.k, Place { offset: 0, kv_heads: 64, kernel_blocks: 0, tokens: 16, elements: 4 });
        assert_eq!((last.element_bytes, last.bytes, last.kernel_block_tokens), (2, 32, 2));
        assert_eq!(last.v, Place { offset: 6, kv_heads: 0, kernel_blocks: 16, tokens: 8, elements: 0 });
    }

    #[test]
    fn what_cannot_be_read_is_an_error_that_names_the_fact() {
        for (form, layer, text) in [
            (Text::of_static(FORM), 3, "page_form: layer 3 does not exist"),
            (
                Text::of_static(c"layers=1 tokens=4 order=tokens packing=amx"),
                0,
                "page_form: strides do not describe pages with packing=amx",
            ),
            (Text::null(), 0, "page_form is NULL"),
        ] {
            assert_eq!(page(form, layer).unwrap_err(), Status::Argument);
            assert!(last_text().starts_with(text), "{}", last_text());
        }
        assert_eq!(pillion_page_form(Text::of_static(FORM), 0, None), Status::Argument);
    }
}
