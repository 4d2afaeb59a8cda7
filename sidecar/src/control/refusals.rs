//! Requests that are not answered as asked: each is told why, and counted.

use hyper::StatusCode;
use prometheus::{IntCounterVec, Registry};

use crate::pages::metrics::figures::counters_of;

shm_protocol::named! {
    /// Why a request is refused; the label of `pillion_control_refused_total`.
    pub(super) enum Cause {
        /// It is another user's.
        User = "user",
        /// The token is missing or wrong.
        Token = "token",
        /// There is no such request.
        Path = "path",
        Method = "method",
        Malformed = "malformed",
        /// It is longer than any request.
        TooLarge = "too_large",
        /// It did not come in time.
        Slow = "slow",
        /// No block of this namespace was ever here.
        Namespace = "namespace",
        /// Blocks of earlier lives are still to come.
        Starting = "starting",
        /// As many requests wait for the data thread as may.
        Busy = "busy",
        /// The data thread has not answered in time.
        Unanswered = "unanswered",
    }
}

/// A refusal, with the text that says what to change.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) cause: Cause,
    pub(super) text: String,
}

/// Counts requests that are refused.
#[derive(Debug)]
pub(super) struct RefusedRequests(IntCounterVec);

// === impl Cause ===

impl Cause {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::User => StatusCode::FORBIDDEN,
            Self::Token => StatusCode::UNAUTHORIZED,
            Self::Path | Self::Namespace => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Malformed => StatusCode::BAD_REQUEST,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Starting | Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unanswered => StatusCode::GATEWAY_TIMEOUT,
        }
    }
}

// === impl Refused ===

impl Refused {
    pub(super) fn new(cause: Cause, text: impl Into<String>) -> Self {
        Self { cause, text: text.into() }
    }
}

// === impl RefusedRequests ===

impl RefusedRequests {
    /// The counters, every one there from the start.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let help = "Control requests refused, by reason; each answer says what to change. user, token: the client may \
             not control this sidecar; path, method, malformed, too_large: an invalid request; slow: it did not arrive \
             in time; namespace: no such namespace; starting: blocks of an earlier sidecar are still being found; \
             busy, unanswered: the data thread has too much to do or is stuck.";
        let causes = Cause::ALL.map(Cause::name);
        Ok(Self(counters_of(registry, "control_refused_total", help, "reason", &causes)?))
    }

    pub(super) fn count(&self, cause: Cause) {
        self.0.with_label_values(&[cause.name()]).inc();
    }
}
