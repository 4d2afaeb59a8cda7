//! The other pods. They join, leave and die, announce blocks they do not have, send blocks in any order,
//! late, corrupt or not at all, and request blocks themselves. A fetch spoils its slots when it begins and
//! fills each when it ends, so the oracle sees a slot reused too early. Slots read by a peer are checked when
//! the read begins and when it ends.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::sync::atomic::Ordering;

use mesh::digest::{Digest, DigestChange};
use mesh::directory::Filter;
use mesh::listed::BlocksAsk;
use mesh::transport::{Fetch, FetchDone, FetchFault, FetchStage, Label, PeerNumber, StandingTerms};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::pool::SlotRef;
use shm_protocol::region::Region;
use shm_protocol::source::Source;
use sidecar::core::{Action, CopyDirection, CoreEvent, JobEnd, MeshEvent, RankBlock, TierJob};

use super::Life;
use super::disk::words;
use crate::ctx::{Ctx, Micros};
use crate::engine::keys;
use crate::ledger::Form;
use crate::origin::{Origin, WORDS};
use crate::rng::mix_bits;

/// Most other pods.
const PLACES: usize = 3;
/// Moves of the pods in one life: afterwards they only answer.
const MOVES: u64 = 60;
/// More keys than a filter for all blocks has room for.
const FLOOD: u64 = 700;
/// Most blocks of a prompt.
const DEPTH: u32 = 6;

/// A block on its way from a peer.
#[derive(Debug)]
struct Coming {
    ticket: u64,
    index: u32,
    peer: PeerNumber,
    label: Label,
    into: u64,
    due: Micros,
    result: Result<u64, FetchFault>,
}

/// A peer's read: the granted slots, with their labels.
#[derive(Debug)]
struct Reading {
    slots: Vec<(SlotRef, Label)>,
    due: Micros,
}

#[derive(Debug, Default)]
pub(super) struct Mesh {
    /// Members; true: the member has died unnoticed.
    members: [Option<(PeerNumber, bool)>; PLACES],
    numbers: u32,
    coming: Vec<Coming>,
    asked: BTreeMap<u64, Vec<Label>>,
    /// Questions for lists of blocks, not answered so far.
    pub(super) list_asks: Vec<(PeerNumber, BlocksAsk)>,
    /// Asks that may stand until a time.
    standing: BTreeMap<u64, Micros>,
    reading: BTreeMap<u64, Reading>,
    asks: u64,
    moves: u64,
    next_move: Micros,
    /// Blocks announced to the members.
    announced: BTreeSet<Digest>,
    /// The last announced promises: the last keys of the promised prompts.
    promised: Vec<Digest>,
    /// Numbers of asks that have stood here, and of those granted behind their last commit.
    kept: (u64, u64),
    /// Numbers of prefetched blocks, by reason.
    prefetched: [u64; 2],
    /// Bytes of a block of each namespace with an engine.
    sizes: BTreeMap<NamespaceDigest, u32>,
}

fn place(offset: u64) -> RankBlock {
    RankBlock { block: 0, offset }
}

/// True if a peer has a block that it announces.
fn has(peer: PeerNumber, label: &Label) -> bool {
    !mix_bits(Digest::of_label(label).0 ^ u64::from(peer.0)).is_multiple_of(4)
}

// === impl Mesh ===

impl Mesh {
    /// Adds a namespace of an engine, with its block size.
    pub(super) fn know(&mut self, namespace: NamespaceDigest, block_bytes: u64) {
        self.sizes.insert(namespace, u32::try_from(block_bytes).expect("a small block"));
    }

    /// Time of the next event.
    pub(super) fn next_due(&self) -> Option<Micros> {
        let coming = self.coming.iter().map(|coming| coming.due);
        let reading = self.reading.values().map(|reading| reading.due);
        coming.chain(reading).chain((self.moves < MOVES).then_some(self.next_move)).min()
    }

    fn post(&mut self, fetch: Fetch, ctx: &mut Ctx) {
        let member = self.members.iter().flatten().find(|member| member.0 == fetch.peer);
        let alive = member.is_some_and(|(_, dead)| !dead);
        for (index, (label, into)) in (0..).zip(fetch.blocks) {
            let fault = match ctx.rng.below(40) {
                _ if !alive => Some(FetchFault::Timeout(FetchStage::Connect)),
                _ if !has(fetch.peer, &label) => Some(FetchFault::Absent),
                0 => Some(FetchFault::Corrupt),
                1 => Some(FetchFault::Short),
                2 => Some(FetchFault::Peer(ErrorKind::ConnectionReset)),
                _ => None,
            };
            let takes = match fetch.standing {
                // A promised block comes with its commit at the peer, or at the end of the patience.
                Some(terms) if fault == Some(FetchFault::Absent) => u64::from(terms.patience_ms) * 1000,
                Some(_) => ctx.rng.within(10, 60_000),
                None if ctx.rng.one_in(50) => 60_000,
                None => ctx.rng.within(10, 2_000),
            };
            let (ticket, peer, due) = (fetch.ticket, fetch.peer, ctx.now + takes);
            let result = fault.map_or(Ok(Digest::of_label(&label).0), Err);
            self.coming.push(Coming { ticket, index, peer, label, into, due, result });
        }
    }

    /// Ends these blocks soon, mostly as failed.
    fn stop(&mut self, which: impl Fn(&Coming) -> bool, ctx: &mut Ctx) {
        for coming in self.coming.iter_mut().filter(|coming| which(coming)) {
            coming.due = coming.due.min(ctx.now + ctx.rng.below(500));
            // A block with all bytes here may still end well.
            if ctx.rng.one_in(2) {
                coming.result = Err(FetchFault::Stopped);
            }
        }
    }

    pub(super) fn labels(&self) -> Vec<Label> {
        let paths = (1..=DEPTH).flat_map(|depth| (0..1u64 << depth).map(move |bits| (depth, bits)));
        let last = paths.map(|(depth, bits)| {
            let path: Vec<u64> = (0..depth).map(|level| bits >> level & 1).collect();
            *keys(&path).last().expect("a path has a block")
        });
        let hashes: Vec<_> = last.collect();
        let labels = self.sizes.iter().flat_map(|(&namespace, &bytes)| {
            hashes.iter().map(move |&hash| Label { namespace, group: 0, hash, bytes })
        });
        labels.collect()
    }

    /// Makes one random move of the pods.
    fn act(&mut self, ctx: &mut Ctx) -> Option<MeshEvent> {
        self.moves += 1;
        self.next_move = ctx.now + ctx.rng.within(100, 4_000);
        let place = ctx.rng.below(PLACES as u64) as usize;
        let Some((peer, dead)) = self.members[place] else {
            self.numbers += 1;
            self.members[place] = Some((PeerNumber(self.numbers), false));
            return Some(MeshEvent::Joined(PeerNumber(self.numbers)));
        };
        let labels = self.labels();
        match ctx.rng.below(17) {
            0 => {
                self.members[place] = None;
                self.stop(|coming| coming.peer == peer, ctx);
                Some(MeshEvent::Left(peer))
            }
            1 => {
                self.members[place] = Some((peer, true));
                None
            }
            2..5 => {
                let mut filter = Filter::with_capacity(2 * labels.len());
                for label in labels.iter().filter(|_| !ctx.rng.one_in(4)) {
                    assert!(filter.insert(Digest::of_label(label)), "there is room for all");
                }
                Some(MeshEvent::Keeps { peer, filter })
            }
            5 if ctx.rng.one_in(4) => {
                let flood = (0..FLOOD).map(|number| DigestChange::Added(Digest(mix_bits(number))));
                Some(MeshEvent::Changed { peer, changes: flood.collect() })
            }
            5 | 6 => {
                let some = labels.iter().filter(|_| ctx.rng.one_in(16));
                let changes = some.map(|label| DigestChange::Added(Digest::of_label(label))).collect();
                Some(MeshEvent::Changed { peer, changes })
            }
            // Many promised blocks never come, and many promises are never withdrawn: no request may wait for
            // them without limit.
            7 => {
                let one_in = ctx.rng.within(1, 4);
                let some = labels.iter().filter(|_| ctx.rng.one_in(one_in));
                Some(MeshEvent::Promises { peer, promises: some.map(Digest::of_label).collect() })
            }
            8 => Some(MeshEvent::Greeted {
                peer,
                keeps_asks: !ctx.rng.one_in(4),
                lists_blocks: !ctx.rng.one_in(4),
            }),
            9 => {
                let standing: Vec<u64> = self.standing.keys().copied().collect();
                let ask = (!standing.is_empty()).then(|| ctx.rng.pick(&standing))?;
                Some(MeshEvent::Withdrawn { ask })
            }
            10 => Some(MeshEvent::Leaving(peer)),
            _ if dead || labels.is_empty() => None,
            11..13 => Some(self.ask_promised(peer, ctx)),
            _ => {
                let count = ctx.rng.within(1, 6);
                let one = |_| {
                    let mut label = ctx.rng.pick(&labels);
                    label.bytes += u32::from(ctx.rng.one_in(32));
                    label
                };
                let blocks: Vec<Label> = (0..count).map(one).collect();
                self.asks += 1;
                self.asked.insert(self.asks, blocks.clone());
                Some(MeshEvent::Asked { ask: self.asks, peer, blocks, standing: None })
            }
        }
    }

    /// Picks a namespace of an engine, with its block size.
    pub(super) fn any_namespace(&self, ctx: &mut Ctx) -> Option<(NamespaceDigest, u32)> {
        let sizes: Vec<_> = self.sizes.iter().map(|(namespace, bytes)| (*namespace, *bytes)).collect();
        (!sizes.is_empty()).then(|| ctx.rng.pick(&sizes))
    }

    /// A peer asks for the end of a prompt that an engine here may have promised.
    fn ask_promised(&mut self, peer: PeerNumber, ctx: &mut Ctx) -> MeshEvent {
        let path: Vec<u64> = (0..ctx.rng.within(1, u64::from(DEPTH))).map(|_| ctx.rng.below(2)).collect();
        let place = ctx.rng.below(path.len() as u64) as u32;
        let (namespace, bytes) = self.any_namespace(ctx).expect("an engine has one");
        let hashes = keys(&path).split_off(place as usize);
        let blocks: Vec<Label> =
            hashes.into_iter().map(|hash| Label { namespace, group: 0, hash, bytes }).collect();
        let patience_ms = ctx.rng.within(1, 400) as u32;
        self.asks += 1;
        self.asked.insert(self.asks, blocks.clone());
        self.standing.insert(self.asks, ctx.now + u64::from(patience_ms) * 1000);
        let standing = Some(StandingTerms { patience_ms, place });
        MeshEvent::Asked { ask: self.asks, peer, blocks, standing }
    }

    /// Checks a list of promises: it is announced whole, and only if it has changed.
    fn promise(&mut self, promises: Vec<Digest>) {
        assert_ne!(promises, self.promised, "the same promises were announced twice");
        self.promised = promises;
    }

    /// Checks announced changes: none repeats the state known to the peers.
    fn publish(&mut self, changes: &[DigestChange]) {
        for change in changes {
            let is_new = match change {
                DigestChange::Added(digest) => self.announced.insert(*digest),
                DigestChange::Removed(digest) => self.announced.remove(digest),
            };
            assert!(is_new, "announced twice: {change:?}");
        }
    }
}

fn write(label: &Label, form: Form, into: u64, memory: &Region) {
    let right = (0..form.shards).flat_map(|shard| {
        let origin = Origin { digest: label.namespace, hash: label.hash, shard };
        (0..WORDS).map(move |index| origin.word(index))
    });
    words(form, into).zip(right).for_each(|(at, word)| memory.word64(at).store(word, Ordering::Relaxed));
}

// === impl Life: the mesh ===

impl Life {
    /// Carries out an action of the mesh.
    pub(super) fn apply_mesh(&mut self, action: Action, ctx: &mut Ctx) {
        let mesh = self.mesh.as_mut().expect("the core has its part");
        match action {
            Action::Transfer { job: TierJob::Fetch(fetch), .. } => {
                for (label, into) in &fetch.blocks {
                    self.ledger.begin(CopyDirection::Save, &[place(*into)]);
                    let form = self.ledger.form_at(*into);
                    assert_eq!(u64::from(label.bytes), form.block_bytes(), "a slot of another size");
                    let spoiled = ctx.taint();
                    let memory = self.pool.region();
                    words(form, *into).for_each(|at| memory.word64(at).store(spoiled, Ordering::Relaxed));
                }
                mesh.post(fetch, ctx);
            }
            Action::Transfer { job: TierJob::CancelFetch { ticket }, .. } => {
                mesh.stop(|coming| coming.ticket == ticket, ctx)
            }
            Action::Grant { ask, slots } => {
                let labels = mesh.asked.remove(&ask).expect("an ask is answered once");
                mesh.standing.remove(&ask);
                assert_eq!(labels.len(), slots.len(), "the grant has an entry for each block");
                let granted = slots.into_iter().zip(labels);
                let slots: Vec<_> = granted.filter_map(|(slot, label)| Some((slot?, label))).collect();
                for (slot, label) in &slots {
                    self.ledger.begin(CopyDirection::Load, &[place(slot.offset)]);
                    assert_eq!(
                        u64::from(label.bytes),
                        self.ledger.form_at(slot.offset).block_bytes(),
                        "the slot has another size"
                    );
                    self.ledger.answered(&[*slot], label.namespace, &[label.hash], false, self.pool.region());
                }
                let due = ctx.now + ctx.rng.within(10, 10_000);
                mesh.reading.insert(ask, Reading { slots, due });
            }
            Action::Publish { changes, .. } => mesh.publish(&changes),
            Action::Promise(promises) => mesh.promise(promises),
            Action::AskBlocks { peer, ask } => mesh.list_asks.push((peer, ask)),
            Action::Resync { .. } => {}
            other => unreachable!("no action of the mesh: {other:?}"),
        }
    }

    /// Passes one event of the mesh to the core. Returns false if there was none.
    pub(super) fn hear_mesh(&mut self, ctx: &mut Ctx) -> bool {
        let Some(mesh) = &mut self.mesh else { return false };
        let due = |due: Micros| due <= ctx.now;
        let event = if mesh.coming.iter().any(|coming| due(coming.due)) {
            let (ended, coming) =
                std::mem::take(&mut mesh.coming).into_iter().partition(|coming| due(coming.due));
            mesh.coming = coming;
            let ends = self.end_coming(ended);
            let tier = self.core.tier_of(Source::Peer).expect("the core has its part");
            self.end_jobs(tier, ends, ctx);
            return true;
        } else if let Some(&ask) =
            mesh.reading.iter().find(|(_, reading)| due(reading.due)).map(|(ask, _)| ask)
        {
            let reading = mesh.reading.remove(&ask).expect("found above");
            for (slot, label) in &reading.slots {
                self.ledger.answered(&[*slot], label.namespace, &[label.hash], false, self.pool.region());
                self.ledger.end(&[place(slot.offset)]);
            }
            let sent = ctx.rng.below(reading.slots.len() as u64 + 1) as u32;
            MeshEvent::Released { ask, sent }
        } else if mesh.moves < MOVES && due(mesh.next_move) {
            let answered = if ctx.rng.one_in(2) { mesh.answer_list(ctx) } else { None };
            match answered.or_else(|| mesh.act(ctx)) {
                Some(event) => event,
                None => {
                    self.list_for_peer(ctx);
                    return true;
                }
            }
        } else {
            return false;
        };
        self.handle(CoreEvent::Mesh(event), ctx);
        if let (Some(mesh), Some(stats)) = (&mut self.mesh, self.core.peers_stats()) {
            let before = std::mem::replace(&mut mesh.kept, (stats.kept_asks, stats.granted_behind));
            ctx.cover.add("sidecar kept an ask", mesh.kept.0 - before.0);
            ctx.cover.add("sidecar granted a kept ask", mesh.kept.1 - before.1);
            let came = stats.prefetched.came;
            let before = std::mem::replace(&mut mesh.prefetched, came);
            ctx.cover.add("sidecar prefetched a block after a start", came[0] - before[0]);
            ctx.cover.add("sidecar prefetched a block of a leaving peer", came[1] - before[1]);
        }
        true
    }

    fn end_coming(&mut self, ended: Vec<Coming>) -> Vec<JobEnd> {
        let end = |coming: Coming| {
            if coming.result.is_ok() {
                let form = self.ledger.form_at(coming.into);
                write(&coming.label, form, coming.into, self.pool.region());
            }
            self.ledger.end(&[place(coming.into)]);
            JobEnd::Peer(FetchDone { ticket: coming.ticket, index: coming.index, result: coming.result })
        };
        ended.into_iter().map(end).collect()
    }

    /// At rest the members know all blocks of this node and no others.
    pub(super) fn audit_mesh(&self) {
        let Some(mesh) = &self.mesh else { return };
        let (mut strange, mut unannounced) = (mesh.announced.clone(), Vec::new());
        for (namespace, hash) in self.ledger.kept() {
            let announced = strange.remove(&Digest::new(&namespace, 0, &hash));
            let shared = self.namespaces.values().any(|base| *base == namespace);
            unannounced.extend((!announced && shared).then_some(hash));
        }
        // A removed block cannot be found, but keeps its slot while readers of an earlier life may use it.
        let removed = self.core.stats().removed_blocks;
        assert!(unannounced.len() as u64 <= removed, "blocks not announced to peers: {unannounced:?}");
        assert!(strange.is_empty(), "announced blocks that are not here: {strange:?}");
    }
}
