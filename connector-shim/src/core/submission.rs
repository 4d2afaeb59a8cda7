//! The writing end of a session's submission ring, which never waits for room.

use shm_protocol::layout::SUBMISSION_RESERVED;
use shm_protocol::message::Message;
use shm_protocol::ring::{CursorError, Producer};
use shm_protocol::session::{RegionRing, Ring, SessionMemory};

use super::endpoint::Endpoint;

/// Posts messages. After an impossible cursor of the peer it has no room any more.
#[derive(Debug)]
pub struct Submission {
    producer: Producer<RegionRing>,
    broken: Option<CursorError>,
}

// === impl Submission ===

impl Submission {
    /// The ring of a fresh connection.
    pub fn new(memory: &SessionMemory) -> Self {
        Self { producer: Producer::new(memory.ring(Ring::Submission)), broken: None }
    }

    /// True if `slots` ordinary messages fit.
    pub(crate) fn has_room(&mut self, slots: u32) -> bool {
        self.check_room(SUBMISSION_RESERVED as u32 + slots.saturating_sub(1))
    }

    /// Posts one message and returns its sequence number, or `None` without room. The sidecar does not see it
    /// before [`Submission::flush`].
    pub fn post(&mut self, request: impl Into<Message>) -> Option<u32> {
        let message = request.into();
        let reserved = if message.kind.reserved() { 0 } else { SUBMISSION_RESERVED as u32 };
        if !self.check_room(reserved) {
            return None;
        }
        let sequence = self.producer.sequence();
        self.producer.push(&message.encode_slot());
        Some(sequence)
    }

    fn check_room(&mut self, reserved: u32) -> bool {
        if self.broken.is_some() {
            return false;
        }
        self.producer.has_room(reserved).unwrap_or_else(|error| {
            self.broken = Some(error);
            false
        })
    }

    /// Makes the posted messages visible, without a wake-up.
    pub(crate) fn publish(&mut self) -> bool {
        self.producer.publish()
    }

    /// Makes the posted messages visible and wakes the sidecar if there are any and it sleeps.
    pub fn flush(&mut self, endpoint: &(impl Endpoint + ?Sized)) {
        if self.publish() {
            endpoint.ring();
        }
    }

    /// The sidecar's head, freshly read: the sidecar has copied out all earlier messages.
    pub fn acknowledged(&mut self) -> u32 {
        if self.broken.is_none()
            && let Err(error) = self.producer.free()
        {
            self.broken = Some(error);
        }
        self.producer.acknowledged()
    }

    /// The sidecar's violation of the ring, if there is one.
    pub(crate) fn broken(&self) -> Option<&CursorError> {
        self.broken.as_ref()
    }
}

/// True if the sidecar's head has passed message `sequence`.
pub(crate) fn has_passed(acknowledged: u32, sequence: u32) -> bool {
    // A ring holds far fewer than 2^31 messages, so the wrapped distance has the sign of the true one.
    acknowledged.wrapping_sub(sequence).cast_signed() > 0
}
