//! How much of a prompt blocks of several kinds serve together.
//!
//! A bundle is the layers whose blocks are kept side by side, one block each. What a bundle must have for a prompt of `L` tokens
//! depends on its kind, and the answer is the highest boundary at which every bundle has it. Boundaries are multiples of the
//! alignment, which is a multiple of each bundle's block.

use std::ops::Range;

/// What a bundle's layers read of the tokens before them.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Kind {
    Full,
    /// The token itself and those before it, so many in all.
    Window(u32),
    /// Those since the last multiple of so many tokens.
    Chunk(u32),
    /// A state that sums up all tokens, kept where a block ends.
    State,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Bundle {
    pub kind: Kind,
    pub block_tokens: u32,
    /// Its layers draft: the KV before a boundary is right only where the block behind the boundary was computed too. That block is
    /// looked for and not loaded.
    pub eagle: bool,
}

/// What is served of a prompt.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Served {
    /// Tokens from the prompt's begin on.
    pub tokens: u32,
    /// The blocks to load of each bundle, in the bundles' order.
    pub blocks: Vec<Range<u32>>,
}

/// The longest prompt beyond `from` tokens and up to `limit` that the `present` blocks of all bundles serve; none if there is no
/// such. What is below `from`, a boundary, is with the asker. Full bundles are best listed first: they bound what the others are
/// asked for.
///
/// Asks for no block twice.
pub fn serve(
    bundles: &[Bundle],
    mut present: impl FnMut(usize, u32) -> bool,
    from: u32,
    limit: u32,
    alignment: u32,
) -> Option<Served> {
    let mut seen = vec![0..0; bundles.len()];
    let mut tokens = limit - limit % alignment;
    while tokens > from {
        let missing = bundles.iter().zip(&mut seen).enumerate().find_map(|(number, (bundle, seen))| {
            let block =
                bundle.first_missing(bundle.needed(from, tokens), seen, |block| present(number, block))?;
            Some(bundle.boundary_without(block))
        });
        match missing {
            Some(bound) => tokens = bound - bound % alignment,
            None => {
                let blocks = bundles.iter().map(|bundle| bundle.loaded(from, tokens)).collect();
                return Some(Served { tokens, blocks });
            }
        }
    }
    None
}

// === impl Bundle ===

impl Bundle {
    /// The blocks to load for a prompt of so many tokens.
    fn loaded(&self, from: u32, tokens: u32) -> Range<u32> {
        let (first, end) = (from / self.block_tokens, tokens / self.block_tokens);
        let read = match self.kind {
            Kind::Full => 0,
            Kind::Window(window) => end.saturating_sub((window - 1).div_ceil(self.block_tokens).max(1)),
            Kind::Chunk(chunk) => tokens / chunk * chunk / self.block_tokens,
            Kind::State => end - 1,
        };
        read.max(first)..end
    }

    /// The blocks that must be there for it.
    fn needed(&self, from: u32, tokens: u32) -> Range<u32> {
        let loaded = self.loaded(from, tokens);
        loaded.start..loaded.end + u32::from(self.eagle)
    }

    /// Tokens of the longest prompt that does without this block, which a longer one needs: those between the two need it as well.
    fn boundary_without(&self, block: u32) -> u32 {
        block.saturating_sub(self.eagle.into()) * self.block_tokens
    }

    /// A needed block that is not there: of a full bundle the first, since no prompt beyond it is served; of the others the last.
    /// `seen` are blocks known to be there, and remembers more of them for the next, shorter prompt.
    fn first_missing(
        &self,
        needed: Range<u32>,
        seen: &mut Range<u32>,
        mut present: impl FnMut(u32) -> bool,
    ) -> Option<u32> {
        if self.kind == Kind::Full {
            let missing = (seen.end.max(needed.start)..needed.end).find(|block| !present(*block));
            *seen = needed.start..missing.unwrap_or(needed.end).max(seen.end);
            return missing;
        }
        if needed.is_empty() {
            return None;
        }
        if !seen.contains(&(needed.end - 1)) {
            *seen = needed.end..needed.end;
        }
        let missing = (needed.start..seen.start).rev().find(|block| !present(*block));
        seen.start = missing.map_or(needed.start.min(seen.start), |block| block + 1);
        missing
    }
}

#[cfg(test)]
mod tests;
