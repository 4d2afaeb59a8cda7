//! Facts of engines, for callers without vLLM.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;
use shm_protocol::key::Algorithm;
use shm_protocol::namespace;
use shm_protocol::page_form::{self, DTYPES, Page, PagePlace, Tensor};

use super::ShimError;
use crate::core::regions::{BlockLayout, BlockRun, LayerMemory};

/// The digest of a directory's weight files, if it has any.
#[pyfunction]
pub(super) fn weight_files(py: Python<'_>, directory: PathBuf) -> PyResult<Option<String>> {
    Ok(py.detach(|| shm_protocol::weight_files::digest_files(&directory))?)
}

/// The differences between two engines' facts, the most telling first: name, ours, theirs, and the remedy.
#[pyfunction]
#[pyo3(name = "differences")]
pub(super) fn list_differences(
    ours: BTreeMap<String, String>,
    theirs: BTreeMap<String, String>,
) -> Vec<(String, Option<String>, Option<String>, &'static str)> {
    let found = namespace::list_differences(&ours, &theirs);
    let owned = |value: Option<&str>| value.map(str::to_owned);
    found
        .into_iter()
        .map(|found| (found.name.to_owned(), owned(found.ours), owned(found.theirs), found.remedy))
        .collect()
}

/// The fact `hash_algorithm` for vLLM's algorithm of this name.
#[pyfunction]
pub(super) fn hash_fact(algorithm: &str) -> String {
    Algorithm::fact_of(algorithm)
}

/// Sizes, dtype, and where K and V are, of each run of like layers.
type Sizes = (u32, u32, u32, u32, u32, u32);
type Pages = Vec<(Sizes, &'static str, (u64, [u64; 4]), (u64, [u64; 4]))>;

/// The pages that a `page_form` describes.
#[pyfunction]
pub(super) fn read_page_form(text: &str) -> PyResult<Pages> {
    let place = |place: &PagePlace| (place.offset, place.strides);
    let pages = page_form::parse_pages(text).map_err(|error| ShimError::new_err(error.to_string()))?;
    let sizes =
        |page: &Page| (page.layers, page.tokens, page.kernel_block, page.kv_heads, page.keys, page.values);
    Ok(pages.iter().map(|page| (sizes(page), page.dtype.as_text(), place(&page.k), place(&page.v))).collect())
}

/// A layer's storage, elements before its tensor, bytes of one; lengths and strides of all axes, the axis of
/// blocks, dtype, and of a head's key and value the elements and the packing.
type LayerTensor = ((u32, u64, u64), Vec<u64>, Vec<u64>, usize, String, (u64, u64, String));
/// Regions: storage, offset of block 0, stride, bytes; the `page_form`; the end and the layers of each cut.
type Layout = (Vec<(u32, u64, u64, u64)>, String, Vec<u64>, Vec<usize>);

/// Returns the layout of a cache group's layers in a block.
#[pyfunction]
pub(super) fn lay_out_block(layers: Vec<LayerTensor>) -> Layout {
    let layer =
        |((storage, offset, item_bytes), sizes, strides, block_axis, dtype, (keys, values, packing))| {
            let tensor = Tensor { sizes, strides, block_axis, dtype, keys, values, packing };
            LayerMemory { storage, offset, item_bytes, tensor }
        };
    let layout = BlockLayout::new(&layers.into_iter().map(layer).collect::<Vec<_>>());
    let region = |run: &BlockRun| (run.storage, run.offset, run.stride, run.bytes);
    let regions = layout.regions.iter().map(region).collect();
    let cuts = layout.cuts();
    (regions, layout.form, cuts, layout.cut_layers)
}

/// Bytes of an element of each type that a page can have.
pub(super) fn item_bytes() -> BTreeMap<&'static str, u64> {
    DTYPES.iter().map(|dtype| (dtype.as_text(), dtype.bytes)).collect()
}
