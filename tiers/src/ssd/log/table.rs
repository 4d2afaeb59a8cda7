//! Entries of blocks: 64 bytes each, in chunks, so growing moves none.

use shm_protocol::key::{BlockHash, BlockKey};

use crate::index::Index;
use crate::list::{LinkTable, List, ListLink};
use crate::standing::Standing;

/// Entries of a chunk: 256 KiB.
const CHUNK: usize = 4096;

/// The state of a block.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(super) enum EntryState {
    /// The entry is free.
    Vacant,
    /// The block is on its way to the device: not found yet.
    Writing,
    Kept,
    /// The block is on the device, and on its way to another place there.
    Moving,
    /// The block has given its room up, and is in no list. It can be found until its segment is reclaimed.
    Evicted,
}

#[derive(Clone, Debug)]
pub(super) struct LogEntry {
    pub(super) key: BlockKey,
    /// Link of the list of its standing, unless it is being written; or of the list of free entries.
    link: ListLink,
    pub(super) segment: u32,
    pub(super) unit: u32,
    pub(super) bytes: u32,
    pub(super) device: u8,
    pub(super) state: EntryState,
    pub(super) standing: Standing,
}

const _: () = assert!(size_of::<LogEntry>() <= 64);

// === impl EntryState ===

impl EntryState {
    /// True if the block can be found.
    pub(super) fn is_found(self) -> bool {
        self.is_listed() || self == Self::Evicted
    }

    /// True if the block is on the device, and on its way nowhere.
    pub(super) fn is_at_rest(self) -> bool {
        matches!(self, Self::Kept | Self::Evicted)
    }

    /// True if the block is in a list of the order of eviction.
    pub(super) fn is_listed(self) -> bool {
        matches!(self, Self::Kept | Self::Moving)
    }
}

#[derive(Debug, Default)]
pub(super) struct EntryTable {
    chunks: Vec<Box<[LogEntry]>>,
    free: List,
}

const VACANT: LogEntry = LogEntry {
    key: BlockKey { namespace: 0, group: 0, hash: BlockHash([0; 32]) },
    link: ListLink { previous: crate::list::NIL, next: crate::list::NIL },
    segment: 0,
    unit: 0,
    bytes: 0,
    device: 0,
    state: EntryState::Vacant,
    standing: Standing::ABOVE,
};

// === impl EntryTable ===

impl EntryTable {
    #[inline]
    pub(super) fn get(&self, id: u32) -> &LogEntry {
        &self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    /// Loads a word of an entry, if there is one: a prefetch in safe code.
    #[inline]
    pub(super) fn touch(&self, id: u32) -> u32 {
        let chunk = self.chunks.get(id as usize / CHUNK);
        chunk.map_or(0, |chunk| chunk[id as usize % CHUNK].bytes)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: u32) -> &mut LogEntry {
        &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    /// Returns the keys of the blocks in a chunk; `None` behind the last chunk.
    pub(super) fn keys_of(&self, chunk: usize) -> Option<impl Iterator<Item = &BlockKey>> {
        let entries = self.chunks.get(chunk)?.iter();
        Some(entries.filter(|entry| entry.state != EntryState::Vacant).map(|entry| &entry.key))
    }

    /// Takes a free entry; `None` if all numbers are used.
    pub(super) fn take_free(&mut self) -> Option<u32> {
        if self.free.tail().is_none() {
            self.grow()?;
        }
        let id = self.free.tail()?;
        let mut free = std::mem::take(&mut self.free);
        free.remove(self, id);
        self.free = free;
        Some(id)
    }

    fn grow(&mut self) -> Option<()> {
        let first = self.chunks.len() * CHUNK;
        u32::try_from(first + CHUNK).ok().filter(|end| *end <= Index::ENTRY_MAX)?;
        self.chunks.push(vec![VACANT; CHUNK].into_boxed_slice());
        for at in 0..CHUNK {
            self.put_back((first + at) as u32);
        }
        Some(())
    }

    /// Frees an entry of no list.
    pub(super) fn put_back(&mut self, id: u32) {
        self.get_mut(id).state = EntryState::Vacant;
        let mut free = std::mem::take(&mut self.free);
        free.push_head(self, id);
        self.free = free;
    }
}

impl LinkTable for EntryTable {
    fn link(&mut self, id: u32) -> &mut ListLink {
        &mut self.get_mut(id).link
    }
}
