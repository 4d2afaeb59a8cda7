//! The serving side: connections, their asks, and the grants for them.

pub(in crate::transport) mod asks;
mod stream;

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use shm_protocol::wait;

pub(super) use self::stream::ServingStream;
use super::link::PeerLink;
use super::wire::{Broken, Wire};
use super::{STREAMS_DEFAULT, STREAMS_MAX, TcpShared, cut, greeting};
use crate::refusals::Reason;
use crate::sync::lock_mutex;
use crate::transport::{FetchFault, FetchStage, GrantedSlots, MEMBERS_MAX, PeerNumber, TransportEvent};

/// Maximum connections of peers: the default number of every member. Each is a thread and takes 40 KiB, more
/// with TLS. Beyond it a peer is refused with a remedy.
const CONNECTIONS_MAX: usize = MEMBERS_MAX * STREAMS_DEFAULT;
/// Maximum connections of one peer: twice [`STREAMS_MAX`], since some it has closed may not have ended here.
/// Beyond it its oldest one is closed.
const PEER_CONNECTIONS_MAX: usize = 2 * STREAMS_MAX;
/// Maximum connections before their greeting. Beyond it the oldest of them is closed: any host that reaches
/// the port can open so many.
const GREETINGS_MAX: usize = 64;
/// Maximum asks without an answer of the caller. Beyond it peers get
/// [`Status::Busy`](super::frame::BlockStatus::Busy).
const ASKS_MAX: usize = 4096;
/// Pause of the listener if the kernel has no memory or descriptors for a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Connections, and asks waiting for the caller.
#[derive(Default)]
pub(super) struct ServedStreams(Mutex<ServedTable>);

#[derive(Default)]
struct ServedTable {
    streams: HashMap<u64, Connected>,
    asks: HashMap<u64, WaitingAsk>,
    /// The last number of a stream or an ask; no number is used twice.
    last: u64,
}

struct Connected {
    stream: Arc<TcpStream>,
    /// `None` until its greeting.
    peer: Option<PeerNumber>,
}

struct WaitingAsk {
    grants: Arc<GrantQueue>,
    blocks: usize,
}

/// The grants for a stream.
struct GrantQueue {
    /// `None` once the stream has ended.
    granted: Mutex<Option<Vec<GrantedSlots>>>,
    bell: OwnedFd,
}

/// Accepts connections, each with a thread of its own, until the transport stops.
pub(super) fn accept_streams(shared: &Arc<TcpShared>, listener: &TcpListener) {
    while !shared.stopping() {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.bell, PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, None);
        match listener.accept() {
            Ok((stream, _)) => welcome(shared, stream),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => {
                shared.count_refusal(Reason::Resources);
                shared.note_rarely(format!("the connection of a peer could not be accepted ({error})"));
                std::thread::sleep(PAUSE);
            }
        }
    }
}

fn welcome(shared: &Arc<TcpShared>, stream: TcpStream) {
    let stream = Arc::new(stream);
    let (number, crowded) = shared.served.note_connected(&stream);
    if crowded {
        shared.count_refusal(Reason::Full);
    }
    let (own, thread) = (Arc::clone(shared), Arc::clone(shared));
    let run = move || {
        if let Some((wire, link)) = greeting::answer_hello(&thread, &stream)
            && thread.served.admitted(number, link.number)
            // Leaving closes only connections of admitted peers, so a peer that left meanwhile is found here.
            && link.is_open()
        {
            thread.data_path.serve_stream(&thread, link, wire);
        }
        thread.served.disconnected(number);
    };
    if let Err(error) = shared.threads.spawn(format!("mesh-serve-{number}"), run) {
        own.count_refusal(Reason::Resources);
        own.note_rarely(error.to_string());
        own.served.disconnected(number);
    }
}

/// Ends a broken connection. A peer with malformed bytes gets a refusal, and is noted.
pub(in crate::transport) fn part_from(shared: &TcpShared, link: &PeerLink, wire: &mut Wire, broken: &Broken) {
    let fault = broken.fault(FetchStage::Progress);
    if let Broken::Malformed(malformed) = broken {
        wire.send_refusal(greeting::choose_refusal(malformed));
    }
    if link.is_open() {
        shared.count_fault(fault);
    }
    if matches!(fault, FetchFault::Malformed(_)) && link.is_open() {
        shared.note_rarely(format!("the connection of {} was closed: {fault}", link.peer.node));
        shared.report_event(TransportEvent::PeerDown { peer: link.number, fault });
    }
}

// === impl ServedStreams ===

impl ServedStreams {
    /// Hands a grant to the stream of its ask, or releases it if the stream has ended.
    pub(super) fn deliver_grant(&self, granted: GrantedSlots, tell: &dyn Fn(TransportEvent)) {
        let ask = granted.ask;
        let waiting = lock_mutex(&self.0).asks.remove(&ask).expect("an ask is answered once");
        assert_eq!(granted.slots.len(), waiting.blocks, "a grant has an entry for each block");
        if !waiting.grants.push_grant(granted) {
            tell(TransportEvent::Release { ask, sent: 0 });
        }
    }

    /// Cuts the connections of these peers; their threads do the rest.
    pub(super) fn hang_up(&self, which: impl Fn(Option<PeerNumber>) -> bool) {
        let table = lock_mutex(&self.0);
        table
            .streams
            .values()
            .filter(|connected| which(connected.peer))
            .for_each(|connected| cut(&connected.stream));
    }

    /// Adds a connection. Returns its number, and true if another one was closed for it.
    fn note_connected(&self, stream: &Arc<TcpStream>) -> (u64, bool) {
        let mut table = lock_mutex(&self.0);
        let crowded = table.make_room(None, GREETINGS_MAX);
        table.last += 1;
        let number = table.last;
        table.streams.insert(number, Connected { stream: Arc::clone(stream), peer: None });
        (number, crowded)
    }

    /// True if the limit of peers' connections is reached.
    pub(super) fn full(&self) -> bool {
        let known = lock_mutex(&self.0).streams.values().filter(|connected| connected.peer.is_some()).count();
        known >= CONNECTIONS_MAX
    }

    /// Assigns a connection to a peer after its greeting. Returns false if it was closed meanwhile.
    fn admitted(&self, stream: u64, peer: PeerNumber) -> bool {
        let mut table = lock_mutex(&self.0);
        table.make_room(Some(peer), PEER_CONNECTIONS_MAX);
        table.streams.get_mut(&stream).is_some_and(|connected| {
            connected.peer = Some(peer);
            true
        })
    }

    fn disconnected(&self, stream: u64) {
        lock_mutex(&self.0).streams.remove(&stream);
    }

    /// The number of a new ask; `None` if too many wait.
    fn enter_ask(&self, grants: &Arc<GrantQueue>, blocks: usize) -> Option<u64> {
        let mut table = lock_mutex(&self.0);
        if table.asks.len() >= ASKS_MAX {
            return None;
        }
        table.last += 1;
        let ask = table.last;
        table.asks.insert(ask, WaitingAsk { grants: Arc::clone(grants), blocks });
        Some(ask)
    }
}

// === impl ServedTable ===

impl ServedTable {
    /// Closes the oldest connection of `peer`, or of those before their greeting, if there are `max`. Returns
    /// true if there were.
    fn make_room(&mut self, peer: Option<PeerNumber>, max: usize) -> bool {
        let same = self.streams.iter().filter(|(_, connected)| connected.peer == peer);
        let same: Vec<u64> = same.map(|(number, _)| *number).collect();
        let crowded = same.len() >= max;
        let oldest = same.into_iter().min().filter(|_| crowded);
        if let Some(gone) = oldest.and_then(|oldest| self.streams.remove(&oldest)) {
            cut(&gone.stream);
        }
        crowded
    }
}

// === impl GrantQueue ===

impl GrantQueue {
    /// Adds a grant. Returns false if the stream has ended.
    fn push_grant(&self, granted: GrantedSlots) -> bool {
        let mut state = lock_mutex(&self.granted);
        let Some(queue) = &mut *state else { return false };
        queue.push(granted);
        drop(state);
        wait::signal_eventfd(&self.bell);
        true
    }

    fn take_grants(&self) -> Vec<GrantedSlots> {
        lock_mutex(&self.granted).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes the remaining grants. No grant can be added from now on.
    fn close_queue(&self) -> Vec<GrantedSlots> {
        lock_mutex(&self.granted).take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_says_nothing_makes_room_for_others_and_no_peer_does() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connection = || Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let is_cut = |stream: &TcpStream| stream.peek(&mut [0]).is_ok();
        let (served, peer) = (ServedStreams::default(), connection());
        let (number, _) = served.note_connected(&peer);
        assert!(served.admitted(number, PeerNumber(1)));
        let silent: Vec<_> = (0..GREETINGS_MAX).map(|_| connection()).collect();
        let numbers: Vec<u64> = silent.iter().map(|stream| served.note_connected(stream).0).collect();
        assert!(served.note_connected(&connection()).1);
        for stream in [&peer, &silent[0], &silent[1]] {
            stream.set_nonblocking(true).unwrap();
        }
        assert_eq!([&peer, &silent[0], &silent[1]].map(|stream| is_cut(stream)), [false, true, false]);
        assert!(!served.admitted(numbers[0], PeerNumber(1)) && served.admitted(numbers[1], PeerNumber(1)));
        assert!(!served.note_connected(&connection()).1, "one of them was admitted");
    }

    #[test]
    fn one_peer_cannot_take_the_room_of_the_others() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let served = ServedStreams::default();
        let admit = |peer| {
            let (number, _) = served.note_connected(&stream);
            assert!(served.admitted(number, PeerNumber(peer)));
        };
        (0..CONNECTIONS_MAX).for_each(|_| admit(1));
        assert!(!served.full());
        assert_eq!(lock_mutex(&served.0).streams.len(), PEER_CONNECTIONS_MAX);
        (2..=MEMBERS_MAX as u32).for_each(|peer| (0..STREAMS_DEFAULT).for_each(|_| admit(peer)));
        assert!(served.full(), "every member, and one with more streams than it opens");
    }
}
