//! Membership of a mesh, as pure state: events come in, steps go out, and time is an argument.
//!
//! A member is one life of a node, under a number used once. It is reached at an endpoint: an address of a
//! listed name, at which one life after the other may answer, or one registration in etcd. Streams follow
//! endpoints.
//!
//! - No two members have one node's name: a node with two addresses is a member at one of them.
//! - A registration is known by the revision at which it was created: an older one than the known is ignored.
//! - A registered node is a member until its registration ends, whether its stream is up or not. A listed
//!   node becomes a member when its stream names it, and is removed after long silence.
//! - An address no longer listed stays an endpoint for as long as it has a member.

mod listed;
mod registered;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;

use crate::backlog::BacklogRoom;
use crate::control::AnnouncedEngine;
use crate::digest::{Digest, DigestChange};
use crate::directory::Filter;
use crate::listed::{BlocksAsk, ListedBlock};
use crate::refusals::Reason;
use crate::transport::{BootId, MEMBERS_MAX, NodeId, Peer, PeerNumber};

/// Maximum addresses followed or tried: those of all members and, while pods are replaced, an old one beside
/// each.
pub const ENDPOINTS_MAX: usize = 2 * MEMBERS_MAX;

/// Addresses of a node's block transports.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct DataAddresses {
    pub tcp: SocketAddr,
    /// Address at which RDMA is set up, if the node has NICs for it.
    pub rdma: Option<SocketAddr>,
}

/// Events of the mesh for the caller. The thread of [`crate::control::Control`] sends them and must not wait.
#[derive(Debug)]
pub enum MemberEvent {
    /// A life of a node became a member. A number is used once.
    Joined {
        /// The number of the member.
        number: PeerNumber,
        peer: Peer,
        /// Address at which RDMA is set up, if the member has NICs for it.
        rdma: Option<SocketAddr>,
    },
    /// A member's stream is up, and states whether the member keeps standing asks and lists its best blocks, and
    /// its engines. An earlier member did not state these.
    Greeted { number: PeerNumber, keeps_asks: bool, lists_blocks: bool, engines: Vec<AnnouncedEngine> },
    /// A member is about to leave: it lists blocks that no other node has.
    Leaving { number: PeerNumber },
    /// The answer of a member to the question for its best blocks; none if it did not answer rightly.
    Listed { number: PeerNumber, ask: BlocksAsk, blocks: Vec<ListedBlock> },
    /// A member has left and must be cut off. No event has its number again.
    Left { number: PeerNumber, why: Parting },
    /// The whole inventory of a member.
    Snapshot { number: PeerNumber, filter: Filter, room: BacklogRoom },
    /// Changes of the inventory since then.
    Changes { number: PeerNumber, changes: Vec<DigestChange>, room: BacklogRoom },
    /// All promises of a member; they replace its earlier ones.
    Promises { number: PeerNumber, promises: Vec<Digest>, room: BacklogRoom },
    /// A member's stream is down: its inventory stays in use until the stream is back or [`MemberEvent::Left`]. Its
    /// promises are void.
    Stale { number: PeerNumber },
    /// A text for the operator.
    Note(String),
}

/// A node's name, life and addresses, as the node states them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Identity {
    pub node: NodeId,
    pub boot: BootId,
    /// Addresses of its block transports.
    pub data: DataAddresses,
}

/// A registration in etcd.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Registration {
    pub identity: Identity,
    /// Address of its control service.
    pub control: SocketAddr,
    /// The revision at which the key was created: a later life of a node has a later one.
    pub created: i64,
}

/// The reason why a member has left.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Parting {
    /// Its registration was deleted, or its lease ran out.
    Unregistered,
    /// The node has restarted, or has moved.
    Restarted,
    /// The node is only listed, and has been silent for long.
    Silent,
}

/// A place to follow: a listed address or a registration. Its number is used once.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct MemberEndpoint(pub u32);

/// The reason why an endpoint is not followed at present.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FollowFailure {
    /// No node answered, or no node of this mesh. With the remedy if there is one.
    Unreached(String),
    /// Another life of a node with a stream at another endpoint. If the node has moved, that stream breaks
    /// soon.
    Twin(NodeId, SocketAddr),
    /// The member that answered is followed at another address.
    Elsewhere(NodeId),
}

#[derive(Debug)]
pub enum MembershipStep {
    Tell(MemberEvent),
    /// Follow this address.
    Follow(MemberEndpoint, String),
    Unfollow(MemberEndpoint),
    /// Dial all endpoints without a stream at once: a node lost at another address may answer there.
    Retry,
}

#[derive(Debug)]
pub struct Membership {
    own: (NodeId, BootId),
    gone_ms: u64,
    /// The addresses of each listed name.
    names: BTreeMap<String, BTreeSet<SocketAddr>>,
    places: BTreeMap<MemberEndpoint, EndpointPlace>,
    endpoints: u32,
    numbers: u32,
}

/// An endpoint, and its member if it has one.
#[derive(Debug)]
struct EndpointPlace {
    origin: Origin,
    found: EndpointOccupant,
}

#[derive(Debug)]
enum Origin {
    Listed(SocketAddr),
    Registered(Registration),
}

#[derive(Debug)]
enum EndpointOccupant {
    Nobody(Vacancy),
    /// This node itself answered the last attempt.
    Own,
    Member(FollowedMember),
}

/// The state of an endpoint without a member.
#[derive(Debug)]
struct Vacancy {
    since_ms: u64,
    /// The failure of the last attempt.
    why: Option<FollowFailure>,
    /// True once the operator has a note of it.
    is_reported: bool,
}

#[derive(Debug)]
struct FollowedMember {
    number: PeerNumber,
    identity: Identity,
    /// The time at which its stream broke.
    down_ms: Option<u64>,
}

// === impl Parting ===

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unregistered => "its registration in etcd has ended",
            Self::Restarted => "it was restarted or has moved",
            Self::Silent => "it has sent nothing for too long",
        })
    }
}

// === impl FollowFailure ===

impl FollowFailure {
    /// The reason to count for a node that answered but is not accepted.
    pub(crate) fn reason(&self) -> Option<Reason> {
        match self {
            Self::Unreached(_) => Some(Reason::NotMember),
            Self::Twin(..) => Some(Reason::Name),
            // The node is a member already.
            Self::Elsewhere(_) => None,
        }
    }
}

impl From<String> for FollowFailure {
    fn from(why: String) -> Self {
        Self::Unreached(why)
    }
}

impl fmt::Display for FollowFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreached(why) => f.write_str(why),
            Self::Twin(node, address) => {
                write!(
                    f,
                    "two sidecars have the name {node}, one of them at {address}: give each its own --node-id"
                )
            }
            Self::Elsewhere(node) => {
                write!(f, "{node} answers there, which is followed at another address already")
            }
        }
    }
}

// === impl Origin ===

impl Origin {
    /// The address to follow.
    fn follow_address(&self) -> String {
        match self {
            Self::Listed(address) => address.to_string(),
            Self::Registered(one) => one.control.to_string(),
        }
    }
}

// === impl EndpointPlace ===

impl EndpointPlace {
    fn member(&self) -> Option<&FollowedMember> {
        match &self.found {
            EndpointOccupant::Member(member) => Some(member),
            EndpointOccupant::Nobody(_) | EndpointOccupant::Own => None,
        }
    }

    fn is_own(&self) -> bool {
        matches!(self.found, EndpointOccupant::Own)
    }

    /// The address of a listed endpoint, even if the address is no longer listed.
    fn listed_address(&self) -> Option<SocketAddr> {
        match self.origin {
            Origin::Listed(address) => Some(address),
            Origin::Registered(_) => None,
        }
    }

    fn member_mut(&mut self) -> Option<&mut FollowedMember> {
        match &mut self.found {
            EndpointOccupant::Member(member) => Some(member),
            EndpointOccupant::Nobody(_) | EndpointOccupant::Own => None,
        }
    }
}

// === impl Membership ===

impl Membership {
    /// A mesh of this node alone. A listed member is removed after `gone_ms` of silence.
    pub fn new(own: (NodeId, BootId), gone_ms: u64) -> Self {
        let (names, places) = Default::default();
        Self { own, gone_ms, names, places, endpoints: 0, numbers: 0 }
    }

    /// The member at an endpoint.
    pub fn number(&self, endpoint: MemberEndpoint) -> Option<PeerNumber> {
        Some(self.places.get(&endpoint)?.member()?.number)
    }

    /// The endpoint at which a member is followed.
    pub fn endpoint(&self, number: PeerNumber) -> Option<MemberEndpoint> {
        self.members().find(|(_, member)| member.number == number).map(|(endpoint, _)| endpoint)
    }

    /// True if this life of a node is a member with a stream, or this node itself.
    pub fn knows(&self, node: &str, boot: u64) -> bool {
        let is = |(name, life): (&NodeId, BootId)| name.as_str() == node && life.0.get() == boot;
        let up = |member: &FollowedMember| {
            member.down_ms.is_none() && is((&member.identity.node, member.identity.boot))
        };
        is((&self.own.0, self.own.1)) || self.members().any(|(_, member)| up(member))
    }

    /// The number of this life of a node, if it is a member.
    pub fn number_of(&self, node: &str, boot: u64) -> Option<PeerNumber> {
        let is = |identity: &Identity| identity.node.as_str() == node && identity.boot.0.get() == boot;
        self.members().find(|(_, member)| is(&member.identity)).map(|(_, member)| member.number)
    }

    /// The live holder of a name, if another life claims it: a member with its address, or this node.
    pub fn name_holder(&self, node: &str, boot: u64) -> Option<String> {
        let (own, own_boot) = &self.own;
        if own.as_str() == node && own_boot.0.get() != boot {
            return Some(format!("the node {own} itself"));
        }
        let holds = |member: &FollowedMember| {
            let Identity { node: name, boot: life, .. } = &member.identity;
            member.down_ms.is_none() && name.as_str() == node && life.0.get() != boot
        };
        let holder = self.places.values().find(|place| place.member().is_some_and(holds))?;
        Some(format!("the live member at {}", holder.origin.follow_address()))
    }

    /// All members: the name, life and control address of each.
    pub fn followed(&self) -> Vec<(NodeId, BootId, String)> {
        let member = |place: &EndpointPlace| {
            let identity = &place.member()?.identity;
            Some((identity.node.clone(), identity.boot, place.origin.follow_address()))
        };
        self.places.values().filter_map(member).collect()
    }

    fn members(&self) -> impl Iterator<Item = (MemberEndpoint, &FollowedMember)> {
        self.places.iter().filter_map(|(endpoint, place)| Some((*endpoint, place.member()?)))
    }

    // === streams ===

    /// An endpoint's stream is up, with the node's statement of itself. `Err` is the reason to end the
    /// stream.
    pub fn hello(
        &mut self,
        now_ms: u64,
        endpoint: MemberEndpoint,
        says: &Identity,
    ) -> Result<Vec<MembershipStep>, FollowFailure> {
        let Some(place) = self.places.get_mut(&endpoint) else {
            return Ok(vec![MembershipStep::Unfollow(endpoint)]);
        };
        if let Some(member) = place.member_mut().filter(|member| member.identity == *says) {
            member.down_ms = None;
            return Ok(Vec::new());
        }
        match &place.origin {
            Origin::Registered(registration) => Err(FollowFailure::Unreached(format!(
                "{} is registered at {}, and {} answers there{}",
                registration.identity.node,
                registration.control,
                says.node,
                if says.node == registration.identity.node { " after a restart" } else { "" },
            ))),
            Origin::Listed(address) => {
                let address = *address;
                self.met(now_ms, (endpoint, address), says)
            }
        }
    }

    /// Handles another life than the known one at a listed address.
    fn met(
        &mut self,
        now_ms: u64,
        (endpoint, address): (MemberEndpoint, SocketAddr),
        says: &Identity,
    ) -> Result<Vec<MembershipStep>, FollowFailure> {
        let own = says.node == self.own.0;
        let other = self.members().find(|(at, member)| *at != endpoint && member.identity.node == says.node);
        let up = other.filter(|(_, member)| member.down_ms.is_none()).map(|(_, member)| &member.identity);
        if up == Some(says) {
            return Err(FollowFailure::Elsewhere(says.node.clone()));
        }
        if up.is_some() || own && says.boot != self.own.1 {
            return Err(FollowFailure::Twin(says.node.clone(), address));
        }
        // If the node has moved, the member at the other address is the same node in an earlier stream.
        let moved = other.map(|(at, _)| at);
        if moved.is_none() && !own && self.number(endpoint).is_none() && self.members().count() >= MEMBERS_MAX
        {
            return Err(FollowFailure::Unreached(full(&says.node)));
        }
        let left = moved.into_iter().chain([endpoint]);
        let mut steps: Vec<MembershipStep> =
            left.flat_map(|at| self.vacate(now_ms, at, Parting::Restarted)).collect();
        match self.places.get_mut(&endpoint) {
            // The address is no longer listed, and was an endpoint only for the member that has left.
            None => {}
            Some(place) if own => {
                place.found = EndpointOccupant::Own;
                steps.push(MembershipStep::Unfollow(endpoint));
            }
            Some(_) => steps.push(self.join_member(endpoint, says.clone())),
        }
        Ok(steps)
    }

    /// An endpoint's stream broke, or the attempt to open one failed.
    pub fn down(
        &mut self,
        now_ms: u64,
        endpoint: MemberEndpoint,
        why: &FollowFailure,
    ) -> Vec<MembershipStep> {
        let Some(place) = self.places.get_mut(&endpoint) else { return Vec::new() };
        match &mut place.found {
            EndpointOccupant::Own => {
                place.found = EndpointOccupant::Nobody(Vacancy::since(now_ms));
                self.down(now_ms, endpoint, why)
            }
            EndpointOccupant::Nobody(vacancy) => {
                vacancy.fail(now_ms, why);
                Vec::new()
            }
            EndpointOccupant::Member(member) if member.down_ms.is_some() => Vec::new(),
            EndpointOccupant::Member(member) => {
                member.down_ms = Some(now_ms);
                let (number, node) = (member.number, member.identity.node.clone());
                let waits = |place: &EndpointPlace| matches!(&place.found, EndpointOccupant::Nobody(it) if it.waits_for(&node));
                let retry = self.places.values().any(waits).then_some(MembershipStep::Retry);
                [MembershipStep::Tell(MemberEvent::Stale { number })].into_iter().chain(retry).collect()
            }
        }
    }

    // === endpoints ===

    fn open_endpoint(&mut self, now_ms: u64, origin: Origin) -> MembershipStep {
        self.endpoints += 1;
        let endpoint = MemberEndpoint(self.endpoints);
        let address = origin.follow_address();
        self.places.insert(
            endpoint,
            EndpointPlace { origin, found: EndpointOccupant::Nobody(Vacancy::since(now_ms)) },
        );
        MembershipStep::Follow(endpoint, address)
    }

    fn join_member(&mut self, endpoint: MemberEndpoint, identity: Identity) -> MembershipStep {
        self.numbers += 1;
        let number = PeerNumber(self.numbers);
        let Identity { node, boot, data } = identity.clone();
        let place = self.places.get_mut(&endpoint).expect("a node joins at an endpoint");
        place.found = EndpointOccupant::Member(FollowedMember { number, identity, down_ms: None });
        MembershipStep::Tell(MemberEvent::Joined {
            number,
            peer: Peer { node, boot: Some(boot), address: data.tcp },
            rdma: data.rdma,
        })
    }

    /// Removes the member at an endpoint, if there is one. The endpoint goes too unless its address is
    /// listed.
    fn vacate(&mut self, now_ms: u64, endpoint: MemberEndpoint, why: Parting) -> Vec<MembershipStep> {
        let Some(place) = self.places.get_mut(&endpoint) else { return Vec::new() };
        let EndpointOccupant::Member(FollowedMember { number, .. }) = place.found else { return Vec::new() };
        place.found = EndpointOccupant::Nobody(Vacancy::since(now_ms));
        let left = MembershipStep::Tell(MemberEvent::Left { number, why });
        let listed = place.listed_address().is_some_and(|address| self.lists(address));
        let gone = (!listed).then(|| self.close_endpoint(endpoint));
        [left].into_iter().chain(gone).collect()
    }

    fn close_endpoint(&mut self, endpoint: MemberEndpoint) -> MembershipStep {
        self.places.remove(&endpoint);
        MembershipStep::Unfollow(endpoint)
    }
}

fn full(node: &NodeId) -> String {
    format!(
        "{node} is not followed, because a mesh has at most {MEMBERS_MAX} nodes: give each part a mesh of its own"
    )
}

#[cfg(test)]
mod tests;
