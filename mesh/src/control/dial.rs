//! Outgoing connections: TCP, and TLS if configured, within a time limit.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::Error;
use crate::refusals::Reason;
use crate::tls::REMEDY;

/// Window of incoming bytes of a stream: a few of the largest messages.
const WINDOW_BYTES: u32 = 1 << 20;
/// Maximum bytes of a `host:port`: the longest DNS name, a colon and a port.
const ADDRESS_BYTES_MAX: usize = 253 + 6;

/// TLS settings of a connection, and the name required in the server's certificate; `None` for plaintext.
pub(super) type Session = Option<(Arc<ClientConfig>, ServerName<'static>)>;

/// A connection, encrypted or not.
pub(super) trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// Connects to `address`, a `host:port`. The error is the reason, with a remedy if there is one. `count` is
/// called if the TLS session fails on either side.
pub(super) async fn dial(
    address: &str,
    session: Session,
    limit: Duration,
    count: impl Fn(Reason),
) -> Result<Channel, String> {
    let wire = within(limit, "connecting", connect(address, session, count)).await?;
    let mut wire = Some(TokioIo::new(wire));
    // The connection is given out once: a broken channel is replaced by a new dial.
    let connector = service_fn(move |_: Uri| {
        let wire = wire.take().ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected));
        std::future::ready(wire)
    });
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| causes(&error))?
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    let channel = within(limit, "the first frames", async {
        endpoint.connect_with_connector(connector).await.map_err(|error| causes(&error))
    });
    channel.await
}

async fn connect(address: &str, session: Session, count: impl Fn(Reason)) -> Result<Box<dyn Wire>, String> {
    let tcp = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    tcp.set_nodelay(true).map_err(|error| error.to_string())?;
    let Some((config, name)) = session else { return Ok(Box::new(tcp)) };
    let tls = TlsConnector::from(config).connect(name, tcp).await;
    if tls.is_err() {
        count(Reason::Certificate);
    }
    Ok(Box::new(tls.map_err(|error| format!("no TLS session ({error}): {REMEDY}"))?))
}

/// Awaits `work` for at most `limit`; `what` names it in the error.
pub(super) async fn within<T>(
    limit: Duration,
    what: &str,
    work: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let ended = tokio::time::timeout(limit, work).await;
    ended.unwrap_or_else(|_| Err(format!("{what} took longer than {} ms", limit.as_millis())))
}

/// The text of an error with all its causes: libraries state the actual problem there.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// Checks that `address` can be the `host:port` of a peer.
pub fn check(address: &str) -> Result<(), Error> {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty() && !host.contains('/'));
    let port = port.and_then(|(_, port)| port.parse::<u16>().ok()).filter(|port| *port > 0);
    if port.is_some() && address.len() <= ADDRESS_BYTES_MAX {
        return Ok(());
    }
    let problem = "is not the address of a peer: pass host:port, of a node's --mesh-listen or of a name that resolves to all \
         nodes";
    Err(Error::Address { address: address.into(), problem })
}
