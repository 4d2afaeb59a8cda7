//! The text of the fact `page_form`, written from the axes of an engine's tensors.

use std::cmp::Reverse;

use super::{AXES, Place};

/// The packing of pages with each token's key and then its value.
pub const KEY_THEN_VALUE: &str = "none";
/// The packing of pages with a head's keys, dimension by dimension, and then its values, token by token.
pub const KEYS_THEN_VALUES: &str = "keys then values";

/// The axes of a page in a tensor of vLLM 0.29 and later; the first one is missing without kernel blocks.
const TENSOR_AXES: [&str; 4] = ["kernel_blocks", "kv_heads", "tokens", "content"];

/// One layer's tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Lengths of all axes.
    pub sizes: Vec<u64>,
    /// Strides of all axes; only those of the page are compared.
    pub strides: Vec<u64>,
    /// The axis of blocks.
    pub block_axis: usize,
    /// The data type of an element.
    pub dtype: String,
    /// Elements of a head's key; 0 if not known.
    pub keys: u64,
    /// Elements of a head's value.
    pub values: u64,
    /// The kernels' arrangement of keys and values: one of the two above, or any other name, for equal
    /// engines alone.
    pub packing: String,
}

/// An axis of a page.
struct Axis {
    name: String,
    size: u64,
    stride: u64,
}

/// Writes the text for the layers of a cache group, in their order.
pub fn describe_layers(layers: &[Tensor]) -> String {
    let forms: Vec<String> = layers.iter().map(Tensor::form).collect();
    let runs = forms.chunk_by(|one, next| one == next);
    runs.map(|run| format!("layers={} {}", run.len(), run[0])).collect::<Vec<_>>().join("; ")
}

// === impl Tensor ===

impl Tensor {
    /// Writes the inside of a page: K and V by strides if they are known, otherwise the lengths and the order
    /// of its axes.
    fn form(&self) -> String {
        let axes = self.axes();
        let mut order: Vec<&Axis> = axes.iter().filter(|axis| axis.size > 1).collect();
        order.sort_by_key(|axis| Reverse(axis.stride));
        let size = |name: &str| axes.iter().find(|axis| axis.name == name).map(|axis| axis.size);
        let sizes = if let [blocks, Some(heads), Some(tokens), Some(content)] = TENSOR_AXES.map(size) {
            let blocks = blocks.unwrap_or(1);
            if let Some(plain) = self.plain([heads, blocks, tokens, content], &order) {
                return plain;
            }
            let keys = if (1..=content).contains(&self.keys) { self.keys } else { content };
            let (all, values) = (tokens * blocks, content - keys);
            format!("tokens={all} kernel_block={tokens} kv_heads={heads} keys={keys} values={values}")
        } else {
            joined(axes.iter().map(|axis| format!("{}={}", axis.name, axis.size)), " ")
        };
        let order = joined(order.iter().map(|axis| axis.name.clone()), ",");
        format!("{sizes} dtype={} order={order} packing={}", self.dtype, self.packing)
    }

    /// Returns all axes except the axis of blocks, by name.
    fn axes(&self) -> Vec<Axis> {
        let count = self.sizes.len();
        let named = self.block_axis == 0 && [4, 5].contains(&count);
        let name =
            |axis: usize| if named { TENSOR_AXES[axis + 4 - count].into() } else { format!("axis{axis}") };
        let inside = (0..count).filter(|axis| *axis != self.block_axis);
        let axis = |axis| Axis { name: name(axis), size: self.sizes[axis], stride: self.strides[axis] };
        inside.map(axis).collect()
    }

    /// Writes K and V by strides in a dense page of these lengths with its axes in this order, the slowest
    /// first. `None` if their places are not known.
    fn plain(&self, [heads, mut blocks, mut tokens, content]: [u64; 4], order: &[&Axis]) -> Option<String> {
        let (keys, values) = (self.keys, self.values);
        if keys < 1 || values < 1 || keys + values != content {
            return None;
        }
        let (mut strides, mut dense) = ([0; 4], 1);
        for axis in order.iter().rev() {
            strides[AXES.iter().position(|name| *name == axis.name).unwrap_or(AXES.len())] = dense;
            dense *= axis.size;
        }
        let [head, mut block, token, step] = strides;
        let in_order = block == 0 && step == 1 && [0, content].contains(&token);
        if block > 0 && block == tokens * token {
            // Consecutive kernel blocks make the same page as consecutive tokens.
            (tokens, blocks, block) = (tokens * blocks, 1, 0);
        }
        let both = [head, block, token, step];
        let (k, v, start) = match &*self.packing {
            KEY_THEN_VALUE => (both, both, keys * step),
            KEYS_THEN_VALUES if in_order && keys == values => {
                ([head, 0, 1, tokens], [head, 0, values, 1], tokens * keys)
            }
            _ => return None,
        };
        let place = |offset, strides: [u64; 4], name, length| {
            let lengths = [heads, blocks, tokens, length];
            let strides = std::array::from_fn(|axis| if lengths[axis] > 1 { strides[axis] } else { 0 });
            Place { offset, strides }.terms(name)
        };
        let (k, v) = (place(0, k, "keys", keys), place(start, v, "values", values));
        let kernel_block = if blocks > 1 { format!("kernel_block={tokens} ") } else { String::new() };
        Some(format!(
            "tokens={} {kernel_block}kv_heads={heads} keys={keys} values={values} dtype={} k={k} v={v} packing=none",
            tokens * blocks,
            self.dtype
        ))
    }
}

fn joined(texts: impl Iterator<Item = String>, by: &str) -> String {
    texts.collect::<Vec<_>>().join(by)
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    /// Three blocks of a dense tensor with these axes inside, the slowest first.
    fn tensor(sizes: &[u64], (keys, values): (u64, u64), packing: &str) -> Tensor {
        let sizes: Vec<u64> = [&[3], sizes].concat();
        let strides = (0..sizes.len()).map(|axis| sizes[axis + 1..].iter().product()).collect();
        Tensor {
            sizes,
            strides,
            block_axis: 0,
            dtype: "float16".into(),
            keys,
            values,
            packing: packing.into(),
        }
    }

    fn written(sizes: &[u64], content: (u64, u64), packing: &str) -> String {
        describe_layers(&[tensor(sizes, content, packing)])
    }

    #[test]
    fn places_of_keys_and_values_are_written_and_read() {
        let sizes = "tokens=4 kv_heads=2 keys=3 values=3 dtype=float16";
        for (packing, k, v) in [
            (KEY_THEN_VALUE, "kv_heads*24+tokens*6+keys", "3+kv_heads*24+tokens*6+values"),
            (KEYS_THEN_VALUES, "kv_heads*24+keys*4+tokens", "12+kv_heads*24+tokens*3+values"),
        ] {
            let text = written(&[2, 4, 6], (3, 3), packing);
            assert_eq!(text, format!("layers=1 {sizes} k={k} v={v} packing=none"));
            assert_eq!(parse(&text).unwrap()[0].k.terms("keys"), k);
        }
        // An axis of length 1 has no stride.
        for packing in [KEY_THEN_VALUE, KEYS_THEN_VALUES] {
            let least = written(&[1, 1, 2], (1, 1), packing);
            assert!(least.ends_with("k=0 v=1 packing=none") && parse(&least).is_ok(), "{least}");
        }
    }

    #[test]
    fn kernel_blocks_show_where_they_part_tokens() {
        let apart = written(&[2, 2, 4, 5], (3, 2), KEY_THEN_VALUE);
        assert!(apart.contains("tokens=8 kernel_block=4 kv_heads=2 keys=3 values=2"), "{apart}");
        assert!(apart.contains(" k=kernel_blocks*40+kv_heads*20+tokens*5+keys v=3+"), "{apart}");
        assert_eq!(parse(&apart).unwrap()[0].kernel_block, 4);
        let one = written(&[2, 1, 4, 5], (3, 2), KEY_THEN_VALUE);
        assert_eq!(one, written(&[1, 8, 5], (3, 2), KEY_THEN_VALUE));
        assert!(!written(&[2, 1, 4, 6], (3, 3), KEYS_THEN_VALUES).contains(" k="));
    }

    #[test]
    fn pages_without_known_places_have_the_order_of_their_axes() {
        let other = written(&[2, 4, 5], (3, 2), "amx");
        let sizes = "layers=1 tokens=4 kernel_block=4 kv_heads=2 keys=3 values=2 dtype=float16";
        assert_eq!(other, format!("{sizes} order=kv_heads,tokens,content packing=amx"));
        for content in [(0, 0), (2, 2), (6, 0)] {
            assert!(
                written(&[2, 4, 5], content, "none").ends_with("order=kv_heads,tokens,content packing=none")
            );
        }
        let pair = Tensor { block_axis: 1, ..tensor(&[2, 4, 5], (0, 0), "none") };
        let axes = "layers=1 axis0=3 axis2=4 axis3=5 dtype=float16 order=axis0,axis2,axis3 packing=none";
        assert_eq!(describe_layers(&[pair]), axes);
    }

    #[test]
    fn layers_of_one_form_are_counted_together() {
        let (one, other) = (tensor(&[2, 4, 5], (3, 2), "none"), tensor(&[2, 4, 6], (3, 3), "none"));
        let text = describe_layers(&[one.clone(), one.clone(), other, one]);
        let counts: Vec<u32> = parse(&text).unwrap().iter().map(|page| page.layers).collect();
        assert_eq!(counts, [2, 1, 1]);
    }
}
