//! For each peer a [`Filter`] of its blocks, its load and its breaker. Pure: no clock, no packet.
//!
//! An answer may be wrong, because a filter has false positives and is always a little late. The owner's
//! answer is the truth, and [`crate::transport::FetchFault::Absent`] a miss like any other. Costs:
//! docs/mesh-cost.md.

mod absences;
mod breaker;
mod credit;
mod filter;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashSet;

use self::absences::Absences;
pub use self::breaker::BreakerLimits;
use self::breaker::{BreakerVerdict, PeerBreaker};
pub use self::credit::Credit;
pub use self::filter::Filter;
use crate::digest::{Digest, DigestChange, Thinning};
use crate::transport::{FetchFault, PeerNumber};
use shm_protocol::random::mix_bits;

/// Sampled keys of a run, spread over it: they limit its length. A peer with the first key in its filter is
/// checked in these before all others.
const SAMPLES: usize = 8;
/// Limit of look-ups in a probe: no further peer's run is followed beyond it. 640 keys at two peers. Without
/// it a prefix known to every peer would cost all of its keys at each of them.
const LOOKUPS_MAX: usize = 1280;

/// Settings for the choice of peers.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct DirectoryConfig {
    /// Limits for faults of a peer.
    pub breaker: BreakerLimits,
    /// Maximum candidates of a probe.
    pub candidates_max: usize,
    /// Spreads nodes with requests for the same blocks over the peers with these blocks: another number on
    /// each node.
    pub seed: u64,
}

/// A peer with the first `run` of a probe's keys, if its filter is right.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct PeerCandidate {
    pub peer: PeerNumber,
    /// Keys, at least one.
    pub run: u32,
    /// How often the peer lacked announced blocks of late: peers of a lower level are chosen first.
    pub absence_level: u32,
}

/// Figures of a peer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct PeerStats {
    pub peer: PeerNumber,
    /// Keys in its inventory; zero before its first snapshot.
    pub keys: usize,
    /// Bytes of memory of its filter.
    pub bytes: usize,
    /// Keys of its engines' promised prompts.
    pub promises: usize,
    /// True while its breaker is open, or on trial.
    pub breaker_open: bool,
    /// Number of times its breaker has opened.
    pub trips_total: u64,
    /// Awaited promises, ended without the blocks.
    pub broken_promises_total: u64,
    /// Announced blocks, requested of it and not there.
    pub absent_total: u64,
    /// Blocks requested of it and not ended.
    pub under_way: u32,
    /// Bytes a second at full load; 0 if unknown here.
    pub bytes_per_second: u64,
}

#[derive(Debug)]
pub struct Directory {
    config: DirectoryConfig,
    members: Vec<DirectoryMember>,
}

#[derive(Debug)]
struct DirectoryMember {
    peer: PeerNumber,
    /// `None` before the first snapshot.
    filter: Option<Filter>,
    /// True if the filter had no room for a key; reported once.
    overfull: bool,
    /// The last keys of each prompt promised by its engines.
    promises: HashSet<Digest>,
    credit: Credit,
    absences: Absences,
    breaker: PeerBreaker,
    under_way: u32,
    given_bytes: u64,
    /// The time of the last block it gave.
    gave_ms: Option<u64>,
}

/// The keys of a probe kept by a thinning.
#[derive(Debug)]
struct ProbedKeys<'a> {
    thinning: Thinning,
    keys: Cow<'a, [Digest]>,
    /// Their positions among all keys; empty without thinning.
    places: Vec<u32>,
}

/// A member with the first key in its filter.
#[derive(Copy, Clone, Debug)]
struct Prospect<'a> {
    member: &'a DirectoryMember,
    filter: &'a Filter,
    asked: &'a ProbedKeys<'a>,
    absence_level: u32,
    /// Its run among these keys, or a maximum of it; at least one.
    run: usize,
    lot: u64,
}

// === impl DirectoryConfig ===

impl Default for DirectoryConfig {
    fn default() -> Self {
        Self { breaker: BreakerLimits::default(), candidates_max: 8, seed: 0 }
    }
}

// === impl Directory: members ===

impl Directory {
    /// An empty directory.
    pub fn new(config: DirectoryConfig) -> Self {
        Self { config, members: Vec::new() }
    }

    /// Adds a peer. It has nothing until [`Directory::replace`]. Without effect on a member.
    pub fn add_peer(&mut self, peer: PeerNumber) {
        if let Err(at) = self.position(peer) {
            self.members.insert(at, DirectoryMember::new(peer, &self.config.breaker));
        }
    }

    /// Removes a peer. Later calls for it are ignored.
    pub fn remove_peer(&mut self, peer: PeerNumber) {
        if let Ok(at) = self.position(peer) {
            self.members.remove(at);
        }
    }

    /// Sets a peer's inventory, as of a snapshot.
    pub fn replace(&mut self, peer: PeerNumber, filter: Filter) {
        if let Some(member) = self.member(peer) {
            (member.filter, member.overfull) = (Some(filter), false);
        }
    }

    /// Applies later changes to a peer's inventory. Returns false if its filter is overfull, on the first
    /// such call only: the rest is left out until a larger filter comes by [`Directory::replace`].
    #[must_use = "a filter that is overfull wants a larger one"]
    pub fn apply(&mut self, peer: PeerNumber, changes: &[DigestChange]) -> bool {
        let Some(member) = self.member(peer) else { return true };
        let Some(filter) = &mut member.filter else { return true };
        let mut fits = true;
        for change in changes {
            match change {
                DigestChange::Added(digest) => fits &= filter.insert(*digest),
                // It may be a digest without room before.
                DigestChange::Removed(digest) => drop(filter.remove(*digest)),
            }
        }
        let said = member.overfull;
        member.overfull |= !fits;
        fits || said
    }

    /// Replaces a peer's promises. Returns true if one of the old promises has ended.
    #[must_use = "somebody may wait for what was promised"]
    pub fn replace_promises(&mut self, peer: PeerNumber, promises: Vec<Digest>) -> bool {
        let Some(member) = self.member(peer) else { return false };
        let before = std::mem::replace(&mut member.promises, promises.into_iter().collect());
        !before.is_subset(&member.promises)
    }

    /// The peers ready for requests that promised a prompt with one of these last keys.
    pub fn promisers(&self, now_ms: u64, keys: impl Iterator<Item = Digest>) -> Vec<PeerNumber> {
        let may_be_asked = |member: &&DirectoryMember| member.breaker.lets_pass(now_ms, member.under_way);
        let promising = self.members.iter().filter(|member| !member.promises.is_empty());
        let promising: Vec<&DirectoryMember> = promising.filter(may_be_asked).collect();
        let keys: Vec<Digest> = if promising.is_empty() { Vec::new() } else { keys.collect() };
        let has_promised = |member: &&DirectoryMember| keys.iter().any(|key| member.promises.contains(key));
        promising.into_iter().filter(has_promised).map(|member| member.peer).collect()
    }

    /// The place of the last of `keys` among the last keys of promises by peers that are ready for requests and
    /// keep their promises.
    pub fn promised_place(&self, now_ms: u64, keys: &[Digest]) -> Option<usize> {
        let is_believed = |member: &&DirectoryMember| {
            member.credit.is_believed() && member.breaker.lets_pass(now_ms, member.under_way)
        };
        let last = |member: &DirectoryMember| keys.iter().rposition(|key| member.promises.contains(key));
        self.members.iter().filter(is_believed).filter_map(last).max()
    }

    /// True if any peer has promised a prompt.
    pub fn has_promises(&self) -> bool {
        self.members.iter().any(|member| !member.promises.is_empty())
    }

    /// The credit of a peer's promises.
    pub fn credit(&self, peer: PeerNumber) -> Option<&Credit> {
        self.position(peer).ok().map(|at| &self.members[at].credit)
    }

    /// The same, mutable. `None` also while the peer's breaker is open: no promise counts then.
    pub fn credit_mut(&mut self, peer: PeerNumber) -> Option<&mut Credit> {
        self.member(peer).filter(|member| !member.breaker.is_open()).map(|member| &mut member.credit)
    }

    /// Adds requested blocks to a peer's load. Returns the bytes it has given so far.
    pub fn began(&mut self, peer: PeerNumber, blocks: u32) -> u64 {
        let Some(member) = self.member(peer) else { return 0 };
        member.under_way += blocks;
        member.given_bytes
    }

    /// Records the end of one of these blocks.
    pub fn note_end(&mut self, now_ms: u64, peer: PeerNumber, result: &Result<u64, FetchFault>) {
        let limits = self.config.breaker;
        if let Some(member) = self.member(peer) {
            member.under_way = member.under_way.saturating_sub(1);
            member.breaker.note_end(BreakerVerdict::of_result(result), now_ms, &limits);
        }
    }

    /// Records a block given by a peer.
    pub fn gave(&mut self, now_ms: u64, peer: PeerNumber, bytes: u64) {
        if let Some(member) = self.member(peer) {
            member.given_bytes += bytes;
            member.absences.count_given(now_ms);
            member.gave_ms = Some(now_ms);
        }
    }

    /// Records a block lacked by a peer. It counts only if the thinning of its inventory keeps the block.
    pub fn lacked(&mut self, now_ms: u64, peer: PeerNumber, key: Digest) {
        let speaks = |filter: &Filter| filter.thinning().keeps(key);
        if let Some(member) = self.member(peer)
            && member.filter.as_ref().is_some_and(speaks)
        {
            member.absences.count_absent(now_ms);
        }
    }

    /// Handles a fetch past its longest time. It began at `since_ms`, when its peer had given `given_before`
    /// bytes. The fetch is a strike, though its peer may have answered just before, if the peer has given too
    /// few bytes since. Bytes of other fetches count, since a peer gives the blocks requested first before
    /// others. Returns true for a strike.
    pub fn late(&mut self, now_ms: u64, peer: PeerNumber, since_ms: u64, given_before: u64) -> bool {
        let limits = self.config.breaker;
        let has_given = |member: &&DirectoryMember| member.gave_ms.is_some_and(|gave_ms| gave_ms >= since_ms);
        let sharing = self.members.iter().filter(has_given).count() as u64;
        let Some(member) = self.member(peer) else { return false };
        let given_bytes = member.given_bytes.saturating_sub(given_before);
        let is_strike = given_bytes * sharing < limits.given_bytes_min;
        if is_strike {
            member.breaker.note_end(BreakerVerdict::Strike, now_ms, &limits);
        }
        is_strike
    }

    /// Figures of every peer.
    pub fn peers(&self) -> impl Iterator<Item = PeerStats> + '_ {
        self.members.iter().map(|member| PeerStats {
            peer: member.peer,
            keys: member.filter.as_ref().map_or(0, Filter::len),
            bytes: member.filter.as_ref().map_or(0, Filter::size_bytes),
            promises: member.promises.len(),
            breaker_open: member.breaker.is_open(),
            trips_total: member.breaker.trips_total,
            broken_promises_total: member.credit.broken_total(),
            absent_total: member.absences.total,
            under_way: member.under_way,
            bytes_per_second: 0,
        })
    }

    /// Number of peers.
    pub fn peer_count(&self) -> usize {
        self.members.len()
    }

    /// True if a peer's filter has a block.
    pub fn keeps(&self, peer: PeerNumber, key: Digest) -> bool {
        let member = self.position(peer).ok().map(|at| &self.members[at]);
        member.and_then(|member| member.filter.as_ref()).is_some_and(|filter| filter.contains(key))
    }

    /// Peers with a block in their filters, including those with an open breaker.
    pub fn holders(&self, key: Digest) -> impl Iterator<Item = PeerNumber> + '_ {
        let has = move |member: &&DirectoryMember| {
            member.filter.as_ref().is_some_and(|filter| filter.contains(key))
        };
        self.members.iter().filter(has).map(|member| member.peer)
    }

    /// The reach of a peer's leading run of `keys`, if its filter is right, and true if the run may go on behind
    /// them.
    pub fn leading(&self, peer: PeerNumber, keys: &[Digest]) -> (usize, bool) {
        let member = self.position(peer).ok().map(|at| &self.members[at]);
        let Some(filter) = member.and_then(|member| member.filter.as_ref()) else { return (0, false) };
        let asked = ProbedKeys::new(filter.thinning(), keys);
        let run = filter.leading(&asked.keys);
        (if run == 0 { 0 } else { asked.reach(run) as usize }, run == asked.keys.len())
    }

    fn position(&self, peer: PeerNumber) -> Result<usize, usize> {
        self.members.binary_search_by_key(&peer, |member| member.peer)
    }

    fn member(&mut self, peer: PeerNumber) -> Option<&mut DirectoryMember> {
        self.position(peer).ok().map(|at| &mut self.members[at])
    }
}

// === impl Directory: the probe ===

impl Directory {
    /// Peers with a leading run of `keys` in their filters: those with the fewest absences first, among
    /// equals the longest run, then the least load. Peers with an open breaker are left out. A thinned run
    /// reaches to the last key in the filter among those kept by the thinning.
    ///
    /// All peers are checked for the first key, those with it for [`SAMPLES`] more, and the most promising
    /// ones for every key, up to [`LOOKUPS_MAX`] look-ups.
    pub fn probe(&self, now_ms: u64, keys: &[Digest]) -> Vec<PeerCandidate> {
        let asked = self.asked(keys);
        let prospects = self.members.iter().filter_map(|member| self.prospect(now_ms, member, &asked));
        let mut prospects: Vec<Prospect<'_>> = prospects.collect();
        prospects.sort_unstable_by_key(Prospect::rank);
        prospects.truncate(self.config.candidates_max);

        let (mut lookups, mut followed) = (0, 0);
        for prospect in &mut prospects {
            if lookups >= LOOKUPS_MAX {
                break;
            }
            lookups += prospect.run;
            prospect.run = prospect.filter.leading(&prospect.asked.keys[..prospect.run]);
            followed += 1;
        }
        prospects.truncate(followed);
        prospects.sort_unstable_by_key(Prospect::rank);
        prospects.iter().map(Prospect::candidate).collect()
    }

    /// True if a peer ready for requests may have a run of `keys`: its filter has the first key kept by its
    /// thinning.
    pub fn may_have(&self, now_ms: u64, keys: impl Iterator<Item = Digest>) -> bool {
        let may_be_asked = |member: &&DirectoryMember| member.breaker.lets_pass(now_ms, member.under_way);
        let members = self.members.iter().filter(may_be_asked);
        let mut filters: Vec<&Filter> = members.filter_map(|member| member.filter.as_ref()).collect();
        for key in keys {
            let speaks = |filter: &mut &Filter| filter.thinning().keeps(key);
            if filters.extract_if(.., speaks).any(|filter| filter.contains(key)) {
                return true;
            }
            if filters.is_empty() {
                break;
            }
        }
        false
    }

    /// The prospect of a member with the first key, if it is ready for requests.
    fn prospect<'a>(
        &self,
        now_ms: u64,
        member: &'a DirectoryMember,
        asked: &'a [ProbedKeys<'a>],
    ) -> Option<Prospect<'a>> {
        let filter = member.filter.as_ref()?;
        let asked = asked.iter().find(|asked| asked.thinning == filter.thinning())?;
        let first = asked.keys.first()?;
        if !filter.contains(*first) || !member.breaker.lets_pass(now_ms, member.under_way) {
            return None;
        }
        let run = run_max(filter, &asked.keys);
        let lot = mix_bits(self.config.seed ^ first.0 ^ u64::from(member.peer.0));
        Some(Prospect { member, filter, asked, absence_level: member.absences.level(now_ms), run, lot })
    }

    /// The keys kept by each thinning in use.
    fn asked<'a>(&self, keys: &'a [Digest]) -> Vec<ProbedKeys<'a>> {
        let mut asked: Vec<ProbedKeys<'a>> = Vec::new();
        for filter in self.members.iter().filter_map(|member| member.filter.as_ref()) {
            if asked.iter().all(|asked| asked.thinning != filter.thinning()) {
                asked.push(ProbedKeys::new(filter.thinning(), keys));
            }
        }
        asked
    }
}

// === impl DirectoryMember ===

impl DirectoryMember {
    /// A member without blocks, load or faults.
    fn new(peer: PeerNumber, limits: &BreakerLimits) -> Self {
        let (filter, overfull, promises) = (None, false, HashSet::new());
        let (credit, absences, breaker) = (Credit::default(), Absences::default(), PeerBreaker::new(limits));
        let (under_way, given_bytes, gave_ms) = (0, 0, None);
        Self { peer, filter, overfull, promises, credit, absences, breaker, under_way, given_bytes, gave_ms }
    }
}

// === impl ProbedKeys ===

impl<'a> ProbedKeys<'a> {
    fn new(thinning: Thinning, keys: &'a [Digest]) -> Self {
        if thinning == Thinning::NONE {
            return Self { thinning, keys: Cow::Borrowed(keys), places: Vec::new() };
        }
        let kept = (0..).zip(keys).filter(|(_, key)| thinning.keeps(**key));
        let (places, keys): (Vec<u32>, Vec<Digest>) = kept.map(|(place, key)| (place, *key)).unzip();
        Self { thinning, keys: Cow::Owned(keys), places }
    }

    /// The length among all keys of a run of `run` kept keys.
    fn reach(&self, run: usize) -> u32 {
        match self.thinning {
            Thinning::NONE => run as u32,
            _ => self.places[run - 1] + 1,
        }
    }
}

// === impl Prospect ===

impl Prospect<'_> {
    fn rank(&self) -> (u32, Reverse<u32>, u32, u64) {
        (self.absence_level, Reverse(self.asked.reach(self.run)), self.member.under_way, self.lot)
    }

    fn candidate(&self) -> PeerCandidate {
        let (peer, run) = (self.member.peer, self.asked.reach(self.run));
        PeerCandidate { peer, run, absence_level: self.absence_level }
    }
}

/// Maximum number of leading keys in a filter, from a few samples. The first key is in it.
fn run_max(filter: &Filter, keys: &[Digest]) -> usize {
    let sample = |number: usize| (keys.len() * number).div_ceil(SAMPLES) - 1;
    let missing = (1..=SAMPLES).map(sample).find(|at| !filter.contains(keys[*at]));
    missing.unwrap_or(keys.len()).max(1)
}

#[cfg(test)]
mod tests;
