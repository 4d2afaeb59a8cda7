//! A hostile peer: its ring cursors, session memories and socket records are refused without harm.

use std::cell::Cell;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use shm_protocol::handshake::{DESCRIPTORS_MAX, RECORD_BYTES_MAX};
use shm_protocol::key::BlockHash;
use shm_protocol::layout::{self, header};
use shm_protocol::message::{Outcome, Slot, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::region::{Access, Region};
use shm_protocol::ring::{Consumer, Producer, RingMemory};
use shm_protocol::session::{Ring, SessionError, SessionMemory};
use shm_protocol::source::Source;
use shm_protocol::{PROTOCOL_VERSION, transport};

// === rings ===

const CAPACITY: u32 = 8;

/// A ring whose cursors the test sets at will. A slot outside it panics.
struct HostileRing {
    tail: Cell<u32>,
    head: Cell<u32>,
    slots: Cell<[u64; CAPACITY as usize]>,
}

impl HostileRing {
    fn new() -> Self {
        Self { tail: Cell::new(0), head: Cell::new(0), slots: Cell::new([0; CAPACITY as usize]) }
    }
}

impl RingMemory for &HostileRing {
    fn capacity(&self) -> u32 {
        CAPACITY
    }
    fn load_tail(&self) -> u32 {
        self.tail.get()
    }
    fn store_tail(&self, tail: u32) {
        self.tail.set(tail);
    }
    fn load_head(&self) -> u32 {
        self.head.get()
    }
    fn store_head(&self, head: u32) {
        self.head.set(head);
    }
    fn read_slot(&self, index: u32) -> Slot {
        [self.slots.get()[index as usize], 0, 0, 0, 0, 0, 0, 0]
    }
    fn write_slot(&self, index: u32, slot: &Slot) {
        let mut slots = self.slots.get();
        slots[index as usize] = slot[0];
        self.slots.set(slots);
    }
}

/// Values near the cursors, and any others.
fn cursors() -> impl Strategy<Value = u32> {
    prop_oneof![0..2 * CAPACITY, (u32::MAX - CAPACITY)..=u32::MAX, any::<u32>()]
}

proptest! {
    #[test]
    fn a_consumer_follows_only_possible_tails(tails in proptest::collection::vec(cursors(), 1..20)) {
        let ring = HostileRing::new();
        let mut consumer = Consumer::new(&ring);
        let (mut head, mut tail) = (0_u32, 0_u32);
        for claimed in tails {
            ring.tail.set(claimed);
            let possible = claimed.wrapping_sub(head) <= CAPACITY && claimed.wrapping_sub(head) >= tail.wrapping_sub(head);
            prop_assert_eq!(consumer.ready().is_ok(), possible);
            if possible {
                tail = claimed;
            }
            // One slot a turn, so slots are left over when the next cursor is judged.
            if consumer.pop().is_some() {
                head = head.wrapping_add(1);
            }
            prop_assert!(tail.wrapping_sub(head) <= CAPACITY);
            consumer.release();
            prop_assert_eq!(ring.head.get(), head);
        }
    }

    #[test]
    fn a_producer_follows_only_possible_heads(turns in proptest::collection::vec((cursors(), 0..4_u32), 1..20)) {
        let ring = HostileRing::new();
        let mut producer = Producer::new(&ring);
        let (mut head, mut published) = (0_u32, 0_u32);
        for (claimed, pushes) in turns {
            ring.head.set(claimed);
            let possible = claimed.wrapping_sub(head) <= published.wrapping_sub(head);
            prop_assert_eq!(producer.free().is_ok(), possible);
            if possible {
                head = claimed;
            }
            ring.head.set(head);
            for _ in 0..pushes {
                if producer.has_room(0).unwrap() {
                    producer.push(&[1, 0, 0, 0, 0, 0, 0, 0]);
                }
            }
            producer.publish();
            published = producer.sequence();
            prop_assert!(published.wrapping_sub(head) <= CAPACITY, "nothing unread is overwritten");
        }
    }
}

/// Cursors are modulo 2^32: an honest pair goes round the ring, slot by slot, and reserved slots stay free.
#[test]
fn honest_cursors_go_round_and_leave_the_reserve() {
    let ring = HostileRing::new();
    let (mut producer, mut consumer) = (Producer::new(&ring), Consumer::new(&ring));
    let mut received = 0;
    for number in 0..1000_u64 {
        while producer.has_room(2).unwrap() {
            producer.push(&[number, 0, 0, 0, 0, 0, 0, 0]);
        }
        assert_eq!(producer.free(), Ok(2));
        assert!(producer.publish() && !producer.publish(), "published once");
        while consumer.ready().unwrap() > 0 {
            assert_eq!(consumer.pop().expect("a ready slot")[0], number);
            received += 1;
        }
        consumer.release();
    }
    assert_eq!(received, 6000);
}

#[test]
fn a_cursor_error_names_the_numbers() {
    let ring = HostileRing::new();
    ring.tail.set(77);
    let text = Consumer::new(&ring).ready().unwrap_err().to_string();
    assert!(text.contains("77") && text.contains('8'), "{text}");
}

// === session memory ===

fn memfd(bytes: usize, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// A well-formed session memory with these values in its magic and version words.
fn session_like(magic: u64, version: u32) -> OwnedFd {
    let fd = memfd(layout::SESSION_BYTES, SealFlags::SHRINK);
    let region = Region::map(fd.as_fd(), layout::SESSION_BYTES, Access::ReadWrite).unwrap();
    region.word64(header::MAGIC).store(magic, Ordering::Relaxed);
    region.word32(header::VERSION).store(version, Ordering::Release);
    fd
}

#[test]
fn a_session_memory_of_another_size_is_refused() {
    for bytes in [0, 4096, layout::SESSION_BYTES - 1, layout::SESSION_BYTES + 4096] {
        let refused = SessionMemory::open(PROTOCOL_VERSION, memfd(bytes, SealFlags::SHRINK)).unwrap_err();
        assert!(matches!(refused, SessionError::Malformed("its size differs")), "{bytes}: {refused}");
    }
}

#[test]
fn a_session_memory_that_could_shrink_is_refused() {
    let fd = memfd(layout::SESSION_BYTES, SealFlags::GROW);
    assert!(
        matches!(SessionMemory::open(PROTOCOL_VERSION, fd), Err(SessionError::Malformed(what)) if what.contains("sealed"))
    );
}

#[test]
fn another_kind_of_descriptor_is_refused() {
    let (_, pipe) = rustix::pipe::pipe().unwrap();
    assert!(SessionMemory::open(PROTOCOL_VERSION, pipe).is_err());
}

#[test]
fn a_session_memory_of_another_magic_or_version_is_refused() {
    assert!(
        SessionMemory::open(PROTOCOL_VERSION, session_like(layout::MAGIC, PROTOCOL_VERSION)).is_ok(),
        "the control"
    );
    let magic = SessionMemory::open(PROTOCOL_VERSION, session_like(layout::MAGIC ^ 1, PROTOCOL_VERSION));
    assert!(matches!(magic, Err(SessionError::Malformed("its first word differs"))));
    for theirs in [0, 1, PROTOCOL_VERSION + 1, u32::MAX] {
        let version = SessionMemory::open(PROTOCOL_VERSION, session_like(layout::MAGIC, theirs)).unwrap_err();
        assert!(
            matches!(version, SessionError::Version { found, agreed: PROTOCOL_VERSION } if found == theirs)
        );
        assert!(version.to_string().contains(&theirs.to_string()));
    }
}

#[test]
fn what_the_sidecar_makes_the_engine_opens_and_neither_can_resize() {
    let (fd, sidecar) = SessionMemory::create(PROTOCOL_VERSION, 0xe90c, 5).unwrap();
    let engine = SessionMemory::open(PROTOCOL_VERSION, &fd).unwrap();
    assert_eq!(engine.region().word64(header::EPOCH).load(Ordering::Relaxed), 0xe90c);
    assert_eq!(engine.region().word64(header::SESSION).load(Ordering::Relaxed), 5);
    for bytes in [0, layout::SESSION_BYTES * 2] {
        assert_eq!(rustix::fs::ftruncate(&fd, bytes as u64), Err(Errno::PERM));
    }
    assert_eq!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));

    let hash = BlockHash(std::array::from_fn(|i| i as u8));
    engine.write_key(3, 63, &hash);
    let mut keys = Vec::new();
    sidecar.read_keys(3, 62, 2, &mut keys);
    assert_eq!(keys, [BlockHash([0; 32]), hash]);
    let last = layout::CHUNKS as u32 - 1;
    let found = (SlotRef { offset: 1 << 40, generation: 9 }, Source::Peer);
    sidecar.write_refs(last, 63, 1, &mut std::iter::once(found));
    assert_eq!(engine.read_ref(last, 63), SlotRef { offset: 1 << 40, generation: 9 });
    assert_eq!(engine.read_source(last, 63), Source::Peer);
    for (step, block) in (10..20).enumerate() {
        engine.write_block_id((layout::BLOCK_IDS as u32 - 5).wrapping_add(step as u32), block);
    }
    let mut blocks = Vec::new();
    sidecar.read_block_ids(layout::BLOCK_IDS as u32 - 5, 10, &mut blocks);
    assert_eq!(blocks, (10..20).collect::<Vec<_>>(), "the circle goes round");
}

#[test]
fn an_outcome_is_only_its_own_operations() {
    let (fd, sidecar) = SessionMemory::create(PROTOCOL_VERSION, 1, 1).unwrap();
    let engine = SessionMemory::open(PROTOCOL_VERSION, &fd).unwrap();
    let op = (1_u64 << 32) + 7;
    assert_eq!(engine.load_outcome(op), None, "nothing was stored yet");
    let outcome = Outcome { op: op as u32, value: 12, status: Status::Ok };
    sidecar.store_outcome(op, outcome);
    assert_eq!(engine.load_outcome(op), Some(outcome));
    assert_eq!(engine.load_outcome(op + layout::OPERATIONS as u64), None, "the same word, a later operation");
}

proptest! {
    #[test]
    fn any_cursor_in_a_session_memory_is_judged(tail in any::<u32>(), head in any::<u32>()) {
        let (_fd, memory) = SessionMemory::create(PROTOCOL_VERSION, 1, 1).unwrap();
        memory.region().word32(header::SUBMISSION_TAIL).store(tail, Ordering::Relaxed);
        memory.region().word32(header::COMPLETION_HEAD).store(head, Ordering::Relaxed);
        let mut consumer = Consumer::new(memory.ring(Ring::Submission));
        prop_assert_eq!(consumer.ready().is_ok(), tail <= layout::SUBMISSION_SLOTS as u32);
        while consumer.pop().is_some() {}
        prop_assert_eq!(Producer::new(memory.ring(Ring::Completion)).free().is_ok(), head == 0);
    }
}

// === socket ===

/// Two ends of a handshake socket, made by the product's own listen, connect and accept.
fn socket_pair() -> (OwnedFd, OwnedFd) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("pillion-hostile-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let path: PathBuf = std::env::temp_dir().join(name);
    let listener = transport::listen(&path).unwrap();
    let client = transport::connect(&path, Duration::from_secs(5)).unwrap();
    let server = transport::accept(&listener).unwrap();
    std::fs::remove_file(path).unwrap();
    (client, server)
}

/// Sends without the product's own limits.
fn send_raw(socket: &OwnedFd, record: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    rustix::net::sendmsg(socket, &[IoSlice::new(record)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn records_and_descriptors_arrive_whole_up_to_the_limits() {
    let (client, server) = socket_pair();
    let record = vec![7; RECORD_BYTES_MAX];
    let descriptors = vec![client.as_fd(); DESCRIPTORS_MAX];
    transport::send(&client, &record, &descriptors).unwrap();
    let (received, received_descriptors) = transport::receive(&server).unwrap();
    assert!(received == record && received_descriptors.len() == DESCRIPTORS_MAX);
    for fd in received_descriptors {
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}

#[test]
fn more_than_the_limits_is_not_sent() {
    let (client, _server) = socket_pair();
    assert_eq!(transport::send(&client, &vec![0; RECORD_BYTES_MAX + 1], &[]), Err(Errno::MSGSIZE));
    let descriptors = vec![client.as_fd(); DESCRIPTORS_MAX + 1];
    assert_eq!(transport::send(&client, b"record", &descriptors), Err(Errno::TOOBIG));
}

#[test]
fn a_record_too_long_is_refused_and_the_next_one_read() {
    let (client, server) = socket_pair();
    send_raw(&client, &vec![0; RECORD_BYTES_MAX + 1], &[client.as_fd()]);
    assert_eq!(transport::receive(&server).unwrap_err(), Errno::MSGSIZE);
    transport::send(&client, b"next", &[]).unwrap();
    assert_eq!(transport::receive(&server).unwrap().0, b"next");
}

#[test]
fn too_many_descriptors_are_refused() {
    for count in [DESCRIPTORS_MAX + 1, DESCRIPTORS_MAX + 2, DESCRIPTORS_MAX + 3, 250] {
        let (client, server) = socket_pair();
        send_raw(&client, b"record", &vec![client.as_fd(); count]);
        assert_eq!(transport::receive(&server).unwrap_err(), Errno::MSGSIZE, "{count} descriptors");
    }
}

/// Alone in its process (tests of one binary share descriptors): the child runs this test only.
#[test]
fn refused_descriptors_are_closed() {
    const ALONE: &str = "PILLION_TEST_ALONE";
    if std::env::vars().all(|(name, _)| name != ALONE) {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "refused_descriptors_are_closed", "--test-threads=1"]).env(ALONE, "1");
        assert!(child.status().unwrap().success());
        return;
    }
    let (client, server) = socket_pair();
    let before = open_descriptors();
    send_raw(&client, b"record", &vec![client.as_fd(); 250]);
    assert_eq!(transport::receive(&server).unwrap_err(), Errno::MSGSIZE);
    assert_eq!(open_descriptors(), before);
}

#[test]
fn a_hang_up_is_an_empty_record() {
    let (client, server) = socket_pair();
    assert_eq!(transport::receive(&server).unwrap_err(), Errno::AGAIN, "nothing was sent yet");
    drop(client);
    let (record, descriptors) = transport::receive(&server).unwrap();
    assert!(record.is_empty() && descriptors.is_empty());
}
