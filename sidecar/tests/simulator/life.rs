//! One life of the sidecar: the product's core, tier, pool and sessions under the product's [`Turn`], one
//! event or action at a time, so every other process can act between any two.

mod actions;
mod admission;
mod checksums;
mod copies;
mod disk;
mod lists;
mod mesh;
mod turn;
mod waits;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use ::mesh::directory::{Directory, DirectoryConfig};
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use shm_protocol::region::{Access, Region};
use sidecar::clients::session::ClientSession;
use sidecar::core::{Action, Core, CoreEvent, JobEnd, RankBlock, RingRequest, SessionId, peer_tier};
use sidecar::runtime::turn::{self as order, Turn};
use tiers::dram::{self, Dram};
use tiers::opener::{OpenedSegment, Opener};
use tiers::pool::{self, Pool};

use self::actions::TornHeader;
use self::copies::{Copies, Rank};
use self::disk::Disk;
pub(crate) use self::disk::Medium;
use self::mesh::Mesh;
use self::waits::Waits;
use crate::connection::{PoolMap, Socket};
use crate::coverage;
use crate::ctx::{Actor, Ctx, HOLD, Micros, TICK};
use crate::fingerprint;
use crate::ledger::{Form, Ledger};

/// Bytes of a pool segment: the smallest size.
pub(crate) const SEGMENT_BYTES: u64 = 2 << 20;

/// A session and the oracle's knowledge of it.
#[derive(Debug)]
struct Peer {
    session: ClientSession,
    /// Workers: their memory, also held by their copies.
    rank: Option<Rc<Rank>>,
    /// Closed after the last of its copies.
    _socket: Rc<Socket>,
    hung_up: Rc<Cell<bool>>,
    engine: String,
    /// Schedulers: the last SALT; below, open logs and the log of each query.
    salt: Option<[u8; 16]>,
    /// Blocks of another model, by a check of this engine.
    contradicted: BTreeSet<SlotRef>,
    logs: BTreeMap<u32, Vec<BlockHash>>,
    asked: BTreeMap<u64, u32>,
}

#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) epoch: u64,
    core: Core,
    pool: Pool,
    opener: Opener,
    /// Time until which adopted blocks keep their slots.
    held_until_ms: u64,
    /// States evicted so far since a later one of their answer was kept.
    replaced: u64,
    map: Rc<PoolMap>,
    pub(crate) ledger: Ledger,
    /// Base namespace of each engine's workers.
    namespaces: BTreeMap<String, NamespaceDigest>,
    sessions: BTreeMap<SessionId, Peer>,
    next_session: SessionId,
    turn: Turn,
    /// Actions not carried out yet, in order.
    out: VecDeque<Action>,
    closing: Vec<SessionId>,
    copies: Copies,
    /// Places of the batches without an end reported to the core.
    places: BTreeMap<u64, Vec<RankBlock>>,
    /// Blocks with a checksum in progress, and the time of its end.
    sums: VecDeque<(SlotRef, Micros)>,
    /// Blocks of earlier lives under verification.
    verifications: VecDeque<(BlockKey, SlotRef, Micros)>,
    /// By the number of their tier.
    disks: Vec<Disk>,
    mesh: Option<Mesh>,
    waits: Waits,
    touched: bool,
    next_tick: Micros,
    draining: bool,
    asleep: bool,
    /// An interrupted write of a header.
    torn: Option<TornHeader>,
    /// A descriptor for unused parts of the product's session.
    null: OwnedFd,
}

// === impl Life ===

impl Life {
    /// Starts a sidecar. With `path` the pool is this file.
    pub(crate) fn start(
        epoch: u64,
        path: Option<PathBuf>,
        media: &[Rc<RefCell<Medium>>],
        forms: &[Form],
        ctx: &mut Ctx,
    ) -> Self {
        let bytes = ctx.knobs.segments * SEGMENT_BYTES;
        let config = pool::PoolConfig { bytes, segment_bytes: SEGMENT_BYTES, path, hugepages: false, epoch };
        let pool = Pool::create(&config).expect("a small pool fits anywhere");
        let fd = pool.read_only_fd().expect("a descriptor");
        let region = Region::map(fd.as_fd(), pool.len() as usize, Access::ReadOnly).expect("a small mapping");
        let map = PoolMap { region, epoch, segment_bytes: SEGMENT_BYTES, segments: pool.segments() };
        let lease_ttl_ms = ctx.knobs.lease_ttl_ms;
        let config = dram::DramConfig { pool_bytes: bytes, segment_bytes: SEGMENT_BYTES, lease_ttl_ms };
        let mut dram = Dram::unopened(config, HOLD / 1000).expect("sizes of a pool that exists");
        dram.raise_generation(pool.first_generation());
        let mut ledger = Ledger::new(SEGMENT_BYTES);
        forms.iter().for_each(|form| ledger.know(*form));
        ctx.wakes.push((Actor::Data, ctx.now + 1));
        let disk = |(number, medium)| Disk::start(medium, ctx.knobs.slow_disk == Some(number));
        let (disks, tiers): (Vec<_>, Vec<_>) = media.iter().enumerate().map(disk).unzip();
        let mesh = ctx.knobs.mesh.then(Mesh::default);
        let peers = mesh.is_some().then(|| {
            peer_tier(Directory::new(DirectoryConfig { seed: epoch, ..DirectoryConfig::default() }))
        });
        let core = Core::new(dram, &[], tiers.into_iter().chain(peers)).with_claims(ctx.knobs.turn_cost);
        let core = core.with_handover_ttl(lease_ttl_ms);
        Self {
            epoch,
            core,
            pool,
            opener: Opener::default(),
            held_until_ms: 0,
            replaced: 0,
            map: Rc::new(map),
            ledger,
            namespaces: BTreeMap::new(),
            sessions: BTreeMap::new(),
            next_session: 1,
            turn: Turn::default(),
            out: VecDeque::new(),
            closing: Vec::new(),
            copies: Copies::default(),
            places: BTreeMap::new(),
            sums: VecDeque::new(),
            verifications: VecDeque::new(),
            disks,
            mesh,
            waits: Waits::default(),
            touched: false,
            next_tick: 0,
            draining: false,
            asleep: false,
            torn: None,
            null: rustix::fs::memfd_create("simulator", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"),
        }
    }

    /// Asks it to end after its copies.
    pub(crate) fn drain(&mut self) {
        self.draining = true;
    }

    /// True if copies run in the core or in a copier.
    pub(crate) fn busy(&self) -> bool {
        self.core.busy() || self.copies.running()
    }

    /// True if no operation is unfinished, although sessions exist.
    pub(crate) fn at_rest(&self) -> bool {
        let stats = self.core.stats();
        let held = stats.leases > 0 || stats.handover_kept_bytes > 0;
        !self.busy() && !held && !self.ledger.filling() && self.out.is_empty()
    }

    /// The unfinished work, for the message of a run without rest.
    pub(crate) fn unrest(&self) -> String {
        let (stats, filling) = (self.core.stats(), self.ledger.filling());
        let (leases, kept) = (stats.leases, stats.handover_kept_bytes);
        format!("busy {}, leases {leases}, kept {kept}, filling {filling}, {:?}", self.busy(), self.turn)
    }

    pub(crate) fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Checks everything kept.
    pub(crate) fn audit(&self) {
        let stats = self.core.stats();
        assert_eq!(stats.sessions, self.sessions.len() as u64, "sessions");
        // A removed block keeps its slot while readers of an earlier life may use it.
        let kept = stats.blocks..=stats.blocks + stats.removed_blocks;
        assert!(
            kept.contains(&self.ledger.committed()),
            "the core keeps {kept:?}, not {}",
            self.ledger.committed()
        );
        self.ledger.audit(self.pool.region());
        self.core.audit_ledger();
        self.core.audit_hints();
        self.audit_mesh();
    }

    /// Passes one event to the core.
    fn handle(&mut self, event: CoreEvent, ctx: &mut Ctx) {
        debug_assert!(self.out.is_empty(), "actions are carried out before the next event");
        ctx.hit(coverage::event(&event));
        let quiet = matches!(event, CoreEvent::Drained { .. } | CoreEvent::Fences { .. } | CoreEvent::Tick);
        let text = ctx.traced().then(|| describe(&event));
        self.touched |= order::touches_saves(&event);
        let mut out = Vec::new();
        // A frozen thread may pass the end of this time before its next tick.
        if ctx.now / 1000 >= self.held_until_ms {
            self.ledger.end_hold();
        }
        self.waits.follow(&event, ctx.now);
        let ticked = matches!(event, CoreEvent::Tick);
        self.core.handle(Duration::from_micros(ctx.now), event, &mut out);
        out.iter().for_each(|action| self.waits.answered(action));
        if ticked {
            self.waits.check(ctx.now);
            let replaced = self.core.stats().replaced_blocks;
            ctx.cover.add("sidecar evicted a replaced state", replaced - self.replaced);
            self.replaced = replaced;
        }
        // Most of these events change nothing.
        if let Some(text) = text.filter(|_| !quiet || !out.is_empty()) {
            ctx.note(|| format!("sidecar {}: {text}", self.epoch));
        }
        for action in &out {
            ctx.fingerprint = crate::rng::mix_bits(ctx.fingerprint ^ fingerprint::of(action));
        }
        self.out.extend(out);
    }

    /// Closes a session; from now on it does not exist.
    fn close(&mut self, id: SessionId, why: &str, ctx: &mut Ctx) {
        let Some(peer) = self.sessions.remove(&id) else { return };
        ctx.note(|| format!("sidecar {}: session {id} closed: {why}", self.epoch));
        if let Some(rank) = &peer.rank {
            rank.stopped.set(true);
        }
        drop(peer);
        self.touched = true;
        self.handle(CoreEvent::Disconnected { session: id }, ctx);
    }

    /// Makes one move of a copying thread. Returns the time until its next one.
    pub(crate) fn copy(&mut self, thread: usize, ctx: &mut Ctx) -> Option<Micros> {
        let moved = self.copies.step(thread, &self.pool, ctx);
        if self.copies.ended() {
            ctx.wakes.push((Actor::Data, ctx.now + 1 + ctx.rng.below(20)));
        }
        moved
    }

    /// The disks finish or drop their jobs without the sidecar, which dies.
    pub(crate) fn leave_disks(&mut self, ctx: &mut Ctx) {
        for disk in self.disks.drain(..) {
            disk.die(|offset| self.ledger.form_at(offset), self.pool.region(), ctx);
        }
    }

    /// Passes ended jobs of a tier to the core.
    fn end_jobs(&mut self, tier: usize, ends: Vec<JobEnd>, ctx: &mut Ctx) {
        self.handle(CoreEvent::Transferred { tier, ends }, ctx);
    }

    /// Passes one result of a disk to the core. Returns false if there was none.
    fn take_transfer(&mut self, ctx: &mut Ctx) -> bool {
        for number in 0..self.disks.len() {
            let disk = &mut self.disks[number];
            if let Some(found) = disk.recovered.pop_front() {
                self.end_jobs(number, vec![JobEnd::Recovered(found)], ctx);
                return true;
            }
            let Some(job) = disk.pop_due(ctx.now) else { continue };
            let piece = disk::use_of(&job).map(|(_, piece)| piece);
            let form = piece.map(|piece| self.ledger.form_at(piece.offset));
            let done = disk.carry_out(&job, form, self.pool.region(), ctx);
            piece.into_iter().for_each(|piece| self.ledger.end(&[piece]));
            self.end_jobs(number, vec![JobEnd::Disk(done)], ctx);
            return true;
        }
        false
    }

    /// True if a copy is running.
    pub(crate) fn copying(&self) -> bool {
        self.copies.running()
    }

    /// True if a header is half-written.
    pub(crate) fn is_torn(&self) -> bool {
        self.torn.is_some()
    }

    /// True if the sidecar sleeps until a doorbell.
    pub(crate) fn sleeps(&self) -> bool {
        self.asleep
    }

    /// Brings a part of the pool into service. Returns false if all of it is.
    fn open_part(&mut self, ctx: &mut Ctx) -> bool {
        let Some(opened) = self.opener.next(&self.pool) else { return false };
        if let OpenedSegment::Used { segment, block_bytes, remains, first } = &opened {
            assert_eq!(*first, 0, "a segment of the simulator is one part");
            let (kept, dropped) = self.ledger.adopt(*segment, *block_bytes, remains);
            self.held_until_ms = ctx.now / 1000 + HOLD / 1000;
            ctx.cover.add("sidecar adopted a block", kept);
            ctx.cover.add("sidecar dropped a torn block", dropped);
        }
        self.handle(CoreEvent::Opened(opened), ctx);
        true
    }

    fn tick(&mut self, ctx: &mut Ctx) {
        if ctx.now >= self.next_tick {
            self.next_tick = ctx.now + TICK;
            for (id, peer) in &self.sessions {
                self.core.note_prefill(*id, peer.session.prefill());
            }
            self.handle(CoreEvent::Tick, ctx);
        }
    }
}

/// A short text for the trace.
fn describe(event: &CoreEvent) -> String {
    match event {
        CoreEvent::Connected { session, hello, .. } => format!("session {session} begins: {}", hello.engine),
        CoreEvent::Message { session, request: RingRequest::Scheduler { request, blocks, .. } } => {
            let ids = if blocks.is_empty() { String::new() } else { format!(" blocks {blocks:?}") };
            format!("session {session} {request:?}{ids}")
        }
        CoreEvent::Message { session, request: RingRequest::Worker(request) } => {
            format!("session {session} {request:?}")
        }
        other => format!("{other:?}"),
    }
}
