//! Saves: the computed KV offered to the cache, the time of each offer, and voided saves.
//!
//! The cost of a step does not depend on how long or how many the running requests are: a decoding request is looked at only when a step
//! may fill its next block.

use std::ops::Range;

use super::host::SessionHost;
use super::kinds::GroupKind;
use super::proof::{NULL_BLOCK, Passed};
use super::remarks::Remark;
use super::requests::{FollowedRequest, RequestId};
use super::{EnginePolicy, OfferedState};

/// The most parts of a prompt saved in one step: each can be loaded while the next is copied. 4,096 saves may be unfinished.
const PARTS_MAX: usize = 64;

/// A request to look at in a step, and the number of its tokens computed by the step.
#[derive(Copy, Clone, Debug)]
pub struct Due {
    /// The request.
    pub request: RequestId,
    /// Tokens computed by the step; `None`: the step does not compute the request.
    pub scheduled: Option<u32>,
}

// === impl EnginePolicy: full blocks ===

impl<H: SessionHost> EnginePolicy<H> {
    /// Saves the blocks filled by a step, of due requests and of those beginning on blocks. Returns, by group, whether anything was posted.
    pub(super) fn save_due(&mut self, due: &[Due], step: u64) -> Vec<bool> {
        let mut posted = vec![false; self.groups.len()];
        let computes = !self.proof.stalled && !self.updating;
        let (moved, offered) = (std::mem::take(&mut self.moving), std::mem::take(&mut self.offered));
        if self.proof.stalled {
            self.fall_back(true);
        }
        for Due { request: id, scheduled } in due {
            let mut wait = 1;
            if let Some(tokens) = scheduled.filter(|_| computes)
                && let Some(request) = self.requests.get_mut(*id)
            {
                let computed = request.now.computed + tokens;
                request.reached = (computed, step);
                request.slide(&self.set.forms);
                self.proof.fill(*id, request, request.now.computed, computed);
                if !self.set.several() {
                    request.fill_tail(self.set.forms[0].block_tokens, computed);
                }
                for (group, posted) in posted.iter_mut().enumerate() {
                    *posted |= match self.set.forms[group].kind {
                        GroupKind::State => self.save_states(*id, group, (&moved, &offered), computed, step),
                        _ => self.save_group(*id, group, computed, step),
                    };
                }
                let mut ends: Vec<u32> =
                    offered.iter().filter(|state| state.request == *id).map(|state| state.boundary).collect();
                ends.sort_unstable();
                ends.dedup();
                for end in ends.into_iter().filter(|end| *end <= computed) {
                    for (group, posted) in posted.iter_mut().enumerate() {
                        *posted |= self.save_tail(*id, group, end, step);
                    }
                }
                wait = self.until_full(*id, computed);
            }
            self.requests.due_in(*id, step + wait);
        }
        posted
    }

    /// Saves the blocks filled by a request's last step under keys known only since: an asynchronous engine schedules a step without the
    /// last token, and a speculating engine without the tokens verified by the step.
    pub(super) fn save_last(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let (reached, step) = request.reached;
        // The last token's KV is not computed, or not under its key.
        let computed = reached.min(request.now.computed).min(request.now.tokens.saturating_sub(1));
        let has_blocks = request.now.preemptions == request.began_after;
        let is_open = self.proof.open_steps().any(|open| open == step);
        if !self.options.saves || !has_blocks || !is_open || request.doubt.is_some() || self.updating {
            return;
        }
        self.proof.fill_last(id, request, computed, step);
        for group in 0..self.groups.len() {
            if self.set.forms[group].kind != GroupKind::State {
                self.save_group(id, group, computed, step);
            }
        }
    }

    /// Number of steps until the request may fill its next block of use to another one.
    fn until_full(&self, id: RequestId, computed: u32) -> u64 {
        let request = self.requests.get(id).expect("it was looked up");
        let begins = request.parts.iter().any(|part| part.found_in > 0);
        if begins || computed < request.now.tokens {
            return 1;
        }
        let parts = request.parts.iter().zip(&self.set.forms).zip(&self.groups);
        let missing =
            parts.filter(|((_, form), _)| form.kind != GroupKind::State).map(|((part, form), group)| {
                // The block of a tail was saved, and will be full later.
                let saved = (part.saved as u32).min(computed / form.block_tokens);
                let next = group.points.next_needed(form.kind, saved);
                ((next + 1) * form.block_tokens).saturating_sub(computed)
            });
        let least = missing.min().unwrap_or(1).max(1);
        u64::from(least.div_ceil(self.options.tokens_per_step.max(1)))
    }

    /// Saves the request's blocks of a group full by `computed` tokens, and its prompt's tail for another engine.
    fn save_group(&mut self, id: RequestId, group: usize, computed: u32, step: u64) -> bool {
        let checked = self.checked(id, group);
        let request = self.requests.get(id).expect("it was looked up");
        let part = &request.parts[group];
        let (is_right, full) = (request.doubt.is_none(), part.filled);
        let hands_over = request.arrival.hands_over;
        // A handed-over request may have no further step: blocks in this engine's own cache alone are saved
        // at once.
        let again = part.found_in > 0 && part.found_in < step + u64::from(hands_over) && checked.is_none();
        let tail_at = request.tail_at().map(|place| place as usize);
        let tail = is_right && hands_over && tail_at == Some(full) && full < part.blocks.len();
        let tail = tail && computed >= request.arrival.prompt;
        let new = full + usize::from(tail) > part.saved;
        if !is_right {
            self.break_promise(id);
        }
        let waits = checked.as_ref().is_some_and(|checked| full < checked.end as usize);
        if !(again || new) || waits || !self.append_keys(id, group) || !self.is_home(group) {
            return false;
        }
        let part = &self.requests.get(id).expect("it has a log").parts[group];
        if full > part.appended as usize {
            return false;
        }
        let end = full + usize::from(tail && part.tailed);
        let (mut posted, mut fresh) = (false, part.saved);
        // Blocks computed by the request in an earlier step were offered then; offering them says nothing of their use.
        let used = if again && !self.offers_late() { part.found.min(part.saved).min(full) } else { 0 };
        if let Some(checked) = checked {
            fresh = checked.end as usize;
            posted = self.save_checked(id, group, checked, step);
        }
        for range in [0..used, fresh..end] {
            for range in self.needed(id, group, range, hands_over) {
                posted |= self.offer(id, group, range, step);
            }
        }
        let part = &mut self.requests.get_mut(id).expect("it has a log").parts[group];
        part.saved = end;
        if again {
            part.found_in = 0;
        }
        posted
    }

    /// Saves the states of a group that the step makes for the request. Their places in its block table say nothing of them.
    fn save_states(
        &mut self,
        id: RequestId,
        group: usize,
        (moved, offered): (&[OfferedState], &[OfferedState]),
        computed: u32,
        step: u64,
    ) -> bool {
        let form = self.set.forms[group];
        let is_own = |state: &&OfferedState| (state.request, state.group) == (id, group);
        let mut posted = false;
        for state in moved.iter().filter(is_own) {
            let request = self.requests.get(id).expect("it was looked up");
            if request.doubt.is_none() && self.proof.has_state(request, group, (state.block, state.boundary))
            {
                posted |= self.save_state(state, step);
            }
        }
        for state in offered.iter().filter(is_own) {
            let request = self.requests.get(id).expect("it was looked up");
            // No hit ends at any other place.
            let is_end = state.boundary > 0 && state.boundary.is_multiple_of(form.key_tokens);
            if !is_end || state.block == NULL_BLOCK || request.doubt.is_some() {
                continue;
            }
            self.proof.fill_part(id, request, group, (state.block, state.boundary));
            if self.options.tokens_per_step > 1 && computed > request.now.tokens {
                self.moving.push(*state);
            } else {
                posted |= self.save_state(state, step);
            }
        }
        posted
    }

    /// Saves a state. Within an answer it replaces the state before: a later request of the conversation reads the last one.
    fn save_state(&mut self, state: &OfferedState, step: u64) -> bool {
        let OfferedState { request: id, group, block, boundary } = *state;
        let place = boundary / self.set.forms[group].key_tokens - 1;
        let has_key = self.append_keys(id, group) && self.is_home(group);
        let request = self.requests.get(id).expect("it was looked up");
        let part = &request.parts[group];
        if !has_key || place >= part.appended {
            return false;
        }
        let is_of_answer = boundary > request.arrival.prompt;
        let replaced = part.answer_state.filter(|earlier| is_of_answer && *earlier < place);
        let posted = self.post_save(id, group, place, vec![block], step, replaced);
        if posted && is_of_answer {
            let stays = self.set.checkpoint > 0 && boundary.is_multiple_of(self.set.checkpoint);
            let part = &mut self.requests.get_mut(id).expect("it was looked up").parts[group];
            part.answer_state = (!stays).then_some(place);
        }
        posted
    }

    /// Saves the request's block of full attention filled up to `end`, the end of a state, under the key of these tokens. The request's next
    /// tokens may lie behind them: the reader of the block reads none of those, and writes over them.
    fn save_tail(&mut self, id: RequestId, group: usize, end: u32, step: u64) -> bool {
        let form = self.set.forms[group];
        let request = self.requests.get(id).expect("it was looked up");
        let block = request.parts[group].blocks.get((end / form.block_tokens) as usize).copied();
        let has_tail = self.set.has_tails() && form.has_tail(end) && end.is_multiple_of(self.set.unit);
        let Some(block) = block.filter(|_| has_tail && request.doubt.is_none()) else { return false };
        self.proof.fill_part(id, request, group, (block, end));
        let Some((log, place)) = self.tail_log(id, group, end) else { return false };
        self.is_home(group) && self.groups[group].session.post_save(log, place, vec![block], step, false)
    }

    fn save_checked(&mut self, id: RequestId, group: usize, blocks: Range<u32>, step: u64) -> bool {
        let part = &self.requests.get(id).expect("it has a log").parts[group];
        let ids = part.blocks[blocks.start as usize..blocks.end as usize].to_vec();
        let posted = self.groups[group].session.post_save(part.log, blocks.start, ids, step, true);
        if posted {
            self.check.saved();
        } else {
            self.check.give_up();
        }
        posted
    }

    fn offer(&mut self, id: RequestId, group: usize, blocks: Range<usize>, step: u64) -> bool {
        let ids = self.requests.get(id).expect("it has a log").parts[group].blocks[blocks.clone()].to_vec();
        self.post_save(id, group, blocks.start as u32, ids, step, None)
    }

    /// Saves these blocks under the request's keys from `first` on. The only one may replace that of an earlier key.
    fn post_save(
        &mut self,
        id: RequestId,
        group: usize,
        first: u32,
        blocks: Vec<u32>,
        step: u64,
        replaced: Option<u32>,
    ) -> bool {
        let request = self.requests.get(id).expect("it has a log");
        let part = &request.parts[group];
        let places = first as usize..first as usize + blocks.len();
        let session = &mut self.groups[group].session;
        let posted = match replaced {
            Some(replaced) => session.post_replacing(part.log, first, blocks[0], step, replaced),
            None => session.post_save(part.log, first, blocks, step, false),
        };
        if let Some(events) = &mut self.groups[group].events {
            let keys = request.log_keys(&self.set.forms[group], places).copied().collect();
            events.offered(id, part.fold, first as usize, keys, self.time);
        }
        posted
    }

    /// The parts of the blocks to offer, each by a save.
    fn needed(
        &self,
        id: RequestId,
        group: usize,
        blocks: Range<usize>,
        hands_over: bool,
    ) -> Vec<Range<usize>> {
        let request = self.requests.get(id).expect("it has a log");
        let (part, form) = (&request.parts[group], self.set.forms[group]);
        let prompt = request.arrival.prompt.saturating_sub(1) / form.block_tokens;
        let first = blocks.start.max(part.freed);
        if first >= blocks.end {
            return Vec::new();
        }
        let own = [part.found as u32, part.parted];
        let ranges =
            self.groups[group].points.needed(form.kind, (first as u32, blocks.end as u32), prompt, own);
        let most = if hands_over { self.machine.blocks_of_part() as usize } else { usize::MAX };
        ranges
            .into_iter()
            .flat_map(|range| {
                let (first, end) = (range.start as usize, range.end as usize);
                let size = most.max((end - first).div_ceil(PARTS_MAX)).max(1);
                (first..end)
                    .step_by(size.min(end - first))
                    .map(move |at| at..end.min(at.saturating_add(size)))
            })
            .collect()
    }

    /// Blocks of the request to save by themselves, for a comparison, if it is still possible.
    fn checked(&mut self, id: RequestId, group: usize) -> Option<Range<u32>> {
        let span = self.check.span(id)?;
        let request = self.requests.get(id)?;
        let part = &request.parts[group];
        let first = span.start as usize;
        if part.freed <= first && first == part.saved && request.doubt.is_none() {
            return Some(span);
        }
        self.check.forsake(id);
        None
    }

    /// True if the engine's KV belongs to the namespace of the group's present connection. A new connection
    /// may be bound to another namespace. Only the first connection keeps saves until it is bound to any.
    pub(super) fn is_home(&self, group: usize) -> bool {
        let group = &self.groups[group];
        let namespace = group.session.namespace();
        namespace == group.namespace && (namespace > 0 || self.weights == 0)
    }

    // --- saves taken back ---

    /// Notes that the engine has taken the output of a step. Saves of passed-over steps are void then.
    pub(super) fn accept_saves(&mut self, step: u64, passed: &Passed) {
        if !passed.steps.is_empty() || passed.voids {
            self.fall_back(passed.voids);
        }
        for group in &mut self.groups {
            // Also sent if nothing was posted since the last time: the last message may have found no room.
            group.session.accept_step(step);
        }
    }

    /// Lets lost blocks of requests be offered again. With `voids`, lets all blocks be offered again: every
    /// unfinished save is void.
    fn fall_back(&mut self, voids: bool) {
        if voids {
            self.void_saves();
        }
        let stalled = self.proof.stalled;
        let mut broken = Vec::new();
        for (id, request) in self.requests.live_mut() {
            for part in &mut request.parts {
                part.saved = if voids { 0 } else { part.saved.min(part.filled) };
            }
            if stalled || request.doubt.is_some() {
                broken.push(id);
            }
        }
        broken.into_iter().for_each(|id| self.break_promise(id));
    }

    pub(super) fn void_saves(&mut self) {
        self.groups.iter_mut().for_each(|group| group.session.void_saves());
    }

    /// True if the request's next KV may be kept.
    pub(super) fn may_keep(&self, id: RequestId) -> bool {
        !self.proof.stalled && self.requests.get(id).is_some_and(|request| request.doubt.is_none())
    }

    /// Disowns all KV computed or loaded until now: none of it is kept. A sleep discards the KV memory next:
    /// no save may read it.
    pub fn disown(&mut self) {
        self.void_saves();
        self.check.forget_verdicts();
        self.proof.disown(&mut self.requests);
        self.forget_device();
        for (_, request) in self.requests.live_mut() {
            request.answer = super::requests::LastAnswer::Nothing;
            request.parts.iter_mut().for_each(|part| part.saved = 0);
        }
    }

    /// Notes that the weights may have changed: every rank states its weights again, and until then saves
    /// wait. The weights decide the namespace: it is the old one if nothing changed.
    pub fn weights_may_have_changed(&mut self) {
        self.weights += 1;
        self.disown();
        for group in &mut self.groups {
            group.namespace = 0;
            group.session.weights(self.weights);
        }
    }

    /// Returns true if a check has found other KV since the last call. Earlier blocks do not count then.
    pub(super) fn follow_check(&mut self) -> bool {
        let counts = self.groups[0].session.checked();
        let contradicts = self.check.goes_on() && self.check.learn(counts, self.next.step);
        if contradicts {
            self.disown();
        }
        contradicts
    }

    /// Looks for a new namespace of each group. With a new one the ranks compute other KV than before,
    /// although no change was noticed.
    pub(super) fn follow_namespaces(&mut self) {
        for group in 0..self.groups.len() {
            let (namespace, before) = (self.groups[group].session.namespace(), self.groups[group].namespace);
            if namespace == 0 || namespace == before {
                continue;
            }
            if before > 0 {
                self.remarks.push(Remark::Changed);
                self.disown();
            }
            self.groups[group].namespace = namespace;
        }
    }
}

impl FollowedRequest {
    /// Tokens of the prompt kept for another engine.
    pub(super) fn handed_over(&self, group: usize, block_tokens: u32) -> u32 {
        (self.parts[group].saved as u32 * block_tokens).min(self.arrival.prompt)
    }
}
