//! How often this node and its peers would not have each other, and why: for whoever shows figures.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a connection between two nodes came to nothing, whichever of them made it.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Reason {
    /// Another version of a protocol.
    Version,
    /// A peer of another mesh.
    Mesh,
    /// No TLS session: a certificate is missing, expired, or not of the mesh's authority and name.
    Certificate,
    /// Nothing was said in time.
    Silent,
    /// What was said is none of the protocol.
    Malformed,
    /// The peer is no member, or no more.
    NotMember,
    /// Another node, or another life of it, than the one that was meant.
    OtherLife,
    /// Two nodes have one name.
    Name,
    /// As many connections, members or addresses as there may be.
    Full,
    /// What was sent was not taken, or what was lent not read, in time.
    Slow,
    /// As much is under way as may be.
    Busy,
    /// One of them is about to end.
    Draining,
    /// Another number of NICs or of queue pairs.
    Queues,
    /// No descriptors, threads or queue pairs are left.
    Resources,
    /// The other side would not, and has counted why.
    Refused,
}

/// Counts by reason since the start.
#[derive(Debug, Default)]
pub struct Refusals([AtomicU64; Reason::ALL.len()]);

// === impl Reason ===

impl Reason {
    pub const ALL: [Self; 15] = [
        Self::Version,
        Self::Mesh,
        Self::Certificate,
        Self::Silent,
        Self::Malformed,
        Self::NotMember,
        Self::OtherLife,
        Self::Name,
        Self::Full,
        Self::Slow,
        Self::Busy,
        Self::Draining,
        Self::Queues,
        Self::Resources,
        Self::Refused,
    ];

    /// As metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Version => "version",
            Self::Mesh => "mesh",
            Self::Certificate => "certificate",
            Self::Silent => "silent",
            Self::Malformed => "malformed",
            Self::NotMember => "not_member",
            Self::OtherLife => "other_life",
            Self::Name => "name",
            Self::Full => "full",
            Self::Slow => "slow",
            Self::Busy => "busy",
            Self::Draining => "draining",
            Self::Queues => "queues",
            Self::Resources => "resources",
            Self::Refused => "refused",
        }
    }
}

// === impl Refusals ===

impl Refusals {
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
        let refusals = Refusals::default();
        for (at, reason) in Reason::ALL.into_iter().enumerate() {
            (0..=at).for_each(|_| refusals.count(reason));
            assert!(Reason::ALL[..at].iter().all(|other| other.name() != reason.name()));
        }
        assert_eq!(refusals.totals(), std::array::from_fn(|at| at as u64 + 1));
    }
}
