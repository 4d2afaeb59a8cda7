//! The list of engines, the addresses of their names, and certificates, read again while the router runs.

use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::listed::EngineList;
use super::names::{self, Names};
use super::observer::{CHANGE_PAUSE, Observer};
use super::{RouteOptions, Router};
use sidecar::pages::connections::run_until;

/// Keeps a router's engines up to date.
#[derive(Debug)]
pub(super) struct Refresher {
    router: Arc<Router>,
    file: Option<PathBuf>,
    listed: EngineList,
    names: Names,
    /// The last errors of files, each of them in the log once.
    reported: Vec<String>,
}

// === impl Refresher ===

impl Refresher {
    /// A refresher for the engines of the options. Fails if their file is malformed.
    pub(super) fn new(router: Arc<Router>) -> Result<Self, String> {
        let RouteOptions { engines: file, prefill, decode, .. } = &router.options;
        let (file, named) = (file.clone(), EngineList { prefill: prefill.clone(), decode: decode.clone() });
        let listed = file.as_deref().map_or(Ok(named), EngineList::read_file)?;
        let listed = listed.checkable(router.tls.engines.is_some())?;
        Ok(Self { router, file, listed, names: Names::default(), reported: Vec::new() })
    }

    /// Looks all names up, and gives the router their engines.
    pub(super) async fn resolve(&mut self) {
        let mut all = self.listed.clone();
        if let Some(observer) = &self.router.observer {
            all.add_missing(observer.engines());
        }
        let EngineList { prefill, decode } = &all;
        let urls: Vec<_> = prefill.iter().chain(decode).collect();
        self.names.refresh_names(&urls, names::look_up).await;
        self.router.prefill.update(self.names.addresses(prefill));
        self.router.decode.update(self.names.addresses(decode));
    }

    /// Reads all files again. A malformed file changes nothing.
    async fn read_files(&mut self) {
        let (router, file) = (Arc::clone(&self.router), self.file.clone());
        let reading = spawn_blocking(move || {
            let listed =
                file.map(|file| EngineList::read_file(&file)?.checkable(router.tls.engines.is_some()));
            (listed, router.tls.refresh_sides())
        });
        let (listed, mut problems) = reading.await.expect("no file lets it panic");
        match listed {
            Some(Ok(listed)) => self.listed = listed,
            Some(Err(error)) => problems.push(error),
            None => {}
        }
        for problem in problems.iter().filter(|problem| !self.reported.contains(problem)) {
            tracing::error!("{problem}; what was read before stays in use");
        }
        self.reported = problems;
    }

    /// Reads files and resolves names at each interval, and at once after each `reload`.
    pub(super) async fn refresh_forever(mut self, reload: Arc<Notify>) {
        let pause = Duration::from_millis(self.router.options.refresh_interval.as_millis());
        let mut changes = self.router.observer.as_ref().map(Observer::changes);
        loop {
            let changed = async {
                match &mut changes {
                    Some(changes) => _ = changes.changed().await,
                    None => pending().await,
                }
                // A member that restarts leaves and joins again at once.
                sleep(CHANGE_PAUSE).await;
            };
            if run_until(run_until(sleep(pause), changed), reload.notified()).await.is_none() {
                tracing::info!("SIGHUP: files are read, and names are resolved");
                // The log repeats errors after a signal.
                self.reported.clear();
            }
            self.read_files().await;
            self.resolve().await;
        }
    }
}
