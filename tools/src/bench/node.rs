//! One end of the mesh's block path, without a sidecar: a server of blocks, or a reader with memory for them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use mesh::transport::{
    BootId, Fetch, Grant, GrantedSlots, Label, NodeId, Peer, PeerNumber, Transport, TransportEvent,
};
use shm_protocol::blocks::PoolBlocks;
use shm_protocol::key::NamespaceDigest;
use shm_protocol::pool::{SEGMENT_ALIGN, SlotRef};

use super::tier::make_key;
use super::{BenchError, memory};
use sidecar::system::clock::Clock;

const NAMESPACE: NamespaceDigest = NamespaceDigest([7; 16]);
/// A node has one life here.
pub const BOOT: BootId = BootId(NonZeroU64::MIN);
/// The other end's number, at both ends.
pub const PEER: PeerNumber = PeerNumber(1);
/// The longest time of a fetch: longer than any fetch here.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Count of blocks, and bytes of each.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct BlockSizes {
    pub blocks: u32,
    pub block_bytes: u32,
}

/// A node's memory, and the place of each block in it, equal on every node.
#[derive(Clone, Debug)]
pub struct NodeMemory {
    pub blocks: PoolBlocks,
    pub places: Vec<(Label, u64)>,
}

/// The end with fetches.
pub struct NodeReader {
    transport: Arc<dyn Transport>,
    ups: Receiver<TransportEvent>,
    places: Vec<(Label, u64)>,
    ticket: u64,
    clock: Clock,
}

/// The other end, by its name.
pub fn make_peer(name: &str, address: SocketAddr) -> Peer {
    Peer { node: name_of(name), boot: Some(BOOT), address }
}

/// The name of a node of a benchmark.
pub fn name_of(name: &str) -> NodeId {
    NodeId::new(name).expect("a name of letters")
}

/// Answers a peer's requests while the transport lives. It decides in place of a sidecar's data thread.
pub fn serve_blocks(transport: &dyn Transport, ups: &Receiver<TransportEvent>, memory: &NodeMemory) {
    let grant = |&(label, offset): &(Label, u64)| {
        (label, Grant { slot: SlotRef { offset, generation: 0 }, checksum: None })
    };
    let mut grants: HashMap<Label, Grant> = memory.places.iter().map(grant).collect();
    let labels: HashMap<u64, Label> = memory.places.iter().map(|(label, offset)| (*offset, *label)).collect();
    for up in ups {
        match up {
            TransportEvent::Asked { ask, blocks, .. } => {
                let slots = blocks.iter().map(|label| grants.get(label).copied()).collect();
                transport.grant_slots(GrantedSlots { ask, slots });
            }
            TransportEvent::Checksum { slot, checksum } => {
                let label = labels.get(&slot.offset);
                let granted = label.and_then(|label| grants.get_mut(label)).expect("a slot of ours");
                granted.checksum = Some(checksum);
            }
            TransportEvent::Note(note) => tracing::warn!("{note}"),
            _ => {}
        }
    }
}

// === impl NodeMemory ===

impl NodeMemory {
    /// Memory with all blocks in it.
    pub fn with_blocks(sizes: BlockSizes) -> Result<Self, BenchError> {
        let block = u64::from(sizes.block_bytes);
        let (_fd, region) = memory(SEGMENT_ALIGN + block * u64::from(sizes.blocks))?;
        let place = |number: u64| {
            let label = Label {
                namespace: NAMESPACE,
                group: 0,
                hash: make_key(number).hash,
                bytes: sizes.block_bytes,
            };
            (label, SEGMENT_ALIGN + number * block)
        };
        Ok(Self {
            blocks: PoolBlocks::new(region),
            places: (0..u64::from(sizes.blocks)).map(place).collect(),
        })
    }

    /// Memory for all blocks, filled with zeros.
    pub fn without_blocks(sizes: BlockSizes) -> Result<Self, BenchError> {
        let memory = Self::with_blocks(sizes)?;
        let zeros = vec![0; sizes.block_bytes as usize];
        for (_, offset) in &memory.places {
            assert!(memory.blocks.fill(*offset, &zeros), "a place lies in the memory");
        }
        Ok(memory)
    }
}

// === impl NodeReader ===

impl NodeReader {
    /// Fetches from the node `name` at `address` into `memory`, the memory of the transport.
    pub fn new(
        transport: Arc<dyn Transport>,
        ups: Receiver<TransportEvent>,
        memory: &NodeMemory,
        name: &str,
        address: SocketAddr,
    ) -> Self {
        transport.add_peer(PEER, make_peer(name, address));
        Self { transport, ups, places: memory.places.clone(), ticket: 0, clock: Clock::start_now() }
    }

    /// Fetches blocks by their numbers, and returns the seconds.
    pub fn fetch(&mut self, numbers: std::ops::Range<usize>) -> Result<f64, BenchError> {
        self.ticket += 1;
        let (began, blocks) = (self.clock.now(), self.places[numbers].to_vec());
        let mut open = blocks.len();
        self.transport.post_fetch(Fetch {
            ticket: self.ticket,
            peer: PEER,
            blocks,
            deadline: DEADLINE,
            standing: None,
        });
        while open > 0 {
            match self.ups.recv().expect("an end for each block") {
                TransportEvent::Done(done) => {
                    done.result.map_err(|fault| {
                        let remedy = "look at the output of the other end, and at the network between";
                        BenchError::failed("a block did not arrive", format!("{fault}: {remedy}"))
                    })?;
                    open -= 1;
                }
                TransportEvent::PeerDown { fault, .. } => {
                    tracing::warn!("the peer cannot be reached: {fault}")
                }
                TransportEvent::Note(note) => tracing::warn!("{note}"),
                _ => {}
            }
        }
        Ok((self.clock.now() - began).as_secs_f64())
    }

    /// Count of blocks.
    pub fn block_count(&self) -> usize {
        self.places.len()
    }
}
