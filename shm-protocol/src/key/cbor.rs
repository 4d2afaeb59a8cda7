//! Canonical CBOR of vLLM's hashed values: `[parent, [token, ...], extra keys | null]`, every head in its
//! shortest form.

use super::extra::{Atom, ExtraForm, ExtraKey};

const UNSIGNED: u8 = 0;
const NEGATIVE: u8 = 1 << 5;
const BYTES: u8 = 2 << 5;
const TEXT: u8 = 3 << 5;
const ARRAY: u8 = 4 << 5;
const NULL: u8 = 0xf6;
/// A head: the first byte and at most eight of the argument.
const HEAD_BYTES_MAX: usize = 9;

/// Appends one block. The caller has checked `extra`.
pub(super) fn block<T: Copy + Into<u64>>(
    out: &mut Vec<u8>,
    parent: &[u8],
    tokens: &[T],
    extra: &[ExtraKey],
    form: ExtraForm,
) {
    head(out, ARRAY, 3);
    head(out, BYTES, parent.len() as u64);
    out.extend_from_slice(parent);
    head(out, ARRAY, tokens.len() as u64);
    integers(out, tokens);
    if extra.is_empty() { out.push(NULL) } else { append_extra(out, extra, form) }
}

/// Appends extra keys. The caller has checked them.
pub(super) fn append_extra(out: &mut Vec<u8>, extra: &[ExtraKey], form: ExtraForm) {
    head(out, ARRAY, extra.len() as u64);
    for key in extra {
        let item = key.item(form);
        if item.is_tuple() {
            head(out, ARRAY, item.atoms().len() as u64);
        }
        item.atoms().iter().for_each(|value| atom(out, *value));
    }
}

/// Appends a text.
pub(super) fn text(out: &mut Vec<u8>, text: &str) {
    head(out, TEXT, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

fn atom(out: &mut Vec<u8>, atom: Atom<'_>) {
    match atom {
        Atom::Text(value) => text(out, value),
        Atom::Integer(value @ 0..) => head(out, UNSIGNED, value.cast_unsigned()),
        Atom::Integer(value) => head(out, NEGATIVE, (!value).cast_unsigned()),
        Atom::Bytes(bytes) => {
            head(out, BYTES, bytes.len() as u64);
            out.extend_from_slice(bytes);
        }
    }
}

fn head(out: &mut Vec<u8>, major: u8, argument: u64) {
    if argument < 24 {
        return out.push(major | argument as u8);
    }
    let mut bytes = [0; HEAD_BYTES_MAX];
    let length = encode(&mut bytes, argument);
    bytes[0] |= major;
    out.extend_from_slice(&bytes[..length]);
}

/// Appends integers. This is the hot path: room for all of them at once, no branch on a token's size. The
/// pickle form has the same loop: one function for both, with the encoder as an argument, took 120 ns a block
/// where this loop takes 65.
fn integers<T: Copy + Into<u64>>(out: &mut Vec<u8>, values: &[T]) {
    let mut end = out.len();
    out.resize(end + values.len() * HEAD_BYTES_MAX, 0);
    for value in values {
        let room = out[end..].first_chunk_mut().expect("nine bytes for each");
        end += encode(room, (*value).into());
    }
    out.truncate(end);
}

/// Writes an unsigned integer and returns its length; bytes after it are scratch.
fn encode(room: &mut [u8; HEAD_BYTES_MAX], value: u64) -> usize {
    /// Bytes of the argument after the first, by class.
    const LENGTHS: [u8; 5] = [0, 1, 2, 4, 8];
    let class = usize::from(value >= 24)
        + usize::from(value >= 1 << 8)
        + usize::from(value >= 1 << 16)
        + usize::from(value >= 1 << 32);
    let length = LENGTHS[class];
    room[0] = if class == 0 { value as u8 } else { 23 + class as u8 };
    room[1..].copy_from_slice(&value.unbounded_shl(64 - 8 * u32::from(length)).to_be_bytes());
    1 + usize::from(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 8949, appendix A.
    #[test]
    fn integers_have_their_shortest_form() {
        let examples: [(u64, &[u8]); 8] = [
            (0, b"\x00"),
            (23, b"\x17"),
            (24, b"\x18\x18"),
            (100, b"\x18\x64"),
            (1000, b"\x19\x03\xe8"),
            (1_000_000, b"\x1a\x00\x0f\x42\x40"),
            (1_000_000_000_000, b"\x1b\x00\x00\x00\xe8\xd4\xa5\x10\x00"),
            (u64::MAX, b"\x1b\xff\xff\xff\xff\xff\xff\xff\xff"),
        ];
        for (value, expected) in examples {
            let mut out = Vec::new();
            integers(&mut out, &[value, value]);
            assert_eq!(out, [expected, expected].concat());
        }
        let mut out = Vec::new();
        atom(&mut out, Atom::Integer(-1000));
        assert_eq!(out, b"\x39\x03\xe7");
    }
}
