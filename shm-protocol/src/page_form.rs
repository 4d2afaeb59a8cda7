//! The fact `page_form`: the layers of a block, and the place of each element of K and V in a page, by
//! strides. `PROTOCOL.md`, section 1, defines the text.

mod tensor;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::str::FromStr;

use thiserror::Error;

pub use self::tensor::{KEY_THEN_VALUE, KEYS_THEN_VALUES, Tensor, describe_layers};

/// Most layers of one text, more than any model has, so a reader may list them.
const LAYERS_MAX: u64 = 4096;
/// An exclusive limit for the bytes of one layer's page, equal to the handshake's limit for all regions of a
/// block.
const PAGE_BYTES_MAX: u64 = 1 << 40;
/// The axes of K and V except the last one, `keys` or `values`.
const AXES: [&str; 3] = ["kv_heads", "kernel_blocks", "tokens"];

/// The type of an element.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Dtype {
    /// The name of the type in `page_form` and in torch.
    pub name: &'static CStr,
    /// Bytes of an element.
    pub bytes: u64,
}

/// Every type of elements of a plain page.
pub const DTYPES: [Dtype; 8] = [
    Dtype { name: c"float64", bytes: 8 },
    Dtype { name: c"float32", bytes: 4 },
    Dtype { name: c"float16", bytes: 2 },
    Dtype { name: c"bfloat16", bytes: 2 },
    Dtype { name: c"uint8", bytes: 1 },
    Dtype { name: c"int8", bytes: 1 },
    Dtype { name: c"float8_e4m3fn", bytes: 1 },
    Dtype { name: c"float8_e5m2", bytes: 1 },
];

/// The reason why a text is no description of plain pages.
#[derive(Clone, Debug, Error, Eq, PartialEq)]
pub enum PageFormError {
    /// Strides do not describe the pages.
    #[error(
        "page_form: strides do not describe pages with packing={packing}, so only engines of the same kind can read \
         them: run the other engine with plain pages, or convert them in it ({text})"
    )]
    Packing {
        /// The rule.
        packing: String,
        /// The text.
        text: String,
    },
    /// No engine states such a text.
    #[error("page_form: {why}: copy it from `pillion ctl namespaces` ({text})")]
    Unreadable {
        /// The error in the text.
        why: String,
        /// The text.
        text: String,
    },
}

/// The places of the elements of K or of V in a page, counted in elements.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Place {
    /// The place of the first element.
    pub offset: u64,
    /// The distance between neighbours of an axis, in the order of [`Page::lengths`]; 0 for an axis of length 1.
    pub strides: [u64; 4],
}

/// The inside of one layer's page, for a number of consecutive layers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Page {
    /// Layers of this form.
    pub layers: u32,
    /// Tokens of a page.
    pub tokens: u32,
    /// Tokens of the smaller blocks into which attention kernels divide a page; a divisor of `tokens`.
    pub kernel_block: u32,
    /// Heads of one shard.
    pub kv_heads: u32,
    /// Elements of a key.
    pub keys: u32,
    /// Elements of a value.
    pub values: u32,
    /// The data type of an element of K and of V.
    pub dtype: Dtype,
    /// Offset and strides of the keys, in elements from the start of a layer's page.
    pub k: Place,
    /// Offset and strides of the values, in elements from the start of a layer's page.
    pub v: Place,
}

/// One layer's page, for any arrangement of its inside.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Layer {
    /// Bytes of its page.
    pub bytes: u64,
    /// The data type of its elements.
    pub dtype: Dtype,
}

/// Returns the layers of one shard of a block, in their order, also those of pages without strides. `None` if
/// the text does not describe them.
pub fn layers(text: &str) -> Option<Vec<Layer>> {
    let mut layers = Vec::new();
    for page in text.split("; ") {
        let (mut count, mut elements, mut content, mut dtype) = (0u32, 1u64, 0u64, None);
        for (name, value) in page.split(' ').filter_map(|word| word.split_once('=')) {
            match name {
                "layers" => count = value.parse().ok()?,
                "dtype" => dtype = Dtype::named(value),
                "keys" | "values" => content = content.checked_add(value.parse().ok()?)?,
                _ if ["tokens", "kv_heads"].contains(&name) || name.starts_with("axis") => {
                    elements = elements.checked_mul(value.parse().ok()?)?;
                }
                _ => {}
            }
        }
        let dtype = dtype?;
        let bytes =
            elements.checked_mul(content.max(1))?.checked_mul(dtype.bytes).filter(|bytes| *bytes > 0)?;
        if layers.len() as u64 + u64::from(count) > LAYERS_MAX {
            return None;
        }
        layers.extend(std::iter::repeat_n(Layer { bytes, dtype }, count as usize));
    }
    Some(layers)
}

/// Returns the pages of one shard of a block, layer after layer; fails unless strides describe all of them.
pub fn parse(text: &str) -> Result<Vec<Page>, PageFormError> {
    let pages = text.split("; ").map(Page::parse).collect::<Result<Vec<_>, _>>()?;
    if pages.iter().map(|page| u64::from(page.layers)).sum::<u64>() > LAYERS_MAX {
        return Err(unreadable(text, format!("more than {LAYERS_MAX} layers")));
    }
    Ok(pages)
}

fn unreadable(text: &str, why: impl Into<String>) -> PageFormError {
    PageFormError::Unreadable { why: why.into(), text: text.to_owned() }
}

/// Parses a number above 0 without sign and leading zeros.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.starts_with(|first| matches!(first, '1'..='9')).then(|| text.parse().ok())?
}

// === impl Dtype ===

impl Dtype {
    fn named(name: &str) -> Option<Self> {
        DTYPES.into_iter().find(|dtype| dtype.text() == name)
    }

    /// Returns the name as text.
    pub fn text(self) -> &'static str {
        self.name.to_str().expect("ASCII")
    }
}

// === impl Place ===

impl Place {
    /// Parses terms joined by `+`: an offset, and axes with their strides.
    fn parse(text: &str, content: &str) -> Option<Self> {
        let mut place = Self::default();
        for term in text.split('+').filter(|_| text != "0") {
            let (axis, stride) = term.split_once('*').unwrap_or((term, "1"));
            let slot = match AXES.iter().chain([&content]).position(|name| *name == axis) {
                Some(at) => &mut place.strides[at],
                None => &mut place.offset,
            };
            let found = number(if AXES.contains(&axis) || axis == content { stride } else { term })?;
            if std::mem::replace(slot, found) != 0 {
                return None;
            }
        }
        Some(place)
    }

    /// Writes the text for [`Place::parse`].
    fn terms(&self, content: &str) -> String {
        let mut axes: Vec<_> = self.strides.into_iter().zip(AXES.into_iter().chain([content])).collect();
        axes.retain(|(stride, _)| *stride > 0);
        axes.sort_by_key(|(stride, _)| Reverse(*stride));
        let offset = (self.offset > 0).then(|| self.offset.to_string());
        let term = |(stride, axis): (u64, &str)| {
            if stride > 1 { format!("{axis}*{stride}") } else { axis.to_string() }
        };
        let terms: Vec<String> = offset.into_iter().chain(axes.into_iter().map(term)).collect();
        if terms.is_empty() { "0".into() } else { terms.join("+") }
    }

    /// True if every axis longer than 1 has a stride, no other one has, and all elements lie below `end`.
    fn fits(&self, lengths: [u32; 4], end: u64) -> bool {
        let mut last = Some(self.offset);
        for (stride, length) in self.strides.into_iter().zip(lengths) {
            if (stride > 0) != (length > 1) {
                return false;
            }
            last = last
                .zip(stride.checked_mul(u64::from(length) - 1))
                .and_then(|(at, more)| at.checked_add(more));
        }
        last.is_some_and(|last| last < end)
    }
}

// === impl Page ===

impl Page {
    fn parse(text: &str) -> Result<Self, PageFormError> {
        let mut words = BTreeMap::new();
        for word in text.split(' ') {
            let (name, value) =
                word.split_once('=').ok_or_else(|| unreadable(text, format!("the word {word:?}")))?;
            if words.insert(name, value).is_some() {
                return Err(unreadable(text, format!("{name} twice")));
            }
        }
        let packing = words.remove("packing").unwrap_or("unknown");
        if packing != "none" || !words.contains_key("k") {
            return Err(PageFormError::Packing { packing: packing.to_owned(), text: text.to_owned() });
        }
        let optional = |words: &mut BTreeMap<_, &str>, name| {
            let wrong = |value| unreadable(text, format!("{name}={value} is not a number of at least 1"));
            words.remove(name).map(|value| number::<u32>(value).ok_or_else(|| wrong(value))).transpose()
        };
        let mut size =
            |name| optional(&mut words, name)?.ok_or_else(|| unreadable(text, format!("no {name}")));
        let [layers, tokens] = [size("layers")?, size("tokens")?];
        let [kv_heads, keys, values] = [size("kv_heads")?, size("keys")?, size("values")?];
        let kernel_block = optional(&mut words, "kernel_block")?.unwrap_or(tokens);
        let mut word = |name| words.remove(name).ok_or_else(|| unreadable(text, format!("no {name}")));
        let name = word("dtype")?;
        let dtype =
            Dtype::named(name).ok_or_else(|| unreadable(text, format!("dtype={name} is not known here")))?;
        let mut place = |name, content| {
            let text_of = word(name)?;
            let wrong = || {
                unreadable(
                    text,
                    format!("{name}={text_of} is not a sum such as 64+kv_heads*512+tokens*8+{content}"),
                )
            };
            Place::parse(text_of, content).ok_or_else(wrong)
        };
        let (k, v) = (place("k", "keys")?, place("v", "values")?);
        if let Some(name) = words.keys().next() {
            return Err(unreadable(text, format!("{name} is not known here")));
        }
        let page = Self { layers, tokens, kernel_block, kv_heads, keys, values, dtype, k, v };
        let content = u64::from(keys) + u64::from(values);
        let elements = (u64::from(tokens) * u64::from(kv_heads)).checked_mul(content);
        let end =
            elements.filter(|end| end.checked_mul(dtype.bytes).is_some_and(|bytes| bytes < PAGE_BYTES_MAX));
        let end = end.ok_or_else(|| unreadable(text, "a page of 1 TiB or more"))?;
        if tokens % kernel_block != 0 {
            return Err(unreadable(text, "kernel blocks do not fill the page"));
        }
        for (name, place, lengths) in [("K", k, page.lengths(keys)), ("V", v, page.lengths(values))] {
            if !place.fits(lengths, end) {
                return Err(unreadable(text, format!("{name} lies outside the page with these strides")));
            }
        }
        Ok(page)
    }

    /// Returns the lengths of the axes of K or V: heads, kernel blocks, tokens of a kernel block, and
    /// `content`, its `keys` or `values`.
    pub fn lengths(&self, content: u32) -> [u32; 4] {
        [self.kv_heads, self.tokens / self.kernel_block, self.kernel_block, content]
    }

    /// Returns the bytes of one layer's page.
    pub fn bytes(&self) -> u64 {
        let content = u64::from(self.keys) + u64::from(self.values);
        u64::from(self.tokens) * u64::from(self.kv_heads) * content * self.dtype.bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The example of PROTOCOL.md.
    const PROTOCOL: &str = "layers=3 tokens=32 kv_heads=2 keys=64 values=64 dtype=float32 \
                            k=kv_heads*4096+keys*32+tokens v=2048+kv_heads*4096+tokens*64+values packing=none";

    fn refused(from: &str, to: &str) -> String {
        assert!(PROTOCOL.contains(from), "{from}");
        parse(&PROTOCOL.replace(from, to)).unwrap_err().to_string()
    }

    #[test]
    fn every_word_is_read() {
        let [page] = parse(PROTOCOL).unwrap().try_into().unwrap();
        assert_eq!((page.layers, page.tokens, page.kernel_block), (3, 32, 32));
        assert_eq!((page.kv_heads, page.keys, page.values, page.dtype.text()), (2, 64, 64, "float32"));
        assert_eq!(page.k, Place { offset: 0, strides: [4096, 0, 1, 32] });
        assert_eq!(page.v, Place { offset: 2048, strides: [4096, 0, 64, 1] });
        assert_eq!((page.lengths(page.keys), page.bytes()), ([2, 1, 32, 64], 32_768));
        let halves = "layers=1 tokens=8 kernel_block=4 kv_heads=1 keys=2 values=1 dtype=int8 \
                      k=kernel_blocks*12+tokens*3+keys v=2+kernel_blocks*12+tokens*3 packing=none";
        let both = parse(&format!("{PROTOCOL}; {halves}")).unwrap();
        assert_eq!(both[1].v, Place { offset: 2, strides: [0, 12, 3, 0] });
        assert_eq!((both.len(), both[1].lengths(1), both[1].bytes()), (2, [1, 2, 4, 1], 24));
        let least = "layers=1 tokens=1 kv_heads=1 keys=1 values=1 dtype=int8 k=0 v=1 packing=none";
        assert_eq!(parse(least).unwrap()[0].v, Place { offset: 1, strides: [0; 4] });
    }

    #[test]
    fn the_layers_of_every_text_are_known_whatever_arranges_its_pages() {
        let sizes = |text: &str| {
            let found = layers(text);
            found.map(|found| found.iter().map(|layer| (layer.bytes, layer.dtype.text())).collect::<Vec<_>>())
        };
        assert_eq!(sizes(PROTOCOL), Some(vec![(32_768, "float32"); 3]));
        let packed = "layers=2 tokens=16 kernel_block=16 kv_heads=2 keys=32 values=32 dtype=bfloat16 order=x packing=amx; \
                      layers=1 axis0=2 axis1=16 axis3=9 dtype=uint8 order=axis3,axis1,axis0 packing=none";
        assert_eq!(sizes(packed), Some(vec![(4096, "bfloat16"), (4096, "bfloat16"), (288, "uint8")]));
        for text in [
            "",
            "layers=3",
            "layers=x tokens=8 dtype=int8",
            "layers=1 tokens=8 dtype=int4",
            "layers=1 tokens=0 dtype=int8",
        ] {
            assert_eq!(sizes(text), None, "{text}");
        }
        let most = "layers=4096 tokens=1 dtype=int8";
        assert_eq!(sizes(most).map(|layers| layers.len()), Some(4096));
        assert_eq!(sizes(&format!("{most}; layers=1 tokens=1 dtype=int8")), None);
        assert_eq!(sizes("layers=1 tokens=18446744073709551615 kv_heads=2 dtype=int8"), None);
    }

    #[test]
    fn what_is_refused_names_the_fact_and_what_is_wrong() {
        for (from, to, why) in [
            ("packing=none", "packing=amx", "packing=amx"),
            (" packing=none", "", "packing=unknown"),
            (
                "k=kv_heads*4096+keys*32+tokens v=2048+kv_heads*4096+tokens*64+values",
                "order=tokens",
                "packing=none",
            ),
            ("layers=3", "layers=4097", "more than 4096 layers"),
            ("layers=3 ", "", "no layers"),
            ("layers=3", "layers=3 layers=3", "layers twice"),
            ("layers=3", "layers=3 scale=2", "scale is not known"),
            ("layers=3", "3", "the word \"3\""),
            ("tokens=32", "tokens=0", "tokens=0"),
            ("tokens=32", "tokens=+32", "tokens=+32"),
            ("tokens=32", "tokens=32 kernel_block=5", "kernel blocks"),
            ("tokens=32", "tokens=4294967295", "1 TiB"),
            ("float32", "int4", "dtype=int4"),
            ("keys*32", "keys*99", "K lies outside"),
            ("v=2048", "v=2049", "V lies outside"),
            ("v=2048", "v=18446744073709551615", "V lies outside"),
            ("v=2048", "v=18446744073709551616", "is not a sum"),
            ("v=2048", "v=2048+1", "is not a sum"),
            ("keys*32+tokens", "keys*32", "K lies outside"),
            ("keys*32+tokens", "keys*32+tokens+kernel_blocks", "K lies outside"),
            ("keys*32+tokens", "keys*32+tokens+tokens", "is not a sum"),
            ("keys*32+tokens", "keys*0+tokens", "is not a sum"),
            ("keys*32+tokens", "values*32+tokens", "is not a sum"),
            ("k=kv_heads*4096", "k=", "is not a sum"),
        ] {
            let text = refused(from, to);
            assert!(text.starts_with("page_form: ") && text.contains(why), "{from} to {to}: {text}");
        }
    }

    proptest! {
        /// Any text of a peer gives an error, or pages whose elements lie in them.
        #[test]
        fn what_is_read_lies_in_the_page(
            at in 0..PROTOCOL.len(),
            gone in 0..12usize,
            put in "([0-9]{0,3}|[+* =;]|kernel_block=[0-9]{1,2} |kernel_blocks|kv_heads|tokens|keys|values|; ){0,4}",
        ) {
            let rest = PROTOCOL.get(at + gone..).unwrap_or_default();
            for page in parse(&format!("{}{put}{rest}", &PROTOCOL[..at])).unwrap_or_default() {
                for (place, content) in [(page.k, page.keys), (page.v, page.values)] {
                    let lengths = page.lengths(content).map(|length| u64::from(length) - 1);
                    let last = place.offset + place.strides.iter().zip(lengths).map(|(stride, most)| stride * most).sum::<u64>();
                    prop_assert!((last + 1) * page.dtype.bytes <= page.bytes());
                }
            }
        }
    }
}
