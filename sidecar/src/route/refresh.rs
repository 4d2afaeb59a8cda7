//! What the router looks at again while it runs: the addresses of engines' names.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::Router;
use super::names::{self, Names};

/// Keeps a router's engines up to date.
#[derive(Debug)]
pub(super) struct Refresher {
    router: Arc<Router>,
    names: Names,
}

// === impl Refresher ===

impl Refresher {
    pub(super) fn new(router: Arc<Router>) -> Self {
        Self { router, names: Names::default() }
    }

    /// Looks all names up, and gives the router the engines that they stand for.
    pub(super) async fn refresh(&mut self) {
        let (prefill, decode) = (&self.router.options.prefill, &self.router.options.decode);
        let urls: Vec<_> = prefill.iter().chain(decode).collect();
        self.names.refresh(&urls, names::look_up).await;
        self.router.prefill.update(self.names.addresses(prefill));
        self.router.decode.update(self.names.addresses(decode));
    }

    /// Does so again and again.
    pub(super) async fn run(mut self) {
        let pause = Duration::from_millis(self.router.options.refresh_interval.as_millis());
        loop {
            sleep(pause).await;
            self.refresh().await;
        }
    }
}
