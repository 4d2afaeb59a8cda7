//! An engine's rules for its cache: the hits served to each request, the blocks saved and when, and the KV that is not trusted.
//!
//! The engine hands over numbers: arriving and ending requests, their blocks, the scheduled steps, and the steps with a taken output. The
//! policy answers with the loads, the requests to look at in a step, and the blocks to hold. Nothing here reads a clock or waits: if an
//! answer is to be waited for, a call returns [`PolicyWait`], and its host calls again once it has the answer.
//!
//! One table has all requests, and each cache group has a session of its own ([`SessionHost`]). The differences between kinds of groups are
//! in [`kinds`].

mod checks;
mod device;
mod events;
mod held;
mod hints;
pub mod host;
pub mod kinds;
mod loading;
mod logs;
mod matching;
mod pacing;
mod prefill;
mod proof;
mod remarks;
mod requests;
mod saving;
mod types;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use shm_protocol::key::{Algorithm, BlockHash, Chain};
use shm_protocol::message::WAY_LAST;
use shm_protocol::source::Source;

use self::checks::Check;
pub use self::checks::CheckRate;
use self::device::CachedBlocks;
use self::events::BlockEvents;
pub use self::events::{EventChange, KNOWN, KvEvent};
use self::held::HeldBlocks;
pub use self::hints::HintEnds;
use self::hints::PolicyHints;
use self::host::SessionHost;
use self::kinds::{GroupKind, GroupSet, Points};
pub use self::matching::FoundTokens;
use self::matching::KnownAnswer;
use self::pacing::Pacing;
pub use self::pacing::{BYTES_PER_MS, LoadMode, Machine};
use self::prefill::PrefillFit;
use self::proof::BlockProof;
pub use self::proof::Unkept;
pub use self::remarks::Remark;
use self::requests::Requests;
pub use self::requests::{Adapter, Arrival, Media, Now, RequestId};
pub use self::saving::Due;
pub use self::types::{
    BegunRequest, Changes, EndedRequest, LostLoad, OfferedState, OpenedStep, PlannedStep, PolicyOptions,
    PolicyWait, RequestLoad, ServedState, StepPart, way_of_end,
};

/// A cache group, and its session.
#[derive(Debug)]
pub(crate) struct PolicyGroup<H> {
    session: H,
    points: Points,
    events: Option<BlockEvents>,
    /// The namespace of the KV held by the engine; 0: not known yet.
    namespace: u64,
}

/// The policy of one engine. See the module.
#[derive(Debug)]
pub struct EnginePolicy<H> {
    options: PolicyOptions,
    machine: Machine,
    set: Arc<GroupSet>,
    groups: Vec<PolicyGroup<H>>,
    requests: Requests,
    proof: BlockProof,
    check: Check,
    pacing: Pacing,
    prefill: PrefillFit,
    held: HeldBlocks,
    device: CachedBlocks,
    /// The step being scheduled.
    next: PlannedStep,
    /// Requests that begin in this step.
    begun: Vec<RequestId>,
    /// States made by this step.
    offered: Vec<OfferedState>,
    /// States made by the previous step, of requests with drafts. The engine moves each into its block once
    /// it knows the accepted drafts, perhaps behind that step's fence, but before the next step's fence.
    moving: Vec<OfferedState>,
    /// The blocks written by this step's loads.
    overwritten: Vec<u32>,
    /// Steps with loads whose output the engine has not taken yet.
    open_loads: Vec<u64>,
    /// Passed-over steps, each with the first step that names it to the ranks. A rank may never begin that
    /// naming step, or its report may be lost: later steps repeat the name until the engine has taken the
    /// output of one of them.
    passed: BTreeMap<u64, u64>,
    /// How often the weights may have changed.
    weights: u64,
    /// True while an update of the weights goes on: KV computed meanwhile belongs to no namespace.
    pub updating: bool,
    hit_tokens: [u64; Source::ALL.len()],
    hints: PolicyHints,
    remarks: Vec<Remark>,
    said_unproven: bool,
    /// Time at which the engine began to schedule the step.
    time: Instant,
    /// Answers awaited by the host in the current call, the last one of them, and the group and the log of
    /// the lease that it was to renew.
    known: Vec<KnownAnswer>,
    waited: i64,
    renewing: Option<(usize, i64)>,
}

// === impl EnginePolicy ===

impl<H: SessionHost> EnginePolicy<H> {
    /// Begins with a session for each group of the set.
    pub fn new(
        options: PolicyOptions,
        machine: Machine,
        set: GroupSet,
        sessions: Vec<H>,
        time: Instant,
    ) -> Self {
        let set = set.dropping(options.drops_last_block);
        let groups = sessions.into_iter().enumerate().map(|(group, mut session)| {
            let events = options.events.map(BlockEvents::new);
            if events.is_some() {
                session.ask_announcements();
            }
            let points = Points::new(&set, group);
            PolicyGroup { session, points, events, namespace: 0 }
        });
        let groups: Vec<_> = groups.collect();
        let next =
            PlannedStep { step: 1, parts: vec![StepPart::default(); groups.len()], ..PlannedStep::default() };
        Self {
            proof: BlockProof::new(set.forms.clone(), options.beside_others),
            check: Check::new(set.forms[0].block_tokens, options.checks),
            pacing: Pacing::new(&machine),
            options,
            machine,
            set: Arc::new(set),
            groups,
            prefill: PrefillFit::default(),
            requests: Requests::default(),
            held: HeldBlocks::default(),
            device: CachedBlocks::default(),
            next,
            begun: Vec::new(),
            offered: Vec::new(),
            moving: Vec::new(),
            overwritten: Vec::new(),
            open_loads: Vec::new(),
            passed: BTreeMap::new(),
            weights: 0,
            updating: false,
            hit_tokens: [0; Source::ALL.len()],
            hints: PolicyHints::default(),
            remarks: Vec::new(),
            said_unproven: false,
            time,
            known: Vec::new(),
            waited: 0,
            renewing: None,
        }
    }

    /// A group's session, to be changed.
    pub fn session(&mut self, group: usize) -> &mut H {
        &mut self.groups[group].session
    }

    /// A group's session, to be read.
    pub fn view(&self, group: usize) -> &H {
        &self.groups[group].session
    }

    /// Number of groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The sidecar's service for the engine: the worst state of its groups.
    pub fn state(&self) -> ServedState {
        let state = |group: &PolicyGroup<H>| match group.session.namespace() {
            _ if !group.session.is_connected() => ServedState::Away,
            _ if self.proof.stalled => ServedState::Unaccepted,
            0 => ServedState::Unbound,
            _ => ServedState::Serving,
        };
        self.groups.iter().map(state).min().unwrap_or(ServedState::Away)
    }

    /// Remarks since the last call.
    pub fn take_remarks(&mut self) -> Vec<Remark> {
        std::mem::take(&mut self.remarks)
    }

    /// Takes the counts of steps and blocks not kept since the last call.
    pub fn take_unkept(&mut self) -> Unkept {
        std::mem::take(&mut self.proof.unkept)
    }

    /// Notes that ranks copy loads themselves: the sidecar could not, and the user left the choice open.
    pub fn ranks_copy(&mut self) {
        self.pacing.ranks_copy();
    }

    // --- requests ---

    /// Begins to follow a request, and returns its number.
    pub fn follow_request(&mut self, arrival: Arrival) -> RequestId {
        self.requests.follow_request(arrival, self.groups.len())
    }

    /// Looks for a verdict since the last step, before the engine searches its own cache for a request.
    /// Returns true if earlier blocks may be wrong.
    pub fn look_for_verdict(&mut self) -> bool {
        if !self.check.goes_on() {
            return false;
        }
        self.groups.iter_mut().for_each(|group| group.session.end_step());
        self.follow_check()
    }

    /// Sets the keys of a request. A key depends on all keys before it, so known ones are not read again.
    pub fn follow_keys<E>(
        &mut self,
        id: RequestId,
        count: usize,
        mut key: impl FnMut(usize, &mut BlockHash) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(request) = self.requests.get_mut(id) else { return Ok(()) };
        let mut hash = BlockHash([0; 32]);
        let mut common = request.keys.len().min(count);
        while common > 0 {
            key(common - 1, &mut hash)?;
            if hash == request.keys[common - 1] {
                break;
            }
            common -= 1;
        }
        request.keys.truncate(common);
        for index in common..count {
            key(index, &mut hash)?;
            request.keys.push(hash);
        }
        Ok(())
    }

    /// Sets the encoder outputs of a request.
    pub fn follow_media(&mut self, id: RequestId, media: Vec<Media>) {
        if let Some(request) = self.requests.get_mut(id) {
            request.media = media;
        }
    }

    /// Sets the tail of a request: the last block of its prompt, if partly full, is handed over under this
    /// key.
    pub fn set_tail(&mut self, id: RequestId, tail: Option<(u32, BlockHash)>) {
        if let Some(request) = self.requests.get_mut(id) {
            request.arrival.tail = tail;
        }
    }

    /// The tokens under the key of a request's tail, if it has one and its keys are known.
    ///
    /// `None` without a whole block before it, or if another engine's tail cannot be used.
    pub fn tail_tokens(&self, id: RequestId) -> Option<std::ops::Range<u32>> {
        let request = self.requests.get(id)?;
        let (size, prompt) = (self.set.forms[0].block_tokens, request.arrival.prompt);
        let last = prompt.checked_sub(1)?;
        let end = request.arrival.awaits.unwrap_or(prompt);
        if self.set.several() {
            return None;
        }
        if request.arrival.awaits.is_some() {
            if end < last || last % size == 0 {
                return None;
            }
        } else if !request.arrival.hands_over {
            return None;
        }
        let place = end / size;
        let is_tail = place > 0 && place as usize <= request.keys.len() && end % size > 0;
        is_tail.then_some(place * size..end)
    }

    /// The key of a request's tail with these tokens; `None` for a hash algorithm that is not known here.
    pub fn tail(&self, id: RequestId, algorithm: Algorithm, tokens: &[u64]) -> Option<(u32, BlockHash)> {
        let range = self.tail_tokens(id)?;
        let size = self.set.forms[0].block_tokens;
        let place = range.start / size;
        let before = self.requests.get(id)?.keys[place as usize - 1];
        let chain = Chain::new(algorithm, algorithm.vllm_hash(&before), size).ok()?;
        let mut chain = chain.behind(before);
        chain.append(tokens);
        Some((place, chain.tail()?))
    }

    /// Ends a request with its last numbers and keys; its saves go on, its blocks may be reused. `way`: the code of its answer's end
    /// ([`way_of_end`]); 0: not known.
    pub fn end_request(&mut self, id: RequestId, way: u32) -> EndedRequest {
        self.save_last(id);
        let way = if self.end_hints(id) { WAY_LAST } else { way };
        self.pacing.forget_request(id);
        self.check.forsake(id);
        let lead = self.set.reported_group();
        let serves = self.options.saves && self.state() == ServedState::Serving;
        let stays = self.end_on_device(id, way);
        let Some(request) = self.requests.get_mut(id) else { return EndedRequest::default() };
        for (part, group) in request.parts.iter_mut().zip(&mut self.groups).filter(|_| !stays) {
            part.close_log(&mut group.session, way);
        }
        let mut ended = EndedRequest::default();
        if request.arrival.hands_over {
            let kept = request.handed_over(lead, self.set.forms[lead].block_tokens);
            ended.handed_over = Some(if serves { kept } else { 0 });
            for (part, group) in request.parts.iter().zip(&self.groups) {
                ended.hold.extend(group.session.unsaved(part.blocks[part.freed..].to_vec()));
            }
            ended.hold.retain(|block| !self.held.holds(*block));
        }
        self.requests.end_request(id, self.next.step);
        ended
    }

    /// Notes that the engine holds these blocks: no other request gets them.
    pub fn held(&mut self, blocks: &[u32], time: Instant) {
        self.held.hold(blocks, time);
    }

    /// Takes all held blocks, to be given back: the engine is about to reset its pool, which needs all blocks
    /// free.
    pub fn release_held(&mut self) -> Vec<u32> {
        self.held.release_all()
    }

    // --- one step ---

    /// Begins a scheduled step: follows the block tables, and gives up saves of blocks that the step may
    /// overwrite. Called once a step, before [`EnginePolicy::end_step`] with the numbers of the due requests.
    pub fn begin_step(&mut self, mut changes: Changes, time: Instant) -> OpenedStep {
        self.time = time;
        self.offered = std::mem::take(&mut changes.offered);
        for begun in &changes.begun {
            if let Some(request) = begun.request.and_then(|id| self.requests.get_mut(id)) {
                request.doubted_before = request.doubt.take().is_some();
            }
        }
        // A step without tokens also waits for its output: the output may report ends of loads.
        let remark = self.proof.schedule(self.next.step);
        self.remarks.extend(remark);
        if self.proof.stalled {
            // No open step has a fill.
            self.requests.forget_ended(self.next.step);
        }
        self.follow_namespaces();
        let contradicted = self.follow_check();
        let groups = &self.groups;
        let unsaved = |block| groups.iter().any(|group| group.session.is_unsaved(block));
        let released = self.held.release_saved(unsaved, time);
        let written = self.take_blocks(&changes);
        let mut filled = std::mem::take(&mut self.overwritten);
        // An asynchronous engine notes a state with the output of a step, and may give the state's block away before it offers it.
        self.offered.retain(|state| !filled.contains(&state.block) && !changes.gives_away(state));
        filled.extend(&changes.filled);
        filled.extend(changes.copied.iter().map(|(_, to)| to));
        let named = self.reuse_blocks(written.iter().chain(&filled));
        for group in &mut self.groups {
            if group.session.saving() > 0 && !(written.is_empty() && filled.is_empty()) {
                group.session.overwrite(written.iter().chain(&filled).copied());
            }
        }
        let mut due = Vec::new();
        if self.options.saves {
            self.follow_proof(changes, &filled, &written);
            for state in self.offered.iter().chain(&self.moving) {
                self.requests.due_in(state.request, self.next.step);
            }
            due = self.requests.take_due(self.next.step, &self.begun);
        }
        OpenedStep { due, released, contradicted, named }
    }

    /// Follows the block tables. Returns the new blocks of all groups, even if another group had them before.
    fn take_blocks(&mut self, changes: &Changes) -> Vec<u32> {
        let mut written = Vec::new();
        self.begun.clear();
        for begun in &changes.begun {
            if let Some(id) = begun.request
                && self.begin_table(id, begun)
            {
                self.begun.push(id);
            }
            for (group, blocks) in begun.blocks.iter().enumerate() {
                let kept = self.set.forms.get(group).map_or(0, |form| begun.computed / form.block_tokens);
                written.extend(blocks.iter().skip(kept as usize));
            }
        }
        for (id, blocks) in &changes.grown {
            written.extend(blocks.iter().flatten());
            if let Some(request) = id.and_then(|id| self.requests.get_mut(id)) {
                for ((part, blocks), form) in request.parts.iter_mut().zip(blocks).zip(&self.set.forms) {
                    // The engine moves and frees blocks of states: none is known by its place.
                    if form.kind != GroupKind::State {
                        part.blocks.extend(blocks);
                    }
                }
            }
        }
        written
    }

    fn begin_table(&mut self, id: RequestId, begun: &BegunRequest) -> bool {
        let step = self.next.step;
        let Some(request) = self.requests.get_mut(id) else { return false };
        // The engine moves blocks of states. A block of full attention says whether the request goes on in its own.
        let lead = self.set.reported_group();
        let at = (begun.computed / self.set.forms[lead].block_tokens) as usize;
        let same = request.now.preemptions == request.began_after
            && begun
                .blocks
                .get(lead)
                .is_some_and(|blocks| blocks.get(at) == request.parts[lead].blocks.get(at));
        request.began_after = request.now.preemptions;
        for ((part, blocks), form) in request.parts.iter_mut().zip(&begun.blocks).zip(&self.set.forms) {
            let found = (begun.computed / form.block_tokens) as usize;
            let is_state = form.kind == GroupKind::State;
            let blocks = if is_state { &blocks[..blocks.len().min(found + 1)] } else { &blocks[..] };
            part.goes_on = same && (is_state || part.blocks.get(found) == blocks.get(found));
            part.blocks = blocks.to_vec();
            (part.freed, part.saved, part.found) = (0, found, found);
            // The state's block may belong to another request by the next step: it is not offered then.
            part.found_in = if found > 0 && !is_state { step } else { 0 };
        }
        true
    }

    /// Notes the blocks filled by other means than computing tokens, and the blocks under beginning requests,
    /// before the step computes tokens into the `written` blocks.
    fn follow_proof(&mut self, changes: Changes, filled: &[u32], written: &[u32]) {
        self.proof.overwrite(filled);
        if self.set.has_tails() {
            self.proof.copy(&changes.copied);
        }
        for load in self.next.parts.iter().flat_map(|part| &part.loads).filter(|load| load.sync) {
            if let Some(request) = self.requests.get_mut(load.request) {
                self.proof.fill_by_load(request);
            }
        }
        if self.proof.encodes() {
            changes.encoded.into_iter().for_each(|identifier| self.proof.note_encoded(identifier));
        }
        for begun in &changes.begun {
            let Some(id) = begun.request else { continue };
            let Some(request) = self.requests.get_mut(id) else { continue };
            let mut unproven = 0;
            for group in 0..self.set.forms.len() {
                unproven += self.proof.begin_request(id, request, group, begun.computed, &changes.copied);
            }
            if unproven > 0 && !std::mem::replace(&mut self.said_unproven, true) {
                self.remarks.push(Remark::Unproven { blocks: unproven, request: id });
            }
        }
        self.proof.overwrite(written);
        for begun in &changes.begun {
            if let Some(id) = begun.request.filter(|_| self.set.has_tails())
                && let Some(request) = self.requests.get(id).filter(|request| request.doubt.is_none())
            {
                self.proof.keep_beginning(id, request, begun.computed);
            }
        }
    }

    /// Posts the step's saves, for the `due` requests, whose numbers and keys the engine has handed in, and for
    /// the blocks `named` as reused next. Returns the planned step. `computes`: number of requests computed by
    /// the step.
    pub fn end_step(&mut self, due: &[Due], computes: usize, named: &[u32]) -> PlannedStep {
        let mut step = self.next.clone_for_next();
        std::mem::swap(&mut step, &mut self.next);
        step.open_loads.clone_from(&self.open_loads);
        step.passed = self.passed.keys().copied().collect();
        let has_loads = step.parts.iter().any(|part| !part.loads.is_empty() || !part.lost.is_empty());
        if has_loads {
            self.open_loads.push(step.step);
        }
        let computed = due.iter().filter_map(|due| {
            let first = self.requests.get(due.request)?.now.computed;
            Some(first..first.saturating_add(due.scheduled?))
        });
        self.prefill.schedule_step(step.step, self.time, computed, has_loads);
        let mut saves =
            if self.options.saves { self.save_due(due, step.step) } else { vec![false; step.parts.len()] };
        saves[0] |= self.leave_device(named);
        step.asks = self.proof.waits() || !self.open_loads.is_empty();
        self.pacing.end_step(computes == 0);
        self.look_at_hints();
        for ((group, part), saves) in self.groups.iter_mut().zip(&mut step.parts).zip(saves) {
            group.session.end_step();
            if let Some(events) = &mut group.events {
                events.has_worked |= computes > 0;
            }
            part.urgent = !part.loads.is_empty() || saves || group.session.saving() > 0;
        }
        step.weights = self.weights;
        step
    }

    /// True if [`EnginePolicy::accept_step`] of this step needs the requests of open steps: the engine has
    /// passed over some.
    pub fn passes_over(&self, step: u64) -> bool {
        self.proof.expects() != Some(step)
    }

    /// Steps whose output the engine has not taken.
    pub fn open_steps(&self) -> impl Iterator<Item = u64> {
        self.proof.open_steps()
    }

    /// The engine has taken the output of `step`, returned by every rank. `scheduled`: the requests computed by each open step, if the
    /// engine has passed over steps. `time`: of now, where the time of a step is that of its computation.
    pub fn accept_step(
        &mut self,
        step: u64,
        scheduled: &HashMap<u64, Vec<RequestId>>,
        time: Option<Instant>,
    ) {
        if let Some(rate) = time.and_then(|time| self.prefill.take_output(step, time)) {
            self.groups.iter_mut().for_each(|group| group.session.tell_prefill(rate));
        }
        let mut passed = proof::Passed::default();
        if !self.proof.accept_next(step) {
            let stalled = self.proof.stalled;
            passed = self.proof.pass_over(step, &mut self.requests, scheduled);
            if !passed.steps.is_empty() || stalled {
                self.remarks.push(Remark::PassedOver { steps: passed.steps.len() as u64, step });
            }
        }
        self.open_loads.retain(|open| *open > step);
        self.passed.retain(|_, told| *told > step);
        self.passed.extend(passed.steps.iter().map(|lost| (*lost, self.next.step)));
        self.accept_saves(step, &passed);
        self.requests.forget_ended(self.proof.open_steps().next().unwrap_or(self.next.step));
    }

    // --- KV events ---

    /// Takes the events of a group's changes; empty unless the engine publishes events.
    pub fn take_events(&mut self, group: usize, time: Instant) -> Vec<KvEvent> {
        let PolicyGroup { session, events: Some(events), .. } = &mut self.groups[group] else {
            return Vec::new();
        };
        let changes = session.take_changes();
        events.take_events(&changes, session.saving() > 0, time)
    }

    /// True if an engine without requests should run further steps for its events.
    pub fn lingers(&self, time: Instant) -> bool {
        self.groups.iter().flat_map(|group| &group.events).any(|events| events.linger(time))
    }

    /// Notes that the engine has announced every block as removed.
    pub fn blocks_cleared(&mut self) {
        for group in &mut self.groups {
            if let Some(events) = &mut group.events {
                events.cleared();
                group.session.ask_announcements();
            }
        }
    }
}
