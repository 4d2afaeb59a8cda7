//! Greetings of a connection: TLS, then the names and lives of both nodes, before any other frame.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use super::Shared;
use super::frame::{Frame, Hello, Malformed};
use super::link::Link;
use super::wire::{Broken, Wire};
use crate::refusals::Reason;
use crate::sync::{lock, now};
use crate::tls::REMEDY;
use crate::transport::{BootId, Fault, Refusal, Stage};

// === the side that connects ===

/// Connects to a member. Returns the connection, and the life that answered.
pub(super) fn connect(shared: &Shared, link: &Link) -> Result<(Wire, BootId), Fault> {
    let limits = &shared.config.limits;
    let stream = TcpStream::connect_timeout(&link.peer.address, limits.connect);
    let stream = Arc::new(stream.map_err(|error| Broken::from(error).fault(Stage::Connect))?);
    let until = now() + limits.handshake;
    greet(shared, link, stream, until).map_err(|broken| {
        if let Broken::Tls(error) = &broken {
            let peer = &link.peer.node;
            shared.note_rarely(format!("no TLS session with {peer} ({error}): {REMEDY}"));
        }
        broken.fault(Stage::Handshake)
    })?
}

fn greet(
    shared: &Shared,
    link: &Link,
    stream: Arc<TcpStream>,
    until: Instant,
) -> Result<Result<(Wire, BootId), Fault>, Broken> {
    let tls = shared.credentials.as_ref().map(|credentials| credentials.connect(|text| shared.note(text)));
    let mut wire = Wire::new(stream, tls.transpose()?)?;
    wire.handshake(until)?;
    let hello = Hello {
        node: shared.config.node.clone(),
        boot: shared.config.boot,
        wanted_node: link.peer.node.clone(),
        wanted_boot: link.peer.boot,
    };
    wire.send_frame(&Frame::Hello(hello), false, until)?;
    Ok(match wire.frame(until)? {
        Frame::Welcome(boot) if link.peer.boot.is_none_or(|wanted| wanted == boot) => Ok((wire, boot)),
        Frame::Welcome(_) => Err(Fault::Refused(Refusal::OtherBoot)),
        Frame::Refused(refusal) => Err(Fault::Refused(refusal)),
        other => Err(Fault::Malformed(other.unexpected())),
    })
}

// === the side that is connected to ===

/// Greets a connection of a member with Welcome. Returns `None` if it was refused, after the refusal was sent
/// and noted.
pub(super) fn answer(shared: &Shared, stream: &Arc<TcpStream>) -> Option<(Wire, Arc<Link>)> {
    let until = now() + shared.config.limits.handshake;
    let from = stream.peer_addr().map_or_else(|_| "somebody".into(), |address| address.to_string());
    match admit(shared, stream, until) {
        Ok(Ok(admitted)) => Some(admitted),
        Ok(Err((who, refusal))) => {
            shared.count(refusal.into());
            shared.note_rarely(format!("{who} at {from} was refused: {refusal}"));
            None
        }
        Err(Broken::Tls(error)) => {
            shared.count(Reason::Certificate);
            shared.note_rarely(format!("no TLS session with {from} ({error}): {REMEDY}"));
            None
        }
        // A client that connects and sends nothing, such as a probe, is not noted.
        Err(Broken::Eof) => None,
        Err(broken) => {
            let fault = broken.fault(Stage::Handshake);
            shared.count_fault(fault);
            shared.note_rarely(format!("the connection from {from} was closed: {fault}"));
            None
        }
    }
}

type Admitted = Result<(Wire, Arc<Link>), (String, Refusal)>;

fn admit(shared: &Shared, stream: &Arc<TcpStream>, until: Instant) -> Result<Admitted, Broken> {
    stream.set_nonblocking(false)?;
    let tls = shared.credentials.as_ref().map(|credentials| credentials.accept(|text| shared.note(text)));
    let mut wire = Wire::new(Arc::clone(stream), tls.transpose()?)?;
    wire.handshake(until)?;
    let hello = match wire.frame(until) {
        Ok(Frame::Hello(hello)) => hello,
        Ok(other) => {
            wire.refuse(Refusal::Malformed);
            return Err(Malformed::Bytes(other.unexpected()).into());
        }
        Err(broken) => {
            if let Broken::Malformed(malformed) = &broken {
                wire.refuse(refusal(malformed));
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
            wire.refuse(refusal);
            Ok(Err((hello.node.to_string(), refusal)))
        }
    }
}

/// The refusal for a peer's malformed bytes.
pub(super) fn refusal(malformed: &Malformed) -> Refusal {
    match malformed {
        Malformed::Bytes(_) => Refusal::Malformed,
        Malformed::Version(version) => Refusal::Version(*version),
    }
}

/// The member named in a Hello. Fails unless the Hello expects this life of this node and comes from the
/// member's life.
fn judge(shared: &Shared, hello: &Hello) -> Result<Arc<Link>, Refusal> {
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
    let members = lock(&shared.members);
    let member = members.values().find(|link| link.peer.node == hello.node).ok_or(Refusal::NotMember)?;
    if member.peer.boot.is_some_and(|boot| boot != hello.boot) {
        return Err(Refusal::NotMember);
    }
    Ok(Arc::clone(member))
}
