//! What the router reads again while it runs: the list of engines, and the addresses of their names.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::listed::Listed;
use super::names::{self, Names};
use super::{Options, Router};
use crate::connections::first;

/// Keeps a router's engines up to date.
#[derive(Debug)]
pub(super) struct Refresher {
    router: Arc<Router>,
    file: Option<PathBuf>,
    listed: Listed,
    names: Names,
    /// What the log has said of a file that is no use.
    told: Option<String>,
}

// === impl Refresher ===

impl Refresher {
    /// A refresher for the engines that the options name. Fails where their file is no use.
    pub(super) fn new(router: Arc<Router>) -> Result<Self, String> {
        let Options { engines: file, prefill, decode, .. } = &router.options;
        let (file, named) = (file.clone(), Listed { prefill: prefill.clone(), decode: decode.clone() });
        let listed = file.as_deref().map_or(Ok(named), Listed::read)?;
        Ok(Self { router, file, listed, names: Names::default(), told: None })
    }

    /// Looks all names up, and gives the router the engines that they stand for.
    pub(super) async fn resolve(&mut self) {
        let Listed { prefill, decode } = &self.listed;
        let urls: Vec<_> = prefill.iter().chain(decode).collect();
        self.names.refresh(&urls, names::look_up).await;
        self.router.prefill.update(self.names.addresses(prefill));
        self.router.decode.update(self.names.addresses(decode));
    }

    /// Reads the list again. One that is no use changes nothing.
    async fn read(&mut self) {
        let Some(file) = self.file.clone() else { return };
        let read = spawn_blocking(move || Listed::read(&file)).await.expect("no file lets it panic");
        match read {
            Ok(listed) => (self.listed, self.told) = (listed, None),
            Err(error) if self.told.as_ref() == Some(&error) => {}
            Err(error) => {
                tracing::error!("{error}; the engines stay as they were");
                self.told = Some(error);
            }
        }
    }

    /// Does both at each interval, and at once when it is told to.
    pub(super) async fn run(mut self, reload: Arc<Notify>) {
        let pause = Duration::from_millis(self.router.options.refresh_interval.as_millis());
        loop {
            if first(sleep(pause), reload.notified()).await.is_none() {
                tracing::info!("SIGHUP: engines are read and resolved again");
                // What is still wrong is said again.
                self.told = None;
            }
            self.read().await;
            self.resolve().await;
        }
    }
}
