//! Requests to the data thread from outside: one between two turns; a long one is cut into parts.

use super::Runtime;
use crate::control::inbox::{Ask, Evicted, Found, KnownRates, Reply, Surveyed};
use crate::core::{Eviction, Location, Survey};
use crate::ports::peers::Peers;

/// A request that takes several turns.
#[derive(Debug)]
pub(super) enum Task {
    Survey(Survey, Reply<Surveyed>),
    Evict(Eviction, Reply<Evicted>),
}

// === impl Runtime: asks ===

impl Runtime {
    /// Continues the current request, or takes the next. Returns false if there was none. A closed channel
    /// means that the client is gone.
    pub(super) fn answer_asks(&mut self) -> bool {
        match self.task.take() {
            Some(task) => self.go_on_with(task),
            None => match self.asks.take() {
                Some(ask) => self.begin(ask),
                None => return false,
            },
        }
        true
    }

    fn begin(&mut self, ask: Ask) {
        match ask {
            Ask::Survey(reply) if reply.is_closed() => {}
            Ask::Survey(reply) => self.task = Some(Task::Survey(Survey::default(), reply)),
            Ask::Locate(_, _, reply) if reply.is_closed() => {}
            Ask::Locate(namespace, hashes, reply) => {
                let located = self.core.locate(namespace, &hashes).into_iter();
                let _ = reply.send(located.map(|location| self.named(location)).collect());
            }
            Ask::Rates(reply) => drop(reply.send(self.known_rates())),
            Ask::Evict(_, reply) if reply.is_closed() => {}
            Ask::Evict(_, reply) if self.opener.is_some() || self.core.recovers() => {
                let _ = reply.send(Evicted::Recovering);
            }
            Ask::Evict(namespace, reply) => match self.core.begin_eviction(namespace) {
                Some(eviction) => self.task = Some(Task::Evict(eviction, reply)),
                None => drop(reply.send(Evicted::Unknown)),
            },
        }
    }

    /// Continues a task. A count ends early once its client is gone; an eviction goes on.
    fn go_on_with(&mut self, task: Task) {
        match task {
            Task::Survey(_, reply) if reply.is_closed() => {}
            Task::Survey(mut survey, reply) => match self.core.survey(&mut survey) {
                None => self.task = Some(Task::Survey(survey, reply)),
                Some(namespaces) => {
                    let disks = self.disks.is_some();
                    let _ = reply.send(Surveyed { namespaces, disks, peers: self.known_peers() });
                }
            },
            Task::Evict(mut eviction, reply) => {
                let goes_on = self.core.evict(&mut eviction, &mut self.out);
                self.apply();
                self.core.go_on(self.now, &mut self.out);
                self.apply();
                if goes_on {
                    self.task = Some(Task::Evict(eviction, reply));
                } else {
                    self.publish();
                    let _ = reply.send(Evicted::Removed(eviction.removed()));
                }
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

    fn named(&self, location: Location) -> Found {
        let name = |peer| self.peers.as_ref().and_then(|peers: &Peers| peers.name(peer)).map(str::to_owned);
        let Location { memory, below: disk, peers } = location;
        Found { memory, disk, peers: peers.into_iter().filter_map(name).collect() }
    }
}
