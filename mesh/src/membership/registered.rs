//! Registrations in etcd: each is an endpoint, and its node is a member for as long as it is registered.

use std::collections::HashSet;

use super::{Endpoint, MEMBERS_MAX, Membership, News, Origin, Parting, Registration, Step, full};
use crate::transport::NodeId;

// === impl Membership: registrations ===

impl Membership {
    /// Replaces all registrations. They may be older than the known ones, if etcd was restored from a backup.
    pub fn registered(&mut self, all: Vec<Registration>) -> Vec<Step> {
        for one in &all {
            if let Some((_, known)) = self.registration(&one.identity.node) {
                known.created = known.created.min(one.created);
            }
        }
        let names: HashSet<_> = all.iter().map(|one| one.identity.node.clone()).collect();
        let gone = self.members().filter(|(_, member)| !names.contains(&member.identity.node));
        let gone: Vec<_> = gone.map(|(endpoint, _)| endpoint).collect();
        let mut steps: Vec<_> =
            gone.into_iter().flat_map(|endpoint| self.vacate(0, endpoint, Parting::Unregistered)).collect();
        steps.extend(all.into_iter().flat_map(|one| self.put(one)));
        steps
    }

    /// Adds or updates a registration.
    pub fn put(&mut self, one: Registration) -> Vec<Step> {
        let node = &one.identity.node;
        if *node == self.own.0 {
            return Vec::new();
        }
        let mut steps = Vec::new();
        if let Some((endpoint, known)) = self.registration(node) {
            let moved = (&known.identity, known.control) != (&one.identity, one.control);
            if known.created > one.created {
                return steps;
            }
            if !moved {
                known.created = one.created;
                return steps;
            }
            steps.extend(self.vacate(0, endpoint, Parting::Restarted));
        }
        if self.places.len() >= MEMBERS_MAX {
            steps.push(Step::Tell(News::Note(full(node))));
            return steps;
        }
        let identity = one.identity.clone();
        let follow = self.open(0, Origin::Registered(one));
        steps.push(self.join(Endpoint(self.endpoints), identity));
        steps.push(follow);
        steps
    }

    /// Removes a registration that ended at this revision.
    pub fn delete(&mut self, node: &NodeId, revision: i64) -> Vec<Step> {
        match self.registration(node) {
            Some((endpoint, known)) if known.created < revision => {
                self.vacate(0, endpoint, Parting::Unregistered)
            }
            _ => Vec::new(),
        }
    }

    fn registration(&mut self, node: &NodeId) -> Option<(Endpoint, &mut Registration)> {
        self.places.iter_mut().find_map(|(endpoint, place)| match &mut place.origin {
            Origin::Registered(one) if one.identity.node == *node => Some((*endpoint, one)),
            _ => None,
        })
    }
}
