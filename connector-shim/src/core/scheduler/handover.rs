//! Handovers: one engine computes a prompt, another answers it.

use std::ops::Deref;

use shm_protocol::key::BlockHash;

use super::EngineSession;
use crate::core::endpoint::Endpoint;
use crate::error::ShimError;

// === impl EngineSession: handovers ===

impl<C: Deref<Target: Endpoint>> EngineSession<C> {
    /// Another engine computes the keys of this log, or is about to: its queries are pending until they are here, for as long as the
    /// sidecar finds that worth it. Of no effect where the sidecar does not know of handovers.
    pub fn await_producer(&mut self, handle: i64) {
        if let Some((_, log)) = self.link.as_mut().and_then(|link| link.logs.get(handle)) {
            log.awaits = true;
        }
    }

    /// Another engine will load the keys of this log: what is saved of it from now on is kept for that. Of no effect where the
    /// sidecar does not know of handovers.
    pub fn hand_over(&mut self, handle: i64) {
        if let Some((_, log)) = self.link.as_mut().and_then(|link| link.logs.get(handle)) {
            log.handover = true;
        }
    }

    /// This engine computes the keys of this log, which was just opened, for another one: who awaits them waits until this log is
    /// closed, while this engine works. What is saved of it is handed over.
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

    /// Ends a log with the key of a prompt's tail, the tokens behind the last whole block as if they were one. Whether it did: not without
    /// room, nor where the sidecar does not know tails.
    pub fn append_tail(&mut self, handle: i64, tail: &[u8]) -> Result<bool, ShimError> {
        let tail = BlockHash::from_slice(tail)?;
        let knows = self.connection().is_some_and(|connection| connection.knows_tails());
        let Some(length) = self.length(handle).filter(|_| knows) else { return Ok(false) };
        let end = self.extend(handle, (length, 1), true, |_, key| {
            *key = tail;
            Ok::<_, ShimError>(())
        })?;
        Ok(end > length)
    }
}
