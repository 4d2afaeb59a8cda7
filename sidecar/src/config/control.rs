//! The control addresses of a running sidecar: a UNIX socket, and TCP addresses for clients with a token, one for
//! all requests and one for scores alone.

use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::ConfigError;

/// Characters of the shortest token: as many random ones cannot be guessed.
const TOKEN_BYTES_MIN: usize = 16;
const TOKEN_BYTES_MAX: u64 = 4096;
/// The mode bits of users other than the file's owner and group.
const OTHERS: u32 = 0o007;

/// The control addresses.
#[derive(Clone, Debug)]
pub struct ControlEndpoints {
    pub socket: PathBuf,
    pub tcp: Option<ControlTcp>,
    /// For scores alone.
    pub score: Option<ControlTcp>,
}

/// A TCP address and its token.
#[derive(Clone, Debug)]
pub struct ControlTcp {
    pub listen: SocketAddr,
    pub token: Token,
}

/// A secret, kept only as its digest.
#[derive(Clone, Eq, PartialEq)]
pub struct Token([u8; 32]);

/// The default control socket of a sidecar with the engines' socket `socket`: `pillion.control.sock` beside
/// `pillion.sock`.
pub fn default_control_socket(socket: &Path) -> PathBuf {
    socket.with_extension("control.sock")
}

/// Completes the control addresses; each TCP address comes with the file of its token. One token for both is an
/// error.
pub(super) fn complete_control(
    socket: PathBuf,
    control: (Option<SocketAddr>, Option<&Path>),
    score: (Option<SocketAddr>, Option<&Path>),
) -> Result<ControlEndpoints, ConfigError> {
    let tcp = complete_tcp("control", control, "drain this sidecar")?;
    let score = complete_tcp("score", score, "find out which prompts are kept")?;
    if let (Some(tcp), Some(score)) = (&tcp, &score)
        && tcp.token == score.token
    {
        let text = "--score-token-file has the token of --control-token-file, so every router could drain this sidecar: \
             write another token into it";
        return Err(ConfigError::Control(text.into()));
    }
    Ok(ControlEndpoints { socket, tcp, score })
}

/// Completes a TCP address. An address without a token, or a token without an address, is an error.
fn complete_tcp(
    name: &str,
    (listen, token_file): (Option<SocketAddr>, Option<&Path>),
    harm: &str,
) -> Result<Option<ControlTcp>, ConfigError> {
    match (listen, token_file) {
        (None, None) => Ok(None),
        (Some(listen), Some(file)) => Ok(Some(ControlTcp { listen, token: Token::read_file(file)? })),
        (Some(_), None) => Err(ConfigError::Control(format!(
            "--{name}-listen is given without a token, so everybody who reaches the address could {harm}: pass \
             --{name}-token-file FILE too"
        ))),
        (None, Some(_)) => Err(ConfigError::Control(format!(
            "--{name}-token-file is given without --{name}-listen: pass both, or neither"
        ))),
    }
}

/// The token in a file, without surrounding white space. A file open to all users is an error.
pub fn read_token(path: &Path) -> Result<String, ConfigError> {
    let shown = path.display();
    let refused = |text: String| ConfigError::Control(format!("the token file {shown} {text}"));
    let unreadable =
        |error| refused(format!("cannot be read ({error}): pass a file that this user may read"));
    let mut file = File::open(path).map_err(unreadable)?;
    let mode = file.metadata().map_err(unreadable)?.mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(refused(format!(
            "has mode {mode:04o}, so every user can access it: chmod o-rwx {shown}"
        )));
    }
    let mut text = String::new();
    (&mut file).take(TOKEN_BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
    let token = text.trim();
    let fits = token.len() >= TOKEN_BYTES_MIN && text.len() as u64 <= TOKEN_BYTES_MAX;
    // The token becomes part of a header.
    if !fits || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        let text = format!(
            "does not hold a token: write {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} random characters into it, such as \
             openssl rand -hex 32 prints"
        );
        return Err(refused(text));
    }
    Ok(token.to_owned())
}

// === impl Token ===

impl Token {
    pub fn read_file(path: &Path) -> Result<Self, ConfigError> {
        Ok(Self::of_text(&read_token(path)?))
    }

    fn of_text(token: &str) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// True if `said` is the token. The time of the comparison does not depend on the token: whole digests
    /// are compared.
    pub fn is(&self, said: &str) -> bool {
        let said = Self::of_text(said);
        self.0.iter().zip(said.0).fold(0, |different, (one, other)| different | (one ^ other)) == 0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(folder: &Path, text: &str, mode: u32) -> PathBuf {
        let path = folder.join(format!("token-{mode:o}"));
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn a_token_is_long_and_nobody_else_s() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), "  0123456789abcdef\n", 0o640);
        let token = Token::read_file(&path).unwrap();
        assert!(token.is("0123456789abcdef"));
        for other in ["", "0123456789abcdeg", "0123456789abcdef0", "0123456789abcde", " 0123456789abcdef"] {
            assert!(!token.is(other), "{other}");
        }
        assert!(!format!("{token:?}").contains("0123"));
        let refused = |path: &Path| Token::read_file(path).unwrap_err().to_string();
        assert!(refused(&file(folder.path(), "0123456789abcdef", 0o644)).contains("chmod o-rwx"));
        assert!(refused(&file(folder.path(), "short", 0o600)).contains("openssl rand"));
        assert!(refused(&file(folder.path(), &"x".repeat(4097), 0o400)).contains("openssl rand"));
        assert!(refused(&folder.path().join("none")).contains("may read"));
    }

    #[test]
    fn an_address_needs_a_token_of_its_own_and_a_token_an_address() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), "0123456789abcdef", 0o600);
        let other = file(folder.path(), "0123456789abcdef0", 0o400);
        let (path, other) = (path.as_path(), other.as_path());
        let (listen, none) = (Some("127.0.0.1:1".parse().unwrap()), (None, None));
        let complete = |control, score| super::complete_control("/a".into(), control, score);
        let both = complete(none, none).unwrap();
        assert!(both.tcp.is_none() && both.score.is_none());
        let both = complete((listen, Some(path)), (listen, Some(other))).unwrap();
        assert!(both.tcp.is_some() && both.score.is_some());
        let refused = |control, score| complete(control, score).unwrap_err().to_string();
        assert!(refused((listen, None), none).contains("--control-token-file FILE"));
        assert!(refused((None, Some(path)), none).contains("pass both"));
        assert!(refused(none, (listen, None)).contains("--score-token-file FILE"));
        assert!(refused(none, (None, Some(path))).contains("without --score-listen"));
        let one = (listen, Some(path));
        assert!(refused(one, one).contains("write another token"));
        let beside = default_control_socket(Path::new("/run/pillion/pillion.sock"));
        assert_eq!(beside, Path::new("/run/pillion/pillion.control.sock"));
    }
}
