//! Peers that come and go.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use copy_engine::HostMemory;
use rustix::event::EventfdFlags;
use rustix::fs::FileType;
use rustix::io::Errno;
use shm_protocol::handshake::{self, Copier, Hello, Reply, Role, Welcome, Worker};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace;
use shm_protocol::region::Access;
use shm_protocol::session::{Bound, SessionMemory};
use shm_protocol::transport;
use shm_protocol::versions::RELEASE;

use super::Runtime;
use crate::catalog::Blocks;
use crate::copiers::Copiers;
use crate::engine::{Action, Event, SessionId};
use crate::greeter::{self, Caller};
use crate::metrics::CloseReason;
use crate::poller::Source;
use crate::session::Session;

/// Sessions at once: a host of 16 GPUs with one engine each has 32; room for eight restarts of all at once.
const SESSIONS_MAX: usize = 256;
/// What an engine is told whose requests are to wait for other pods' blocks.
const WAITS_IN_VAIN: &str = "pillion.miss_wait_ms has no effect: this sidecar is in no mesh, so no other pod's blocks can come; give it --mesh-listen, or leave the option out";
/// `f_type` of tmpfs, which also holds every memfd.
const TMPFS_MAGIC: u32 = 0x0102_1994;
/// `f_type` of hugetlbfs.
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

// === impl Runtime: peers ===

impl Runtime {
    /// Takes in a peer that said hello, or tells it why not.
    pub(super) fn admit(&mut self, caller: Caller) {
        let id = self.next_session;
        self.next_session += 1;
        let Caller { socket, process, version, hello, descriptors } = caller;
        let (engine, role) = (hello.engine.clone(), describe(&hello.role));
        let release = hello.release.clone();
        let blocks = match &hello.role {
            Role::Worker(worker) => Blocks::of(hello.world_size, worker),
            Role::Scheduler { .. } => None,
        };
        let digest = blocks.as_ref().map(|blocks| namespace::digest(&blocks.facts));
        let note = match self.examine(&hello, blocks.as_ref()) {
            Ok(note) => note,
            Err(reason) => return refuse(&socket, &engine, &role, reason),
        };
        let built = self.build(id, version, &hello, socket, descriptors);
        let (mut session, memory_fd) = match built {
            Ok(built) => built,
            Err((socket, reason)) => return refuse(&socket, &engine, &role, reason),
        };
        // Where it cannot be watched, the socket alone tells of its end.
        session.process = process.filter(|process| self.poller.add(Source::Process(id), process).is_ok());
        if let Some(note) = &note {
            tracing::warn!(session = id, engine, "{note}");
        }
        if let Some(blocks) = &blocks {
            self.enroll(&[id], &engine, blocks);
        }
        self.core.handle(
            crate::clock::millis(self.now),
            Event::Connected { session: id, hello: Box::new(hello) },
            &mut self.out,
        );
        self.touched = true;
        let rejected = self.out.iter().find_map(|action| match action {
            Action::Close { session, reason } if *session == id => Some(reason.clone()),
            _ => None,
        });
        self.sessions.insert(id, session);
        if let Some(reason) = rejected {
            let session = &self.sessions[&id];
            refuse(&session.socket, &engine, &role, reason);
        } else if let Err(error) = self.welcome(id, version, &memory_fd, digest, note) {
            self.closing.push((id, CloseReason::HangUp, error.to_string()));
        } else {
            tracing::info!(session = id, engine, role, version, release, "session began");
        }
        self.apply();
        self.close_sessions();
    }

    /// Compares a rank with the namespaces that are known, and what a scheduler wants with what there is. An error refuses it.
    fn examine(&self, hello: &Hello, blocks: Option<&Blocks>) -> Result<Option<String>, String> {
        match &hello.role {
            Role::Worker(worker) => self.catalog.lock().examine(&hello.engine, worker, blocks),
            Role::Scheduler { .. } => {
                let in_vain = hello.miss_wait_ms.is_some_and(|ms| ms > 0) && self.peers.is_none();
                Ok(in_vain.then(|| WAITS_IN_VAIN.to_owned()))
            }
        }
    }

    /// Workers of an engine serve a namespace from now on.
    fn enroll(&self, sessions: &[SessionId], engine: &str, blocks: &Blocks) {
        if self.catalog.lock().enter(sessions, engine, blocks) {
            // Nothing else in this line: it is compared with the engine's own.
            tracing::info!("{}", namespace::line(&blocks.facts));
        }
    }

    /// Shows an engine's processes what they are bound to: the sessions of its ranks, then its scheduler's.
    pub(super) fn show_bound(&mut self, engine: &str, blocks: &Blocks, words: Vec<(SessionId, Bound)>) {
        let (_, ranks) = words.split_last().expect("a scheduler's at least");
        let ranks: Vec<SessionId> = ranks.iter().map(|(id, _)| *id).collect();
        let note = self.catalog.lock().note(engine, &blocks.facts);
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

    fn build(
        &self,
        id: SessionId,
        version: u32,
        hello: &Hello,
        socket: OwnedFd,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(Session, OwnedFd), (Arc<OwnedFd>, String)> {
        let socket = Arc::new(socket);
        let parts = || -> Result<_, String> {
            if self.sessions.len() >= SESSIONS_MAX {
                return Err(format!(
                    "{SESSIONS_MAX} engine processes are connected, which is the most there may be"
                ));
            }
            let (fd, memory) =
                SessionMemory::create(version, self.terms.epoch, id).map_err(|error| error.to_string())?;
            let rank = match &hello.role {
                Role::Scheduler { .. } => None,
                Role::Worker(worker) if worker.cuda.is_some() => {
                    Some(self.copiers.gpu_rank(worker, &memory, Arc::clone(&socket))?)
                }
                Role::Worker(worker) if let Some(slots) = worker.staging => {
                    let tags = descriptors[0].try_clone().map_err(|error| error.to_string())?;
                    let staging = host_memory(worker, slots, descriptors)?;
                    Some(self.copiers.staged_rank(staging, tags, slots, &memory, Arc::clone(&socket))?)
                }
                Role::Worker(worker) => {
                    let rank = host_memory(worker, worker.blocks, descriptors)?;
                    Some(Copiers::host_rank(rank, memory.clone(), Arc::clone(&socket)))
                }
            };
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let doorbell =
                rustix::event::eventfd(0, flags).map_err(|error| format!("no eventfd: {error}"))?;
            Ok((fd, memory, rank, doorbell))
        };
        let (fd, memory, rank, doorbell) = match parts() {
            Ok(parts) => parts,
            Err(reason) => return Err((socket, reason)),
        };
        let watched = self
            .poller
            .add(Source::Doorbell(id), &doorbell)
            .and_then(|()| self.poller.add(Source::Socket(id), &socket));
        match watched {
            Ok(()) => Ok((Session::new(memory, socket, doorbell, rank), fd)),
            Err(error) => Err((socket, format!("the sidecar cannot watch this connection: {error}"))),
        }
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
        });
        let session = &self.sessions[&id];
        let terms = &self.terms;
        let (pool, process) = (terms.pool_fd.as_fd(), terms.pidfd.as_fd());
        let descriptors = [memory_fd.as_fd(), session.doorbell.as_fd(), pool, process];
        transport::send(&session.socket, &handshake::encode(&reply), &descriptors)
    }

    /// A session's process has ended. A child of it may hold the socket, and whatever else it had open.
    pub(super) fn end_with_process(&mut self, id: SessionId) {
        self.closing.push((id, CloseReason::HangUp, String::new()));
        self.close_sessions();
    }

    /// A session's socket became readable: it has hung up, or sends what nobody asked for.
    pub(super) fn read_socket(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        let (reason, text) = match transport::receive(&session.socket) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok((record, _)) if !record.is_empty() => (CloseReason::Malformed, "a record after the handshake"),
            _ => (CloseReason::HangUp, ""),
        };
        self.closing.push((id, reason, text.into()));
        self.close_sessions();
    }
}

fn refuse(socket: &OwnedFd, engine: &str, role: &str, reason: String) {
    tracing::warn!(engine, role, reason, "connection refused");
    greeter::refuse(socket, reason);
}

fn describe(role: &Role) -> String {
    match role {
        Role::Scheduler { .. } => "scheduler".into(),
        Role::Worker(worker) => format!("rank {}", worker.rank),
    }
}

/// `blocks` blocks of a rank's memory, if its descriptors are memory: a copy from anything else could block a copying thread.
fn host_memory(worker: &Worker, blocks: u32, descriptors: Vec<OwnedFd>) -> Result<HostMemory, String> {
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
