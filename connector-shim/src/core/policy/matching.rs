//! The hits of a prompt in the cache.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::checks::CheckedHit;
use super::host::SessionHost;
use super::kinds::{AskedKeys, GroupKind, ServedTokens};
use super::requests::{Adapter, Hit, LastAnswer, Now, RequestId};
use super::{EnginePolicy, PolicyWait};
use crate::core::scheduler::{AskedQuery, PENDING};

/// The most announced requests among the waiting ones. Fetched blocks of more requests would push each other
/// out of memory, and their keys would fill the log arena.
const ANNOUNCED_MAX: usize = 64;

/// The answer to an engine's question about a request.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum FoundTokens {
    /// The number of found tokens beyond the engine's own; true if their load runs beside the steps.
    Tokens(u32, bool),
    /// Not known yet: the engine should ask again.
    Later,
}

/// Nothing is found.
const MISS: FoundTokens = FoundTokens::Tokens(0, false);

/// A question to a session, with the answer its host has waited for.
#[derive(Clone, Debug)]
pub(super) struct KnownAnswer {
    request: RequestId,
    group: usize,
    keys: AskedKeys,
    hits: i64,
}

// === impl EnginePolicy: waiting requests ===

impl<H: SessionHost> EnginePolicy<H> {
    /// True if one more waiting request may be announced. `running`: number of requests computed by the last
    /// step and not over.
    pub fn may_announce(&self, running: usize) -> bool {
        self.requests.live_count() < running + ANNOUNCED_MAX
    }

    /// Posts the keys of an arrived and waiting request. The sidecar meanwhile fetches blocks of its prompt
    /// into memory.
    pub fn announce_request(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(id) else { return };
        let fetches = self.options.loads && request.arrival.reads;
        // A promise is posted together with the request's first keys.
        if !(fetches || self.options.saves && request.arrival.hands_over) {
            return;
        }
        let limit = self.set.floor(request.now.tokens.saturating_sub(1));
        // The other groups need the blocks read at the highest boundary, if all is kept. Those few blocks come first: a set's load
        // begins once all groups are asked for, and each group waits for its own.
        let groups: Vec<usize> = self.set.groups_of(true).chain(self.set.groups_of(false)).collect();
        for group in groups {
            let keys = self.set.loaded_keys(group, 0, limit);
            if !keys.is_empty() && self.append_keys(id, group) && fetches {
                let log = self.requests.get(id).expect("it was looked up").parts[group].log;
                self.groups[group].session.hint(log, keys.start, keys.len() as u32);
            }
        }
    }

    // --- questions ---

    /// Tokens beyond `computed` held by all groups. `alone`: no other request is computed beside it. On a [`PolicyWait`] the host waits,
    /// passes the session's answer on ([`EnginePolicy::answered`]) and asks again.
    pub fn matched(
        &mut self,
        id: RequestId,
        computed: u32,
        alone: bool,
        time: Instant,
    ) -> Result<FoundTokens, PolicyWait> {
        self.known.retain(|known| known.request == id);
        let found = self.find_tokens(id, computed, alone, time)?;
        self.known.clear();
        Ok(found)
    }

    fn find_tokens(
        &mut self,
        id: RequestId,
        computed: u32,
        alone: bool,
        time: Instant,
    ) -> Result<FoundTokens, PolicyWait> {
        let beside = self.options.beside_others;
        let Some(request) = self.requests.get_mut(id) else { return Ok(MISS) };
        request.had = beside.then_some(computed);
        if !self.options.loads || !request.arrival.reads || self.updating {
            return Ok(MISS);
        }
        (request.answer, request.junction) = (LastAnswer::Nothing, 0);
        if !self.set.several() {
            // The key of a tail must not be taken for its block's own, once the request's tokens fill the block.
            request.fill_tail(self.set.forms[0].block_tokens, request.now.tokens.saturating_sub(1));
        }
        let limit = self.limit(id);
        let request = self.requests.get_mut(id).expect("looked up above");
        if request.refused.is_some() {
            return Ok(if request.steps_aside() { FoundTokens::Later } else { MISS });
        }
        if limit <= computed {
            // The engine has by now what an earlier question found.
            self.release_leases(id);
            return Ok(MISS);
        }
        if !computed.is_multiple_of(self.set.boundary) {
            return Ok(MISS);
        }
        let (served, run) = self.serve_groups(id, (computed, limit), time)?;
        match served {
            ServedTokens::Pending(tried) => {
                self.requests.get_mut(id).expect("looked up above").tried = tried;
                Ok(FoundTokens::Later)
            }
            ServedTokens::To(end) => {
                self.requests.get_mut(id).expect("looked up above").tried = None;
                Ok(self.decide_hit(id, (computed, end, limit), run, alone))
            }
        }
    }

    /// The end of the tokens asked for: one is left to compute, and a hit ends on a boundary or, in another engine's prompt, before the
    /// last token.
    fn limit(&mut self, id: RequestId) -> u32 {
        let request = self.requests.get(id).expect("the caller has it");
        let most = request.now.tokens.saturating_sub(1);
        let boundary = self.set.floor(most);
        let saved = request.arrival.awaits.unwrap_or(0);
        if self.set.several() || boundary == most || saved < most || !self.append_keys(id, 0) {
            return boundary;
        }
        // The block of the last token has a key: its tail's, or, if the token fills it, its own.
        let request = self.requests.get(id).expect("the caller has it");
        let part = &request.parts[0];
        let newest = if part.tailed { request.tail_at() } else { part.appended.checked_sub(1) };
        if newest == Some(most / self.set.boundary) { most } else { boundary }
    }

    /// Returns how far all groups serve the request, and how far those with full attention do.
    fn serve_groups(
        &mut self,
        id: RequestId,
        tokens: (u32, u32),
        time: Instant,
    ) -> Result<(ServedTokens, u32), PolicyWait> {
        let set = Arc::clone(&self.set);
        let tried = self.requests.get(id).expect("the caller has it").tried;
        if set.several() && self.known.is_empty() {
            // The sidecar looks for all groups at once: for those without full attention where they are asked first if the others have
            // all.
            let guessed = tokens.1.min(tried.unwrap_or(tokens.1));
            for group in set.groups_of(true).chain(set.groups_of(false)) {
                let end = if set.forms[group].kind == GroupKind::Full { tokens.1 } else { guessed };
                self.ask_ahead(id, group, set.asked(group, tokens.0, end), time);
            }
        }
        let mut parted = None;
        let served = set.serve_request(
            tokens,
            tried,
            |group, keys| self.look_up(id, group, keys, time),
            |end| parted = Some(end),
        )?;
        if let ServedTokens::To(end) = served {
            self.close_other_tails(id, end);
        }
        let request = self.requests.get_mut(id).expect("the caller has it");
        if let Some(run) = parted {
            // Others' prompts are kept as far as this, and the request's goes on: so may other ones from there.
            let point = if set.has_states() { set.junction(run) } else { run };
            if matches!(served, ServedTokens::To(end) if end < point) && set.has_states() {
                request.junction = point;
            }
            for group in set.groups_of(true) {
                request.parts[group].parted = point / set.forms[group].block_tokens;
            }
        }
        Ok((served, parted.unwrap_or(0)))
    }

    fn ask_ahead(&mut self, id: RequestId, group: usize, keys: Range<u32>, time: Instant) {
        if !keys.is_empty() && self.append_keys(id, group) {
            let log = self.requests.get(id).expect("it has a log").parts[group].log;
            self.groups[group].session.ask_ahead(log, keys.start, keys.len() as u32, time);
        }
    }

    /// Returns the number of these keys in the cache before the first missing one; for states, up to the last
    /// kept one. `None`: ask again.
    pub(super) fn look_up(
        &mut self,
        id: RequestId,
        group: usize,
        keys: AskedKeys,
        time: Instant,
    ) -> Result<Option<u32>, PolicyWait> {
        if !self.append_keys(id, group) {
            let request = self.requests.get_mut(id).expect("the caller has it");
            return Ok(if request.adapter_is_near(time) { None } else { Some(0) });
        }
        let part = &self.requests.get(id).expect("it has a log").parts[group];
        let (log, awaited) = (part.log, part.awaited);
        let asked = |known: &&KnownAnswer| known.group == group && known.keys == keys;
        let mut hits = self.known.iter().find(asked).map(|known| known.hits);
        if hits.is_none() {
            let (log, first, count) = match &keys {
                AskedKeys::Of(keys) => (log, keys.start, keys.len() as u32),
                AskedKeys::Tail(end) => {
                    let Some((log, place)) = self.tail_log(id, group, *end) else { return Ok(Some(0)) };
                    (log, place, 1)
                }
            };
            let asked = self.groups[group].session.ask_query(log, first, count, time);
            let found = if let AskedQuery::Answered(hits) = asked { hits } else { PENDING };
            self.known.push(KnownAnswer { request: id, group, keys: keys.clone(), hits: found });
            if let AskedQuery::Posted(op) = asked {
                return Err(PolicyWait::Answer { group, op });
            }
            hits = Some(found);
        }
        let hits = hits.expect("it was asked for");
        if hits >= 0 {
            return Ok(Some(hits as u32));
        }
        if awaited
            && let AskedKeys::Of(Range { start: first, end }) = keys
            && let Some(within) = self.pacing.linger()
        {
            return Err(PolicyWait::Linger { group, log, first, count: end - first, within });
        }
        Ok(None)
    }

    /// Takes the session's answer from the host, which has waited for it.
    pub fn answered(&mut self, hits: i64) {
        self.waited = hits;
        if self.renewing.is_none()
            && let Some(known) = self.known.last_mut()
        {
            known.hits = hits;
        }
    }

    /// Decides on a hit up to `end`, of `limit`: to load it, to put it off, or to leave it. Full attention has `run` tokens.
    fn decide_hit(
        &mut self,
        id: RequestId,
        (first, end, limit): (u32, u32, u32),
        run: u32,
        alone: bool,
    ) -> FoundTokens {
        let found = |end: u32, sync: bool| FoundTokens::Tokens(end - first, !sync);
        if self.is_too_much(id, end) {
            // An engine such as vLLM ends a request after a failed load, and knows no other way for a connector to end one.
            self.release_leases(id);
            let request = self.requests.get_mut(id).expect("the caller has it");
            request.answer = LastAnswer::GivenUp(Hit { first, end: limit, sync: false });
            return found(limit, false);
        }
        let size = self.set.forms[0].block_tokens;
        let awaited = self.requests.get(id).expect("the caller has it").parts[0].awaited;
        let dropped = !awaited && self.set.is_dropped((first, end), run);
        // Most likely the engine has dropped these last blocks of its own hit: each request would load them again.
        if end <= first || dropped {
            self.release_leases(id);
            return MISS;
        }
        let arriving = self.is_arriving(id);
        // No step waits for blocks on their way, or for a load of several groups or a window: its failure must be told before a token is
        // computed upon it.
        let beside = arriving || self.set.several() || self.set.forms[0].window > 0;
        let hits = (end - first).div_ceil(size);
        let Some(sync) = (if beside { Some(false) } else { self.pacing.synchronous(hits, alone) }) else {
            self.requests.get_mut(id).expect("the caller has it").answer = LastAnswer::PutOff;
            return FoundTokens::Later;
        };
        // Blocks on their way cannot be compared yet.
        let end = if arriving { end } else { self.trim(id, first, end) };
        if end <= first {
            self.release_leases(id);
            return MISS;
        }
        let request = self.requests.get_mut(id).expect("the caller has it");
        request.answer = LastAnswer::Hit(Hit { first, end, sync });
        found(end, sync)
    }

    fn is_arriving(&mut self, id: RequestId) -> bool {
        let request = self.requests.get(id).expect("the caller has it");
        let mut parts = request.parts.iter().zip(&mut self.groups);
        parts.any(|(part, group)| part.logs().any(|log| group.session.arriving(log)))
    }

    /// Returns the end of the hit without the blocks that the engine computes for a check.
    fn trim(&mut self, id: RequestId, first: u32, end: u32) -> u32 {
        let namespace = self.groups[0].session.namespace();
        let size = self.set.forms[0].block_tokens;
        let whole = end / size - first / size;
        if self.set.several() || namespace == 0 || whole == 0 {
            return end;
        }
        let request = self.requests.get(id).expect("the caller has it");
        let hit = CheckedHit {
            owner: id,
            first: first / size,
            hits: whole,
            subject: (namespace, request.parts[0].fold),
            // A handed-over prompt is not computed again, and a window's first blocks are not there.
            whole: request.arrival.awaits.is_none() && self.set.forms[0].window == 0,
        };
        let kept = self.check.trim(hit, self.next.step);
        if kept == whole { end } else { first + kept * size }
    }

    /// True if a request must end because this engine would compute too much of it.
    fn is_too_much(&self, id: RequestId, end: u32) -> bool {
        let request = self.requests.get(id).expect("the caller has it");
        let Now { tokens, preemptions, .. } = request.now;
        let awaits = request.arrival.awaits.is_some() && preemptions == 0;
        self.options.strict_tokens.is_some_and(|strict| awaits && tokens - end > strict)
    }

    /// Ends the leases of the request's last hit, whose blocks are not loaded.
    pub(super) fn release_leases(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(id) else { return };
        request.answer = LastAnswer::Nothing;
        for (part, group) in request.parts.iter().zip(&mut self.groups) {
            if part.generation == Some(group.session.connection_count()) {
                part.logs().for_each(|log| group.session.release_lease(log));
            }
        }
    }

    /// True if the request awaits another engine's blocks; `None` if the cache is not asked for it.
    pub fn awaits_blocks(&self, id: RequestId) -> Option<bool> {
        let request = self.requests.get(id).filter(|request| request.arrival.reads)?;
        Some(request.awaits_producer())
    }

    /// The key log of a request in a group; -1 if there is none.
    pub fn log(&self, id: RequestId, group: usize) -> i64 {
        self.requests.get(id).map_or(-1, |request| request.parts[group].log)
    }

    /// True if the cache has answered, and the load waits for a step with room.
    pub fn is_put_off(&self, id: RequestId) -> bool {
        self.requests.get(id).is_some_and(|request| request.answer == LastAnswer::PutOff)
    }

    /// The boundary up to which full attention has the request's prefix, if its last answer ends before it for want of a state; 0: none.
    /// With a state there, the next request of the prefix is served up to it.
    pub fn junction(&self, id: RequestId) -> u32 {
        self.requests.get(id).map_or(0, |request| request.junction)
    }

    /// True if a load of the request has failed: the cache is not asked again.
    pub fn is_refused(&self, id: RequestId) -> bool {
        self.requests.get(id).is_some_and(|request| request.refused.is_some())
    }

    /// Has the request's hit computed and compared with the kept blocks, to prove the engine's KV.
    pub fn check_request(&mut self, id: RequestId) {
        self.check.demand(id);
    }

    /// True if the engine computes some blocks of the request's hit for a check.
    pub fn is_checked(&self, id: RequestId) -> bool {
        self.check.span(id).is_some_and(|blocks| !blocks.is_empty())
    }

    /// Sets the number of a request's computed tokens. An engine with windows calls this for all requests
    /// before it reports failed loads.
    pub fn progress(&mut self, id: RequestId, computed: u32) {
        if let Some(request) = self.requests.get_mut(id) {
            request.now.computed = computed;
        }
    }

    /// Sets the engine's current numbers of a request.
    pub fn set_now(&mut self, id: RequestId, now: Now) {
        if let Some(request) = self.requests.get_mut(id) {
            if now.adapter != Adapter::Undigested {
                request.undigested_since = None;
            }
            request.now = now;
        }
    }
}
