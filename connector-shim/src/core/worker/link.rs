//! One connection of a worker, as its threads share it: the words of loads, and LOADED on its way to the sidecar.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use shm_protocol::gate;
use shm_protocol::layout::{OPERATIONS, header, load_word, load_word_value};
use shm_protocol::message::{Outcome, StageRequest, Status};
use shm_protocol::region::Region;
use shm_protocol::request::{LoadEnd, WorkerRequest};

use crate::core::endpoint::Endpoint;
use crate::core::submission::Submission;

/// The most ends of loads that wait for room in the ring: one for each operation. With more, the sidecar does
/// not read its ring, and the rank hangs up.
const UNREPORTED_MAX: usize = OPERATIONS;

/// A connection, shared by the calling thread and the copier.
#[derive(Debug)]
pub struct RankLink<C> {
    /// This process' end, used by both threads.
    pub connection: C,
    out: Mutex<Outbox>,
}

#[derive(Debug)]
struct Outbox {
    submission: Submission,
    /// Ends of loads without room in the ring, in their order. The sidecar keeps a load's slots until it
    /// reads the end, so the ends are posted as soon as the ring has room.
    unreported: VecDeque<WorkerRequest>,
}

/// The two counters of the sidecar's stream.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Batches {
    pub(crate) began: u64,
    pub(crate) ended: u64,
}

// === impl RankLink ===

impl<C: Deref<Target: Endpoint>> RankLink<C> {
    pub(crate) fn new(connection: C) -> Self {
        let submission = Submission::new(connection.memory());
        Self { connection, out: Mutex::new(Outbox { submission, unreported: VecDeque::new() }) }
    }

    fn region(&self) -> &Region {
        self.connection.memory().region()
    }

    fn out(&self) -> MutexGuard<'_, Outbox> {
        // A panic between two posts leaves a sound ring.
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a request. Returns false without room.
    pub fn post(&self, request: WorkerRequest) -> bool {
        let mut out = self.out();
        let posted = out.submission.post(request).is_some();
        out.submission.flush(&*self.connection);
        posted
    }

    /// Reports the end of this rank's part of load `op`.
    pub(super) fn post_loaded(&self, op: u64, end: LoadEnd) {
        let mut out = self.out();
        out.unreported.push_back(WorkerRequest::Loaded { op, end });
        out.post_unreported(&*self.connection);
        if out.unreported.len() > UNREPORTED_MAX {
            self.connection.hang_up();
        }
    }

    /// Answers requests for blocks in the staging segment.
    pub(crate) fn post_staged(&self, answers: impl Iterator<Item = (StageRequest, bool)>) {
        let mut out = self.out();
        let staged = |(stage, ok): (StageRequest, bool)| WorkerRequest::Staged {
            tag: stage.tag,
            slot: stage.slot,
            ok,
        };
        out.unreported.extend(answers.map(staged));
        out.post_unreported(&*self.connection);
    }

    /// Posts ends of loads that found no room before.
    pub(super) fn retry(&self) {
        self.out().post_unreported(&*self.connection);
    }

    /// True if the end of every ended load was posted.
    pub fn is_reported(&self) -> bool {
        self.out().unreported.is_empty()
    }

    /// Host memory: stores a fence word.
    pub fn store(&self, word: usize, step: u64) {
        // SYNC POINT(step): release pairs with the sidecar's acquire; the KV written before is visible with it.
        self.region().word64(word).store(step, Ordering::Release);
    }

    /// Forbids the sidecar to write any further block of load `op`.
    pub(crate) fn close_gate(&self, op: u64) {
        gate::close_gate(self.region(), op);
    }

    /// Host memory, after the gate was closed: true if the sidecar writes no block any more. A hang-up is
    /// such a sign too: the sidecar closes its socket after its last copy.
    pub fn is_settled(&self) -> bool {
        gate::is_settled(self.region()) || self.connection.is_lost()
    }

    /// The sidecar's answer to load `op`; `None` until the load has ended.
    pub fn outcome(&self, op: u64) -> Option<Outcome> {
        self.connection.memory().load_outcome(op).filter(|outcome| outcome.status != Status::Pending)
    }

    /// Batches of loads that the sidecar's stream began and ended, as far as can be seen.
    pub(crate) fn batches(&self) -> Batches {
        let load = |word| self.region().word64(word).load(Ordering::Acquire);
        // SYNC POINT(device batch): ENDED first, so that a batch between the two loads counts as running.
        let ended = load(header::FENCE_ENDED);
        Batches { began: load(header::FENCE_STARTED), ended }
    }

    /// Number of cuts of load `op` that have arrived.
    pub(crate) fn delivered(&self, op: u64) -> u64 {
        // SYNC POINT(load word): acquire pairs with the store of the sidecar's stream.
        let word = self.region().word64(load_word(op)).load(Ordering::Acquire);
        word.wrapping_sub(load_word_value(op, 0)).cast_signed().max(0).cast_unsigned()
    }

    /// Lets the engine's stream pass its waits for load `op`: the first `cuts` cuts are there.
    pub(crate) fn deliver(&self, op: u64, cuts: usize) {
        // SYNC POINT(load word): release pairs with the engine's stream. Operations rise, so the largest value is the last.
        self.region().word64(load_word(op)).fetch_max(load_word_value(op, cuts), Ordering::Release);
    }
}

// === impl Outbox ===

impl Outbox {
    /// Posts as many ends as the ring has room for, from the front.
    fn post_unreported(&mut self, connection: &(impl Endpoint + ?Sized)) {
        while let Some(request) = self.unreported.front() {
            if self.submission.post(*request).is_none() {
                break;
            }
            self.unreported.pop_front();
        }
        self.submission.flush(connection);
    }
}
