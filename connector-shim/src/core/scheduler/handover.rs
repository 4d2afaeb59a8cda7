//! Handovers: one engine computes a prompt, another answers it.

use std::ops::Deref;

use shm_protocol::key::BlockHash;

use super::EngineSession;
use crate::core::endpoint::{Endpoint, Feature};
use crate::error::ShimError;

// === impl EngineSession: handovers ===

impl<C: Deref<Target: Endpoint>> EngineSession<C> {
    /// Says that another engine computes the keys of this log, or is about to: the log's queries are pending
    /// until its blocks are kept, or until the sidecar's limit. A sidecar without handovers ignores it.
    pub fn await_producer(&mut self, handle: i64) {
        if let Some((_, log)) = self.link.as_mut().and_then(|link| link.logs.get(handle)) {
            log.awaits = true;
        }
    }

    /// Marks this log for another engine, which will load its keys: later saves of this log are kept for it.
    /// A sidecar without handovers ignores it.
    pub fn hand_over(&mut self, handle: i64) {
        if let Some((_, log)) = self.link.as_mut().and_then(|link| link.logs.get(handle)) {
            log.handover = true;
        }
    }

    /// Promises the keys of this new log, computed by this engine, to another engine. The other engine waits
    /// for them until this log is closed, while this engine works. Saves of this log are handed over. Fails
    /// if the log has keys.
    pub fn promise_log(&mut self, handle: i64) -> Result<(), ShimError> {
        let Some((_, log)) = self.link.as_mut().and_then(|link| link.logs.get(handle)) else { return Ok(()) };
        if log.length > 0 {
            let text = format!(
                "a promise names a log that has {} keys already: promise before the first append",
                log.length
            );
            return Err(ShimError::Argument(text));
        }
        (log.handover, log.promised) = (true, true);
        Ok(())
    }

    /// Ends a log with the key of a prompt's tail: the tokens behind the last whole block, as if they were a
    /// block. Returns false without room, or if the sidecar does not know tails.
    pub fn append_tail(&mut self, handle: i64, tail: &[u8]) -> Result<bool, ShimError> {
        let tail = BlockHash::from_slice(tail)?;
        let knows = self.connection().is_some_and(|connection| connection.knows(Feature::Tails));
        let Some(length) = self.length(handle).filter(|_| knows) else { return Ok(false) };
        let end = self.extend(handle, (length, 1), true, |_, key| {
            *key = tail;
            Ok::<_, ShimError>(())
        })?;
        Ok(end > length)
    }
}
