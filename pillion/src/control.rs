//! One question to a sidecar's control: its known namespaces.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::EngineError;

/// The sidecar answers within 10 s, its peers within one more, or it answers with an error.
const PATIENCE: Duration = Duration::from_secs(15);
/// A reachable host takes a connection sooner.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
/// The facts of thousands of namespaces.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// The place where a sidecar is asked for its namespaces.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ControlAddress {
    /// Its control socket, open to its user and to root.
    Socket(PathBuf),
    /// Its `--control-listen`, for a process of another user.
    Listen {
        /// HOST:PORT.
        listen: String,
        /// Its `--control-token-file`, or a copy of it.
        token_file: PathBuf,
    },
}

// === impl ControlAddress ===

impl ControlAddress {
    /// The control socket beside a sidecar's socket, where `pillion serve` puts it by default.
    pub fn beside(socket: impl AsRef<Path>) -> Self {
        Self::Socket(socket.as_ref().with_extension("control.sock"))
    }

    /// All namespaces known to the sidecar and to its peers.
    pub(crate) fn namespaces(&self) -> Result<Vec<Value>, EngineError> {
        let answer = self.get("/namespaces").map_err(|error| self.failure(error.to_string()))?;
        match answer {
            Value::Object(mut answer) => match (answer.remove("namespaces"), answer.remove("error")) {
                (Some(Value::Array(namespaces)), _) => Ok(namespaces),
                (_, Some(Value::String(why))) => Err(self.failure(why)),
                _ => Err(self.failure("the answer has no namespaces".into())),
            },
            _ => Err(self.failure("the answer is no object".into())),
        }
    }

    fn failure(&self, why: String) -> EngineError {
        let (at, remedy) = match self {
            Self::Socket(path) => (
                path.display().to_string(),
                "pass the sidecar's --control-socket, as its user or as root, or a ControlAddress::Listen",
            ),
            Self::Listen { listen, .. } => (
                listen.clone(),
                "pass the sidecar's --control-listen, and a file with its token that this user may read",
            ),
        };
        EngineError::Control { at, why, remedy }
    }

    /// In HTTP/1.0 the answer ends with the connection.
    fn get(&self, path: &str) -> io::Result<Value> {
        let answer = match self {
            Self::Socket(socket) => {
                let stream = UnixStream::connect(socket)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                exchange(stream, &format!("GET {path} HTTP/1.0\r\nHost: pillion\r\n\r\n"))?
            }
            Self::Listen { listen, token_file } => {
                let token = std::fs::read_to_string(token_file)?;
                let address = listen.to_socket_addrs()?.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
                let stream = TcpStream::connect_timeout(&address, CONNECT_PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                let token = token.trim();
                let head =
                    format!("GET {path} HTTP/1.0\r\nHost: pillion\r\nAuthorization: Bearer {token}\r\n\r\n");
                exchange(stream, &head)?
            }
        };
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        Ok(serde_json::from_str(body)?)
    }
}

fn exchange(mut stream: impl Read + Write, request: &str) -> io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
    Ok(answer)
}
