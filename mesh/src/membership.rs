//! Who is a member: pure. Events come in, what follows from them comes out, and time is an argument.
//!
//! A member is one life of a node, under a number that is used once. It sits on a seat: an address that was listed, on which
//! one life after the other may sit, or one registration in etcd. Seats are what is followed.
//!
//! - No two members have one node's name.
//! - A registration is known by the revision that created it: an older one than the known is not believed.
//! - Who is registered is a member until the registration ends, whether its stream is up or not. Who is listed becomes one
//!   when its stream says who it is, and is one no more after long silence.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::net::SocketAddr;

use crate::digest::Change;
use crate::directory::Filter;
use crate::transport::{BootId, NodeId, Peer, PeerNumber};

/// Members that a node knows of, and the most that it serves: each costs a stream, its filter and 256 KiB.
pub const MEMBERS_MAX: usize = 1024;

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
    Snapshot { number: PeerNumber, filter: Filter },
    /// What has changed since.
    Changes { number: PeerNumber, changes: Vec<Change> },
    /// Nothing is heard of a member at present: what it was known to keep stays in use until it is heard of again or
    /// [`News::Left`].
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

/// A seat at the table: what is followed. Used once.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Seat(pub u32);

#[derive(Debug)]
pub enum Step {
    Tell(News),
    /// Follow who is at this address.
    Follow(Seat, String),
    Unfollow(Seat),
}

#[derive(Debug)]
pub struct Membership {
    own: (NodeId, BootId),
    gone_ms: u64,
    places: BTreeMap<Seat, Place>,
    seats: u32,
    numbers: u32,
}

#[derive(Debug)]
struct Place {
    origin: Origin,
    member: Option<Member>,
}

#[derive(Debug)]
enum Origin {
    Listed(String),
    Registered(Registration),
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
            Self::Silent => "nothing was heard of it for long",
        })
    }
}

// === impl Membership ===

impl Membership {
    /// A table at which nobody sits. A listed member is left after `gone_ms` of silence.
    pub fn new(own: (NodeId, BootId), gone_ms: u64) -> Self {
        Self { own, gone_ms, places: BTreeMap::new(), seats: 0, numbers: 0 }
    }

    /// The member on a seat.
    pub fn number(&self, seat: Seat) -> Option<PeerNumber> {
        Some(self.places.get(&seat)?.member.as_ref()?.number)
    }

    /// Where a member sits.
    pub fn seat(&self, number: PeerNumber) -> Option<Seat> {
        self.seats().find(|(_, member)| member.number == number).map(|(seat, _)| seat)
    }

    /// Whether this life of a node is heard of: that of a member whose stream is up, or this node's own.
    pub fn knows(&self, node: &str, boot: u64) -> bool {
        let is = |(name, life): (&NodeId, BootId)| name.as_str() == node && life.0.get() == boot;
        let up =
            |member: &Member| member.down_ms.is_none() && is((&member.identity.node, member.identity.boot));
        is((&self.own.0, self.own.1)) || self.seats().any(|(_, member)| up(member))
    }

    fn seats(&self) -> impl Iterator<Item = (Seat, &Member)> {
        self.places.iter().filter_map(|(seat, place)| Some((*seat, place.member.as_ref()?)))
    }

    // === streams ===

    /// The stream of a seat is up, and says who is there. `Err` is why it is not wanted, with the remedy.
    pub fn hello(&mut self, seat: Seat, says: &Identity) -> Result<Vec<Step>, String> {
        let Some(place) = self.places.get_mut(&seat) else { return Ok(vec![Step::Unfollow(seat)]) };
        if let Some(member) = place.member.as_mut().filter(|member| member.identity == *says) {
            member.down_ms = None;
            return Ok(Vec::new());
        }
        match &place.origin {
            Origin::Registered(registration) => Err(format!(
                "{} is registered at {}, but {} answers there{}",
                registration.identity.node,
                registration.control,
                says.node,
                if says.node == registration.identity.node { " in another life" } else { "" },
            )),
            Origin::Listed(address) if says.node == self.own.0 => {
                if says.boot != self.own.1 {
                    return Err(twins(&says.node, address));
                }
                Ok(self.clear(seat, Parting::Restarted))
            }
            Origin::Listed(address) => {
                let address = address.clone();
                self.sit(seat, &address, says)
            }
        }
    }

    /// A node that was not known so sits down on a listed seat.
    fn sit(&mut self, seat: Seat, address: &str, says: &Identity) -> Result<Vec<Step>, String> {
        let mut steps = Vec::new();
        let other = self.seats().find(|(at, member)| *at != seat && member.identity.node == says.node);
        if let Some((at, member)) = other {
            if member.down_ms.is_none() {
                return Err(if member.identity.boot == says.boot {
                    format!("{} is listed twice, once as {address}: list it once", says.node)
                } else {
                    twins(&says.node, address)
                });
            }
            steps.extend(self.rise(at, Parting::Restarted));
        }
        steps.extend(self.rise(seat, Parting::Restarted));
        steps.push(self.join(seat, says.clone()));
        Ok(steps)
    }

    /// The stream of a seat broke, or was never up.
    pub fn down(&mut self, now_ms: u64, seat: Seat) -> Option<Step> {
        let member = self.places.get_mut(&seat)?.member.as_mut()?;
        let (first, number) = (member.down_ms.is_none(), member.number);
        member.down_ms.get_or_insert(now_ms);
        first.then_some(Step::Tell(News::Stale { number }))
    }

    pub fn tick(&mut self, now_ms: u64) -> Vec<Step> {
        let listed = |seat: &Seat| matches!(self.places[seat].origin, Origin::Listed(_));
        let long = |member: &Member| member.down_ms.is_some_and(|since| now_ms >= since + self.gone_ms);
        let gone = self.seats().filter(|(seat, member)| listed(seat) && long(member));
        let gone: Vec<_> = gone.map(|(seat, _)| seat).collect();
        gone.into_iter().filter_map(|seat| self.rise(seat, Parting::Silent)).collect()
    }

    // === the static list ===

    /// Who is listed, once.
    pub fn listed(&mut self, addresses: &[String]) -> Vec<Step> {
        let mut seen = HashSet::new();
        let addresses = addresses.iter().filter(|address| seen.insert(address.as_str()));
        addresses.map(|address| self.seat_for(Origin::Listed(address.clone()))).collect()
    }

    // === etcd ===

    /// All registrations there are.
    pub fn registered(&mut self, all: Vec<Registration>) -> Vec<Step> {
        let names: HashSet<_> = all.iter().map(|one| one.identity.node.clone()).collect();
        let gone = self.seats().filter(|(_, member)| !names.contains(&member.identity.node));
        let gone: Vec<_> = gone.map(|(seat, _)| seat).collect();
        let mut steps: Vec<_> =
            gone.into_iter().flat_map(|seat| self.clear(seat, Parting::Unregistered)).collect();
        steps.extend(all.into_iter().flat_map(|one| self.put(one)));
        steps
    }

    /// A registration came to be, or was written anew.
    pub fn put(&mut self, one: Registration) -> Vec<Step> {
        let node = &one.identity.node;
        if *node == self.own.0 {
            return Vec::new();
        }
        let mut steps = Vec::new();
        if let Some((seat, known)) = self.registration(node) {
            let moved = (&known.identity, known.control) != (&one.identity, one.control);
            if known.created > one.created {
                return steps;
            }
            if !moved {
                known.created = one.created;
                return steps;
            }
            steps.extend(self.clear(seat, Parting::Restarted));
        }
        if self.places.len() >= MEMBERS_MAX {
            let text = format!("{node} is not followed: a mesh has at most {MEMBERS_MAX} nodes");
            steps.push(Step::Tell(News::Note(text)));
            return steps;
        }
        let identity = one.identity.clone();
        let follow = self.seat_for(Origin::Registered(one));
        steps.push(self.join(Seat(self.seats), identity));
        steps.push(follow);
        steps
    }

    /// A registration has ended, at this revision.
    pub fn delete(&mut self, node: &NodeId, revision: i64) -> Vec<Step> {
        match self.registration(node) {
            Some((seat, known)) if known.created < revision => self.clear(seat, Parting::Unregistered),
            _ => Vec::new(),
        }
    }

    fn registration(&mut self, node: &NodeId) -> Option<(Seat, &mut Registration)> {
        self.places.iter_mut().find_map(|(seat, place)| match &mut place.origin {
            Origin::Registered(one) if one.identity.node == *node => Some((*seat, one)),
            _ => None,
        })
    }

    // === seats ===

    fn seat_for(&mut self, origin: Origin) -> Step {
        self.seats += 1;
        let seat = Seat(self.seats);
        let address = match &origin {
            Origin::Listed(address) => address.clone(),
            Origin::Registered(one) => one.control.to_string(),
        };
        self.places.insert(seat, Place { origin, member: None });
        Step::Follow(seat, address)
    }

    fn join(&mut self, seat: Seat, identity: Identity) -> Step {
        self.numbers += 1;
        let number = PeerNumber(self.numbers);
        let Identity { node, boot, data } = identity.clone();
        let place = self.places.get_mut(&seat).expect("who joins sits");
        place.member = Some(Member { number, identity, down_ms: None });
        Step::Tell(News::Joined {
            number,
            peer: Peer { node, boot: Some(boot), address: data.tcp },
            rdma: data.rdma,
        })
    }

    /// The member on a seat is one no more; the seat stays.
    fn rise(&mut self, seat: Seat, why: Parting) -> Option<Step> {
        let member = self.places.get_mut(&seat)?.member.take()?;
        Some(Step::Tell(News::Left { number: member.number, why }))
    }

    /// The seat goes with its member.
    fn clear(&mut self, seat: Seat, why: Parting) -> Vec<Step> {
        let left = self.rise(seat, why);
        self.places.remove(&seat);
        left.into_iter().chain([Step::Unfollow(seat)]).collect()
    }
}

fn twins(node: &NodeId, address: &str) -> String {
    format!("two sidecars have the name {node}, one of them at {address}: give each its own --node-id")
}

#[cfg(test)]
mod tests;
