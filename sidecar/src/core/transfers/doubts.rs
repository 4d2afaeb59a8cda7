//! Who is believed where an engine has computed other KV than is kept.
//!
//! - A contradicted chain goes at once, but for the beginning that was found equal, with all that its saver saved in the same step. A
//!   miss is always right.
//! - One contradiction bars nobody. Its engine is in doubt: it loads, and nothing that it computes is kept.
//! - It was right once it agrees with kept chains of two other origins.
//! - It is wrong once it contradicts a chain of another origin: the namespace is closed to it.
//! - Where nothing else is kept to compare with, a doubt ends by itself.
//! - Few contradictions an hour remove anything. A further one closes the namespace to its engine and removes what that saved: an engine
//!   that lies costs the others these few chains.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shm_protocol::key::{BlockHash, BlockKey};

use super::SessionId;

/// The last blocks of a saver that are remembered: 3.1 MB. Of a saver with more the oldest ones stay where it is barred.
const RECENT_MAX: usize = 65_536;
/// Savers without a connection that are remembered.
const ENDED_MAX: usize = 4;
/// Other chains that an engine in doubt agrees with, if it was right.
pub(super) const WITNESSES: usize = 2;
/// A doubt lasts so long at most.
pub(super) const DOUBT_MAX: Duration = Duration::from_secs(240);
/// So many contradictions in so long a time remove what they contradict.
const REMOVALS_MAX: usize = 8;
const REMOVALS_IN: Duration = Duration::from_secs(3600);

type Run = [u8; 16];

/// Where a kept block comes from: its saver's run and step, or a key of its chain where nobody knows them any more.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Origin {
    Saved(Run, u64),
    Unknown(BlockHash),
}

/// What a contradiction means.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Verdict {
    /// Either may be wrong.
    Doubt,
    /// The engine is.
    Wrong,
}

/// The blocks that engines committed last, and the engines in doubt.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    /// Those without a connection first, the longest ended first.
    savers: VecDeque<Saver>,
    open: BTreeMap<SessionId, Doubt>,
    /// When contradictions removed something, within the last hour.
    removals: VecDeque<Duration>,
}

#[derive(Debug)]
struct Saver {
    run: Run,
    is_connected: bool,
    /// Each block with its step, oldest first.
    recent: VecDeque<(BlockKey, u64)>,
}

#[derive(Debug)]
struct Doubt {
    namespace: u32,
    /// The origin of the contradicted chain.
    against: Origin,
    /// Origins of chains that it agreed with since.
    agreed: BTreeSet<Origin>,
    until: Duration,
}

// === impl Doubts ===

impl Doubts {
    /// A save of a run's step has committed these blocks, deepest first.
    pub(super) fn committed(&mut self, run: Run, step: u64, keys: impl Iterator<Item = BlockKey>) {
        let recent = &mut self.saver(run).recent;
        for key in keys {
            if recent.len() == RECENT_MAX {
                recent.pop_front();
            }
            recent.push_back((key, step));
        }
    }

    fn saver(&mut self, run: Run) -> &mut Saver {
        let known = self.savers.iter().position(|saver| saver.run == run);
        let saver = known.and_then(|at| self.savers.remove(at)).unwrap_or_else(|| Saver::new(run));
        self.savers.push_back(Saver { is_connected: true, ..saver });
        self.savers.back_mut().expect("just pushed")
    }

    /// The scheduler of a run is gone.
    pub(super) fn leave(&mut self, session: SessionId, run: Run) {
        self.open.remove(&session);
        let Some(at) = self.savers.iter().position(|saver| saver.run == run) else { return };
        let saver = self.savers.remove(at).expect("found above");
        let ended = self.savers.iter().take_while(|saver| !saver.is_connected).count();
        self.savers.insert(ended, Saver { is_connected: false, ..saver });
        if ended == ENDED_MAX {
            self.savers.pop_front();
        }
    }

    /// What a run committed last under a namespace's id, which is told of no more.
    pub(super) fn take_recent(&mut self, run: Run, namespace: u32) -> BTreeSet<BlockKey> {
        let saver = self.savers.iter_mut().find(|saver| saver.run == run);
        let recent = saver.map(|saver| std::mem::take(&mut saver.recent)).unwrap_or_default();
        recent.into_iter().map(|(key, _)| key).filter(|key| key.namespace == namespace).collect()
    }

    /// Where a kept block comes from.
    pub(super) fn origin(&self, key: &BlockKey) -> Origin {
        let saved = self.savers.iter().find_map(|saver| {
            let found = saver.recent.iter().rev().find(|(saved, _)| saved == key)?;
            Some(Origin::Saved(saver.run, found.1))
        });
        saved.unwrap_or(Origin::Unknown(key.hash))
    }

    /// All that its saver saved in the step of a block's origin, in the same namespace.
    pub(super) fn saved_with(&self, origin: &Origin, namespace: u32) -> BTreeSet<BlockKey> {
        let Origin::Saved(run, step) = origin else { return BTreeSet::new() };
        let savers = self.savers.iter().filter(|saver| saver.run == *run);
        let saved = savers.flat_map(|saver| &saver.recent).filter(|(_, saved_in)| saved_in == step);
        saved.map(|(key, _)| *key).filter(|key| key.namespace == namespace).collect()
    }

    /// Whether nothing that an engine computes in a namespace is kept for now.
    pub(super) fn holds(&self, session: SessionId, namespace: u32, now: Duration) -> bool {
        self.open.get(&session).is_some_and(|doubt| doubt.namespace == namespace && now < doubt.until)
    }

    /// An engine has computed other KV than is kept of this origin.
    pub(super) fn contradict(
        &mut self,
        session: SessionId,
        namespace: u32,
        against: Origin,
        now: Duration,
    ) -> Verdict {
        if self.holds(session, namespace, now) && self.open[&session].against != against {
            return Verdict::Wrong;
        }
        self.removals.retain(|removed| now < *removed + REMOVALS_IN);
        if self.removals.len() == REMOVALS_MAX {
            return Verdict::Wrong;
        }
        self.removals.push_back(now);
        let agreed = BTreeSet::new();
        self.open.insert(session, Doubt { namespace, against, agreed, until: now + DOUBT_MAX });
        Verdict::Doubt
    }

    /// An engine has computed what is kept under this key by another run.
    pub(super) fn agree(&mut self, session: SessionId, run: Run, key: &BlockKey) {
        if !self.open.contains_key(&session) {
            return;
        }
        let origin = self.origin(key);
        let doubt = self.open.get_mut(&session).expect("looked at above");
        let is_own = matches!(&origin, Origin::Saved(saver, _) if *saver == run);
        if doubt.namespace == key.namespace && !is_own && origin != doubt.against {
            doubt.agreed.insert(origin);
        }
        if doubt.agreed.len() == WITNESSES {
            self.open.remove(&session);
        }
    }
}

// === impl Saver ===

impl Saver {
    fn new(run: Run) -> Self {
        Self { run, is_connected: true, recent: VecDeque::new() }
    }
}
