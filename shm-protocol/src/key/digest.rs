//! The second digest of a block, for the xxhash algorithms: any client can construct their collisions.
//!
//! Two blocks with equal XXH3-128 can be constructed without a search, for any parent. So a key of an xxhash
//! algorithm has 16 bytes more behind vLLM's hash: the first half of SHA-256 over the digest of the block
//! before, the tokens and the extra keys. Both halves are compared.

use super::algorithm::hash_sha256;
use super::{BlockHash, ExtraForm, ExtraKey, HASH_BYTES_SHORT, KeyError, cbor};

/// The first bytes of a message; the number of tokens follows. A message of 16 tokens without extra keys fills two blocks of SHA-256.
const TAG: [u8; 4] = *b"PKD1";
/// Stands for a token of more than 32 bits: its 64 bits follow.
const WIDE: u32 = u32::MAX;

/// Returns the digest of a block behind a block with the digest `parent`, zeros for the first. `encoded` is
/// scratch.
pub(super) fn second_digest<T: Copy + Into<u64>>(
    encoded: &mut Vec<u8>,
    parent: &[u8],
    tokens: &[T],
    extra: &[ExtraKey],
    form: ExtraForm,
) -> [u8; HASH_BYTES_SHORT] {
    encoded.clear();
    encoded.extend_from_slice(&TAG);
    encoded.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
    encoded.extend_from_slice(parent);
    let begin = encoded.len();
    encoded.resize(begin + 4 * tokens.len(), 0);
    let mut any_wide = false;
    for (word, token) in encoded[begin..].as_chunks_mut().0.iter_mut().zip(tokens) {
        let token: u64 = (*token).into();
        any_wide |= token >= u64::from(WIDE);
        *word = (token as u32).to_le_bytes();
    }
    if any_wide {
        encoded.truncate(begin);
        tokens.iter().for_each(|token| append_token(encoded, (*token).into()));
    }
    if !extra.is_empty() {
        cbor::append_extra(encoded, extra, form);
    }
    *hash_sha256(encoded).first_chunk().expect("32 bytes")
}

fn append_token(encoded: &mut Vec<u8>, token: u64) {
    match u32::try_from(token) {
        Ok(token) if token != WIDE => encoded.extend_from_slice(&token.to_le_bytes()),
        _ => {
            encoded.extend_from_slice(&WIDE.to_le_bytes());
            encoded.extend_from_slice(&token.to_le_bytes());
        }
    }
}

/// Returns the keys of blocks behind the block with the key `before` (`None` for the first blocks), from
/// their `hashes` of 16 bytes. Each block has `tokens.len() / hashes.len()` tokens; `extra` has an entry for
/// each block, or none at all.
pub fn extend_hashes<T: Copy + Into<u64>, E: AsRef<[ExtraKey]>>(
    before: Option<&BlockHash>,
    hashes: &[BlockHash],
    tokens: &[T],
    extra: &[E],
    form: ExtraForm,
) -> Result<Vec<BlockHash>, KeyError> {
    extra.iter().flat_map(AsRef::as_ref).try_for_each(|key| key.check(form))?;
    let mut second = before.map_or([0; HASH_BYTES_SHORT], BlockHash::second);
    let (mut encoded, mut keys) = (Vec::new(), hashes.to_vec());
    let blocks = tokens.chunks_exact((tokens.len() / hashes.len().max(1)).max(1));
    let mut extra = extra.iter().map(AsRef::as_ref).chain(std::iter::repeat(&[][..]));
    for (key, block) in keys.iter_mut().zip(blocks) {
        second = second_digest(&mut encoded, &second, block, extra.next().unwrap_or_default(), form);
        key.set_second(second);
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::super::{Algorithm, Chain};
    use super::*;

    fn expected(parent: &[u8], tokens: &[u32], behind: &[u8]) -> [u8; HASH_BYTES_SHORT] {
        let words: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let count = (tokens.len() as u32).to_le_bytes();
        let digest = Sha256::digest([b"PKD1".as_slice(), &count, parent, &words, behind].concat());
        *digest.first_chunk().expect("32 bytes")
    }

    fn chain(form: ExtraForm) -> Chain {
        Chain::new(Algorithm::XxhashCbor, &[9; 16], 3).expect("a chain").with_form(form)
    }

    #[test]
    fn a_digest_is_that_of_the_protocol() {
        let mut chain = chain(ExtraForm::Tagged);
        let salt = vec![ExtraKey::CacheSalt("s".into())];
        chain.append_with(&[1_u32, 24, 65_536, 4, 5, 6, 7], &[vec![], salt]).expect("known keys");
        let first = expected(&[0; 16], &[1, 24, 65_536], &[]);
        assert_eq!(hex::encode(first), "83cfca8932571d8f561e900a90f7fd4e");
        let second = expected(&first, &[4, 5, 6], b"\x81\x82\x6acache_salt\x61s");
        let found: Vec<_> = chain.hashes().iter().map(BlockHash::second).collect();
        assert_eq!(found, [first, second]);
        assert_eq!(chain.tail().expect("a token is left").second(), expected(&second, &[7], &[]));
    }

    #[test]
    fn no_two_lists_of_tokens_are_one_message() {
        let wide = u64::from(WIDE);
        let lists: [&[u64]; 5] = [&[wide], &[wide + 1], &[wide, 0], &[0, wide], &[wide << 32]];
        let mut messages = Vec::new();
        for tokens in lists {
            let mut message = Vec::new();
            second_digest(&mut message, &[0; 16], tokens, &[], ExtraForm::Tagged);
            assert!(!messages.contains(&message), "{tokens:?}");
            messages.push(message);
        }
    }

    #[test]
    fn keys_of_hashes_are_those_of_a_chain() {
        let (tokens, extra) = ((0..12).collect::<Vec<u32>>(), [vec![ExtraKey::Text("lora".into())], vec![]]);
        let mut whole = chain(ExtraForm::Bare);
        whole.append_with(&tokens, &extra).expect("known keys");
        let plain =
            |key: &BlockHash| BlockHash::from_slice(Algorithm::XxhashCbor.bytes(key)).expect("16 bytes");
        let hashes: Vec<_> = whole.hashes().iter().map(plain).collect();
        let first =
            extend_hashes(None, &hashes[..2], &tokens[..6], &extra, ExtraForm::Bare).expect("known keys");
        let none: [Vec<ExtraKey>; 0] = [];
        let rest =
            extend_hashes(first.last(), &hashes[2..], &tokens[6..], &none, ExtraForm::Bare).expect("none");
        assert_eq!([first, rest.clone()].concat(), whole.hashes());
        let mut behind =
            Chain::new(Algorithm::XxhashCbor, &[9; 16], 3).expect("a chain").behind(whole.hashes()[1]);
        behind.append(&tokens[6..]);
        assert_eq!(behind.hashes(), rest);
    }
}
