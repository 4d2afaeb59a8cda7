//! Carries out the core's actions, in their order.

use tiers::pool::Pool;

use super::Runtime;
use crate::catalog::EngineBlocks;
use crate::clients::session::{ClientSession, Violation};
use crate::copiers::{CopyBatch, Finished};
use crate::core::{Action, Inspection, SessionId, TierJob};
use crate::pages::metrics::CloseReason;
use crate::ports::checksums::Checksums;
use crate::ports::peers::PeersPort;

// === impl Runtime: actions ===

impl Runtime {
    /// Carries out all queued actions and wakes the engines with new words.
    pub(super) fn apply(&mut self) {
        let mut out = std::mem::take(&mut self.out);
        for action in out.drain(..) {
            self.apply_one(action);
        }
        if let Some(disks) = &mut self.disks {
            disks.flush_jobs();
        }
        // No action calls the core, so none was added; the vector keeps its capacity.
        self.out = out;
    }

    fn apply_one(&mut self, action: Action) {
        match action {
            Action::Answer { session, op, outcome, refs, sources, chunks, from } => {
                self.on(session, |session| {
                    session.write_refs(&chunks, from, &refs, &sources);
                    session.store_outcome(op, outcome);
                    Ok(())
                })
            }
            Action::Outcome { session, op, outcome } => self.on(session, |session| {
                session.store_outcome(op, outcome);
                Ok(())
            }),
            Action::Saved { session, saved } => self.on(session, |session| session.push_saved(&saved)),
            Action::Copy { copy, engine, session, direction, pieces, load_op, awaited } => {
                let rank = self.sessions.get(&session).and_then(|session| session.rank().cloned());
                let refused = match rank {
                    Some(rank) => {
                        let batch = CopyBatch { copy, engine, direction, pieces, load_op, awaited };
                        self.copiers.post_batch(&rank, batch)
                    }
                    None => Some(Finished { copy, ok: false }),
                };
                self.refused.extend(refused);
            }
            Action::Inspect(inspection) => {
                let sums = self.checksums.is_some();
                self.copiers.inspect_blocks(Inspection { sums, ..inspection });
            }
            Action::Verify { key, slot } => self.checksums().verify_block(key, slot),
            Action::Transfer { job, .. } => match job {
                TierJob::Disk(job) => self.disks.as_mut().expect("the core has their tier").push_job(job),
                TierJob::Fetch(fetch) => self.mesh().fetch(fetch),
                TierJob::CancelFetch { ticket } => self.mesh().cancel(ticket),
            },
            Action::Grant { ask, slots } => self.grant_slots(ask, &slots),
            Action::Publish { changes, at_once } => self.mesh().push_changes(changes, at_once),
            Action::Promise(promises) => self.mesh().push_promises(promises),
            Action::Resync { peer } => self.mesh().resync(peer),
            Action::AskBlocks { peer, ask } => self.mesh().ask_blocks(peer, ask),
            Action::Bind { engine, facts, block_bytes, shards, words } => {
                self.show_bound(&engine, &EngineBlocks { facts, block_bytes, shards }, words);
            }
            Action::Warn(text) => tracing::warn!("{text}"),
            Action::Close { session, reason } => self.closing.push((session, CloseReason::Rejected, reason)),
            headers => {
                let written = write_header(&self.pool, &headers);
                assert!(written || !self.pool.is_whole(), "the pool and the core disagree: {headers:?}");
                if let (Action::CommitSlot { slot, checksum: 0 }, Some(checksums)) =
                    (&headers, &mut self.checksums)
                {
                    checksums.sum(*slot);
                }
            }
        }
    }

    fn checksums(&mut self) -> &mut Checksums {
        self.checksums.as_mut().expect("blocks are adopted from a pool file alone")
    }

    fn mesh(&mut self) -> &mut PeersPort {
        self.peers.as_mut().expect("the core has their part")
    }

    /// Changes a session, unless it has ended, and wakes its engine.
    fn on(&mut self, id: SessionId, act: impl FnOnce(&mut ClientSession) -> Result<(), Violation>) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if let Err(violation) = act(session) {
            self.closing.push((id, CloseReason::Malformed, violation.to_string()));
        }
        session.flush();
    }
}

/// Writes pool headers. Returns false if the place does not exist.
fn write_header(pool: &Pool, action: &Action) -> bool {
    match action {
        Action::AssignSegment { segment, block_bytes } => pool.write_segment_header(*segment, *block_bytes),
        Action::FillSlot { slot, namespace, key } => pool.fill(*slot, *namespace, key),
        Action::CommitSlot { slot, checksum } => pool.commit(*slot, *checksum),
        Action::DisownSlot { slot } => {
            pool.disown_slot(*slot);
            true
        }
        Action::FreeSlot { slot } => {
            // The slot may be gone: its segment may have another block size now.
            pool.free(*slot);
            true
        }
        _ => unreachable!("answered by apply_one"),
    }
}
