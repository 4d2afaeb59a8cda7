//! The Python pickle, protocol 5, of vLLM's hashed values: `(parent, (token, ...), extra keys or None)`, byte
//! for byte as CPython's C pickler writes it.
//!
//! CPython's pickler memoises by object identity: the second occurrence of the same text object becomes a
//! reference. Only the engine knows whether two equal texts are one object, so extra keys with possibly
//! repeated texts are refused.

use super::extra::{Atom, ExtraForm, ExtraKey};
use super::{Algorithm, KeyError};

const PROTO: [u8; 2] = [0x80, 5];
const FRAME: u8 = 0x95;
const FRAME_HEAD_BYTES: usize = 9;
/// The limit of one frame: from here on CPython would begin another frame, or write a text outside of any.
const FRAME_BYTES_MAX: usize = 1 << 16;
const MEMOIZE: u8 = 0x94;
const MARK: u8 = b'(';
const TUPLE: u8 = b't';
const TUPLE1: u8 = 0x85;
const NONE: u8 = b'N';
const STOP: u8 = b'.';
const BININT: u8 = b'J';
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const LONG1: u8 = 0x8a;
const SHORT_BINBYTES: u8 = b'C';
const BINBYTES: u8 = b'B';
const SHORT_BINUNICODE: u8 = 0x8c;
const BINUNICODE: u8 = b'X';
/// A LONG1 of nine bytes.
const INTEGER_BYTES_MAX: usize = 11;

/// Most tokens of a block: with the longest integers, they and the rest fit one frame.
pub const PICKLE_BLOCK_TOKENS_MAX: u32 = 4096;
/// Most bytes of the texts of a block's extra key.
pub const PICKLE_EXTRA_BYTES_MAX: usize = 4096;
/// Bytes for opcodes, lengths, the parent, and an offset.
const REST_BYTES_MAX: usize = 256;
const _: () = assert!(
    PICKLE_BLOCK_TOKENS_MAX as usize * INTEGER_BYTES_MAX + PICKLE_EXTRA_BYTES_MAX + REST_BYTES_MAX
        < FRAME_BYTES_MAX
);

/// Refuses extra keys with an unknown pickle: more than one key, a text twice, or too many bytes.
pub(super) fn check(extra: &[ExtraKey], form: ExtraForm, algorithm: Algorithm) -> Result<(), KeyError> {
    let key = match extra {
        [] => return Ok(()),
        [key] => key,
        _ => return Err(KeyError::PickleIdentity(algorithm)),
    };
    let item = key.item(form);
    let texts = item.atoms();
    let repeated = |(index, text): (usize, &Atom<'_>)| texts[..index].contains(text);
    if texts.iter().enumerate().any(repeated) {
        return Err(KeyError::PickleIdentity(algorithm));
    }
    let found: usize = texts.iter().map(Atom::len).sum();
    if found > PICKLE_EXTRA_BYTES_MAX { Err(KeyError::PickleBytes { found, algorithm }) } else { Ok(()) }
}

/// Appends one block. The caller has checked `extra`.
pub(super) fn block<T: Copy + Into<u64>>(
    out: &mut Vec<u8>,
    parent: &[u8],
    tokens: &[T],
    extra: &[ExtraKey],
    form: ExtraForm,
) {
    frame(out, |out| {
        bytes(out, parent);
        if tokens.len() > 3 {
            out.push(MARK);
        }
        integers(out, tokens);
        end_tuple(out, tokens.len());
        match extra {
            [] => out.push(NONE),
            keys => {
                for key in keys {
                    item(out, key, form);
                }
                end_tuple(out, keys.len());
            }
        }
        end_tuple(out, 3);
    });
}

/// Appends the input of NONE_HASH.
pub(super) fn seed(out: &mut Vec<u8>, seed: &str) {
    frame(out, |out| text(out, seed));
}

/// Appends one pickle of one frame: no checked content is longer.
fn frame(out: &mut Vec<u8>, content: impl FnOnce(&mut Vec<u8>)) {
    out.extend_from_slice(&PROTO);
    out.push(FRAME);
    let begin = out.len() + FRAME_HEAD_BYTES - 1;
    out.resize(begin, 0);
    content(out);
    out.push(STOP);
    let length = (out.len() - begin) as u64;
    out[begin - 8..begin].copy_from_slice(&length.to_le_bytes());
}

fn item(out: &mut Vec<u8>, key: &ExtraKey, form: ExtraForm) {
    let item = key.item(form);
    for atom in item.atoms() {
        match *atom {
            Atom::Text(value) => text(out, value),
            Atom::Integer(value) => integer(out, value),
            Atom::Bytes(value) => bytes(out, value),
        }
    }
    if item.is_tuple() {
        end_tuple(out, item.atoms().len());
    }
}

/// Ends a tuple. Up to three elements have opcodes without a mark; the caller began longer tuples with one.
fn end_tuple(out: &mut Vec<u8>, elements: usize) {
    let opcode = if elements > 3 { TUPLE } else { TUPLE1 + elements as u8 - 1 };
    out.extend_from_slice(&[opcode, MEMOIZE]);
}

fn bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    sized(out, [SHORT_BINBYTES, BINBYTES], bytes);
}

fn text(out: &mut Vec<u8>, text: &str) {
    sized(out, [SHORT_BINUNICODE, BINUNICODE], text.as_bytes());
}

fn sized(out: &mut Vec<u8>, [short, long]: [u8; 2], bytes: &[u8]) {
    match u8::try_from(bytes.len()) {
        Ok(length) => out.extend_from_slice(&[short, length]),
        Err(_) => {
            out.push(long);
            out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        }
    }
    out.extend_from_slice(bytes);
    out.push(MEMOIZE);
}

/// Appends integers. This is the hot path: it makes room for all of them at once.
fn integers<T: Copy + Into<u64>>(out: &mut Vec<u8>, values: &[T]) {
    let mut end = out.len();
    out.resize(end + values.len() * INTEGER_BYTES_MAX, 0);
    for value in values {
        let room = out[end..].first_chunk_mut().expect("eleven bytes for each");
        end += encode(room, (*value).into());
    }
    out.truncate(end);
}

/// Writes an unsigned integer and returns its length; bytes after it are scratch. Below 2^31 no branch
/// depends on the size.
fn encode(room: &mut [u8; INTEGER_BYTES_MAX], value: u64) -> usize {
    if value > i32::MAX as u64 {
        // Two's complement: the highest bit of the last byte is the sign bit.
        let length = (u64::BITS - value.leading_zeros()) as usize / 8 + 1;
        room[..2].copy_from_slice(&[LONG1, length as u8]);
        room[2..10].copy_from_slice(&value.to_le_bytes());
        room[10] = 0;
        return 2 + length;
    }
    let class = usize::from(value >= 1 << 8) + usize::from(value >= 1 << 16);
    room[0] = [BININT1, BININT2, BININT][class];
    room[1..9].copy_from_slice(&value.to_le_bytes());
    1 + [1, 2, 4][class]
}

fn integer(out: &mut Vec<u8>, value: i64) {
    if let Ok(value) = u64::try_from(value) {
        integers(out, &[value]);
    } else if let Ok(value) = i32::try_from(value) {
        out.push(BININT);
        out.extend_from_slice(&value.to_le_bytes());
    } else {
        let length = (u64::BITS - value.leading_ones()) as usize / 8 + 1;
        out.extend_from_slice(&[LONG1, length as u8]);
        out.extend_from_slice(&value.to_le_bytes()[..length]);
    }
}
