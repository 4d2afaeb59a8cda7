//! Sets: the cache groups of one engine, each an engine of its own.

use shm_protocol::key;
use shm_protocol::namespace::STATE_KIND;
use tiers::forecast::{GroupReads, OtherGroup, SavedKeys};

use super::{Engines, SchedulerRole, SessionId, find_whole_engine};
use crate::core::event::SetPart;

/// A cache group by its blocks read at the end of a hit.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum GroupKind {
    Full,
    Window { tokens: u32 },
    State,
}

// === impl GroupKind ===

impl GroupKind {
    /// Reads the fact `group_kind` of a group of several: its layers are of one kind. `None`: another kind.
    fn parse(text: &str) -> Option<Self> {
        let kind = text.split_once(" x").map_or(text, |(kind, _)| kind);
        let window = || kind.strip_prefix("window ")?.parse().ok().map(|tokens| Self::Window { tokens });
        match kind {
            "full" => Some(Self::Full),
            STATE_KIND => Some(Self::State),
            _ => window(),
        }
    }
}

// === impl Engines ===

impl Engines {
    /// Returns a group's part of the requests of its engine, with these saves. `None`: the forecast cannot count them, as some group is of
    /// another kind or has blocks of another number of tokens, or none has full attention.
    pub(in crate::core) fn part_of_set(&self, session: SessionId, saved: &[SavedKeys]) -> Option<SetPart> {
        let Some(whole) = find_whole_engine(&self[session].engine) else { return Some(SetPart::Whole) };
        let is_beside = |scheduler: &&SchedulerRole| find_whole_engine(&scheduler.engine) == Some(whole);
        let groups = self.schedulers.iter().filter(|(_, scheduler)| is_beside(scheduler));
        let groups: Vec<_> = groups.map(|(id, _)| Some((*id, self.kind_of(*id)?))).collect::<Option<_>>()?;
        let (lead, (_, tokens)) = *groups.iter().find(|(_, (kind, _))| *kind == GroupKind::Full)?;
        if groups.iter().any(|(_, (_, others))| *others != tokens) {
            return None;
        }
        let reads = |kind: GroupKind| match kind {
            GroupKind::Full => GroupReads::All,
            GroupKind::Window { tokens: window } => {
                GroupReads::Last(window.saturating_sub(1).div_ceil(tokens) as usize)
            }
            GroupKind::State => GroupReads::Last(1),
        };
        if session != lead {
            let reads = reads(self.kind_of(session)?.0);
            return Some(SetPart::Other { saved: saved.to_vec(), reads });
        }
        let other = |(id, (kind, _)): &(SessionId, (GroupKind, u32))| {
            Some(OtherGroup { namespace: self.bound_to(*id)?, reads: reads(*kind) })
        };
        let others = groups.iter().filter(|(id, _)| *id != lead).map(other).collect::<Option<_>>()?;
        Some(SetPart::Lead(others))
    }

    /// Returns the kind of a group, and the tokens of its blocks, as its ranks state them.
    fn kind_of(&self, scheduler: SessionId) -> Option<(GroupKind, u32)> {
        let (_, rank) = self.ranks(scheduler).next()?;
        let kind = GroupKind::parse(rank.facts.get("group_kind")?)?;
        Some((kind, key::read_block_tokens(&rank.facts).ok()?))
    }
}
