//! A rank of one engine over host memory, for tests: its KV memory, its session, its plans.

use std::os::fd::OwnedFd;

use connector_shim::core::plan::Plan;
use connector_shim::error::ShimError;
use connector_shim::worker::{EndedLoad, RankClient, RegionMemory, WorkerSetup};
use rustix::fs::MemfdFlags;
use shm_protocol::handshake::{self, BlockRegion, Copier};
use shm_protocol::pool::SlotRef;

use super::{Peer, Served, eventually, session};

pub(crate) const BLOCKS: u32 = 8;
pub(crate) const BLOCK_BYTES: u64 = 2 * LAYER_BYTES;
pub(crate) const EPOCH: u64 = 9;
const LAYER_BYTES: u64 = 300;
const UNTOUCHED: u8 = 0xee;

/// KV memory of two layers in one descriptor.
pub(crate) struct Kv(OwnedFd);

impl Kv {
    pub(crate) fn new() -> Self {
        let fd = rustix::fs::memfd_create("test-kv", MemfdFlags::CLOEXEC).unwrap();
        let bytes = vec![UNTOUCHED; (BLOCK_BYTES * u64::from(BLOCKS)) as usize];
        assert_eq!(rustix::io::pwrite(&fd, &bytes, 0), Ok(bytes.len()));
        Self(fd)
    }

    pub(crate) fn block(&self, block: u32) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        for (layer, half) in (0..).zip(bytes.chunks_exact_mut(LAYER_BYTES as usize)) {
            let at = region(layer).offset + u64::from(block) * LAYER_BYTES;
            assert_eq!(rustix::io::pread(&self.0, &mut *half, at), Ok(half.len()));
        }
        bytes
    }

    pub(crate) fn fill(&self, block: u32, bytes: &[u8]) {
        for (layer, half) in (0..).zip(bytes.chunks_exact(LAYER_BYTES as usize)) {
            let at = region(layer).offset + u64::from(block) * LAYER_BYTES;
            assert_eq!(rustix::io::pwrite(&self.0, half, at), Ok(half.len()));
        }
    }

    pub(crate) fn is_untouched(&self, block: u32) -> bool {
        self.block(block).iter().all(|byte| *byte == UNTOUCHED)
    }
}

fn region(layer: u64) -> BlockRegion {
    let offset = layer * LAYER_BYTES * u64::from(BLOCKS);
    BlockRegion { fd: 0, offset, stride: LAYER_BYTES, bytes: LAYER_BYTES }
}

pub(crate) fn options(peer: &Peer, kv: &Kv, copy: Copier) -> WorkerSetup {
    let worker = handshake::WorkerHello {
        rank: 0,
        shard: 0,
        shards: 1,
        blocks: BLOCKS,
        regions: vec![region(0), region(1)],
        copy,
        facts: super::facts(),
        ..handshake::WorkerHello::default()
    };
    let memory = RegionMemory::Host(vec![kv.0.try_clone().unwrap()]);
    WorkerSetup {
        socket: peer.socket(),
        engine: "engine".into(),
        world_size: 1,
        worker,
        memory,
        staged: false,
        groups: None,
    }
}

pub(crate) fn connected(copy: Copier) -> (Peer, Kv, RankClient, Served) {
    connected_with(copy, |_| ())
}

/// A worker with a connection to a scripted sidecar, after `change` to the options of [`options`].
pub(crate) fn connected_with(
    copy: Copier,
    change: impl Fn(&mut WorkerSetup),
) -> (Peer, Kv, RankClient, Served) {
    let (peer, kv) = (Peer::new(EPOCH), Kv::new());
    let (worker, served) = session(|| {
        let mut options = options(&peer, &kv, copy);
        change(&mut options);
        let served = peer.serve(BLOCK_BYTES * u64::from(options.worker.shards));
        let worker = RankClient::new(options).unwrap();
        match worker.is_connected() {
            true => Ok((worker, served.join().unwrap())),
            false => Err(format!("{:?}", worker.take_notices())),
        }
    });
    (peer, kv, worker, served)
}

/// Returns the error of a new worker. A worker whose handshake timed out is made without an error: `Err` has
/// its notices.
pub(crate) fn refusal(options: WorkerSetup) -> Result<ShimError, String> {
    match RankClient::new(options) {
        Ok(worker) => Err(format!("{:?}", worker.take_notices())),
        Err(error) => Ok(error),
    }
}

/// Ended loads, at least `count` of them.
pub(crate) fn ended(worker: &mut RankClient, count: usize) -> Vec<EndedLoad> {
    let mut ended = Vec::new();
    eventually("end of loads", || {
        ended.extend(worker.finished());
        ended.len() >= count
    });
    ended
}

/// The bytes of a block with key `seed`.
pub(crate) fn content(seed: u64) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|at| (at.wrapping_mul(31) ^ seed.wrapping_mul(0x9e37_79b9)) as u8).collect()
}

pub(crate) fn plan(op: u64, flags: u8, blocks: &[(u32, SlotRef)]) -> Plan {
    Plan { op, epoch: EPOCH, namespace: super::namespace().words()[0], flags, blocks: blocks.to_vec() }
}
