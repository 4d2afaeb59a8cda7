//! Begins and ends the sessions of engine processes.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use copy_engine::HostMemory;
use rustix::fs::FileType;
use rustix::io::Errno;
use shm_protocol::ACCEPT_SINCE;
use shm_protocol::handshake::{self, Copier, Hello, Reply, Role, Welcome, WorkerHello};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace;
use shm_protocol::pool::slot_count;
use shm_protocol::region::{Access, HUGETLBFS_MAGIC, TMPFS_MAGIC};
use shm_protocol::session::{Bound, SessionMemory};
use shm_protocol::transport;
use shm_protocol::versions::RELEASE;
use shm_protocol::wait;
use tiers::dram;

use super::Runtime;
use crate::catalog::{self, EngineBlocks};
use crate::clients::handshakes::NewClient;
use crate::clients::refusals::RefusalCause;
use crate::clients::session::ClientSession;
use crate::config::Size;
use crate::copiers::{Copiers, Rank, RankEvent};
use crate::core::{Action, CoreEvent, SessionId};
use crate::pages::metrics::CloseReason;
use crate::system::poller::PollSource;

/// Sessions at once: a host of 16 GPUs with one engine each has 32; this leaves room for eight restarts of
/// all at once.
const SESSIONS_MAX: usize = 256;
/// Note for an engine with `pillion.miss_wait_ms`, if the sidecar is in no mesh.
const WAITS_IN_VAIN: &str = "pillion.miss_wait_ms has no effect, because this sidecar is in no mesh and gets no blocks \
     of other pods: give it --mesh-listen, or leave the option out";

/// A client after its hello and before its session.
#[derive(Debug)]
pub(super) struct Entrant {
    id: SessionId,
    socket: Arc<OwnedFd>,
    process: Option<OwnedFd>,
    version: u32,
    hello: Hello,
    descriptors: Vec<OwnedFd>,
    memory: SessionMemory,
    memory_fd: OwnedFd,
}

// === impl Runtime: peers ===

impl Runtime {
    /// Begins the session of a client, or refuses it. A rank's GPU memory is opened first; its session begins
    /// later.
    pub(super) fn admit_client(&mut self, caller: NewClient) {
        let id = self.next_session;
        self.next_session += 1;
        let NewClient { socket, process, version, hello, descriptors } = caller;
        let (engine, role) = (hello.engine.clone(), describe(&hello.role));
        let socket = Arc::new(socket);
        let room = self.has_room().map_err(|text| (RefusalCause::Full, text));
        let fits = || self.has_segment_for(&hello).map_err(|text| (RefusalCause::Memory, text));
        let memory = room.and_then(|()| fits()).and_then(|()| {
            let made = SessionMemory::create(version, self.terms.epoch, id);
            made.map_err(|error| (RefusalCause::Resources, error.to_string()))
        });
        let (memory_fd, memory) = match memory {
            Ok(memory) => memory,
            Err(why) => return self.refuse_client(&socket, &engine, &role, why),
        };
        let entrant = Entrant { id, socket, process, version, hello, descriptors, memory, memory_fd };
        match &entrant.hello.role {
            Role::Worker(worker) if worker.cuda.is_some() => {
                let (memory, process) = (&entrant.memory, entrant.process.as_ref());
                match self.copiers.open_gpu_rank((id, &engine), worker, memory, &entrant.socket, process) {
                    Ok(()) => drop(self.opening.insert(id, entrant)),
                    Err(text) => {
                        self.refuse_client(&entrant.socket, &engine, &role, (RefusalCause::Memory, text))
                    }
                }
            }
            _ => self.enter_client(entrant, None),
        }
    }

    /// Handles opened and stuck ranks on GPUs. Returns false if there was none.
    pub(super) fn take_rank_event(&mut self) -> bool {
        let mut worked = false;
        while let Some((id, event)) = self.copiers.next_rank_event() {
            worked = true;
            match event {
                RankEvent::Parked(engine) => {
                    self.parked.insert(engine);
                    self.closing.push((id, CloseReason::Parked, String::new()));
                    self.close_sessions();
                }
                RankEvent::Opened(opened) => {
                    let entrant = self.opening.remove(&id).expect("it waits for this");
                    match opened {
                        Ok(rank) => self.enter_client(entrant, Some(rank)),
                        Err(text) => {
                            let Entrant { socket, hello, .. } = entrant;
                            let role = describe(&hello.role);
                            self.refuse_client(&socket, &hello.engine, &role, (RefusalCause::Memory, text));
                        }
                    }
                }
            }
        }
        worked
    }

    /// True if a rank is stuck and every connected engine has a stuck rank. A restart of the sidecar then
    /// costs no engine anything, and serves all again.
    pub(super) fn serves_parked_alone(&mut self) -> bool {
        if self.copiers.parked() == 0 {
            self.parked.clear();
            return false;
        }
        self.core.holders().all(|holder| self.parked.contains(holder.engine))
    }

    /// Begins the session of a client; `gpu_rank` is its opened rank on a GPU.
    fn enter_client(&mut self, entrant: Entrant, gpu_rank: Option<Rank>) {
        let Entrant { id, socket, process, version, hello, descriptors, memory, memory_fd } = entrant;
        let (engine, role) = (hello.engine.clone(), describe(&hello.role));
        let release = hello.release.clone();
        let blocks = match &hello.role {
            Role::Worker(worker) => EngineBlocks::of_worker(hello.world_size, worker),
            Role::Scheduler { .. } => None,
        };
        let digest = blocks.as_ref().map(|blocks| namespace::digest_facts(&blocks.facts));
        let note = match self.examine(&hello, blocks.as_ref()) {
            Ok(note) => join_notes([accepts_nothing(version, &hello), note]),
            Err(text) => return self.refuse_client(&socket, &engine, &role, (RefusalCause::Namespace, text)),
        };
        let rank = match &hello.role {
            Role::Worker(worker) if gpu_rank.is_none() => {
                self.other_rank(worker, descriptors, &memory, &socket).map(Some)
            }
            _ => Ok(gpu_rank),
        };
        let built = rank.map_err(|text| (RefusalCause::Memory, text)).and_then(|rank| {
            self.build(id, memory, Arc::clone(&socket), rank).map_err(|text| (RefusalCause::Resources, text))
        });
        let mut session = match built {
            Ok(session) => session,
            Err(why) => return self.refuse_client(&socket, &engine, &role, why),
        };
        // If the process cannot be watched, only the socket's hang-up shows its end.
        session.process =
            process.filter(|process| self.poller.add_source(PollSource::Process(id), process).is_ok());
        if let Some(note) = &note {
            tracing::warn!(session = id, engine, "{note}");
        }
        if let Some(blocks) = &blocks {
            self.enroll(&[id], &engine, blocks);
        }
        self.core.handle(
            self.now,
            CoreEvent::Connected { session: id, hello: Box::new(hello) },
            &mut self.out,
        );
        self.touched = true;
        let rejected = self.out.iter().find_map(|action| match action {
            Action::Close { session, reason } if *session == id => Some(reason.clone()),
            _ => None,
        });
        self.sessions.insert(id, session);
        if let Some(text) = rejected {
            let session = &self.sessions[&id];
            self.refuse_client(&session.socket, &engine, &role, (RefusalCause::Contradiction, text));
        } else if let Err(error) = self.welcome(id, version, &memory_fd, digest, note) {
            self.closing.push((id, CloseReason::HangUp, error.to_string()));
        } else {
            tracing::info!(session = id, engine, role, version, release, "session began");
        }
        self.apply();
        self.close_sessions();
    }

    /// Compares a worker with the known namespaces, and a scheduler's options with the sidecar. Returns a
    /// note for the user; an error refuses the client.
    fn examine(&self, hello: &Hello, blocks: Option<&EngineBlocks>) -> Result<Option<String>, String> {
        match &hello.role {
            Role::Worker(worker) => self.catalog.lock().examine(&hello.engine, worker, blocks),
            Role::Scheduler { .. } => {
                let in_vain = hello.miss_wait_ms.is_some_and(|ms| ms > 0) && self.peers.is_none();
                Ok(in_vain.then(|| WAITS_IN_VAIN.to_owned()))
            }
        }
    }

    /// Adds an engine's workers to a namespace of the catalog.
    fn enroll(&self, sessions: &[SessionId], engine: &str, blocks: &EngineBlocks) {
        if self.catalog.lock().enter_sessions(sessions, engine, blocks) {
            // The line has only the facts: users compare it with the engine's line.
            tracing::info!("{}", namespace::format_facts(&blocks.facts));
        }
    }

    /// Writes the binding into the sessions of an engine: its ranks, then its scheduler.
    pub(super) fn show_bound(&mut self, engine: &str, blocks: &EngineBlocks, words: Vec<(SessionId, Bound)>) {
        let (_, ranks) = words.split_last().expect("a scheduler's at least");
        let ranks: Vec<SessionId> = ranks.iter().map(|(id, _)| *id).collect();
        let note = self.catalog.lock().note_near_miss(engine, &blocks.facts);
        if let Some(note) = note {
            tracing::warn!(engine, "{note}");
        }
        self.enroll(&ranks, engine, blocks);
        for (id, bound) in words {
            if let Some(session) = self.sessions.get(&id) {
                session.show_bound(bound);
            }
        }
    }

    fn has_room(&self) -> Result<(), String> {
        match self.sessions.len() + self.opening.len() < SESSIONS_MAX {
            true => Ok(()),
            false => Err(format!(
                "{SESSIONS_MAX} engine processes are connected, which is the limit: start a second sidecar"
            )),
        }
    }

    /// Fails if a block of the worker's engine is larger than a segment of the pool: all its saves would be
    /// dropped.
    fn has_segment_for(&self, hello: &Hello) -> Result<(), String> {
        let Role::Worker(worker) = &hello.role else { return Ok(()) };
        let (block_bytes, segment_bytes) = (catalog::block_bytes(worker), self.pool.segment_bytes());
        if slot_count(segment_bytes, block_bytes).is_ok() {
            return Ok(());
        }
        let remedy = match dram::pool_bytes_for(block_bytes) {
            Some(bytes) => format!("give the sidecar at least --dram {:#}", Size::new(bytes)),
            None => "leave --kv-transfer-config out for this model, or set a smaller --block-size".to_owned(),
        };
        Err(format!(
            "a block of this engine has {block_bytes} bytes, and a segment of the pool has {segment_bytes}, so no block fits: {remedy}"
        ))
    }

    /// The rank of a worker in host memory, or on a GPU out of the sidecar's reach.
    fn other_rank(
        &self,
        worker: &WorkerHello,
        descriptors: Vec<OwnedFd>,
        memory: &SessionMemory,
        socket: &Arc<OwnedFd>,
    ) -> Result<Rank, String> {
        let Some(slots) = worker.staging else {
            let rank = host_memory(worker, worker.blocks, descriptors)?;
            return Ok(Copiers::host_rank(rank, memory.clone(), Arc::clone(socket)));
        };
        let tags = descriptors[0].try_clone().map_err(|error| error.to_string())?;
        let staging = host_memory(worker, slots, descriptors)?;
        self.copiers.staged_rank(staging, tags, slots, memory, Arc::clone(socket))
    }

    fn build(
        &self,
        id: SessionId,
        memory: SessionMemory,
        socket: Arc<OwnedFd>,
        rank: Option<Rank>,
    ) -> Result<ClientSession, String> {
        let doorbell = wait::make_eventfd().map_err(|error| {
            format!(
                "no eventfd could be made ({error}): raise the limit of \
             open files"
            )
        })?;
        let watched = self
            .poller
            .add_source(PollSource::Doorbell(id), &doorbell)
            .and_then(|()| self.poller.add_source(PollSource::Socket(id), &socket));
        watched.map_err(|error| {
            format!(
                "the sidecar cannot watch this connection ({error}): raise the limit of open \
             files"
            )
        })?;
        Ok(ClientSession::new(memory, socket, doorbell, rank))
    }

    fn welcome(
        &self,
        id: SessionId,
        version: u32,
        memory_fd: &OwnedFd,
        digest: Option<NamespaceDigest>,
        note: Option<String>,
    ) -> Result<(), Errno> {
        let reply = Reply::Welcome(Welcome {
            version,
            release: RELEASE.into(),
            epoch: self.terms.epoch,
            session: id,
            lease_ttl_ms: self.terms.lease_ttl_ms,
            pool_bytes: self.pool.len(),
            segment_bytes: self.pool.segment_bytes(),
            namespace: digest.map(|digest| digest.to_string()).unwrap_or_default(),
            note,
            handover: true,
            tails: true,
            states: true,
            devices: true,
            hints: true,
            streams: true,
        });
        let session = &self.sessions[&id];
        let terms = &self.terms;
        let (pool, process) = (terms.pool_fd.as_fd(), terms.pidfd.as_fd());
        let descriptors = [memory_fd.as_fd(), session.doorbell.as_fd(), pool, process];
        transport::send_record(&session.socket, &handshake::encode_record(&reply), &descriptors)
    }

    fn refuse_client(
        &self,
        socket: &OwnedFd,
        engine: &str,
        role: &str,
        (cause, text): (RefusalCause, String),
    ) {
        tracing::warn!(engine, role, reason = text, "connection refused");
        self.handshakes.refusals().send_refusal(socket, cause, text);
    }

    /// Closes the session of an ended process. A child process may still hold its socket and other
    /// descriptors.
    pub(super) fn end_with_process(&mut self, id: SessionId) {
        self.closing.push((id, CloseReason::HangUp, String::new()));
        self.close_sessions();
    }

    /// Reads a readable socket: the client has hung up, or sent a record against the protocol.
    pub(super) fn read_socket(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        let (reason, text) = match transport::receive_record(&session.socket) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok((record, _)) if !record.is_empty() => (CloseReason::Malformed, "a record after the handshake"),
            _ => (CloseReason::HangUp, ""),
        };
        self.closing.push((id, reason, text.into()));
        self.close_sessions();
    }
}

/// A note for an engine that does not report accepted steps.
fn accepts_nothing(version: u32, hello: &Hello) -> Option<String> {
    let Hello { engine, release, .. } = hello;
    (version < ACCEPT_SINCE).then(|| {
        format!(
            "engine {engine} runs release {}, which does not say which steps it accepted, so it loads but no save of it \
             is kept. Install release 0.3.0 or later of Pillion's wheel in the engine's image",
            release.escape_debug()
        )
    })
}

fn join_notes(notes: [Option<String>; 2]) -> Option<String> {
    notes.into_iter().flatten().reduce(|first, second| format!("{first}. {second}"))
}

fn describe(role: &Role) -> String {
    match role {
        Role::Scheduler { .. } => "scheduler".into(),
        Role::Worker(worker) => format!("rank {}", worker.rank),
    }
}

/// Maps `blocks` blocks of a rank's memory. Fails if a descriptor is not shared memory: a copy from any other
/// file could block a copying thread.
fn host_memory(worker: &WorkerHello, blocks: u32, descriptors: Vec<OwnedFd>) -> Result<HostMemory, String> {
    for (index, descriptor) in descriptors.iter().enumerate() {
        let stat = rustix::fs::fstat(descriptor).map_err(|error| format!("descriptor {index}: {error}"))?;
        let fs = rustix::fs::fstatfs(descriptor).map_err(|error| format!("descriptor {index}: {error}"))?;
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !regular || ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&(fs.f_type as u32)) {
            return Err(format!(
                "descriptor {index} is not shared memory: pass a memfd or a file of /dev/shm"
            ));
        }
    }
    let access = match worker.copy {
        Copier::Engine => Access::ReadOnly,
        Copier::Sidecar => Access::ReadWrite,
    };
    HostMemory::new(descriptors, &worker.regions, blocks, access).map_err(|error| error.to_string())
}
