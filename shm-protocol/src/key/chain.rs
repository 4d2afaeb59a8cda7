//! The chain: each block's key covers its tokens and, through its parent's hash, all before it.

use super::digest::second_digest;
use super::{
    Algorithm, BlockHash, ExtraForm, ExtraKey, HASH_BYTES_SHORT, KeyError, NoneHashRule,
    PICKLE_BLOCK_TOKENS_MAX, cbor, pickle,
};

/// The seed of NONE_HASH since vLLM 0.29 if PYTHONHASHSEED is not set and the hash is cryptographic.
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// Most bytes of a seed. Python takes "random" or a number; vLLM makes 64 hex digits if there is none.
const SEED_BYTES_MAX: usize = 255;

/// Most tokens of a block: thousands of times vLLM's usual 16, and half a MiB to encode.
pub const BLOCK_TOKENS_MAX: u32 = 1 << 16;

/// The keys of one request's blocks, growing with its tokens. No token is hashed twice.
///
/// Tokens are u32, or u64 for callers with wider ones.
#[derive(Clone, Debug)]
pub struct Chain {
    links: Links,
    block_tokens: usize,
    hashes: Vec<BlockHash>,
    /// Tokens after the last full block: fewer than a block.
    pending: Vec<u64>,
}

/// The settings by which a parent and a block make a hash.
#[derive(Clone, Debug)]
struct Links {
    algorithm: Algorithm,
    form: ExtraForm,
    /// NONE_HASH; vLLM up to 0.28 may have one longer than the hashes.
    first: BlockHash,
    first_bytes: usize,
    /// The key before the chain's first block, if the chain continues another.
    before: Option<BlockHash>,
    /// The encoding of one block, kept to reuse its allocation.
    encoded: Vec<u8>,
}

/// Returns NONE_HASH of an engine with PYTHONHASHSEED `seed`. Fails if it is random without a seed, or the
/// seed is too long.
pub fn none_hash(
    algorithm: Algorithm,
    rule: NoneHashRule,
    seed: Option<&str>,
) -> Result<BlockHash, KeyError> {
    let fixed = (rule == NoneHashRule::Since029 && algorithm.is_cryptographic()).then_some(DEFAULT_SEED);
    let seed = seed.or(fixed).ok_or(KeyError::RandomNoneHash(algorithm))?;
    if seed.len() > SEED_BYTES_MAX {
        return Err(KeyError::Seed(seed.len()));
    }
    let mut bytes = Vec::new();
    if algorithm.is_pickle() {
        pickle::seed(&mut bytes, seed)
    } else {
        cbor::text(&mut bytes, seed)
    }
    Ok(algorithm.digest(&mut bytes))
}

// === impl Chain ===

impl Chain {
    /// Makes an empty chain of blocks of `block_tokens` tokens, its extra keys tagged. Fails on a block of 0
    /// or too many tokens, or a `none_hash` of wrong length.
    pub fn new(algorithm: Algorithm, none_hash: &[u8], block_tokens: u32) -> Result<Self, KeyError> {
        let limit = if algorithm.is_pickle() { PICKLE_BLOCK_TOKENS_MAX } else { BLOCK_TOKENS_MAX };
        if block_tokens == 0 || block_tokens > limit {
            return Err(KeyError::BlockTokens { tokens: block_tokens, algorithm, limit });
        }
        let first = BlockHash::from_slice(none_hash)?;
        let form = ExtraForm::Tagged;
        let links =
            Links { algorithm, form, first, first_bytes: none_hash.len(), before: None, encoded: Vec::new() };
        Ok(Self { links, block_tokens: block_tokens as usize, hashes: Vec::new(), pending: Vec::new() })
    }

    /// Makes the empty chain continue behind the block with the key `before`.
    #[must_use]
    pub fn behind(mut self, before: BlockHash) -> Self {
        self.links.before = Some(before);
        self
    }

    /// Sets the form of the chain's extra keys; call it before the first extra key.
    #[must_use]
    pub fn with_form(mut self, form: ExtraForm) -> Self {
        self.links.form = form;
        self
    }

    /// Appends tokens of blocks without extra keys.
    pub fn append<T: Copy + Into<u64>>(&mut self, tokens: &[T]) {
        self.extend(tokens, &mut std::iter::repeat(&[][..]));
    }

    /// Appends tokens; `extra[i]` are the extra keys of the `i`-th block not full before, none beyond its
    /// end.
    ///
    /// Extra keys of a block that stays partial are not kept: give them again when it fills. On an error
    /// nothing is appended.
    pub fn append_with<T: Copy + Into<u64>, E: AsRef<[ExtraKey]>>(
        &mut self,
        tokens: &[T],
        extra: &[E],
    ) -> Result<(), KeyError> {
        extra.iter().try_for_each(|keys| self.links.check(keys.as_ref()))?;
        self.extend(tokens, &mut extra.iter().map(AsRef::as_ref).chain(std::iter::repeat(&[][..])));
        Ok(())
    }

    /// Returns the keys of the full blocks so far; [`Algorithm::bytes`] has vLLM's hash of each.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Returns the key of the tokens after the last full block, as if they were a block; `None` if there are
    /// none.
    pub fn tail(&self) -> Option<BlockHash> {
        self.tail_with(&[]).expect("no extra key is refused")
    }

    /// Does the same as `tail`, with the extra keys of that block.
    pub fn tail_with(&self, extra: &[ExtraKey]) -> Result<Option<BlockHash>, KeyError> {
        self.links.check(extra)?;
        let hash = || self.links.clone().hash(self.hashes.last(), &self.pending, extra);
        Ok((!self.pending.is_empty()).then(hash))
    }

    /// Appends tokens, taking one item of `extra`, already checked, for each newly full block.
    fn extend<'e, T: Copy + Into<u64>>(
        &mut self,
        mut tokens: &[T],
        extra: &mut impl Iterator<Item = &'e [ExtraKey]>,
    ) {
        let mut next = || extra.next().unwrap_or_default();
        if !self.pending.is_empty() {
            let missing = tokens.len().min(self.block_tokens - self.pending.len());
            self.pending.extend(tokens[..missing].iter().map(|token| (*token).into()));
            tokens = &tokens[missing..];
            if self.pending.len() < self.block_tokens {
                return;
            }
            self.hashes.push(self.links.hash(self.hashes.last(), &self.pending, next()));
            self.pending.clear();
        }
        let blocks = tokens.chunks_exact(self.block_tokens);
        self.pending.extend(blocks.remainder().iter().map(|token| (*token).into()));
        self.hashes.reserve(blocks.len());
        for block in blocks {
            self.hashes.push(self.links.hash(self.hashes.last(), block, next()));
        }
    }
}

// === impl Links ===

impl Links {
    fn check(&self, extra: &[ExtraKey]) -> Result<(), KeyError> {
        extra.iter().try_for_each(|key| key.check(self.form))?;
        if self.algorithm.is_pickle() { pickle::check(extra, self.form, self.algorithm) } else { Ok(()) }
    }

    fn hash<T: Copy + Into<u64>>(
        &mut self,
        before: Option<&BlockHash>,
        tokens: &[T],
        extra: &[ExtraKey],
    ) -> BlockHash {
        let Self { algorithm, form, .. } = *self;
        let before = before.or(self.before.as_ref());
        let parent = before.map_or(&self.first.0[..self.first_bytes], |hash| algorithm.bytes(hash));
        self.encoded.clear();
        if algorithm.is_pickle() {
            pickle::block(&mut self.encoded, parent, tokens, extra, form);
        } else {
            cbor::block(&mut self.encoded, parent, tokens, extra, form);
        }
        let mut key = algorithm.digest(&mut self.encoded);
        if !algorithm.is_cryptographic() {
            let before = before.map_or([0; HASH_BYTES_SHORT], |hash| hash.second());
            key.set_second(second_digest(&mut self.encoded, &before, tokens, extra, form));
        }
        key
    }
}
