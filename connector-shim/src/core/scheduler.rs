//! A scheduler's session: asks what is kept, promises loads, posts saves and gives them up.
//!
//! Every call answers at once. Without a sidecar every answer is "miss" and every save is dropped.

mod announced;
mod handover;
mod link;
mod query;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use shm_protocol::key::BlockHash;
use shm_protocol::layout::{LOAD_PREFERENCE, OPERATIONS, QUERY_WAIT_MS_MAX};
use shm_protocol::message::Saved;
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{self, LogKeys, SchedulerRequest};

use self::announced::Announced;
pub use self::announced::BlockChange;
use self::link::{ClosedLog, SchedulerLink};
pub use self::query::{AskedQuery, PENDING, UNBOUND_WAIT};
use crate::core::endpoint::Endpoint;
use crate::core::notices::{NoticeCause, Notices};
use crate::core::submission::Submission;
use crate::error::ShimError;

/// Resets that are told again, one by one, to a sidecar that was restarted; after more, it is told a fresh one, which
/// costs the blocks kept since and nothing else.
const SALTS_MAX: usize = 256;

/// How a session asks and loads.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// The most that all queries of one step may wait.
    pub budget: Duration,
    /// Whether the ranks copy loads themselves.
    pub by_engine: bool,
    /// Whether a load may begin when the step before its own is done: the engine neither zeroes nor copies into blocks.
    pub early: bool,
    /// Blocks of a part, where queries may be answered while their blocks are on their way ([`EngineSession::post_load`]). With 0 every
    /// query is answered once all of its blocks have come.
    pub part_blocks: u32,
    /// A query for so many blocks that another engine computes is answered once all of them have come: a step then loads them.
    pub whole_blocks: u32,
    /// Queries are for the last kept key, as of states, and not for the leading ones: the last one of so many hits is kept.
    pub last: bool,
    /// How long queries wait for blocks.
    pub load_wait: LoadWait,
}

/// The waits of queries for blocks of disks and peers.
#[derive(Copy, Clone, Debug)]
pub struct LoadWait {
    /// Milliseconds at most, while the blocks come faster than the engine computes.
    pub most_ms: u32,
    /// How much longer than computing a load may take, in thousandths of it.
    pub preference: u32,
}

/// Numbers of `u64`, each told by its name.
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
    queries_timed_out queries_not_asked queries_without_room appends_without_room
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
    /// The sidecar's heartbeat when a query timed out, and how long that had waited; nothing is asked until the heartbeat differs,
    /// but for queries that would have waited longer.
    stalled: Option<(u64, Duration)>,
    next_op: u64,
    /// The last step that the engine accepted.
    accepted: Option<u64>,
    /// How often the weights may have changed.
    weights: u64,
    /// How fast the engine computes prompts; none: not known yet.
    prefill: Option<PrefillRate>,
    salts: Vec<[u8; 16]>,
    announced: Announced,
    counters: SchedulerCounters,
}

// === impl LoadWait ===

impl Default for LoadWait {
    /// As of a silent scheduler.
    fn default() -> Self {
        Self { most_ms: QUERY_WAIT_MS_MAX, preference: LOAD_PREFERENCE }
    }
}

// === impl EngineSession ===

impl<C: Deref<Target: Endpoint>> EngineSession<C> {
    /// Without a connection yet. What the engine's log is to say goes to `notices`.
    pub fn new(config: SessionConfig, notices: Arc<Notices>) -> Self {
        Self {
            left: config.budget,
            config,
            notices,
            link: None,
            incarnation: 0,
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

    /// Begins with a new sidecar. It is told first how often this engine's weights changed, then every salt of its namespace.
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
        if !link.connection.knows_acceptance() {
            self.notices.say(NoticeCause::OldSidecar, OLD_SIDECAR);
        } else if self.config.last && !link.connection.knows_states() {
            self.notices.say(NoticeCause::OldSidecar, STATELESS_SIDECAR);
        }
        self.link = Some(link);
    }

    /// The connection is gone.
    pub fn detach(&mut self) {
        if let Some(link) = self.link.take() {
            self.incarnation = link.logs.incarnation();
            self.announced.end_all();
            self.counters.connections_lost += 1;
        }
        self.stalled = None;
    }

    /// The connection in use.
    pub fn connection(&self) -> Option<&C> {
        self.link.as_ref().map(|link| &link.connection)
    }

    /// The ring of that connection, which tests write into beside the session.
    pub fn submission(&mut self) -> Option<&mut Submission> {
        self.link.as_mut().map(|link| &mut link.submission)
    }

    /// Whether a sidecar is there, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Key logs that the sidecar has not been told the end of.
    pub fn logs(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.logs.len() + link.unclosed.len())
    }

    /// Blocks that the sidecar may still read.
    pub fn saving(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.saves.block_count())
    }

    /// Of `blocks`, those that the sidecar may still read: none without a sidecar.
    pub fn unsaved(&self, mut blocks: Vec<u32>) -> Vec<u32> {
        blocks.retain(|block| self.is_unsaved(*block));
        blocks
    }

    /// Whether the sidecar may still read this block.
    pub fn is_unsaved(&self, block: u32) -> bool {
        self.link.as_ref().is_some_and(|link| link.saves.has(block))
    }

    /// Blocks compared with kept ones, and the differing ones of them.
    pub fn checked(&self) -> (u64, u64) {
        (self.counters.blocks_checked, self.counters.blocks_differing)
    }

    /// The first 8 bytes of the namespace that the engine is bound to; 0: none.
    pub fn namespace(&self) -> u64 {
        self.link.as_ref().map_or(0, SchedulerLink::namespace)
    }

    /// Opens a key log and returns its handle, -1 without sidecar or room. `fold` is mixed into every key. Wakes a
    /// sleeping sidecar while the keys are still being written.
    pub fn open_log(&mut self, fold: Option<[u8; 16]>) -> i64 {
        let Some(link) = &mut self.link else { return -1 };
        // A number is free again before its CLOSE has found room: that one goes first.
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

    /// Keys in a log; `None` where the handle is void.
    pub fn length(&mut self, handle: i64) -> Option<u32> {
        Some(self.link.as_mut()?.logs.get(handle)?.1.length)
    }

    /// Appends keys `start..start + count`, each of which `key` sets, and returns the log's length: all of them, or none without
    /// room. `start` must be the length so far. A void handle has length 0. Nothing follows a tail.
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

    /// Appends keys to a log of `length`, the last one a tail or none; returns its length then.
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

    /// Posts the save of keys `start..` from `blocks`. They are copied once step `step` is done, and kept once it was accepted
    /// ([`EngineSession::accept_step`]). `checked`: what is kept already is compared with them. False: dropped.
    pub fn post_save(&mut self, handle: i64, start: u32, blocks: Vec<u32>, step: u64, checked: bool) -> bool {
        let posted = self.try_save(handle, start, blocks, step, checked).is_some();
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
        checked: bool,
    ) -> Option<()> {
        let link = self.link.as_mut()?;
        let (number, log) = link.logs.get(handle)?;
        let count = u32::try_from(blocks.len()).ok().filter(|count| *count > 0)?;
        let fits = start.checked_add(count)? <= log.length && link.saves.has_room();
        if !fits || !link.connection.knows_acceptance() {
            return None;
        }
        let handover = log.handover && link.connection.knows_handover();
        let (op, keys) = (self.next_op, LogKeys { log: number, from: start, count });
        let save =
            |position| SchedulerRequest::Save(request::Save { op, keys, position, step, checked, handover });
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

    /// The engine went on with the output of step `step`, which every rank returned: saves of that step may be kept, and those of
    /// earlier steps that were not accepted are void. The sidecar is told at once where saves wait for it.
    pub fn accept_step(&mut self, step: u64) {
        self.accepted = self.accepted.max(Some(step));
        if let Some(link) = &mut self.link {
            link.accept_step(step);
        }
    }

    /// Gives up every unfinished save of these blocks, and returns how many there were. The sidecar can see it at once: another
    /// session of this engine may post a load into one of them next.
    pub fn overwrite(&mut self, blocks: impl Iterator<Item = u32>) -> usize {
        let Some(link) = &mut self.link else { return 0 };
        if link.saves.block_count() == 0 {
            return 0;
        }
        let mut given_up = 0;
        for cancel in link.saves.cancel(blocks) {
            given_up += cancel.count as usize;
            if link.submission.post(SchedulerRequest::Cancel(cancel)).is_none() {
                // No room even for giving up: this word covers all of them, those still listed too.
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
            // Without room even here the lease ends with the log, or by its age.
            link.submission.post(SchedulerRequest::Release { log: number });
        }
    }

    /// Closes a log: its lease and its pending query end. `way`: a number for the way the request's answer ended; 0: not told.
    pub fn close_log(&mut self, handle: i64, way: u32) {
        let Some(link) = &mut self.link else { return };
        if let Some((number, log)) = link.logs.close_log(handle) {
            if let Some(op) = log.pending {
                link.questions.remove(&op);
            }
            link.post_close(ClosedLog { number, chunks: log.chunks, way });
        }
    }

    /// Starts a new generation of the namespace, which this random `salt` tells from every other: what was kept before is not
    /// served any more, and no lease survives.
    pub fn salt(&mut self, salt: [u8; 16]) {
        self.end_generation(SchedulerRequest::Salt { salt });
        if self.salts.len() == SALTS_MAX {
            self.salts.clear();
        }
        self.salts.push(salt);
    }

    /// The engine's weights may have changed for the `number`th time: nothing is served, and nothing saved, until every rank
    /// has stated what it holds now ([`crate::worker::RankClient::set_weights`]). No lease survives. A number that is not above
    /// the last one does nothing.
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

    /// Tells the sidecar what ends every lease. One that has no room for it is left: the next connection is told first.
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

    /// Ends a step: publishes, reaps, reclaims, and refills the budget. An error: the sidecar broke the protocol,
    /// and is to be left.
    pub fn end_step(&mut self) -> Result<(), String> {
        self.left = self.config.budget;
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

    /// Has [`EngineSession::take_changes`] tell of every block that the engine could find at the sidecar, and then of what changes. Called
    /// again, of every block again: whoever is told has forgotten them.
    pub fn ask_announcements(&mut self) {
        self.announced.again();
        if let Some(link) = &self.link {
            link.ask_for_all(self.announced.asked);
        }
    }

    /// What has changed of the blocks since the last call, once [`EngineSession::ask_announcements`] was called. Without a sidecar there are none.
    /// An error: the sidecar broke the protocol, and is to be left.
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

    /// The engine computes prompts at this rate. Nothing is posted: a word in shared memory says it.
    pub fn tell_prefill(&mut self, rate: PrefillRate) {
        self.prefill = Some(rate);
        self.link.iter().for_each(|link| link.tell_prefill(rate));
    }

    /// Forgets queries that were posted and never asked for again.
    fn prune_questions(&mut self) {
        let oldest = self.next_op.saturating_sub(OPERATIONS as u64);
        if let Some(link) = &mut self.link
            && link.questions.len() >= OPERATIONS
        {
            link.questions.retain(|op, _| *op >= oldest);
        }
    }

    /// Numbers since the start, by name.
    pub fn stats(&self) -> BTreeMap<&'static str, u64> {
        self.counters.by_name()
    }

    /// Makes what was posted visible to the sidecar.
    pub fn flush(&mut self) {
        if let Some(link) = &mut self.link {
            link.flush();
        }
    }
}

/// The notice for an engine whose saves are dropped because it has shown nothing of what it computes.
const UNPROVEN: &str = "blocks of this engine are not kept, because it took over the facts of its namespace and has not \
     passed a KV check there yet. It can load. To save, it must compute the first block of a kept prompt and have it \
     compared: Engine.prove(tokens, compute) in Python, pillion_scheduler_check in C. If the namespace keeps no prompt, \
     let vLLM answer one first";

/// The notice for an engine whose sidecar would keep what the engine never accepted.
const OLD_SIDECAR: &str = "blocks of this engine are not kept, because the sidecar's release would also keep blocks of \
     failed steps. The engine can load. To save, upgrade the sidecar to 0.3.0 or later";

/// The notice for an engine with states and a sidecar of a release without them.
const STATELESS_SIDECAR: &str = "no prompt of this engine is found, because the sidecar's release does not know states: upgrade the \
     sidecar to this engine's release of Pillion";

/// The notice for the engine's log when its check found that it computes other KV than the sidecar keeps.
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
