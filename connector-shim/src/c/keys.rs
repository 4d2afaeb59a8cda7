//! `pillion_keys_*`: the block hashes of one request, derived from its tokens as vLLM derives them.

use std::mem::MaybeUninit;

use shm_protocol::key::{Algorithm, Chain, ExtraForm, ExtraKey as Extra};

use super::error::{CallFailure, Status, require_pointer, run_call};
use super::handle::GuardedHandle;
use super::raw::{Hash, Items, Text};
use crate::error::ShimError;

/// The hashes of one request's blocks.
#[derive(Debug)]
pub struct Keys(GuardedHandle<KeysState>);

#[derive(Debug)]
struct KeysState {
    chain: Chain,
    block_tokens: usize,
}

/// Kinds of extra keys, in the order of a block's extra keys.
#[repr(u32)]
#[derive(Copy, Clone, Debug)]
pub enum ExtraKind {
    /// The request's LoRA adapter, on every block: `text` is its name, `path` its source.
    Lora = 1,
    /// An image or a similar item in the block: `text` identifies it, `offset` is its begin.
    Multimodal = 2,
    /// The request's cache salt, on its first block: `text`.
    CacheSalt = 3,
    /// Prompt embeddings: `bytes` is their SHA-256.
    PromptEmbeds = 4,
}

/// A reason besides the tokens why a block's KV differs. Fields that its kind does not name are ignored.
#[repr(C)]
#[derive(Debug)]
pub struct ExtraKey {
    /// Number of the block, counted from the first block that was not full before the call.
    pub block: u32,
    /// A PillionExtraKind.
    pub kind: u32,
    /// See the kinds.
    pub text: Text,
    /// See the kinds.
    pub path: Text,
    /// The item's begin in tokens from the block's begin; negative if it lies before the block.
    pub offset: i64,
    /// See the kinds.
    pub bytes: Items<u8>,
}

// === exported ===

/// Begins the hashes of a request. The arguments are the namespace's facts about its keys, word for word:
/// `hash_algorithm` (such as "sha256"), `none_hash` (hex digits), `extra_keys` ("tagged" or "bare"), and
/// `block_tokens`.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_keys_new(
    hash_algorithm: Text,
    none_hash: Text,
    extra_keys: Text,
    block_tokens: u32,
    keys: Option<&mut MaybeUninit<Box<Keys>>>,
) -> Status {
    run_call(|| {
        let out = require_pointer("keys", keys)?;
        let algorithm = Algorithm::of_fact(hash_algorithm.get("hash_algorithm")?).map_err(ShimError::from)?;
        let form: ExtraForm = extra_keys.get("extra_keys")?.parse().map_err(ShimError::from)?;
        let none_hash = hex::decode(none_hash.get("none_hash")?).map_err(|error| {
            CallFailure::argument(format!(
                "none_hash is not hex digits ({error}): pass the engines' \
                 NONE_HASH in hex"
            ))
        })?;
        let chain = Chain::new(algorithm, &none_hash, block_tokens).map_err(ShimError::from)?;
        let state = KeysState { chain: chain.with_form(form), block_tokens: block_tokens as usize };
        out.write(Box::new(Keys(GuardedHandle::new(state))));
        Ok(())
    })
}

/// Frees the handle; NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_keys_free(keys: Option<Box<Keys>>) {
    run_call(|| {
        drop(keys);
        Ok(())
    });
}

/// Appends tokens. `extra` is empty for most requests; give the extra keys of a block that stays partial
/// again when it fills. `hashes` becomes all hashes so far, one for each full block from the first on, valid
/// until the next call with this handle. `hashes` may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_keys_append(
    keys: Option<&Keys>,
    tokens: Items<u32>,
    extra: Items<ExtraKey>,
    hashes: Option<&mut MaybeUninit<Items<Hash>>>,
) -> Status {
    append_tokens(keys, tokens, extra, hashes)
}

/// Appends tokens of 64 bits, as pillion_keys_append does.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_keys_append64(
    keys: Option<&Keys>,
    tokens: Items<u64>,
    extra: Items<ExtraKey>,
    hashes: Option<&mut MaybeUninit<Items<Hash>>>,
) -> Status {
    append_tokens(keys, tokens, extra, hashes)
}

fn append_tokens<T: Copy + Into<u64>>(
    keys: Option<&Keys>,
    tokens: Items<T>,
    extra: Items<ExtraKey>,
    hashes: Option<&mut MaybeUninit<Items<Hash>>>,
) -> Status {
    run_call(|| {
        require_pointer("keys", keys)?.0.enter_call(|state| {
            let tokens = tokens.get("tokens")?;
            // A block that was partial before may become full too.
            let blocks = tokens.len() / state.block_tokens + 1;
            let extra = extra_by_block(extra.get("extra")?, blocks)?;
            state.chain.append_with(tokens, &extra).map_err(ShimError::from)?;
            if let Some(hashes) = hashes {
                hashes.write(Items::of_hashes(state.chain.hashes()));
            }
            Ok(())
        })
    })
}

/// The extra keys of each block, up to the last block with any.
fn extra_by_block(extra: &[ExtraKey], blocks: usize) -> Result<Vec<Vec<Extra>>, CallFailure> {
    let mut by_block: Vec<Vec<Extra>> = Vec::new();
    for key in extra {
        let block = key.block as usize;
        if block >= blocks {
            let text =
                format!("an extra key names block {block}, and these tokens reach into {blocks} blocks");
            return Err(CallFailure::argument(text));
        }
        if by_block.len() <= block {
            by_block.resize(block + 1, Vec::new());
        }
        by_block[block].push(key.read_extra()?);
    }
    Ok(by_block)
}

// === impl ExtraKey ===

impl ExtraKey {
    fn read_extra(&self) -> Result<Extra, CallFailure> {
        let text = || Ok::<_, CallFailure>(self.text.get("an extra key's text")?.to_owned());
        match self.kind {
            kind if kind == ExtraKind::Lora as u32 => {
                Ok(Extra::Lora { name: text()?, path: self.path.get("a LoRA key's path")?.to_owned() })
            }
            kind if kind == ExtraKind::Multimodal as u32 => {
                Ok(Extra::Multimodal { identifier: text()?, offset: self.offset })
            }
            kind if kind == ExtraKind::CacheSalt as u32 => Ok(Extra::CacheSalt(text()?)),
            kind if kind == ExtraKind::PromptEmbeds as u32 => {
                Ok(Extra::PromptEmbeds(self.bytes.get("an extra key's bytes")?.to_vec()))
            }
            kind => Err(CallFailure::argument(format!(
                "an extra key has the unknown kind {kind}: pass one of \
                 PillionExtraKind"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::last_text;
    use super::super::raw::take_result;
    use super::*;

    fn keys(algorithm: Text, none_hash: Text, block_tokens: u32) -> Result<Box<Keys>, Status> {
        take_result(|keys| {
            pillion_keys_new(algorithm, none_hash, Text::of_static(c"tagged"), block_tokens, keys)
        })
    }

    fn salt(block: u32, kind: u32, text: Text) -> ExtraKey {
        ExtraKey { block, kind, text, path: Text::null(), offset: 0, bytes: Items::of_slice(&[]) }
    }

    #[test]
    fn impossible_keys_are_errors_that_name_what_is_possible() {
        let none = || Text::of_static(c"9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
        let sha256 = || Text::of_static(c"sha256_cbor");
        for (algorithm, none_hash, block_tokens, text) in [
            (Text::of_static(c"md5"), none(), 16, "sha256_cbor"),
            (sha256(), Text::of_static(c"9bd"), 16, "none_hash is not hex digits"),
            (sha256(), Text::of_static(c"9bd9"), 16, "a block hash has 2 bytes"),
            (sha256(), none(), 0, "1 to"),
            (sha256(), Text::null(), 16, "none_hash is NULL"),
        ] {
            assert_eq!(keys(algorithm, none_hash, block_tokens).unwrap_err(), Status::Argument);
            assert!(last_text().contains(text), "{}", last_text());
        }
        let keys = keys(sha256(), none(), 2).unwrap();
        let extra = |key: ExtraKey| {
            pillion_keys_append(Some(&keys), Items::of_slice(&[1, 2, 3]), Items::of_slice(&[key]), None)
        };
        assert_eq!(extra(salt(2, ExtraKind::CacheSalt as u32, Text::of_static(c"a"))), Status::Argument);
        assert!(last_text().contains("block 2"));
        assert_eq!(extra(salt(0, 9, Text::of_static(c"a"))), Status::Argument);
        assert!(last_text().contains("PillionExtraKind"));
        assert_eq!(extra(salt(0, ExtraKind::CacheSalt as u32, Text::null())), Status::Argument);
        assert_eq!(extra(salt(1, ExtraKind::CacheSalt as u32, Text::of_static(c"a"))), Status::Ok);
        assert_eq!(
            pillion_keys_append(None, Items::of_slice(&[]), Items::of_slice(&[]), None),
            Status::Argument
        );
        pillion_keys_free(Some(keys));
        pillion_keys_free(None);
    }
}
