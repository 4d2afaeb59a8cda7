//! One connection of a worker, as its threads share it: the words of loads, and LOADED on its way to the sidecar.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use copy_engine::cuda::{CudaError, Gpu};
use shm_protocol::layout::{OPERATIONS, header, load_word, load_word_value};
use shm_protocol::message::{Outcome, Stage, Status};
use shm_protocol::request::{LoadEnd, WorkerRequest};
use shm_protocol::{gate, wait};

use super::patience::{Patience, Progress};
use crate::clock;
use crate::connection::Connection;
use crate::core::endpoint::Endpoint;
use crate::core::submission::Submission;
use crate::scheduler::SLEEP_TURN;
use crate::stream::Words;

/// How long the end of a copy by the sidecar is waited for once the gate is closed. A copy takes less than a
/// millisecond, but a runnable thread was seen to wait 3 s for a busy core. On host memory, a sidecar frozen half-way
/// through a block is given up after it: `pillion.copy=sidecar` has no better guarantee there. On a GPU, where a batch that
/// began ends by itself, the GPU or the sidecar's words are broken then, and the process ends.
pub const SETTLE: Duration = Duration::from_secs(5);
/// Time between two looks meanwhile.
const SETTLE_POLL: Duration = Duration::from_micros(50);
/// Ends of loads that wait for room in the ring: as many as there are operations. A sidecar that lets more pile up reads
/// nothing, and is left.
const UNREPORTED_MAX: usize = OPERATIONS;

/// A connection as the calling thread and the copier share it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) connection: Arc<Connection>,
    out: Mutex<Outbox>,
    /// The words as the GPU's streams reach them.
    words: Option<Words>,
}

#[derive(Debug)]
struct Outbox {
    submission: Submission,
    /// Ends of loads that found no room, in their order: posted as soon as there is some, since the sidecar keeps their
    /// slots until then.
    unreported: VecDeque<WorkerRequest>,
}

// === impl Link ===

impl Link {
    /// A fresh connection, its words shown to the GPU that holds the rank's memory, if one does.
    pub(super) fn new(connection: &Arc<Connection>, gpu: Option<&Arc<Gpu>>) -> Result<Self, CudaError> {
        let words = gpu.map(|gpu| Words::new(gpu, &connection.memory)).transpose()?;
        let out = Outbox { submission: Submission::new(&connection.memory), unreported: VecDeque::new() };
        Ok(Self { out: Mutex::new(out), connection: Arc::clone(connection), words })
    }

    /// What streams write and wait on; a rank on a GPU has it on every connection.
    pub(super) fn words(&self) -> &Words {
        self.words.as_ref().expect("a rank whose memory is a GPU's")
    }

    fn out(&self) -> MutexGuard<'_, Outbox> {
        // A panic between two posts leaves a sound ring.
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn post(&self, request: WorkerRequest) -> bool {
        let mut out = self.out();
        let posted = out.submission.post(request).is_some();
        out.submission.flush(&self.connection);
        posted
    }

    /// Reports the end of this rank's part of load `op`.
    pub(super) fn post_loaded(&self, op: u64, end: LoadEnd) {
        let mut out = self.out();
        out.unreported.push_back(WorkerRequest::Loaded { op, end });
        out.post_unreported(&self.connection);
        if out.unreported.len() > UNREPORTED_MAX {
            self.connection.hang_up();
        }
    }

    /// Answers requests for blocks in the staging segment.
    pub(super) fn post_staged(&self, answers: impl Iterator<Item = (Stage, bool)>) {
        let mut out = self.out();
        let staged =
            |(stage, ok): (Stage, bool)| WorkerRequest::Staged { tag: stage.tag, slot: stage.slot, ok };
        out.unreported.extend(answers.map(staged));
        out.post_unreported(&self.connection);
    }

    /// Posts what found no room before.
    pub(super) fn retry(&self) {
        self.out().post_unreported(&self.connection);
    }

    /// Forbids the sidecar to write any further block of load `op`.
    pub(super) fn close_gate(&self, op: u64) {
        gate::close(self.connection.region(), op);
    }

    /// Host memory, after the gate was closed: waits until the sidecar writes no block any more. A hang-up says so too: its
    /// end of the socket is closed after its last copy.
    pub(super) fn settle(&self) {
        let deadline = clock::now() + SETTLE;
        let settled = || gate::is_settled(self.connection.region());
        while !settled() && !self.connection.is_lost() && clock::now() < deadline {
            std::thread::sleep(SETTLE_POLL);
        }
    }

    /// Host memory: waits for the sidecar's word on load `op`.
    pub(super) fn wait(&self, op: u64, mut patience: Patience) -> Option<Outcome> {
        let region = self.connection.region();
        self.connection.ring();
        loop {
            let outcome = self.outcome(op);
            if outcome.is_some() || self.connection.is_lost() || self.is_late(&mut patience) {
                return outcome;
            }
            wait::sleep_turn(region, SLEEP_TURN, || self.outcome(op).is_some());
        }
    }

    /// Host memory: whether the sidecar has moved nothing for too long.
    pub(super) fn is_late(&self, patience: &mut Patience) -> bool {
        let ended = self.batches().ended;
        patience.is_over(Progress { ended, cuts: 0 }, clock::now())
    }

    /// What became of load `op`, once it has ended.
    pub(super) fn outcome(&self, op: u64) -> Option<Outcome> {
        self.connection.memory.load_outcome(op).filter(|outcome| outcome.status != Status::Pending)
    }

    /// Batches of loads that the sidecar's stream began and ended, as far as can be seen.
    pub(super) fn batches(&self) -> Batches {
        let load = |word| self.connection.region().word64(word).load(Ordering::Acquire);
        // SYNC POINT(device batch): ENDED first, so that a batch between the two loads counts as running.
        let ended = load(header::FENCE_ENDED);
        Batches { began: load(header::FENCE_STARTED), ended }
    }

    /// Cuts of load `op` that have arrived.
    pub(super) fn delivered(&self, op: u64) -> u64 {
        // SYNC POINT(load word): acquire pairs with the store of the sidecar's stream.
        let word = self.connection.region().word64(load_word(op)).load(Ordering::Acquire);
        word.wrapping_sub(load_word_value(op, 0)).cast_signed().max(0).cast_unsigned()
    }

    /// Lets the engine's stream pass its waits for load `op`, every block of which is there.
    pub(super) fn deliver(&self, op: u64, cuts: usize) {
        // SYNC POINT(load word): release pairs with the engine's stream. Operations rise, so the largest value is the last.
        self.connection
            .region()
            .word64(load_word(op))
            .fetch_max(load_word_value(op, cuts), Ordering::Release);
    }
}

/// The sidecar's stream's two counts.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Batches {
    pub(super) began: u64,
    pub(super) ended: u64,
}

// === impl Outbox ===

impl Outbox {
    /// Posts from the front as many as find room.
    fn post_unreported(&mut self, connection: &Connection) {
        while let Some(request) = self.unreported.front() {
            if self.submission.post(*request).is_none() {
                break;
            }
            self.unreported.pop_front();
        }
        self.submission.flush(connection);
    }
}
