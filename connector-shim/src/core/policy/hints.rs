//! Hints of clients: posted to the sidecar at a request's begin or end, with their outcomes.
//!
//! A hint never delays a request: its outcome is taken in a later step, and a hint without an answer is missing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use shm_protocol::hints::{Advice, Hint, HintAction, HintEnd, HintError, RequestHints};

use super::EnginePolicy;
use super::host::SessionHost;
use super::remarks::Remark;
use super::requests::RequestId;

/// The most steps without an answer: a frozen sidecar gives none.
const STEPS_MAX: u64 = 1000;
/// Refused hints are named in the log once in so long a time.
const REFUSALS_EVERY: Duration = Duration::from_secs(60);

/// A request's hints and their outcomes; refused ones have no action.
pub type HintEnds = (RequestId, Vec<(Option<HintAction>, HintEnd)>);

/// A hint on its way.
#[derive(Copy, Clone, Debug)]
enum HintState {
    /// It is for the request's end.
    Wanted(Hint),
    /// The sidecar answers this operation of a connection. It was posted in this step.
    Posted {
        op: u64,
        generation: u64,
        step: u64,
    },
    Ended(HintEnd),
}

#[derive(Debug, Default)]
struct HintedRequest {
    last: bool,
    /// True once the request has ended.
    over: bool,
    hints: Vec<(Option<HintAction>, HintState)>,
}

/// The hints of all requests.
#[derive(Debug, Default)]
pub(super) struct PolicyHints {
    by_request: BTreeMap<RequestId, HintedRequest>,
    ended: Vec<HintEnds>,
    refused_at: Option<Instant>,
}

// === impl EnginePolicy: hints ===

impl<H: SessionHost> EnginePolicy<H> {
    /// Sets the hints of a request just followed; `last`: also if the hints are refused, its conversation ends with it.
    /// A prefetch is posted now, the others at the request's end.
    pub fn follow_hints(
        &mut self,
        id: RequestId,
        last: bool,
        read: Result<RequestHints, HintError>,
        time: Instant,
    ) {
        let mut followed = HintedRequest { last, ..HintedRequest::default() };
        match read {
            Ok(RequestHints { last, hints }) => {
                followed.last |= last;
                for hint in hints {
                    let state = match hint.advice {
                        Advice::Prefetch => self.post_hint(id, hint, false),
                        _ => HintState::Wanted(hint),
                    };
                    followed.hints.push((Some(hint.advice.action()), state));
                }
            }
            Err(error) => {
                let is_due = |at: Instant| time.saturating_duration_since(at) >= REFUSALS_EVERY;
                if self.hints.refused_at.is_none_or(is_due) {
                    self.hints.refused_at = Some(time);
                    self.remarks.push(Remark::HintsRefused { request: id, reason: error.to_string() });
                }
                followed.hints.push((None, HintState::Ended(HintEnd::Refused)));
            }
        }
        if followed.last || !followed.hints.is_empty() {
            self.hints.by_request.insert(id, followed);
        }
    }

    /// True if outcomes of a request's hints are still to come.
    pub fn has_hints(&self, id: RequestId) -> bool {
        self.hints.by_request.get(&id).is_some_and(|followed| !followed.hints.is_empty())
    }

    /// Takes the outcomes of ended requests' hints, each request once.
    pub fn take_hint_ends(&mut self) -> Vec<HintEnds> {
        std::mem::take(&mut self.hints.ended)
    }

    /// Posts hints for a chain of its own, in a log without other messages. Returns their outcomes once all are known, by
    /// `wait`, which returns false to give up.
    pub(crate) fn hint_chain(
        &mut self,
        id: RequestId,
        hint: Hint,
        mut wait: impl FnMut(&mut Self) -> bool,
    ) -> HintEnd {
        let mut state = self.post_hint(id, hint, true);
        loop {
            state = self.look_at(state);
            match state {
                HintState::Ended(end) => return end,
                _ if wait(self) => {}
                _ => return HintEnd::Missing,
            }
        }
    }

    /// Posts the hints of a request before the end of its logs. Returns true if its conversation ends.
    pub(super) fn end_hints(&mut self, id: RequestId) -> bool {
        let Some(mut followed) = self.hints.by_request.remove(&id) else { return false };
        // The KV of an answer's last token is not computed.
        let most = self
            .requests
            .get(id)
            .map_or(0, |request| request.arrival.prompt.max(request.now.tokens.saturating_sub(1)));
        for (_, state) in &mut followed.hints {
            if let HintState::Wanted(hint) = *state {
                let tokens = Some(hint.tokens.map_or(most, |tokens| tokens.min(most)));
                *state = self.post_hint(id, Hint { tokens, ..hint }, false);
            }
        }
        followed.over = true;
        let last = followed.last;
        if !followed.hints.is_empty() {
            self.hints.by_request.insert(id, followed);
        }
        last
    }

    /// Takes outcomes from the sidecar.
    pub(super) fn look_at_hints(&mut self) {
        if self.hints.by_request.is_empty() {
            return;
        }
        let mut by_request = std::mem::take(&mut self.hints.by_request);
        by_request.retain(|id, followed| {
            followed.hints.iter_mut().for_each(|(_, state)| *state = self.look_at(*state));
            let ends = followed.hints.iter().map(|(action, state)| match state {
                HintState::Ended(end) => Some((*action, *end)),
                _ => None,
            });
            let Some(ends) = ends.collect::<Option<Vec<_>>>().filter(|_| followed.over) else { return true };
            self.hints.ended.push((*id, ends));
            false
        });
        self.hints.by_request = by_request;
    }

    /// Posts a hint to every group. Its outcome is that of the group whose hits the engine reports.
    fn post_hint(&mut self, id: RequestId, hint: Hint, alone: bool) -> HintState {
        let may_load = |request: &super::requests::FollowedRequest| request.arrival.reads;
        let is_served = match hint.advice {
            Advice::Prefetch => self.options.loads && self.requests.get(id).is_some_and(may_load),
            _ => true,
        };
        let (lead, mut state) = (self.set.reported_group(), HintState::Ended(HintEnd::Missing));
        for group in 0..self.groups.len() {
            if !is_served || !self.append_keys(id, group) {
                continue;
            }
            let Some(part) = self.requests.get(id).map(|request| &request.parts[group]) else { continue };
            let tokens = hint.tokens.map_or(u32::MAX, |tokens| tokens / self.set.forms[group].key_tokens);
            let (log, count) = (part.log, part.appended.min(tokens));
            let session = &mut self.groups[group].session;
            let posted = session.advise(log, count, hint.advice, alone);
            if let Some(op) = posted.filter(|_| group == lead) {
                let (generation, step) = (session.connection_count(), self.next.step);
                state = HintState::Posted { op, generation, step };
            }
        }
        state
    }

    fn look_at(&mut self, state: HintState) -> HintState {
        let HintState::Posted { op, generation, step } = state else { return state };
        let session = &mut self.groups[self.set.reported_group()].session;
        let is_lost = generation != session.connection_count() || self.next.step - step > STEPS_MAX;
        match if is_lost { Some(HintEnd::Missing) } else { session.take_advised(op) } {
            Some(end) => HintState::Ended(end),
            None => state,
        }
    }
}
