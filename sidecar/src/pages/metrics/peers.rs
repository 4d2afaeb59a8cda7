//! Metrics of the mesh, registered only in a mesh.

use std::collections::BTreeSet;
use std::time::Duration;

use mesh::directory::PeerStats;
use mesh::refusals::{Reason, RefusalCounts};
use mesh::transport::PeerNumber;
use prometheus::{Gauge, IntCounterVec, IntGauge, Registry};

use super::figures::{Figure, MetricFigures, counters_of, raise_counter, register_gauge, show_gauge};
use crate::core::{FAULT_NAMES, PeersStats, PrefetchReason};

const COUNTERS: &[Figure<PeersStats>] = &[
    ("mesh_fetches_total", "Fetches from peers.", |s| s.fetches),
    (
        "mesh_fruitless_fetches_total",
        "Fetches without a block, after a request had waited for half a second or longer.",
        |s| s.fruitless_fetches,
    ),
    ("mesh_fetched_blocks_total", "Blocks brought into DRAM from peers.", |s| s.fetched_blocks),
    ("mesh_fetched_bytes_total", "Bytes brought into DRAM from peers.", |s| s.fetched_bytes),
    (
        "mesh_retried_blocks_total",
        "Blocks requested from another peer because the first one did not deliver them.",
        |s| s.retried_blocks,
    ),
    (
        "mesh_standing_blocks_total",
        "Blocks requested from a peer that had promised them, before it had them.",
        |s| s.standing_blocks,
    ),
    (
        "mesh_lists_total",
        "Peers' lists of their best blocks, and questions for one without an answer.",
        |s| s.prefetched.lists,
    ),
    (
        "mesh_prefetched_blocks_total",
        "Blocks fetched from peers before any request asked for them, in the first 60 s of an engine.",
        |s| s.prefetched.came[PrefetchReason::Started as usize],
    ),
    ("mesh_rescued_blocks_total", "Blocks fetched from ending peers, because no other pod had them.", |s| {
        s.prefetched.came[PrefetchReason::Leaving as usize]
    }),
    ("mesh_prefetched_used_blocks_total", "Prefetched and rescued blocks that a request has found.", |s| {
        s.prefetched.used
    }),
    (
        "mesh_prefetched_unused_blocks_total",
        "Prefetched and rescued blocks that were evicted before any request found them.",
        |s| s.prefetched.unused,
    ),
    ("mesh_asks_total", "Requests for blocks that peers sent to this sidecar.", |s| s.asks),
    (
        "mesh_kept_asks_total",
        "Requests of peers for promised blocks that waited here, up to 1.5 s each, until these were saved.",
        |s| s.kept_asks,
    ),
    (
        "mesh_kept_asks_granted_total",
        "Requests of peers that waited here and were answered when their last block was saved. The others ended with \
         their time, their promise or their connection.",
        |s| s.granted_behind,
    ),
    ("mesh_asked_blocks_total", "Blocks that peers requested from this sidecar.", |s| s.asked_blocks),
    ("mesh_absent_blocks_total", "Blocks that peers requested and this sidecar did not have.", |s| {
        s.absent_blocks
    }),
    (
        "mesh_withheld_blocks_total",
        "Blocks that peers requested and this sidecar did not send, because peers were \
         already reading too much.",
        |s| s.withheld_blocks,
    ),
    ("mesh_served_blocks_total", "Blocks sent to peers completely.", |s| s.served_blocks),
    ("mesh_served_bytes_total", "Bytes of blocks sent to peers completely.", |s| s.served_bytes),
    ("mesh_published_changes_total", "Blocks announced to peers as added or removed.", |s| s.published),
    (
        "mesh_resyncs_total",
        "Inventories of peers requested again because they outgrew the memory taken for them. A peer that outgrows each at \
         once is asked again after 0.1 s, later after up to 5 s.",
        |s| s.resyncs,
    ),
    (
        "mesh_miss_waits_total",
        "Requests that waited for blocks that another engine might be computing \
         (pillion.miss_wait_ms).",
        |s| s.miss_waits,
    ),
    (
        "mesh_miss_waits_exhausted_total",
        "Requests whose wait for another engine's blocks ended without them.",
        |s| s.miss_waits_exhausted,
    ),
];

const GAUGES: &[Figure<PeersStats>] = &[
    ("mesh_peers", "Members of the mesh other than this node.", |s| s.peers.len() as u64),
    ("mesh_fetching_blocks", "Blocks on their way from peers.", |s| s.fetching),
    ("mesh_unique_blocks", "Blocks in memory that no peer announces.", |s| s.unique_blocks),
    ("mesh_granted_bytes", "Bytes that peers are reading from this sidecar.", |s| s.granted_bytes),
    (
        "mesh_distrusted_blocks",
        "Blocks that are not requested from peers until this sidecar restarts, because a check removed them here; run \
         pillion ctl evict at the peers first.",
        |s| s.distrusted,
    ),
    (
        "mesh_fetches_paused",
        "1 while no request waits for peers, because the last fetches brought no block from any of them. One fetch tries \
         after 1 s, later after up to 30 s.",
        |s| s.paused.into(),
    ),
    (
        "mesh_miss_wait_breakers_open",
        "Engines whose requests do not wait for other engines' blocks, because earlier \
         waits ended without them.",
        |s| s.miss_wait_breakers,
    ),
];

const PEER_GAUGES: &[Figure<PeerStats>] = &[
    ("keys", "Blocks that the peer is known to keep.", |p| p.keys as u64),
    (
        "promises",
        "Keys of prompts that engines of the peer have promised and not computed yet; the last two keys of each prompt.",
        |p| p.promises as u64,
    ),
    ("directory_bytes", "Bytes of memory that the directory of the peer's blocks takes.", |p| p.bytes as u64),
    ("asked", "Blocks requested from the peer whose fetch has not ended.", |p| p.under_way.into()),
    (
        "bytes_per_second",
        "Bytes that the peer gives per second with enough to give, by the best of its last times; 0 until that is known.",
        |p| p.bytes_per_second,
    ),
    (
        "breaker_open",
        "1 while the peer is skipped after repeated failures. A fetch tries it at least every 30 s, and one that \
         succeeds ends this.",
        |p| p.breaker_open.into(),
    ),
];

const PEER_COUNTERS: &[Figure<PeerStats>] = &[
    (
        "breaker_trips_total",
        "Times that the peer was skipped after repeated failures, since it joined.",
        |p| p.trips_total,
    ),
    (
        "broken_promises_total",
        "Waits for prompts that engines of the peer had promised, which ended without the promised block, since it joined.",
        |p| p.broken_promises_total,
    ),
    (
        "absent_blocks_total",
        "Blocks that the peer announced and did not have when they were requested, since it joined. The more of them, the later \
         the peer is asked.",
        |p| p.absent_total,
    ),
];

/// Metrics of the mesh as a whole and of each member.
#[derive(Debug)]
pub(super) struct PeersMetrics {
    figures: MetricFigures<PeersStats>,
    endpoints_empty: IntGauge,
    names_unresolved: IntGauge,
    pace: Gauge,
    each: MetricFigures<PeerStats>,
    faults: IntCounterVec,
    refusals: IntCounterVec,
    /// Members with metrics of their own.
    shown: BTreeSet<String>,
}

// === impl PeersMetrics ===

impl PeersMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let figures = MetricFigures::new(registry, COUNTERS, GAUGES)?;
        let help = "Addresses of --peer without a member of this mesh; the log says why.";
        let endpoints_empty = register_gauge(registry, "mesh_endpoints_empty", help)?;
        let help = "Names of --peer that did not resolve at the last attempt; the log says why.";
        let names_unresolved = register_gauge(registry, "mesh_peer_names_unresolved", help)?;
        let help =
            "Seconds between two batches of changes sent to a peer; they grow with the number of peers.";
        let pace = Gauge::new("pillion_mesh_pace_seconds", help)?;
        registry.register(Box::new(pace.clone()))?;
        let each = MetricFigures::labelled(registry, ("mesh_peer", "peer"), PEER_COUNTERS, PEER_GAUGES)?;
        let help = "Blocks that a peer did not deliver, by kind. absent: it does not have the block; corrupt: the \
             checksum does not match; short: it closed the connection within the block; timeout: it took too long; \
             connection: the connection failed; malformed: it broke the protocol; refused: it refused the request; \
             stopped: the fetch was cancelled.";
        let faults = counters_of(registry, "mesh_faults_total", help, "kind", &FAULT_NAMES)?;
        let help = "Connections and requests between this sidecar and peers that either side refused, by reason; the \
             log names the peer. version: another protocol version; mesh: another --mesh-name; certificate: no valid \
             certificate; silent: nothing was sent in time; malformed: an invalid message; not_member: not a member of \
             the mesh; other_life: another node, or one that has restarted; name: two nodes share a --node-id; full: \
             too many connections, members or addresses; slow: data was not taken in time; busy: too much under way; \
             draining: about to end; queues: another number of NICs or queue pairs; resources: no descriptors, threads \
             or queue pairs left; refused: the other side refused, and counted why.";
        let reasons = Reason::ALL.map(Reason::name);
        let refusals = counters_of(registry, "mesh_refusals_total", help, "reason", &reasons)?;
        let shown = BTreeSet::new();
        Ok(Self { figures, endpoints_empty, names_unresolved, pace, each, faults, refusals, shown })
    }

    /// Publishes the counts of refusals. Called by one thread alone.
    pub(super) fn publish_refusals(&self, refusals: &RefusalCounts) {
        for (reason, total) in Reason::ALL.iter().zip(refusals.totals()) {
            raise_counter(&self.refusals.with_label_values(&[reason.name()]), total);
        }
    }

    /// Publishes the interval of batches of changes to a peer.
    pub(super) fn publish_pace(&self, pace: Duration) {
        self.pace.set(pace.as_secs_f64());
    }

    /// Publishes the metrics. Called by one thread alone. Metrics of former members are removed, so there are
    /// never more labels than members.
    pub(super) fn publish_peers<'a>(
        &mut self,
        stats: &PeersStats,
        (endpoints_empty, names_unresolved): (usize, usize),
        name: impl Fn(PeerNumber) -> Option<&'a str>,
    ) {
        show_gauge(&self.endpoints_empty, endpoints_empty as u64);
        show_gauge(&self.names_unresolved, names_unresolved as u64);
        for (kind, total) in FAULT_NAMES.iter().zip(stats.faults) {
            raise_counter(&self.faults.with_label_values(&[kind]), total);
        }
        let mut here = BTreeSet::new();
        for peer in &stats.peers {
            let Some(name) = name(peer.peer) else { continue };
            self.each.show_set(name, peer);
            here.insert(name.to_owned());
        }
        self.shown.difference(&here).for_each(|gone| self.each.remove(gone));
        self.shown = here;
        // Last, so every counted peer has its own metrics.
        self.figures.publish(stats);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u32, keys: usize) -> PeerStats {
        let peer = PeerNumber(number);
        PeerStats {
            peer,
            keys,
            bytes: 2 * keys,
            promises: 5,
            breaker_open: false,
            trips_total: 3,
            broken_promises_total: 4,
            absent_total: 6,
            under_way: 0,
            bytes_per_second: 8,
        }
    }

    #[test]
    fn each_member_has_metrics_for_as_long_as_it_is_one() {
        let registry = Registry::new();
        let mut metrics = PeersMetrics::new(&registry).unwrap();
        let mut faults = [0; FAULT_NAMES.len()];
        faults[1] = 2;
        let stats = PeersStats {
            peers: vec![peer(1, 5), peer(2, 6)],
            served_blocks: 3,
            faults,
            ..Default::default()
        };
        let name = |number: PeerNumber| Some(["", "a", "b"][number.0 as usize]);
        metrics.publish_pace(Duration::from_micros(249_750));
        metrics.publish_peers(&stats, (2, 3), name);
        metrics.publish_peers(&PeersStats { peers: vec![peer(2, 7)], ..stats }, (1, 2), name);
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in [
            "pillion_mesh_peers 1",
            "pillion_mesh_endpoints_empty 1",
            "pillion_mesh_peer_names_unresolved 2",
            "pillion_mesh_pace_seconds 0.24975",
            "pillion_mesh_peer_keys{peer=\"b\"} 7",
            "pillion_mesh_peer_promises{peer=\"b\"} 5",
            "pillion_mesh_peer_breaker_trips_total{peer=\"b\"} 3",
            "pillion_mesh_peer_broken_promises_total{peer=\"b\"} 4",
            "pillion_mesh_peer_absent_blocks_total{peer=\"b\"} 6",
            "pillion_mesh_served_blocks_total 3",
            "pillion_mesh_faults_total{kind=\"corrupt\"} 2",
            "pillion_mesh_faults_total{kind=\"absent\"} 0",
            "pillion_mesh_refusals_total{reason=\"certificate\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        assert!(!text.contains("peer=\"a\""), "{text}");
    }
}
