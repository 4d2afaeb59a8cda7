//! The scheduler role in a process: an [`EngineSession`] over a connection that may come and go, and the
//! waits for its answers.
//!
//! Every call answers at once, except that a query may wait for the step's budget.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shm_protocol::handshake::{Hello, HelloDigest, Role};
use shm_protocol::message::Status;
use shm_protocol::source::Source;
use shm_protocol::wait;

use crate::client::{Client, ConnectionChange};
use crate::clock;
use crate::connection::{Connection, SidecarAddress};
use crate::core::notices::{NoticeCause, Notices};
use crate::core::plan::Plan;
use crate::core::policy::host::SessionHost;
pub use crate::core::scheduler::{
    AskedQuery, BlockChange, EngineSession, LoadWait, PENDING, SessionConfig, UNBOUND_WAIT,
};
use crate::error::{ShimError, refuse_argument};

/// The longest budget of a step: an engine with longer waits for its cache is better off without it.
pub const BUDGET_MAX: Duration = Duration::from_secs(10);
/// Time that a query spins before it sleeps: an awake sidecar answers 512 keys within it. The loop does not
/// yield: beside a busy process, a yielded core came back 4 ms later, twice the budget.
pub const SPIN: Duration = Duration::from_micros(50);
/// Time that a query keeps the interpreter, spinning and then sleeping. Beside a busy Python thread, a
/// released interpreter comes back after a whole switch interval (5 ms), while a sleeping sidecar answers
/// after some 70 us, a few times more on a busy machine. Other threads lose a tenth of that interval a query,
/// and never more than the step's budget.
pub const HOLD: Duration = Duration::from_micros(500);
/// The longest sleep between two looks at the socket. A dead sidecar wakes no one, so this limits the cost of
/// its death for a query; 1 ms is half the default budget and 20 times a wake-up.
pub const SLEEP_TURN: Duration = Duration::from_millis(1);

/// Settings of a new session.
#[derive(Clone, Debug)]
pub struct SchedulerSetup {
    /// The sidecar's socket.
    pub socket: PathBuf,
    /// `engine_id` of vLLM's configuration.
    pub engine: String,
    /// Ranks of the engine.
    pub world_size: u32,
    /// Random id of this run.
    pub run: [u8; 16],
    /// Settings of the session's queries and loads.
    pub config: SessionConfig,
    /// Milliseconds for which a request waits for blocks still in production on another node; `None`: it does
    /// not wait.
    pub miss_wait_ms: Option<u32>,
    /// Milliseconds for which a request waits for another engine with a promise of its prompt; `None`:
    /// 30,000, the most.
    pub handover_wait_ms: Option<u32>,
    /// Milliseconds for which a request waits for the first, or the next, block of its prompt if no engine
    /// has promised it; `None`: 1,000.
    pub promise_wait_ms: Option<u32>,
    /// Digest of the engine's table of cache groups, if its ranks state one.
    pub groups: Option<[u8; 16]>,
}

/// One scheduler's session and its connections. Calls without a clock or socket go to the [`EngineSession`]
/// itself.
#[derive(Debug)]
pub struct SchedulerClient {
    client: Client,
    session: EngineSession<Arc<Connection>>,
}

// === impl SchedulerClient ===

impl Deref for SchedulerClient {
    type Target = EngineSession<Arc<Connection>>;

    fn deref(&self) -> &Self::Target {
        &self.session
    }
}

impl DerefMut for SchedulerClient {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.session
    }
}

impl SchedulerClient {
    /// Connects to the sidecar; without one, retries in the background. Fails only for invalid arguments.
    pub fn new(options: SchedulerSetup) -> Result<Self, ShimError> {
        let budget = options.config.budget;
        if budget > BUDGET_MAX {
            return refuse_argument(format!("the query budget is {budget:?}: pass at most {BUDGET_MAX:?}"));
        }
        let role = Role::Scheduler { run: options.run };
        let groups = options.groups.map(HelloDigest);
        let hello = Hello {
            miss_wait_ms: options.miss_wait_ms,
            handover_wait_ms: options.handover_wait_ms,
            promise_wait_ms: options.promise_wait_ms,
            wait_max_ms: Some(options.config.load_wait.most_ms),
            load_preference: Some(options.config.load_wait.preference),
            groups,
            ..Hello::new(options.engine, options.world_size, role)
        };
        let address = SidecarAddress::new(options.socket, &hello, Vec::new())?;
        let notices = Arc::new(Notices::default());
        let client = Client::start_client(address, Arc::clone(&notices), false)?;
        let mut scheduler = Self { client, session: EngineSession::new(options.config, notices) };
        scheduler.attach_connection();
        Ok(scheduler)
    }

    /// Connections so far.
    pub fn connection_count(&self) -> u64 {
        self.client.connection_count()
    }

    /// [`EngineSession::open_log`] on the newest connection.
    pub fn open_log(&mut self, fold: Option<[u8; 16]>) -> i64 {
        self.refresh_connection(false);
        self.session.open_log(fold)
    }

    /// [`EngineSession::salt`] with random bytes. Returns false, without a change, if the system has none.
    pub fn salt(&mut self) -> bool {
        let salt = draw_random16();
        salt.into_iter().for_each(|salt| self.session.salt(salt));
        salt.is_some()
    }

    /// [`EngineSession::end_step`], and a check that the sidecar is still connected.
    pub fn end_step(&mut self) {
        if let Err(text) = self.session.end_step() {
            self.client.give_up(&text);
        }
        self.refresh_connection(true);
    }

    /// [`EngineSession::take_changes`].
    pub fn take_changes(&mut self) -> Vec<BlockChange> {
        let (changes, end) = self.session.take_changes();
        if let Err(text) = end {
            self.client.give_up(&text);
        }
        changes
    }

    fn refresh_connection(&mut self, look: bool) {
        match self.client.refresh_connection(look) {
            ConnectionChange::Same => {}
            ConnectionChange::Lost => self.session.detach(),
            ConnectionChange::Connected => self.attach_connection(),
        }
    }

    fn attach_connection(&mut self) {
        let Some(connection) = self.client.connection() else { return };
        if let Some(note) = &connection.welcome.note {
            self.client.notices().say(NoticeCause::Note, note.as_str());
        }
        self.session.attach(Arc::clone(connection));
    }

    /// Messages for the log, each handed over once.
    pub fn take_notices(&self) -> Vec<String> {
        self.client.notices().take_texts()
    }

    /// Ends the session permanently.
    pub fn disconnect(&mut self) {
        self.session.flush();
        self.client.stop();
        self.session.detach();
    }
}

impl SessionHost for SchedulerClient {
    type Connection = Arc<Connection>;

    fn connection_count(&self) -> u64 {
        self.client.connection_count()
    }

    fn refresh_session(&mut self) {
        self.refresh_connection(false);
    }

    fn end_step(&mut self) {
        Self::end_step(self);
    }

    fn take_changes(&mut self) -> Vec<BlockChange> {
        Self::take_changes(self)
    }
}

/// 16 random bytes, if the system has some.
pub(crate) fn draw_random16() -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    (got == Ok(bytes.len())).then_some(bytes)
}

// === impl SchedulerClient: waits ===

impl SchedulerClient {
    /// Asks for the leading hits of keys `start..start + count`, and waits for the answer.
    pub fn query(&mut self, handle: i64, start: u32, count: u32) -> i64 {
        match self.ask_query(handle, start, count) {
            AskedQuery::Answered(hits) => hits,
            AskedQuery::Posted(op) => self.wait_for_answer(op),
        }
    }

    /// The first half of [`SchedulerClient::query`]: returns a known answer, or posts the query.
    pub fn ask_query(&mut self, handle: i64, start: u32, count: u32) -> AskedQuery {
        self.session.ask_query(handle, start, count, clock::read_clock())
    }

    /// [`EngineSession::ask_ahead`].
    pub fn ask_ahead(&mut self, handle: i64, start: u32, count: u32) {
        self.session.ask_ahead(handle, start, count, clock::read_clock());
    }

    /// Posts a query without waiting. `None` is a miss: no sidecar or a stalled one, no such keys, or no room.
    pub fn post_query(&mut self, handle: i64, start: u32, count: u32) -> Option<u64> {
        self.session.post_query(handle, start, count, clock::read_clock())
    }

    /// The answer of query `op`, if it is there. A query that is not known (any more) is a miss.
    pub fn poll(&mut self, op: u64) -> Option<i64> {
        self.session.take_answer(op, clock::read_clock())
    }

    /// Waits for the answer of query `op` within the step's budget.
    pub fn wait_for_answer(&mut self, op: u64) -> i64 {
        match self.hold(op) {
            Some(hits) => hits,
            None => self.sleep(op),
        }
    }

    /// Waits for [`HOLD`] at most: first spinning, then asleep. `None`: not answered yet.
    pub fn hold(&mut self, op: u64) -> Option<i64> {
        let began = clock::read_clock();
        let limit = HOLD.min(self.session.budget_left());
        loop {
            let now = clock::read_clock();
            let answer = self.session.take_answer(op, now);
            let spent = now - began;
            if answer.is_some() || spent >= limit {
                self.session.spend(spent);
                return answer;
            }
            if spent < SPIN {
                std::hint::spin_loop();
            } else {
                self.sleep_turn(op, limit - spent);
            }
        }
    }

    /// Sleeps until the answer, or the end of the budget: then the query is pending. The sidecar's end is a miss.
    pub fn sleep(&mut self, op: u64) -> i64 {
        let began = clock::read_clock();
        let mut now = began;
        loop {
            if let Some(hits) = self.session.look_for_answer(op, began, now) {
                return hits;
            }
            self.sleep_turn(op, self.session.budget_left().saturating_sub(now - began));
            now = clock::read_clock();
        }
    }

    /// Asks again after [`PENDING`], for the time `within`. Returns the hits, or [`PENDING`] if they are
    /// still not known.
    pub fn linger(&mut self, handle: i64, start: u32, count: u32, within: Duration) -> i64 {
        let began = clock::read_clock();
        loop {
            match self.ask_query(handle, start, count) {
                AskedQuery::Answered(PENDING) => {}
                AskedQuery::Answered(hits) => return hits,
                AskedQuery::Posted(op) => return self.wait_for_answer(op),
            }
            let left = within.saturating_sub(clock::read_clock() - began);
            let (Some(op), Some(connection)) = (self.session.pending(handle), self.session.connection())
            else {
                return PENDING;
            };
            if left.is_zero() {
                return PENDING;
            }
            let memory = &connection.memory;
            let is_answered =
                || memory.load_outcome(op).is_some_and(|outcome| outcome.status != Status::Pending);
            wait::sleep_turn(memory.region(), left.min(SLEEP_TURN), is_answered);
        }
    }

    /// Sleeps once; the caller looks again.
    fn sleep_turn(&self, op: u64, left: Duration) {
        if let Some(connection) = self.session.connection() {
            let memory = &connection.memory;
            wait::sleep_turn(memory.region(), left.min(SLEEP_TURN), || memory.load_outcome(op).is_some());
        }
    }

    /// True if [`SchedulerClient::post_load`] will have to renew the lease, which may wait.
    pub fn must_renew(&mut self, handle: i64) -> bool {
        self.session.must_renew(handle, clock::read_clock())
    }

    /// [`EngineSession::sources`] of hits under the log's lease.
    pub fn sources(&mut self, handle: i64, start: u32, count: u32) -> [u32; Source::ALL.len()] {
        self.session.sources(handle, start, count)
    }

    /// [`EngineSession::post_load`]; renews an old lease first.
    pub fn post_load(&mut self, handle: i64, start: u32, blocks: &[u32], step: u64, sync: bool) -> Vec<Plan> {
        if !sync
            && let Some(op) = self.session.renew(handle, clock::read_clock())
            && self.wait_for_answer(op) == PENDING
        {
            // No one will ask again for these keys in this case.
            self.session.release_lease(handle);
        }
        self.session.post_load(handle, start, blocks, step, sync)
    }
}
