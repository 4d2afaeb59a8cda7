//! The loads of the step being scheduled.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use shm_protocol::source::Source;

use super::EnginePolicy;
use super::host::SessionHost;
use super::kinds::AskedKeys;
use super::requests::{Allocation, FollowedRequest, Hit, LastAnswer, Now, RequestId};
use super::types::{LostLoad, PolicyWait, RequestLoad};
use crate::core::scheduler::PENDING;

// === impl EnginePolicy: loads ===

impl<H: SessionHost> EnginePolicy<H> {
    /// The engine has allocated blocks for a request and takes `external` tokens of the cache. Returns the ranges of blocks to name, by
    /// group, counted from the request's first; [`EnginePolicy::load_blocks`] takes them. None: it is to name no blocks.
    pub fn allocated(&mut self, id: RequestId, external: u32) -> Option<Vec<Range<usize>>> {
        let several = self.set.several();
        let request = self.requests.get_mut(id)?;
        let Now { tokens, computed, .. } = request.now;
        let had = request.had.take();
        let answer = std::mem::take(&mut request.answer);
        request.allocation = None;
        if !several {
            self.pacing.take_in();
            if matches!(answer, LastAnswer::Nothing | LastAnswer::PutOff) {
                self.pacing.compute(id, tokens.saturating_sub(computed));
            }
        }
        let (LastAnswer::Hit(hit) | LastAnswer::GivenUp(hit)) = answer else {
            return if external == 0 { self.foreign(id, had?) } else { None };
        };
        if external == 0 {
            self.release_leases(id);
            return self.foreign(id, had?);
        }
        let end = hit.first + external;
        let request = self.requests.get_mut(id)?;
        request.allocation = Some(Allocation::Load { answer, end });
        let sizes = self.set.forms.iter().map(|form| form.block_tokens);
        Some(sizes.map(|size| (hit.first / size) as usize..end.div_ceil(size) as usize).collect())
    }

    /// Returns the ranges of all blocks since the engine's question: without a load here, another connector may load any of them.
    fn foreign(&mut self, id: RequestId, had: u32) -> Option<Vec<Range<usize>>> {
        self.requests.get_mut(id)?.allocation = Some(Allocation::Foreign);
        let sizes = self.set.forms.iter().map(|form| form.block_tokens);
        Some(sizes.map(|size| (had / size) as usize..usize::MAX).collect())
    }

    /// Has the step load the promised tokens into the blocks of each group asked for by [`EnginePolicy::allocated`]. If they cannot be
    /// loaded, the request's leases are released, and the step reports its new blocks as failed to load: the engine computes them.
    pub fn load_blocks(
        &mut self,
        id: RequestId,
        blocks: &[Vec<u32>],
        time: Instant,
    ) -> Result<(), PolicyWait> {
        let Some(allocation) = self.requests.get(id).and_then(|request| request.allocation.clone()) else {
            return Ok(());
        };
        // A null block, number 0, stands for each block before a window.
        let fresh: Vec<Vec<u32>> =
            blocks.iter().map(|each| each.iter().copied().filter(|block| *block > 0).collect()).collect();
        let (answer, end) = match allocation {
            Allocation::Foreign => {
                self.overwrite(fresh.into_iter().flatten().collect());
                return Ok(());
            }
            Allocation::Load { answer, end } => (answer, end),
        };
        let LastAnswer::Hit(hit) = answer else {
            self.lose(id, blocks.to_vec(), false);
            return Ok(());
        };
        // vLLM may allocate blocks for fewer tokens than the answer promised. The load is shortened if all groups can end there.
        let whole = end == hit.end || end < hit.end && self.reaches(id, hit.first, end, time)?;
        self.renew(id, hit.sync, time)?;
        self.known.clear();
        let request = self.requests.get_mut(id).expect("it was looked up");
        request.allocation = None;
        let set = Arc::clone(&self.set);
        let wanted: Vec<Range<u32>> = set.forms.iter().map(|form| form.loaded(hit.first, end)).collect();
        let within = |group: usize, range: &Range<u32>| {
            let skipped = (range.start - hit.first / self.set.forms[group].block_tokens) as usize;
            let ids = &blocks[group];
            ids[skipped.min(ids.len())..].to_vec()
        };
        let ids: Vec<Vec<u32>> =
            wanted.iter().enumerate().map(|(group, range)| within(group, range)).collect();
        // vLLM does not zero new blocks that are to be loaded: a block that the load leaves out has KV of an earlier request.
        let covers = fresh.iter().zip(&ids).all(|(fresh, ids)| fresh.iter().all(|block| ids.contains(block)));
        // Before the loads: they may begin as soon as they are posted.
        self.overwrite(fresh.iter().flatten().copied().collect());
        if !whole || !covers {
            self.release_leases(id);
            self.lose(id, fresh, false);
            return Ok(());
        }
        self.count_hit(id, (hit, end));
        for (group, mut ids) in ids.into_iter().enumerate() {
            let keys = set.loaded_keys(group, hit.first, end);
            let tail = ids.split_off(keys.len().min(ids.len()));
            let part = &mut self.requests.get_mut(id).expect("it was looked up").parts[group];
            part.loading.clear();
            part.loaded.clear();
            if !ids.is_empty() {
                self.plan(id, group, keys.start, ids, hit.sync);
            }
            if !tail.is_empty() {
                self.plan_tail(id, group, end, tail);
            }
        }
        Ok(())
    }

    /// Returns true if the hit may end earlier, at `end`. A single group then loads fewer blocks. With several groups, those with windows or
    /// states need other blocks for another end, not leased by the answer. So `end` must be a boundary of all groups' blocks, and a new
    /// question for each of these groups must find and lease all blocks needed there.
    fn reaches(&mut self, id: RequestId, first: u32, end: u32, time: Instant) -> Result<bool, PolicyWait> {
        if !self.set.several() {
            return Ok(true);
        }
        if !end.is_multiple_of(self.set.boundary) {
            return Ok(false);
        }
        let others: Vec<usize> = self.set.groups_of(true).collect();
        for group in others {
            let keys = self.set.loaded_keys(group, first, end);
            let count = keys.len() as u32;
            if count > 0 && self.look_up(id, group, AskedKeys::Of(keys), time)? != Some(count) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Asks again where a lease is too old to be relied on. A step's own answer has half a lease's life left.
    fn renew(&mut self, id: RequestId, sync: bool, time: Instant) -> Result<(), PolicyWait> {
        if sync {
            return Ok(());
        }
        let parts = self.requests.get(id).expect("the caller has it").parts.iter().enumerate();
        let logs: Vec<(usize, i64)> =
            parts.flat_map(|(group, part)| part.logs().map(move |log| (group, log))).collect();
        for (group, log) in logs {
            let session = &mut self.groups[group].session;
            if self.renewing.take_if(|renewing| *renewing == (group, log)).is_some() {
                if self.waited == PENDING {
                    // Nobody asks again for blocks not loaded now.
                    session.release_lease(log);
                }
            } else if let Some(op) = session.renew(log, time) {
                self.renewing = Some((group, log));
                return Err(PolicyWait::Answer { group, op });
            }
        }
        Ok(())
    }

    /// Has the step load blocks of a group from `first` on.
    fn plan(&mut self, id: RequestId, group: usize, first: u32, mut blocks: Vec<u32>, sync: bool) {
        // Blocks before the window of the next token are null blocks: they must be kept, for the blocks behind them, but are not loaded.
        let unneeded = blocks.iter().take_while(|block| **block == 0).count();
        blocks.drain(..unneeded);
        let first = first + unneeded as u32;
        let request = self.requests.get_mut(id).expect("the caller has it");
        request.begin_load(group, &self.set.forms[group], first, blocks.clone());
        let log = request.parts[group].log;
        self.post_load(id, group, (log, first), blocks, sync);
    }

    /// Has the step load the block of full attention filled up to `end`, the end of a hit.
    fn plan_tail(&mut self, id: RequestId, group: usize, end: u32, blocks: Vec<u32>) {
        let form = self.set.forms[group];
        let request = self.requests.get_mut(id).expect("the caller has it");
        let key = request.key_at(&form, end).copied();
        let part = &mut request.parts[group];
        // Without its log there is no lease of it: the load has failed.
        let tail = part.tail.filter(|tail| Some(tail.key) == key);
        part.loading.extend(blocks.iter().copied().zip(key));
        part.loaded.extend(&blocks);
        self.post_load(id, group, tail.map_or((-1, 0), |tail| (tail.log, tail.place)), blocks, false);
    }

    fn post_load(
        &mut self,
        id: RequestId,
        group: usize,
        (log, first): (i64, u32),
        blocks: Vec<u32>,
        sync: bool,
    ) {
        let session = &mut self.groups[group].session;
        let plans = session.post_load(log, first, &blocks, self.next.step, sync);
        let next = &mut self.next.parts[group];
        if plans.is_empty() {
            next.lost.push(LostLoad { request: id, blocks, sync });
        }
        next.loads.extend(plans.into_iter().map(|plan| RequestLoad { request: id, plan, sync }));
    }

    /// Has the step report these blocks of each group as failed to load.
    fn lose(&mut self, id: RequestId, blocks: Vec<Vec<u32>>, sync: bool) {
        let Some(request) = self.requests.get_mut(id) else { return };
        request.allocation = None;
        for (group, blocks) in blocks.into_iter().enumerate() {
            self.overwritten.extend(&blocks);
            request.parts[group].loaded.clone_from(&blocks);
            self.next.parts[group].lost.push(LostLoad { request: id, blocks, sync });
        }
    }

    /// Counts the tokens about to be loaded, by the group with its loads reported as those of the request. As in an engine, tokens of a
    /// preempted request do not count again.
    fn count_hit(&mut self, id: RequestId, (hit, end): (Hit, u32)) {
        let lead = self.set.reported_group();
        let (form, keys) = (self.set.forms[lead], self.set.loaded_keys(lead, hit.first, end));
        let size = form.block_tokens;
        let session = &mut self.groups[lead].session;
        let request = self.requests.get_mut(id).expect("the caller has it");
        let (log, blocks) = (request.parts[lead].log, keys.len() as u32);
        let mut found = session.sources(log, keys.start, blocks).map(|blocks| blocks * size);
        if form.has_tail(end) && self.set.has_tails() {
            let last = request.parts[lead].tail.map(|tail| session.sources(tail.log, tail.place, 1));
            for (found, last) in found.iter_mut().zip(last.unwrap_or_default()) {
                *found += last * (end % size);
            }
        } else if form.has_tail(end) {
            let last = session.sources(log, keys.end - 1, 1);
            for (found, last) in found.iter_mut().zip(last) {
                *found -= last * (size - end % size);
            }
        }
        request.sources = found;
        if request.now.preemptions == 0 {
            for (all, found) in self.hit_tokens.iter_mut().zip(found) {
                *all += u64::from(found);
            }
        }
        if self.set.several() {
            return;
        }
        let external = end - hit.first;
        self.check.loaded(external);
        let new_tokens = request.now.tokens.saturating_sub(end);
        self.pacing.begin_load(id, blocks, new_tokens, hit.sync);
        self.next.fills_tail |= hit.sync && external % size > 0;
    }

    /// The engine, or another connector, is about to write these blocks: unfinished saves of them are given up.
    fn overwrite(&mut self, blocks: Vec<u32>) {
        for group in &mut self.groups {
            if group.session.saving() > 0 {
                group.session.overwrite(blocks.iter().copied());
            }
        }
        self.overwritten.extend(blocks);
    }

    // --- reports of loads ---

    /// The sources of the tokens in the hit planned last, in the order of [`Source::ALL`]; none: not known.
    pub fn sources(&self, id: RequestId, tokens: u32) -> Option<[u32; Source::ALL.len()]> {
        let sources = self.requests.get(id)?.sources;
        (sources.iter().sum::<u32>() == tokens).then_some(sources)
    }

    /// Tokens of hits loaded since the last call, by the source they were found in.
    pub fn take_hit_tokens(&mut self) -> [u64; Source::ALL.len()] {
        std::mem::take(&mut self.hit_tokens)
    }

    /// Notes the end of these requests' loads at every rank: all their blocks are loaded, except the `failed` ones.
    pub fn loads_ended(&mut self, ids: &[RequestId], failed: &[u32]) {
        for id in ids {
            if let Some(request) = self.requests.get_mut(*id) {
                self.proof.loaded(request, failed);
            }
        }
    }

    /// Handles blocks that could not be loaded: the engine computes them again, or ends their requests. KV computed upon such blocks,
    /// directly or not, must never be kept, and steps in flight may compute it. So every unfinished save of every request is given up, by
    /// one word of the session. A request with such a block among its loaded ones is refused: it gets no further hit.
    pub fn loads_failed(&mut self, blocks: &[u32]) {
        self.remarks.push(super::remarks::Remark::NotLoaded { blocks: blocks.len() as u64 });
        self.void_saves();
        self.check.give_up();
        self.proof.fail(blocks, &mut self.requests);
        for (_, request) in self.requests.live_mut() {
            let hit = |request: &FollowedRequest| {
                request.parts.iter().flat_map(|part| &part.loaded).any(|block| blocks.contains(block))
            };
            if hit(request) {
                request.refuse_loads();
            }
            request.parts.iter_mut().for_each(|part| part.saved = 0);
        }
    }

    /// The engine computes these requests from their beginning: the loads of all their blocks count as failed.
    pub fn requests_failed(&mut self, ids: &[RequestId]) {
        let mut blocks = Vec::new();
        let mut any = false;
        for id in ids {
            let Some(request) = self.requests.get_mut(*id) else { continue };
            let loaded = request.parts.iter().flat_map(|part| &part.loaded).copied();
            let before = blocks.len();
            blocks.extend(loaded);
            // Without a load here, another connector's load has failed.
            if self.options.beside_others && blocks.len() == before {
                continue;
            }
            any = true;
            request.refuse_loads();
            request.parts.iter_mut().for_each(|part| part.loading.clear());
        }
        if any {
            self.loads_failed(&blocks);
        }
    }
}
