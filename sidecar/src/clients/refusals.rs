//! Refused connections: each gets the reason, and is counted.

use std::os::fd::OwnedFd;

use prometheus::{IntCounterVec, Registry};
use shm_protocol::PROTOCOL_VERSION;
use shm_protocol::handshake::{self, HandshakeError, Reply};
use shm_protocol::transport;

use crate::pages::metrics::figures::counters_of;

shm_protocol::named! {
    /// Reason of a refused connection; the label of `pillion_connections_refused_total`.
    pub enum RefusalCause {
        /// The client belongs to another user.
        User = "user",
        /// No hello arrived in time.
        Silent = "silent",
        /// The hello is invalid or breaks a limit.
        Malformed = "malformed",
        /// No protocol version is common to both sides.
        Version = "version",
        /// The number of connected engine processes is at its limit.
        Full = "full",
        /// Its facts make another namespace than the expected one, or its blocks have another size than
        /// others of the namespace.
        Namespace = "namespace",
        /// It contradicts the other processes of its engine.
        Contradiction = "contradiction",
        /// Its memory cannot be opened or mapped.
        Memory = "memory",
        /// The sidecar has no descriptors or memory for it.
        Resources = "resources",
    }
}

/// Sends refusals to clients, and counts them.
#[derive(Clone, Debug)]
pub struct RefusedConnections(IntCounterVec);

impl From<&HandshakeError> for RefusalCause {
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
    /// Registers the counters, each with a zero.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let help = "Connections of engine processes refused, by reason; each has a log line that names what to change. user: a \
             user without permission; silent: no hello in time; malformed: an invalid hello; version: no common \
             protocol version; full: too many engine processes; namespace: other facts than the namespace it names; \
             contradiction: it contradicts its engine's other processes; memory: its memory cannot be opened or \
             mapped; resources: the sidecar has no descriptors or memory left.";
        let causes = RefusalCause::ALL.map(RefusalCause::name);
        Ok(Self(counters_of(registry, "connections_refused_total", help, "reason", &causes)?))
    }

    /// Counts a refusal that cannot be sent.
    pub fn count_refusal(&self, cause: RefusalCause) {
        self.0.with_label_values(&[cause.name()]).inc();
    }

    /// Counts a refusal and sends its text to the process.
    pub fn send_refusal(&self, socket: &OwnedFd, cause: RefusalCause, text: String) {
        self.count_refusal(cause);
        let reply = handshake::encode_record(&Reply::Refused { version: PROTOCOL_VERSION, reason: text });
        // A client that does not take the reply sees its closed socket instead.
        let _ = transport::send_record(socket, &reply, &[]);
    }
}
