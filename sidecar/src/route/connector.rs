//! Connections to one engine.

use std::future::{Ready, ready};
use std::iter::{Once, once};
use std::net::SocketAddr;
use std::task::{Context, Poll};

use hyper_util::client::legacy::connect::dns::Name;
use tower_service::Service;

/// Resolves every name to one address: the name was looked up before, and stands for several engines.
#[derive(Clone, Debug)]
pub(super) struct Resolved(pub(super) SocketAddr);

impl Service<Name> for Resolved {
    type Response = Once<SocketAddr>;
    type Error = std::convert::Infallible;
    type Future = Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Name) -> Self::Future {
        ready(Ok(once(self.0)))
    }
}
