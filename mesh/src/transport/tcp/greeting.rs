//! Greetings of a connection: TLS, then the names and lives of both nodes, before any other frame.
//!
//! A node has a new life ([`BootId`]) after each start. The Hello of the connecting node states its own name
//! and life, and the other node's name and life from its list of members. The other node compares both with
//! its own life and its own list, and answers with Welcome or with the reason of a refusal. If a list names
//! no life for a member, any life of this member is accepted.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use super::TcpShared;
use super::frame::{Frame, HelloFrame, MalformedFrame};
use super::link::PeerLink;
use super::wire::{Broken, Wire};
use crate::refusals::Reason;
use crate::sync::{lock_mutex, read_clock};
use crate::tls::REMEDY;
use crate::transport::{BootId, FetchFault, FetchStage, Refusal};

// === the side that connects ===

/// Connects to a member. Returns the connection, and the member's present life.
pub(super) fn connect_member(shared: &TcpShared, link: &PeerLink) -> Result<(Wire, BootId), FetchFault> {
    let limits = &shared.config.limits;
    let stream = TcpStream::connect_timeout(&link.peer.address, limits.connect);
    let stream = Arc::new(stream.map_err(|error| Broken::from(error).fault(FetchStage::Connect))?);
    let until = read_clock() + limits.handshake;
    greet(shared, link, stream, until).map_err(|broken| {
        if let Broken::Tls(error) = &broken {
            let peer = &link.peer.node;
            shared.note_rarely(format!("no TLS session with {peer} ({error}): {REMEDY}"));
        }
        broken.fault(FetchStage::Handshake)
    })?
}

/// Sends Hello and reads the answer. Fails with `OtherBoot` if the Welcome names another life than the list.
fn greet(
    shared: &TcpShared,
    link: &PeerLink,
    stream: Arc<TcpStream>,
    until: Instant,
) -> Result<Result<(Wire, BootId), FetchFault>, Broken> {
    let tls = shared
        .credentials
        .as_ref()
        .map(|credentials| credentials.client_session(|text| shared.report_note(text)));
    let mut wire = Wire::new(stream, tls.transpose()?)?;
    wire.handshake(until)?;
    let hello = HelloFrame {
        node: shared.config.node.clone(),
        boot: shared.config.boot,
        wanted_node: link.peer.node.clone(),
        wanted_boot: link.peer.boot,
    };
    wire.send_frame(&Frame::Hello(hello), false, until)?;
    Ok(match wire.frame(until)? {
        Frame::Welcome(boot) if link.peer.boot.is_none_or(|wanted| wanted == boot) => Ok((wire, boot)),
        Frame::Welcome(_) => Err(FetchFault::Refused(Refusal::OtherBoot)),
        Frame::Refused(refusal) => Err(FetchFault::Refused(refusal)),
        other => Err(FetchFault::Malformed(other.unexpected())),
    })
}

// === the side that is connected to ===

/// Answers the Hello of a connection. Returns the connection and its member after a Welcome, and `None` after
/// a refusal, a fault or no Hello at all.
pub(super) fn answer_hello(shared: &TcpShared, stream: &Arc<TcpStream>) -> Option<(Wire, Arc<PeerLink>)> {
    let until = read_clock() + shared.config.limits.handshake;
    let from = stream.peer_addr().map_or_else(|_| "somebody".into(), |address| address.to_string());
    match admit_member(shared, stream, until) {
        Ok(Ok(admitted)) => Some(admitted),
        Ok(Err((who, refusal))) => {
            shared.count_refusal(refusal.into());
            shared.note_rarely(format!("{who} at {from} was refused: {refusal}"));
            None
        }
        Err(Broken::Tls(error)) => {
            shared.count_refusal(Reason::Certificate);
            shared.note_rarely(format!("no TLS session with {from} ({error}): {REMEDY}"));
            None
        }
        // A client that connects and sends nothing, such as a probe, is not noted.
        Err(Broken::Eof) => None,
        Err(broken) => {
            let fault = broken.fault(FetchStage::Handshake);
            shared.count_fault(fault);
            shared.note_rarely(format!("the connection from {from} was closed: {fault}"));
            None
        }
    }
}

type Admitted = Result<(Wire, Arc<PeerLink>), (String, Refusal)>;

fn admit_member(shared: &TcpShared, stream: &Arc<TcpStream>, until: Instant) -> Result<Admitted, Broken> {
    stream.set_nonblocking(false)?;
    let tls = shared
        .credentials
        .as_ref()
        .map(|credentials| credentials.server_session(|text| shared.report_note(text)));
    let mut wire = Wire::new(Arc::clone(stream), tls.transpose()?)?;
    wire.handshake(until)?;
    let hello = match wire.frame(until) {
        Ok(Frame::Hello(hello)) => hello,
        Ok(other) => {
            wire.send_refusal(Refusal::Malformed);
            return Err(MalformedFrame::Bytes(other.unexpected()).into());
        }
        Err(broken) => {
            if let Broken::Malformed(malformed) = &broken {
                wire.send_refusal(choose_refusal(malformed));
            }
            return Err(broken);
        }
    };
    match judge(shared, &hello) {
        Ok(link) => {
            wire.send_frame(&Frame::Welcome(shared.config.boot), false, until)?;
            Ok(Ok((wire, link)))
        }
        Err(refusal) => {
            wire.send_refusal(refusal);
            Ok(Err((hello.node.to_string(), refusal)))
        }
    }
}

/// Returns the refusal for malformed bytes.
pub(super) fn choose_refusal(malformed: &MalformedFrame) -> Refusal {
    match malformed {
        MalformedFrame::Bytes(_) => Refusal::Malformed,
        MalformedFrame::Version(version) => Refusal::Version(*version),
    }
}

/// Returns the member behind a Hello, or its refusal:
///
/// - `OtherNode` or `OtherBoot`, if the Hello is for another node or another life of this node. The sender's
///   list may still have this node's life from before a restart.
/// - `NotMember`, if the sender, or its present life, is not in the list of members here. The list may still
///   have the sender's life from before a restart.
fn judge(shared: &TcpShared, hello: &HelloFrame) -> Result<Arc<PeerLink>, Refusal> {
    if shared.draining() {
        return Err(Refusal::Draining);
    }
    if shared.served.full() {
        return Err(Refusal::Full);
    }
    if hello.wanted_node != shared.config.node {
        return Err(Refusal::OtherNode);
    }
    if hello.wanted_boot.is_some_and(|boot| boot != shared.config.boot) {
        return Err(Refusal::OtherBoot);
    }
    let members = lock_mutex(&shared.members);
    let member = members.values().find(|link| link.peer.node == hello.node).ok_or(Refusal::NotMember)?;
    if member.peer.boot.is_some_and(|boot| boot != hello.boot) {
        return Err(Refusal::NotMember);
    }
    Ok(Arc::clone(member))
}
