//! The engine's standing check of one subject, like `connector-shim/src/core/policy/checks.rs`.

pub(super) const BLOCK_TOKENS: usize = 16;
/// Blocks of a short check.
const BLOCKS: usize = 4;
const WITNESSES: u32 = 4;
/// Steps after which a check without a verdict ends: fewer than in the product, as worlds are short.
const STEPS_MAX: u64 = 10;

#[derive(Debug)]
pub(super) struct Check {
    pub(super) every: u32,
    /// Tokens of long checks for 1,000 loaded ones.
    pub(super) per_mille: usize,
    room: usize,
    /// Hits to let pass, and their number after a check without a verdict.
    waits: (u32, u32),
    sought: u32,
    goes_on: bool,
    /// The request under check, and its blocks.
    span: Option<(u64, usize, usize)>,
    ends_at: u64,
}

// === impl Check ===

impl Check {
    pub(super) fn new(every: u32, per_mille: usize) -> Self {
        let (room, sought, goes_on, span, ends_at) = Default::default();
        Self { every, per_mille, room, waits: (0, 1), sought, goes_on, span, ends_at }
    }

    pub(super) fn loaded(&mut self, blocks: usize) {
        self.room += blocks * BLOCK_TOKENS * self.per_mille;
    }

    /// The number of blocks of a hit to load.
    pub(super) fn trim(&mut self, request: u64, hits: usize, step: u64) -> usize {
        let is_doubtful = self.sought > 0;
        if !self.is_due() {
            return if is_doubtful { 0 } else { hits };
        }
        (self.goes_on, self.ends_at) = (true, step + STEPS_MAX);
        let (mut kept, cost) = (hits.saturating_sub(BLOCKS), hits * BLOCK_TOKENS * 1000);
        if is_doubtful {
            kept = 0;
        } else if self.per_mille > 0 && kept > 0 && self.room >= cost {
            (kept, self.room) = (0, self.room - cost);
        }
        self.span = Some((request, kept, hits));
        kept
    }

    fn is_due(&mut self) -> bool {
        let (passing, wait) = self.waits;
        if passing > 0 && self.sought == 0 || self.goes_on {
            self.waits = (passing.saturating_sub(1), wait);
            return false;
        }
        self.sought = self.sought.saturating_sub(1);
        self.waits = (wait, (2 * wait).min(self.every));
        true
    }

    pub(super) fn span(&self, request: u64) -> Option<(usize, usize)> {
        self.span.filter(|(of, ..)| *of == request).map(|(_, first, end)| (first, end))
    }

    /// Ends the check of a request that has ended.
    pub(super) fn give_up(&mut self, request: u64) {
        if self.span(request).is_some() {
            (self.span, self.goes_on) = (None, false);
        }
    }

    pub(super) fn saved(&mut self) {
        self.span = None;
    }

    /// Reads the verdict from the counts of a step's saves. Returns true if blocks differ.
    pub(super) fn learn(&mut self, compared: u64, differing: u64, step: u64) -> bool {
        let differs = differing > 0;
        if differs {
            self.sought = WITNESSES;
        }
        if compared > 0 && self.goes_on && self.span.is_none() {
            (self.waits, self.goes_on) = ((self.every, 1), false);
        }
        if step >= self.ends_at || differs {
            (self.span, self.goes_on) = (None, false);
        }
        if differs {
            self.waits = (0, 1);
        }
        differs
    }
}
