//! The receiving side of a feed.

use thiserror::Error;

use super::{BATCH_CHANGES_MAX, CHUNK_DIGESTS_MAX, Message, PROMISES_MAX};
use crate::digest::{Change, Digest, Thinning};
use crate::directory::Filter;

/// Spare keys of a filter beyond its inventory. Each time a node grows by as many, its inventory is sent
/// again.
fn room(keys: usize) -> usize {
    keys / 8 + ROOM_MIN
}

/// The spare keys for a new node: 34 KiB.
const ROOM_MIN: usize = 16_384;

/// Maximum keys of one follower: the filters of `peers` nodes then stay within `limit_bytes` together. A
/// larger inventory is thinned until it fits. Every peer gets the same share, so a new peer changes little,
/// and at least [`ROOM_MIN`] keys, because a peer without a filter is of no use.
pub fn keys_max(limit_bytes: usize, peers: usize) -> usize {
    let share = Filter::capacity_of(limit_bytes / peers.max(1)).saturating_sub(ROOM_MIN);
    (share / 9 * 8).max(ROOM_MIN)
}

/// Applies the messages of one node. After an error it is unusable: follow again, from the beginning.
#[derive(Debug)]
pub struct Follower {
    keys_max: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Waits for [`Message::Begin`].
    Idle,
    Gathering {
        filter: Filter,
        sequence: u64,
        /// The last digest of the last chunk.
        told: Option<Digest>,
    },
    Following {
        sequence: u64,
        thinning: Thinning,
    },
}

/// The effect of a message.
#[derive(Debug)]
pub enum Heard {
    Nothing,
    /// The whole inventory of the node.
    Snapshot(Filter),
    /// Changes since then, in this order.
    Changes(Vec<Change>),
    /// All promises of the node.
    Promises(Vec<Digest>),
}

/// The reason why a message is not from a [`super::Feed`], or does not fit.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum Unheard {
    /// The message comes before the beginning or after the end of an inventory.
    #[error("a part of an inventory that has not begun or is complete")]
    OutOfPlace,
    /// A message is missing.
    #[error("changes from sequence {after} to {sequence}, while {known} is known")]
    Gap {
        known: u64,
        after: u64,
        /// The sequence after the changes.
        sequence: u64,
    },
    /// A message has too many digests.
    #[error("a message of {found} digests, of {max} at most")]
    Long {
        found: usize,
        /// The most allowed.
        max: usize,
    },
    /// The digests do not ascend, or one comes twice.
    #[error("digests out of order")]
    Order,
    /// A change has a digest not announced before, or excluded by the thinning.
    #[error("a change of a digest that is not announced")]
    Foreign,
    /// The inventory has more keys than its filter may have.
    #[error(
        "an inventory of {keys} keys, of which {max} fit: only a part of them is followed; raise --mesh-directory-size"
    )]
    Memory {
        keys: u64,
        /// The most that fit.
        max: usize,
    },
    /// The inventory grew beyond its filter while it was sent.
    #[error("an inventory that outgrew its filter while it was sent")]
    Overfull,
}

// === impl Follower ===

impl Follower {
    /// A follower of a node with at most `keys_max` keys.
    pub fn new(keys_max: usize) -> Self {
        Self { keys_max, state: State::Idle }
    }

    /// A follower with knowledge of all up to a sequence, from an earlier stream in the same life of the
    /// node.
    pub fn resumed(keys_max: usize, sequence: u64, thinning: Thinning) -> Self {
        Self { keys_max, state: State::Following { sequence, thinning } }
    }

    /// The last sequence of everything known. A later stream may resume from it.
    pub fn known(&self) -> Option<u64> {
        match self.state {
            State::Following { sequence, .. } => Some(sequence),
            State::Idle | State::Gathering { .. } => None,
        }
    }

    /// Applies the next message.
    pub fn hear(&mut self, message: Message) -> Result<Heard, Unheard> {
        match message {
            Message::Begin { sequence, keys, thinning } => self.begin(sequence, keys, thinning),
            Message::Chunk { sequence, digests, last } => self.gather(sequence, &digests, last),
            Message::Delta { after, sequence, removed, added } => {
                self.change(after, sequence, &removed, &added)
            }
            Message::Promises(promises) => {
                within(promises.len(), PROMISES_MAX)?;
                self.known().map(|_| Heard::Promises(promises)).ok_or(Unheard::OutOfPlace)
            }
        }
    }

    fn begin(&mut self, sequence: u64, keys: u64, thinning: Thinning) -> Result<Heard, Unheard> {
        let fits = usize::try_from(keys).ok().filter(|keys| *keys <= self.keys_max);
        let keys = fits.ok_or(Unheard::Memory { keys, max: self.keys_max })?;
        let filter = Filter::thinned(keys + room(keys), thinning);
        self.state = State::Gathering { filter, sequence, told: None };
        Ok(Heard::Nothing)
    }

    fn gather(&mut self, reached: u64, digests: &[Digest], last: bool) -> Result<Heard, Unheard> {
        let State::Gathering { filter, sequence, told } = &mut self.state else {
            return Err(Unheard::OutOfPlace);
        };
        within(digests.len(), CHUNK_DIGESTS_MAX)?;
        if reached < *sequence {
            return Err(Unheard::Gap { known: *sequence, after: reached, sequence: reached });
        }
        *sequence = reached;
        for digest in digests {
            if *told >= Some(*digest) {
                return Err(Unheard::Order);
            }
            if !filter.thinning().keeps(*digest) {
                return Err(Unheard::Foreign);
            }
            if !filter.insert(*digest) {
                return Err(Unheard::Overfull);
            }
            *told = Some(*digest);
        }
        if !last {
            return Ok(Heard::Nothing);
        }
        let next = State::Following { sequence: *sequence, thinning: filter.thinning() };
        match std::mem::replace(&mut self.state, next) {
            State::Gathering { filter, .. } => Ok(Heard::Snapshot(filter)),
            State::Idle | State::Following { .. } => unreachable!("it was gathering"),
        }
    }

    fn change(
        &mut self,
        after: u64,
        sequence: u64,
        removed: &[Digest],
        added: &[Digest],
    ) -> Result<Heard, Unheard> {
        within(removed.len() + added.len(), BATCH_CHANGES_MAX)?;
        let (known, thinning) = match &mut self.state {
            State::Idle => return Err(Unheard::OutOfPlace),
            State::Gathering { filter, sequence, .. } => (sequence, filter.thinning()),
            State::Following { sequence, thinning } => (sequence, *thinning),
        };
        if after != *known || sequence <= after {
            return Err(Unheard::Gap { known: *known, after, sequence });
        }
        *known = sequence;
        if ![removed, added].into_iter().flatten().all(|digest| thinning.keeps(*digest)) {
            return Err(Unheard::Foreign);
        }
        let removals = removed.iter().copied().map(Change::Removed);
        let changes = removals.chain(added.iter().copied().map(Change::Added));
        match &mut self.state {
            State::Gathering { filter, .. } => amend(filter, changes).map(|()| Heard::Nothing),
            State::Idle | State::Following { .. } => Ok(Heard::Changes(changes.collect())),
        }
    }
}

/// Applies changes to a filter still being filled.
fn amend(filter: &mut Filter, changes: impl Iterator<Item = Change>) -> Result<(), Unheard> {
    for change in changes {
        match change {
            Change::Added(digest) if !filter.insert(digest) => return Err(Unheard::Overfull),
            Change::Removed(digest) if !filter.remove(digest) => return Err(Unheard::Foreign),
            Change::Added(_) | Change::Removed(_) => {}
        }
    }
    Ok(())
}

fn within(found: usize, max: usize) -> Result<(), Unheard> {
    if found <= max { Ok(()) } else { Err(Unheard::Long { found, max }) }
}
