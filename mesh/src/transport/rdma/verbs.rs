//! NICs, the pool's registration with them, and queue pairs to read from a peer's pool. libibverbs is opened
//! at the first use; a machine without it has no NICs.

#![allow(unsafe_code, reason = "verbs take addresses; each block says why they are good")]

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use rdma_mummy_sys::{ibv_ack_cq_events, ibv_cq, ibv_get_cq_event, ibv_req_notify_cq};
use rustix::process::{Resource, getrlimit};
use shm_protocol::blocks::Blocks;
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::{AddressHandleAttribute, Gid, GidEntry, GidType};
use sideway::ibverbs::completion::{
    BasicCompletionQueue, CompletionChannel, CompletionQueue, GenericCompletionQueue,
};
use sideway::ibverbs::device::{Device, DeviceInfo, DeviceList};
use sideway::ibverbs::device_context::{DeviceContext, LinkLayer, Mtu, PortAttr, PortState};
use sideway::ibverbs::memory_region::{MemoryRegion, RegisterMemoryRegionErrorKind};
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{
    BasicQueuePair, PostSendError, PostSendGuard, QueuePair, QueuePairAttribute, QueuePairState,
    SetScatterGatherEntry, WorkRequestFlags,
};

use crate::Error;
use crate::transport::tcp::frame::lease::QueueEnd;

/// Maximum READs of a queue pair under way: 16 MiB in parts of 1 MiB, several times the content of a link of
/// 400 Gbit/s, and the most a NIC supports for one queue pair.
pub(super) const READS_MAX: usize = 16;
/// A lost packet is sent again after 4.1 us << 14, thus 67 ms, this many times; seven would be without end.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 4;
const HOPS_MAX: u8 = 64;

/// A port of this machine, and the pool as registered with it.
pub(super) struct Nic {
    name: String,
    /// Its NUMA node, if known.
    pub(super) node: Option<u16>,
    context: Arc<DeviceContext>,
    domain: Arc<ProtectionDomain>,
    port: u8,
    lid: u16,
    mtu: Mtu,
    gid: GidEntry,
    /// READs of a queue pair under way at once: as the side being read, and as the reading side.
    reads_in: u8,
    reads_out: u8,
    pool: OnceLock<Pool>,
}

/// A registered pool. The region is dropped before the mapping it refers to.
struct Pool {
    region: Arc<MemoryRegion>,
    blocks: Blocks,
}

/// A queue pair, on the reading side or the side being read. After its drop the NIC touches no memory for it.
pub(super) struct Queue {
    nics: Arc<[Nic]>,
    nic: usize,
    /// `None` during the drop.
    pair: Option<BasicQueuePair>,
    completions: Arc<BasicCompletionQueue>,
    channel: Arc<CompletionChannel>,
    packet: u32,
}

/// The end of a READ.
pub(super) struct Completion {
    pub(super) read: u64,
    /// Status as in verbs: zero is success.
    pub(super) status: u32,
}

/// Opens these NICs. The error lists all NICs present if one of these is missing or unusable.
pub(super) fn open(names: &[String]) -> Result<Vec<Nic>, Error> {
    let wrong = |name: &str, problem: String, present: Vec<String>| Error::Nic {
        name: name.into(),
        problem,
        present: if present.is_empty() { "none".into() } else { present.join(", ") },
    };
    let first = names.first().map_or("", String::as_str);
    let list = DeviceList::new().map_err(|error| {
        let remedy = "install libibverbs1 and ibverbs-providers, and let this process see /dev/infiniband";
        wrong(first, format!("cannot be listed ({error}): {remedy}"), Vec::new())
    })?;
    let present = || list.iter().map(|device| described(&device)).collect();
    names
        .iter()
        .enumerate()
        .map(|(at, name)| {
            if names[..at].contains(name) {
                return Err(wrong(name, "is named twice".into(), present()));
            }
            let Some(device) = list.iter().find(|device| device.name() == *name) else {
                return Err(wrong(name, "does not exist".into(), present()));
            };
            Nic::open(&device).map_err(|problem| wrong(name, problem, present()))
        })
        .collect()
}

/// The name of a device, with its fault if it is unusable.
fn described(device: &Device<'_>) -> String {
    match Nic::open(device) {
        Ok(nic) => nic.name,
        Err(problem) => format!("{} (which {problem})", device.name()),
    }
}

fn other(error: impl std::error::Error) -> io::Error {
    let source = error.source().map_or_else(String::new, |source| format!(": {source}"));
    io::Error::other(format!("{error}{source}"))
}

// === impl Nic ===

impl Nic {
    fn open(device: &Device<'_>) -> Result<Self, String> {
        let name = device.name();
        let unusable = |error: io::Error| format!("cannot be opened ({error})");
        let context = device.open().map_err(|error| unusable(other(error)))?;
        let facts = context.query_device().map_err(|error| unusable(other(error)))?;
        let ports =
            (1..=facts.phys_port_cnt()).filter_map(|port| Some((port, context.query_port(port).ok()?)));
        let ports: Vec<_> = ports.collect();
        if ports.is_empty() {
            return Err("has no port".into());
        }
        let active = ports.iter().find(|(_, facts)| facts.port_state() == PortState::Active);
        let Some((port, attributes)) = active else {
            return Err("is down: bring its link up (`ip link set ... up`, a cable, a subnet manager)".into());
        };
        let gid = gid(&context, *port, attributes)?;
        let domain = context.alloc_pd().map_err(|error| unusable(other(error)))?;
        let reads = |most: i32| most.clamp(1, READS_MAX as i32) as u8;
        let node = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/device/numa_node"));
        Ok(Self {
            name,
            node: node.ok().and_then(|text| text.trim().parse().ok()),
            port: *port,
            lid: attributes.lid(),
            mtu: attributes.active_mtu(),
            gid,
            reads_in: reads(facts.max_qp_rd_atom()),
            reads_out: reads(facts.max_qp_init_rd_atom()),
            context,
            domain,
            pool: OnceLock::new(),
        })
    }

    /// Registers the pool, which pins it: seconds for each 100 GiB. At most once.
    pub(super) fn register(&self, blocks: &Blocks) -> Result<(), String> {
        let (bytes, access) = (blocks.len() as usize, AccessFlags::LocalWrite | AccessFlags::RemoteRead);
        let base = blocks.address(0, bytes).expect("a pool begins at its begin").as_ptr() as usize;
        // SAFETY: the mapping has these bytes and stays until `blocks`, kept beside the region, is dropped
        // after it; every reader or writer of them through the NIC owns their slots, by the contract of
        // `Blocks`.
        let registered = unsafe { self.domain.reg_mr(base, bytes, access) };
        let region = registered.map_err(|error| {
            let source = match &error.0 {
                RegisterMemoryRegionErrorKind::Ibverbs(source) => source.to_string(),
                _ => error.to_string(),
            };
            let limit = getrlimit(Resource::Memlock).current;
            let limit = limit.map_or_else(|| "not limited".into(), |limit| format!("limited to {limit}"));
            format!(
                "{} cannot register the pool of {bytes} bytes ({source}); this process's locked memory is {limit} \
                 (RLIMIT_MEMLOCK): raise that above the pool's bytes (`ulimit -l unlimited`, LimitMEMLOCK=infinity, or \
                 the capability IPC_LOCK for the container), or make the pool smaller than the memory that is free",
                self.name
            )
        })?;
        let _ = self.pool.set(Pool { region, blocks: blocks.clone() });
        Ok(())
    }

    /// The remote key of the registered pool.
    pub(super) fn key(&self) -> u32 {
        self.pool.get().expect("a NIC that has the pool").region.rkey()
    }
}

/// The source address of packets: on Ethernet a RoCE v2 address, IPv4 before IPv6 before a link-local one.
fn gid(context: &Arc<DeviceContext>, port: u8, attributes: &PortAttr) -> Result<GidEntry, String> {
    let table = context.query_gid_table().map_err(|error| format!("has no addresses ({error})"))?;
    let ethernet = attributes.link_layer() == LinkLayer::Ethernet;
    let usable = |entry: &GidEntry| {
        entry.port_num() == u32::from(port) && (!ethernet || matches!(entry.gid_type(), GidType::RoceV2))
    };
    let rank = |entry: &GidEntry| {
        let gid = entry.gid();
        let mapped = gid.raw[..10] == [0; 10] && gid.raw[10..12] == [0xff; 2];
        (!mapped, gid.is_unicast_link_local(), entry.gid_index())
    };
    let best = table.into_iter().filter(usable).min_by_key(rank);
    best.ok_or_else(|| "has no RoCE v2 address: give its network interface an IP address".into())
}

// === impl Queue ===

impl Queue {
    /// A queue pair of a NIC with a registered pool, not connected yet.
    pub(super) fn new(nics: &Arc<[Nic]>, nic: usize) -> io::Result<Self> {
        let own = &nics[nic];
        let channel = own.context.create_comp_channel().map_err(other)?;
        channel.set_nonblocking(true)?;
        let mut builder = own.context.create_cq_builder();
        builder.setup_cqe(2 * READS_MAX as u32).setup_comp_channel(&channel, 0);
        let completions = builder.build().map_err(other)?;
        let shared = GenericCompletionQueue::from(Arc::clone(&completions));
        let mut builder = own.domain.create_qp_builder();
        builder.setup_send_cq(shared.clone()).setup_recv_cq(shared);
        builder.setup_max_send_wr(READS_MAX as u32).setup_max_recv_wr(1);
        builder.setup_max_send_sge(1).setup_max_recv_sge(1);
        let mut pair = builder.build().map_err(other)?;
        let mut init = QueuePairAttribute::new();
        init.setup_state(QueuePairState::Init).setup_pkey_index(0).setup_port(own.port);
        init.setup_access_flags(AccessFlags::LocalWrite | AccessFlags::RemoteRead);
        pair.modify(&init).map_err(other)?;
        // Random, so a packet of an earlier connection is not accepted in this one.
        let packet = RandomState::new().build_hasher().finish() as u32 & 0xff_ffff;
        Ok(Self { nics: Arc::clone(nics), nic, pair: Some(pair), completions, channel, packet })
    }

    /// The end for the peer to connect to.
    pub(super) fn end(&self) -> QueueEnd {
        let nic = self.nic();
        QueueEnd {
            number: self.pair.as_ref().expect("until it is dropped").qp_number(),
            packet: self.packet,
            lid: nic.lid,
            mtu: nic.mtu as u8,
            reads: nic.reads_in,
            gid: nic.gid.gid().raw,
        }
    }

    /// Lets the queue pair at `end` read from this one.
    pub(super) fn lend(&mut self, end: &QueueEnd) -> io::Result<()> {
        let nic = self.nic();
        let mut path = AddressHandleAttribute::new();
        path.setup_dest_lid(end.lid).setup_port(nic.port).setup_service_level(0);
        path.setup_grh_src_gid_index(nic.gid.gid_index() as u8).setup_grh_hop_limit(HOPS_MAX);
        path.setup_grh_dest_gid(&Gid { raw: end.gid });
        let mut ready = QueuePairAttribute::new();
        ready.setup_state(QueuePairState::ReadyToReceive).setup_dest_qp_num(end.number);
        ready.setup_path_mtu(nic.mtu.min(Mtu::from(u32::from(end.mtu)))).setup_rq_psn(end.packet);
        ready.setup_max_dest_read_atomic(nic.reads_in).setup_min_rnr_timer(12).setup_address_vector(&path);
        self.pair().modify(&ready).map_err(other)
    }

    /// Lets this queue pair read from the one at `end`, already prepared by `lend`.
    pub(super) fn connect(&mut self, end: &QueueEnd) -> io::Result<()> {
        self.lend(end)?;
        let reads = self.nic().reads_out.min(end.reads);
        let mut ready = QueuePairAttribute::new();
        ready.setup_state(QueuePairState::ReadyToSend).setup_sq_psn(self.packet).setup_max_read_atomic(reads);
        ready.setup_timeout(TIMEOUT).setup_retry_cnt(RETRIES).setup_rnr_retry(RETRIES);
        self.pair().modify(&ready).map_err(other)
    }

    /// Begins a READ of `len` bytes at the peer's `address` into the pool at `offset`. The range belongs to
    /// the NIC until the READ has ended or this is dropped. At most [`READS_MAX`] are under way.
    pub(super) fn read(
        &mut self,
        number: u64,
        offset: u64,
        len: u32,
        key: u32,
        address: u64,
    ) -> io::Result<()> {
        let pool = self.nic().pool.get().expect("a queue pair of a NIC that has the pool");
        let into = pool.blocks.address(offset, len as usize).expect("checked when posted").as_ptr() as u64;
        let local = pool.region.lkey();
        let mut guard = self.pair().start_post_send();
        let read = guard.construct_wr(number, WorkRequestFlags::Signaled).setup_read(key, address);
        // SAFETY: the range lies in the registered pool, which `self` keeps, and is the caller's own by the
        // contract of `Blocks` until the READ has ended; the caller waits for its end, or drops `self`, which
        // ends it.
        unsafe { read.setup_sge(local, into, len) };
        guard.post().map_err(|error| match error {
            PostSendError::InvalidWorkRequest(error)
            | PostSendError::NotEnoughResources(error)
            | PostSendError::InvalidQueuePair(error)
            | PostSendError::Ibverbs(error) => error,
            error => other(error),
        })
    }

    /// Takes all completions.
    pub(super) fn reap(&self, into: &mut Vec<Completion>) {
        // Read to the end: a poller drops the completions left in it.
        for completion in self.completions.start_poll().into_iter().flatten() {
            into.push(Completion { read: completion.wr_id(), status: completion.status() });
        }
    }

    /// Makes the next completion readable at the descriptor. Completions from before are to be taken once
    /// more.
    pub(super) fn arm(&self) -> io::Result<()> {
        // SAFETY: the handle is used while `self` keeps the queue.
        let queue = unsafe { self.completions.cq() };
        // SAFETY: a live completion queue, which any thread may arm.
        match unsafe { ibv_req_notify_cq(queue.as_ptr(), 0) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Discards events of completions.
    pub(super) fn disarm(&self) {
        // SAFETY: the handle is used while `self` keeps the channel.
        let channel = unsafe { self.channel.comp_channel() };
        let mut queue: *mut ibv_cq = std::ptr::null_mut();
        let mut context = std::ptr::null_mut();
        // SAFETY: a live channel that does not block, and two words of ours to write to.
        while unsafe { ibv_get_cq_event(channel.as_ptr(), &raw mut queue, &raw mut context) } == 0 {
            // SAFETY: the event names the one completion queue of this channel, kept by `self`.
            unsafe { ibv_ack_cq_events(queue, 1) };
        }
    }

    fn nic(&self) -> &Nic {
        &self.nics[self.nic]
    }

    fn pair(&mut self) -> &mut BasicQueuePair {
        self.pair.as_mut().expect("until it is dropped")
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel keeps its descriptor open, and `self` the channel.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_raw_fd()) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let pair = self.pair.take();
        // Slots are given away on the promise of no further access by a NIC. If a queue pair cannot be
        // destroyed (sideway panics then), only the end of the process keeps the promise.
        if catch_unwind(AssertUnwindSafe(|| drop(pair))).is_err() {
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests;
