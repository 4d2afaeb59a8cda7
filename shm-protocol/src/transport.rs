//! The UNIX SEQPACKET socket of the handshake, with descriptors by SCM_RIGHTS.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::handshake::{DESCRIPTORS_MAX, RECORD_BYTES_MAX};

/// Most connections waiting for the sidecar: every rank of 4 engines of 8 GPUs and their schedulers start at
/// once.
const BACKLOG: i32 = 64;

/// Returns the socket of this user's sidecar, for commands and engines without another setting.
pub fn default_socket() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty());
    let folder = own.filter(|_| !rustix::process::geteuid().is_root()).unwrap_or_else(|| "/run".into());
    PathBuf::from(folder).join("pillion/pillion.sock")
}

/// Listens on `path`; no file may exist there.
pub fn listen(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Accepts one waiting connection; `AGAIN` if there is none.
pub fn accept(listener: impl AsFd) -> Result<OwnedFd, Errno> {
    rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
}

/// Connects to the sidecar at `path`; every later send or receive gives up after `timeout`.
pub fn connect(path: &Path, timeout: Duration) -> Result<OwnedFd, Errno> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(timeout))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Sends one record with its descriptors. Fails with `MSGSIZE` or `TOOBIG` if the record is too long or the
/// descriptors are too many.
pub fn send(socket: impl AsFd, record: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    if record.len() > RECORD_BYTES_MAX {
        return Err(Errno::MSGSIZE);
    }
    if descriptors.len() > DESCRIPTORS_MAX {
        return Err(Errno::TOOBIG);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOBIG);
    }
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(record)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == record.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
}

/// Receives one record with its descriptors. An empty record is the peer's hang-up. A truncated one is `MSGSIZE`.
pub fn receive(socket: impl AsFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    let mut record = vec![0; RECORD_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut record)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    // The control buffer is padded for alignment and may hold one or two descriptors beyond the limit.
    let too_many = descriptors.len() > DESCRIPTORS_MAX;
    if too_many || received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::MSGSIZE);
    }
    record.truncate(received.bytes);
    Ok((record, descriptors))
}
