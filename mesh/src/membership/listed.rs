//! Listed names: each of their addresses is an endpoint.

use std::collections::BTreeSet;
use std::mem::discriminant;
use std::net::SocketAddr;

use super::{
    ENDPOINTS_MAX, EndpointOccupant, EndpointPlace, FollowFailure, MemberEndpoint, MemberEvent, Membership,
    MembershipStep, Origin, Parting, Vacancy,
};
use crate::transport::NodeId;

// === impl Vacancy ===

impl Vacancy {
    pub(super) fn since(now_ms: u64) -> Self {
        Self { since_ms: now_ms, why: None, is_reported: false }
    }

    /// Records a failed attempt.
    pub(super) fn fail(&mut self, now_ms: u64, why: &FollowFailure) {
        if self.why.as_ref().is_some_and(|before| discriminant(before) != discriminant(why)) {
            // The operator's note, sent or due, has another reason by now.
            (self.since_ms, self.is_reported) = (now_ms, false);
        }
        self.why = Some(why.clone());
    }

    /// True if this is a second address of a member, so no node is missing here.
    pub(super) fn is_spare(&self) -> bool {
        matches!(self.why, Some(FollowFailure::Elsewhere(_)))
    }

    /// True if this node answered here while it was followed at another endpoint.
    pub(super) fn waits_for(&self, node: &NodeId) -> bool {
        matches!(&self.why, Some(FollowFailure::Elsewhere(of) | FollowFailure::Twin(of, _)) if of == node)
    }
}

// === impl Membership: listed names ===

impl Membership {
    /// Sets the addresses of a listed name; an IP address is a name with itself as its address. Addresses of
    /// this node are tried again when the addresses of their name change. Addresses without a name are closed
    /// at once, but members there stay until they are silent.
    pub fn resolved(
        &mut self,
        now_ms: u64,
        name: &str,
        addresses: BTreeSet<SocketAddr>,
    ) -> Vec<MembershipStep> {
        let changed = self.names.get(name) != Some(&addresses);
        let mut steps = Vec::new();
        for (endpoint, address, _) in self.listed().filter(|(.., place)| changed && place.is_own()) {
            if addresses.contains(&address) {
                steps.extend([
                    MembershipStep::Unfollow(endpoint),
                    MembershipStep::Follow(endpoint, address.to_string()),
                ]);
            }
        }
        self.names.insert(name.to_owned(), addresses);
        let gone =
            self.listed().filter(|(_, address, place)| place.member().is_none() && !self.lists(*address));
        let gone: Vec<MemberEndpoint> = gone.map(|(endpoint, ..)| endpoint).collect();
        steps.extend(gone.into_iter().map(|endpoint| self.close_endpoint(endpoint)));
        let (new, left_out) = self.open_listed(now_ms);
        steps.extend(new);
        if changed && left_out > 0 {
            let text = format!(
                "{left_out} addresses are not followed, of '{name}' among others, because the limit is {ENDPOINTS_MAX}: \
                 pass --peer names with fewer addresses, and give each part a mesh of its own"
            );
            steps.push(MembershipStep::Tell(MemberEvent::Note(text)));
        }
        steps
    }

    /// Removes listed members after `gone_ms` (30 s) of silence. Notes once each endpoint without a member for
    /// as long.
    pub fn tick(&mut self, now_ms: u64) -> Vec<MembershipStep> {
        let gone_ms = self.gone_ms;
        let long = |since_ms: u64| now_ms >= since_ms.saturating_add(gone_ms);
        let silent =
            |place: &EndpointPlace| place.member().is_some_and(|member| member.down_ms.is_some_and(long));
        let gone: Vec<MemberEndpoint> =
            self.listed().filter(|(.., place)| silent(place)).map(|(endpoint, ..)| endpoint).collect();
        let mut steps: Vec<MembershipStep> =
            gone.into_iter().flat_map(|endpoint| self.vacate(now_ms, endpoint, Parting::Silent)).collect();
        for place in self.places.values_mut() {
            let (Origin::Listed(address), EndpointOccupant::Nobody(vacancy)) =
                (&place.origin, &mut place.found)
            else {
                continue;
            };
            if !vacancy.is_reported && !vacancy.is_spare() && long(vacancy.since_ms) {
                vacancy.is_reported = true;
                let names: Vec<&str> = self
                    .names
                    .iter()
                    .filter(|(_, it)| it.contains(address))
                    .map(|(name, _)| &**name)
                    .collect();
                steps.push(MembershipStep::Tell(MemberEvent::Note(empty(
                    *address,
                    &names.join(", "),
                    gone_ms,
                    vacancy,
                ))));
            }
        }
        steps
    }

    /// Endpoints without a member where a node is expected.
    pub fn empty(&self) -> usize {
        self.vacancies().filter(|vacancy| !vacancy.is_spare()).count()
    }

    /// Endpoints among which the directory's memory is divided: those with a member, and those still expected
    /// to get one.
    pub fn sharing(&self) -> usize {
        let expected = self.vacancies().filter(|vacancy| !vacancy.is_spare() && !vacancy.is_reported);
        self.members().count() + expected.count()
    }

    fn vacancies(&self) -> impl Iterator<Item = &Vacancy> {
        self.places.values().filter_map(|place| match &place.found {
            EndpointOccupant::Nobody(vacancy) => Some(vacancy),
            EndpointOccupant::Own | EndpointOccupant::Member(_) => None,
        })
    }

    pub(super) fn listed(&self) -> impl Iterator<Item = (MemberEndpoint, SocketAddr, &EndpointPlace)> {
        self.places.iter().filter_map(|(endpoint, place)| Some((*endpoint, place.listed_address()?, place)))
    }

    pub(super) fn lists(&self, address: SocketAddr) -> bool {
        self.names.values().any(|addresses| addresses.contains(&address))
    }

    /// Makes endpoints of new listed addresses. Returns the steps, and how many addresses had no room.
    fn open_listed(&mut self, now_ms: u64) -> (Vec<MembershipStep>, usize) {
        let known: BTreeSet<SocketAddr> = self.listed().map(|(_, address, _)| address).collect();
        let all: BTreeSet<SocketAddr> = self.names.values().flatten().copied().collect();
        let new: Vec<SocketAddr> = all.difference(&known).copied().collect();
        let room = ENDPOINTS_MAX.saturating_sub(self.places.len()).min(new.len());
        let steps = new[..room].iter().map(|address| self.open_endpoint(now_ms, Origin::Listed(*address)));
        (steps.collect(), new.len() - room)
    }
}

fn empty(address: SocketAddr, names: &str, gone_ms: u64, vacancy: &Vacancy) -> String {
    let why = vacancy.why.as_ref().map_or_else(|| "no answer yet".to_owned(), FollowFailure::to_string);
    format!(
        "{address} (--peer {names}) has had no member for {} s: {why}. Check that a sidecar has --mesh-listen {address}, that \
         its port is open, and that both nodes have the same --mesh-name, certificates of one authority and the same release",
        gone_ms / 1000
    )
}
