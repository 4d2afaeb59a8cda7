//! Connected clients before their hello. None of them can delay the data thread or another client.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use shm_protocol::handshake::{self, Hello};
use shm_protocol::transport;

use crate::clients::listener::{self, Listener};
use crate::clients::refusals::{RefusalCause, RefusedConnections};
use crate::system::poller::{PollSource, Poller};

/// Connections without a hello at one time: the listener's backlog.
const GREETINGS_MAX: usize = 64;
/// A connection without a hello is dropped after this time; an engine sends its hello right after connecting.
const HELLO_TIME_MAX: Duration = Duration::from_secs(2);
/// Pause in accepting after a connection could not be accepted or watched.
const PAUSE: Duration = Duration::from_millis(100);

/// A client after its hello.
#[derive(Debug)]
pub struct NewClient {
    pub socket: OwnedFd,
    /// Its process, if the kernel can name it.
    pub process: Option<OwnedFd>,
    /// The protocol version common to both sides.
    pub version: u32,
    /// Its checked hello.
    pub hello: Hello,
    /// The descriptors sent with the hello.
    pub descriptors: Vec<OwnedFd>,
}

/// The listener, and the connections without a hello.
#[derive(Debug)]
pub struct Handshakes {
    listener: Option<Listener>,
    refusals: RefusedConnections,
    waiting: BTreeMap<u64, Greeting>,
    next: u64,
    paused_until: Option<Duration>,
}

#[derive(Debug)]
struct Greeting {
    socket: OwnedFd,
    process: Option<OwnedFd>,
    deadline: Duration,
    /// Refusal of a client of another user. It is sent only once the hello was read: closing a socket with
    /// unread records resets it, and the text would be lost.
    stranger: Option<String>,
}

// === impl Handshakes ===

impl Handshakes {
    /// Watches `listener` for connections.
    pub fn new(listener: Listener, poller: &Poller, refusals: RefusedConnections) -> Result<Self, Errno> {
        poller.add_source(PollSource::Listener, listener.socket())?;
        Ok(Self { listener: Some(listener), refusals, waiting: BTreeMap::new(), next: 1, paused_until: None })
    }

    /// Accepts waiting connections while there is room for more.
    pub fn accept_waiting(&mut self, now: Duration, poller: &Poller) {
        let Some(listener) = &self.listener else { return };
        while self.waiting.len() < GREETINGS_MAX {
            let socket = match transport::accept_connection(listener.socket()) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(error) => {
                    self.refusals.count_refusal(RefusalCause::Resources);
                    tracing::warn!(%error, "cannot accept a connection: raise the limit of open files");
                    break;
                }
            };
            // The process has ended already; its connection is dropped.
            let Ok(process) = listener::process_of(&socket) else { continue };
            let stranger = listener.permits(&socket).err();
            if let Err(error) = poller.add_source(PollSource::Greeting(self.next), &socket) {
                self.refuse_client(
                    &socket,
                    RefusalCause::Resources,
                    format!(
                        "the sidecar cannot watch this connection ({error}): raise the limit of open files"
                    ),
                );
                continue;
            }
            let deadline = now + HELLO_TIME_MAX;
            self.waiting.insert(self.next, Greeting { socket, process, deadline, stranger });
            self.next += 1;
        }
        // The listener stays readable: without a pause this thread would spin.
        poller.remove(listener.socket());
        self.paused_until = Some(now + PAUSE);
    }

    /// Reads the hello of a readable connection. Returns `None` if no whole hello came or the client was
    /// refused.
    pub fn read_hello(&mut self, id: u64, poller: &Poller) -> Option<NewClient> {
        let received = transport::receive_record(&self.waiting.get(&id)?.socket);
        if received.as_ref().is_err_and(|errno| [Errno::AGAIN, Errno::INTR].contains(errno)) {
            return None;
        }
        let Greeting { socket, process, stranger, .. } = self.waiting.remove(&id)?;
        poller.remove(&socket);
        if let Some(text) = stranger {
            self.refuse_client(&socket, RefusalCause::User, text);
            return None;
        }
        let (record, descriptors) = match received {
            Ok((record, descriptors)) if !record.is_empty() => (record, descriptors),
            Ok(_) => return None,
            Err(error) => {
                self.refuse_client(
                    &socket,
                    RefusalCause::Malformed,
                    format!("the hello could not be read: {error}"),
                );
                return None;
            }
        };
        let hello = handshake::decode_hello(&record, descriptors.len());
        let agreed = hello.and_then(|hello| Ok((handshake::agree_version(&hello.versions())?, hello)));
        match agreed {
            Ok((version, hello)) => Some(NewClient { socket, process, version, hello, descriptors }),
            Err(error) => {
                self.refuse_client(&socket, RefusalCause::from(&error), error.to_string());
                None
            }
        }
    }

    /// Drops connections without a hello in time, and listens again after a pause.
    pub fn expire(&mut self, now: Duration, poller: &Poller) {
        while let Some(first) = self.waiting.first_entry().filter(|first| first.get().deadline <= now) {
            let Greeting { socket, .. } = first.remove();
            poller.remove(&socket);
            self.refuse_client(
                &socket,
                RefusalCause::Silent,
                "no hello arrived within two seconds: the client is not a Pillion \
                 engine, or it hangs"
                    .into(),
            );
        }
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
            let listener = self.listener.as_ref().map(Listener::socket);
            if let Some(error) =
                listener.and_then(|socket| poller.add_source(PollSource::Listener, socket).err())
            {
                tracing::warn!(%error, "cannot watch the listening socket");
                self.paused_until = Some(now + PAUSE);
            }
        }
    }

    /// Time at which [`Handshakes::expire`] must be called next.
    pub fn next_deadline(&self) -> Option<Duration> {
        let first = self.waiting.values().next().map(|greeting| greeting.deadline);
        first.into_iter().chain(self.paused_until).min()
    }

    fn refuse_client(&self, socket: &OwnedFd, cause: RefusalCause, text: String) {
        tracing::warn!(reason = text, "connection refused");
        self.refusals.send_refusal(socket, cause, text);
    }

    /// The refusals, also for clients after their hello.
    pub fn refusals(&self) -> &RefusedConnections {
        &self.refusals
    }

    /// Drops all connections, stops listening and removes the socket.
    pub fn stop_listening(&mut self) {
        self.listener = None;
        self.paused_until = None;
        self.waiting.clear();
    }
}
