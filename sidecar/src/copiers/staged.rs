//! A rank with memory out of this process's reach. On request it copies its blocks into its own staging
//! segment, and a thread of this process moves them into the pool.
//!
//! Each slot of the segment is requested, answered, emptied, and free again. A silent rank holds only its own
//! slots. Before it writes a slot the rank stores the request's tag in the slot's word. If the word differs
//! after the bytes were read, the bytes may belong to another request, such as one of a later session.

mod staging_slots;

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use copy_engine::HostMemory;
use rustix::net::Shutdown;
use rustix::rand::{GetRandomFlags, getrandom};
use shm_protocol::layout::staging_word;
use shm_protocol::message::StageRequest;
use shm_protocol::ring::Producer;
use shm_protocol::session::{RegionRing, Ring, SessionMemory};
use shm_protocol::wait;
use tiers::pool::Pool;

use self::staging_slots::{Filled, StagingSlots, StagingTurn};
use super::{CopyBatch, CopyEnds};
use crate::core::CopyDirection;
use crate::system::clock::Clock;

/// Interval of checks for a silent rank.
const LOOK: Duration = Duration::from_secs(1);

/// The data thread's handle of a rank.
#[derive(Debug)]
pub(super) struct StagedRank(Arc<StagedShared>);

#[derive(Debug)]
struct StagedShared {
    staging_slots: Mutex<StagingSlots>,
    work: Condvar,
    staging: HostMemory,
    /// The same file, for the words of its slots.
    tags: OwnedFd,
    words: SessionMemory,
    pool: Arc<Pool>,
    ends: CopyEnds,
    clock: Clock,
    /// Held until the last copy ended; see [`crate::clients::session::ClientSession::socket`].
    socket: Arc<OwnedFd>,
}

// === impl StagedRank ===

impl StagedRank {
    /// Starts the rank's thread.
    pub(super) fn start_thread(
        staging: HostMemory,
        tags: OwnedFd,
        slots: u32,
        words: &SessionMemory,
        pool: &Arc<Pool>,
        ends: &CopyEnds,
        socket: Arc<OwnedFd>,
    ) -> Result<Self, String> {
        let shared = Arc::new(StagedShared {
            staging_slots: Mutex::new(StagingSlots::new(slots, first_tag()?)),
            work: Condvar::new(),
            staging,
            tags,
            words: words.clone(),
            pool: Arc::clone(pool),
            ends: ends.clone(),
            clock: Clock::start_now(),
            socket,
        });
        let own = Arc::clone(&shared);
        let started = thread::Builder::new().name("pillion-staged".into()).spawn(move || {
            let requests = Producer::new(own.words.ring(Ring::Completion));
            if catch_unwind(AssertUnwindSafe(|| own.run(requests))).is_err() {
                tracing::error!(
                    "the sidecar ends and must be restarted: the thread of a rank met an internal error"
                );
                std::process::abort();
            }
        });
        started.map_err(|error| {
            format!(
                "no thread for this rank could be started ({error}): raise the limit of \
             processes"
            )
        })?;
        Ok(Self(shared))
    }

    /// Takes a batch. Returns `false` for loads, without room, and if the rank is silent.
    pub(super) fn post_batch(&self, batch: CopyBatch) -> bool {
        batch.direction == CopyDirection::Save && {
            let taken = self.0.staging_slots().post_batch(batch.copy, &batch.pieces);
            self.0.work.notify_all();
            taken
        }
    }

    pub(super) fn staged(&self, tag: u64, slot: u32, ok: bool) -> Result<(), String> {
        let answered = self.0.staging_slots().staged(tag, slot, ok);
        self.0.work.notify_all();
        answered
    }

    /// Stops further requests; blocks being moved still end.
    pub(super) fn stop(&self) {
        self.0.staging_slots().stop();
        self.0.work.notify_all();
    }
}

impl Drop for StagedRank {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Tags count up from a random number, so the tags of two sessions with one segment differ.
fn first_tag() -> Result<u64, String> {
    let mut bytes = [0; 8];
    let got = getrandom(&mut bytes, GetRandomFlags::empty());
    match got {
        Ok(8) => Ok(u64::from_ne_bytes(bytes)),
        other => Err(format!("no random number for this rank: {other:?}")),
    }
}

// === impl StagedShared ===

impl StagedShared {
    fn staging_slots(&self) -> MutexGuard<'_, StagingSlots> {
        self.staging_slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, mut requests: Producer<RegionRing>) {
        loop {
            let Some(StagingTurn { asked, filled, ended }) = self.next() else { return };
            if !asked.is_empty() && !self.request_stages(&mut requests, &asked) {
                self.staging_slots().stop();
                // The data thread sees the hang-up and closes the session.
                let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
            }
            for slot in filled {
                let moved = self.empty(&slot);
                self.staging_slots().moved(&slot, moved);
            }
            ended.into_iter().for_each(|finished| _ = self.ends.report(finished));
        }
    }

    /// Waits for the next work. Returns `None` once there will be no more.
    fn next(&self) -> Option<StagingTurn> {
        let mut staging_slots = self.staging_slots();
        loop {
            let turn = staging_slots.next_turn(self.clock.now());
            if !turn.is_empty() {
                return Some(turn);
            }
            if staging_slots.is_over() {
                return None;
            }
            staging_slots = match staging_slots.is_asking() {
                true => self.work.wait_timeout(staging_slots, LOOK).unwrap_or_else(PoisonError::into_inner).0,
                false => self.work.wait(staging_slots).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Sends requests to the rank. Returns `false` if its ring is full or malformed.
    fn request_stages(&self, requests: &mut Producer<RegionRing>, asked: &[StageRequest]) -> bool {
        // A slot is requested only after its last answer was read, so the ring of a correct rank has room for
        // all of them.
        if !requests.free().is_ok_and(|free| free as usize >= asked.len()) {
            tracing::warn!("a rank's completion ring is full or malformed: its session ends");
            return false;
        }
        asked.iter().for_each(|stage| requests.push(&stage.encode_slot()));
        requests.publish();
        wait::wake_engine(self.words.region());
        true
    }

    /// Moves a slot's bytes into the pool. Returns true if they are whole and belong to the request.
    fn empty(&self, slot: &Filled) -> bool {
        let copied = self.staging.save_block(slot.slot, self.pool.region(), slot.offset);
        if let Err(error) = &copied {
            tracing::warn!(slot = slot.slot, %error, "a staged block could not be copied");
        }
        // SYNC POINT(tag): the word is read after the bytes; the rank stores it before them.
        fence(Ordering::Acquire);
        let mut word = [0; 8];
        let read = rustix::io::pread(&self.tags, &mut word, staging_word(slot.slot) as u64);
        copied.is_ok() && read == Ok(8) && u64::from_le_bytes(word) == slot.tag
    }
}
