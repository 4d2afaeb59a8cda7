use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::Error;
use crate::sync::lock;

/// Threads that were started and have not been waited for.
#[derive(Debug, Default)]
pub(in crate::transport) struct Threads(Mutex<Vec<JoinHandle<()>>>);

// === impl Threads ===

impl Threads {
    /// Starts one, and forgets those that have ended.
    pub(in crate::transport) fn spawn(
        &self,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), Error> {
        let thread = std::thread::Builder::new().name(name).spawn(run);
        let thread = thread.map_err(|source| Error::Os { doing: "start a thread", source })?;
        let mut threads = lock(&self.0);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Waits for them, but not longer than `limit`.
    pub(super) fn join(&self, limit: Duration) {
        for _ in 0..limit.as_millis() {
            if lock(&self.0).iter().all(JoinHandle::is_finished) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        lock(&self.0).clear();
    }
}
