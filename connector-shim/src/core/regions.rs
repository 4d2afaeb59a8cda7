//! The place of a block's bytes, read from the strides of an engine's KV tensors.
//!
//! A block is the concatenation of its regions in (group, layer) order. The name of a layout does not matter: only the strides are believed.

use shm_protocol::page_form::{self, Tensor};

/// A load is delivered in cuts, groups of layers. The first and the last are small, so that a forward begins early and has little left to
/// compute when the copy ends; between them few large ones are copied fastest: a cut's part of a block is one run where the layout allows,
/// and runs of 128 KiB move at 51.6 GB/s, of 256 KiB at 53, of 1 MiB at 54.5.
const SMALLEST_CUT_BYTES: u64 = 128 << 10;
/// The most layers of the smallest cut: more small pages would leave a model of 32 layers no middle.
const SMALLEST_CUT_LAYERS_MAX: usize = 4;
/// A middle cut's layers by the smallest cut's: a forward computes so many while the next cut is copied, or the reverse.
const LARGEST_BY_SMALLEST: usize = 6;
/// A load's word counts delivered cuts in one byte.
const CUTS_MAX: usize = 255;

/// A layer's tensor in its storage.
#[derive(Clone, Debug)]
pub struct LayerMemory {
    /// The storage, by its place among all.
    pub storage: u32,
    /// Elements of the storage before the tensor.
    pub offset: u64,
    /// Bytes of an element.
    pub item_bytes: u64,
    /// The axes.
    pub tensor: Tensor,
}

/// A dense run of bytes in every block.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct BlockRun {
    /// The storage.
    pub storage: u32,
    /// Bytes of the storage before the run in block 0.
    pub offset: u64,
    /// Bytes from block to block.
    pub stride: u64,
    /// Bytes.
    pub bytes: u64,
}

/// The layers of one cache group as a block has them.
#[derive(Clone, Debug)]
pub struct BlockLayout {
    /// The block's bytes, in order.
    pub regions: Vec<BlockRun>,
    /// The inside of a page.
    pub form: String,
    /// The end of each layer's bytes in a block.
    pub layer_ends: Vec<u64>,
    /// The number of layers delivered together by a load, cut by cut.
    pub cut_layers: Vec<usize>,
}

// === impl BlockLayout ===

impl BlockLayout {
    /// The layout of a group's layers, in their order.
    pub fn new(layers: &[LayerMemory]) -> Self {
        let (mut regions, mut layer_ends, mut end) = (Vec::new(), Vec::new(), 0);
        for layer in layers {
            for run in layer.runs() {
                end += run.bytes;
                join_run(&mut regions, run);
            }
            layer_ends.push(end);
        }
        let tensors: Vec<Tensor> = layers.iter().map(|layer| layer.tensor.clone()).collect();
        let cut_layers = cut_layers(&layer_ends);
        Self { regions, form: page_form::describe_layers(&tensors), layer_ends, cut_layers }
    }

    /// The end of each cut's bytes in a block.
    pub fn cuts(&self) -> Vec<u64> {
        let mut layers = 0;
        let end = |count: &usize| {
            layers += count;
            self.layer_ends[layers - 1]
        };
        self.cut_layers.iter().map(end).collect()
    }
}

/// Adds a run, joining it to the one before where both are one in every block.
fn join_run(regions: &mut Vec<BlockRun>, run: BlockRun) {
    match regions.last_mut() {
        Some(last)
            if (last.storage, last.stride, last.offset + last.bytes)
                == (run.storage, run.stride, run.offset) =>
        {
            last.bytes += run.bytes;
        }
        _ => regions.push(run),
    }
}

fn cut_layers(layer_ends: &[u64]) -> Vec<usize> {
    let layers = layer_ends.len();
    let Some(block_bytes) = layer_ends.last() else { return Vec::new() };
    let smallest = (SMALLEST_CUT_BYTES * layers as u64).div_ceil(*block_bytes) as usize;
    let smallest = smallest.min(SMALLEST_CUT_LAYERS_MAX);
    let (mut ends, mut middle) = (Vec::new(), layers);
    for size in [smallest, 2 * smallest] {
        if middle >= 3 * size {
            ends.push(size);
            middle -= 2 * size;
        }
    }
    let largest = (LARGEST_BY_SMALLEST * smallest).max(layers.div_ceil(CUTS_MAX - 4));
    let parts = middle.div_ceil(largest);
    let middles = (0..parts).map(|part| middle * (part + 1) / parts - middle * part / parts);
    ends.iter().copied().chain(middles).chain(ends.iter().rev().copied()).collect()
}

// === impl LayerMemory ===

impl LayerMemory {
    /// The dense runs of the layer's page.
    fn runs(&self) -> Vec<BlockRun> {
        let Tensor { sizes, strides, block_axis, .. } = &self.tensor;
        let mut inner: Vec<usize> =
            (0..sizes.len()).filter(|axis| axis != block_axis && sizes[*axis] > 1).collect();
        inner.sort_by_key(|axis| strides[*axis]);
        let mut dense = 1;
        let is_dense = |axis: &&usize| {
            let goes_on = strides[**axis] == dense;
            dense *= if goes_on { sizes[**axis] } else { 1 };
            goes_on
        };
        let within = inner.iter().take_while(is_dense).count();
        let mut offsets = vec![self.offset];
        for axis in inner[within..].iter().rev() {
            let steps = |offset: u64| (0..sizes[*axis]).map(move |step| offset + step * strides[*axis]);
            offsets = offsets.into_iter().flat_map(steps).collect();
        }
        let [stride, bytes] = [strides[*block_axis], dense].map(|elements| elements * self.item_bytes);
        let run =
            |offset| BlockRun { storage: self.storage, offset: offset * self.item_bytes, stride, bytes };
        offsets.into_iter().map(run).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;

    /// The cuts of layers with pages of a size, and their bytes.
    fn cuts_of(layers: usize, page_bytes: u64) -> (Vec<usize>, Vec<u64>) {
        let layer_ends: Vec<u64> = (1..=layers as u64).map(|layer| layer * page_bytes).collect();
        let cut_layers = cut_layers(&layer_ends);
        let layout = BlockLayout { regions: Vec::new(), form: String::new(), layer_ends, cut_layers };
        let cuts = layout.cuts();
        (layout.cut_layers, cuts)
    }

    #[test]
    fn cuts_are_small_at_both_ends() {
        let cases: [(usize, u64, &[usize]); 8] = [
            (32, 64, &[2, 4, 10, 10, 4, 2]),
            (32, 4, &[4, 8, 8, 8, 4]),
            (32, 100, &[2, 4, 10, 10, 4, 2]),
            (32, 512, &[1, 2, 5, 5, 5, 5, 6, 2, 1]),
            (80, 8, &[4, 8, 18, 19, 19, 8, 4]),
            (20, 32, &[4, 12, 4]),
            (3, 1, &[3]),
            (1, 64, &[1]),
        ];
        for (layers, page_kib, expected) in cases {
            let (cut_layers, cuts) = cuts_of(layers, page_kib * KIB);
            assert_eq!(cut_layers, expected);
            let starts = [0].iter().chain(&cuts);
            let pieces: Vec<u64> = cuts.iter().zip(starts).map(|(end, start)| end - start).collect();
            let wanted: Vec<u64> = expected.iter().map(|count| *count as u64 * page_kib * KIB).collect();
            assert_eq!(pieces, wanted);
        }
    }

    #[test]
    fn cuts_ascend_end_with_the_block_and_fit_their_byte() {
        for layers in [1, 2, 3, 4, 5, 61, 509, 511, 2000] {
            let (cut_layers, cuts) = cuts_of(layers, 1 << 20);
            assert!(cuts.is_sorted_by(|one, next| one < next), "{cuts:?}");
            assert_eq!(cuts.last(), Some(&((layers as u64) << 20)));
            assert!(cuts.len() <= CUTS_MAX);
            assert_eq!(cut_layers.iter().sum::<usize>(), layers);
            assert!(cut_layers.iter().all(|count| *count >= 1));
        }
    }
}
