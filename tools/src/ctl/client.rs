//! One request to a running sidecar, and its answer.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use sidecar::config::ConfigError;
use sidecar::control::{ANSWER_TIME_MAX, EVICTION_TIME_MAX};

/// The remedy for a sidecar that accepts connections without answers.
pub const FROZEN: &str = "the sidecar is frozen or overloaded: look at its log and restart it";
/// A reachable host accepts a connection sooner.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);
/// Pages are made within milliseconds.
const PAGE_TIME_MAX: Duration = Duration::from_secs(3);
/// Time of a request beside the data thread's answer: the connection and the page.
const SLACK: Duration = Duration::from_secs(2);
/// The longest answer: the facts of thousands of namespaces.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The address of a sidecar's control requests or pages.
#[derive(Clone, Debug)]
pub enum ControlTarget {
    Unix(PathBuf),
    Tcp {
        address: String,
        token: String,
    },
    /// Its pages, without a token.
    Pages(SocketAddr),
}

/// A request without an answer; the text names the remedy.
#[derive(Debug, Error)]
pub enum CtlError {
    #[error(
        "nobody listens on {0}: start the sidecar, or pass its --control-socket PATH, or its --socket PATH beside which \
         that lies"
    )]
    Absent(PathBuf),
    #[error("{0} belongs to another user: run this as the sidecar's user, or as root")]
    Forbidden(PathBuf),
    #[error("cannot reach {target} ({source}): {remedy}")]
    Unreached { target: String, source: std::io::Error, remedy: &'static str },
    #[error("{target} did not answer within {} s: {FROZEN}", limit.as_secs())]
    Late { target: String, limit: Duration },
    #[error("{text} ({status})")]
    Refused { status: StatusCode, text: String },
    #[error(
        "the answer is not one that this release knows ({0}): pass a sidecar's address, and use the same release on \
         both sides"
    )]
    Answer(String),
    #[error("namespace {0} is unknown here: pillion ctl namespaces lists those that are known")]
    Namespace(String),
    #[error(
        "--address and --token-file FILE, the token of that address, belong together: pass both, or neither"
    )]
    Pair,
    #[error(transparent)]
    Token(#[from] ConfigError),
    #[error("cannot read standard input ({0}): pass keys in hex or token ids, apart by white space")]
    Input(std::io::Error),
}

#[derive(Deserialize)]
struct FailureBody {
    error: String,
}

/// Sends a request, with a body of JSON unless that is empty. Returns the body of a successful answer.
pub fn send_request(
    target: &ControlTarget,
    method: &str,
    path: &str,
    body: &str,
) -> Result<String, CtlError> {
    request_within(target.time_max(path), target, method, path, body)
}

fn request_within(
    limit: Duration,
    target: &ControlTarget,
    method: &str,
    path: &str,
    body: &str,
) -> Result<String, CtlError> {
    let unable = |source| CtlError::Unreached { target: target.name(), source, remedy: target.remedy() };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().map_err(unable)?;
    let exchange = async {
        let mut request = Request::builder().method(method).uri(path).header(HOST, "pillion");
        if let ControlTarget::Tcp { token, .. } = target {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.header(CONTENT_TYPE, "application/json").body(body.to_owned());
        let request = request.map_err(|error| CtlError::Answer(error.to_string()))?;
        let connect = async |name: &str| {
            let mut problem = ErrorKind::NotFound.into();
            for address in tokio::net::lookup_host(name).await.map_err(unable)? {
                let connecting = tokio::time::timeout(CONNECT_TIME_MAX, TcpStream::connect(address)).await;
                match connecting.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => problem = error,
                }
            }
            Err(unable(problem))
        };
        match target {
            ControlTarget::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(|error| match error.kind() {
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused => CtlError::Absent(path.clone()),
                    ErrorKind::PermissionDenied => CtlError::Forbidden(path.clone()),
                    _ => unable(error),
                })?;
                exchange_http(stream, request).await
            }
            ControlTarget::Tcp { address, .. } => exchange_http(connect(address).await?, request).await,
            ControlTarget::Pages(address) => {
                exchange_http(connect(&address.to_string()).await?, request).await
            }
        }
    };
    let late = CtlError::Late { target: target.name(), limit };
    runtime.block_on(async { tokio::time::timeout(limit, exchange).await }).unwrap_or(Err(late))
}

async fn exchange_http(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<String>,
) -> Result<String, CtlError> {
    let garbled = |error: &dyn std::error::Error| CtlError::Answer(error.to_string());
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| garbled(&error))?;
    tokio::spawn(connection);
    let answer = sender.send_request(request).await.map_err(|error| garbled(&error))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| CtlError::Answer(error.to_string()))?.to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    if status == StatusCode::OK {
        return Ok(text);
    }
    let failure: FailureBody =
        serde_json::from_str(&text).map_err(|_| CtlError::Answer(format!("status {status}")))?;
    Err(CtlError::Refused { status, text: failure.error })
}

// === impl ControlTarget ===

impl ControlTarget {
    fn name(&self) -> String {
        match self {
            Self::Unix(path) => path.display().to_string(),
            Self::Pages(address) => address.to_string(),
            Self::Tcp { address, .. } => address.clone(),
        }
    }

    /// The option to correct if the sidecar cannot be reached.
    fn remedy(&self) -> &'static str {
        match self {
            Self::Unix(_) => "pass the sidecar's --control-socket PATH",
            Self::Pages(_) => "start the sidecar, or pass its --http IP:PORT",
            Self::Tcp { .. } => {
                "start the sidecar, or pass its --control-listen as --address HOST:PORT, or for score its --score-listen"
            }
        }
    }

    /// The longest wait for an answer: longer than a sidecar takes, unless it is frozen.
    fn time_max(&self, path: &str) -> Duration {
        match (self, path) {
            (Self::Pages(_), _) => PAGE_TIME_MAX,
            (_, "/evict") => EVICTION_TIME_MAX + SLACK,
            _ => ANSWER_TIME_MAX + SLACK,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sidecar_that_takes_connections_and_answers_nothing_is_frozen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.control.sock");
        let _frozen = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let target = ControlTarget::Unix(path.clone());
        let error = request_within(Duration::from_millis(50), &target, "GET", "/namespaces", "").unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(path.to_str().unwrap()) && text.contains("restart it"), "{text}");
    }

    #[test]
    fn an_answer_is_waited_for_as_long_as_a_living_sidecar_may_take() {
        let unix = ControlTarget::Unix("/p.control.sock".into());
        let seconds = ["/namespaces", "/evict"].map(|path| unix.time_max(path).as_secs());
        assert_eq!(seconds, [12, 62]);
        let pages = ControlTarget::Pages("127.0.0.1:9440".parse().unwrap());
        assert_eq!(pages.time_max("/metrics").as_secs(), 3);
    }
}
