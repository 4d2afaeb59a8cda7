//! The blocks of the engine's pool that hold the KV of their keys, as far as this run has seen them filled.
//!
//! An engine such as vLLM lists a block under its hash when it schedules the step to fill the block. The step may be skipped, raise or be
//! refused, and its request may be preempted in the same schedule(). A listed hash therefore proves nothing. A block is proven by an
//! accepted step filling it under the listed key, or by a successful load. An unproven block is not saved or handed over, and neither is
//! any block computed upon it.

use std::collections::{HashMap, HashSet, VecDeque};

use shm_protocol::key::BlockHash;

use super::kinds::{GroupForm, GroupKind};
use super::remarks::Remark;
use super::requests::{FollowedRequest, RequestId, Requests};

/// The most encoder outputs remembered as new ones: with more, all count as old.
const ENCODED_MAX: usize = 1 << 16;
/// The most steps that wait for the engine to take their output; vLLM has at most two in flight. With more,
/// the engine counts as one that takes no output.
const OPEN_STEPS_MAX: usize = 32;
/// The engine's null block, in place of each block before a window. Nothing is ever written to it.
pub(super) const NULL_BLOCK: u32 = 0;

/// Blocks filled by a step in a cache group.
#[derive(Debug)]
struct Fill {
    group: usize,
    blocks: Vec<u32>,
    /// The request that computes them; `None` for a load: its content depends on no block before it.
    owner: Option<RequestId>,
}

/// A step whose output the engine has not taken yet.
#[derive(Debug)]
struct OpenStep {
    number: u64,
    fills: Vec<Fill>,
    /// The blocks under each request at its begin in the step. A request with a window forgets them before
    /// the engine takes the output.
    begins: Vec<(RequestId, Vec<u32>)>,
    /// Blocks copied by the step, each pair from the first to the second.
    copies: Vec<(u32, u32)>,
}

/// The steps passed over by the engine when it took a later output.
#[derive(Debug, Default)]
pub(super) struct Passed {
    pub(super) steps: Vec<u64>,
    /// True if later steps have computed from them: no save posted until now counts.
    pub(super) voids: bool,
}

/// Counts of unkept steps and blocks, since they were taken last.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Unkept {
    /// Steps passed over by the engine.
    pub unaccepted_steps: u64,
    /// Unproven blocks under beginning requests.
    pub unproven_blocks: u64,
}

/// By block of a group, the key this run saw it filled under, by an accepted step, a load or an open step.
#[derive(Debug, Default)]
struct FilledBlocks {
    whole: Vec<Option<BlockHash>>,
    /// The key of the tokens up to the end of a block's beginning, if other requests may go on from there. A block may be whole as well.
    begun: HashMap<u32, BlockHash>,
}

/// The proven blocks of one engine, of all its cache groups.
#[derive(Debug)]
pub(super) struct BlockProof {
    forms: Vec<GroupForm>,
    keys: Vec<FilledBlocks>,
    open: VecDeque<OpenStep>,
    /// The last accepted step.
    pub(super) accepted: Option<u64>,
    /// The engine's identifiers of encoder outputs made since the last disowning of all blocks; `None`: there
    /// was none. The engine may still use older outputs, made with other weights.
    encoded: Option<HashSet<String>>,
    /// True if the engine takes no output, as far as this run knows: then nothing is kept, and nothing
    /// promised.
    pub(super) stalled: bool,
    pub(super) unkept: Unkept,
    /// True if another connector loads blocks, too. These count as unproven.
    beside_others: bool,
}

// === impl FilledBlocks ===

impl FilledBlocks {
    fn get(&self, block: u32) -> Option<&BlockHash> {
        self.whole.get(block as usize)?.as_ref()
    }

    fn set_key(&mut self, block: u32, key: BlockHash) {
        let at = block as usize;
        if at >= self.whole.len() {
            self.whole.resize(at + 1, None);
        }
        self.whole[at] = Some(key);
    }

    fn forget_blocks(&mut self, blocks: &[u32]) {
        for block in blocks {
            if let Some(key) = self.whole.get_mut(*block as usize) {
                *key = None;
            }
            if !self.begun.is_empty() {
                self.begun.remove(block);
            }
        }
    }

    /// Gives a block the content of another.
    fn copy(&mut self, from: u32, to: u32) {
        if let Some(key) = self.get(from).copied() {
            self.set_key(to, key);
        }
        if let Some(key) = self.begun.get(&from).copied() {
            self.begun.insert(to, key);
        }
    }

    /// Number of the request's leading blocks before `end`, up to the first block not filled under its key. A
    /// null block stands for a block before a window, and is not read.
    fn leading(&self, request: &FollowedRequest, group: usize, form: &GroupForm, end: usize) -> usize {
        let blocks = &request.parts[group].blocks;
        let keys = request.keys_of(form, 0..end.min(blocks.len()));
        let right =
            |(block, key): &(&u32, &BlockHash)| **block == NULL_BLOCK || self.get(**block) == Some(key);
        blocks.iter().zip(keys).take_while(right).count()
    }
}

// === impl BlockProof ===

impl BlockProof {
    pub(super) fn new(forms: Vec<GroupForm>, beside_others: bool) -> Self {
        Self {
            keys: forms.iter().map(|_| FilledBlocks::default()).collect(),
            forms,
            open: VecDeque::new(),
            accepted: None,
            encoded: None,
            stalled: false,
            unkept: Unkept::default(),
            beside_others,
        }
    }

    /// True if there are steps whose output the engine has not taken.
    pub(super) fn waits(&self) -> bool {
        !self.open.is_empty()
    }

    /// The first of these steps, if the engine is known to take outputs.
    pub(super) fn expects(&self) -> Option<u64> {
        self.open.front().filter(|_| !self.stalled).map(|step| step.number)
    }

    /// All of these steps.
    pub(super) fn open_steps(&self) -> impl Iterator<Item = u64> {
        self.open.iter().map(|step| step.number)
    }

    /// True if encoder outputs are followed.
    pub(super) fn encodes(&self) -> bool {
        self.encoded.is_some()
    }

    // --- one step ---

    /// Notes that a step is scheduled.
    pub(super) fn schedule(&mut self, step: u64) -> Option<Remark> {
        if self.stalled {
            // One of them suffices to learn of passed-over steps.
            return None;
        }
        self.open.push_back(OpenStep {
            number: step,
            fills: Vec::new(),
            begins: Vec::new(),
            copies: Vec::new(),
        });
        (self.open.len() > OPEN_STEPS_MAX).then(|| {
            self.void();
            self.stalled = true;
            Remark::Stalled { steps: OPEN_STEPS_MAX as u64 }
        })
    }

    /// Notes that the step writes these blocks.
    pub(super) fn overwrite(&mut self, blocks: &[u32]) {
        for keys in &mut self.keys {
            keys.forget_blocks(blocks);
        }
    }

    /// Notes that the step copies blocks, each pair from the first to the second, before it computes
    /// anything.
    pub(super) fn copy(&mut self, copied: &[(u32, u32)]) {
        for (from, to) in copied {
            self.keys.iter_mut().for_each(|keys| keys.copy(*from, *to));
        }
        if let Some(step) = self.open.back_mut() {
            step.copies.extend(copied);
        }
    }

    /// Notes that the step waits for the request's load, so the step fills its blocks.
    pub(super) fn fill_by_load(&mut self, request: &mut FollowedRequest) {
        if self.stalled {
            return;
        }
        let Some(step) = self.open.back_mut() else { return };
        for (group, part) in request.parts.iter().enumerate() {
            let blocks = part.loading.iter().map(|(block, _)| *block).collect();
            step.fills.push(Fill { group, blocks, owner: None });
        }
        self.loaded(request, &[]);
    }

    /// Notes that the request begins in a group on blocks with so many tokens, as the engine counts them;
    /// blocks of it may be copies. Returns the number of unproven blocks to report.
    pub(super) fn begin_request(
        &mut self,
        id: RequestId,
        request: &mut FollowedRequest,
        group: usize,
        tokens: u32,
        copied: &[(u32, u32)],
    ) -> u64 {
        let form = self.forms[group];
        let (found, rest) = ((tokens / form.block_tokens) as usize, tokens % form.block_tokens);
        let filled = self.keys[group].leading(request, group, &form, found);
        request.parts[group].filled = filled;
        let mut unproven = 0;
        if filled < found {
            if self.encoded.is_none() && !self.beside_others {
                unproven = (found - filled) as u64;
                self.unkept.unproven_blocks += unproven;
            }
            request.doubt(filled as u32 * form.block_tokens);
        } else if rest > 0 && !self.is_partly_proven(request, group, found, tokens) {
            request.doubt(found as u32 * form.block_tokens);
        }
        if tokens > 0
            && let Some(step) = self.open.back_mut()
        {
            let blocks = &request.parts[group].blocks;
            let mut under = blocks[..blocks.len().min(found + 1)].to_vec();
            // A copy is as unproven as its source.
            let sources = copied.iter().filter(|(_, to)| under.contains(to)).map(|(from, _)| *from);
            under.extend(sources.collect::<Vec<_>>());
            step.begins.push((id, under));
        }
        unproven
    }

    /// Whether the beginning of a block is right up to so many tokens: the block was loaded or filled so far, or the request computed this
    /// part.
    fn is_partly_proven(&self, request: &FollowedRequest, group: usize, place: usize, tokens: u32) -> bool {
        let (part, form) = (&request.parts[group], &self.forms[group]);
        if part.goes_on && !request.doubted_before {
            return true;
        }
        let Some(block) = part.blocks.get(place) else { return false };
        let (whole, begun) = (self.keys[group].get(*block), self.keys[group].begun.get(block));
        let tail = request.arrival.tail.as_ref().map(|(_, key)| key);
        let (own, so_far) = (request.block_key(form, place), request.key_at(form, tokens));
        // A state at the end of the block is not the state at its beginning's end.
        let is_whole = whole.is_some() && form.kind != GroupKind::State && (whole == tail || whole == own);
        is_whole || so_far.is_some() && (whole == so_far || begun == so_far)
    }

    /// Notes the blocks full once the current step has computed the request's tokens from `start` to `end`.
    pub(super) fn fill(&mut self, id: RequestId, request: &mut FollowedRequest, start: u32, mut end: u32) {
        if let Some(doubt) = request.doubt {
            if start > doubt {
                return;
            }
            // The step computes everything in doubt again.
            request.doubt = None;
        }
        if let Some(old) = self.old_output(request, start, end) {
            request.doubt = Some(old);
            end = old;
        }
        let step = self.open.back().map_or(0, |open| open.number);
        self.fill_groups(id, request, (start, end), step);
    }

    /// Notes the request's blocks up to `end` as filled by an open step, also under keys unknown then.
    pub(super) fn fill_last(&mut self, id: RequestId, request: &mut FollowedRequest, end: u32, step: u64) {
        // No step writes its filled blocks again.
        self.fill_groups(id, request, (u32::MAX, end), step);
    }

    fn fill_groups(
        &mut self,
        id: RequestId,
        request: &mut FollowedRequest,
        (start, end): (u32, u32),
        step: u64,
    ) {
        for group in 0..self.forms.len() {
            if self.forms[group].kind != GroupKind::State {
                self.fill_group(id, request, group, (start, end), step);
            }
        }
    }

    /// Notes that after the current step this block of the engine holds the request's state at `end`, or its
    /// KV so far.
    pub(super) fn fill_part(
        &mut self,
        id: RequestId,
        request: &FollowedRequest,
        group: usize,
        (block, end): (u32, u32),
    ) {
        let form = &self.forms[group];
        let Some(key) = request.key_at(form, end) else { return };
        if form.kind == GroupKind::State {
            self.keys[group].set_key(block, *key);
        } else {
            self.keys[group].begun.insert(block, *key);
        }
        if let Some(step) = self.open.back_mut() {
            step.fills.push(Fill { group, blocks: vec![block], owner: Some(id) });
        }
    }

    /// True if the engine's block of full attention holds the KV of this key, or will once open steps are accepted.
    pub(super) fn holds(&self, block: u32, key: &BlockHash) -> bool {
        self.keys[0].get(block) == Some(key)
    }

    /// Keeps those blocks of full attention whose content no open step has filled: no refusal takes it back.
    pub(super) fn retain_accepted(&self, blocks: &mut Vec<u32>) {
        let open: HashSet<u32> = self
            .open
            .iter()
            .flat_map(|open| &open.fills)
            .flat_map(|fill| fill.blocks.iter().copied())
            .collect();
        blocks.retain(|block| self.keys[0].get(*block).is_some() && !open.contains(block));
    }

    /// True if the engine's block still has that state of the request, from a step that was not passed over.
    pub(super) fn has_state(
        &self,
        request: &FollowedRequest,
        group: usize,
        (block, end): (u32, u32),
    ) -> bool {
        let key = request.key_at(&self.forms[group], end);
        key.is_some() && self.keys[group].get(block) == key
    }

    /// Notes that the request writes behind its beginning in a block of full attention. Other requests may go
    /// on from there, too.
    pub(super) fn keep_beginning(&mut self, id: RequestId, request: &FollowedRequest, tokens: u32) {
        for (group, form) in self.forms.clone().iter().enumerate().filter(|(_, form)| form.has_tail(tokens)) {
            if let Some(block) = request.parts[group].blocks.get((tokens / form.block_tokens) as usize) {
                self.fill_part(id, request, group, (*block, tokens));
            }
        }
    }

    fn fill_group(
        &mut self,
        id: RequestId,
        request: &mut FollowedRequest,
        group: usize,
        (start, end): (u32, u32),
        step: u64,
    ) {
        let form = self.forms[group];
        let part = &request.parts[group];
        // The engine may have taken tokens back: the step writes filled blocks again.
        let first = part.filled.min((start / form.block_tokens) as usize);
        let end = ((end / form.block_tokens) as usize).min(part.blocks.len()).max(first);
        let keys = request.keys_of(&form, first..end);
        let full = part.blocks[first.min(part.blocks.len())..].iter().copied().zip(keys);
        let mut blocks = Vec::new();
        let mut filled = first;
        for (block, key) in full {
            filled += 1;
            if block != NULL_BLOCK {
                self.keys[group].set_key(block, *key);
                blocks.push(block);
            }
        }
        request.parts[group].filled = filled;
        if filled > first
            && let Some(step) = self.open.iter_mut().rfind(|open| open.number == step)
        {
            step.fills.push(Fill { group, blocks, owner: Some(id) });
        }
    }

    /// Returns the first token from `start` on, before `end`, of an encoder output made with earlier weights.
    fn old_output(&self, request: &FollowedRequest, start: u32, end: u32) -> Option<u32> {
        let encoded = self.encoded.as_ref()?;
        let old = request.media.iter().filter(|media| !encoded.contains(&media.identifier));
        let read = old.filter(|media| media.offset < end && media.offset + media.length > start);
        read.map(|media| media.offset.max(start)).min()
    }

    /// Returns true if the engine took the output of the oldest open step: this proves the blocks filled by
    /// the step.
    pub(super) fn accept_next(&mut self, step: u64) -> bool {
        let next = self.expects() == Some(step);
        if next {
            self.open.pop_front();
            self.accepted = Some(step);
        }
        next
    }

    /// Notes that the engine has taken the output of `step`, and no output of the steps before it;
    /// `scheduled` has their requests.
    pub(super) fn pass_over(
        &mut self,
        step: u64,
        requests: &mut Requests,
        scheduled: &HashMap<u64, Vec<RequestId>>,
    ) -> Passed {
        let before = self.open.iter().take_while(|open| open.number < step).count();
        let passed: Vec<OpenStep> = self.open.drain(..before).collect();
        let mut voids = self.stalled;
        if !passed.is_empty() || voids {
            let ids = passed.iter().filter_map(|open| scheduled.get(&open.number)).flatten();
            // Ended requests count too: a later step may have computed from their blocks before they ended.
            let mut affected: HashSet<RequestId> = ids.copied().collect();
            if voids {
                affected.extend(requests.live().map(|(id, _)| id));
            }
            let mut lost = HashSet::new();
            for open in &passed {
                for fill in &open.fills {
                    self.keys[fill.group].forget_blocks(&fill.blocks);
                    lost.extend(&fill.blocks);
                }
                // The step may or may not have made its copies.
                let copies: Vec<u32> = open.copies.iter().map(|(_, to)| *to).collect();
                self.overwrite(&copies);
                lost.extend(copies);
            }
            voids |= self.spread(lost, affected, requests, scheduled);
            self.unkept.unaccepted_steps += passed.len() as u64;
        }
        self.stalled = false;
        self.accepted = self.accepted.max(Some(step));
        if self.expects() == Some(step) {
            self.open.pop_front();
        }
        Passed { steps: passed.iter().map(|open| open.number).collect(), voids }
    }

    // --- loads beside the steps, and lost proofs ---

    /// Notes the end of the request's load: all its blocks are loaded, except the `failed` ones.
    pub(super) fn loaded(&mut self, request: &mut FollowedRequest, failed: &[u32]) {
        for (part, keys) in request.parts.iter_mut().zip(&mut self.keys) {
            for (block, key) in std::mem::take(&mut part.loading) {
                if !failed.contains(&block) {
                    keys.set_key(block, key);
                }
            }
        }
    }

    /// Voids the open steps: they prove none of the blocks they fill.
    fn void(&mut self) {
        for open in &mut self.open {
            for fill in std::mem::take(&mut open.fills) {
                self.keys[fill.group].forget_blocks(&fill.blocks);
            }
            let copies: Vec<u32> = std::mem::take(&mut open.copies).into_iter().map(|(_, to)| to).collect();
            self.keys.iter_mut().for_each(|keys| keys.forget_blocks(&copies));
        }
    }

    /// Notes blocks that were not loaded: KV computed from them by the open steps, directly or not, is not
    /// proven.
    pub(super) fn fail(&mut self, blocks: &[u32], requests: &mut Requests) {
        self.overwrite(blocks);
        self.spread(blocks.iter().copied().collect(), HashSet::new(), requests, &HashMap::new());
    }

    /// Voids KV computed by the open steps for the `affected` requests, or from the `lost` blocks, directly
    /// or not. Returns true if the open steps have computed any of it.
    fn spread(
        &mut self,
        mut lost: HashSet<u32>,
        mut affected: HashSet<RequestId>,
        requests: &mut Requests,
        scheduled: &HashMap<u64, Vec<RequestId>>,
    ) -> bool {
        let mut left = self.blocks_under(requests);
        let mut voids = false;
        loop {
            self.forget_copies(&mut lost);
            if affected.is_empty() {
                let upon = left.iter().filter(|(_, blocks)| !lost.is_disjoint(blocks));
                affected = upon.map(|(id, _)| *id).collect();
            }
            if affected.is_empty() {
                return voids;
            }
            left.retain(|id, _| !affected.contains(id));
            for open in &mut self.open {
                let gone =
                    open.fills.extract_if(.., |fill| fill.owner.is_some_and(|id| affected.contains(&id)));
                for fill in gone {
                    self.keys[fill.group].forget_blocks(&fill.blocks);
                    lost.extend(fill.blocks);
                }
                let computes = scheduled.get(&open.number);
                voids |= computes.is_some_and(|ids| ids.iter().any(|id| affected.contains(id)));
            }
            for id in affected.drain() {
                if let Some(request) = requests.get_mut(id) {
                    self.fall_back(request);
                }
            }
        }
    }

    /// Copies of lost blocks are lost.
    fn forget_copies(&mut self, lost: &mut HashSet<u32>) {
        let copies: Vec<(u32, u32)> = self.open.iter().flat_map(|open| &open.copies).copied().collect();
        while let Some((_, to)) = copies.iter().find(|(from, to)| lost.contains(from) && !lost.contains(to)) {
            self.overwrite(&[*to]);
            lost.insert(*to);
        }
    }

    /// The blocks under each request, also of requests ended in the meantime with blocks filled in an open step.
    fn blocks_under(&self, requests: &mut Requests) -> HashMap<RequestId, HashSet<u32>> {
        let tables =
            |request: &FollowedRequest| request.parts.iter().flat_map(|part| part.blocks.clone()).collect();
        let mut under: HashMap<RequestId, HashSet<u32>> =
            requests.live().map(|(id, request)| (id, tables(request))).collect();
        for owner in self.open.iter().flat_map(|open| &open.fills).filter_map(|fill| fill.owner) {
            if let Some(request) = requests.known_mut(owner) {
                under.entry(owner).or_insert_with(|| tables(request));
            }
        }
        for (id, blocks) in self.open.iter().flat_map(|open| &open.begins) {
            under.entry(*id).or_default().extend(blocks);
        }
        under
    }

    /// Puts the request's KV beyond its proven blocks in doubt.
    fn fall_back(&self, request: &mut FollowedRequest) {
        if !request.has_blocks() {
            return;
        }
        request.slide(&self.forms);
        for (group, form) in self.forms.iter().enumerate() {
            let before = request.parts[group].filled;
            let filled = self.keys[group].leading(request, group, form, before);
            request.parts[group].filled = filled;
            // A part of states knows the one that the request began on; how far it has computed since, the other parts know.
            if filled < before || form.kind != GroupKind::State {
                request.doubt(filled as u32 * form.block_tokens);
            }
        }
    }

    /// Disowns all blocks: none belongs to the KV computed from now on. If the engine's own cache could not
    /// be reset, requests still find old blocks in it.
    pub(super) fn disown(&mut self, requests: &mut Requests) {
        for keys in &mut self.keys {
            keys.whole.clear();
            keys.begun.clear();
        }
        self.void();
        self.encoded = Some(HashSet::new());
        for (_, request) in requests.live_mut() {
            for part in &mut request.parts {
                part.loading.clear();
            }
            self.fall_back(request);
        }
    }

    /// Notes that encoders make this output in a step.
    pub(super) fn note_encoded(&mut self, identifier: String) {
        if let Some(encoded) = &mut self.encoded {
            encoded.insert(identifier);
            if encoded.len() > ENCODED_MAX {
                encoded.clear();
            }
        }
    }
}
