//! A small sidecar for tests: a real socket, real session memory, and answers only on a test's order.

#![allow(dead_code, reason = "each test binary uses its own part")]

pub(crate) mod rank;
pub(crate) mod scheduler;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::MemfdFlags;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use shm_protocol::gate::GateMemory;
use shm_protocol::handshake::{Hello, Reply, Role, Welcome, decode_hello, encode_record};
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::layout::{OPERATIONS, header};
use shm_protocol::message::{Kind, Message, Outcome, Saved, StageRequest, Status};
use shm_protocol::namespace::{self, Facts};
use shm_protocol::pool::{self, Geometry, SlotRef};
use shm_protocol::ring::{Consumer, Producer};
use shm_protocol::session::{Bound, RegionRing, Ring, SessionMemory};
use shm_protocol::versions::RELEASE;
use shm_protocol::{PROTOCOL_VERSION, transport, wait};

/// For the watchdog only: no test asserts on it.
const WATCHDOG: Duration = Duration::from_secs(20);
/// The longest handshake of an engine.
const HANDSHAKE: Duration = Duration::from_secs(1);
/// Handshakes that a test tries.
const SESSIONS_MAX: usize = 20;
pub(crate) const SEGMENT_BYTES: u64 = pool::SEGMENT_ALIGN;
pub(crate) const LEASE_TTL_MS: u64 = 30_000;

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let turns = WATCHDOG.as_millis();
    assert!(
        (0..turns).any(|_| condition() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }),
        "no {what}"
    );
}

/// Tries until an engine and its sidecar have shaken hands: an engine without a core gives up after a second.
/// Any other reason for no session is a fault.
pub(crate) fn session<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let mut said = Vec::new();
    while said.len() < SESSIONS_MAX {
        #[expect(
            clippy::disallowed_methods,
            reason = "a test compares the engine's limit with the clock's time"
        )]
        let began = Instant::now();
        match attempt() {
            Ok(session) => return session,
            Err(why) => said.push(why),
        }
        assert!(began.elapsed() >= HANDSHAKE, "{said:?}");
    }
    panic!("{said:?}")
}

/// A socket in a folder of its own.
pub(crate) struct Peer {
    folder: PathBuf,
    pub(crate) epoch: u64,
    pub(crate) lease_ttl_ms: u64,
    /// The protocol version of this sidecar.
    pub(crate) version: u32,
    /// True if it knows the flags of handovers.
    pub(crate) handover: bool,
    pub(crate) tails: bool,
    pub(crate) states: bool,
    pub(crate) streams: bool,
}

/// The sidecar's end of one session.
pub(crate) struct Served {
    pub(crate) hello: Hello,
    pub(crate) descriptors: Vec<OwnedFd>,
    pub(crate) memory: SessionMemory,
    pub(crate) pool: TestPool,
    submission: Consumer<RegionRing>,
    completion: Producer<RegionRing>,
    socket: OwnedFd,
}

/// A pool of one segment.
pub(crate) struct TestPool {
    fd: OwnedFd,
    geometry: Geometry,
}

impl Peer {
    pub(crate) fn new(epoch: u64) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("pillion-shim-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (version, lease_ttl_ms) = (PROTOCOL_VERSION, LEASE_TTL_MS);
        Self {
            folder,
            epoch,
            version,
            lease_ttl_ms,
            handover: true,
            tails: true,
            states: true,
            streams: true,
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("pillion.sock")
    }

    /// Serves the next connection in the background, with a pool for blocks of `block_bytes`. A connection
    /// that ends before its welcome is skipped.
    pub(crate) fn serve(&self, block_bytes: u64) -> JoinHandle<Served> {
        let listener = self.listen();
        let said = Welcome {
            version: self.version,
            lease_ttl_ms: self.lease_ttl_ms,
            handover: self.handover,
            tails: self.tails,
            states: self.states,
            devices: true,
            hints: true,
            streams: self.streams,
            ..welcome(self.epoch)
        };
        std::thread::spawn(move || {
            std::iter::repeat_with(|| accept(&listener, &said, block_bytes))
                .find_map(|served| served)
                .unwrap()
        })
    }

    /// Refuses the next connection in the background.
    pub(crate) fn refuse(&self, reason: &str) -> JoinHandle<()> {
        let (listener, reason) = (self.listen(), reason.to_owned());
        std::thread::spawn(move || {
            let socket = accept_socket(&listener);
            let (_, _) = transport::receive_record(&socket).unwrap();
            let reply = Reply::Refused { version: PROTOCOL_VERSION, reason };
            // The engine may have left already: then the record goes nowhere.
            let _ = transport::send_record(&socket, &encode_record(&reply), &[]);
        })
    }

    /// Gives the next connection to `script`, before its hello is read.
    pub(crate) fn script(&self, script: impl FnOnce(OwnedFd) + Send + 'static) -> JoinHandle<()> {
        let listener = self.listen();
        std::thread::spawn(move || script(accept_socket(&listener)))
    }

    fn listen(&self) -> OwnedFd {
        let _ = std::fs::remove_file(self.socket());
        transport::listen_at(&self.socket()).unwrap()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn accept_socket(listener: &OwnedFd) -> OwnedFd {
    poll(&mut [PollFd::new(listener, PollFlags::IN)], None).unwrap();
    let socket = transport::accept_connection(listener).unwrap();
    poll(&mut [PollFd::new(&socket, PollFlags::IN)], None).unwrap();
    socket
}

/// The facts of the tests' ranks.
pub(crate) fn facts() -> Facts {
    Facts::from([("model".into(), "m".into())])
}

/// The namespace of these facts.
pub(crate) fn namespace() -> NamespaceDigest {
    namespace::digest_facts(&facts())
}

/// The binding to `namespace` after the WEIGHTS message `weights`.
pub(crate) fn bound(weights: u64, namespace: NamespaceDigest) -> Bound {
    Bound { weights, live: None, namespace: namespace.words()[0] }
}

/// The welcome of a sidecar with a pool of one segment.
pub(crate) fn welcome(epoch: u64) -> Welcome {
    Welcome {
        version: PROTOCOL_VERSION,
        release: RELEASE.into(),
        epoch,
        session: 1,
        lease_ttl_ms: LEASE_TTL_MS,
        pool_bytes: pool::pool_bytes(SEGMENT_BYTES, 1).unwrap(),
        segment_bytes: SEGMENT_BYTES,
        namespace: "00112233445566778899aabbccddeeff".into(),
        note: None,
        handover: true,
        tails: true,
        states: true,
        devices: true,
        hints: true,
        streams: true,
    }
}

/// An eventfd as the sidecar's doorbell.
pub(crate) fn doorbell() -> OwnedFd {
    wait::make_eventfd().unwrap()
}

/// This test's process, in the place of a sidecar's process.
pub(crate) fn own_process() -> OwnedFd {
    pidfd_open(getpid(), PidfdFlags::empty()).unwrap()
}

/// The next session; `None` if the engine has left before its welcome.
fn accept(listener: &OwnedFd, said: &Welcome, block_bytes: u64) -> Option<Served> {
    let socket = accept_socket(listener);
    let (record, descriptors) = transport::receive_record(&socket).unwrap();
    if record.is_empty() {
        return None;
    }
    let hello = decode_hello(&record, descriptors.len()).unwrap();
    let (fd, memory) = SessionMemory::create(said.version, said.epoch, 1).unwrap();
    memory.store_bound(bound(0, namespace()));
    let doorbell = doorbell();
    let pool = TestPool::new(block_bytes);
    let namespace = match &hello.role {
        Role::Worker(worker) => {
            let live = namespace::weights_live([worker.live_weights.map(|live| live.0)]);
            namespace::digest_facts(&namespace::complete_facts(&worker.facts, live)).to_string()
        }
        Role::Scheduler { .. } => String::new(),
    };
    let welcome = Welcome { namespace, ..said.clone() };
    let process = own_process();
    let sent = [fd.as_fd(), doorbell.as_fd(), pool.fd.as_fd(), process.as_fd()];
    transport::send_record(&socket, &encode_record(&Reply::Welcome(welcome)), &sent).ok()?;
    Some(Served {
        hello,
        descriptors,
        submission: Consumer::new(memory.ring(Ring::Submission)),
        completion: Producer::new(memory.ring(Ring::Completion)),
        memory,
        pool,
        socket,
    })
}

impl Served {
    /// Every message so far, copied out and acknowledged.
    pub(crate) fn drain(&mut self) -> Vec<Message> {
        self.submission.ready().unwrap();
        let messages = std::iter::from_fn(|| self.submission.pop());
        let messages = messages.map(|slot| Message::decode_slot(&slot).unwrap()).collect();
        self.submission.release();
        messages
    }

    /// Binds the engine again.
    pub(crate) fn bind(&self, weights: u64, namespace: NamespaceDigest) {
        self.memory.store_bound(bound(weights, namespace));
    }

    /// The key at `index` of a chunk.
    pub(crate) fn key(&self, chunk: u32, index: usize) -> BlockHash {
        let mut keys = Vec::new();
        self.memory.read_keys(chunk, index, 1, &mut keys);
        keys[0]
    }

    /// Every message so far of one kind.
    pub(crate) fn drain_kind(&mut self, kind: Kind) -> Vec<Message> {
        self.drain().into_iter().filter(|message| message.kind == kind).collect()
    }

    /// Ended loads of a rank, each with its status.
    pub(crate) fn loaded(&mut self) -> Vec<(u64, u8)> {
        self.drain_kind(Kind::Loaded).iter().map(|message| (message.op, message.flags)).collect()
    }

    pub(crate) fn answer(&self, op: u64, status: Status, value: u32) {
        self.memory.store_outcome(op, Outcome { op: op as u32, value, status });
        wait::wake_engine(self.memory.region());
    }

    pub(crate) fn complete(&mut self, saved: Saved) {
        assert!(self.completion.has_room(0).unwrap());
        self.completion.push(&saved.encode_slot());
        self.completion.publish();
    }

    /// Asks a rank for blocks in its staging segment.
    pub(crate) fn ask(&mut self, stages: &[StageRequest]) {
        assert!(self.completion.free().unwrap() as usize >= stages.len());
        stages.iter().for_each(|stage| self.completion.push(&stage.encode_slot()));
        self.completion.publish();
        wait::wake_engine(self.memory.region());
    }

    pub(crate) fn word(&self, word: usize) -> u64 {
        self.memory.region().word64(word).load(Ordering::Acquire)
    }

    /// The newest revoked load; 0: none.
    pub(crate) fn gate(&self) -> u64 {
        (0..OPERATIONS as u64).map(|word| self.memory.region().load_gate(word)).max().expect("many words")
    }

    pub(crate) fn store(&self, word: usize, value: u64) {
        self.memory.region().word64(word).store(value, Ordering::Release);
    }

    pub(crate) fn beat(&self) {
        self.memory.region().word64(header::SIDECAR_HEARTBEAT).fetch_add(1, Ordering::Relaxed);
    }
}

impl TestPool {
    pub(crate) fn new(block_bytes: u64) -> Self {
        let fd = rustix::fs::memfd_create("test-pool", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, pool::pool_bytes(SEGMENT_BYTES, 1).unwrap()).unwrap();
        let pool = Self { fd, geometry: Geometry::new(SEGMENT_BYTES, block_bytes).unwrap() };
        pool.put(pool::header::MAGIC, pool::MAGIC);
        pool.put(pool::header::SEGMENT_BYTES, SEGMENT_BYTES);
        pool.put(pool::header::SEGMENTS, 1);
        pool.put(pool::header::OLDEST, u64::from(pool::OLDEST));
        pool.put(pool::header::VERSION, u64::from(pool::VERSION));
        pool
    }

    /// Fills slot `index` and returns its reference.
    pub(crate) fn commit(&self, index: u32, generation: u64, bytes: &[u8]) -> SlotRef {
        let offset = self.geometry.offset(0, index).unwrap();
        let slot = self.geometry.place_of(offset).unwrap().header;
        rustix::io::pwrite(&self.fd, bytes, offset).unwrap();
        self.put(slot + pool::slot::GENERATION, generation);
        self.put(slot + pool::slot::STATE, pool::COMMITTED);
        SlotRef { offset, generation }
    }

    /// Begins another filling of slot `index`, as a sidecar does when it uses a slot again.
    pub(crate) fn refill(&self, index: u32, generation: u64, bytes: &[u8]) -> SlotRef {
        let slot = self.geometry.place_of(self.geometry.offset(0, index).unwrap()).unwrap().header;
        self.put(slot + pool::slot::STATE, pool::FILLING);
        self.put(slot + pool::slot::GENERATION, generation);
        self.commit(index, generation, bytes)
    }

    /// The filling of slot `index`.
    pub(crate) fn generation(&self, index: u32) -> u64 {
        let slot = self.geometry.place_of(self.geometry.offset(0, index).unwrap()).unwrap().header;
        let mut word = [0; 8];
        assert_eq!(rustix::io::pread(&self.fd, &mut word, slot + pool::slot::GENERATION), Ok(8));
        u64::from_le_bytes(word)
    }

    /// Sets the state of slot `index`.
    pub(crate) fn put_state(&self, index: u32, state: u64) {
        let slot = self.geometry.place_of(self.geometry.offset(0, index).unwrap()).unwrap().header;
        self.put(slot + pool::slot::STATE, state);
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub(crate) fn put(&self, offset: u64, word: u64) {
        assert_eq!(rustix::io::pwrite(&self.fd, &word.to_le_bytes(), offset), Ok(8));
    }
}
