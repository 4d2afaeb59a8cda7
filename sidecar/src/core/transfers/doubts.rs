//! Engines in doubt: the KV of such an engine contradicts a kept chain.
//!
//! - A contradicted chain is removed at once, but for an equal beginning. All other blocks of its saver and
//!   step are removed, too, and all remembered blocks upon these. A miss is always right.
//! - One contradiction bars no engine. Its engine is in doubt: it loads, and none of its blocks is kept.
//! - An engine in doubt was right once it agrees with kept chains of two other sources.
//! - An engine in doubt is wrong once no single run has saved blocks of all chains contradicted by it: then
//!   the namespace is closed to it. One fault may spoil many steps of a run, and chains upon these. A block
//!   of a forgotten saver may be of any run.
//! - A doubt ends by itself if no other chain is kept.
//! - Few contradictions an hour remove a chain. A further one closes the namespace to its engine: an engine
//!   with false contradictions costs the others these few chains.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use shm_protocol::key::{BlockHash, BlockKey};

use super::SessionId;

/// Remembered blocks of a saver: 4.2 MB. Older blocks stay if it is barred.
const RECENT_MAX: usize = 65_536;
/// Remembered savers without a connection.
const ENDED_MAX: usize = 4;
/// Other chains in agreement with an engine in doubt, if it was right.
pub(super) const WITNESSES: usize = 2;
/// The longest time of a doubt.
pub(super) const DOUBT_MAX: Duration = Duration::from_secs(240);
/// Limit of contradictions with a removal, and the time for so many.
const REMOVALS_MAX: usize = 8;
const REMOVALS_IN: Duration = Duration::from_secs(3600);

type Run = [u8; 16];

/// The source of a kept block: its saver's run and step, or a key of its chain if these are forgotten.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum SaveSource {
    Saved(Run, u64),
    Unknown(BlockHash),
}

/// The meaning of a contradiction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ContradictionVerdict {
    /// Either engine may be wrong.
    Doubt,
    /// The contradicting engine is wrong.
    Wrong,
}

/// The last blocks of every saver, and the engines in doubt.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    /// Savers without a connection come first, the longest ended before the others.
    savers: VecDeque<Saver>,
    /// Blocks committed so far.
    commits: u64,
    open: BTreeMap<SessionId, Doubt>,
    /// Times of the removals within the last hour.
    removals: VecDeque<Duration>,
}

#[derive(Debug)]
struct Saver {
    run: Run,
    is_connected: bool,
    /// Oldest first.
    recent: VecDeque<SavedBlock>,
}

/// A block of a saver.
#[derive(Debug)]
struct SavedBlock {
    key: BlockKey,
    step: u64,
    /// The key before it, in short; zero for a first block.
    parent: u64,
    /// Its number among all commits: a key that was removed or evicted may be saved again.
    commit: u64,
}

#[derive(Debug)]
struct Doubt {
    namespace: u32,
    /// The source of the last contradicted block.
    against: SaveSource,
    /// Runs with blocks in every contradicted chain; none: any run may have.
    suspects: Option<BTreeSet<Run>>,
    /// Sources of the chains in agreement since then.
    agreed: BTreeSet<SaveSource>,
    until: Duration,
}

// === impl Doubts ===

impl Doubts {
    /// Notes blocks committed by a save of a run's step, each behind a parent.
    pub(super) fn committed(
        &mut self,
        run: Run,
        step: u64,
        blocks: impl Iterator<Item = (BlockKey, Option<BlockHash>)>,
    ) {
        let mut commit = self.commits;
        let recent = &mut self.saver(run).recent;
        for (key, parent) in blocks {
            if recent.len() == RECENT_MAX {
                recent.pop_front();
            }
            let parent = parent.map_or(0, |parent| short(&parent));
            recent.push_back(SavedBlock { key, step, parent, commit });
            commit += 1;
        }
        self.commits = commit;
    }

    fn saver(&mut self, run: Run) -> &mut Saver {
        let known = self.savers.iter().position(|saver| saver.run == run);
        let saver = known.and_then(|at| self.savers.remove(at)).unwrap_or_else(|| Saver::new(run));
        self.savers.push_back(Saver { is_connected: true, ..saver });
        self.savers.back_mut().expect("just pushed")
    }

    /// Notes the end of a run's scheduler.
    pub(super) fn end_session(&mut self, session: SessionId, run: Run) {
        self.open.remove(&session);
        let Some(at) = self.savers.iter().position(|saver| saver.run == run) else { return };
        let saver = self.savers.remove(at).expect("found above");
        let ended = self.savers.iter().take_while(|saver| !saver.is_connected).count();
        self.savers.insert(ended, Saver { is_connected: false, ..saver });
        if ended == ENDED_MAX {
            self.savers.pop_front();
        }
    }

    /// Takes the last blocks of a run out of the record, and returns those in a namespace.
    pub(super) fn take_recent(&mut self, run: Run, namespace: u32) -> BTreeSet<BlockKey> {
        let saver = self.savers.iter_mut().find(|saver| saver.run == run);
        let recent = saver.map(|saver| std::mem::take(&mut saver.recent)).unwrap_or_default();
        recent.into_iter().map(|saved| saved.key).filter(|key| key.namespace == namespace).collect()
    }

    #[cfg(test)]
    pub(super) fn forget_savers(&mut self) {
        self.savers.clear();
    }

    /// Returns the source of a kept block: its last commit.
    pub(super) fn source(&self, key: &BlockKey) -> SaveSource {
        let found = self.savers.iter().filter_map(|saver| {
            let found = saver.recent.iter().rev().find(|saved| saved.key == *key)?;
            Some((found.commit, SaveSource::Saved(saver.run, found.step)))
        });
        let last = found.max_by_key(|(commit, _)| *commit);
        last.map_or(SaveSource::Unknown(key.hash), |(_, source)| source)
    }

    /// Returns the runs of these kept blocks' savers, unless one is forgotten. It looks at every remembered
    /// block.
    fn runs_of(&self, keys: &BTreeSet<BlockKey>) -> Option<BTreeSet<Run>> {
        let mut last: HashMap<BlockKey, (u64, Run)> = HashMap::new();
        for saver in &self.savers {
            for saved in saver.recent.iter().filter(|saved| keys.contains(&saved.key)) {
                let commit = (saved.commit, saver.run);
                last.entry(saved.key).and_modify(|last| *last = commit.max(*last)).or_insert(commit);
            }
        }
        (last.len() == keys.len()).then(|| last.into_values().map(|(_, run)| run).collect())
    }

    /// Returns all remembered blocks of a source in a namespace.
    pub(super) fn saved_with(&self, source: &SaveSource, namespace: u32) -> BTreeSet<BlockKey> {
        let SaveSource::Saved(run, step) = source else { return BTreeSet::new() };
        let savers = self.savers.iter().filter(|saver| saver.run == *run);
        let saved = savers.flat_map(|saver| &saver.recent).filter(|saved| saved.step == *step);
        saved.map(|saved| saved.key).filter(|key| key.namespace == namespace).collect()
    }

    /// Adds all remembered blocks upon these of a namespace. It looks at every remembered block.
    pub(super) fn add_descendants(&self, keys: &mut BTreeSet<BlockKey>, namespace: u32) {
        let mut children: HashMap<u64, Vec<&BlockKey>> = HashMap::new();
        let saved = self.savers.iter().flat_map(|saver| &saver.recent);
        for saved in saved.filter(|saved| saved.key.namespace == namespace && saved.parent != 0) {
            children.entry(saved.parent).or_default().push(&saved.key);
        }
        let mut left: Vec<BlockKey> = keys.iter().copied().collect();
        while let Some(parent) = left.pop() {
            for child in children.remove(&short(&parent.hash)).into_iter().flatten() {
                if keys.insert(*child) {
                    left.push(*child);
                }
            }
        }
    }

    /// True if an engine is in doubt in a namespace: none of its blocks is kept.
    pub(super) fn holds(&self, session: SessionId, namespace: u32, now: Duration) -> bool {
        self.open.get(&session).is_some_and(|doubt| doubt.namespace == namespace && now < doubt.until)
    }

    /// Judges a contradiction of an engine's KV to a kept block of this source, at the end of this chain.
    pub(super) fn contradict(
        &mut self,
        session: SessionId,
        namespace: u32,
        against: SaveSource,
        chain: &BTreeSet<BlockKey>,
        now: Duration,
    ) -> ContradictionVerdict {
        let is_held = self.holds(session, namespace, now);
        let before = self.open.get(&session).filter(|_| is_held).and_then(|doubt| doubt.suspects.clone());
        let suspects = match (before, self.runs_of(chain)) {
            (Some(before), Some(runs)) => Some(&before & &runs),
            (before, runs) => before.or(runs),
        };
        if suspects.as_ref().is_some_and(BTreeSet::is_empty) {
            return ContradictionVerdict::Wrong;
        }
        self.removals.retain(|removed| now < *removed + REMOVALS_IN);
        if self.removals.len() == REMOVALS_MAX {
            return ContradictionVerdict::Wrong;
        }
        self.removals.push_back(now);
        let agreed = BTreeSet::new();
        self.open.insert(session, Doubt { namespace, against, suspects, agreed, until: now + DOUBT_MAX });
        ContradictionVerdict::Doubt
    }

    /// Counts an agreement of an engine's KV with the kept block of this key.
    pub(super) fn agree(&mut self, session: SessionId, run: Run, key: &BlockKey) {
        if !self.open.contains_key(&session) {
            return;
        }
        let source = self.source(key);
        let doubt = self.open.get_mut(&session).expect("looked at above");
        let is_own = matches!(&source, SaveSource::Saved(saver, _) if *saver == run);
        if doubt.namespace == key.namespace && !is_own && source != doubt.against {
            doubt.agreed.insert(source);
        }
        if doubt.agreed.len() == WITNESSES {
            self.open.remove(&session);
        }
    }
}

/// Returns the first bytes of a hash.
fn short(hash: &BlockHash) -> u64 {
    u64::from_le_bytes(*hash.0.first_chunk().expect("32 bytes"))
}

// === impl Saver ===

impl Saver {
    fn new(run: Run) -> Self {
        Self { run, is_connected: true, recent: VecDeque::new() }
    }
}
