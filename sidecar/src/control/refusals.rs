//! Refused control requests: each gets the reason, and is counted.

use hyper::StatusCode;
use prometheus::{IntCounterVec, Registry};

use crate::pages::metrics::figures::counters_of;

shm_protocol::named! {
    /// Reason of a refused request; the label of `pillion_control_refused_total`.
    pub(super) enum ControlRefusalCause {
        /// The client belongs to another user.
        User = "user",
        /// The token is missing or wrong.
        Token = "token",
        /// The path names no request.
        Path = "path",
        Method = "method",
        Malformed = "malformed",
        /// The body is longer than any request, or has too many keys.
        TooLarge = "too_large",
        /// The request did not arrive in time.
        Slow = "slow",
        /// The sidecar never kept a block of this namespace.
        Namespace = "namespace",
        /// The namespace of a score is unknown, or has no leading run.
        Unscored = "unscored",
        /// The data thread's time for scores is spent.
        Budget = "budget",
        /// Blocks of earlier lives are still being recovered.
        Starting = "starting",
        /// The data thread's queue is full.
        Busy = "busy",
        /// The data thread did not answer in time.
        Unanswered = "unanswered",
    }
}

/// The help of `pillion_control_refused_total`.
pub(super) const CONTROL_HELP: &str = "Control requests refused, by reason; each answer says what to change. user, token: the \
     client may not control this sidecar; path, method, malformed, too_large: an invalid request; slow: it did not arrive in \
     time; namespace, unscored: no such namespace; budget: the data thread's time for scores is spent; starting: blocks of an \
     earlier sidecar are still being found; busy, unanswered: the data thread has too much to do or is stuck.";
/// The help of `pillion_score_refused_total`.
pub(super) const SCORE_HELP: &str = "Requests at --score-listen refused, by reason as in pillion_control_refused_total. budget: \
     scores took 5 % of a second of the data thread; unscored: the namespace is not known here, or has no leading run.";

/// A refusal; its text says what to change.
#[derive(Debug)]
pub(super) struct ControlRefusal {
    pub(super) cause: ControlRefusalCause,
    pub(super) text: String,
}

/// Counts refused requests.
#[derive(Debug)]
pub(super) struct RefusedRequests(IntCounterVec);

// === impl ControlRefusalCause ===

impl ControlRefusalCause {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::User => StatusCode::FORBIDDEN,
            Self::Token => StatusCode::UNAUTHORIZED,
            Self::Path | Self::Namespace => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Malformed | Self::Unscored => StatusCode::BAD_REQUEST,
            Self::Budget => StatusCode::TOO_MANY_REQUESTS,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Starting | Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unanswered => StatusCode::GATEWAY_TIMEOUT,
        }
    }
}

// === impl ControlRefusal ===

impl ControlRefusal {
    pub(super) fn new(cause: ControlRefusalCause, text: impl Into<String>) -> Self {
        Self { cause, text: text.into() }
    }
}

// === impl RefusedRequests ===

impl RefusedRequests {
    /// Registers the counters of one kind of requests, each with a zero.
    pub(super) fn new(registry: &Registry, name: &str, help: &str) -> Result<Self, prometheus::Error> {
        let causes = ControlRefusalCause::ALL.map(ControlRefusalCause::name);
        Ok(Self(counters_of(registry, name, help, "reason", &causes)?))
    }

    pub(super) fn count_refusal(&self, cause: ControlRefusalCause) {
        self.0.with_label_values(&[cause.name()]).inc();
    }
}
