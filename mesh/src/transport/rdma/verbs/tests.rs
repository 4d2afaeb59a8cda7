//! Properties of a NIC needed by the transport, tested at the two ends of a wire. Skipped with a message
//! without one (`make test-rdma` makes one).

use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use rdma_mummy_sys::ibv_sge;
use rdma_mummy_sys::ibv_wc_status as wc;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::MemfdFlags;
use shm_protocol::region::{Access, Region};

use super::*;

const BYTES: usize = 4 << 20;

/// Set if the devices must be present.
const MUST: &str = "PILLION_TEST_RDMA";

/// A node with a pool of its own; each byte depends on its position.
struct End {
    nics: Arc<[Nic]>,
    blocks: Blocks,
}

impl End {
    fn on(name: &str, seed: usize) -> Self {
        let blocks = pool();
        let bytes: Vec<u8> = (0..BYTES).map(|at| byte(at, seed)).collect();
        assert!(blocks.fill(0, &bytes));
        let nics: Arc<[Nic]> = open(&[name.to_owned()]).unwrap().into();
        nics[0].register(&blocks).unwrap();
        Self { nics, blocks }
    }

    fn queue(&self) -> Queue {
        Queue::new(&self.nics, 0).unwrap()
    }

    fn key(&self) -> u32 {
        self.nics[0].key()
    }

    fn address(&self, offset: u64) -> u64 {
        self.blocks.address(offset, 1).unwrap().as_ptr() as u64
    }

    fn bytes(&self, offset: u64, len: usize) -> &[u8] {
        self.blocks.bytes(offset, len).unwrap()
    }
}

fn pool() -> Blocks {
    let fd = rustix::fs::memfd_create("verbs", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, BYTES as u64).unwrap();
    Blocks::new(Arc::new(Region::map(fd.as_fd(), BYTES, Access::ReadWrite).unwrap()))
}

fn byte(at: usize, seed: usize) -> u8 {
    (at.wrapping_mul(0x9e37_79b9).wrapping_add(seed) >> 13) as u8
}

fn ends() -> Option<(End, End)> {
    let present = ["rxe0", "rxe1"].iter().all(|name| Path::new("/sys/class/infiniband").join(name).exists());
    if !present {
        assert!(std::env::var_os(MUST).is_none(), "{MUST} is set, but there are no devices rxe0 and rxe1");
        let text = "SKIPPED, no RDMA devices rxe0 and rxe1 here: `make test-rdma` runs this test\n";
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        return None;
    }
    Some((End::on("rxe0", 1), End::on("rxe1", 2)))
}

/// A queue pair of `one`, reading from one of `other`.
fn connected(one: &End, other: &End) -> (Queue, Queue) {
    let (mut reads, mut lends) = (one.queue(), other.queue());
    lends.lend(&reads.end()).unwrap();
    reads.connect(&lends.end()).unwrap();
    (reads, lends)
}

/// Waits for the next completion, as the transport does.
fn next(queue: &Queue) -> Completion {
    let mut completions = Vec::new();
    loop {
        queue.arm().unwrap();
        queue.reap(&mut completions);
        if let Some(completion) = completions.pop() {
            assert!(completions.is_empty(), "one was awaited");
            return completion;
        }
        let mut fds = [PollFd::new(queue, PollFlags::IN)];
        let limit = Duration::from_secs(60).try_into().unwrap();
        assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1, "it ends");
        queue.disarm();
    }
}

fn status(queue: &Queue) -> u32 {
    next(queue).status
}

#[test]
fn a_read_brings_the_bytes_and_no_others() {
    let Some((one, other)) = ends() else { return };
    let (mut reads, _lends) = connected(&one, &other);
    for (number, (from, into, len)) in
        [(0, 0, 1), (4095, 7, 4098), (100, 1 << 20, 1 << 20)].into_iter().enumerate()
    {
        let before: Vec<u8> = one.bytes(0, BYTES).to_vec();
        reads.read(number as u64, into, len, other.key(), other.address(from)).unwrap();
        let completion = next(&reads);
        assert_eq!((completion.read, completion.status), (number as u64, 0));
        let (into, end) = (into as usize, into as usize + len as usize);
        let after = one.bytes(0, BYTES);
        assert!(after[into..end] == *other.bytes(from, len as usize), "the bytes");
        assert!(after[..into] == before[..into] && after[end..] == before[end..], "no others");
    }
    // The maximum under way, in order.
    for number in 0..READS_MAX as u64 {
        reads.read(number, number << 10, 1 << 10, other.key(), other.address(number << 11)).unwrap();
    }
    let mut completions = Vec::new();
    while completions.len() < READS_MAX {
        reads.reap(&mut completions);
        std::thread::yield_now();
    }
    let ended = completions.iter().map(|completion| (completion.read, completion.status));
    assert!(ended.eq((0..READS_MAX as u64).map(|number| (number, 0))));
}

#[test]
fn a_wrong_key_reads_nothing_and_ends_the_queue_pair() {
    let Some((one, other)) = ends() else { return };
    let (mut reads, _lends) = connected(&one, &other);
    let before = one.bytes(0, 4096).to_vec();
    reads.read(1, 0, 4096, other.key() ^ 0x5500, other.address(0)).unwrap();
    assert_eq!(status(&reads), wc::IBV_WC_REM_ACCESS_ERR);
    reads.read(2, 0, 4096, other.key(), other.address(0)).unwrap();
    assert_eq!(status(&reads), wc::IBV_WC_WR_FLUSH_ERR);
    // Beyond the pool's end.
    let (mut reads, _lends) = connected(&one, &other);
    reads.read(3, 0, 4096, other.key(), other.address(0) + BYTES as u64 - 4095).unwrap();
    assert_eq!(status(&reads), wc::IBV_WC_REM_ACCESS_ERR);
    assert!(one.bytes(0, 4096) == before);
}

#[test]
fn what_is_registered_no_more_cannot_be_read() {
    let Some((one, other)) = ends() else { return };
    let (mut reads, lends) = connected(&one, &other);
    // A second registration, of the same protection domain.
    let (blocks, access) = (pool(), AccessFlags::LocalWrite | AccessFlags::RemoteRead);
    let base = blocks.address(0, BYTES).unwrap().as_ptr() as usize;
    // SAFETY: `blocks` outlives the region; nobody else uses its bytes.
    let region = unsafe { lends.nic().domain.reg_mr(base, BYTES, access) }.unwrap();
    let key = region.rkey();
    reads.read(1, 0, 4096, key, base as u64).unwrap();
    assert_eq!(status(&reads), 0);
    drop(region);
    reads.read(2, 0, 4096, key, base as u64).unwrap();
    assert_eq!(status(&reads), wc::IBV_WC_REM_ACCESS_ERR);
}

#[test]
fn a_late_read_fails_once_the_owner_has_dropped_its_queue_pair() {
    let Some((one, other)) = ends() else { return };
    let (mut reads, lends) = connected(&one, &other);
    reads.read(1, 0, 4096, other.key(), other.address(0)).unwrap();
    assert_eq!(status(&reads), 0);
    // The lease ends. From now on the slot holds another content, which another peer may read.
    drop(lends);
    assert!(other.blocks.fill(0, &[0xa5; 4096]));
    let (mut others, _lends) = connected(&one, &other);
    reads.read(2, 8192, 4096, other.key(), other.address(0)).unwrap();
    assert_eq!(status(&reads), wc::IBV_WC_RETRY_EXC_ERR);
    assert!(one.bytes(8192, 4096).iter().zip(8192..).all(|(found, at)| *found == byte(at, 1)));
    others.read(3, 8192, 4096, other.key(), other.address(0)).unwrap();
    assert_eq!(status(&others), 0);
    assert!(one.bytes(8192, 4096) == [0xa5; 4096]);
}

#[test]
fn a_queue_pair_that_is_dropped_writes_nothing_any_more() {
    let Some((one, other)) = ends() else { return };
    for round in 0..20 {
        let (mut reads, _lends) = connected(&one, &other);
        for number in 0..4 {
            reads.read(number, 0, 1 << 20, other.key(), other.address(number << 10)).unwrap();
        }
        std::thread::sleep(Duration::from_millis(round));
        drop(reads);
        assert!(one.blocks.fill(0, &[0xa5; 1 << 20]));
        std::thread::sleep(Duration::from_millis(20));
        assert!(one.bytes(0, 1 << 20).iter().all(|byte| *byte == 0xa5), "round {round}");
    }
}

/// Operations not used by the transport yet, but required of the hardware: WRITE, WRITE with a word, gather
/// and scatter.
#[test]
fn writes_arrive_and_say_so() {
    let Some((one, other)) = ends() else { return };
    let (mut active, mut passive) = (one.queue(), other.queue());
    let mut writable = QueuePairAttribute::new();
    let access = AccessFlags::LocalWrite | AccessFlags::RemoteWrite | AccessFlags::RemoteRead;
    writable.setup_state(QueuePairState::Init).setup_pkey_index(0).setup_port(1).setup_access_flags(access);
    passive.pair().modify(&writable).unwrap();
    let target = pool();
    let base = target.address(0, BYTES).unwrap().as_ptr() as usize;
    // SAFETY: `target` outlives the region; nobody else uses its bytes.
    let region = unsafe { other.nics[0].domain.reg_mr(base, BYTES, access) }.unwrap();
    let mut receive = passive.pair().start_post_recv();
    receive.construct_wr(77);
    receive.post().unwrap();
    passive.lend(&active.end()).unwrap();
    active.connect(&passive.end()).unwrap();

    let local = one.nics[0].pool.get().unwrap().region.lkey();
    let piece = |offset, length| ibv_sge { addr: one.address(offset), length, lkey: local };
    let mut guard = active.pair().start_post_send();
    let write = guard.construct_wr(1, WorkRequestFlags::Signaled).setup_write(region.rkey(), base as u64);
    // SAFETY: the range lies in the registered pool, which nobody writes.
    unsafe { write.setup_sge(local, one.address(0), 1 << 20) };
    guard.post().unwrap();
    assert_eq!(status(&active), 0);
    assert!(target.bytes(0, 1 << 20).unwrap() == one.bytes(0, 1 << 20));

    let far = base as u64 + (2 << 20) + 3;
    let mut guard = active.pair().start_post_send();
    let write = guard.construct_wr(2, WorkRequestFlags::Signaled);
    let write = write.setup_write_imm(region.rkey(), far, 0xc0_ffee);
    // SAFETY: as above.
    unsafe { write.setup_sge(local, one.address(70_000), 9000) };
    guard.post().unwrap();
    assert_eq!(status(&active), 0);
    let mut arrived = None;
    while arrived.is_none() {
        let polled = passive.completions.start_poll().into_iter().flatten();
        polled.for_each(|word| arrived = Some((word.wr_id(), word.status(), word.imm_data())));
    }
    assert_eq!(arrived, Some((77, 0, 0xc0_ffee)));
    assert!(target.bytes((2 << 20) + 3, 9000).unwrap() == one.bytes(70_000, 9000));

    // Scattered into three places, beyond the one allowed by the queue pair: refused, nothing sent.
    let mut guard = active.pair().start_post_send();
    let read = guard.construct_wr(3, WorkRequestFlags::Signaled).setup_read(other.key(), other.address(0));
    // SAFETY: as above; the ranges are this test's own.
    unsafe { read.setup_sge_list(&[piece(0, 8), piece(64, 8), piece(128, 8)]) };
    assert!(guard.post().is_err());
}
