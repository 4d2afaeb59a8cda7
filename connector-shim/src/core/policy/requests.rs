//! Requests that are not over yet: their keys, and for each cache group the key log, the blocks, and how many
//! are saved.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

use shm_protocol::key::BlockHash;
use shm_protocol::source::Source;

use super::kinds::GroupForm;

/// The number of a request at its engine's policy. Numbers are never used again.
pub type RequestId = u64;

/// The adapter of a request.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Adapter {
    /// No adapter.
    #[default]
    Absent,
    /// An adapter with this digest of its bytes, mixed into every key.
    Fold([u8; 16]),
    /// An adapter with its digest being computed.
    Undigested,
    /// An adapter of requests without the cache.
    Unknown,
}

/// The changing numbers of a request, at the time of the engine's call.
#[derive(Copy, Clone, Debug, Default)]
pub struct Now {
    /// Tokens of the prompt and of the answer so far.
    pub tokens: u32,
    /// Tokens with KV before the step being scheduled.
    pub computed: u32,
    /// How often the request has lost its blocks.
    pub preemptions: u32,
    /// Its adapter.
    pub adapter: Adapter,
}

/// The constant facts of a request.
#[derive(Clone, Debug, Default)]
pub struct Arrival {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// True if it may be served from the cache, and no other connector loads its prompt.
    pub reads: bool,
    /// Tokens of its prompt saved by another engine, as far as is known; `None`: no other engine computes its
    /// prompt.
    pub awaits: Option<u32>,
    /// True if another engine goes on with it.
    pub hands_over: bool,
    /// The block at the end of the handed-over tokens, and the key of its tokens so far
    /// ([`super::EnginePolicy::tail`]).
    pub tail: Option<(u32, BlockHash)>,
}

/// An encoder's output for a request, and the place of its tokens.
#[derive(Clone, Debug)]
pub struct Media {
    /// The engine's name for the output.
    pub identifier: String,
    /// The first token.
    pub offset: u32,
    /// The number of tokens.
    pub length: u32,
}

/// A hit: from the first token asked for up to the end of the tokens in all groups.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Hit {
    pub(super) first: u32,
    pub(super) end: u32,
    pub(super) sync: bool,
}

/// The answer to the last question of a request.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(super) enum LastAnswer {
    /// Nothing to load.
    #[default]
    Nothing,
    /// The found blocks are to be loaded in a later step.
    PutOff,
    /// A hit, under leases of all groups.
    Hit(Hit),
    /// Too little was handed over: the load must fail, so that the request ends.
    GivenUp(Hit),
}

/// The blocks that the engine names after an allocation.
#[derive(Clone, Debug)]
pub(super) enum Allocation {
    /// Blocks that another connector may load.
    Foreign,
    /// Blocks of a hit, up to this token.
    Load { answer: LastAnswer, end: u32 },
}

/// A separate log for a block of full attention, filled up to a possible end of a hit: the block's key,
/// behind the key of the block before.
#[derive(Copy, Clone, Debug)]
pub(super) struct TailLog {
    pub(super) log: i64,
    pub(super) generation: u64,
    pub(super) key: BlockHash,
    /// The place of the block's key.
    pub(super) place: u32,
}

/// A request in one cache group.
#[derive(Clone, Debug)]
pub(super) struct RequestPart {
    /// The key log, and the connection in which it was opened; `None`: the next append opens one.
    pub(super) log: i64,
    pub(super) generation: Option<u64>,
    /// The adapter's digest, mixed into the log's keys.
    pub(super) fold: Option<[u8; 16]>,
    pub(super) appended: u32,
    /// The last appended key, which depends on all keys before it.
    pub(super) newest: BlockHash,
    /// True if the log ends with the key of a tail, and takes no other key.
    pub(super) tailed: bool,
    /// True if another engine is awaited for the log's keys.
    pub(super) awaited: bool,
    /// True if the log's keys are promised to another engine.
    pub(super) promised: bool,
    /// The log of the tail asked for or saved last.
    pub(super) tail: Option<TailLog>,
    pub(super) blocks: Vec<u32>,
    /// Number of leading blocks freed, or never allocated, by the engine: other requests may hold them by
    /// now. They are 0 in the list.
    pub(super) freed: usize,
    /// Number of leading blocks that this run has seen filled, by steps that the engine may still refuse.
    pub(super) filled: usize,
    /// True if the first block of its next step holds KV computed by the request itself before, as in a
    /// session.
    pub(super) goes_on: bool,
    /// Number of leading blocks offered to the cache, or loaded from it.
    pub(super) saved: usize,
    /// The key of the last saved state of its answer, if the next one replaces it.
    pub(super) answer_state: Option<u32>,
    /// Number of blocks on which it began, computed before, and the step of its begin. The cache has most
    /// likely kept them. They are offered, and so marked as used, in the next step, not on the way to the
    /// first token. 0: they were offered.
    pub(super) found: usize,
    pub(super) found_in: u64,
    /// The block at which its prompt differs from kept prompts, as far as is known.
    pub(super) parted: u32,
    /// The blocks of the last load, each with its key, until the load ends.
    pub(super) loaded: Vec<u32>,
    pub(super) loading: Vec<(u32, BlockHash)>,
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct FollowedRequest {
    pub(super) arrival: Arrival,
    pub(super) now: Now,
    /// One key for each of its hashes.
    pub(super) keys: Vec<BlockHash>,
    pub(super) media: Vec<Media>,
    pub(super) parts: Vec<RequestPart>,
    /// When the digest of its adapter was first asked for without an answer.
    pub(super) undigested_since: Option<Instant>,
    pub(super) answer: LastAnswer,
    pub(super) allocation: Option<Allocation>,
    /// Tokens in the engine's own cache at its last question, if another connector is in use.
    pub(super) had: Option<u32>,
    /// The boundary tried by the last question, if it was pending.
    pub(super) tried: Option<u32>,
    /// The boundary at which a state is missing ([`super::EnginePolicy::junction`]).
    pub(super) junction: u32,
    /// Tokens of the last load, by where they were found.
    pub(super) sources: [u32; Source::ALL.len()],
    /// Set after a failed load: the cache is not asked again. True if the engine has asked since, and perhaps
    /// found no room.
    pub(super) refused: Option<bool>,
    /// Number of leading tokens with right KV; `None`: all of them.
    pub(super) doubt: Option<u32>,
    /// True if it begins in the current step, and was in doubt until then.
    pub(super) doubted_before: bool,
    /// Its number of preemptions when it began on its blocks.
    pub(super) began_after: u32,
    /// Number of its leading tokens computed by the end of the last step that looked at it, and that step.
    pub(super) reached: (u32, u64),
    /// The step in which to look at it next; its other entries in the lists of due requests are stale.
    pub(super) due: u64,
    /// True until the request is over.
    pub(super) live: bool,
}

/// All live requests, and ended ones while a step may refer to them.
#[derive(Debug, Default)]
pub(super) struct Requests {
    by_id: BTreeMap<RequestId, FollowedRequest>,
    last: RequestId,
    /// Ended requests, each with the first step that surely fills no block of it.
    ended: VecDeque<(u64, RequestId)>,
    live: usize,
    due: HashMap<u64, Vec<RequestId>>,
}

// === impl RequestPart ===

impl RequestPart {
    fn new() -> Self {
        Self {
            log: -1,
            generation: None,
            fold: None,
            appended: 0,
            newest: BlockHash([0; 32]),
            tailed: false,
            awaited: false,
            promised: false,
            tail: None,
            blocks: Vec::new(),
            freed: 0,
            filled: 0,
            goes_on: false,
            saved: 0,
            answer_state: None,
            found: 0,
            found_in: 0,
            parted: 0,
            loaded: Vec::new(),
            loading: Vec::new(),
        }
    }

    /// Its key log, and the log of its tail.
    pub(super) fn logs(&self) -> impl Iterator<Item = i64> + use<> {
        [self.log].into_iter().chain(self.tail.map(|tail| tail.log))
    }

    /// Forgets the blocks freed by the engine until now: at most those before the window of the next token to be scheduled. Valid from one
    /// step's scheduling until the next one's begin.
    fn slide(&mut self, form: &GroupForm, computed: u32) {
        if form.window == 0 {
            return;
        }
        let passed = ((computed + 1).saturating_sub(form.window) / form.block_tokens) as usize;
        let passed = passed.min(self.blocks.len());
        while self.freed < self.blocks.len() && (self.freed < passed || self.blocks[self.freed] == 0) {
            self.blocks[self.freed] = 0;
            self.freed += 1;
        }
    }
}

// === impl FollowedRequest ===

impl FollowedRequest {
    fn new(arrival: Arrival, groups: usize) -> Self {
        Self {
            arrival,
            now: Now::default(),
            keys: Vec::new(),
            media: Vec::new(),
            parts: (0..groups).map(|_| RequestPart::new()).collect(),
            undigested_since: None,
            answer: LastAnswer::Nothing,
            allocation: None,
            had: None,
            tried: None,
            junction: 0,
            sources: [0; Source::ALL.len()],
            refused: None,
            doubt: None,
            doubted_before: false,
            began_after: 0,
            reached: (0, 0),
            due: u64::MAX,
            live: true,
        }
    }

    /// The number of keys of a group's log.
    pub(super) fn key_count(&self, form: &GroupForm) -> usize {
        self.keys.len() / form.hashes_of_key() as usize
    }

    /// A key of a group's log.
    pub(super) fn log_key(&self, form: &GroupForm, place: usize) -> Option<&BlockHash> {
        self.keys.get((place + 1) * form.hashes_of_key() as usize - 1)
    }

    /// These keys of a group's log, as far as there are.
    pub(super) fn log_keys(
        &self,
        form: &GroupForm,
        places: Range<usize>,
    ) -> impl Iterator<Item = &BlockHash> {
        places.map_while(|place| self.log_key(form, place))
    }

    /// The key of a group's block.
    pub(super) fn block_key(&self, form: &GroupForm, block: usize) -> Option<&BlockHash> {
        self.keys.get((block + 1) * form.hashes_each as usize - 1)
    }

    /// The keys of a group's blocks `from..end`, as far as there are.
    pub(super) fn keys_of(&self, form: &GroupForm, blocks: Range<usize>) -> impl Iterator<Item = &BlockHash> {
        blocks.map_while(|block| self.block_key(form, block))
    }

    /// The key of so many tokens, if there is a hash of them.
    pub(super) fn key_at(&self, form: &GroupForm, tokens: u32) -> Option<&BlockHash> {
        let hashes = tokens * form.hashes_each / form.block_tokens;
        let is_hashed = hashes > 0 && hashes * form.block_tokens == tokens * form.hashes_each;
        is_hashed.then(|| self.keys.get(hashes as usize - 1))?
    }

    /// The block to hand over although it is partly full.
    pub(super) fn tail_at(&self) -> Option<u32> {
        self.arrival.tail.map(|(place, _)| place)
    }

    /// Gives up the tail's key once `tokens` computed tokens fill its block: it is then saved under its own key.
    pub(super) fn fill_tail(&mut self, block_tokens: u32, tokens: u32) {
        if let Some((place, _)) = self.arrival.tail
            && tokens >= (place + 1) * block_tokens
        {
            self.arrival.tail = None;
            for part in &mut self.parts {
                part.saved = part.saved.min(place as usize);
            }
        }
    }

    /// Returns true if the engine must pass over a request that is refused the cache: at every second
    /// question, as if there were no room.
    ///
    /// vLLM 0.33 keeps such a request, its blocks given back, before requests that hold their blocks since
    /// their loads ended. vLLM looks at no request behind one without room: all would wait for ever.
    pub(super) fn steps_aside(&mut self) -> bool {
        let asked = self.refused.get_or_insert(false);
        *asked = !*asked;
        !*asked
    }

    /// Refuses all further loads of the request.
    pub(super) fn refuse_loads(&mut self) {
        self.refused.get_or_insert(false);
    }

    /// Notes the begin of a load of a group's keys from `first` on into `blocks`.
    pub(super) fn begin_load(&mut self, group: usize, form: &GroupForm, first: u32, blocks: Vec<u32>) {
        let end = first as usize + blocks.len();
        let mut keys: Vec<BlockHash> = self.log_keys(form, first as usize..end).copied().collect();
        let part = &mut self.parts[group];
        if let Some((place, key)) = self.arrival.tail
            && part.tailed
            && place >= first
            && (place - first) as usize == keys.len()
        {
            keys.push(key);
        }
        part.loading = blocks.iter().copied().zip(keys).collect();
        part.loaded = blocks;
    }

    /// [`RequestPart::slide`] in every group.
    pub(super) fn slide(&mut self, forms: &[GroupForm]) {
        for (part, form) in self.parts.iter_mut().zip(forms) {
            part.slide(form, self.now.computed);
        }
    }

    /// Puts the request in doubt beyond so many tokens.
    pub(super) fn doubt(&mut self, tokens: u32) {
        self.doubt = Some(self.doubt.unwrap_or(tokens).min(tokens));
    }

    /// True if the request has a block table.
    pub(super) fn has_blocks(&self) -> bool {
        self.parts.iter().any(|part| !part.blocks.is_empty())
    }
}

// === impl Requests ===

impl Requests {
    /// Begins to follow a request, and returns its number.
    pub(super) fn follow_request(&mut self, arrival: Arrival, groups: usize) -> RequestId {
        self.last += 1;
        self.live += 1;
        self.by_id.insert(self.last, FollowedRequest::new(arrival, groups));
        self.last
    }

    /// The number of live requests.
    pub(super) fn live_count(&self) -> usize {
        self.live
    }

    /// Returns a live request.
    pub(super) fn get(&self, id: RequestId) -> Option<&FollowedRequest> {
        self.by_id.get(&id).filter(|request| request.live)
    }

    /// Returns a live request, to be changed.
    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut FollowedRequest> {
        self.by_id.get_mut(&id).filter(|request| request.live)
    }

    /// Returns a request known to some step, over or not.
    pub(super) fn known_mut(&mut self, id: RequestId) -> Option<&mut FollowedRequest> {
        self.by_id.get_mut(&id)
    }

    /// All live requests.
    pub(super) fn live(&self) -> impl Iterator<Item = (RequestId, &FollowedRequest)> {
        self.by_id.iter().filter(|(_, request)| request.live).map(|(id, request)| (*id, request))
    }

    /// All live requests, to be changed.
    pub(super) fn live_mut(&mut self) -> impl Iterator<Item = (RequestId, &mut FollowedRequest)> {
        self.by_id.iter_mut().filter(|(_, request)| request.live).map(|(id, request)| (*id, request))
    }

    /// Ends a request. Its blocks are known until `step`, and all steps before it, were accepted or passed
    /// over.
    pub(super) fn end_request(&mut self, id: RequestId, step: u64) {
        if let Some(request) = self.get_mut(id) {
            request.live = false;
            self.live -= 1;
            self.ended.push_back((step, id));
        }
    }

    /// Forgets ended requests that no open step refers to: no step before `step` is open any more.
    pub(super) fn forget_ended(&mut self, step: u64) {
        while let Some((ended, id)) = self.ended.front().copied()
            && ended <= step
        {
            self.ended.pop_front();
            self.by_id.remove(&id);
        }
    }

    // --- when to look at them ---

    /// Has the request looked at in this step, and not before.
    pub(super) fn due_in(&mut self, id: RequestId, step: u64) {
        if let Some(request) = self.by_id.get_mut(&id)
            && request.due != step
        {
            request.due = step;
            self.due.entry(step).or_default().push(id);
        }
    }

    /// Takes the requests to look at in this step, beginning ones last.
    pub(super) fn take_due(&mut self, step: u64, begun: &[RequestId]) -> Vec<RequestId> {
        let mut due = self.due.remove(&step).unwrap_or_default();
        due.retain(|id| self.get(*id).is_some_and(|request| request.due == step));
        let not_due = |id: &&RequestId| self.get(**id).is_some_and(|request| request.due != step);
        due.extend(begun.iter().filter(not_due));
        due
    }
}
