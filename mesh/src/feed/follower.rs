//! The side that is told.

use thiserror::Error;

use super::{BATCH_CHANGES_MAX, CHUNK_DIGESTS_MAX, Message, PROMISES_MAX};
use crate::digest::{Change, Digest, Thinning};
use crate::directory::Filter;

/// Keys that a filter has room for beyond those there are: each time a node grows by as much, all is told anew.
fn room(keys: usize) -> usize {
    keys / 8 + ROOM_MIN
}

/// For a node that has just begun: 34 KiB.
const ROOM_MIN: usize = 16_384;

/// Keys that a follower of each of `peers` nodes may take, for all filters together to stay within `limit_bytes`: what has
/// more is followed thinned, until it fits. Every peer gets the same share, so that one that joins changes little; and
/// [`ROOM_MIN`] keys at least, because one that is not followed at all is of no use.
pub fn keys_max(limit_bytes: usize, peers: usize) -> usize {
    let share = Filter::capacity_of(limit_bytes / peers.max(1)).saturating_sub(ROOM_MIN);
    (share / 9 * 8).max(ROOM_MIN)
}

/// Takes what one node tells. After an error it is of no use: follow anew, from the beginning.
#[derive(Debug)]
pub struct Follower {
    keys_max: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Waits for the beginning.
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

/// What a message comes to.
#[derive(Debug)]
pub enum Heard {
    Nothing,
    /// All that the node has.
    Snapshot(Filter),
    /// What has changed since, in this order.
    Changes(Vec<Change>),
    /// All that the node promises.
    Promises(Vec<Digest>),
}

/// Why a message cannot be what a [`super::Feed`] tells, or cannot be kept.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum Unheard {
    /// Neither the beginning nor after it.
    #[error("a part of an inventory that has not begun or is complete")]
    OutOfPlace,
    /// A message is missing.
    #[error("changes from sequence {after} to {sequence}, while {known} is known")]
    Gap {
        known: u64,
        after: u64,
        /// What they lead to.
        sequence: u64,
    },
    /// More in a message than there may be.
    #[error("a message of {found} digests, of {max} at most")]
    Long {
        found: usize,
        /// The most there may be.
        max: usize,
    },
    /// Digests that do not ascend, or twice.
    #[error("digests out of order")]
    Order,
    /// A change of a digest that was not told, or is not to be.
    #[error("a change of a digest that is not announced")]
    Foreign,
    /// More than this side has memory for.
    #[error(
        "an inventory of {keys} keys, of which {max} fit: only a part of them is followed; raise --mesh-directory-size"
    )]
    Memory {
        keys: u64,
        /// The most that are taken.
        max: usize,
    },
    /// It has grown by more than the filter has room for while it was told.
    #[error("an inventory that outgrew its filter while it was sent")]
    Overfull,
}

// === impl Follower ===

impl Follower {
    /// Of a node whose inventory may have `keys_max` keys.
    pub fn new(keys_max: usize) -> Self {
        Self { keys_max, state: State::Idle }
    }

    /// Of a node of which all is known up to a sequence, from an earlier stream in the same life of it.
    pub fn resumed(keys_max: usize, sequence: u64, thinning: Thinning) -> Self {
        Self { keys_max, state: State::Following { sequence, thinning } }
    }

    /// Up to where all is known: what a later stream may go on from.
    pub fn known(&self) -> Option<u64> {
        match self.state {
            State::Following { sequence, .. } => Some(sequence),
            State::Idle | State::Gathering { .. } => None,
        }
    }

    /// Takes the next message.
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

/// Applies changes to what was gathered.
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
