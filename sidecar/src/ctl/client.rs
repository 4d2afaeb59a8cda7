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

use crate::config::ConfigError;

/// Longer than the sidecar takes for the longest request.
const TIME_MAX: Duration = Duration::from_secs(90);
/// The facts of thousands of namespaces.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Where a sidecar is controlled.
#[derive(Clone, Debug)]
pub enum Target {
    Unix(PathBuf),
    Tcp {
        address: String,
        token: String,
    },
    /// Its pages, which need no token.
    Pages(SocketAddr),
}

/// There is no answer; the text names the remedy.
#[derive(Debug, Error)]
pub enum CtlError {
    #[error(
        "nobody listens on {0}: is the sidecar running? Pass its --control-socket PATH, or its --socket PATH beside which that lies"
    )]
    Absent(PathBuf),
    #[error("{0} is another user's: run this as the sidecar's user, or as root")]
    Forbidden(PathBuf),
    #[error("cannot reach {target}: {source}")]
    Unreached { target: String, source: std::io::Error },
    #[error("the sidecar did not answer within {} s: look at its log", TIME_MAX.as_secs())]
    Late,
    #[error("{text} ({status})")]
    Refused { status: StatusCode, text: String },
    #[error("what answers is no sidecar that this release knows: {0}")]
    Answer(String),
    #[error("there is no namespace {0} here: pillion ctl namespaces lists those that are")]
    Namespace(String),
    #[error(
        "--address needs --token-file FILE, the sidecar's --control-token-file, and that needs --address: pass both, or neither"
    )]
    Pair,
    #[error(transparent)]
    Token(#[from] ConfigError),
    #[error("cannot read keys from standard input: {0}")]
    Input(std::io::Error),
}

#[derive(Deserialize)]
struct Failure {
    error: String,
}

/// Makes a request, with a body of JSON unless that is empty; the answer's body if all went well.
pub fn request(target: &Target, method: &str, path: &str, body: &str) -> Result<String, CtlError> {
    let unable = |source| CtlError::Unreached { target: target.name(), source };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().map_err(unable)?;
    let exchange = async {
        let mut request = Request::builder().method(method).uri(path).header(HOST, "pillion");
        if let Target::Tcp { token, .. } = target {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.header(CONTENT_TYPE, "application/json").body(body.to_owned());
        let request = request.map_err(|error| CtlError::Answer(error.to_string()))?;
        match target {
            Target::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(|error| match error.kind() {
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused => CtlError::Absent(path.clone()),
                    ErrorKind::PermissionDenied => CtlError::Forbidden(path.clone()),
                    _ => unable(error),
                })?;
                send(stream, request).await
            }
            Target::Tcp { address, .. } => {
                send(TcpStream::connect(address).await.map_err(unable)?, request).await
            }
            Target::Pages(address) => send(TcpStream::connect(address).await.map_err(unable)?, request).await,
        }
    };
    runtime.block_on(async { tokio::time::timeout(TIME_MAX, exchange).await }).unwrap_or(Err(CtlError::Late))
}

async fn send(
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
    let failure: Failure =
        serde_json::from_str(&text).map_err(|_| CtlError::Answer(format!("status {status}")))?;
    Err(CtlError::Refused { status, text: failure.error })
}

// === impl Target ===

impl Target {
    fn name(&self) -> String {
        match self {
            Self::Unix(path) => path.display().to_string(),
            Self::Pages(address) => address.to_string(),
            Self::Tcp { address, .. } => address.clone(),
        }
    }
}
