//! The sidecar's UNIX sockets: their paths and their permissions.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use nix::unistd::{Gid, Group, Uid, User};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use shm_protocol::transport;
use thiserror::Error;

/// A live sidecar accepts at once; a frozen one still has room in its backlog.
const PROBE_TIME_MAX: Duration = Duration::from_secs(1);

/// The socket cannot be served; the text names the remedy.
#[derive(Debug, Error)]
pub enum ListenError {
    /// A live sidecar serves the path.
    #[error("another sidecar serves {0}: stop it, or pass another {option} PATH", option = .1.option())]
    InUse(PathBuf, SocketUse),
    /// The path holds something other than a socket of this kind.
    #[error("{0} exists and is not a pillion socket: remove it, or pass another {option} PATH", option = .1.option())]
    Foreign(PathBuf, SocketUse),
    #[error("group {0} does not exist: pass a --socket-group that /etc/group lists, or its number")]
    Group(String),
    /// The folder belongs to another user.
    #[error("cannot {doing} {path}: {source}; pass another {option} PATH, in a folder that belongs to this user", option = wanted.option())]
    Os { doing: &'static str, path: PathBuf, wanted: SocketUse, source: std::io::Error },
    /// This user is not in the group.
    #[error(
        "cannot give {path} to its group: {source}; pass a --socket-group that this user is in, in Kubernetes runAsGroup"
    )]
    Give { path: PathBuf, source: std::io::Error },
    /// The path is too long, or its folder belongs to another user.
    #[error("cannot listen on {path}: {source}; pass another {option} PATH", option = wanted.option())]
    Listen { path: PathBuf, wanted: SocketUse, source: std::io::Error },
}

/// The clients of a socket.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum SocketUse {
    /// Engine processes, with records.
    Engines,
    /// Operators, with HTTP.
    Control,
}

/// A bound socket, removed on drop.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    group: Option<Group>,
}

// === impl Listener ===

impl Listener {
    /// Binds `path`, and replaces the socket of a dead sidecar there.
    pub fn bind(path: &Path, wanted: SocketUse, group: Option<&str>) -> Result<Self, ListenError> {
        let group = group.map(find_group).transpose()?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        std::fs::create_dir_all(folder).map_err(os("create", folder, wanted))?;
        // Two sidecars starting at once take turns, and neither removes the other's new socket.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let lock = rustix::fs::open(folder, flags, Mode::empty()).map_err(os("open", folder, wanted))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(os("lock", folder, wanted))?;
        remove_stale(path, wanted)?;
        let unheard = |source| ListenError::Listen { path: path.to_owned(), wanted, source };
        let socket = wanted.listen(path).map_err(unheard)?;
        let listener = Self { socket, path: path.to_owned(), group };
        if let Some(group) = &listener.group {
            std::os::unix::fs::chown(path, None, Some(group.gid.as_raw()))
                .map_err(|source| ListenError::Give { path: path.to_owned(), source })?;
        }
        let mode = std::fs::Permissions::from_mode(wanted.mode());
        std::fs::set_permissions(path, mode).map_err(os("set the mode of", path, wanted))?;
        Ok(listener)
    }

    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Allows a client of the same user, of root or of the group. The error is the text for the client.
    pub fn permits(&self, peer: &OwnedFd) -> Result<(), String> {
        let (uid, gid) = user_of(peer)?;
        if owns(uid) || self.group.as_ref().is_some_and(|group| member(group, uid, gid)) {
            return Ok(());
        }
        let ours = Uid::effective();
        Err(format!(
            "user {uid} may not use the sidecar of user {ours}: run the engine as user {ours}, or start the sidecar \
             with --socket-group and a group of user {uid}"
        ))
    }

    /// Allows a client of the same user or of root only.
    pub fn permits_alone(peer: impl AsFd) -> Result<(), String> {
        let ours = Uid::effective();
        match user_of(&peer)? {
            (uid, _) if owns(uid) => Ok(()),
            (uid, _) => Err(format!(
                "user {uid} may not control the sidecar of user {ours}: run this as user {ours} or root"
            )),
        }
    }
}

// === impl SocketUse ===

impl SocketUse {
    fn listen(self, path: &Path) -> std::io::Result<OwnedFd> {
        match self {
            Self::Engines => Ok(transport::listen_at(path)?),
            Self::Control => Ok(UnixListener::bind(path)?.into()),
        }
    }

    fn probe_socket(self, path: &Path) -> Result<(), Errno> {
        match self {
            Self::Engines => transport::connect_socket(path, PROBE_TIME_MAX).map(drop),
            Self::Control => {
                let connected = UnixStream::connect(path).map(drop);
                connected.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
            }
        }
    }

    /// The mode of the socket's file. [`Listener::permits`] or [`Listener::permits_alone`] decides on each
    /// connection then.
    fn mode(self) -> u32 {
        match self {
            Self::Engines => 0o660,
            Self::Control => 0o600,
        }
    }

    fn option(self) -> &'static str {
        match self {
            Self::Engines => "--socket",
            Self::Control => "--control-socket",
        }
    }
}

fn user_of(peer: &impl AsFd) -> Result<(Uid, Gid), String> {
    let peer = getsockopt(peer, PeerCredentials)
        .map_err(|error| format!("cannot find out the user of this connection: {error}"))?;
    Ok((Uid::from_raw(peer.uid()), Gid::from_raw(peer.gid())))
}

/// True for root and for this process's user.
fn owns(uid: Uid) -> bool {
    uid.is_root() || uid == Uid::effective()
}

/// The client's process, watched besides its socket, because a child process may hold the socket longer.
/// `None` if it cannot be named: it is in another PID namespace, and the kernel is older than Linux 6.5. SRCH
/// if it has ended.
pub fn process_of(peer: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    match getsockopt(peer, PeerPidfd) {
        Ok(process) => return Ok(Some(process)),
        Err(nix::errno::Errno::ESRCH) => return Err(Errno::SRCH),
        Err(_) => {}
    }
    let number = getsockopt(peer, PeerCredentials).ok().and_then(|peer| Pid::from_raw(peer.pid()));
    match number.map(|number| pidfd_open(number, PidfdFlags::empty())) {
        Some(Err(Errno::SRCH)) => Err(Errno::SRCH),
        opened => Ok(opened.and_then(Result::ok)),
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The file may be gone already; no error is useful at the end.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// True if a user belongs to `group`: by its process's group, its own group, or the group's list.
fn member(group: &Group, uid: Uid, gid: Gid) -> bool {
    if gid == group.gid {
        return true;
    }
    let user = User::from_uid(uid).ok().flatten();
    user.is_some_and(|user| user.gid == group.gid || group.mem.contains(&user.name))
}

fn find_group(name: &str) -> Result<Group, ListenError> {
    let unknown = || ListenError::Group(name.to_owned());
    if let Ok(Some(group)) = Group::from_name(name) {
        return Ok(group);
    }
    // In a container a group often has a number and no name.
    let gid = Gid::from_raw(name.parse().map_err(|_| unknown())?);
    let known = Group::from_gid(gid).ok().flatten();
    Ok(known.unwrap_or(Group { name: name.to_owned(), passwd: Default::default(), gid, mem: Vec::new() }))
}

/// Removes the socket of a dead sidecar; fails at any other file and at a live socket.
fn remove_stale(path: &Path, wanted: SocketUse) -> Result<(), ListenError> {
    let found = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(os("look at", path, wanted))?,
    };
    if !found.file_type().is_socket() {
        return Err(ListenError::Foreign(path.to_owned(), wanted));
    }
    match wanted.probe_socket(path) {
        Err(Errno::CONNREFUSED) => {
            std::fs::remove_file(path).map_err(os("remove the stale socket", path, wanted))
        }
        Err(Errno::PROTOTYPE) => Err(ListenError::Foreign(path.to_owned(), wanted)),
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse(path.to_owned(), wanted)),
        Err(errno) => Err(os("look for a sidecar at", path, wanted)(errno)),
    }
}

fn os<E: Into<std::io::Error>>(
    doing: &'static str,
    path: &Path,
    wanted: SocketUse,
) -> impl FnOnce(E) -> ListenError {
    move |source| ListenError::Os { doing, path: path.to_owned(), wanted, source: source.into() }
}

/// Raises the limit of open descriptors to the process's hard limit: a rank sends up to 64.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open files; with many ranks, some may be refused");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_a_live_one_and_a_file_are_not() {
        let folder = tempfile::tempdir().unwrap();
        for (wanted, other, mode) in
            [(SocketUse::Engines, SocketUse::Control, 0o660), (SocketUse::Control, SocketUse::Engines, 0o600)]
        {
            let path = folder.path().join(format!("deeper/{mode}.sock"));
            let bind = |wanted| Listener::bind(&path, wanted, None);
            let first = bind(wanted).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
            assert!(matches!(bind(wanted), Err(ListenError::InUse(..))));
            assert!(
                bind(other).unwrap_err().to_string().contains(other.option()),
                "a socket of the other kind"
            );
            drop(first);
            assert!(!path.exists(), "removed on drop");
            drop(wanted.listen(&path).unwrap());
            assert!(path.exists(), "a killed sidecar leaves its socket behind");
            drop(bind(wanted).unwrap());
            std::fs::write(&path, "precious").unwrap();
            assert!(matches!(bind(wanted), Err(ListenError::Foreign(..))));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        }
        let long =
            Listener::bind(&folder.path().join("x".repeat(120)), SocketUse::Control, None).unwrap_err();
        assert!(long.to_string().contains("--control-socket"), "{long}");
    }

    #[test]
    fn groups_go_by_name_or_number() {
        assert_eq!(find_group("root").unwrap().gid.as_raw(), 0);
        assert_eq!(find_group("54321").unwrap().gid.as_raw(), 54_321);
        assert!(find_group("no-such-group").unwrap_err().to_string().contains("--socket-group"));
        let group = find_group("54321").unwrap();
        assert!(member(&group, Uid::from_raw(4_000_000), Gid::from_raw(54_321)));
        assert!(!member(&group, Uid::from_raw(4_000_000), Gid::from_raw(1)));
    }
}
