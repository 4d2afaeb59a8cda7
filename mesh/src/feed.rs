//! Announcements of a node's blocks: all of them once, in chunks, then their changes. Both sides are pure;
//! the caller carries the [`Message`]s.
//!
//! Digests are sent in ascending order while they go on changing. A reader gets the changes of digests up to
//! the last one sent to it; the others come with a later chunk. So nothing is copied or frozen for a
//! snapshot. No reader adds to the memory of the feed: the set, one batch being gathered, and the last
//! batches.

mod follower;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

pub use self::follower::{Follower, Heard, Unheard, keys_max};
use crate::digest::{Change, Digest, Thinning};

/// Maximum digests of a chunk, and of those examined for one: 250 KiB, some milliseconds of either side.
pub const CHUNK_DIGESTS_MAX: usize = 32_000;
/// Maximum changes of a batch: 62 KiB; applying them to a set of 10^7 takes some milliseconds.
pub const BATCH_CHANGES_MAX: usize = 8_000;

/// Maximum promises of a node: 64 KiB. All engines of a sidecar together may have as many.
pub const PROMISES_MAX: usize = 8192;

/// The number of no promises: a reader has it before its first promises.
const NO_PROMISES: u64 = 0;

/// The blocks of a node, the prompts promised by its engines, and the last changes of both.
#[derive(Debug)]
pub struct Feed {
    digests: BTreeSet<Digest>,
    /// Changes since the last batch. A digest is in here only if it differs, so one that came and went is
    /// not.
    pending: BTreeMap<Digest, bool>,
    /// The last batches; the last of them led to `sequence`.
    batches: VecDeque<Batch>,
    changes: usize,
    changes_max: usize,
    sequence: u64,
    promises: Promises,
}

/// The prompts promised by a node's engines, each by its last keys. They are few, so a message has all of
/// them.
#[derive(Debug, Default)]
struct Promises {
    sealed: Vec<Digest>,
    /// The promises to seal next; `None` if none came since the last seal.
    next: Option<Vec<Digest>>,
    /// The number of the sealed promises; it grows when they change.
    sequence: u64,
}

/// Changes sent together: at most one of each digest.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Batch {
    removed: Vec<Digest>,
    added: Vec<Digest>,
}

/// The progress of one follower.
#[derive(Clone, Debug)]
pub struct Reader {
    thinning: Thinning,
    /// The last batch examined for it; `None` before the first message.
    sequence: Option<u64>,
    /// The last sequence sent.
    after: u64,
    told: Told,
    /// The number of the promises sent last, [`NO_PROMISES`] before the first; `None` if the follower does
    /// not want promises.
    promises: Option<u64>,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Told {
    Nothing,
    UpTo(Digest),
    All,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Message {
    /// Voids all digests sent before: all follow again, as of now.
    Begin {
        sequence: u64,
        /// Approximate number of the digests to follow.
        keys: u64,
        thinning: Thinning,
    },
    /// The next digests, ascending.
    Chunk {
        /// All digests sent so far are current as of this sequence.
        sequence: u64,
        /// Up to [`CHUNK_DIGESTS_MAX`] of them.
        digests: Vec<Digest>,
        /// True for the last chunk.
        last: bool,
    },
    /// Changes of the digests sent so far.
    Delta {
        /// The sequence before the changes.
        after: u64,
        /// The sequence after the changes.
        sequence: u64,
        /// Disjoint from `added`.
        removed: Vec<Digest>,
        /// Up to [`BATCH_CHANGES_MAX`] together with `removed`.
        added: Vec<Digest>,
    },
    /// All promises of the node, as the last keys of each. Up to [`PROMISES_MAX`].
    Promises(Vec<Digest>),
}

// === impl Feed ===

impl Feed {
    /// An empty feed, with memory of at least the last `changes_max` changes: a follower that missed more
    /// gets everything again.
    pub fn new(changes_max: usize) -> Self {
        Self {
            digests: BTreeSet::new(),
            pending: BTreeMap::new(),
            batches: VecDeque::new(),
            changes: 0,
            changes_max,
            sequence: 0,
            promises: Promises { sequence: NO_PROMISES + 1, ..Promises::default() },
        }
    }

    /// Records changes. They are sent from the next [`Feed::seal`] on, at the latest when a batch is full.
    pub fn apply(&mut self, changes: &[Change]) {
        for change in changes {
            let (digest, kept) = (change.digest(), matches!(change, Change::Added(_)));
            if self.digests.contains(&digest) == kept {
                self.pending.remove(&digest);
            } else {
                self.pending.insert(digest, kept);
            }
            if self.pending.len() >= BATCH_CHANGES_MAX {
                self.seal();
            }
        }
    }

    /// Replaces the promises, up to [`PROMISES_MAX`] of them. Each follower gets them from the next
    /// [`Feed::seal`] on, behind all changes recorded before.
    pub fn promise(&mut self, mut promises: Vec<Digest>) {
        promises.truncate(PROMISES_MAX);
        self.promises.next = Some(promises);
    }

    /// Makes a batch of the changes since the last one, if there are any, and replaces the sealed promises.
    pub fn seal(&mut self) {
        self.promises.seal();
        if self.pending.is_empty() {
            return;
        }
        let mut batch = Batch::default();
        for (digest, kept) in std::mem::take(&mut self.pending) {
            if kept {
                self.digests.insert(digest);
                batch.added.push(digest);
            } else {
                self.digests.remove(&digest);
                batch.removed.push(digest);
            }
        }
        self.sequence += 1;
        self.changes += batch.changes();
        self.batches.push_back(batch);
        while let Some(oldest) = self.batches.front().map(Batch::changes)
            && self.changes - oldest >= self.changes_max
        {
            self.changes -= oldest;
            self.batches.pop_front();
        }
    }

    /// The number of digests, as of the last batch.
    pub fn len(&self) -> usize {
        self.digests.len()
    }

    /// True without digests.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// A follower with knowledge of all up to batch `known` of this feed in this life of the node, or of
    /// nothing.
    pub fn reader(&self, thinning: Thinning, known: Option<u64>) -> Reader {
        let told = if known.is_some() { Told::All } else { Told::Nothing };
        Reader { thinning, sequence: known, after: known.unwrap_or(0), told, promises: None }
    }

    /// The next message for a follower; `None` until there is another batch. Batches new to it are merged
    /// into one message, as far as it has room.
    pub fn next(&self, reader: &mut Reader) -> Option<Message> {
        let Some(mut behind) = self.behind(reader) else { return Some(self.begin(reader)) };
        while behind > 0 {
            let mut changes = Vec::new();
            while behind > 0 {
                let share = reader.share(&self.batches[self.batches.len() - behind]);
                if changes.len() + share.len() > BATCH_CHANGES_MAX {
                    break;
                }
                changes.extend(share);
                behind -= 1;
            }
            let (batch, sequence) = (Batch::of(changes), self.sequence - behind as u64);
            reader.sequence = Some(sequence);
            if batch.changes() > 0 {
                let after = std::mem::replace(&mut reader.after, sequence);
                return Some(Message::Delta { after, sequence, removed: batch.removed, added: batch.added });
            }
        }
        if reader.told != Told::All {
            return Some(self.chunk(reader));
        }
        self.promises.next(reader)
    }

    /// True if a follower was sent everything up to the last batch.
    pub fn is_told(&self, reader: &Reader) -> bool {
        let promises = reader.promises.is_none_or(|told| told == self.promises.sequence);
        reader.told == Told::All && reader.sequence == Some(self.sequence) && promises
    }

    /// The number of batches new to a reader; `None` if one of them is forgotten, or was never there.
    fn behind(&self, reader: &Reader) -> Option<usize> {
        let behind = self.sequence.checked_sub(reader.sequence?)? as usize;
        (behind <= self.batches.len()).then_some(behind)
    }

    fn begin(&self, reader: &mut Reader) -> Message {
        let (sequence, thinning) = (self.sequence, reader.thinning);
        let (after, told, promises) = (sequence, Told::Nothing, reader.promises);
        *reader = Reader { thinning, sequence: Some(sequence), after, told, promises };
        Message::Begin { sequence, keys: thinning.of(self.len() as u64), thinning }
    }

    /// The next chunk, for a reader without new batches.
    fn chunk(&self, reader: &mut Reader) -> Message {
        let from = match reader.told {
            Told::UpTo(digest) => Bound::Excluded(digest),
            Told::Nothing | Told::All => Bound::Unbounded,
        };
        let mut looked_at = 0;
        let mut digests = Vec::new();
        for digest in self.digests.range((from, Bound::Unbounded)).take(CHUNK_DIGESTS_MAX) {
            looked_at += 1;
            reader.told = Told::UpTo(*digest);
            if reader.thinning.keeps(*digest) {
                digests.push(*digest);
            }
        }
        let last = looked_at < CHUNK_DIGESTS_MAX;
        if last {
            reader.told = Told::All;
        }
        reader.after = self.sequence;
        Message::Chunk { sequence: self.sequence, digests, last }
    }
}

// === impl Promises ===

impl Promises {
    fn seal(&mut self) {
        if let Some(next) = self.next.take().filter(|next| *next != self.sealed) {
            self.sealed = next;
            self.sequence += 1;
        }
    }

    /// The message with the promises, for a reader with all blocks and without these promises.
    fn next(&self, reader: &mut Reader) -> Option<Message> {
        let told = reader.promises.as_mut().filter(|told| **told != self.sequence)?;
        *told = self.sequence;
        Some(Message::Promises(self.sealed.clone()))
    }
}

// === impl Batch ===

impl Batch {
    fn changes(&self) -> usize {
        self.removed.len() + self.added.len()
    }

    /// Merges batches in a row: each change of a digest undoes the one before.
    fn of(mut changes: Vec<(Digest, bool)>) -> Self {
        // The sort is stable, so changes of one digest stay in their order. It is fast for a few ascending
        // runs.
        changes.sort_by_key(|(digest, _)| *digest);
        let mut batch = Self::default();
        for of_one in changes.chunk_by(|(one, _), (next, _)| one == next) {
            match of_one.last() {
                Some((digest, true)) if of_one.len() % 2 == 1 => batch.added.push(*digest),
                Some((digest, false)) if of_one.len() % 2 == 1 => batch.removed.push(*digest),
                _ => {}
            }
        }
        batch
    }
}

// === impl Reader ===

impl Reader {
    /// This reader with promises, too: they come once it knows all blocks, and again at each change.
    #[must_use]
    pub fn hearing_promises(self) -> Self {
        Self { promises: Some(NO_PROMISES), ..self }
    }

    /// The changes of a batch that concern the digests sent to this reader. Each has true if its digest is
    /// kept.
    fn share(&self, batch: &Batch) -> Vec<(Digest, bool)> {
        let told = |digest: Digest| match self.told {
            Told::Nothing => false,
            Told::UpTo(last) => digest <= last,
            Told::All => true,
        };
        let with = |kept| move |digest: &Digest| (*digest, kept);
        let all = batch.removed.iter().map(with(false)).chain(batch.added.iter().map(with(true)));
        all.filter(|(digest, _)| told(*digest) && self.thinning.keeps(*digest)).collect()
    }
}

#[cfg(test)]
mod tests;
