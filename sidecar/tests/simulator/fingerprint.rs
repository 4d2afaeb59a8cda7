//! The fingerprint of a world: a digest of the numbers in the core's actions. Names of Rust, texts for people
//! and the tier of a read are left out, so a refactored core has the same fingerprint.

use mesh::digest::{Digest, DigestChange};
use shm_protocol::key::{BlockHash, Label, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use shm_protocol::session::Bound;
use sidecar::core::{Action, CopyDirection, InspectedBlocks, Inspection, TierJob};
use tiers::ssd::{self, DeviceWork};

use crate::rng::mix_bits;

/// Folds the words of an action into a digest.
struct Words(u64);

/// Returns the digest of an action.
pub(crate) fn of(action: &Action) -> u64 {
    let mut words = Words(0);
    words.action(action);
    words.0
}

// === impl Words ===

impl Words {
    fn put(&mut self, words: impl IntoIterator<Item = u64>) {
        for word in words {
            self.0 = mix_bits(self.0 ^ word);
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.put([bytes.len() as u64]);
        self.put(
            bytes.chunks(8).map(|chunk| chunk.iter().fold(0, |word, byte| word << 8 | u64::from(*byte))),
        );
    }

    fn slots<'a>(&mut self, slots: impl IntoIterator<Item = &'a SlotRef>) {
        self.put(slots.into_iter().flat_map(|slot| [slot.offset, slot.generation]));
    }

    fn key(&mut self, namespace: u64, group: u32, hash: &BlockHash) {
        self.put([namespace, u64::from(group)]);
        self.bytes(&hash.0);
    }

    fn label(&mut self, label: &Label) {
        self.bytes(&label.namespace.0);
        self.key(0, label.group, &label.hash);
        self.put([u64::from(label.bytes)]);
    }

    /// Adds the number of the action's kind, then its words.
    fn action(&mut self, action: &Action) {
        match action {
            Action::Answer { session, op, outcome, refs, sources, chunks, from } => {
                self.put([1, *session, *op, outcome.encode(), u64::from(*from), refs.len() as u64]);
                self.slots(refs);
                self.put(sources.iter().map(|source| *source as u64));
                self.put(chunks.iter().map(|chunk| u64::from(*chunk)));
            }
            Action::Outcome { session, op, outcome } => self.put([2, *session, *op, outcome.encode()]),
            Action::Saved { session, saved } => {
                self.put([3, *session]);
                self.put(saved.encode_slot());
            }
            Action::AssignSegment { segment, block_bytes } => self.put([4, *segment, *block_bytes]),
            Action::DisownSlot { slot } => self.put([5, slot.offset, slot.generation]),
            Action::FreeSlot { slot } => self.put([6, slot.offset, slot.generation]),
            Action::FillSlot { slot, namespace, key } => {
                self.put([7, slot.offset, slot.generation]);
                self.bytes(&namespace.0);
                self.key(u64::from(key.namespace), key.group, &key.hash);
            }
            Action::CommitSlot { slot, checksum } => self.put([8, slot.offset, slot.generation, *checksum]),
            Action::Copy { copy, engine, session, direction, pieces, load_op, awaited } => {
                let direction = u64::from(*direction == CopyDirection::Load);
                self.put([9, *copy, *engine, *session, direction, *load_op, u64::from(*awaited)]);
                self.put(pieces.iter().flat_map(|piece| [u64::from(piece.block), piece.offset]));
            }
            Action::Inspect(Inspection { save, blocks, shards, .. }) => {
                let kind = if matches!(blocks, InspectedBlocks::Pairs(_)) { 10 } else { 22 };
                self.put([kind, save.0, save.1, u64::from(*shards)]);
                match blocks {
                    InspectedBlocks::Pairs(pairs) => {
                        self.slots(pairs.iter().flat_map(|(kept, computed)| [kept, computed]))
                    }
                    InspectedBlocks::Alone(slots) => self.slots(slots),
                }
            }
            Action::Verify { key, slot } => {
                self.put([11, slot.offset, slot.generation]);
                self.key(u64::from(key.namespace), key.group, &key.hash);
            }
            Action::Transfer { job, .. } => self.job(job),
            Action::Grant { ask, slots } => {
                self.put([14, *ask, slots.len() as u64]);
                let none = SlotRef { offset: u64::MAX, generation: 0 };
                self.slots(slots.iter().map(|slot| slot.as_ref().unwrap_or(&none)));
            }
            Action::Publish { changes, .. } => {
                self.put([15, changes.len() as u64]);
                self.put(changes.iter().flat_map(|change| match change {
                    DigestChange::Added(Digest(digest)) => [1, *digest],
                    DigestChange::Removed(Digest(digest)) => [0, *digest],
                }));
            }
            Action::Promise(digests) => {
                self.put([16, digests.len() as u64]);
                self.put(digests.iter().map(|digest| digest.0));
            }
            Action::Resync { peer } => self.put([17, u64::from(peer.0)]),
            Action::AskBlocks { peer, ask } => self.put([21, u64::from(peer.0), u64::from(ask.blocks)]),
            Action::Bind { engine, facts: _, block_bytes, shards, words } => {
                self.put([18, *block_bytes, u64::from(*shards)]);
                self.bytes(engine.as_bytes());
                for (session, Bound { weights, live, namespace }) in words {
                    self.put([*session, *weights, *namespace]);
                    self.bytes(live.as_ref().map_or(&[][..], |live| live));
                }
            }
            Action::Warn(_) => self.put([19]),
            Action::Close { session, reason: _ } => self.put([20, *session]),
        }
    }

    /// Adds a read from any tier.
    fn read(&mut self, label: &Label, into: u64) {
        self.put([12, into]);
        self.label(label);
    }

    fn job(&mut self, job: &TierJob) {
        match job {
            TierJob::Disk(job) => self.disk_job(job),
            TierJob::Fetch(fetch) => fetch.blocks.iter().for_each(|(label, into)| self.read(label, *into)),
            TierJob::CancelFetch { ticket } => self.put([13, *ticket]),
        }
    }

    fn disk_job(&mut self, ssd::DeviceJob { device, ticket: _, work }: &ssd::DeviceJob) {
        if let DeviceWork::Read { label, into, .. } = work {
            return self.read(label, *into);
        }
        self.put([21, *device as u64]);
        match work {
            DeviceWork::Read { .. } => {}
            DeviceWork::Begin { segment, sequence } => self.put([1, u64::from(*segment), *sequence]),
            DeviceWork::Write { place, sequence, label, from } => {
                self.put([2, u64::from(place.segment), u64::from(place.unit), *sequence, *from]);
                self.label(label);
            }
            DeviceWork::Move { from, from_sequence, to, to_sequence, label } => {
                self.put([3, u64::from(from.segment), u64::from(from.unit), *from_sequence]);
                self.put([u64::from(to.segment), u64::from(to.unit), *to_sequence]);
                self.label(label);
            }
            DeviceWork::Seal { segment, sequence } => self.put([4, u64::from(*segment), *sequence]),
            DeviceWork::Check => self.put([5]),
            DeviceWork::GiveUp => self.put([6]),
            DeviceWork::Distrust { namespace: NamespaceDigest(namespace), before } => {
                self.put([7, *before]);
                self.bytes(namespace);
            }
        }
    }
}
