//! Promises: an engine that computes prompts for others says which, long before it saves the first block.
//!
//! A promise lasts until its log is closed, and holds as long as its engine works. What is promised is waited for while it holds, as
//! long as the engine that asks has said: so a prompt may wait its turn at the engine that computes it.
//!
//! A promise is broken where such a wait ends without the promised block. Broken promises are counted by promiser ([`Credit`]): blocks of
//! others make up for none. One request in each pause tries a promiser without credit. It waits as if nothing were promised once its
//! run does not grow.
//!
//! Peers are told of each promise the last two keys that are known: the last may be that of a tail, which not everybody asks for. A key
//! hangs on all before it, so who awaits a prompt that has one of them there awaits what is promised. What is told lasts longer than
//! the promise: until the saves have ended that its engine had posted for others by then, as a peer cannot see a save. It ends behind
//! the news of their blocks, so that who sees it end has seen all there is.

use mesh::directory::Credit;
use mesh::transport::PeerNumber;
use shm_protocol::key::{BlockHash, BlockKey};

use super::{Action, Base, Context, Queries, Question, SessionId};
use crate::core::engines::Scheduler;

/// Prompts that an engine may have promised at once: as many as another one may await.
const PROMPTS_MAX: usize = 64;
/// Keys of an engine's closed logs that are told: those of as many promises. Its saves may never begin, and what is told is looked at
/// again and again, here and by every peer.
const ENDING_MAX: usize = 2 * PROMPTS_MAX;
/// An engine of which nothing was seen for so long keeps no promise. A step that is longer is not worth waiting for.
const WORKED_MS: u64 = 5000;

/// What of all promises is not in the logs.
#[derive(Debug, Default)]
pub(super) struct Promises {
    /// They may be others than peers were told last.
    may_differ: bool,
    /// Keys of closed logs that peers are still told: each with its scheduler, and the operation of that scheduler's newest save for
    /// another engine when the log was closed. A key is told until all such saves up to that operation have ended.
    ending: Vec<(BlockKey, SessionId, u64)>,
}

/// The source of promised prompts.
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
    /// Whether one of these keeps its promises, as far as is known.
    pub(super) is_believed: bool,
}

// === impl Promise ===

impl Promise {
    /// Whether one of its promisers has made the other, too.
    pub(super) fn shares_promiser(&self, other: &Self) -> bool {
        self.by.iter().any(|one| other.by.contains(one))
    }
}

// === impl Promises ===

impl Promises {
    /// Leaves of an ended log's keys so many of this session, the newest.
    fn forget_oldest(&mut self, session: SessionId) {
        let of_session = |(_, other, _): &&(BlockKey, SessionId, u64)| *other == session;
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
    /// A session's engine computes the keys of this log for another one.
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

    /// A log is about to be closed: its promise, if it has one, is over.
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
            let lasts = lasts(&logs.known(log).keys).iter().map(|hash| (binding.key(hash), session, newest));
            self.promises.ending.extend(lasts);
            self.promises.forget_oldest(session);
        }
        base.cx.produced.over = true;
        self.promises_may_differ();
    }

    /// Peers are to be told what is promised, if that is something else by now.
    pub(crate) fn promises_may_differ(&mut self) {
        self.promises.may_differ = true;
    }

    /// Tells peers what is promised, if that is something else by now. `hands_over`: whether a scheduler's saves for others, up to
    /// this one, have not all ended.
    pub(crate) fn tell_promises(&mut self, hands_over: impl Fn(SessionId, u64) -> bool, base: &mut Base) {
        let Base { engines, sources, cx } = base;
        let Some(mesh) = sources.mesh_mut() else { return };
        if !std::mem::take(&mut self.promises.may_differ) {
            return;
        }
        self.promises.ending.retain(|(_, session, newest)| hands_over(*session, *newest));
        let works =
            |session: &SessionId| engines[*session].binding().filter(|_| works(&engines[*session], cx));
        let at_work = self.askers.iter().filter_map(|(session, asker)| Some((works(session)?, &asker.logs)));
        let lasts = at_work.flat_map(|(binding, logs)| {
            let lasts = logs.promised.iter().flat_map(|log| lasts(&logs.known(*log).keys));
            lasts.map(move |hash| binding.key(hash))
        });
        let keys: Vec<BlockKey> = lasts.chain(self.promises.ending.iter().map(|(key, ..)| *key)).collect();
        mesh.tell_promises(keys, cx);
    }

    /// The promise of the block behind a question's run, by other engines here or by peers. A block's key hangs on all before it, so a log
    /// of the same prompt has it at the same place.
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

    /// Whether a request may try one of these promisers without credit.
    pub(super) fn begin_trial(&mut self, promise: &Promise, base: &mut Base) -> bool {
        let now_ms = base.cx.now_ms;
        // Each of them has begun its next pause then.
        let tried = promise
            .by
            .iter()
            .filter(|one| self.credit_mut(**one, base).is_some_and(|credit| credit.begin_trial(now_ms)));
        tried.count() > 0
    }

    /// A wait has ended with the blocks of its log before `end`, `whole` or not: counts the promise seen last.
    pub(super) fn judge_promise(&mut self, promise: &Promise, (end, whole): (u32, bool), base: &mut Base) {
        let now_ms = base.cx.now_ms;
        if whole || promise.end < end {
            // Several have no credit for one block.
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

/// A line for the log: requests wait for this promiser no longer.
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

/// Whether an engine was seen to work of late: else it keeps no promise.
fn works(engine: &Scheduler, cx: &Context) -> bool {
    cx.now_ms < engine.worked_ms + WORKED_MS
}

/// Of a promised log's keys, those that peers are told.
fn lasts(keys: &[BlockHash]) -> &[BlockHash] {
    &keys[keys.len().saturating_sub(2)..]
}
