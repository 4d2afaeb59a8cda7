//! A router's knowledge of the members of a mesh: their engines, and the blocks in their memory. No I/O.
//!
//! A filter is always a little late and sometimes wrong: an answer here decides the way of a prompt, and never the blocks of an engine.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mesh::control::{AnnouncedEngine, EngineUse, MemberEvent, NamespacesAnswer, NodeNamespace};
use mesh::digest::Digest;
use mesh::directory::{Directory, DirectoryConfig};
use mesh::transport::{NodeId, PeerNumber};
use shm_protocol::key::{BlockHash, Chain, GROUP, NamespaceDigest, read_block_tokens};
use shm_protocol::namespace::{self, Facts};

use super::address::EngineUrl;
use super::affinity::HeldPrompt;
use super::listed::EngineList;

/// The most namespaces of a probe, those with the most blocks: each takes a digest for every block of the prompt.
const SPACES_MAX: usize = 8;
/// The facts behind a prompt's keys.
const KEY_FACTS: [&str; 4] = ["hash_algorithm", "none_hash", "extra_keys", "block_tokens"];

/// All members, and the namespaces of their blocks.
#[derive(Debug)]
pub(super) struct MeshMembers {
    directory: Directory,
    members: BTreeMap<PeerNumber, MeshMember>,
    spaces: Arc<[PromptSpace]>,
    /// Members with a filter too small for their blocks.
    overfull: BTreeSet<PeerNumber>,
    /// True if the certificates of engines with https can be checked.
    has_authorities: bool,
}

#[derive(Debug)]
struct MeshMember {
    node: NodeId,
    engines: Vec<(EngineUrl, EngineUse)>,
}

/// A namespace of prompts with known facts.
#[derive(Clone, Debug)]
pub(super) struct PromptSpace {
    digest: NamespaceDigest,
    facts: Arc<Facts>,
    blocks: u64,
}

/// A prompt's blocks in one namespace.
#[derive(Debug)]
struct SpaceBlocks {
    digests: Vec<Digest>,
    block_tokens: u64,
}

/// A prompt's blocks in each namespace.
#[derive(Debug)]
pub(super) struct PromptBlocks {
    tokens: u64,
    spaces: Vec<SpaceBlocks>,
}

// === impl MeshMembers ===

impl MeshMembers {
    pub(super) fn new(has_authorities: bool) -> Self {
        let (members, overfull, spaces) = (BTreeMap::new(), BTreeSet::new(), Arc::new([]));
        let directory = Directory::new(DirectoryConfig::default());
        Self { directory, members, spaces, overfull, has_authorities }
    }

    /// Applies an event. Returns true if members or engines have changed.
    pub(super) fn apply_event(&mut self, event: MemberEvent) -> bool {
        match event {
            MemberEvent::Joined { number, peer, .. } => {
                tracing::info!(peer = %peer.node, "a member of the mesh joined");
                self.directory.add_peer(number);
                self.members.insert(number, MeshMember { node: peer.node, engines: Vec::new() });
                return true;
            }
            MemberEvent::Greeted { number, engines, .. } => return self.set_engines(number, &engines),
            MemberEvent::Left { number, why } => {
                let peer = self.members.remove(&number).map(|member| member.node.to_string());
                tracing::info!(peer, "a member of the mesh left, and with it its engines: {why}");
                self.directory.remove_peer(number);
                self.overfull.remove(&number);
                return true;
            }
            MemberEvent::Snapshot { number, filter, .. } => self.directory.replace(number, filter),
            MemberEvent::Changes { number, changes, .. } => {
                if !self.directory.apply(number, &changes) {
                    self.overfull.insert(number);
                }
            }
            // The last known blocks and engines stay in use: the router judges an engine by its answers.
            MemberEvent::Stale { .. } | MemberEvent::Promises { .. } => {}
            // Observers are not told of these.
            MemberEvent::Leaving { .. } | MemberEvent::Listed { .. } => {}
            MemberEvent::Note(text) => tracing::warn!("{text}"),
        }
        false
    }

    fn set_engines(&mut self, number: PeerNumber, announced: &[AnnouncedEngine]) -> bool {
        let has_authorities = self.has_authorities;
        let Some(member) = self.members.get_mut(&number) else { return false };
        let usable = |engine: &AnnouncedEngine| {
            let url =
                engine.url.parse::<EngineUrl>().and_then(|url| match url.is_https() && !has_authorities {
                    true => Err(format!(
                        "{url} needs --engine-ca: name a PEM file with the authority of its certificate"
                    )),
                    false => Ok(url),
                });
            let url = url
                .inspect_err(|error| tracing::warn!(peer = %member.node, "an engine is not asked: {error}"));
            Some((url.ok()?, engine.role))
        };
        let engines: Vec<_> = announced.iter().filter_map(usable).collect();
        let has_changed = engines != member.engines;
        member.engines = engines;
        has_changed
    }

    pub(super) fn count_members(&self) -> usize {
        self.members.len()
    }

    /// The engines of all members, each once. An engine of both roles answers, and computes the prompts of its answers.
    pub(super) fn engines(&self) -> EngineList {
        let of = |is_prefill: bool| {
            let all = self.members.values().flat_map(|member| &member.engines);
            let mut urls: Vec<EngineUrl> = Vec::new();
            for (url, _) in all.filter(|(_, role)| (*role == EngineUse::Prefill) == is_prefill) {
                if !urls.contains(url) {
                    urls.push(url.clone());
                }
            }
            urls
        };
        EngineList { prefill: of(true), decode: of(false) }
    }

    /// The members with too small a filter since the last call: their inventories must be requested again.
    pub(super) fn take_overfull(&mut self) -> BTreeSet<PeerNumber> {
        std::mem::take(&mut self.overfull)
    }

    /// Replaces the namespaces by those in the members' answers, if there are any. Namespaces of windows and states have no leading runs.
    pub(super) fn set_namespaces(&mut self, answers: &[NamespacesAnswer]) {
        let mut found: BTreeMap<[u8; 16], PromptSpace> = BTreeMap::new();
        for NodeNamespace { digest, stated, memory_blocks, .. } in
            answers.iter().flat_map(|answer| &answer.namespaces)
        {
            let Some(stated) =
                stated.as_ref().filter(|stated| !namespace::has_parentless_blocks(&stated.facts))
            else {
                continue;
            };
            let (digest, facts) = (*digest, Arc::clone(&stated.facts));
            found.entry(digest.0).or_insert(PromptSpace { digest, facts, blocks: 0 }).blocks += memory_blocks;
        }
        if found.is_empty() {
            return;
        }
        let mut spaces: Vec<PromptSpace> = found.into_values().collect();
        spaces.sort_by_key(|space| std::cmp::Reverse(space.blocks));
        spaces.truncate(SPACES_MAX);
        self.spaces = spaces.into();
    }

    pub(super) fn spaces(&self) -> Arc<[PromptSpace]> {
        Arc::clone(&self.spaces)
    }

    /// Returns the leading tokens of a prompt at each engine, as far as its node keeps them in memory.
    pub(super) fn probe_prompt(&self, prompt: &PromptBlocks) -> HeldPrompt {
        let mut held: Vec<(EngineUrl, u64)> = Vec::new();
        for (number, member) in self.members.iter().filter(|(_, member)| !member.engines.is_empty()) {
            let leading = |space: &SpaceBlocks| {
                self.directory.leading(*number, &space.digests).0 as u64 * space.block_tokens
            };
            let tokens = prompt.spaces.iter().map(leading).max().unwrap_or(0);
            held.extend(member.engines.iter().filter(|_| tokens > 0).map(|(url, _)| (url.clone(), tokens)));
        }
        HeldPrompt { tokens: prompt.tokens, held }
    }
}

// === impl PromptBlocks ===

impl PromptBlocks {
    /// Derives the keys of a prompt in each namespace. Namespaces with equal facts of keys share the hashes.
    pub(super) fn derive_keys(tokens: &[u32], spaces: &[PromptSpace]) -> Self {
        let mut hashed: Vec<(&PromptSpace, Vec<BlockHash>)> = Vec::new();
        let mut blocks = Vec::new();
        for space in spaces {
            let is_alike = |(one, _): &&(&PromptSpace, Vec<BlockHash>)| {
                KEY_FACTS.iter().all(|fact| one.facts.get(*fact) == space.facts.get(*fact))
            };
            if hashed.iter().find(is_alike).is_none() {
                // Some keys can be made by one engine alone.
                let Ok((_, mut chain)) = Chain::of_facts(&space.facts) else { continue };
                chain.append(tokens);
                hashed.push((space, chain.hashes().to_vec()));
            }
            let (Some((_, hashes)), Ok(block_tokens)) =
                (hashed.iter().find(is_alike), read_block_tokens(&space.facts))
            else {
                continue;
            };
            let digests = hashes.iter().map(|hash| Digest::new(&space.digest, GROUP, hash)).collect();
            blocks.push(SpaceBlocks { digests, block_tokens: block_tokens.into() });
        }
        Self { tokens: tokens.len() as u64, spaces: blocks }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use mesh::control::Parting;
    use mesh::control::wire::namespaces::StatedFacts;
    use mesh::digest::DigestChange;
    use mesh::directory::Filter;
    use mesh::transport::{BootId, Peer};
    use shm_protocol::key::{Algorithm, NoneHashRule, none_hash};

    use super::*;

    const BLOCK_TOKENS: u32 = 16;

    fn facts(model: &str) -> Facts {
        let first = none_hash(Algorithm::Sha256Cbor, NoneHashRule::Since029, Some("0")).unwrap();
        let first: String = first.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let facts = [
            ("model", model),
            ("hash_algorithm", "sha256_cbor"),
            ("none_hash", &first),
            ("extra_keys", "tagged"),
            ("block_tokens", &BLOCK_TOKENS.to_string()),
        ];
        facts.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    fn answer(namespaces: Vec<NodeNamespace>) -> NamespacesAnswer {
        NamespacesAnswer { peer: NodeId::new("a").unwrap(), namespaces, missing: None }
    }

    fn namespace_of(facts: Facts, memory_blocks: u64) -> NodeNamespace {
        let digest = namespace::digest_facts(&facts);
        let stated = Some(StatedFacts { facts: Arc::new(facts), block_bytes: 1, shards: 1 });
        NodeNamespace { digest, stated, memory_blocks, disk_blocks: 0 }
    }

    fn joined(number: u32) -> MemberEvent {
        let (node, boot) = (NodeId::new(format!("pod-{number}")).unwrap(), Some(BootId(NonZeroU64::MIN)));
        let peer = Peer { node, boot, address: ([127, 0, 0, 1], 1).into() };
        MemberEvent::Joined { number: PeerNumber(number), peer, rdma: None }
    }

    fn greeted(number: u32, engines: &[&str]) -> MemberEvent {
        let engines = engines.iter().map(|engine| engine.parse().unwrap()).collect();
        MemberEvent::Greeted { number: PeerNumber(number), keeps_asks: true, lists_blocks: false, engines }
    }

    fn urls(urls: &[&str]) -> Vec<EngineUrl> {
        urls.iter().map(|url| url.parse().unwrap()).collect()
    }

    #[test]
    fn engines_come_and_go_with_their_members_and_each_counts_once() {
        let mut members = MeshMembers::new(false);
        assert!(members.apply_event(joined(1)) && members.apply_event(joined(2)));
        assert!(
            members.apply_event(greeted(1, &["http://p:1=prefill", "http://b:1=both", "https://s:1=both"]))
        );
        assert!(members.apply_event(greeted(2, &["http://b:1=both", "http://d:1=decode"])));
        assert!(
            !members.apply_event(greeted(2, &["http://b:1=both", "http://d:1=decode"])),
            "over another stream"
        );
        let expected =
            EngineList { prefill: urls(&["http://p:1"]), decode: urls(&["http://b:1", "http://d:1"]) };
        assert_eq!(members.engines(), expected, "https needs an authority");
        assert!(!members.apply_event(MemberEvent::Stale { number: PeerNumber(1) }));
        assert_eq!(members.engines(), expected, "an engine outlives its sidecar");
        assert!(members.apply_event(MemberEvent::Left { number: PeerNumber(1), why: Parting::Silent }));
        assert_eq!(members.engines().prefill, []);
        assert!(!members.apply_event(greeted(1, &["http://p:1=prefill"])), "it is no member");
    }

    #[test]
    fn a_prompt_is_held_as_far_as_a_filter_says_whatever_namespaces_there_are() {
        let mut members = MeshMembers::new(false);
        members.apply_event(joined(1));
        members.apply_event(greeted(1, &["http://b:1=both"]));
        let tokens: Vec<u32> = (0..200).collect();
        // Random in each process, of states, and of no known facts.
        let random =
            Facts::from_iter(facts("m").into_iter().chain([("none_hash".to_owned(), "random".to_owned())]));
        let unknown = NodeNamespace { stated: None, ..namespace_of(facts("x"), 9) };
        members.set_namespaces(&[answer(vec![
            namespace_of(facts("m"), 5),
            namespace_of(random, 7),
            unknown,
        ])]);
        members.set_namespaces(&[answer(Vec::new())]);
        let blocks = PromptBlocks::derive_keys(&tokens, &members.spaces());
        assert_eq!((members.spaces().len(), blocks.spaces.len(), blocks.tokens), (2, 1, 200));
        let probe = |members: &MeshMembers| members.probe_prompt(&blocks).held;
        assert_eq!(probe(&members), [], "there is no filter yet");
        let digests = &blocks.spaces[0].digests;
        assert_eq!(digests.len(), 12);
        let mut filter = Filter::with_capacity(1000);
        digests[..5].iter().for_each(|digest| assert!(filter.insert(*digest)));
        members.directory.replace(PeerNumber(1), filter);
        let url: EngineUrl = "http://b:1".parse().unwrap();
        assert_eq!(probe(&members), [(url.clone(), 80)]);
        assert!(members.directory.apply(PeerNumber(1), &[DigestChange::Removed(digests[2])]));
        assert_eq!(probe(&members), [(url, 32)]);
    }

    #[test]
    fn the_namespaces_with_the_most_blocks_are_looked_at() {
        let mut members = MeshMembers::new(false);
        let all = (0..20).map(|model| namespace_of(facts(&model.to_string()), model));
        members.set_namespaces(&[answer(all.collect()), answer(vec![namespace_of(facts("3"), 100)])]);
        let blocks: Vec<u64> = members.spaces().iter().map(|space| space.blocks).collect();
        assert_eq!(blocks, [103, 19, 18, 17, 16, 15, 14, 13]);
    }
}
