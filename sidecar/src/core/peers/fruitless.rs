//! The pause of waiting for peers once fetches bring no block, or too few bytes in the longest time, from any peer.
//!
//! A breaker counts the failures of one peer. Many peers may hang at once, or this node's own link may be at fault. Each peer then fails too
//! rarely for its breaker, and every request waits for its whole time. So the fetches of all peers are counted together, too.

/// Limit of fruitless fetches in a row before a pause.
const IN_ROW_MAX: u32 = 3;
/// Milliseconds between the ends of two fruitless fetches, at least: parts of one request end together.
const APART_MS: u64 = 50;
/// Milliseconds of a fruitless fetch, at least: a refusal at once costs a request no wait.
pub(super) const WAITED_MS_MIN: u64 = 500;
/// Milliseconds of the first pause; each further one takes twice as long, up to the longest.
const PAUSE_MS_MIN: u64 = 1_000;
const PAUSE_MS_MAX: u64 = 30_000;

/// The fruitless fetches since the last good one of any peer.
#[derive(Debug, Default)]
pub(super) struct FruitlessFetches {
    in_row: u32,
    ended_ms: Option<u64>,
    /// Length and end of the last pause. After the end, one fetch tries.
    pause_ms: u64,
    until_ms: Option<u64>,
}

// === impl FruitlessFetches ===

impl FruitlessFetches {
    /// True if peers may be asked. `under_way`: other fetches are under way.
    pub(super) fn lets_pass(&self, now_ms: u64, under_way: bool) -> bool {
        self.until_ms.is_none_or(|until_ms| until_ms <= now_ms && !under_way)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.until_ms.is_some()
    }

    /// Counts a fetch with blocks. True if a pause ends.
    pub(super) fn end_pause(&mut self) -> bool {
        std::mem::take(self).is_paused()
    }

    /// Counts a fetch without enough blocks, after a request has waited for it. True if a pause begins.
    pub(super) fn count_fetch(&mut self, now_ms: u64) -> bool {
        if self.ended_ms.is_some_and(|ended_ms| now_ms < ended_ms + APART_MS) {
            return false;
        }
        self.ended_ms = Some(now_ms);
        self.in_row += 1;
        if self.in_row < IN_ROW_MAX {
            return false;
        }
        self.pause_ms = (self.pause_ms * 2).clamp(PAUSE_MS_MIN, PAUSE_MS_MAX);
        self.until_ms.replace(now_ms + self.pause_ms).is_none()
    }
}
