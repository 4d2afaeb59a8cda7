use std::path::PathBuf;
use std::time::Duration;

use sidecar::config::ServeOptions;
use sidecar::logging::LogLevel;
use sidecar::runtime::server::Server;
use tempfile::TempDir;

/// A whole sidecar in this process; its end must be a success.
pub(crate) struct InProcess {
    server: Option<Server>,
    pub(crate) socket: PathBuf,
    _folder: TempDir,
}

impl InProcess {
    pub(crate) fn start(options: ServeOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("pillion.sock");
        let options = ServeOptions {
            socket: Some(socket.clone()),
            dram: Some("16MiB".parse().unwrap()),
            http: Some("127.0.0.1:0".parse().unwrap()),
            ..options
        };
        let server = Server::start(&options.complete().unwrap(), LogLevel::default()).unwrap();
        Self { server: Some(server), socket, _folder: folder }
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let drained = self.server.take().unwrap().drain(Duration::from_secs(20));
        assert!(drained.is_ok() || std::thread::panicking(), "{drained:?}");
        assert!(!self.socket.exists());
    }
}
