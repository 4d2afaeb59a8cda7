//! Key logs: the keys of a request as the sidecar gets them, group by group.

use std::time::{Duration, Instant};

use shm_protocol::key::BlockHash;

use super::EnginePolicy;
use super::host::SessionHost;
use super::kinds::GroupForm;
use super::requests::{Adapter, FollowedRequest, LastAnswer, RequestId, RequestPart, TailLog};
use crate::error::ShimError;

/// How long a request waits for the digest of its adapter before it goes without the cache: some hundred MB are read meanwhile.
const ADAPTER_WAIT: Duration = Duration::from_millis(200);

// === impl FollowedRequest: its adapter ===

impl FollowedRequest {
    /// True if the digest of the request's adapter is still being computed: the engine should ask again.
    pub(super) fn adapter_is_near(&mut self, time: Instant) -> bool {
        self.now.adapter == Adapter::Undigested
            && time - *self.undigested_since.get_or_insert(time) < ADAPTER_WAIT
    }

    /// True if another engine computes its prompt. No other engine computes blocks of this engine's own
    /// answer.
    pub(super) fn awaits_producer(&self) -> bool {
        self.arrival.awaits.is_some() && self.now.preemptions == 0
    }
}

// === impl EnginePolicy: key logs ===

impl<H: SessionHost> EnginePolicy<H> {
    /// Brings the request's key log in a group up to date. Returns false if no log can be had.
    pub(super) fn append_keys(&mut self, id: RequestId, group: usize) -> bool {
        let may_promise = self.options.saves && self.may_keep(id);
        let (session, form) = (&mut self.groups[group].session, self.set.forms[group]);
        let Some(request) = self.requests.get_mut(id) else { return false };
        let fold = match request.now.adapter {
            Adapter::Absent => None,
            Adapter::Fold(fold) => Some(fold),
            Adapter::Undigested | Adapter::Unknown => return false,
        };
        let count = request.key_count(&form);
        let count = request.tail_at().map_or(count, |place| count.min(place as usize)) as u32;
        let stale = {
            let part = &request.parts[group];
            let last = part.appended.checked_sub(1).map(|last| request.log_key(&form, last as usize));
            // The engine has taken back sampled tokens, as between two inputs of a streaming session: a written key is never changed, so
            // another log is begun.
            last.is_some_and(|last| part.appended > count || last != Some(&part.newest))
        };
        let ended = request.parts[group].tailed && request.arrival.tail.is_none();
        let preempted = request.parts[group].awaited && request.now.preemptions > 0;
        let part = &mut request.parts[group];
        let mut kept = 0;
        if fold.is_some() && fold != part.fold {
            part.close_log(session, 0);
            part.fold = fold;
        }
        if ended {
            // A log with a tail at its end takes no key: the next one goes on where it ended.
            kept = part.go_on(session);
        } else if stale {
            part.close_log(session, 0);
        } else if preempted {
            kept = part.go_on(session);
        }
        if part.generation != Some(session.connection_count()) {
            session.refresh_session();
            part.log = session.open_log(part.fold);
            let generation = session.connection_count();
            request.open_log(group, session, generation, may_promise);
            let part = &mut request.parts[group];
            (part.appended, part.saved, part.tailed) = (0, kept, false);
            request.answer = LastAnswer::Nothing;
        }
        let part = &mut request.parts[group];
        if part.log < 0 {
            // The next call tries again.
            part.generation = None;
            return false;
        }
        request.append_keys(group, &form, count, session);
        true
    }

    /// Returns the log of the block of full attention filled by so many tokens of the request, and the place
    /// of its key; opens the log if need be. `None` without a key or room.
    pub(super) fn tail_log(&mut self, id: RequestId, group: usize, tokens: u32) -> Option<(i64, u32)> {
        if !self.append_keys(id, group) {
            return None;
        }
        let (session, form) = (&mut self.groups[group].session, self.set.forms[group]);
        let request = self.requests.get_mut(id)?;
        let key = *request.key_at(&form, tokens)?;
        let place = (tokens / form.block_tokens) as usize;
        let before = place.checked_sub(1).and_then(|before| request.block_key(&form, before)).copied();
        let part = &mut request.parts[group];
        let known = part.tail.filter(|tail| tail.generation == session.connection_count() && tail.key == key);
        if let Some(tail) = known {
            return Some((tail.log, tail.place));
        }
        part.close_tail(session);
        let log = session.open_log(part.fold);
        let set = |_, key: &mut BlockHash| {
            *key = before.expect("it is appended where there is one");
            Ok::<(), ShimError>(())
        };
        let place = u32::from(before.is_some());
        let has_room =
            place == 0 || session.append_keys(log, 0, place, set).is_ok_and(|length| length == place);
        if !(has_room && session.append_tail(log, &key.0).is_ok_and(|done| done)) {
            session.close_log(log, 0);
            return None;
        }
        part.tail = Some(TailLog { log, generation: session.connection_count(), key, place });
        Some((log, place))
    }

    /// Ends the logs of the request's tails, except that of so many tokens, with their leases.
    pub(super) fn close_other_tails(&mut self, id: RequestId, tokens: u32) {
        let Some(request) = self.requests.get_mut(id) else { return };
        for (group, form) in self.set.forms.iter().enumerate() {
            let key = request.key_at(form, tokens).filter(|_| form.has_tail(tokens)).copied();
            let part = &mut request.parts[group];
            if part.tail.is_some_and(|tail| Some(tail.key) != key) {
                part.close_tail(&mut self.groups[group].session);
            }
        }
    }

    /// Ends the request's promised logs, since its blocks will not be kept: no other engine waits for them
    /// any longer.
    pub(super) fn break_promise(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(id) else { return };
        for (part, group) in request.parts.iter_mut().zip(&mut self.groups) {
            if part.promised {
                part.close_log(&mut group.session, 0);
            }
        }
    }
}

// === impl FollowedRequest: written keys ===

impl FollowedRequest {
    /// Opens a log for the group, and declares the computing engine, this one or another, before the log's
    /// first key.
    fn open_log<H: SessionHost>(
        &mut self,
        group: usize,
        session: &mut H,
        generation: u64,
        may_promise: bool,
    ) {
        let awaited = self.awaits_producer();
        let promised = may_promise && self.arrival.hands_over;
        let part = &mut self.parts[group];
        (part.awaited, part.promised, part.generation) = (awaited, promised, Some(generation));
        if awaited {
            session.await_producer(part.log);
        }
        if promised {
            session.promise_log(part.log).expect("the log has no keys yet");
        }
    }

    /// Appends the first `count` keys and the tail, as far as there is room.
    fn append_keys<H: SessionHost>(&mut self, group: usize, form: &GroupForm, count: u32, session: &mut H) {
        let (log, appended) = (self.parts[group].log, self.parts[group].appended);
        if count > appended {
            let key = |index: u32, key: &mut BlockHash| {
                *key = *self.log_key(form, index as usize).expect("counted before");
                Ok::<(), ShimError>(())
            };
            let appended = session
                .append_keys(log, appended, count - appended, key)
                .expect("it begins where the log ends");
            let newest = appended.checked_sub(1).and_then(|last| self.log_key(form, last as usize)).copied();
            let part = &mut self.parts[group];
            (part.appended, part.newest) = (appended, newest.unwrap_or(part.newest));
        }
        let part = &mut self.parts[group];
        if let Some((_, tail)) = self.arrival.tail
            && !part.tailed
            && part.appended == count
        {
            part.tailed = session.append_tail(log, &tail.0).expect("a key has 32 bytes");
        }
    }
}

// === impl RequestPart: ends of logs ===

impl RequestPart {
    /// Ends the log. `way`: the code of the end of the request's answer; 0: the request goes on.
    pub(super) fn close_log<H: SessionHost>(&mut self, session: &mut H, way: u32) {
        self.promised = false;
        self.close_tail(session);
        if self.log >= 0 && self.generation == Some(session.connection_count()) {
            session.close_log(self.log, way);
        }
        self.generation = None;
    }

    /// Ends the log of a tail, and its lease.
    pub(super) fn close_tail<H: SessionHost>(&mut self, session: &mut H) {
        if let Some(tail) = self.tail.take()
            && tail.generation == session.connection_count()
        {
            session.close_log(tail.log, 0);
        }
    }

    /// Ends a log to be followed by another one of the same keys. Returns the number of its saved blocks.
    fn go_on<H: SessionHost>(&mut self, session: &mut H) -> usize {
        let kept = if self.generation == Some(session.connection_count()) { self.saved } else { 0 };
        self.close_log(session, 0);
        kept
    }
}
