//! The serving side: connections of followers, and the messages sent on each.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::dial::ByteStream;
use super::service::inventory_server::{Inventory, InventoryServer};
use super::shared::ControlShared;
use super::wire::blocks::{ListBlocksReply, ListBlocksRequest};
use super::wire::namespaces::{NamespacesReply, NamespacesRequest};
use super::wire::{
    FollowReply, FollowRequest, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, VERSION, WaitReply, WaitRequest,
    thinning_of,
};
use super::{MEMBERS_MAX, blocks, namespaces};
use crate::digest::Thinning;
use crate::feed::FeedMessage;
use crate::refusals::Reason;
use crate::sync::lock_mutex;
use crate::tls::REMEDY;

/// Time for a last message to get out.
const PARTING: Duration = Duration::from_secs(1);
/// Pause if the kernel has no more descriptors.
const EXHAUSTED: Duration = Duration::from_millis(100);
/// Maximum bytes of the headers of a request.
const HEADER_BYTES_MAX: u32 = 8 << 10;
/// Calls of a connection at the same time: `Follow`, and `Wait` beside it.
const CALLS_MAX: u32 = 2;

/// Maximum connections without a TLS session, enough for the peers that come back at one moment. Beyond it
/// the oldest is closed: any host that reaches the port can open so many.
const STRANGERS_MAX: usize = 256;

/// Maximum connections of observers, beyond those of [`MEMBERS_MAX`] members.
pub const OBSERVERS_MAX: usize = 64;

/// Connections without a TLS session so far, the oldest first. Dropping a sender closes its connection.
#[derive(Default)]
struct Strangers(VecDeque<oneshot::Sender<()>>);

/// The progress of a connection.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum ConnectionPhase {
    /// No request has come yet.
    Idle,
    /// A request has come and is being answered.
    Following,
    Ended,
    /// The peer reads nothing.
    Stuck,
}

/// The service of one connection.
struct ServedConnection {
    shared: Arc<ControlShared>,
    from: SocketAddr,
    phase: Arc<watch::Sender<ConnectionPhase>>,
    follower: OnceLock<u64>,
    /// Notified when the follower of this connection waits for a block.
    waits: Arc<Notify>,
    /// The first message of its stream.
    hello: FollowReply,
    /// Places for observers, and the one of this connection.
    observers: Arc<Semaphore>,
    observer: OnceLock<OwnedSemaphorePermit>,
}

/// A follower's place in the pace, given up on drop.
struct ServedFollower {
    shared: Arc<ControlShared>,
    follower: u64,
    /// Notified when the follower waits for a block.
    waits: Arc<Notify>,
}

/// The messages of a stream.
struct Replies(mpsc::Receiver<FollowReply>);

/// Accepts connections, forever. Each stream begins with `hello`.
pub(super) async fn accept_followers(shared: Arc<ControlShared>, listener: TcpListener, hello: FollowReply) {
    let room = Arc::new(Semaphore::new(MEMBERS_MAX + OBSERVERS_MAX));
    let observers = Arc::new(Semaphore::new(OBSERVERS_MAX));
    let mut strangers = Strangers::default();
    loop {
        let Ok((tcp, from)) = listener.accept().await else {
            shared.count_refusal(Reason::Resources);
            tokio::time::sleep(EXHAUSTED).await;
            continue;
        };
        let (shared, room, crowded) =
            (Arc::clone(&shared), Arc::clone(&room), strangers.enter_stranger(&shared));
        let greeted = (hello.clone(), Arc::clone(&observers));
        tokio::spawn(async move {
            let Some(wire) = meet(&shared, tcp, from, crowded).await else { return };
            if let Ok(_permit) = room.try_acquire() {
                serve_connection(&shared, wire, from, greeted).await;
            } else {
                shared.count_refusal(Reason::Full);
                shared.note_rarely(format!(
                    "a connection from {from} was refused: {MEMBERS_MAX} connections are open, \
                     which is the limit"
                ));
            }
        });
    }
}

/// Establishes the session of a connection. Returns `None` if it fails, takes too long, or `crowded` ends
/// before.
async fn meet(
    shared: &ControlShared,
    tcp: TcpStream,
    from: SocketAddr,
    crowded: oneshot::Receiver<()>,
) -> Option<Box<dyn ByteStream>> {
    let limit = shared.config.limits.connect;
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(limit, accept_stream(shared, tcp)) => accepted,
        _ = crowded => return None,
    };
    let accepted = accepted.unwrap_or_else(|_| {
        shared.count_refusal(Reason::Silent);
        Err(format!("the TLS session took longer than {} ms", limit.as_millis()))
    });
    accepted.inspect_err(|why| _ = shared.note_rarely(format!("{from} is not served: {why}"))).ok()
}

/// Serves one connection until either side ends it.
async fn serve_connection(
    shared: &Arc<ControlShared>,
    wire: Box<dyn ByteStream>,
    from: SocketAddr,
    (hello, observers): (FollowReply, Arc<Semaphore>),
) {
    let limit = shared.config.limits.connect;
    let (phase, mut phases) = watch::channel(ConnectionPhase::Idle);
    let (shared_too, phase) = (Arc::clone(shared), Arc::new(phase));
    let connection = ServedConnection {
        shared: shared_too,
        from,
        phase,
        follower: OnceLock::new(),
        waits: Arc::default(),
        hello,
        observers,
        observer: OnceLock::new(),
    };
    let service = InventoryServer::new(connection).max_decoding_message_size(REQUEST_BYTES_MAX);
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.max_concurrent_streams(CALLS_MAX)
        .max_header_list_size(HEADER_BYTES_MAX)
        .max_send_buf_size(REPLY_BYTES_MAX);
    // HTTP/2 pings find a peer that is frozen or has lost its network.
    let silence = shared.config.limits.silence;
    http.timer(TokioTimer::new()).keep_alive_interval(silence).keep_alive_timeout(silence);
    tokio::select! {
        served = http.serve_connection(TokioIo::new(wire), TowerToHyperService::new(service)) => {
            if served.is_err_and(|error| error.is_timeout()) {
                shared.count_refusal(Reason::Silent);
            }
        }
        silent = enough(&mut phases, limit) => {
            if silent {
                shared.count_refusal(Reason::Silent);
            }
        }
    }
}

async fn accept_stream(shared: &ControlShared, tcp: TcpStream) -> Result<Box<dyn ByteStream>, String> {
    tcp.set_nodelay(true).map_err(|error| error.to_string())?;
    let Some(credentials) = &shared.credentials else { return Ok(Box::new(tcp)) };
    let tls = TlsAcceptor::from(credentials.server(|text| shared.report_note(text))).accept(tcp).await;
    // A client that hangs up in the middle is often a probe.
    if tls.as_ref().is_err_and(|error| error.kind() != ErrorKind::UnexpectedEof) {
        shared.count_refusal(Reason::Certificate);
    }
    Ok(Box::new(tls.map_err(|error| format!("no TLS session ({error}): {REMEDY}"))?))
}

/// Returns when a connection has no more use; true if no request came within `limit`.
async fn enough(phases: &mut watch::Receiver<ConnectionPhase>, limit: Duration) -> bool {
    let asked = phases.wait_for(|phase| *phase != ConnectionPhase::Idle);
    if tokio::time::timeout(limit, asked).await.is_err() {
        return true;
    }
    let last =
        phases.wait_for(|phase| matches!(phase, ConnectionPhase::Ended | ConnectionPhase::Stuck)).await;
    if last.is_ok_and(|last| *last == ConnectionPhase::Ended) {
        tokio::time::sleep(PARTING).await;
    }
    false
}

// === impl Strangers ===

impl Strangers {
    /// Adds a new connection. The returned receiver ends if the connection has to make room for others.
    fn enter_stranger(&mut self, shared: &ControlShared) -> oneshot::Receiver<()> {
        self.0.retain(|stranger| !stranger.is_closed());
        if self.0.len() >= STRANGERS_MAX {
            shared.count_refusal(Reason::Full);
            self.0.pop_front();
        }
        let (stranger, crowded) = oneshot::channel();
        self.0.push_back(stranger);
        crowded
    }
}

// === impl ServedConnection ===

#[tonic::async_trait]
impl Inventory for ServedConnection {
    type FollowStream = Replies;

    async fn follow(&self, request: Request<FollowRequest>) -> Result<Response<Replies>, Status> {
        let asked = request.into_inner();
        self.begin_request(asked.version, &asked.mesh, asked.thinning, asked.observes)?;
        if let Some(holder) = self.shared.name_holder(&asked.node, asked.boot) {
            return Err(self.refuse_name(&asked, &holder));
        }
        if !asked.observes && !self.shared.knows(&asked.node, asked.boot) {
            self.shared.retry.notify_one();
        }
        let (replies, taken) = mpsc::channel(1);
        let (shared, phase, waits) =
            (Arc::clone(&self.shared), Arc::clone(&self.phase), Arc::clone(&self.waits));
        let follower = *self.follower.get_or_init(|| shared.add_follower());
        let turn = ServedFollower { shared: Arc::clone(&shared), follower, waits };
        let hello = self.hello.clone();
        tokio::spawn(async move {
            let stuck = stream_changes(turn, &asked, hello, &replies).await.is_err();
            if stuck {
                shared.count_refusal(Reason::Slow);
                let silence_ms = shared.config.limits.silence.as_millis();
                // The name is unchecked text of the peer, so it is escaped.
                shared.note_rarely(format!(
                    "{:?} follows this node and has read nothing for {silence_ms} ms: its connection was closed",
                    asked.node
                ));
            }
            phase.send_replace(if stuck { ConnectionPhase::Stuck } else { ConnectionPhase::Ended });
        });
        Ok(Response::new(Replies(taken)))
    }

    async fn namespaces(
        &self,
        request: Request<NamespacesRequest>,
    ) -> Result<Response<NamespacesReply>, Status> {
        let asked = request.into_inner();
        self.begin_request(asked.version, &asked.mesh, Thinning::NONE.power().into(), asked.observes)?;
        let told = namespaces::describe_namespaces(&self.shared).await;
        self.phase.send_replace(ConnectionPhase::Ended);
        told.map(Response::new)
    }

    async fn list_blocks(
        &self,
        request: Request<ListBlocksRequest>,
    ) -> Result<Response<ListBlocksReply>, Status> {
        let request = request.into_inner();
        self.begin_request(request.version, &request.mesh, Thinning::NONE.power().into(), false)?;
        let Some(asked) = request.asked() else {
            return Err(self.refuse_call(Reason::Malformed, "the namespace is no digest of 16 bytes".into()));
        };
        let asker = self.shared.number_of(&request.node, request.boot);
        let listed = blocks::describe_blocks(&self.shared, asker, asked).await;
        self.phase.send_replace(ConnectionPhase::Ended);
        listed.map(Response::new)
    }

    async fn wait(&self, _: Request<WaitRequest>) -> Result<Response<WaitReply>, Status> {
        let Some(follower) = self.follower.get() else {
            self.shared.count_refusal(Reason::Malformed);
            return Err(Status::failed_precondition(
                "Wait without a Follow on this connection: call Follow first",
            ));
        };
        self.shared.note_wait(*follower);
        self.waits.notify_one();
        Ok(Response::new(WaitReply {}))
    }
}

impl ServedConnection {
    /// Begins the one request of this connection. Returns `Err` if it is refused.
    fn begin_request(&self, version: u32, mesh: &str, thinning: u32, observes: bool) -> Result<(), Status> {
        let first = self.phase.send_replace(ConnectionPhase::Following) == ConnectionPhase::Idle;
        let refused = if first {
            self.refusal(version, mesh, thinning)
        } else {
            Some((Reason::Malformed, "a connection carries one stream".into()))
        };
        let refused = refused.or_else(|| if observes { self.take_observer() } else { None });
        refused.map_or(Ok(()), |(reason, why)| Err(self.refuse_call(reason, why)))
    }

    /// Takes the place of an observer. Returns the reason if there is none.
    fn take_observer(&self) -> Option<(Reason, String)> {
        match Arc::clone(&self.observers).try_acquire_owned() {
            Ok(permit) => {
                let _ = self.observer.set(permit);
                None
            }
            Err(_) => {
                let why = format!("{OBSERVERS_MAX} routers follow this node or ask it, which is the limit");
                Some((Reason::Full, why))
            }
        }
    }

    /// Refuses a follower with the name of a live member. It comes again and again, so its log and this one
    /// have one line of it.
    fn refuse_name(&self, asked: &FollowRequest, holder: &str) -> Status {
        let (node, remedy) = (&asked.node, "give each its own --node-id");
        let text = format!(
            "a sidecar at {} was refused because it has the name {node}, which {holder} has: {remedy}",
            self.from
        );
        let (twin, mut told) = ((node.clone(), asked.boot), lock_mutex(&self.shared.reported_twins));
        if !told.contains(&twin) && self.shared.note_rarely(text) {
            if told.len() >= MEMBERS_MAX {
                told.clear();
            }
            told.insert(twin);
        }
        self.refuse_call(Reason::Name, format!("{holder} has the name {node}, too: {remedy}"))
    }

    fn refuse_call(&self, reason: Reason, why: String) -> Status {
        self.shared.count_refusal(reason);
        self.phase.send_replace(ConnectionPhase::Ended);
        Status::failed_precondition(why)
    }

    /// The reason to refuse a peer, or `None`.
    fn refusal(&self, version: u32, mesh: &str, thinning: u32) -> Option<(Reason, String)> {
        let own = &self.shared.config;
        if version != VERSION {
            let why = format!(
                "this node speaks version {VERSION} of the protocol, and the peer {version}: run the same release on every node"
            );
            return Some((Reason::Version, why));
        }
        if mesh != own.mesh {
            let mesh = &own.mesh;
            return Some((
                Reason::Mesh,
                format!("this node belongs to the mesh '{mesh}': give both the same --mesh-name"),
            ));
        }
        thinning_of(thinning).err().map(|malformed| (Reason::Malformed, malformed.to_string()))
    }
}

/// Sends this node's inventory to a follower until it hangs up: all of it without a rest, then its changes.
/// Fails if the follower reads nothing.
async fn stream_changes(
    turn: ServedFollower,
    asked: &FollowRequest,
    hello: FollowReply,
    replies: &mpsc::Sender<FollowReply>,
) -> Result<(), tokio::time::error::Elapsed> {
    let shared = &*turn.shared;
    let limits = &shared.config.limits;
    let known = (asked.known_boot == shared.config.boot.0.get()).then_some(asked.known_sequence);
    let thinning = thinning_of(asked.thinning).unwrap_or_default();
    let mut published = shared.published.subscribe();
    let mut leaving = shared.leaving.subscribe();
    let mut hears_leaving = asked.hears_leaving;
    let mut reader = lock_mutex(&shared.feed).reader(thinning, known);
    if asked.hears_promises {
        reader = reader.with_promises();
    }
    let mut next = hello;
    // The time of the last batch after which the follower knew everything.
    let mut told: Option<Instant> = None;
    while tokio::time::timeout(limits.silence, replies.send(next)).await?.is_ok() {
        let sent = Instant::now();
        next = loop {
            let now = Instant::now();
            let rested =
                told.map(|told| told + shared.follower_rest(turn.follower)).filter(|rested| *rested > now);
            if rested.is_none() {
                let feed = lock_mutex(&shared.feed);
                if let Some(message) = feed.next(&mut reader) {
                    let news = matches!(message, FeedMessage::Delta { .. } | FeedMessage::Promises(_));
                    let rests = news && feed.has_read_all(&reader);
                    told = rests.then_some(now);
                    break message.into();
                }
            }
            let left = async {
                match hears_leaving {
                    true => drop(leaving.wait_for(|leaving| *leaving).await),
                    false => std::future::pending().await,
                }
            };
            let due = async {
                match rested {
                    Some(rested) => tokio::time::sleep_until(rested).await,
                    // The sender is in the shared state, so it is not dropped.
                    None => drop(published.changed().await),
                }
            };
            tokio::select! {
                () = left => {
                    hears_leaving = false;
                    break FollowReply::leaving();
                }
                () = due => {}
                () = turn.waits.notified() => {}
                () = tokio::time::sleep_until(sent + limits.heartbeat) => break FollowReply::heartbeat(),
                () = replies.closed() => return Ok(()),
            }
        };
    }
    Ok(())
}

// === impl ServedFollower ===

impl Drop for ServedFollower {
    fn drop(&mut self) {
        self.shared.remove_follower(self.follower);
    }
}

// === impl Replies ===

impl Stream for Replies {
    type Item = Result<FollowReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|reply| reply.map(Ok))
    }
}
