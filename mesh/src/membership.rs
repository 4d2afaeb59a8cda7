//! Who is a member: pure. Events come in, what follows from them comes out, and time is an argument.
//!
//! A member is one life of a node, under a number that is used once. It is met at an endpoint: an address that a listed name
//! has, where one life after the other may answer, or one registration in etcd. Endpoints are what is followed.
//!
//! - No two members have one node's name: a node that answers at two addresses is a member at one of them.
//! - A registration is known by the revision that created it: an older one than the known is not believed.
//! - Who is registered is a member until the registration ends, whether its stream is up or not. Who is listed becomes one
//!   when its stream says who it is, and is one no more after long silence.
//! - An address that is listed no more stays an endpoint for as long as it has a member.

mod listed;
mod registered;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;

use crate::backlog::Room;
use crate::digest::{Change, Digest};
use crate::directory::Filter;
use crate::refusals::Reason;
use crate::transport::{BootId, MEMBERS_MAX, NodeId, Peer, PeerNumber};

/// Addresses that are followed or tried: those of all members and, while pods are replaced, an old one beside each.
pub const ENDPOINTS_MAX: usize = 2 * MEMBERS_MAX;

/// Where a node serves blocks.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct DataAddresses {
    pub tcp: SocketAddr,
    /// Where RDMA is arranged, if the node has NICs for it.
    pub rdma: Option<SocketAddr>,
}

/// What becomes of the mesh. It is told on the thread of [`crate::control::Control`] and must not wait.
#[derive(Debug)]
pub enum News {
    /// A member, in one life of it. A number is used once.
    Joined {
        /// Its name from now on.
        number: PeerNumber,
        peer: Peer,
        /// Where RDMA is arranged with it, if it has NICs for it.
        rdma: Option<SocketAddr>,
    },
    /// A member no more: it must be cut off. Nothing is told of the number any more.
    Left { number: PeerNumber, why: Parting },
    /// All that a member keeps.
    Snapshot { number: PeerNumber, filter: Filter, room: Room },
    /// What has changed since.
    Changes { number: PeerNumber, changes: Vec<Change>, room: Room },
    /// All that a member promises, in place of what it did before.
    Promises { number: PeerNumber, promises: Vec<Digest>, room: Room },
    /// Nothing is heard of a member at present: what it was known to keep stays in use until it is heard of again or
    /// [`News::Left`]. What it promised is void.
    Stale { number: PeerNumber },
    /// Something an operator should know.
    Note(String),
}

/// What a node says of itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Identity {
    pub node: NodeId,
    pub boot: BootId,
    /// Where it serves blocks.
    pub data: DataAddresses,
}

/// A registration in etcd.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Registration {
    pub identity: Identity,
    /// Where it is followed.
    pub control: SocketAddr,
    /// The revision at which the key came to be: a later life of a node has a later one.
    pub created: i64,
}

/// Why a member is one no more.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Parting {
    /// Its registration has ended: it said so, or its lease ran out.
    Unregistered,
    /// The node lives again, or moved.
    Restarted,
    /// It is only listed, and nothing was heard of it for long.
    Silent,
}

/// What is followed. Its number is used once.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Endpoint(pub u32);

/// Why nobody is followed at an endpoint at present.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Failure {
    /// Nobody was reached, or nobody of this mesh. With the remedy where there is one.
    Unreached(String),
    /// Another life of a node than the one that is followed elsewhere. Of one that has moved, that stream breaks soon.
    Twin(NodeId, SocketAddr),
    /// A member answered that is followed at another address.
    Elsewhere(NodeId),
}

#[derive(Debug)]
pub enum Step {
    Tell(News),
    /// Follow who is at this address.
    Follow(Endpoint, String),
    Unfollow(Endpoint),
    /// Dial at once who is not followed: a node that was followed elsewhere may answer there.
    Retry,
}

#[derive(Debug)]
pub struct Membership {
    own: (NodeId, BootId),
    gone_ms: u64,
    /// The addresses that each listed name has.
    names: BTreeMap<String, BTreeSet<SocketAddr>>,
    places: BTreeMap<Endpoint, Place>,
    endpoints: u32,
    numbers: u32,
}

/// An endpoint, and who is there.
#[derive(Debug)]
struct Place {
    origin: Origin,
    found: Found,
}

#[derive(Debug)]
enum Origin {
    Listed(SocketAddr),
    Registered(Registration),
}

#[derive(Debug)]
enum Found {
    Nobody(Vacancy),
    /// This node itself, when it was last tried.
    Own,
    Member(Member),
}

/// That an endpoint has no member.
#[derive(Debug)]
struct Vacancy {
    since_ms: u64,
    /// Why the last attempt failed.
    why: Option<Failure>,
    /// An operator was told.
    told: bool,
}

#[derive(Debug)]
struct Member {
    number: PeerNumber,
    identity: Identity,
    /// When its stream broke.
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

// === impl Failure ===

impl Failure {
    /// Why a node that has said who it is does not become a member.
    pub(crate) fn reason(&self) -> Option<Reason> {
        match self {
            Self::Unreached(_) => Some(Reason::NotMember),
            Self::Twin(..) => Some(Reason::Name),
            // It is one already.
            Self::Elsewhere(_) => None,
        }
    }
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Unreached(why)
    }
}

impl fmt::Display for Failure {
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
    /// Where who is there is followed.
    fn address(&self) -> String {
        match self {
            Self::Listed(address) => address.to_string(),
            Self::Registered(one) => one.control.to_string(),
        }
    }
}

// === impl Place ===

impl Place {
    fn member(&self) -> Option<&Member> {
        match &self.found {
            Found::Member(member) => Some(member),
            Found::Nobody(_) | Found::Own => None,
        }
    }

    fn is_own(&self) -> bool {
        matches!(self.found, Found::Own)
    }

    /// The address, if it is listed or was.
    fn address(&self) -> Option<SocketAddr> {
        match self.origin {
            Origin::Listed(address) => Some(address),
            Origin::Registered(_) => None,
        }
    }

    fn member_mut(&mut self) -> Option<&mut Member> {
        match &mut self.found {
            Found::Member(member) => Some(member),
            Found::Nobody(_) | Found::Own => None,
        }
    }
}

// === impl Membership ===

impl Membership {
    /// A mesh of this node alone. A listed member is left after `gone_ms` of silence.
    pub fn new(own: (NodeId, BootId), gone_ms: u64) -> Self {
        let (names, places) = Default::default();
        Self { own, gone_ms, names, places, endpoints: 0, numbers: 0 }
    }

    /// The member at an endpoint.
    pub fn number(&self, endpoint: Endpoint) -> Option<PeerNumber> {
        Some(self.places.get(&endpoint)?.member()?.number)
    }

    /// Where a member is followed.
    pub fn endpoint(&self, number: PeerNumber) -> Option<Endpoint> {
        self.members().find(|(_, member)| member.number == number).map(|(endpoint, _)| endpoint)
    }

    /// Whether this life of a node is heard of: that of a member whose stream is up, or this node's own.
    pub fn knows(&self, node: &str, boot: u64) -> bool {
        let is = |(name, life): (&NodeId, BootId)| name.as_str() == node && life.0.get() == boot;
        let up =
            |member: &Member| member.down_ms.is_none() && is((&member.identity.node, member.identity.boot));
        is((&self.own.0, self.own.1)) || self.members().any(|(_, member)| up(member))
    }

    /// The live holder of a name, claimed by another life: a member with its address, or this node.
    pub fn name_holder(&self, node: &str, boot: u64) -> Option<String> {
        let (own, own_boot) = &self.own;
        if own.as_str() == node && own_boot.0.get() != boot {
            return Some(format!("the node {own} itself"));
        }
        let holds = |member: &Member| {
            let Identity { node: name, boot: life, .. } = &member.identity;
            member.down_ms.is_none() && name.as_str() == node && life.0.get() != boot
        };
        let holder = self.places.values().find(|place| place.member().is_some_and(holds))?;
        Some(format!("the live member at {}", holder.origin.address()))
    }

    /// Members: the name and life of each, and where it is followed.
    pub fn followed(&self) -> Vec<(NodeId, BootId, String)> {
        let member = |place: &Place| {
            let identity = &place.member()?.identity;
            Some((identity.node.clone(), identity.boot, place.origin.address()))
        };
        self.places.values().filter_map(member).collect()
    }

    fn members(&self) -> impl Iterator<Item = (Endpoint, &Member)> {
        self.places.iter().filter_map(|(endpoint, place)| Some((*endpoint, place.member()?)))
    }

    // === streams ===

    /// The stream of an endpoint is up, and says who is there. `Err` is why it is not wanted.
    pub fn hello(&mut self, now_ms: u64, endpoint: Endpoint, says: &Identity) -> Result<Vec<Step>, Failure> {
        let Some(place) = self.places.get_mut(&endpoint) else { return Ok(vec![Step::Unfollow(endpoint)]) };
        if let Some(member) = place.member_mut().filter(|member| member.identity == *says) {
            member.down_ms = None;
            return Ok(Vec::new());
        }
        match &place.origin {
            Origin::Registered(registration) => Err(Failure::Unreached(format!(
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

    /// Another life than the known answers at a listed address.
    fn met(
        &mut self,
        now_ms: u64,
        (endpoint, address): (Endpoint, SocketAddr),
        says: &Identity,
    ) -> Result<Vec<Step>, Failure> {
        let own = says.node == self.own.0;
        let other = self.members().find(|(at, member)| *at != endpoint && member.identity.node == says.node);
        let up = other.filter(|(_, member)| member.down_ms.is_none()).map(|(_, member)| &member.identity);
        if up == Some(says) {
            return Err(Failure::Elsewhere(says.node.clone()));
        }
        if up.is_some() || own && says.boot != self.own.1 {
            return Err(Failure::Twin(says.node.clone(), address));
        }
        // Of one that has moved, the member at the other address is the same node in an earlier stream of it.
        let moved = other.map(|(at, _)| at);
        if moved.is_none() && !own && self.number(endpoint).is_none() && self.members().count() >= MEMBERS_MAX
        {
            return Err(Failure::Unreached(full(&says.node)));
        }
        let left = moved.into_iter().chain([endpoint]);
        let mut steps: Vec<Step> = left.flat_map(|at| self.vacate(now_ms, at, Parting::Restarted)).collect();
        match self.places.get_mut(&endpoint) {
            // It was no more than the address of the member that has left.
            None => {}
            Some(place) if own => {
                place.found = Found::Own;
                steps.push(Step::Unfollow(endpoint));
            }
            Some(_) => steps.push(self.join(endpoint, says.clone())),
        }
        Ok(steps)
    }

    /// Nobody is followed at an endpoint at present: its stream broke, or was never up.
    pub fn down(&mut self, now_ms: u64, endpoint: Endpoint, why: &Failure) -> Vec<Step> {
        let Some(place) = self.places.get_mut(&endpoint) else { return Vec::new() };
        match &mut place.found {
            Found::Own => {
                place.found = Found::Nobody(Vacancy::since(now_ms));
                self.down(now_ms, endpoint, why)
            }
            Found::Nobody(vacancy) => {
                vacancy.fail(now_ms, why);
                Vec::new()
            }
            Found::Member(member) if member.down_ms.is_some() => Vec::new(),
            Found::Member(member) => {
                member.down_ms = Some(now_ms);
                let (number, node) = (member.number, member.identity.node.clone());
                let waits = |place: &Place| matches!(&place.found, Found::Nobody(it) if it.waits_for(&node));
                let retry = self.places.values().any(waits).then_some(Step::Retry);
                [Step::Tell(News::Stale { number })].into_iter().chain(retry).collect()
            }
        }
    }

    // === endpoints ===

    fn open(&mut self, now_ms: u64, origin: Origin) -> Step {
        self.endpoints += 1;
        let endpoint = Endpoint(self.endpoints);
        let address = origin.address();
        self.places.insert(endpoint, Place { origin, found: Found::Nobody(Vacancy::since(now_ms)) });
        Step::Follow(endpoint, address)
    }

    fn join(&mut self, endpoint: Endpoint, identity: Identity) -> Step {
        self.numbers += 1;
        let number = PeerNumber(self.numbers);
        let Identity { node, boot, data } = identity.clone();
        let place = self.places.get_mut(&endpoint).expect("who joins is at an endpoint");
        place.found = Found::Member(Member { number, identity, down_ms: None });
        Step::Tell(News::Joined {
            number,
            peer: Peer { node, boot: Some(boot), address: data.tcp },
            rdma: data.rdma,
        })
    }

    /// The member at an endpoint, if there is one, is one no more. The endpoint goes too unless its address is listed.
    fn vacate(&mut self, now_ms: u64, endpoint: Endpoint, why: Parting) -> Vec<Step> {
        let Some(place) = self.places.get_mut(&endpoint) else { return Vec::new() };
        let Found::Member(Member { number, .. }) = place.found else { return Vec::new() };
        place.found = Found::Nobody(Vacancy::since(now_ms));
        let left = Step::Tell(News::Left { number, why });
        let listed = place.address().is_some_and(|address| self.lists(address));
        let gone = (!listed).then(|| self.close(endpoint));
        [left].into_iter().chain(gone).collect()
    }

    fn close(&mut self, endpoint: Endpoint) -> Step {
        self.places.remove(&endpoint);
        Step::Unfollow(endpoint)
    }
}

fn full(node: &NodeId) -> String {
    format!(
        "{node} is not followed, because a mesh has at most {MEMBERS_MAX} nodes: give each part a mesh of its own"
    )
}

#[cfg(test)]
mod tests;
