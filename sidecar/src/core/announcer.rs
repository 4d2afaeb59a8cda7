//! What engines that ask for it are told of the blocks that they could find here: all of them once, then what changes.
//!
//! The blocks are shown by a walk over all tiers while they go on changing. What changes meanwhile is told, too, in its order, so a
//! block may be told of twice before the walk's end, and none is missed.

use std::collections::{BTreeMap, VecDeque};

use shm_protocol::announcement::{Announcement, Located};
use shm_protocol::key::BlockKey;
use shm_protocol::source::Source;

use super::inventory::At;
use super::tier::Notice;
use super::{Base, SessionId};

/// Announcements that wait for room in one engine's ring at most: 3 MB. With more, all is told anew once there is room.
const WAITING_MAX: usize = 65_536;
/// Announcements that wait, below which a walk goes on.
const WALK_BELOW: usize = 1024;

#[derive(Debug)]
pub(super) struct Announcer {
    readers: BTreeMap<SessionId, Reader>,
    waiting_max: usize,
}

/// An engine that has asked, and what it has not been told yet.
#[derive(Debug)]
struct Reader {
    basis: Basis,
    waiting: VecDeque<Announcement>,
    /// Where the walk is; `None` once all has been told.
    walk: Option<At>,
}

/// What all that is told rests on: once it differs, all is told anew.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Basis {
    /// How often the engine has asked.
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

    /// Blocks may be found there from now on, those with true, or may not any more.
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

    /// What an engine that has asked so often is told next, `room` announcements at most. Its first question begins to watch.
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

    /// Whether [`Announcer::next`] has more to look at, without anything else having to happen.
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

    /// What was told before may be wrong.
    fn begin(&mut self, basis: Basis) {
        self.walk = basis.namespace.map(|_| At::default());
        self.basis = basis;
        self.waiting.clear();
        self.waiting.push_back(Announcement::Begin);
        if self.walk.is_none() {
            self.waiting.push_back(Announcement::End);
        }
    }

    /// Shows some more blocks, if there is little else to tell.
    fn walk(&mut self, base: &Base) {
        let Some(at) = self.walk.filter(|_| self.waiting.len() < WALK_BELOW) else { return };
        let (namespace, waiting) = (self.basis.namespace, &mut self.waiting);
        let next = at.step(base, |key, medium| {
            // The walk shows blocks that are still being written, too.
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
