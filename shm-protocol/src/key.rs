//! Block keys: namespace, cache group and the engine's own block hash, compared in full and never shortened.
//! [`Chain`] and [`Derivation`] derive such hashes as vLLM does, for callers without vLLM.

/// Reads named enums from their names.
macro_rules! read_by_name {
    ($name:ident, $what:literal, $valid:literal) => {
        impl std::str::FromStr for $name {
            type Err = KeyError;

            fn from_str(name: &str) -> Result<Self, KeyError> {
                let unknown = || KeyError::Unknown { what: $what, found: name.to_owned(), valid: $valid };
                Self::named(name).ok_or_else(unknown)
            }
        }

        impl TryFrom<String> for $name {
            type Error = KeyError;

            fn try_from(name: String) -> Result<Self, KeyError> {
                name.parse()
            }
        }
    };
}

mod algorithm;
mod cbor;
mod chain;
mod derivation;
mod digest;
mod extra;
mod pickle;
mod stated;

use std::fmt;

use sha2::{Digest, Sha256};
use thiserror::Error;

pub use self::algorithm::{Algorithm, NoneHashRule};
pub use self::chain::{BLOCK_TOKENS_MAX, Chain, DEFAULT_SEED, none_hash};
pub use self::derivation::{Derivation, Derived, coarsen_hashes, with_group};
pub use self::digest::extend_hashes;
pub use self::extra::{ExtraForm, ExtraKey};
pub use self::pickle::{PICKLE_BLOCK_TOKENS_MAX, PICKLE_EXTRA_BYTES_MAX};
pub use self::stated::read_block_tokens;

/// Bytes of the longest block hash (SHA-256).
pub const HASH_BYTES_MAX: usize = 32;
/// Bytes of the shorter block hash (XXH3-128).
pub const HASH_BYTES_SHORT: usize = 16;

/// The first bytes of the message of a folded hash, before the fold and the hash. No other digest of Pillion
/// begins so.
const FOLD_TAG: &[u8] = b"pillion fold";

/// A block's hash as the engine made it. A hash of 16 bytes has the second digest behind it ([`Chain`]), or
/// zeros if the engine knows hashes alone.
#[repr(C)]
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
pub struct BlockHash(pub [u8; HASH_BYTES_MAX]);

/// The cache group of every key, since each cache group is an engine with a namespace. Keys and formats keep
/// the field.
pub const GROUP: u32 = 0;

/// The key of a kept block in one process: the sidecar numbers the namespaces.
#[repr(C)]
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
pub struct BlockKey {
    /// Number of the namespace in this life of the sidecar.
    pub namespace: u32,
    /// Cache group.
    pub group: u32,
    /// The engine's hash of the block and all before it.
    pub hash: BlockHash,
}

/// 128-bit digest of every property that makes bytes interchangeable.
#[repr(C)]
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash)]
pub struct NamespaceDigest(pub [u8; 16]);

/// The label of a block on a device and between peers. Each read compares it with the wanted label.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct Label {
    /// Digest of every property that makes bytes interchangeable.
    pub namespace: NamespaceDigest,
    /// Cache group.
    pub group: u32,
    /// The engine's hash of the block.
    pub hash: BlockHash,
    /// Bytes of the block.
    pub bytes: u32,
}

const _: () = assert!(size_of::<BlockHash>() == 32 && align_of::<BlockHash>() == 1);
const _: () = assert!(size_of::<BlockKey>() == 40 && align_of::<BlockKey>() == 4);
const _: () = assert!(std::mem::offset_of!(BlockKey, hash) == 8);
const _: () = assert!(size_of::<NamespaceDigest>() == 16);

/// An invalid block hash, or a hash that cannot be derived as vLLM derives it.
#[derive(Debug, Error, Eq, PartialEq)]
pub enum KeyError {
    /// The hash has a length other than 16 or 32 bytes.
    #[error(
        "a block hash has {0} bytes: pass 16 (xxhash_cbor, xxhash) or 32 (sha256_cbor, sha256), as the engine made it"
    )]
    Length(usize),
    /// A word outside a closed set.
    #[error("{what} '{found}' is unknown: pass one of {valid}")]
    Unknown {
        /// The subject of the word.
        what: &'static str,
        /// The word.
        found: String,
        /// The valid words.
        valid: &'static str,
    },
    /// The first parent hash cannot be known from outside the engine.
    #[error(
        "without a seed the first hash (NONE_HASH) of {0} is random in every process: set PYTHONHASHSEED for the \
         engines and pass the same seed"
    )]
    RandomNoneHash(Algorithm),
    /// A seed too long for Python.
    #[error(
        "the seed has {0} bytes: pass the engines' PYTHONHASHSEED, \"random\" or a number up to 4294967295"
    )]
    Seed(usize),
    /// A block of no tokens, or of more tokens than this release hashes at once.
    #[error("a block has {tokens} tokens: {algorithm} is derived for 1 to {limit}")]
    BlockTokens {
        /// Tokens of a block.
        tokens: u32,
        /// The algorithm that hashes them.
        algorithm: Algorithm,
        /// The most tokens it takes.
        limit: u32,
    },
    /// A block that does not consist of whole hashed blocks.
    #[error(
        "blocks have {block} tokens and hashes cover {hashed}: block_size must be a multiple of hash_block_size"
    )]
    HashBlockTokens {
        /// Tokens of a block.
        block: u32,
        /// Tokens of a hash.
        hashed: u32,
    },
    /// Extra keys for another number of blocks than the tokens fill.
    #[error(
        "extra keys of {given} blocks are given for {blocks} full blocks of {tokens} tokens: pass one list (or null) \
         for each, and optionally one for the tail"
    )]
    ExtraCount {
        /// Entries given.
        given: usize,
        /// Full blocks.
        blocks: usize,
        /// Tokens of a block.
        tokens: u32,
    },
    /// A bare text under a rule that hashes the kind too.
    #[error(
        "the extra key '{0}' has no tag, and tagged keys hash it: pass [\"lora\", name, path] or [\"cache_salt\", \
         salt], or form \"bare\""
    )]
    Untagged(String),
    /// A fact that no engine of the namespace states.
    #[error("the namespace states no {0}: take the facts of `pillion ctl namespaces` as they are")]
    Unstated(&'static str),
    /// A first parent hash known to its engine alone.
    #[error("the fact none_hash is '{0}', not hex digits: set PYTHONHASHSEED for the engines")]
    NoneHashFact(String),
    /// A fact that is no number of tokens.
    #[error("the fact block_tokens is '{0}': it must be the tokens of a block")]
    BlockTokensFact(String),
    /// Pickled bytes depend on whether two equal texts are one object, and only the engine knows.
    #[error(
        "{0} hashes a pickle, whose bytes depend on object identity if a block has two extra keys or equal texts in \
         one: run the engines with --prefix-caching-hash-algo {0}_cbor"
    )]
    PickleIdentity(Algorithm),
    /// A pickle of more than one frame.
    #[error(
        "the extra keys of a block have {found} bytes: {algorithm} is derived for at most {PICKLE_EXTRA_BYTES_MAX}"
    )]
    PickleBytes {
        /// Bytes found.
        found: usize,
        /// The algorithm that hashes them.
        algorithm: Algorithm,
    },
}

// === impl BlockHash ===

impl BlockHash {
    /// Makes a hash from the engine's bytes; fails unless there are 16 or 32.
    pub fn from_slice(bytes: &[u8]) -> Result<Self, KeyError> {
        let mut hash = Self([0; HASH_BYTES_MAX]);
        hash.set_bytes(bytes)?;
        Ok(hash)
    }

    /// Sets the hash from the engine's bytes in place; fails unless there are 16 or 32. A hash moved out of a
    /// result is read in other pieces than it was written in; such a load waits until every earlier store has
    /// left the core: 20 ns if those went to shared memory.
    #[inline]
    pub fn set_bytes(&mut self, bytes: &[u8]) -> Result<(), KeyError> {
        let (short, rest) = self.0.split_at_mut(HASH_BYTES_SHORT);
        match bytes.len() {
            HASH_BYTES_MAX => self.0.copy_from_slice(bytes),
            HASH_BYTES_SHORT => {
                short.copy_from_slice(bytes);
                rest.fill(0);
            }
            length => return Err(KeyError::Length(length)),
        }
        Ok(())
    }

    /// Returns the hash of the same block under an input that vLLM's own hash leaves out, such as an
    /// adapter's weights. `fold` is a digest of that input.
    pub fn folded(&self, fold: &[u8; 16]) -> Self {
        let hasher = Sha256::new().chain_update(FOLD_TAG).chain_update(fold).chain_update(self.0);
        Self(hasher.finalize().into())
    }

    /// Returns the hash as the engine made it. A hash of 32 bytes with a second half of zeros would be taken
    /// for one of 16; no digest has such a half.
    pub fn unpadded(&self) -> &[u8] {
        let (short, rest) = self.0.split_at(HASH_BYTES_SHORT);
        if rest.iter().all(|byte| *byte == 0) { short } else { &self.0 }
    }

    /// Returns the second digest of a hash of 16 bytes.
    pub(crate) fn second(&self) -> [u8; HASH_BYTES_SHORT] {
        *self.0.last_chunk().expect("32 bytes")
    }

    /// Puts the second digest behind a hash of 16 bytes.
    pub(crate) fn set_second(&mut self, digest: [u8; HASH_BYTES_SHORT]) {
        *self.0.last_chunk_mut().expect("32 bytes") = digest;
    }

    /// Returns the hash as four little-endian words.
    #[inline]
    pub fn words(&self) -> [u64; 4] {
        let (eights, _) = self.0.as_chunks::<8>();
        [0, 1, 2, 3].map(|index| u64::from_le_bytes(eights[index]))
    }

    /// Makes a hash from four little-endian words.
    pub fn from_words(words: [u64; 4]) -> Self {
        let mut hash = [0; HASH_BYTES_MAX];
        for (eight, word) in hash.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *eight = word.to_le_bytes();
        }
        Self(hash)
    }
}

// === impl NamespaceDigest ===

impl NamespaceDigest {
    /// Returns the digest as two little-endian words.
    pub fn words(&self) -> [u64; 2] {
        let value = u128::from_le_bytes(self.0);
        [value as u64, (value >> 64) as u64]
    }

    /// Makes a digest from two little-endian words.
    pub fn from_words(words: [u64; 2]) -> Self {
        Self((u128::from(words[0]) | u128::from(words[1]) << 64).to_le_bytes())
    }
}

impl fmt::Display for NamespaceDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for NamespaceDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "NamespaceDigest({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_16_and_32_bytes_are_hashes() {
        for length in 0..64 {
            let bytes = vec![7; length];
            match BlockHash::from_slice(&bytes) {
                Ok(hash) => {
                    assert!(length == 16 || length == 32);
                    assert_eq!(hash.0[..length], bytes[..]);
                    assert!(hash.0[length..].iter().all(|byte| *byte == 0), "padded with zeros");
                }
                Err(error) => {
                    assert!(length != 16 && length != 32);
                    assert_eq!(error, KeyError::Length(length));
                }
            }
        }
    }

    #[test]
    fn a_fold_makes_other_keys() {
        let (hash, other) = (BlockHash([1; 32]), BlockHash([2; 32]));
        let all = [hash, hash.folded(&[0; 16]), hash.folded(&[1; 16]), other.folded(&[0; 16])];
        for (at, key) in all.iter().enumerate() {
            assert!(!all[..at].contains(key), "{at}");
        }
        let digest = Sha256::digest([b"pillion fold".as_slice(), &[0; 16], &[1; 32]].concat());
        assert_eq!(all[1].0, <[u8; 32]>::from(digest));
    }

    #[test]
    fn padding_is_taken_off() {
        for bytes in [[7; 16].as_slice(), &[7; 32]] {
            assert_eq!(BlockHash::from_slice(bytes).unwrap().unpadded(), bytes);
        }
    }

    #[test]
    fn words_are_little_endian_and_invert() {
        let hash = BlockHash(std::array::from_fn(|index| index as u8));
        assert_eq!(hash.words()[0], 0x0706_0504_0302_0100);
        assert_eq!(BlockHash::from_words(hash.words()), hash);
        let digest = NamespaceDigest(std::array::from_fn(|index| index as u8));
        assert_eq!(NamespaceDigest::from_words(digest.words()), digest);
        assert_eq!(digest.to_string(), "000102030405060708090a0b0c0d0e0f");
    }
}
