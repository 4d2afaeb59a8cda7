//! Announcements to engines that request them: first all blocks the engine could find here, then the changes.
//!
//! A walk over all tiers announces the blocks while they go on changing. Changes in the meantime are
//! announced, too, in their order: a block may be announced twice before the walk's end, and none is missed.

use std::collections::{BTreeMap, VecDeque};

use shm_protocol::announcement::{Announcement, Located};
use shm_protocol::key::BlockKey;
use shm_protocol::source::Source;

use super::inventory::At;
use super::tier::Notice;
use super::{Base, SessionId};

/// Limit of announcements waiting for room in one engine's ring: 3 MB. Beyond it, all blocks are announced
/// again once there is room.
const WAITING_MAX: usize = 65_536;
/// A walk goes on while fewer announcements wait.
const WALK_BELOW: usize = 1024;

#[derive(Debug)]
pub(super) struct Announcer {
    readers: BTreeMap<SessionId, Reader>,
    waiting_max: usize,
}

/// An engine with a request for announcements, and its unsent announcements.
#[derive(Debug)]
struct Reader {
    basis: Basis,
    waiting: VecDeque<Announcement>,
    /// The position of the walk; `None` once all blocks are announced.
    walk: Option<At>,
}

/// The basis of an engine's announcements: after a change of it, all blocks are announced again.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Basis {
    /// Number of the engine's requests.
    asked: u64,
    /// Number of its namespace, while it is bound.
    namespace: Option<u32>,
    /// The health of each tier.
    tiers: Vec<(usize, u64)>,
}

// === impl Announcer ===

impl Default for Announcer {
    fn default() -> Self {
        Self { readers: BTreeMap::new(), waiting_max: WAITING_MAX }
    }
}

impl Announcer {
    #[cfg(test)]
    pub(super) fn limit(&mut self, waiting_max: usize) {
        self.waiting_max = waiting_max;
    }

    /// Announces changes at a source: with true a block may be found there from now on, with false no longer.
    pub(super) fn note(&mut self, medium: Source, changes: impl Iterator<Item = (BlockKey, bool)>) {
        for (key, findable) in changes {
            for reader in self.readers.values_mut().filter(|reader| reader.is_of(&key)) {
                let located = located(medium, &key);
                let told = if findable { Announcement::Stored } else { Announcement::Removed };
                reader.waiting.push_back(told(located));
                if reader.waiting.len() > self.waiting_max {
                    reader.begin(reader.basis.clone());
                }
            }
        }
    }

    /// Returns the next announcements for an engine with so many requests, `room` at most. The first request
    /// begins to watch for changes.
    pub(super) fn next(
        &mut self,
        session: SessionId,
        asked: u64,
        room: usize,
        base: &mut Base,
    ) -> impl Iterator<Item = Announcement> + '_ {
        let tiers = base.sources.tiers.iter().map(|tier| tier.working()).collect();
        let basis = Basis { asked, namespace: base.engines.bound_to(session), tiers };
        let reader = self.readers.entry(session).or_insert_with(|| {
            base.cx.dram.watch();
            base.sources.tell_tiers(Notice::Watched, &mut base.cx);
            Reader::new(basis.clone())
        });
        if reader.basis != basis {
            reader.begin(basis);
        }
        reader.walk(base);
        reader.waiting.drain(..room.min(reader.waiting.len()))
    }

    /// True if [`Announcer::next`] has more blocks to announce, without any other event.
    pub(super) fn goes_on(&self, session: SessionId) -> bool {
        let goes_on = |reader: &Reader| reader.walk.is_some() && reader.waiting.len() < WALK_BELOW;
        self.readers.get(&session).is_some_and(goes_on)
    }

    pub(super) fn leave(&mut self, session: SessionId) {
        self.readers.remove(&session);
    }
}

fn located(medium: Source, key: &BlockKey) -> Located {
    Located { medium, group: key.group, hash: key.hash }
}

// === impl Reader ===

impl Reader {
    fn new(basis: Basis) -> Self {
        let mut reader = Self { basis: basis.clone(), waiting: VecDeque::new(), walk: None };
        reader.begin(basis);
        reader
    }

    fn is_of(&self, key: &BlockKey) -> bool {
        self.basis.namespace == Some(key.namespace)
    }

    /// Begins again from the first block: earlier announcements may be wrong.
    fn begin(&mut self, basis: Basis) {
        self.walk = basis.namespace.map(|_| At::default());
        self.basis = basis;
        self.waiting.clear();
        self.waiting.push_back(Announcement::Begin);
        if self.walk.is_none() {
            self.waiting.push_back(Announcement::End);
        }
    }

    /// Announces some more blocks of the walk, if few announcements wait.
    fn walk(&mut self, base: &Base) {
        let Some(at) = self.walk.filter(|_| self.waiting.len() < WALK_BELOW) else { return };
        let (namespace, waiting) = (self.basis.namespace, &mut self.waiting);
        let next = at.step(base, |key, medium| {
            // The walk shows blocks still being written, too.
            let there = medium == Source::Memory || base.sources.has(medium, key);
            if namespace == Some(key.namespace) && there {
                waiting.push_back(Announcement::Stored(located(medium, key)));
            }
        });
        self.walk = next;
        if next.is_none() {
            waiting.push_back(Announcement::End);
        }
    }
}
