//! Connections that are turned away: each is told why, and counted.

use std::os::fd::OwnedFd;

use prometheus::{IntCounterVec, Registry};
use shm_protocol::PROTOCOL_VERSION;
use shm_protocol::handshake::{self, HandshakeError, Reply};
use shm_protocol::transport;

use crate::pages::metrics::figures::counters_of;

shm_protocol::named! {
    /// Why a connection is refused; the label of `pillion_connections_refused_total`.
    pub enum Cause {
        /// It is another user's.
        User = "user",
        /// It said no hello in time.
        Silent = "silent",
        /// What it said is no hello, or breaks a limit.
        Malformed = "malformed",
        /// No protocol version is common to both sides.
        Version = "version",
        /// As many engine processes are connected as there may be.
        Full = "full",
        /// Its blocks are none of the namespace that it claims.
        Namespace = "namespace",
        /// It contradicts the other processes of its engine.
        Contradiction = "contradiction",
        /// Its memory cannot be opened or mapped.
        Memory = "memory",
        /// The sidecar has no descriptors or memory for it.
        Resources = "resources",
    }
}

/// Tells who is turned away, and counts them.
#[derive(Clone, Debug)]
pub struct RefusedConnections(IntCounterVec);

impl From<&HandshakeError> for Cause {
    fn from(error: &HandshakeError) -> Self {
        match error {
            HandshakeError::Version { .. } => Self::Version,
            HandshakeError::Malformed(_) | HandshakeError::Long { .. } | HandshakeError::Range { .. } => {
                Self::Malformed
            }
        }
    }
}

// === impl RefusedConnections ===

impl RefusedConnections {
    /// The counters, every one there from the start.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let help = "Connections of engine processes refused, by reason; each has a log line that names what to change. user: a \
             user without permission; silent: no hello in time; malformed: an invalid hello; version: no common \
             protocol version; full: too many engine processes; namespace: other facts than the namespace it names; \
             contradiction: it contradicts its engine's other processes; memory: its memory cannot be opened or \
             mapped; resources: the sidecar has no descriptors or memory left.";
        let causes = Cause::ALL.map(Cause::name);
        Ok(Self(counters_of(registry, "connections_refused_total", help, "reason", &causes)?))
    }

    /// Counts one that cannot be told.
    pub fn count(&self, cause: Cause) {
        self.0.with_label_values(&[cause.name()]).inc();
    }

    /// Tells a process why it is not served.
    pub fn refuse(&self, socket: &OwnedFd, cause: Cause, text: String) {
        self.count(cause);
        let reply = handshake::encode(&Reply::Refused { version: PROTOCOL_VERSION, reason: text });
        // Who does not take the reply is gone, and is told by its closed socket.
        let _ = transport::send(socket, &reply, &[]);
    }
}
