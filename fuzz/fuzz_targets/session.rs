//! A whole session memory controlled by a hostile engine, and the core behind it: two schedulers and three
//! ranks of one engine post slots, real and raw, move cursors and rewrite arenas. Every event and every
//! action is carried out except the bytes of copies and of disks. Nothing may panic, and once all are gone
//! nothing may be held.
//!
//! Input: instructions, each an opcode and its operands; missing input reads as zero.
#![no_main]

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use copy_engine::HostMemory;
use libfuzzer_sys::fuzz_target;
use shm_protocol::PROTOCOL_VERSION;
use shm_protocol::handshake::{BlockRegion, Copier, Hello, HelloDigest, Role, WorkerHello};
use shm_protocol::layout::{SESSION_BYTES, header};
use shm_protocol::message::{Kind, Message, Slot, Status};
use shm_protocol::region::Access;
use shm_protocol::ring::RingMemory;
use shm_protocol::session::{RegionRing, Ring, SessionMemory};
use sidecar::clients::session::ClientSession;
use sidecar::config::SsdAdmission;
use sidecar::copiers::Copiers;
use sidecar::core::{Action, CopyId, Core, CoreEvent, JobEnd, TierJob, disk_tier};
use tiers::dram::{self, Dram};
use tiers::ssd::{self, DeviceGeometry, DeviceJob, JobDone, JobFault, Recovered, SegmentLog};

const SEGMENT_BYTES: u64 = 2 << 20;
/// Bytes of a rank's blocks, by form: a pool of two segments holds many of the first and few of the second.
const FORMS: [u64; 2] = [600, 300_000];
/// Maximum blocks for which one event takes slots.
const CLAIMS: usize = 5;
const INSTRUCTIONS_MAX: usize = 400;

/// A peer's session and the peer's own view of its memory.
struct Peer {
    session: ClientSession,
    memory: SessionMemory,
    tail: u32,
}

struct World {
    core: Core,
    peers: BTreeMap<u64, Peer>,
    copies: VecDeque<CopyId>,
    jobs: VecDeque<DeviceJob>,
    out: Vec<Action>,
    next: u64,
    now_ms: u64,
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn slot(&mut self) -> Slot {
        std::array::from_fn(|_| self.word())
    }

    /// A request with small fields, which often fit together.
    fn request(&mut self) -> Message {
        // The corpus is older than most kinds: the first 13 kinds are as they were, and younger ones count
        // down from the last byte.
        let byte = self.byte();
        let kind = Kind::try_from((255 - byte).saturating_add(14))
            .unwrap_or_else(|_| Kind::try_from(byte % 13 + 1).expect("1 to 13"));
        let mut small = || u32::from(self.byte());
        let (flags, log, op) = (small() & 3, small() & 3, u64::from(small()));
        let (from, count, step) = (small() & 63, small() & 63, u64::from(small() & 7));
        let (lease, position, ok) = (u64::from(small()), small() & 7, flags & 1 == 0);
        let data = [position, 1, 2, 3, 4, 5];
        let message = Message { kind, flags: flags as u8, log, op, from, count, step, lease, data };
        match kind {
            Kind::Open => Message { data: [0; 6], ..message },
            Kind::Join | Kind::Salt | Kind::Weights => message.with_bytes16([flags as u8 & 1; 16]),
            Kind::Loaded => {
                Message { flags: if ok { Status::Ok } else { Status::Mismatch } as u8, ..message }
            }
            Kind::Staged => Message { flags: if ok { Status::Ok } else { Status::Failed } as u8, ..message },
            _ => message,
        }
    }
}

fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("an eventfd")
}

fn memory_of(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&fd, bytes).expect("its size");
    fd
}

fn role(kind: u8) -> Role {
    if kind < 2 {
        return Role::Scheduler { run: [kind; 16] };
    }
    let bytes = FORMS[usize::from(kind & 1)];
    let regions = vec![BlockRegion { fd: 0, offset: 0, stride: bytes, bytes }];
    let facts = BTreeMap::from([("model".into(), "fuzz".into())]);
    let (rank, shard) = (u32::from(kind >> 1 & 1), u32::from(kind >> 1 & 1));
    Role::Worker(WorkerHello {
        rank,
        shard,
        shards: 2,
        blocks: 8,
        regions,
        copy: if kind & 4 == 0 { Copier::Engine } else { Copier::Sidecar },
        facts,
        expects: None,
        live_weights: (kind & 8 != 0).then_some(HelloDigest([0; 16])),
        proves: kind & 16 != 0,
        cuda: None,
        staging: None,
    })
}

impl World {
    fn new() -> Self {
        let config = dram::DramConfig {
            pool_bytes: 2 * SEGMENT_BYTES,
            segment_bytes: SEGMENT_BYTES,
            lease_ttl_ms: 1000,
        };
        let geometry =
            DeviceGeometry { unit_bytes: 4096, segment_bytes: 4 << 20, segments: 8, first_sequence: 1 };
        let log = SegmentLog::new(ssd::LogConfig {
            devices: vec![geometry],
            write_bytes_max: 1 << 20,
            late_ms: 500,
        });
        let disks = disk_tier(log, SsdAdmission::All);
        let core = Core::new(Dram::new(config).expect("a small tier"), &[], [disks]).with_claims(CLAIMS);
        let (peers, copies, jobs, out) = (BTreeMap::new(), VecDeque::new(), VecDeque::new(), Vec::new());
        let mut world = Self { core, peers, copies, jobs, out, next: 1, now_ms: 0 };
        let found = Recovered {
            device: 0,
            segment: 0,
            sequence: 0,
            blocks: Vec::new(),
            unreadable: false,
            segments_read: 8,
            last: true,
        };
        world.handle(CoreEvent::Transferred { tier: 0, ends: vec![JobEnd::Recovered(found)] });
        world
    }

    /// A disk ends its oldest job.
    fn end_job(&mut self, ok: bool) -> bool {
        let Some(job) = self.jobs.pop_front() else { return false };
        let result = if ok { Ok(()) } else { Err(JobFault::Corrupt("fuzz")) };
        let done = JobDone { device: 0, ticket: job.ticket, micros: 1, result };
        self.handle(CoreEvent::Transferred { tier: 0, ends: vec![JobEnd::Disk(done)] });
        true
    }

    fn connect(&mut self, kind: u8) {
        if self.peers.len() >= 5 {
            return;
        }
        let (id, role) = (self.next, role(kind));
        self.next += 1;
        let (_, memory) = SessionMemory::create(PROTOCOL_VERSION, 1, id).expect("a session memory");
        let socket = Arc::new(eventfd());
        let rank = if let Role::Worker(worker) = &role {
            let fd = memory_of(worker.descriptor_bytes(0));
            let host = HostMemory::new(vec![fd], &worker.regions, worker.blocks, Access::ReadOnly);
            Some(Copiers::host_rank(host.expect("as stated"), memory.clone(), Arc::clone(&socket)))
        } else {
            None
        };
        let session = ClientSession::new(memory.clone(), socket, eventfd(), rank);
        self.peers.insert(id, Peer { session, memory, tail: 0 });
        let hello = Hello::new("fuzz".into(), 2, role);
        self.handle(CoreEvent::Connected { session: id, hello: Box::new(hello) });
    }

    fn handle(&mut self, event: CoreEvent) {
        self.core.handle(Duration::from_millis(self.now_ms), event, &mut self.out);
        let mut closing = Vec::new();
        while !self.out.is_empty() {
            for action in std::mem::take(&mut self.out) {
                match action {
                    Action::Answer { session, op, outcome, refs, sources, chunks, from } => {
                        let Some(peer) = self.peers.get_mut(&session) else { continue };
                        peer.session.write_refs(&chunks, from, &refs, &sources);
                        peer.session.store_outcome(op, outcome);
                    }
                    Action::Outcome { session, op, outcome } => {
                        let Some(peer) = self.peers.get_mut(&session) else { continue };
                        peer.session.store_outcome(op, outcome);
                    }
                    Action::Saved { session, saved } => {
                        let Some(peer) = self.peers.get_mut(&session) else { continue };
                        if peer.session.push_saved(&saved).is_err() {
                            closing.push(session);
                        }
                        peer.session.flush();
                    }
                    Action::Copy { copy, .. } => self.copies.push_back(copy),
                    Action::Transfer { job: TierJob::Disk(job), .. } => self.jobs.push_back(job),
                    Action::Close { session, .. } => closing.push(session),
                    _ => {}
                }
            }
            while let Some(session) = closing.pop() {
                if self.peers.remove(&session).is_some() {
                    let now = Duration::from_millis(self.now_ms);
                    self.core.handle(now, CoreEvent::Disconnected { session }, &mut self.out);
                }
            }
        }
    }

    /// A turn of the data thread.
    fn turn(&mut self) {
        let ids: Vec<u64> = self.peers.keys().copied().collect();
        for id in ids {
            let Some(peer) = self.peers.get_mut(&id) else { continue };
            let mut broken = peer.session.look_at_ring().is_err();
            while let Some(peer) = self.peers.get_mut(&id).filter(|_| !broken) {
                match peer.session.read_message() {
                    Ok(Some(request)) => self.handle(CoreEvent::Message { session: id, request }),
                    Ok(None) => break,
                    Err(_) => broken = true,
                }
            }
            let Some(peer) = self.peers.get_mut(&id) else { continue };
            peer.session.release_read();
            if broken {
                self.peers.remove(&id);
                self.handle(CoreEvent::Disconnected { session: id });
            } else if peer.session.rank().is_none() {
                let void_below = peer.session.void_below();
                self.handle(CoreEvent::Drained { session: id, void_below });
            } else if let Some((start, done)) = peer.session.moved_fences() {
                self.handle(CoreEvent::Fences { session: id, start, done });
            }
        }
        if let Some(session) = self.core.behind() {
            self.handle(CoreEvent::Behind { session });
        }
    }

    fn end(mut self) {
        let ids: Vec<u64> = self.peers.keys().copied().collect();
        for id in ids {
            if self.peers.remove(&id).is_some() {
                self.handle(CoreEvent::Disconnected { session: id });
            }
        }
        while let Some(copy) = self.copies.pop_front() {
            self.handle(CoreEvent::Copied { copy, ok: true });
        }
        while self.end_job(true) {}
        self.now_ms += 1_000_000;
        self.handle(CoreEvent::Tick);
        while self.end_job(true) {}
        let stats = self.core.stats();
        assert_eq!((stats.sessions, stats.leases, self.core.busy()), (0, 0, false));
        let largest = FORMS[1] * 2;
        assert!(stats.pool_used_bytes <= stats.blocks * largest, "a slot is held without a block");
        assert!(stats.pool_used_bytes >= stats.blocks * FORMS[0] * 2);
        self.core.audit_ledger();
    }
}

fn post(peer: &mut Peer, slot: &Slot) {
    let ring: RegionRing = peer.memory.ring(Ring::Submission);
    ring.write_slot(peer.tail % ring.capacity(), slot);
    peer.tail = peer.tail.wrapping_add(1);
    ring.store_tail(peer.tail);
}

fuzz_target!(|bytes: &[u8]| {
    let (mut input, mut world) = (Input(bytes), World::new());
    for _ in 0..INSTRUCTIONS_MAX {
        if input.0.is_empty() {
            break;
        }
        let code = input.byte();
        let whose = world.peers.keys().copied().nth(usize::from(code >> 4) % world.peers.len().max(1));
        let peer = whose.and_then(|id| world.peers.get_mut(&id));
        match (code & 15, peer) {
            (0, _) => world.connect(input.byte() & 7),
            (1, Some(_)) => {
                let session = whose.expect("it was found");
                world.peers.remove(&session);
                world.handle(CoreEvent::Disconnected { session });
            }
            (2, Some(peer)) => post(peer, &input.slot()),
            (3, Some(peer)) => {
                peer.tail = input.word() as u32;
                peer.memory.ring(Ring::Submission).store_tail(peer.tail);
            }
            (4, Some(peer)) => {
                let at = input.word() as usize % (SESSION_BYTES / 8) * 8;
                peer.memory.region().word64(at).store(input.word(), Ordering::Relaxed);
            }
            (5, Some(peer)) => {
                for word in [header::FENCE_START, header::FENCE_DONE] {
                    peer.memory.region().word64(word).store(u64::from(input.byte() & 7), Ordering::Release);
                }
            }
            (6, _) if code >> 4 & 1 == 1 => {
                world.end_job(input.byte() & 3 > 0);
            }
            (6, _) => {
                if let Some(copy) = world.copies.pop_front() {
                    let ok = input.byte() & 1 == 1;
                    world.handle(CoreEvent::Copied { copy, ok });
                }
            }
            (7, _) => {
                world.now_ms += u64::from(input.byte()) * 10;
                world.handle(CoreEvent::Tick);
            }
            (8, Some(peer)) => peer.memory.write_block_id(input.byte().into(), input.byte().into()),
            (9 | 10, _) => world.turn(),
            (11, Some(peer)) => {
                // Reads the completions, as an engine does.
                let ring = peer.memory.ring(Ring::Completion);
                ring.store_head(ring.load_tail());
            }
            (_, Some(peer)) => post(peer, &input.request().encode_slot()),
            (_, None) => world.connect(code >> 4 & 7),
        }
    }
    world.turn();
    world.end();
});
