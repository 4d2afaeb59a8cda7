//! A scheduler's session: queries, loads, and saves with their cancellation.
//!
//! Every call answers at once. Without a sidecar every answer is "miss" and every save is dropped.

mod advice;
mod announced;
mod handover;
mod link;
mod query;

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Duration;

use shm_protocol::key::BlockHash;
use shm_protocol::layout::{LOAD_PREFERENCE, OPERATIONS, QUERY_KEYS, QUERY_WAIT_MS_MAX};
use shm_protocol::message::Saved;
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{self, LogKeys, SchedulerRequest};

use self::announced::Announced;
pub use self::announced::BlockChange;
use self::link::{ClosedLog, SchedulerLink};
pub use self::query::{AskedQuery, PENDING, UNBOUND_WAIT};
use crate::core::endpoint::{Endpoint, Feature};
use crate::core::notices::{NoticeCause, Notices};
use crate::core::submission::Submission;
use crate::error::ShimError;

/// The most salts repeated, one by one, to a restarted sidecar. After more salts the list begins again, which
/// costs only the blocks kept since.
const SALTS_MAX: usize = 256;

/// Settings of a session's queries and loads.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// The longest total wait of all queries of one step.
    pub budget: Duration,
    /// True if the ranks copy loads themselves.
    pub by_engine: bool,
    /// True if a load may begin when the previous step is done: the engine does not zero blocks or copy into
    /// them.
    pub early: bool,
    /// Blocks in one part of a load whose query was answered while blocks were on their way
    /// ([`EngineSession::post_load`]). With 0 every query is answered once all of its blocks have come.
    pub part_blocks: u32,
    /// A query for at most this many blocks of another engine is answered once all of them have come: one
    /// step then loads them.
    pub whole_blocks: u32,
    /// True if a query may be answered with more hits than the pool holds: they are loaded in parts, and any
    /// part may fail. Only with `part_blocks`.
    pub streams: bool,
    /// True if queries ask for the last kept key (as for states), not for the leading ones: only the last of
    /// the hits is kept.
    pub last: bool,
    /// Limits of the waits for blocks.
    pub load_wait: LoadWait,
}

/// The waits of queries for blocks of disks and peers.
#[derive(Copy, Clone, Debug)]
pub struct LoadWait {
    /// The longest wait in milliseconds, while the blocks arrive faster than the engine computes.
    pub most_ms: u32,
    /// The longest time of a load, as a multiple of computing its blocks, in thousandths.
    pub preference: u32,
}

/// Declares counters of `u64` and a map of them by name.
macro_rules! counters {
    ($($name:ident)*) => {
        #[derive(Debug, Default)]
        struct SchedulerCounters { $($name: u64,)* }

        impl SchedulerCounters {
            fn by_name(&self) -> BTreeMap<&'static str, u64> {
                BTreeMap::from([$((stringify!($name), self.$name),)*])
            }
        }
    };
}

counters! {
    queries hit_blocks queries_from_lease queries_answered_early
    queries_late queries_timed_out queries_not_asked queries_without_room appends_without_room
    loads loads_without_lease saves saves_without_room
    blocks_committed blocks_present blocks_cancelled blocks_dropped
    blocks_checked blocks_differing blocks_unproven blocks_unaccepted saves_voided connections_lost
}

/// One scheduler's session. See the module.
#[derive(Debug)]
pub struct EngineSession<C> {
    config: SessionConfig,
    notices: Arc<Notices>,
    link: Option<SchedulerLink<C>>,
    incarnation: u64,
    left: Duration,
    /// The sidecar's heartbeat when a step's budget last ended without an answer: no step waits until it changes.
    late: Option<u64>,
    /// The sidecar's heartbeat when a query timed out, and that query's wait. Until the heartbeat changes,
    /// only queries with longer waits are posted.
    stalled: Option<(u64, Duration)>,
    next_op: u64,
    /// The last step accepted by the engine.
    accepted: Option<u64>,
    /// Number of the last possible change of weights.
    weights: u64,
    /// The engine's rate of computing prompts; `None` while not known.
    prefill: Option<PrefillRate>,
    salts: Vec<[u8; 16]>,
    announced: Announced,
    counters: SchedulerCounters,
}

// === impl LoadWait ===

impl Default for LoadWait {
    /// The values for a scheduler that states none.
    fn default() -> Self {
        Self { most_ms: QUERY_WAIT_MS_MAX, preference: LOAD_PREFERENCE }
    }
}

// === impl EngineSession ===

impl<C: Deref<Target: Endpoint>> EngineSession<C> {
    /// A session without a connection. Notices for the engine's log go to `notices`.
    pub fn new(config: SessionConfig, notices: Arc<Notices>) -> Self {
        Self {
            left: config.budget,
            config,
            notices,
            link: None,
            incarnation: 0,
            late: None,
            stalled: None,
            next_op: 1,
            accepted: None,
            weights: 0,
            prefill: None,
            salts: Vec::new(),
            announced: Announced::default(),
            counters: SchedulerCounters::default(),
        }
    }

    /// Begins with a new sidecar. The session first posts the number of its last change of weights, then
    /// every salt of its namespace.
    pub fn attach(&mut self, connection: C) {
        self.detach();
        let mut link = SchedulerLink::new(connection, self.incarnation);
        link.weights = self.weights;
        let weights = (self.weights > 0).then_some(SchedulerRequest::Weights { number: self.weights });
        let told = weights.is_none_or(|weights| link.submission.post(weights).is_some());
        assert!(told, "a fresh ring is empty");
        for &salt in &self.salts {
            let told = link.submission.post(SchedulerRequest::Salt { salt });
            assert!(told.is_some(), "a fresh ring holds {SALTS_MAX} messages");
        }
        link.flush();
        link.ask_for_all(self.announced.asked);
        self.prefill.into_iter().for_each(|rate| link.tell_prefill(rate));
        if !link.connection.knows(Feature::Acceptance) {
            self.notices.say(NoticeCause::OldSidecar, OLD_SIDECAR);
        } else if self.config.last && !link.connection.knows(Feature::States) {
            self.notices.say(NoticeCause::OldSidecar, STATELESS_SIDECAR);
        }
        self.link = Some(link);
    }

    /// Drops a lost connection.
    pub fn detach(&mut self) {
        if let Some(link) = self.link.take() {
            self.incarnation = link.logs.incarnation();
            self.announced.end_all();
            self.counters.connections_lost += 1;
        }
        (self.late, self.stalled) = (None, None);
    }

    /// The connection in use.
    pub fn connection(&self) -> Option<&C> {
        self.link.as_ref().map(|link| &link.connection)
    }

    /// The submission ring of the connection, for writes by tests beside the session.
    pub fn submission(&mut self) -> Option<&mut Submission> {
        self.link.as_mut().map(|link| &mut link.submission)
    }

    /// True while a sidecar is connected, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Number of key logs whose CLOSE was not posted.
    pub fn logs(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.logs.len() + link.unclosed.len())
    }

    /// Number of blocks that the sidecar may still read.
    pub fn saving(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.saves.block_count())
    }

    /// Returns those of `blocks` that the sidecar may still read: none without a sidecar.
    pub fn unsaved(&self, mut blocks: Vec<u32>) -> Vec<u32> {
        blocks.retain(|block| self.is_unsaved(*block));
        blocks
    }

    /// True if the sidecar may still read this block.
    pub fn is_unsaved(&self, block: u32) -> bool {
        self.link.as_ref().is_some_and(|link| link.saves.has(block))
    }

    /// Number of blocks compared with kept ones, and number of differing ones.
    pub fn checked(&self) -> (u64, u64) {
        (self.counters.blocks_checked, self.counters.blocks_differing)
    }

    /// The first 8 bytes of the engine's namespace; 0 without a binding.
    pub fn namespace(&self) -> u64 {
        self.link.as_ref().map_or(0, SchedulerLink::namespace)
    }

    /// Opens a key log and returns its handle, -1 without sidecar or room. `fold` is mixed into every key. Wakes a
    /// sleeping sidecar while the keys are still being written.
    pub fn open_log(&mut self, fold: Option<[u8; 16]>) -> i64 {
        let Some(link) = &mut self.link else { return -1 };
        // The closed log's number is free before its CLOSE is posted: that CLOSE must go first.
        link.retry_closes();
        if !link.unclosed.is_empty() {
            return -1;
        }
        let Some(number) = link.logs.next_number() else { return -1 };
        if link.submission.post(SchedulerRequest::Open { log: number }).is_none() {
            return -1;
        }
        link.flush();
        link.logs.open_log(fold).unwrap_or(-1)
    }

    /// Number of keys in a log; `None` if the handle is void.
    pub fn length(&mut self, handle: i64) -> Option<u32> {
        Some(self.link.as_mut()?.logs.get(handle)?.1.length)
    }

    /// Appends keys `start..start + count`, each set by `key`. Returns the log's length: with all of the
    /// keys, or with none if there is no room. `start` must be the length so far. A void handle has length 0.
    /// Fails if the log ends with a tail.
    pub fn append_keys<E: From<ShimError>>(
        &mut self,
        handle: i64,
        start: u32,
        count: u32,
        key: impl FnMut(u32, &mut BlockHash) -> Result<(), E>,
    ) -> Result<u32, E> {
        let Some(length) = self.length(handle) else { return Ok(0) };
        if start != length {
            let text =
                format!("an append starts at {start} in a log of {length} keys: append from its length");
            return Err(ShimError::Argument(text).into());
        }
        self.extend(handle, (length, count), false, key)
    }

    /// Appends keys to a log of `length`; with `tail` the last one is a tail. Returns the new length.
    fn extend<E: From<ShimError>>(
        &mut self,
        handle: i64,
        (length, count): (u32, u32),
        tail: bool,
        key: impl FnMut(u32, &mut BlockHash) -> Result<(), E>,
    ) -> Result<u32, E> {
        let link = self.link.as_mut().expect("it has the log");
        if link.log(handle).tail {
            let text = "an append goes to a log that ends with a tail: close it, and open another one";
            return Err(ShimError::Argument(text.into()).into());
        }
        if !link.has_room_for_keys(length, count) {
            self.counters.appends_without_room += 1;
            return Ok(length);
        }
        link.write_keys(handle, count, tail, key)?;
        Ok(length + count)
    }

    /// Posts the save of keys `start..` from `blocks`. The sidecar copies them once step `step` is done, and
    /// keeps them once [`EngineSession::accept_step`] named it. With `checked`, kept blocks are compared with
    /// them. Returns false if the save was dropped.
    pub fn post_save(&mut self, handle: i64, start: u32, blocks: Vec<u32>, step: u64, checked: bool) -> bool {
        let posted = self.try_save(handle, start, blocks, step, (checked, 0)).is_some();
        self.count_save(posted)
    }

    /// Posts the save of key `start` from a block, for a request to which the block of an earlier key, `replaced`, is of no
    /// use then: it goes at once. Returns false if the save was dropped.
    pub fn post_replacing(&mut self, handle: i64, start: u32, block: u32, step: u64, replaced: u32) -> bool {
        let posted = self.try_save(handle, start, vec![block], step, (false, replaced + 1)).is_some();
        self.count_save(posted)
    }

    fn count_save(&mut self, posted: bool) -> bool {
        match posted {
            true => self.counters.saves += 1,
            false => self.counters.saves_without_room += 1,
        }
        posted
    }

    fn try_save(
        &mut self,
        handle: i64,
        start: u32,
        blocks: Vec<u32>,
        step: u64,
        (checked, replaced): (bool, u32),
    ) -> Option<()> {
        let link = self.link.as_mut()?;
        let (number, log) = link.logs.get(handle)?;
        let count = u32::try_from(blocks.len()).ok().filter(|count| *count > 0)?;
        let fits = start.checked_add(count)? <= log.length && link.saves.has_room();
        if !fits || !link.connection.knows(Feature::Acceptance) {
            return None;
        }
        let handover = log.handover && link.connection.knows(Feature::Handover);
        let (op, keys) = (self.next_op, LogKeys { log: number, from: start, count });
        let save = |position| {
            SchedulerRequest::Save(request::Save { op, keys, position, step, checked, handover, replaced })
        };
        if !link.post_with_blocks(&blocks, save) {
            return None;
        }
        self.next_op += 1;
        link.saves.begin_save(op, blocks);
        link.unaccepted.insert(step);
        if self.accepted == Some(step) {
            link.accept_step(step);
        }
        Some(())
    }

    /// Accepts step `step`: every rank returned it, and the engine went on with its output. Saves of that
    /// step may be kept; saves of earlier steps without acceptance are void. The sidecar gets the message at
    /// once if saves wait for it.
    pub fn accept_step(&mut self, step: u64) {
        self.accepted = self.accepted.max(Some(step));
        if let Some(link) = &mut self.link {
            link.accept_step(step);
        }
    }

    /// Gives up every unfinished save of these blocks, and returns the number of blocks given up. The cancels
    /// are visible to the sidecar at once: another session of this engine may post a load into one of the
    /// blocks next.
    pub fn overwrite(&mut self, blocks: impl Iterator<Item = u32>) -> usize {
        let Some(link) = &mut self.link else { return 0 };
        if link.saves.block_count() == 0 {
            return 0;
        }
        let mut given_up = 0;
        for cancel in link.saves.cancel(blocks) {
            given_up += cancel.count as usize;
            if link.submission.post(SchedulerRequest::Cancel(cancel)).is_none() {
                // No room even for a cancel: this word covers all unfinished saves.
                self.counters.saves_voided += 1;
                given_up += link.void_saves_below(self.next_op);
                break;
            }
        }
        if given_up > 0 {
            link.flush();
        }
        given_up
    }

    /// Gives up every unfinished save.
    pub fn void_saves(&mut self) {
        if let Some(link) = &mut self.link
            && link.saves.block_count() > 0
        {
            self.counters.saves_voided += 1;
            link.void_saves_below(self.next_op);
        }
    }

    /// Ends the log's lease, if there is or may be one.
    pub fn release_lease(&mut self, handle: i64) {
        let Some(link) = &mut self.link else { return };
        let Some((number, log)) = link.logs.get(handle) else { return };
        let (lease, pending) = (log.lease.take(), log.pending.take());
        if let Some(op) = pending {
            link.questions.remove(&op);
        }
        if lease.is_some() || pending.is_some() {
            // Without room for this message the lease ends with the log, or by its age.
            link.submission.post(SchedulerRequest::Release { log: number });
        }
    }

    /// Closes a log: its lease and its pending query end. `way` is the code of the end of the request's
    /// answer; 0: not known.
    pub fn close_log(&mut self, handle: i64, way: u32) {
        let Some(link) = &mut self.link else { return };
        if let Some((number, log)) = link.logs.close_log(handle) {
            if let Some(op) = log.pending {
                link.questions.remove(&op);
            }
            link.post_close(ClosedLog { number, chunks: log.chunks, way });
        }
    }

    /// True if the sidecar knows the blocks on the engine's device by [`EngineSession::end_log`].
    pub fn knows_devices(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.connection.knows(Feature::Devices))
    }

    /// Ends a log's request, its lease and its pending query. The engine's device still has the blocks: the log
    /// takes saves of those that it is about to reuse, until [`EngineSession::close_log`]. Returns false without
    /// room.
    pub fn end_log(&mut self, handle: i64, way: u32) -> bool {
        let Some(link) = &mut self.link else { return false };
        let Some((log, _)) = link.logs.get(handle) else { return false };
        if link.submission.post(SchedulerRequest::Ended { log, way }).is_none() {
            return false;
        }
        let log = link.log(handle);
        log.lease = None;
        if let Some(op) = log.pending.take() {
            link.questions.remove(&op);
        }
        true
    }

    /// Says that the engine's device has reused the blocks of these keys of an ended log, with no save before.
    pub fn leave_device(&mut self, handle: i64, keys: Range<u32>) {
        let Some(link) = &mut self.link else { return };
        if let Some((log, _)) = link.logs.get(handle) {
            for first in keys.clone().step_by(QUERY_KEYS) {
                let keys = LogKeys::new(log, first..keys.end.min(first + QUERY_KEYS as u32));
                // Without room the copies of these blocks go early.
                link.submission.post(SchedulerRequest::Left { keys });
            }
        }
    }

    /// Starts a new generation of the namespace, named by this random `salt`: earlier blocks are not served
    /// any more, and every lease ends.
    pub fn salt(&mut self, salt: [u8; 16]) {
        self.end_generation(SchedulerRequest::Salt { salt });
        if self.salts.len() == SALTS_MAX {
            self.salts.clear();
        }
        self.salts.push(salt);
    }

    /// Says that the engine's weights may have changed for the `number`th time: nothing is served, and
    /// nothing saved, until every rank has stated its weights again
    /// ([`crate::worker::RankClient::set_weights`]). Every lease ends. A number not above the last one has no
    /// effect.
    pub fn weights(&mut self, number: u64) {
        if number <= self.weights {
            return;
        }
        self.weights = number;
        self.notices.forget_causes(&[NoticeCause::Barred, NoticeCause::Differs]);
        self.end_generation(SchedulerRequest::Weights { number });
        if let Some(link) = &mut self.link {
            (link.weights, link.unbound_since) = (number, None);
        }
    }

    /// Posts a request that ends every lease. Without room for it the session hangs up; the next connection
    /// begins with the same facts.
    fn end_generation(&mut self, request: SchedulerRequest) {
        let Some(link) = &mut self.link else { return };
        if link.submission.post(request).is_some() {
            link.flush();
            link.questions.clear();
            link.logs.iter_mut().for_each(|log| (log.lease, log.pending) = (None, None));
        } else {
            link.void_saves_below(u64::MAX);
            link.connection.hang_up();
            self.detach();
        }
    }

    /// Ends a step: publishes messages, takes completions, reclaims memory, and refills the budget. Fails if
    /// the sidecar broke the protocol; the caller must then hang up.
    pub fn end_step(&mut self) -> Result<(), String> {
        let is_late = self.late.is_some() && self.late == self.link.as_ref().map(SchedulerLink::heartbeat);
        self.left = if is_late { Duration::ZERO } else { self.config.budget };
        self.prune_questions();
        let Some(link) = &mut self.link else { return Ok(()) };
        link.retry_closes();
        link.flush();
        let reaped = link.reap_completions(&mut self.counters);
        link.reclaim();
        let broken = link.submission.broken().map(ToString::to_string);
        if let Ok(Some(saved)) = reaped {
            match saved.differing {
                0 => self.notices.say(NoticeCause::Unproven, UNPROVEN),
                _ => self.notices.say(NoticeCause::Differs, differing(link.namespace(), saved)),
            }
        }
        let Some(text) = reaped.err().or(broken) else { return Ok(()) };
        link.void_saves_below(u64::MAX);
        self.detach();
        Err(text)
    }

    /// Makes [`EngineSession::take_changes`] return every block of this engine at the sidecar, and later the
    /// changes. Another call begins again with every block, for a receiver that has forgotten them.
    pub fn ask_announcements(&mut self) {
        self.announced.again();
        if let Some(link) = &self.link {
            link.ask_for_all(self.announced.asked);
        }
    }

    /// Returns the changes of blocks since the last call; empty before [`EngineSession::ask_announcements`].
    /// A lost sidecar removes every block. Fails if the sidecar broke the protocol; the caller must then hang
    /// up.
    pub fn take_changes(&mut self) -> (Vec<BlockChange>, Result<(), String>) {
        let mut end = Ok(());
        if self.announced.asked > 0
            && let Some(link) = &mut self.link
        {
            end = link.read_announcements(&mut self.announced);
            if end.is_err() {
                link.void_saves_below(u64::MAX);
                self.detach();
            }
        }
        (self.announced.take_changes(), end)
    }

    /// Publishes the engine's rate of computing prompts, in a word of shared memory.
    pub fn tell_prefill(&mut self, rate: PrefillRate) {
        self.prefill = Some(rate);
        self.link.iter().for_each(|link| link.tell_prefill(rate));
    }

    /// Forgets old queries whose answers no one took.
    fn prune_questions(&mut self) {
        let oldest = self.next_op.saturating_sub(OPERATIONS as u64);
        if let Some(link) = &mut self.link
            && link.questions.len() >= OPERATIONS
        {
            link.questions.retain(|op, _| *op >= oldest);
        }
    }

    /// Counters since the start, by name.
    pub fn stats(&self) -> BTreeMap<&'static str, u64> {
        self.counters.by_name()
    }

    /// Makes posted messages visible to the sidecar.
    pub fn flush(&mut self) {
        if let Some(link) = &mut self.link {
            link.flush();
        }
    }
}

/// The notice for an engine whose saves are dropped because none of its blocks has passed a KV check.
const UNPROVEN: &str = "blocks of this engine are not kept, because it took over the facts of its namespace and has not \
     passed a KV check there yet. It can load. To save, it must compute the first block of a kept prompt and have it \
     compared: Engine.prove(tokens, compute) in Python, pillion_scheduler_check in C. If the namespace keeps no prompt, \
     let vLLM answer one first";

/// The notice for an engine whose sidecar would also keep blocks without acceptance.
const OLD_SIDECAR: &str = "blocks of this engine are not kept, because the sidecar's release would also keep blocks of \
     failed steps. The engine can load. To save, upgrade the sidecar to 0.3.0 or later";

/// The notice for an engine with states and a sidecar of a release without them.
const STATELESS_SIDECAR: &str = "no prompt of this engine is found, because the sidecar's release does not know states: upgrade the \
     sidecar to this engine's release of Pillion";

/// The notice for an engine whose check found other KV than the sidecar keeps.
fn differing(namespace: u64, saved: Saved) -> String {
    let millionths = |part: u32| f64::from(part) / 1e6;
    let digits: String = namespace.to_le_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "KV that this engine computed in namespace {digits}... differs from the kept KV by {} (limit {}). This engine is \
         wrong, or the one that saved the blocks. The blocks are removed, and nothing that this engine computes is kept until \
         its checks agree with two other prompts, or for 4 minutes. Pillion is off for this engine if they differ again, or if \
         it took over the facts of its namespace",
        millionths(saved.difference),
        millionths(saved.limit)
    )
}
