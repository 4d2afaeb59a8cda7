use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::MeshError;
use crate::sync::lock_mutex;

/// Threads that were started and have not been waited for.
#[derive(Debug, Default)]
pub(in crate::transport) struct StreamThreads(Mutex<Vec<JoinHandle<()>>>);

// === impl StreamThreads ===

impl StreamThreads {
    /// Starts one, and forgets those that have ended.
    pub(in crate::transport) fn spawn(
        &self,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), MeshError> {
        let thread = std::thread::Builder::new().name(name).spawn(run);
        let thread = thread.map_err(|source| MeshError::Os { doing: "start a thread", source })?;
        let mut threads = lock_mutex(&self.0);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Waits for them, but not longer than `limit`.
    pub(super) fn join_all(&self, limit: Duration) {
        for _ in 0..limit.as_millis() {
            if lock_mutex(&self.0).iter().all(JoinHandle::is_finished) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        lock_mutex(&self.0).clear();
    }
}
