//! Streams with an unregistered pool; these tests need no NIC.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, channel};

use rustix::fs::MemfdFlags;
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use shm_protocol::region::{Access, Region};

use super::*;
use crate::transport::tcp::Security;
use crate::transport::tcp::frame::{AskFrame, Block, BlockStatus, HEAD_BYTES, Head, HelloFrame};
use crate::transport::{BootId, FetchDone, Grant, Label, NodeId};

const LONG: Duration = Duration::from_secs(30);
const BOOT: BootId = BootId(NonZeroU64::MIN);
/// The number of the other node on each side.
const PEER: PeerNumber = PeerNumber(1);
const POOL_BYTES: usize = 1 << 20;
const BLOCK_BYTES: usize = 300_000;
/// Offset of the block in the owner's pool, and of the slot it goes to.
const KEPT: u64 = 4096;
pub(super) const FREE: u64 = 512 << 10;

/// A node whose NICs have not registered its pool.
pub(super) struct Node {
    pub(super) tcp: Tcp,
    blocks: PoolBlocks,
    ups: Receiver<TransportEvent>,
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub(super) fn label() -> Label {
    let bytes = BLOCK_BYTES as u32;
    Label { namespace: NamespaceDigest([7; 16]), group: 0, hash: BlockHash([9; 32]), bytes }
}

fn content() -> Vec<u8> {
    (0..BLOCK_BYTES).map(|at| (at / 3) as u8).collect()
}

impl Node {
    pub(super) fn start(name: &str) -> Self {
        let fd = rustix::fs::memfd_create("rdma", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, POOL_BYTES as u64).unwrap();
        let region = Region::map(fd.as_fd(), POOL_BYTES, Access::ReadWrite).unwrap();
        let blocks = PoolBlocks::new(Arc::new(region));
        let (sender, ups) = channel();
        let config = tcp::TcpConfig::new(node(name), BOOT, Security::Plaintext);
        let up = Box::new(move |up| drop(sender.send(up)));
        let tcp = Tcp::with(Box::<Ways>::default(), config, blocks.clone(), up).unwrap();
        Self { tcp, blocks, ups }
    }

    fn join(&self, name: &str, address: SocketAddr) {
        self.tcp.add_peer(PEER, Peer { node: node(name), boot: Some(BOOT), address });
    }

    /// Waits for the ask, and grants its block.
    fn grant(&self) {
        assert!(self.blocks.fill(KEPT, &content()));
        let TransportEvent::Asked { ask, .. } = self.ups.recv_timeout(LONG).unwrap() else {
            panic!("nothing was asked")
        };
        let slot = SlotRef { offset: KEPT, generation: 1 };
        self.tcp.grant_slots(GrantedSlots { ask, slots: vec![Some(Grant { slot, checksum: None })] });
    }
}

/// The other end of a connection, written by hand.
struct Hand(TcpStream);

impl Hand {
    /// Greets as a member.
    fn greet(owner: &Node) -> Self {
        let mut hand = Self(TcpStream::connect(owner.tcp.listen_address()).unwrap());
        hand.0.set_read_timeout(Some(LONG)).unwrap();
        let wanted_node = node("owner");
        hand.say(&Frame::Hello(HelloFrame {
            node: node("reader"),
            boot: BOOT,
            wanted_node,
            wanted_boot: None,
        }));
        assert_eq!(hand.hear(), Frame::Welcome(BOOT));
        hand
    }

    fn say(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.append_to(&mut bytes);
        self.0.write_all(&bytes).unwrap();
    }

    fn hear(&mut self) -> Frame {
        let mut head = [0; HEAD_BYTES];
        self.0.read_exact(&mut head).unwrap();
        let head = Head::parse(&head).unwrap();
        let mut body = vec![0; head.body_bytes()];
        self.0.read_exact(&mut body).unwrap();
        head.decode_body(&body).unwrap()
    }

    fn ask(&mut self) {
        self.say(&Frame::Ask(AskFrame { ticket: 5, first: 0, labels: vec![label()] }));
    }
}

#[test]
fn blocks_follow_on_the_stream_where_the_pools_are_not_registered() {
    let (reader, owner) = (Node::start("reader"), Node::start("owner"));
    reader.join("owner", owner.tcp.listen_address());
    owner.join("reader", reader.tcp.listen_address());
    let blocks = vec![(label(), FREE)];
    reader.tcp.post_fetch(Fetch { ticket: 1, peer: PEER, blocks, deadline: LONG, standing: None });
    owner.grant();
    assert_eq!(reader.ups.recv_timeout(LONG).unwrap(), TransportEvent::Connected { peer: PEER, boot: BOOT });
    let end = reader.ups.recv_timeout(LONG).unwrap();
    assert!(matches!(end, TransportEvent::Done(FetchDone { ticket: 1, index: 0, result: Ok(_) })), "{end:?}");
    assert!(reader.blocks.bytes_at(FREE, BLOCK_BYTES).unwrap() == content());
}

#[test]
fn a_queue_pair_that_cannot_be_met_is_answered_by_blocks_on_the_stream() {
    let owner = Node::start("owner");
    owner.join("reader", owner.tcp.listen_address());
    let mut reader = Hand::greet(&owner);
    let end = QueueEnd { number: 1, packet: 2, lid: 0, mtu: 3, reads: 16, gid: [1; 16] };
    reader.say(&Frame::Queue(QueueOffer { pairs: 2, number: 0, nics: vec![None], nic: 0, end, key: 0 }));
    assert_eq!(reader.hear(), Frame::InStream);
    reader.ask();
    owner.grant();
    let Frame::Block(block) = reader.hear() else { panic!("no block") };
    let bytes = BLOCK_BYTES as u32;
    assert_eq!(
        block,
        Block { ticket: 5, index: 0, status: BlockStatus::Whole, bytes, checksum: block.checksum }
    );
    let mut came = vec![0; BLOCK_BYTES];
    reader.0.read_exact(&mut came).unwrap();
    assert!(came == content());
    // A peer that does not say first how its blocks come is hung up on.
    let mut wrong = Hand::greet(&owner);
    wrong.ask();
    assert_eq!(wrong.hear(), Frame::Refused(crate::transport::Refusal::Malformed));
}

/// A stream without end.
struct Stands;

impl ConnectedFetch for Stands {
    fn quiet(&mut self) -> bool {
        true
    }
    fn run_piece(&mut self, _: FetchPiece) -> Result<(), FetchFault> {
        Ok(())
    }
    fn hang_up(self: Box<Self>) -> Vec<FetchPiece> {
        Vec::new()
    }
}

#[test]
fn a_stream_is_made_anew_once_there_may_be_a_queue_pair() {
    let queues: Arc<OnceLock<QueueMaker>> = Arc::default();
    let until = |until| Meanwhile { stream: Box::new(Stands), queues: Arc::clone(&queues), until };
    let (mut over, mut fresh) = (until(read_clock()), until(read_clock() + LONG));
    assert!(over.quiet() && fresh.quiet(), "this side has not registered");
    let registered = QueueMaker { nics: Arc::new([]), qps_per_peer: 1, lease: LONG };
    assert!(queues.set(registered).is_ok());
    assert!(!over.quiet() && fresh.quiet());
}
