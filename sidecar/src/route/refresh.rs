//! What the router reads again while it runs: the list of engines, the addresses of their names, and certificates.

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
    /// What is wrong with files, which the log has said.
    told: Vec<String>,
}

// === impl Refresher ===

impl Refresher {
    /// A refresher for the engines that the options name. Fails where their file is no use.
    pub(super) fn new(router: Arc<Router>) -> Result<Self, String> {
        let Options { engines: file, prefill, decode, .. } = &router.options;
        let (file, named) = (file.clone(), Listed { prefill: prefill.clone(), decode: decode.clone() });
        let listed = file.as_deref().map_or(Ok(named), Listed::read)?;
        let listed = listed.checkable(router.tls.engines.is_some())?;
        Ok(Self { router, file, listed, names: Names::default(), told: Vec::new() })
    }

    /// Looks all names up, and gives the router the engines that they stand for.
    pub(super) async fn resolve(&mut self) {
        let Listed { prefill, decode } = &self.listed;
        let urls: Vec<_> = prefill.iter().chain(decode).collect();
        self.names.refresh(&urls, names::look_up).await;
        self.router.prefill.update(self.names.addresses(prefill));
        self.router.decode.update(self.names.addresses(decode));
    }

    /// Reads all files again. One that is no use changes nothing.
    async fn read(&mut self) {
        let (router, file) = (Arc::clone(&self.router), self.file.clone());
        let reading = spawn_blocking(move || {
            let listed = file.map(|file| Listed::read(&file)?.checkable(router.tls.engines.is_some()));
            (listed, router.tls.refresh())
        });
        let (listed, mut problems) = reading.await.expect("no file lets it panic");
        match listed {
            Some(Ok(listed)) => self.listed = listed,
            Some(Err(error)) => problems.push(error),
            None => {}
        }
        for problem in problems.iter().filter(|problem| !self.told.contains(problem)) {
            tracing::error!("{problem}; what was read before stays in use");
        }
        self.told = problems;
    }

    /// Does both at each interval, and at once when it is told to.
    pub(super) async fn run(mut self, reload: Arc<Notify>) {
        let pause = Duration::from_millis(self.router.options.refresh_interval.as_millis());
        loop {
            if first(sleep(pause), reload.notified()).await.is_none() {
                tracing::info!("SIGHUP: files are read, and names are resolved");
                // What is still wrong is said again.
                self.told.clear();
            }
            self.read().await;
            self.resolve().await;
        }
    }
}
