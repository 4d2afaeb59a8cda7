//! All keys of one request at once, for `pillion keys` and `pillion.keys.derive`.

use serde::{Deserialize, Serialize};

use super::{Algorithm, BlockHash, Chain, ExtraForm, ExtraKey, KeyError, NoneHashRule, none_hash};

/// The tokens of a request and the hashing settings of its engine. In JSON its fields have these names.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Derivation {
    /// vLLM's `--prefix-caching-hash-algo`.
    pub algo: Algorithm,
    /// The engine's PYTHONHASHSEED, if it has one.
    #[serde(default)]
    pub seed: Option<String>,
    /// The rule of NONE_HASH, by vLLM's version.
    #[serde(default)]
    pub rule: NoneHashRule,
    /// The form of the extra keys, by vLLM's version.
    #[serde(default)]
    pub form: ExtraForm,
    /// Tokens of a block.
    pub block_size: u32,
    /// The request's tokens.
    pub token_ids: Vec<u64>,
    /// The extra keys of each hashed block, and of the tail if there is one more entry.
    #[serde(default)]
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    /// Cache group.
    #[serde(default)]
    pub group: u32,
    /// Tokens of a hashed block, if finer than a block of this group.
    #[serde(default)]
    pub hash_block_size: Option<u32>,
}

/// The derived keys, bytes as hex digits.
#[derive(Clone, Eq, PartialEq, Debug, Serialize)]
pub struct Derived {
    /// The parent of the first block.
    #[serde(with = "hex")]
    pub none_hash: Vec<u8>,
    /// The keys of the full blocks.
    #[serde(serialize_with = "all_hex")]
    pub hashes: Vec<Vec<u8>>,
    /// The key of the tokens after the last full block.
    #[serde(serialize_with = "some_hex")]
    pub tail: Option<Vec<u8>>,
}

/// Returns the hashes of blocks made of `factor` hashed blocks each: the last hash of each, since it covers
/// the others.
pub fn coarse(hashes: &[BlockHash], factor: usize) -> impl Iterator<Item = &BlockHash> {
    hashes.chunks_exact(factor).filter_map(<[BlockHash]>::last)
}

/// Returns a hash as a cache group's key: group 0 has the hash itself, every other group appends its number,
/// big-endian.
pub fn with_group(hash: &[u8], group: u32) -> Vec<u8> {
    let suffix = group.to_be_bytes();
    [hash, if group == 0 { &[] } else { &suffix[..] }].concat()
}

// === impl Derivation ===

impl Derivation {
    /// Derives the keys. Fails on invalid settings, or on extra keys for a wrong number of blocks.
    pub fn derive(&self) -> Result<Derived, KeyError> {
        let none = none_hash(self.algo, self.rule, self.seed.as_deref())?;
        let none_hash = self.algo.bytes(&none).to_vec();
        let hashed = self.hash_block_size.unwrap_or(self.block_size);
        let mut chain = Chain::new(self.algo, &none_hash, hashed)?.with_form(self.form);
        let factor = match self.block_size.checked_rem(hashed) {
            Some(0) if self.block_size > 0 => (self.block_size / hashed) as usize,
            _ => return Err(KeyError::HashBlockTokens { block: self.block_size, hashed }),
        };
        let extra = self.extra_keys.as_deref().unwrap_or_default();
        let extra: Vec<&[ExtraKey]> = extra.iter().map(|keys| keys.as_deref().unwrap_or_default()).collect();
        chain.append_with(&self.token_ids, &extra)?;
        let full = chain.hashes().len();
        let tail = chain.tail_with(extra.get(full).copied().unwrap_or_default())?;
        if self.extra_keys.is_some()
            && extra.len() != full
            && extra.len() != full + usize::from(tail.is_some())
        {
            return Err(KeyError::ExtraCount { given: extra.len(), blocks: full, tokens: hashed });
        }
        let key = |hash: &BlockHash| with_group(&hash.0, self.group);
        // Hashed blocks after the last whole block belong to the tail, too.
        let rest = if full % factor == 0 { None } else { chain.hashes().last() };
        Ok(Derived {
            none_hash,
            hashes: coarse(chain.hashes(), factor).map(key).collect(),
            tail: tail.as_ref().or(rest).map(key),
        })
    }
}

fn all_hex<S: serde::Serializer>(all: &[Vec<u8>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(all.iter().map(hex::encode))
}

fn some_hex<S: serde::Serializer>(bytes: &Option<Vec<u8>>, serializer: S) -> Result<S::Ok, S::Error> {
    bytes.as_ref().map(hex::encode).serialize(serializer)
}
