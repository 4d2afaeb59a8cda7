//! Requests to the data thread from outside: one between two turns; a long one is cut into parts.

use std::time::Duration;

use mesh::listed::ListedBlock;
use mesh::transport::PeerNumber;
use tiers::dram::HintedCounts;

use super::Runtime;
use crate::control::inbox::{ControlAsk, Evicted, FoundBlock, KnownRates, Reply, ScoreStep, Surveyed};
use crate::core::{BestBlocks, Eviction, HintTask, Location, PromptScore, Survey};

/// Time of a turn for a score, plus at most one part of its keys: engines are answered behind it.
const SCORE_TURN_MAX: Duration = Duration::from_micros(100);

/// A request that takes several turns.
#[derive(Debug)]
pub(super) enum AskTask {
    Survey(Survey, Reply<Surveyed>),
    Evict(Eviction, Reply<Evicted>),
    Hint(HintTask, Reply<HintedCounts>),
    BestBlocks(Box<BestBlocks>, Reply<Vec<ListedBlock>>),
}

// === impl Runtime: asks ===

impl Runtime {
    /// Continues the current request, or takes the next. Returns false if there was none. A closed channel
    /// means that the client is gone.
    pub(super) fn answer_asks(&mut self) -> bool {
        match self.task.take() {
            Some(task) => self.go_on_with(task),
            None => match self.asks.take_ask() {
                Some(ask) => self.begin_ask(ask),
                None => return false,
            },
        }
        true
    }

    fn begin_ask(&mut self, ask: ControlAsk) {
        match ask {
            ControlAsk::Survey(reply) if reply.is_closed() => {}
            ControlAsk::Survey(reply) => self.task = Some(AskTask::Survey(Survey::default(), reply)),
            ControlAsk::Locate(_, _, reply) if reply.is_closed() => {}
            ControlAsk::Locate(namespace, hashes, reply) => {
                let located = self.core.locate(namespace, &hashes).into_iter();
                let _ = reply.send(located.map(|location| self.name_location(location)).collect());
            }
            ControlAsk::Rates(reply) => drop(reply.send(self.known_rates())),
            ControlAsk::Score(_, reply) if reply.is_closed() => {}
            ControlAsk::Score(score, reply) => drop(reply.send(self.follow_score(score))),
            ControlAsk::Hint(_, _, reply) if reply.is_closed() => {}
            ControlAsk::Hint(chain, advice, reply) => {
                self.go_on_with(AskTask::Hint(HintTask::new(advice, chain), reply));
            }
            ControlAsk::BestBlocks(list, reply) => self.task = Some(AskTask::BestBlocks(list, reply)),
            ControlAsk::Evict(_, reply) if reply.is_closed() => {}
            ControlAsk::Evict(_, reply) if self.opener.is_some() || self.core.recovers() => {
                let _ = reply.send(Evicted::Recovering);
            }
            ControlAsk::Evict(namespace, reply) => match self.core.begin_eviction(namespace) {
                Some(eviction) => self.task = Some(AskTask::Evict(eviction, reply)),
                None => drop(reply.send(Evicted::Unknown)),
            },
        }
    }

    /// Continues a task. A count ends early once its client is gone; an eviction and a hint go on.
    fn go_on_with(&mut self, task: AskTask) {
        match task {
            AskTask::Survey(_, reply) if reply.is_closed() => {}
            AskTask::Survey(mut survey, reply) => match self.core.survey(&mut survey) {
                None => self.task = Some(AskTask::Survey(survey, reply)),
                Some(namespaces) => {
                    let disks = self.disks.is_some();
                    let unique = self.core.unique_by_namespace();
                    let _ = reply.send(Surveyed { namespaces, unique, disks, peers: self.known_peers() });
                }
            },
            AskTask::BestBlocks(_, reply) if reply.is_closed() => {}
            AskTask::BestBlocks(list, reply) => match self.core.list_blocks(list) {
                Ok(listed) => drop(reply.send(listed)),
                Err(list) => self.task = Some(AskTask::BestBlocks(list, reply)),
            },
            AskTask::Hint(mut hint, reply) => {
                let found = self.core.hint(self.now, &mut hint, &mut self.out);
                self.apply();
                self.core.go_on(self.now, &mut self.out);
                self.apply();
                match found {
                    None => self.task = Some(AskTask::Hint(hint, reply)),
                    Some(found) => {
                        self.publish_stats();
                        let _ = reply.send(found);
                    }
                }
            }
            AskTask::Evict(mut eviction, reply) => {
                let goes_on = self.core.evict(&mut eviction, &mut self.out);
                self.apply();
                self.core.go_on(self.now, &mut self.out);
                self.apply();
                if goes_on {
                    self.task = Some(AskTask::Evict(eviction, reply));
                } else {
                    self.publish_stats();
                    let _ = reply.send(Evicted::Removed(eviction.removed()));
                }
            }
        }
    }

    /// Goes on with a score for [`SCORE_TURN_MAX`].
    fn follow_score(&self, mut score: Box<PromptScore>) -> ScoreStep {
        let began = self.clock.now();
        loop {
            let whole = self.core.follow_score(&mut score);
            let places = whole.map(|places| {
                let names =
                    places.peers.iter().filter_map(|(peer, tokens)| Some((self.peer_name(*peer)?, *tokens)));
                let names = names.collect();
                (places, names)
            });
            let took = self.clock.now().saturating_sub(began);
            if places.is_some() || took >= SCORE_TURN_MAX {
                self.inbox.count_scored(took);
                return ScoreStep { score, places };
            }
        }
    }

    /// The known rates.
    fn known_rates(&self) -> KnownRates {
        let engines = self.core.engine_rates().into_iter();
        let disks = self.disks.iter().flat_map(|disks| {
            let devices = self.core.ssd_stats().map_or_else(Vec::new, |stats| stats.log.devices);
            devices.into_iter().enumerate().map(|(number, device)| {
                (format!("disk {}", disks.disk(number).path.display()), device.read_bytes_per_second)
            })
        });
        let known = self.core.peers_stats().map_or_else(Vec::new, |stats| stats.peers).into_iter();
        let peers = known.filter_map(|known| {
            Some((format!("peer {}", self.peers.as_ref()?.name(known.peer)?), known.bytes_per_second))
        });
        KnownRates {
            engines: engines.map(|(engine, (rate, bytes))| (engine.to_owned(), rate, bytes)).collect(),
            sources: disks.chain(peers).filter(|(_, rate)| *rate > 0).collect(),
        }
    }

    fn known_peers(&self) -> Option<Vec<(String, usize)>> {
        let peers = self.peers.as_ref()?;
        let known = self.core.peers_stats()?.peers.into_iter();
        Some(known.filter_map(|known| Some((peers.name(known.peer)?.to_owned(), known.keys))).collect())
    }

    fn peer_name(&self, peer: PeerNumber) -> Option<String> {
        self.peers.as_ref().and_then(|peers| peers.name(peer)).map(str::to_owned)
    }

    fn name_location(&self, location: Location) -> FoundBlock {
        let Location { memory, below: disk, peers } = location;
        FoundBlock {
            memory,
            disk,
            peers: peers.into_iter().filter_map(|peer| self.peer_name(peer)).collect(),
        }
    }
}
