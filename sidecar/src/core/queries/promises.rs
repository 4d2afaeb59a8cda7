//! Promises: an engine that computes prompts for others promises each of them, long before it saves the first
//! block.
//!
//! A promise lasts until its log is closed, and holds as long as its engine works. A request waits for a
//! promised prompt while the promise holds, up to the limit of the asking engine: so a prompt may wait its
//! turn at the engine computing it.
//!
//! A promise is broken if such a wait ends without the promised block. Broken promises are counted by
//! promiser ([`Credit`]); blocks of other engines do not make up for them. In each pause one request tries a
//! promiser without credit. Once its run stops growing, this request waits as if nothing were promised.
//!
//! Peers get the last two known keys of each promise: the last one may be the key of a tail, and not every
//! engine asks for a tail. A key depends on all keys before it, so a prompt with one of these keys in its
//! place is the promised one. A published promise outlasts the promise itself: it ends once all saves for
//! others have ended that its engine had posted by then, because a peer cannot see a save. Its end is
//! published behind the blocks of these saves, so that a peer sees the blocks first.

use mesh::directory::Credit;
use mesh::transport::{Label, PeerNumber, StandingTerms};
use shm_protocol::key::{BlockHash, BlockKey};

use super::{Action, Base, Binding, Context, Queries, QueryAsker, Question, SessionId};
use crate::core::engines::SchedulerRole;
use crate::core::event::MeshEvent;
use crate::core::peers::KeptAsk;

/// Limit of prompts promised by an engine at once: as many as another engine may await.
const PROMPTS_MAX: usize = 64;
/// Limit of published keys of an engine's closed logs: those of as many promises. Its saves may never begin,
/// and published keys are searched again and again, here and at every peer.
const ENDING_MAX: usize = 2 * PROMPTS_MAX;
/// Milliseconds without a sign of an engine, after which its promises do not hold. A longer step is not worth
/// a wait.
const WORKED_MS: u64 = 5000;

/// The state of all promises outside the logs.
#[derive(Debug, Default)]
pub(super) struct EndingPromises {
    /// True if they may differ from those published last.
    may_differ: bool,
    /// Published keys of closed logs.
    ending: Vec<EndingPromise>,
}

/// A published key of a closed log. It is published until all of its scheduler's saves for other engines, up to
/// the newest one when the log was closed, have ended.
#[derive(Debug)]
struct EndingPromise {
    key: BlockKey,
    session: SessionId,
    log: u32,
    /// The operation of that save.
    newest: u64,
}

/// The source of a promised prompt.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Promiser {
    Engine(SessionId),
    Peer(PeerNumber),
}

/// A promise of one block.
#[derive(Debug)]
pub(super) struct Promise {
    /// The place of its key in the waiting request's log.
    end: u32,
    by: Vec<Promiser>,
    /// True if one of the promisers keeps its promises, as far as is known.
    pub(super) is_believed: bool,
}

// === impl Promise ===

impl Promise {
    /// Returns the peers among its promisers.
    pub(super) fn peers(&self) -> Vec<PeerNumber> {
        let peer = |one: &Promiser| if let Promiser::Peer(peer) = one { Some(*peer) } else { None };
        self.by.iter().filter_map(peer).collect()
    }

    /// True if both promises have a common promiser.
    pub(super) fn shares_promiser(&self, other: &Self) -> bool {
        self.by.iter().any(|one| other.by.contains(one))
    }
}

// === impl QueryAsker ===

impl QueryAsker {
    /// True if an open log has this key at this place.
    fn has_key_at(&self, log: u32, (hash, place): (&BlockHash, u32)) -> bool {
        self.logs.known(log).keys.get(place as usize) == Some(hash)
    }
}

// === impl EndingPromises ===

impl EndingPromises {
    /// Forgets the oldest keys of a session's closed logs beyond [`ENDING_MAX`].
    fn forget_oldest(&mut self, session: SessionId) {
        let of_session = |ending: &&EndingPromise| ending.session == session;
        let mut over = self.ending.iter().filter(of_session).count().saturating_sub(ENDING_MAX);
        self.ending.retain(|ending| {
            let forgets = over > 0 && of_session(&ending);
            over -= usize::from(forgets);
            !forgets
        });
    }
}

// === impl Queries ===

impl Queries {
    /// Notes the promise of a session's engine to compute the keys of this log for another engine. Without
    /// effect beyond [`PROMPTS_MAX`].
    pub(crate) fn note_promise(&mut self, session: SessionId, log: u32, cx: &mut Context) {
        self.promises_may_differ();
        let promised = &mut self.logs(session).promised;
        if promised.contains(&log) {
            return;
        }
        if promised.len() >= PROMPTS_MAX {
            cx.stats.handover_promises_refused += 1;
            return;
        }
        promised.insert(log);
        cx.stats.handover_promises += 1;
    }

    /// Ends the promise of a log about to be closed, if it has one.
    pub(super) fn end_promise(
        &mut self,
        session: SessionId,
        log: u32,
        newest_handover: impl FnOnce() -> Option<u64>,
        base: &mut Base,
    ) {
        let logs = &self.askers[&session].logs;
        if !logs.promised.contains(&log) {
            return;
        }
        let binding = base.engines[session].binding().filter(|_| base.sources.mesh().is_some());
        if let Some(binding) = binding
            && let Some(newest) = newest_handover()
        {
            let ending = |hash| EndingPromise { key: binding.block_key(hash), session, log, newest };
            self.promises.ending.extend(lasts(&logs.known(log).keys).iter().map(ending));
            self.promises.forget_oldest(session);
        }
        base.cx.produced.over = true;
        self.promises_may_differ();
    }

    /// Notes a possible change of the promises: peers may have to be told.
    pub(crate) fn promises_may_differ(&mut self) {
        self.promises.may_differ = true;
    }

    /// Publishes the promises to peers, if they have changed. `hands_over`: true if a scheduler's saves for
    /// others, up to this operation, have not all ended. Returns true if it has looked at the promises.
    pub(crate) fn tell_promises(
        &mut self,
        hands_over: impl Fn(SessionId, u64) -> bool,
        base: &mut Base,
    ) -> bool {
        let Base { engines, sources, cx } = base;
        let Some(mesh) = sources.mesh_mut() else { return false };
        if !std::mem::take(&mut self.promises.may_differ) {
            return false;
        }
        self.promises.ending.retain(|ending| hands_over(ending.session, ending.newest));
        let works =
            |session: &SessionId| engines[*session].binding().filter(|_| works(&engines[*session], cx));
        let at_work = self.askers.iter().filter_map(|(session, asker)| Some((works(session)?, &asker.logs)));
        let lasts = at_work.flat_map(|(binding, logs)| {
            let lasts = logs.promised.iter().flat_map(|log| lasts(&logs.known(*log).keys));
            lasts.map(move |hash| binding.block_key(hash))
        });
        let keys: Vec<BlockKey> = lasts.chain(self.promises.ending.iter().map(|ending| ending.key)).collect();
        mesh.tell_promises(keys, cx);
        true
    }

    /// Keeps a peer's ask for promised blocks until these are committed, or answers it now.
    pub(crate) fn keep_ask(
        &mut self,
        number: u64,
        (peer, blocks, terms): (PeerNumber, Vec<Label>, StandingTerms),
        base: &mut Base,
    ) {
        let ask = KeptAsk::new(peer, blocks.clone(), terms, &base.cx);
        let promise = ask.as_ref().and_then(|ask| self.find_promise(ask.last, base));
        let Base { sources, cx, .. } = base;
        let Some(mesh) = sources.mesh_mut() else { return };
        match ask {
            Some(mut ask) => {
                ask.promise = promise;
                mesh.keep_ask(number, ask, cx);
            }
            None => mesh.apply_event(MeshEvent::Asked { ask: number, peer, blocks, standing: None }, cx),
        }
    }

    /// Returns the scheduler and the log of a promise with this block at this place, by an engine at work.
    fn find_promise(&self, (key, place): (BlockKey, u32), base: &Base) -> Option<(SessionId, u32)> {
        self.askers.iter().find_map(|(session, asker)| {
            let scheduler = &base.engines[*session];
            let binding = scheduler.binding().filter(|_| works(scheduler, &base.cx))?;
            let is_its = binding.block_key(&key.hash) == key;
            let log = asker.logs.promised.iter().find(|log| asker.has_key_at(**log, (&key.hash, place)))?;
            is_its.then_some((*session, *log))
        })
    }

    /// True if a promise with this block at this place has not ended, or its saves have not.
    fn is_coming(&self, promise: (SessionId, u32), (key, place): (BlockKey, u32), base: &Base) -> bool {
        let (session, log) = promise;
        let lasts = self.askers.get(&session).is_some_and(|asker| {
            works(&base.engines[session], &base.cx)
                && asker.logs.promised.contains(&log)
                && asker.has_key_at(log, (&key.hash, place))
        });
        lasts || self.promises.ending.iter().any(|ending| (ending.session, ending.log) == promise)
    }

    /// Answers the standing asks of peers whose patience or promise has ended.
    pub(crate) fn review_asks(&mut self, base: &mut Base) {
        let Some(mesh) = base.sources.mesh() else { return };
        let stands = |ask: &KeptAsk| {
            let promised = ask.promise.is_some_and(|promise| self.is_coming(promise, ask.last, base));
            base.cx.now_ms < ask.until_ms && (promised || ask.is_filling(&base.cx))
        };
        let over: Vec<u64> = mesh.kept_asks().filter(|(_, ask)| !stands(ask)).map(|(ask, _)| ask).collect();
        let Base { sources, cx, .. } = base;
        if let Some(mesh) = sources.mesh_mut() {
            over.into_iter().for_each(|ask| mesh.answer_kept(ask, cx));
        }
    }

    /// Returns the promise of the block behind a question's run, by other engines here or by peers. A block's
    /// key depends on all keys before it, so any log of the same prompt has it at the same place.
    pub(super) fn promise_of_next(&self, question: Question, base: &Base) -> Option<Promise> {
        let log = self.log(question.session, question.log);
        let end = log.window.as_ref()?.end;
        let missing = log.keys.get(end as usize..).filter(|missing| !missing.is_empty())?;
        let binding = base.engines[question.session].binding()?;
        let promises = |session: &SessionId| {
            let logs = &self.askers[session].logs;
            works(&base.engines[*session], &base.cx)
                && logs.promised.iter().any(|log| logs.known(*log).keys.get(end as usize) == missing.first())
        };
        let here = self.others(question.session, binding.namespace, &base.engines).filter(promises);
        let peers = base.sources.mesh().map(|mesh| mesh.promisers(&binding, missing, &base.cx));
        let peers = peers.into_iter().flatten().map(Promiser::Peer);
        let by: Vec<Promiser> = here.map(Promiser::Engine).chain(peers).collect();
        let is_believed = by.iter().any(|one| self.credit(*one, base).is_some_and(Credit::is_believed));
        (!by.is_empty()).then_some(Promise { end, by, is_believed })
    }

    /// True if a request may try one of these promisers without credit.
    pub(super) fn begin_trial(&mut self, promise: &Promise, base: &mut Base) -> bool {
        let now_ms = base.cx.now_ms;
        // Every promiser must begin its next pause, so all are asked.
        let tried = promise
            .by
            .iter()
            .filter(|one| self.credit_mut(**one, base).is_some_and(|credit| credit.begin_trial(now_ms)));
        tried.count() > 0
    }

    /// Judges the last promise seen by a wait: the wait ended with the blocks of its log before `end`,
    /// `whole` or not.
    pub(super) fn judge_promise(&mut self, promise: &Promise, (end, whole): (u32, bool), base: &mut Base) {
        let now_ms = base.cx.now_ms;
        if whole || promise.end < end {
            // Several promisers get no credit for one block.
            if let [one] = promise.by[..]
                && let Some(credit) = self.credit_mut(one, base)
            {
                credit.keep_promise();
            }
            return;
        }
        base.cx.stats.handover_promises_broken += 1;
        for one in &promise.by {
            if self.credit_mut(*one, base).is_some_and(|credit| credit.break_promise(now_ms)) {
                let text = distrust(*one, base);
                base.cx.actions.push(Action::Warn(text));
            }
        }
    }

    /// Returns the number of leading keys of a prompt that engines here have promised.
    pub(crate) fn promised_run(&self, binding: &Binding, keys: &[BlockHash], base: &Base) -> usize {
        let promises = |session: &SessionId, asker: &QueryAsker| {
            base.engines.bound_to(*session) == Some(binding.namespace)
                && works(&base.engines[*session], &base.cx)
                && asker.credit.is_believed()
        };
        let believed = self.askers.iter().filter(|(session, asker)| promises(session, asker));
        let logs = believed
            .flat_map(|(_, QueryAsker { logs, .. })| logs.promised.iter().map(|log| logs.known(*log)));
        logs.map(|log| count_common(&log.keys, keys)).max().unwrap_or(0)
    }

    fn credit<'a>(&'a self, promiser: Promiser, base: &'a Base) -> Option<&'a Credit> {
        match promiser {
            Promiser::Engine(session) => self.askers.get(&session).map(|asker| &asker.credit),
            Promiser::Peer(peer) => base.sources.mesh()?.credit(peer),
        }
    }

    fn credit_mut<'a>(&'a mut self, promiser: Promiser, base: &'a mut Base) -> Option<&'a mut Credit> {
        match promiser {
            Promiser::Engine(session) => self.askers.get_mut(&session).map(|asker| &mut asker.credit),
            Promiser::Peer(peer) => base.sources.mesh_mut()?.credit_mut(peer),
        }
    }
}

/// Returns the number of leading keys in both lists. A key depends on all keys before it, so equal keys have
/// equal ones before them.
fn count_common(one: &[BlockHash], other: &[BlockHash]) -> usize {
    let (mut common, mut end) = (0, one.len().min(other.len()));
    while common < end {
        let middle = common.midpoint(end);
        if one[middle] == other[middle] { common = middle + 1 } else { end = middle }
    }
    common
}

/// Returns a line for the log: requests no longer wait for this promiser.
fn distrust(promiser: Promiser, base: &Base) -> String {
    let who = match promiser {
        Promiser::Engine(session) => format!("engine {}", base.engines[session].engine),
        Promiser::Peer(_) => {
            "a peer, of those whose pillion_mesh_peer_broken_promises_total grows,".to_owned()
        }
    };
    format!(
        "{who} broke its last 3 promises to compute a prompt for another engine, so requests do not wait for its promises. One \
         request tries after 10 s, later after up to 60 s. Check that this engine computes the prompts that it gets with \
         do_remote_decode"
    )
}

/// True if an engine was seen to work of late: otherwise its promises do not hold.
fn works(engine: &SchedulerRole, cx: &Context) -> bool {
    cx.now_ms < engine.worked_ms + WORKED_MS
}

/// Returns the published keys of a promised log.
fn lasts(keys: &[BlockHash]) -> &[BlockHash] {
    &keys[keys.len().saturating_sub(2)..]
}
