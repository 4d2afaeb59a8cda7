//! Counts of refused connections between nodes, by reason, for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

shm_protocol::named! {
    /// The reason why a connection between two nodes was refused or failed, whichever of them made it.
    pub enum Reason {
        /// Another version of a protocol.
        Version = "version",
        /// A peer of another mesh.
        Mesh = "mesh",
        /// No TLS session: a certificate is missing, expired, or not of the mesh's authority and name.
        Certificate = "certificate",
        /// No message came in time.
        Silent = "silent",
        /// A message does not belong to the protocol.
        Malformed = "malformed",
        /// The peer is not a member any more, or never was.
        NotMember = "not_member",
        /// Another node answered than expected, or another life of it.
        OtherLife = "other_life",
        /// Two nodes have one name.
        Name = "name",
        /// The limit of connections, members or addresses is reached.
        Full = "full",
        /// A message was not read in time, or a lent block was not.
        Slow = "slow",
        /// The limit of work under way is reached.
        Busy = "busy",
        /// One of them is about to end.
        Draining = "draining",
        /// Another number of NICs or of queue pairs.
        Queues = "queues",
        /// No descriptors, threads or queue pairs are left.
        Resources = "resources",
        /// The other side refused, and counts the reason.
        Refused = "refused",
    }
}

/// Counts by reason since the start.
#[derive(Debug, Default)]
pub struct RefusalCounts([AtomicU64; Reason::ALL.len()]);

// === impl RefusalCounts ===

impl RefusalCounts {
    pub(crate) fn count(&self, reason: Reason) {
        self.0[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The counts, in the order of [`Reason::ALL`].
    pub fn totals(&self) -> [u64; Reason::ALL.len()] {
        self.0.each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_place_and_a_name_of_its_own() {
        let refusals = RefusalCounts::default();
        for (at, reason) in Reason::ALL.into_iter().enumerate() {
            (0..=at).for_each(|_| refusals.count(reason));
            assert!(Reason::ALL[..at].iter().all(|other| other.name() != reason.name()));
        }
        assert_eq!(refusals.totals(), std::array::from_fn(|at| at as u64 + 1));
    }
}
