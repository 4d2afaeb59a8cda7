//! What a node tells the others of the blocks it keeps: all of them once, in chunks, then what changes. Both sides of it,
//! pure; who carries the [`Message`]s and when is the caller's business.
//!
//! The digests are told in ascending order while they go on changing. A reader that has got as far as a digest is sent
//! the changes of those up to it; the others come with a later chunk. So nothing is copied or held still for a snapshot,
//! and whatever a reader does, the feed's memory is the set, one batch being gathered, and the last batches.

mod follower;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

pub use self::follower::{Follower, Heard, Unheard, keys_max};
use crate::digest::{Change, Digest, Thinning};

/// Digests of a chunk at most, and of those looked at for one: 250 KiB, some milliseconds of either side.
pub const CHUNK_DIGESTS_MAX: usize = 32_000;
/// Changes of a batch at most: 62 KiB; applying them to a set of 10^7 takes some milliseconds.
pub const BATCH_CHANGES_MAX: usize = 8_000;

/// Promises that are told of one node at most: 64 KiB. As many as all engines that a sidecar serves may have.
pub const PROMISES_MAX: usize = 8192;

/// No promises have this number: who was told none has it.
const NO_PROMISES: u64 = 0;

/// The blocks that a node keeps, the prompts that its engines have promised, and the last changes of both.
#[derive(Debug)]
pub struct Feed {
    digests: BTreeSet<Digest>,
    /// What differs from that by now. A digest is in here only if it does, so one that came and went is not.
    pending: BTreeMap<Digest, bool>,
    /// The last batches; the last of them led to `sequence`.
    batches: VecDeque<Batch>,
    changes: usize,
    changes_max: usize,
    sequence: u64,
    promises: Promises,
}

/// The prompts that a node's engines have promised, each by its last keys. They are few, so a message has all of them.
#[derive(Debug, Default)]
struct Promises {
    sealed: Vec<Digest>,
    /// The promises that the next seal puts in place of the sealed ones; `None`: nothing was said since.
    next: Option<Vec<Digest>>,
    /// How often they were sealed.
    sequence: u64,
}

/// Changes that are told together: of a digest, one at most.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Batch {
    removed: Vec<Digest>,
    added: Vec<Digest>,
}

/// How far one follower has been told.
#[derive(Clone, Debug)]
pub struct Reader {
    thinning: Thinning,
    /// The last batch that was looked at for it; none before anything was told.
    sequence: Option<u64>,
    /// The last sequence that was told.
    after: u64,
    told: Told,
    /// The promises that were told last, and before any the number of none; `None`: this follower does not hear promises.
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
    /// What was told before is void: all digests follow, as they are from here on.
    Begin {
        sequence: u64,
        /// About as many digests follow.
        keys: u64,
        thinning: Thinning,
    },
    /// The next digests, ascending.
    Chunk {
        /// As of when: all digests told so far are known up to here.
        sequence: u64,
        /// Up to [`CHUNK_DIGESTS_MAX`] of them.
        digests: Vec<Digest>,
        /// Whether these were the last.
        last: bool,
    },
    /// What has changed among the digests told so far.
    Delta {
        /// The sequence that the changes follow.
        after: u64,
        /// The sequence that they lead to.
        sequence: u64,
        /// None of these is in `added`.
        removed: Vec<Digest>,
        /// Up to [`BATCH_CHANGES_MAX`] with those removed.
        added: Vec<Digest>,
    },
    /// All that is promised: of each promise the last keys. Up to [`PROMISES_MAX`].
    Promises(Vec<Digest>),
}

// === impl Feed ===

impl Feed {
    /// A feed of nothing, which remembers at least the last `changes_max` changes: a follower that missed more is told
    /// everything anew.
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

    /// Takes up what has happened. It is told from the next [`Feed::seal`] on, at the latest when a batch is full.
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

    /// Takes up what is promised from now on, in place of what was: up to [`PROMISES_MAX`]. It is told from the next [`Feed::seal`] on,
    /// and of each follower behind all changes that were taken up before.
    pub fn promise(&mut self, mut promises: Vec<Digest>) {
        promises.truncate(PROMISES_MAX);
        self.promises.next = Some(promises);
    }

    /// Makes a batch of what has happened since the last, if that is anything.
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

    /// Digests it has, as of the last batch.
    pub fn len(&self) -> usize {
        self.digests.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// A follower that knows all up to batch `known` of this feed in this life of the node, or nothing.
    pub fn reader(&self, thinning: Thinning, known: Option<u64>) -> Reader {
        let told = if known.is_some() { Told::All } else { Told::Nothing };
        Reader { thinning, sequence: known, after: known.unwrap_or(0), told, promises: None }
    }

    /// What a follower is to be told next; `None` until there is another batch. Batches that it has not seen are told as one, as far
    /// as a message has room.
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

    /// Whether a follower has been told everything up to the last batch.
    pub fn is_told(&self, reader: &Reader) -> bool {
        let promises = reader.promises.is_none_or(|told| told == self.promises.sequence);
        reader.told == Told::All && reader.sequence == Some(self.sequence) && promises
    }

    /// Batches that a reader has not seen; `None` if one of them is forgotten, or was never there.
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

    /// The next digests, for a reader that no batch concerns.
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

    /// The message with the promises, for a reader that knows all blocks and has not been told these promises.
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

    /// What batches in a row come to: each change of a digest undoes the one before.
    fn of(mut changes: Vec<(Digest, bool)>) -> Self {
        // Stable: those of one digest stay in their order. It is quick where there are few runs in order.
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
    /// This reader, but told of promises too: once it knows all blocks, and again whenever the promises change.
    #[must_use]
    pub fn hearing_promises(self) -> Self {
        Self { promises: Some(NO_PROMISES), ..self }
    }

    /// Those changes of a batch whose digests this reader has been told of, or would have been; whether each is kept.
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
