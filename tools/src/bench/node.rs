//! One end of the mesh's block path, without a sidecar: a server of blocks, or a reader with memory for them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use mesh::transport::{BootId, Fetch, Grant, Granted, Label, NodeId, Peer, PeerNumber, Transport, Up};
use shm_protocol::blocks::Blocks;
use shm_protocol::key::NamespaceDigest;
use shm_protocol::pool::{SEGMENT_ALIGN, SlotRef};

use super::tier::key;
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
pub struct Sizes {
    pub blocks: u32,
    pub block_bytes: u32,
}

/// A node's memory, and the place of each block in it, equal on every node.
#[derive(Clone, Debug)]
pub struct Memory {
    pub blocks: Blocks,
    pub places: Vec<(Label, u64)>,
}

/// The end with fetches.
pub struct Reader {
    transport: Arc<dyn Transport>,
    ups: Receiver<Up>,
    places: Vec<(Label, u64)>,
    ticket: u64,
    clock: Clock,
}

/// The other end, by its name.
pub fn peer(name: &str, address: SocketAddr) -> Peer {
    Peer { node: name_of(name), boot: Some(BOOT), address }
}

/// The name of a node of a benchmark.
pub fn name_of(name: &str) -> NodeId {
    NodeId::new(name).expect("a name of letters")
}

/// Answers a peer's requests while the transport lives. It decides in place of a sidecar's data thread.
pub fn serve(transport: &dyn Transport, ups: &Receiver<Up>, memory: &Memory) {
    let grant = |&(label, offset): &(Label, u64)| {
        (label, Grant { slot: SlotRef { offset, generation: 0 }, checksum: None })
    };
    let mut grants: HashMap<Label, Grant> = memory.places.iter().map(grant).collect();
    let labels: HashMap<u64, Label> = memory.places.iter().map(|(label, offset)| (*offset, *label)).collect();
    for up in ups {
        match up {
            Up::Asked { ask, blocks, .. } => {
                let slots = blocks.iter().map(|label| grants.get(label).copied()).collect();
                transport.grant(Granted { ask, slots });
            }
            Up::Checksum { slot, checksum } => {
                let label = labels.get(&slot.offset);
                let granted = label.and_then(|label| grants.get_mut(label)).expect("a slot of ours");
                granted.checksum = Some(checksum);
            }
            Up::Note(note) => tracing::warn!("{note}"),
            _ => {}
        }
    }
}

// === impl Memory ===

impl Memory {
    /// Memory with all blocks in it.
    pub fn with_blocks(sizes: Sizes) -> Result<Self, BenchError> {
        let block = u64::from(sizes.block_bytes);
        let (_fd, region) = memory(SEGMENT_ALIGN + block * u64::from(sizes.blocks))?;
        let place = |number: u64| {
            let label =
                Label { namespace: NAMESPACE, group: 0, hash: key(number).hash, bytes: sizes.block_bytes };
            (label, SEGMENT_ALIGN + number * block)
        };
        Ok(Self { blocks: Blocks::new(region), places: (0..u64::from(sizes.blocks)).map(place).collect() })
    }

    /// Memory for all blocks, filled with zeros.
    pub fn without_blocks(sizes: Sizes) -> Result<Self, BenchError> {
        let memory = Self::with_blocks(sizes)?;
        let zeros = vec![0; sizes.block_bytes as usize];
        for (_, offset) in &memory.places {
            assert!(memory.blocks.fill(*offset, &zeros), "a place lies in the memory");
        }
        Ok(memory)
    }
}

// === impl Reader ===

impl Reader {
    /// Fetches from the node `name` at `address` into `memory`, the memory of the transport.
    pub fn new(
        transport: Arc<dyn Transport>,
        ups: Receiver<Up>,
        memory: &Memory,
        name: &str,
        address: SocketAddr,
    ) -> Self {
        transport.join(PEER, peer(name, address));
        Self { transport, ups, places: memory.places.clone(), ticket: 0, clock: Clock::start() }
    }

    /// Fetches blocks by their numbers, and returns the seconds.
    pub fn fetch(&mut self, numbers: std::ops::Range<usize>) -> Result<f64, BenchError> {
        self.ticket += 1;
        let (began, blocks) = (self.clock.now(), self.places[numbers].to_vec());
        let mut open = blocks.len();
        self.transport.post(Fetch { ticket: self.ticket, peer: PEER, blocks, deadline: DEADLINE });
        while open > 0 {
            match self.ups.recv().expect("an end for each block") {
                Up::Done(done) => {
                    done.result.map_err(|fault| {
                        let remedy = "look at the output of the other end, and at the network between";
                        BenchError::failed("a block did not arrive", format!("{fault}: {remedy}"))
                    })?;
                    open -= 1;
                }
                Up::PeerDown { fault, .. } => tracing::warn!("the peer cannot be reached: {fault}"),
                Up::Note(note) => tracing::warn!("{note}"),
                _ => {}
            }
        }
        Ok((self.clock.now() - began).as_secs_f64())
    }

    /// Count of blocks.
    pub fn blocks(&self) -> usize {
        self.places.len()
    }
}
