//! Connections to one engine.

use std::future::{Ready, ready};
use std::io::{Error, ErrorKind};
use std::iter::{Once, once};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower_service::Service;

use super::tls::TowardsEngines;

/// An engine is down if a connection to it, with its TLS session, takes longer.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);
/// A vanished host says nothing: its connections end after 25 s.
pub(super) const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
pub(super) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
const VANISHED_AFTER: Duration =
    Duration::from_secs(KEEPALIVE_IDLE.as_secs() + KEEPALIVE_RETRIES as u64 * KEEPALIVE_INTERVAL.as_secs());

type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Connects to one address, by TLS if the URI says so.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    http: HttpConnector<Resolved>,
    tls: Option<Arc<TowardsEngines>>,
}

/// Resolves every name to one address: the name was looked up before, and stands for several engines.
#[derive(Clone, Debug)]
struct Resolved(SocketAddr);

// === impl Connector ===

impl Connector {
    pub(super) fn new(to: SocketAddr, tls: Option<Arc<TowardsEngines>>) -> Self {
        let mut http = HttpConnector::new_with_resolver(Resolved(to));
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_keepalive(Some(KEEPALIVE_IDLE));
        http.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
        http.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
        // The kernel sends unconfirmed data again, and no probes beside it.
        http.set_tcp_user_timeout(Some(VANISHED_AFTER));
        Self { http, tls }
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (mut http, tls) = (self.http.clone(), self.tls.clone());
        let connecting = async move {
            match tls {
                Some(tls) => HttpsConnector::from((http, tls.current())).call(uri).await,
                None => Ok(MaybeHttpsStream::Http(http.call(uri).await?)),
            }
        };
        Box::pin(async {
            let late = || Error::from(ErrorKind::TimedOut).into();
            timeout(CONNECT_TIME_MAX, connecting).await.unwrap_or_else(|_| Err(late()))
        })
    }
}

// === impl Resolved ===

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
