//! Peers that have connected and not said hello yet. None of them can hold up the data thread or each other.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use shm_protocol::PROTOCOL_VERSION;
use shm_protocol::handshake::{self, Hello, Reply};
use shm_protocol::transport;

use crate::listener::{self, Listener};
use crate::poller::{Poller, Source};

/// Peers that may be on their way at once: the listener's backlog.
const GREETINGS_MAX: usize = 64;
/// A peer says hello right after it connected; who takes longer is dropped.
const HELLO_TIME_MAX: Duration = Duration::from_secs(2);
/// How long no connection is taken after one could not be.
const PAUSE: Duration = Duration::from_millis(100);

/// A peer that said hello.
#[derive(Debug)]
pub struct Caller {
    pub socket: OwnedFd,
    /// Its process, where that can be watched.
    pub process: Option<OwnedFd>,
    /// The protocol's version that both sides speak.
    pub version: u32,
    /// What it said, checked.
    pub hello: Hello,
    /// The descriptors it sent.
    pub descriptors: Vec<OwnedFd>,
}

/// The listener and the peers on their way.
#[derive(Debug)]
pub struct Greeter {
    listener: Option<Listener>,
    waiting: BTreeMap<u64, Greeting>,
    next: u64,
    paused_until: Option<Duration>,
}

#[derive(Debug)]
struct Greeting {
    socket: OwnedFd,
    process: Option<OwnedFd>,
    deadline: Duration,
    /// What a stranger is told. Only once its hello was read: to close a socket with unread records is to reset it, and
    /// the text would be lost.
    stranger: Option<String>,
}

// === impl Greeter ===

impl Greeter {
    /// A greeter of the peers that come to `listener`.
    pub fn new(listener: Listener, poller: &Poller) -> Result<Self, Errno> {
        poller.add(Source::Listener, listener.socket())?;
        Ok(Self { listener: Some(listener), waiting: BTreeMap::new(), next: 1, paused_until: None })
    }

    /// Takes every waiting connection that there is room for.
    pub fn accept(&mut self, now: Duration, poller: &Poller) {
        let Some(listener) = &self.listener else { return };
        while self.waiting.len() < GREETINGS_MAX {
            let socket = match transport::accept(listener.socket()) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection; is the limit of open files too low?");
                    break;
                }
            };
            // Who has ended needs nothing.
            let Ok(process) = listener::process_of(&socket) else { continue };
            let stranger = listener.permits(&socket).err();
            if poller.add(Source::Greeting(self.next), &socket).is_ok() {
                let deadline = now + HELLO_TIME_MAX;
                self.waiting.insert(self.next, Greeting { socket, process, deadline, stranger });
                self.next += 1;
            }
        }
        // The listener stays readable: looking away for a while keeps this thread from spinning.
        poller.remove(listener.socket());
        self.paused_until = Some(now + PAUSE);
    }

    /// Reads the hello of a peer that became readable.
    pub fn read(&mut self, id: u64, poller: &Poller) -> Option<Caller> {
        let received = transport::receive(&self.waiting.get(&id)?.socket);
        if received.as_ref().is_err_and(|errno| [Errno::AGAIN, Errno::INTR].contains(errno)) {
            return None;
        }
        let Greeting { socket, process, stranger, .. } = self.waiting.remove(&id)?;
        poller.remove(&socket);
        if let Some(reason) = stranger {
            tracing::warn!(reason, "connection refused");
            refuse(&socket, reason);
            return None;
        }
        let (record, descriptors) = match received {
            Ok((record, descriptors)) if !record.is_empty() => (record, descriptors),
            Ok(_) => return None,
            Err(error) => {
                refuse(&socket, format!("the hello could not be read: {error}"));
                return None;
            }
        };
        let hello = handshake::decode_hello(&record, descriptors.len());
        let agreed = hello.and_then(|hello| Ok((handshake::agree(&hello.versions())?, hello)));
        match agreed {
            Ok((version, hello)) => Some(Caller { socket, process, version, hello, descriptors }),
            Err(error) => {
                tracing::warn!(%error, "connection refused");
                refuse(&socket, error.to_string());
                None
            }
        }
    }

    /// Drops the peers that said nothing in time, and listens again after a pause.
    pub fn expire(&mut self, now: Duration, poller: &Poller) {
        while let Some(first) = self.waiting.first_entry().filter(|first| first.get().deadline <= now) {
            poller.remove(&first.get().socket);
            refuse(&first.remove().socket, "no hello within two seconds".into());
        }
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
            let listener = self.listener.as_ref().map(Listener::socket);
            if let Some(error) = listener.and_then(|socket| poller.add(Source::Listener, socket).err()) {
                tracing::warn!(%error, "cannot watch the listener");
                self.paused_until = Some(now + PAUSE);
            }
        }
    }

    /// When [`Greeter::expire`] has something to do.
    pub fn next_deadline(&self) -> Option<Duration> {
        let first = self.waiting.values().next().map(|greeting| greeting.deadline);
        first.into_iter().chain(self.paused_until).min()
    }

    /// Takes no one any more and removes the socket.
    pub fn close(&mut self) {
        self.listener = None;
        self.paused_until = None;
        self.waiting.clear();
    }
}

/// Tells a peer why it is not served.
pub fn refuse(socket: &OwnedFd, reason: String) {
    let reply = handshake::encode(&Reply::Refused { version: PROTOCOL_VERSION, reason });
    // Who does not take the reply is gone, and is told by its closed socket.
    let _ = transport::send(socket, &reply, &[]);
}
