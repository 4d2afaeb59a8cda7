//! KV events for routers: the blocks kept by the sidecar for this engine, beside the events of the engine's own blocks.
//!
//! An event has a block's tokens while a request is known to have offered the block; otherwise it has the place alone.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use shm_protocol::key::{Algorithm, BlockHash};
use shm_protocol::source::Source;

use super::requests::RequestId;
use crate::core::scheduler::BlockChange;

/// How long an offered block is known by its request: the event of a longer save has the place alone. The host knows its requests for as
/// long.
pub const KNOWN: Duration = Duration::from_secs(10);
/// How long an engine without requests steps on for the ends of its last saves, and for how long after the last of them.
const LINGER: Duration = Duration::from_secs(1);
const SETTLE: Duration = Duration::from_millis(20);

/// One event for routers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct KvEvent {
    /// On a disk, and not in memory.
    pub on_disk: bool,
    /// The blocks, by the engine's hashes.
    pub hashes: Vec<Vec<u8>>,
    /// The change of these blocks.
    pub change: EventChange,
}

/// The change of an event's blocks.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum EventChange {
    /// Blocks of a request can be found.
    Stored {
        /// The request.
        request: RequestId,
        /// The first one's place in it.
        first: u32,
    },
    /// Blocks can be found, and nothing else is known of them.
    Located,
    /// Blocks can be found no more.
    Removed,
}

/// A request's blocks in an unfinished save.
#[derive(Debug)]
struct Offer {
    forgotten: Instant,
    request: RequestId,
    /// The adapter's digest, mixed into the keys by the log.
    fold: Option<[u8; 16]>,
    first: u32,
    keys: Vec<BlockHash>,
}

/// A block's last offering request, its place there, and its key without a fold.
#[derive(Copy, Clone, Debug)]
struct Offered {
    request: RequestId,
    place: u32,
    own: BlockHash,
}

/// Follows the blocks kept by the sidecar for one cache group. It exists only if the engine publishes KV
/// events; without it the sidecar is not asked for announcements.
#[derive(Debug)]
pub(super) struct BlockEvents {
    algorithm: Option<Algorithm>,
    /// Offers not yet entered in `known`: a step with saves should not spend time on it.
    fresh: VecDeque<Offer>,
    known: HashMap<BlockHash, Offered>,
    /// Offers, the oldest first, and their keys of `known`.
    offered: VecDeque<(Instant, RequestId, Vec<BlockHash>)>,
    /// Announced blocks of adapters: their keys without the fold.
    folded: HashMap<(BlockHash, bool), BlockHash>,
    /// True if tokens were scheduled since saves or changes were last seen.
    pub(super) has_worked: bool,
    worked: Option<Instant>,
    linger_until: Option<Instant>,
}

// === impl BlockEvents ===

impl BlockEvents {
    pub(super) fn new(algorithm: Option<Algorithm>) -> Self {
        Self {
            algorithm,
            fresh: VecDeque::new(),
            known: HashMap::new(),
            offered: VecDeque::new(),
            folded: HashMap::new(),
            has_worked: false,
            worked: None,
            linger_until: None,
        }
    }

    /// Notes blocks of a request with a save in progress.
    pub(super) fn offered(
        &mut self,
        request: RequestId,
        fold: Option<[u8; 16]>,
        first: usize,
        keys: Vec<BlockHash>,
        time: Instant,
    ) {
        while self.fresh.front().is_some_and(|offer| offer.forgotten <= time) {
            self.fresh.pop_front();
        }
        let first = first as u32;
        self.fresh.push_back(Offer { forgotten: time + KNOWN, request, fold, first, keys });
    }

    /// Enters fresh offers in `known`, and forgets old ones.
    fn learn(&mut self, time: Instant) {
        for offer in self.fresh.drain(..) {
            let mut keys = Vec::with_capacity(offer.keys.len());
            for (place, own) in (offer.first..).zip(offer.keys) {
                let key = offer.fold.map_or(own, |fold| own.folded(&fold));
                self.known.insert(key, Offered { request: offer.request, place, own });
                keys.push(key);
            }
            self.offered.push_back((offer.forgotten, offer.request, keys));
        }
        while self.offered.front().is_some_and(|(forgotten, ..)| *forgotten <= time) {
            let (_, request, keys) = self.offered.pop_front().expect("it was looked at");
            for key in keys {
                if self.known.get(&key).is_some_and(|known| known.request == request) {
                    self.known.remove(&key);
                }
            }
        }
    }

    /// Forgets the blocks of adapters: all blocks have been announced as removed.
    pub(super) fn cleared(&mut self) {
        self.folded.clear();
    }

    /// True if an engine without requests should run further steps: some engines publish events only in
    /// steps.
    pub(super) fn linger(&self, time: Instant) -> bool {
        self.linger_until.is_some_and(|until| time < until)
    }

    /// The events of these changes; `saving`: a save has not ended.
    pub(super) fn take_events(
        &mut self,
        changes: &[BlockChange],
        saving: bool,
        time: Instant,
    ) -> Vec<KvEvent> {
        if changes.is_empty() && !saving {
            return Vec::new();
        }
        if std::mem::take(&mut self.has_worked) {
            self.worked = Some(time);
        }
        let last = self.worked.map_or(time, |worked| time.min(worked + LINGER));
        self.linger_until = self.worked.map(|_| last + SETTLE);
        if changes.is_empty() {
            return Vec::new();
        }
        self.learn(time);
        let kind = |change: &BlockChange| (change.stored, change.located.medium != Source::Memory);
        let groups = changes.chunk_by(|a, b| kind(a) == kind(b));
        groups
            .flat_map(|changes| {
                let (stored, on_disk) = kind(&changes[0]);
                let keys = changes.iter().map(|change| change.located.hash);
                match stored {
                    true => self.stored(on_disk, keys),
                    false => vec![self.removed(on_disk, keys)],
                }
            })
            .collect()
    }

    /// The engine's hash of a block without an adapter.
    fn hash(&self, key: &BlockHash) -> Vec<u8> {
        self.algorithm.map_or(key.unpadded(), |algorithm| algorithm.vllm_hash(key)).to_vec()
    }

    fn removed(&mut self, on_disk: bool, keys: impl Iterator<Item = BlockHash>) -> KvEvent {
        let own: Vec<_> = keys.map(|key| self.folded.remove(&(key, on_disk)).unwrap_or(key)).collect();
        let hashes = own.iter().map(|own| self.hash(own)).collect();
        KvEvent { on_disk, hashes, change: EventChange::Removed }
    }

    fn stored(&mut self, on_disk: bool, keys: impl Iterator<Item = BlockHash>) -> Vec<KvEvent> {
        let mut known = Vec::new();
        let mut unknown = Vec::new();
        for key in keys {
            match self.known.get(&key) {
                Some(offered) => {
                    if offered.own != key {
                        self.folded.insert((key, on_disk), offered.own);
                    }
                    known.push(*offered);
                }
                None => unknown.push(self.hash(&key)),
            }
        }
        known.sort_by_key(|offered| (offered.request, offered.place));
        // Runs of consecutive blocks, each of one request.
        let runs = known.chunk_by(|a, b| a.request == b.request && a.place + 1 == b.place);
        let event = |run: &[Offered]| KvEvent {
            on_disk,
            hashes: run.iter().map(|offered| self.hash(&offered.own)).collect(),
            change: EventChange::Stored { request: run[0].request, first: run[0].place },
        };
        let mut events: Vec<KvEvent> = runs.map(event).collect();
        if !unknown.is_empty() {
            events.push(KvEvent { on_disk, hashes: unknown, change: EventChange::Located });
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::announcement::Located;

    use super::*;

    const FOLD: [u8; 16] = [b'f'; 16];
    const ONE: RequestId = 1;
    const OTHER: RequestId = 2;

    fn key(number: u8) -> BlockHash {
        BlockHash([number; 32])
    }

    fn change(stored: bool, medium: Source, hash: BlockHash) -> BlockChange {
        BlockChange { located: Located { medium, group: 0, hash }, stored }
    }

    fn stored(numbers: &[u8]) -> Vec<BlockChange> {
        numbers.iter().map(|number| change(true, Source::Memory, key(*number))).collect()
    }

    fn event(on_disk: bool, numbers: &[u8], change: EventChange) -> KvEvent {
        KvEvent { on_disk, hashes: numbers.iter().map(|number| key(*number).0.to_vec()).collect(), change }
    }

    fn following() -> (BlockEvents, Instant) {
        #[expect(clippy::disallowed_methods, reason = "where a test's own time begins")]
        let now = Instant::now();
        (BlockEvents::new(Some(Algorithm::Sha256)), now)
    }

    fn offer(following: &mut BlockEvents, request: RequestId, first: usize, numbers: &[u8], now: Instant) {
        following.offered(request, None, first, numbers.iter().map(|number| key(*number)).collect(), now);
    }

    /// Known blocks come in the order of their request, others by their place alone, and removals in their turn.
    #[test]
    fn blocks_of_a_request_are_told_of_together() {
        let (mut following, now) = following();
        offer(&mut following, ONE, 1, &[2, 3, 4, 5], now);
        let mut changes = stored(&[4, 9, 2, 3]);
        changes.push(change(true, Source::Disk, key(5)));
        changes.extend([4, 9].map(|number| change(false, Source::Memory, key(number))));
        let of_one = |first| EventChange::Stored { request: ONE, first };
        let expected = [
            event(false, &[2, 3, 4], of_one(1)),
            event(false, &[9], EventChange::Located),
            event(true, &[5], of_one(4)),
            event(false, &[4, 9], EventChange::Removed),
        ];
        assert_eq!(following.take_events(&changes, false, now), expected);
        assert_eq!(following.take_events(&[], false, now), []);
    }

    /// Requests come by their numbers, the order of their arrival.
    #[test]
    fn blocks_of_several_requests_are_told_of_one_request_at_a_time() {
        let (mut following, now) = following();
        offer(&mut following, OTHER, 0, &[4, 5], now);
        offer(&mut following, ONE, 0, &[1, 2, 3], now);
        let of = |request, first| EventChange::Stored { request, first };
        let expected = [
            event(false, &[1], of(ONE, 0)),
            event(false, &[3], of(ONE, 2)),
            event(false, &[4, 5], of(OTHER, 0)),
        ];
        assert_eq!(following.take_events(&stored(&[5, 3, 4, 1]), false, now), expected);
    }

    /// The sidecar has them under another key.
    #[test]
    fn blocks_of_an_adapter_are_told_of_by_vllms_hash() {
        let (mut following, now) = following();
        following.offered(ONE, Some(FOLD), 0, vec![key(1), key(2)], now);
        let folded = [1, 2].map(|number| key(number).folded(&FOLD));
        let changes = folded.map(|key| change(true, Source::Memory, key));
        let expected = event(false, &[1, 2], EventChange::Stored { request: ONE, first: 0 });
        assert_eq!(following.take_events(&changes, false, now), [expected]);
        let gone = [change(false, Source::Memory, folded[1])];
        assert_eq!(following.take_events(&gone, false, now), [event(false, &[2], EventChange::Removed)]);
    }

    /// Its saves have ended by then. A request with a later offer of the same block is known for longer.
    #[test]
    fn a_request_is_forgotten() {
        let (mut following, mut now) = following();
        offer(&mut following, ONE, 0, &[1, 2], now);
        now += KNOWN / 2;
        offer(&mut following, OTHER, 0, &[1], now);
        now += KNOWN / 2;
        let expected = [
            event(false, &[1], EventChange::Stored { request: OTHER, first: 0 }),
            event(false, &[2], EventChange::Located),
        ];
        assert_eq!(following.take_events(&stored(&[1, 2]), false, now), expected);
    }

    /// It steps on until its saves have ended, and no longer than [`LINGER`] if the sidecar hangs.
    #[test]
    fn an_engine_without_requests_steps_on_for_a_while() {
        let (mut following, mut now) = following();
        following.take_events(&[], false, now);
        assert!(!following.linger(now));
        following.has_worked = true;
        following.take_events(&[], true, now);
        assert!(following.linger(now));
        now += LINGER / 2;
        following.take_events(&[], true, now);
        assert!(following.linger(now));
        now += LINGER;
        following.take_events(&[], true, now);
        assert!(!following.linger(now), "the sidecar hangs");
    }

    /// An engine with hashes of 16 bytes knows no other part of a key.
    #[test]
    fn blocks_are_told_of_by_hashes_as_long_as_the_engines() {
        let (_, now) = following();
        let mut following = BlockEvents::new(Some(Algorithm::Xxhash));
        let events = following.take_events(&stored(&[1]), false, now);
        assert_eq!(events[0].hashes, [[1; 16]]);
    }
}
