//! How often this node and its peers would not have each other, and why: for whoever shows figures.

use std::sync::atomic::{AtomicU64, Ordering};

shm_protocol::named! {
    /// Why a connection between two nodes came to nothing, whichever of them made it.
    pub enum Reason {
        /// Another version of a protocol.
        Version = "version",
        /// A peer of another mesh.
        Mesh = "mesh",
        /// No TLS session: a certificate is missing, expired, or not of the mesh's authority and name.
        Certificate = "certificate",
        /// Nothing was said in time.
        Silent = "silent",
        /// What was said is none of the protocol.
        Malformed = "malformed",
        /// The peer is no member, or no more.
        NotMember = "not_member",
        /// Another node, or another life of it, than the one that was meant.
        OtherLife = "other_life",
        /// Two nodes have one name.
        Name = "name",
        /// As many connections, members or addresses as there may be.
        Full = "full",
        /// What was sent was not taken, or what was lent not read, in time.
        Slow = "slow",
        /// As much is under way as may be.
        Busy = "busy",
        /// One of them is about to end.
        Draining = "draining",
        /// Another number of NICs or of queue pairs.
        Queues = "queues",
        /// No descriptors, threads or queue pairs are left.
        Resources = "resources",
        /// The other side would not, and has counted why.
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
