//! The algorithm of block hashes: the hash, the encoding under it, and the rule for the first parent.

use serde::Deserialize;
use sha2::block_api::compress256;
use twox_hash::XxHash3_128;

use super::{BlockHash, HASH_BYTES_MAX, HASH_BYTES_SHORT, KeyError};

crate::named! {
    /// vLLM's `--prefix-caching-hash-algo`.
    #[derive(Deserialize)]
    #[serde(try_from = "String")]
    pub enum Algorithm {
        /// XXH3-128, big-endian, over canonical CBOR.
        XxhashCbor = "xxhash_cbor",
        /// SHA-256 over canonical CBOR.
        Sha256Cbor = "sha256_cbor",
        /// SHA-256 over a Python pickle of protocol 5; vLLM's default.
        Sha256 = "sha256",
        /// XXH3-128, big-endian, over a Python pickle of protocol 5.
        Xxhash = "xxhash",
    }
}

crate::named! {
    /// The rule by which vLLM makes NONE_HASH, the parent of a first block.
    #[derive(Default, Deserialize)]
    #[serde(try_from = "String")]
    pub enum NoneHashRule {
        /// vLLM 0.29 and later: without a seed, random for the xxhash kinds alone.
        #[default]
        Since029 = "0.29",
        /// vLLM up to 0.28: without a seed, random for all.
        Before029 = "0.28",
    }
}

/// The end of the fact, for keys with the second digest.
const SECOND: &str = "+sha256";

// === impl Algorithm ===

impl Algorithm {
    /// Returns the algorithm of a namespace's fact `hash_algorithm`, with or without the second digest.
    pub fn of_fact(fact: &str) -> Result<Self, KeyError> {
        fact.strip_suffix(SECOND).unwrap_or(fact).parse()
    }

    /// Returns the fact `hash_algorithm` for vLLM's algorithm of this name: keys of short hashes have a
    /// second digest.
    pub fn fact_of(name: &str) -> String {
        let is_short = Self::named(name).is_some_and(|algorithm| !algorithm.is_cryptographic());
        format!("{name}{}", if is_short { SECOND } else { "" })
    }

    /// Returns the bytes of its hashes.
    pub const fn hash_bytes(self) -> usize {
        if self.is_cryptographic() { HASH_BYTES_MAX } else { HASH_BYTES_SHORT }
    }

    /// Returns vLLM's hash: the first bytes of a key, or all.
    pub fn bytes(self, hash: &BlockHash) -> &[u8] {
        &hash.0[..self.hash_bytes()]
    }

    pub(super) const fn is_pickle(self) -> bool {
        matches!(self, Self::Sha256 | Self::Xxhash)
    }

    pub(super) const fn is_cryptographic(self) -> bool {
        matches!(self, Self::Sha256Cbor | Self::Sha256)
    }

    /// Returns the hash of these bytes, and uses the buffer up. A hash of 16 bytes leaves the other bytes
    /// zero.
    pub(super) fn digest(self, bytes: &mut Vec<u8>) -> BlockHash {
        if self.is_cryptographic() {
            return BlockHash(hash_sha256(bytes));
        }
        let mut hash = [0; HASH_BYTES_MAX];
        hash[..HASH_BYTES_SHORT].copy_from_slice(&XxHash3_128::oneshot(bytes).to_be_bytes());
        BlockHash(hash)
    }
}

/// Returns SHA-256 of a message, padding it in place: for one block a sixth faster than through a hasher's
/// buffer.
pub(super) fn hash_sha256(message: &mut Vec<u8>) -> [u8; 32] {
    /// FIPS 180-4, 5.3.3.
    const INITIAL: [u32; 8] = [
        0x6a09_e667,
        0xbb67_ae85,
        0x3c6e_f372,
        0xa54f_f53a,
        0x510e_527f,
        0x9b05_688c,
        0x1f83_d9ab,
        0x5be0_cd19,
    ];
    let length = message.len();
    // A one bit, zeros, and the length in bits, up to the end of a block.
    message.resize((length + 9).next_multiple_of(64), 0);
    message[length] = 0x80;
    let (_, end) = message.split_last_chunk_mut().expect("at least 64 bytes");
    *end = (length as u64 * 8).to_be_bytes();
    let mut state = INITIAL;
    compress256(&mut state, message.as_chunks().0);
    let mut hash = [0; 32];
    for (bytes, word) in hash.as_chunks_mut().0.iter_mut().zip(state) {
        *bytes = word.to_be_bytes();
    }
    hash
}

read_by_name!(Algorithm, "algorithm", "xxhash_cbor, sha256_cbor, sha256, xxhash");
read_by_name!(NoneHashRule, "rule", "0.29 (and later), 0.28 (and earlier)");

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn padding_is_right_at_every_length() {
        for length in 0..300 {
            let message: Vec<u8> = (0..length).map(|index| index as u8).collect();
            assert_eq!(hash_sha256(&mut message.clone())[..], Sha256::digest(&message)[..], "{length}");
        }
    }
}
