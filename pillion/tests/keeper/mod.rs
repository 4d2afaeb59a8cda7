//! A whole sidecar in this process; its end must be a success.

use std::path::PathBuf;
use std::time::Duration;

use sidecar::config::ServeOptions;
use sidecar::logging::LogLevel;
use sidecar::runtime::server::Server;
use tempfile::TempDir;

/// The longest wait of a test.
const WATCHDOG_TURNS: u32 = 6_000;
const TURN: Duration = Duration::from_millis(10);

pub(crate) struct Keeper {
    server: Option<Server>,
    pub(crate) socket: PathBuf,
    folder: Option<TempDir>,
}

impl Keeper {
    pub(crate) fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap())
    }

    fn start_in(folder: TempDir) -> Self {
        let socket = folder.path().join("pillion.sock");
        let options = ServeOptions {
            socket: Some(socket.clone()),
            dram: Some("16MiB".parse().unwrap()),
            http: Some("127.0.0.1:0".parse().unwrap()),
            ..ServeOptions::default()
        };
        let server = Server::start(&options.complete().unwrap(), LogLevel::default()).unwrap();
        Self { server: Some(server), socket, folder: Some(folder) }
    }

    /// Ends the sidecar, calls `meanwhile`, and starts another one at the same socket, with nothing kept.
    pub(crate) fn restart(mut self, meanwhile: impl FnOnce()) -> Self {
        let folder = self.folder.take().unwrap();
        drop(self);
        meanwhile();
        Self::start_in(folder)
    }

    pub(crate) fn watch(&self, what: &str, mut ready: impl FnMut() -> bool) {
        let came = (0..WATCHDOG_TURNS).any(|_| {
            std::thread::sleep(TURN);
            ready()
        });
        assert!(came, "no {what} under the watchdog");
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            let drained = server.drain(Duration::from_secs(20));
            assert!(drained.is_ok() || std::thread::panicking(), "{drained:?}");
        }
    }
}
