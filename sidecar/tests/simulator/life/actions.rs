//! Carries out the core's actions one at a time, each followed by the oracle's checks.

use std::sync::atomic::Ordering;

use shm_protocol::key::NamespaceDigest;
use shm_protocol::message::Status;
use shm_protocol::namespace;
use shm_protocol::pool::{SLOT_HEADER_BYTES, SlotRef, slot};
use sidecar::clients::session::ClientSession;
use sidecar::core::{Action, CopyDirection, Inspection, InspectionResult, RankBlock, SessionId, TierJob};

use super::Life;
use crate::coverage;
use crate::ctx::{Actor, Ctx, Micros};
use crate::origin::WORDS;

/// The slots of a comparison, and their use.
fn uses(inspection: &Inspection) -> impl Iterator<Item = (CopyDirection, RankBlock)> {
    inspection.pairs().iter().flat_map(|(kept, computed)| {
        let place = |slot: &SlotRef| RankBlock { block: 0, offset: slot.offset };
        [(CopyDirection::Load, place(kept)), (CopyDirection::Save, place(computed))]
    })
}

/// A half-written slot header: the writer was stopped between two stores.
#[derive(Debug)]
pub(super) struct TornHeader {
    header: u64,
    after: Vec<u64>,
}

const HEADER_WORDS: usize = SLOT_HEADER_BYTES as usize / 8;

// === impl Life: actions ===

impl Life {
    /// Carries out the next action. Returns its duration.
    pub(super) fn apply(&mut self, action: Action, ctx: &mut Ctx) -> Micros {
        ctx.hit(coverage::action(&action));
        ctx.note(|| format!("sidecar {}: does {action:?}", self.epoch));
        match action {
            Action::Answer { session, op, outcome, refs, sources, chunks, from } => {
                ctx.cover.add("engine streamed answer", (outcome.status == Status::Streamed).into());
                self.check_answer((session, op), &refs, from, outcome.status);
                self.on(session, ctx, |session| {
                    session.write_refs(&chunks, from, &refs, &sources);
                    session.store_outcome(op, outcome);
                });
            }
            Action::Outcome { session, op, outcome } => {
                self.on(session, ctx, |session| session.store_outcome(op, outcome));
            }
            Action::Saved { session, saved } => {
                ctx.cover.add("save committed", saved.committed.into());
                ctx.cover.add("save present", saved.present.into());
                ctx.cover.add("save cancelled", saved.cancelled.into());
                ctx.cover.add("save dropped", saved.dropped.into());
                ctx.cover.add("save unaccepted", saved.unaccepted.into());
                self.on(session, ctx, |session| {
                    session
                        .push_saved(&saved)
                        .expect("the engine posts no more saves than there is room for");
                });
            }
            Action::Copy { copy, session, direction, pieces, load_op, .. } => {
                self.ledger.begin(direction, &pieces);
                self.places.insert(copy, pieces.clone());
                match self.sessions.get(&session).and_then(|peer| peer.rank.clone()) {
                    Some(rank) => self.copies.post(copy, rank, direction, pieces, load_op, ctx),
                    None => self.copies.refuse(copy),
                }
            }
            Action::Inspect(inspection) => {
                uses(&inspection).for_each(|(direction, piece)| self.ledger.begin(direction, &[piece]));
                self.copies.inspect_blocks(inspection, ctx);
            }
            Action::Verify { key, slot } => {
                self.verifications.push_back((key, slot, ctx.now + ctx.pause(200)))
            }
            Action::Transfer { tier, job: TierJob::Disk(job) } => {
                let used = super::disk::use_of(&job);
                if let Some((direction, piece)) = used {
                    self.ledger.begin(direction, &[piece]);
                }
                let form = used.map(|(_, piece)| self.ledger.form_at(piece.offset));
                self.disks[tier].post(job, form, self.pool.region(), ctx);
            }
            Action::Bind { engine, facts, block_bytes, words, .. } => {
                let base = namespace::digest_facts(&facts);
                self.namespaces.insert(engine, base);
                self.mesh.iter_mut().for_each(|mesh| mesh.know(base, block_bytes));
                for (id, bound) in words {
                    self.on(id, ctx, |session| session.show_bound(bound));
                }
            }
            Action::Warn(_) => {}
            Action::Close { session, .. } => self.closing.push(session),
            Action::Transfer { .. }
            | Action::Grant { .. }
            | Action::Publish { .. }
            | Action::Promise(_)
            | Action::AskBlocks { .. }
            | Action::Resync { .. } => self.apply_mesh(action, ctx),
            headers => return self.write_header(&headers, ctx),
        }
        1
    }

    /// Checks the result of a comparison: correct KV with noise never differs, and wrong KV always does. A
    /// contradicted engine gets none of these blocks.
    pub(super) fn end_comparison(
        &mut self,
        inspection: &Inspection,
        found: &InspectionResult,
        ctx: &mut Ctx,
    ) {
        let memory = self.pool.region();
        let pairs = inspection.pairs().iter();
        let is_different =
            |(kept, computed): &&(SlotRef, SlotRef)| self.ledger.compared(*kept, *computed, memory);
        let different: Vec<SlotRef> = pairs.filter(is_different).map(|(kept, _)| *kept).collect();
        let differing = different.len() as u32;
        // Bytes after a shard's words do not belong to the block.
        let shard_bytes = self.ledger.form_at(inspection.pairs()[0].0.offset).shard_bytes;
        assert!(shard_bytes >= WORDS as u64 * 8, "a shard holds its words");
        assert_eq!(found.differing, differing, "{found:?} of {different:?}");
        ctx.hit(if differing > 0 { "check differed" } else { "check agreed" });
        uses(inspection).for_each(|(_, piece)| self.ledger.end(&[piece]));
        if let Some(peer) = self.sessions.get_mut(&inspection.save.0) {
            peer.contradicted.extend(different);
        }
    }

    /// Changes a session that may have ended already.
    fn on(&mut self, id: SessionId, ctx: &mut Ctx, act: impl FnOnce(&mut ClientSession)) {
        let Some(peer) = self.sessions.get_mut(&id) else { return };
        act(&mut peer.session);
        peer.session.flush();
        // A scheduler asleep on the futex wakes; ranks poll.
        let engine = usize::from(!peer.engine.starts_with("e0"));
        let actor = match &peer.rank {
            None => Actor::Scheduler(engine),
            Some(_) => return,
        };
        ctx.wakes.push((actor, ctx.now + 5 + ctx.rng.below(50)));
    }

    fn check_answer(&self, (session, op): (SessionId, u64), refs: &[SlotRef], from: u32, status: Status) {
        if status == Status::Streamed {
            return assert!(refs.iter().all(|slot| slot.offset == 0), "a streamed answer named a slot");
        }
        let Some(peer) = self.sessions.get(&session).filter(|_| !refs.is_empty()) else { return };
        let base = self.namespaces[&peer.engine];
        let digest: NamespaceDigest = peer.salt.map_or(base, |salt| namespace::salt_namespace(base, salt));
        let is_contradicted = refs.iter().any(|slot| peer.contradicted.contains(slot));
        assert!(!is_contradicted, "session {session} was answered with blocks that differ from its own");
        let is_barred = self.core.barred().iter().any(|barred| barred.engine == peer.engine);
        assert!(!is_barred, "session {session} was answered although it is barred");
        let keys = &peer.logs[&peer.asked[&op]][from as usize..];
        assert!(refs.len() <= keys.len(), "an answer of more keys than the log has");
        self.ledger.answered(refs, digest, keys, status == Status::Arriving, self.pool.region());
    }

    /// Writes a header like the product. Occasionally the process is stopped half-way, permanently or for a
    /// while.
    fn write_header(&mut self, action: &Action, ctx: &mut Ctx) -> Micros {
        let stolen = self.ledger.follow(action, self.pool.region());
        if stolen {
            ctx.hit("sidecar evicted for another size");
        }
        let done = match action {
            Action::AssignSegment { segment, block_bytes } => {
                self.pool.write_segment_header(*segment, *block_bytes)
            }
            Action::FillSlot { slot, namespace, key } => {
                if ctx.knobs.faults > 0 && ctx.rng.one_in(16) {
                    return self.tear_fill(*slot, ctx, |pool| pool.fill(*slot, *namespace, key));
                }
                self.pool.fill(*slot, *namespace, key)
            }
            Action::CommitSlot { slot, checksum } => {
                if *checksum == 0 && ctx.knobs.pool_file {
                    self.sums.push_back((*slot, ctx.now + ctx.pause(500)));
                }
                // A simulated peer states only that a checksum exists.
                let stated = if *checksum == 0 { None } else { self.pool.sum(*slot) };
                self.pool.commit(*slot, stated.unwrap_or(0))
            }
            Action::DisownSlot { slot } => {
                self.pool.disown_slot(*slot);
                true
            }
            Action::FreeSlot { slot } => {
                self.pool.free(*slot);
                true
            }
            _ => unreachable!("the caller chose header actions"),
        };
        assert!(done, "the pool and the core disagree: {action:?}");
        1
    }

    /// Stops in the middle of a slot's header while it is filled. FILLING is written: it is stored first,
    /// with a fence. Any other words may be missing.
    fn tear_fill(
        &mut self,
        at: SlotRef,
        ctx: &mut Ctx,
        fill: impl FnOnce(&tiers::pool::Pool) -> bool,
    ) -> Micros {
        let header = self.ledger.header(at);
        let words = self.pool.region().words64(header as usize, HEADER_WORDS);
        let read = || words.iter().map(|word| word.load(Ordering::Relaxed)).collect::<Vec<u64>>();
        let before = read();
        assert!(fill(&self.pool), "the pool and the core disagree about {at:?}");
        let after = read();
        for (index, word) in words.iter().enumerate() {
            if index as u64 * 8 != slot::STATE && ctx.rng.one_in(2) {
                word.store(before[index], Ordering::Relaxed);
            }
        }
        ctx.note(|| format!("sidecar {}: stopped within the header of {at:?}", self.epoch));
        self.torn = Some(TornHeader { header, after });
        ctx.pause(2_000)
    }

    /// Completes a half-written header.
    pub(super) fn mend(&mut self, ctx: &mut Ctx) -> bool {
        let Some(torn) = self.torn.take() else { return false };
        let words = self.pool.region().words64(torn.header as usize, HEADER_WORDS);
        words.iter().zip(torn.after).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        ctx.hit("fault torn header, resumed");
        true
    }
}
