//! Entries of blocks: 64 bytes each, in chunks, so growing moves none.

use shm_protocol::key::{BlockHash, BlockKey};

use crate::index::Index;
use crate::list::{Link, Links, List};
use crate::standing::Standing;

/// Entries of a chunk: 256 KiB.
const CHUNK: usize = 4096;

/// The state of a block.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(super) enum State {
    /// The entry is free.
    Vacant,
    /// The block is on its way to the device: not found yet.
    Writing,
    Kept,
    /// The block is on the device, and on its way to another place there.
    Moving,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: BlockKey,
    /// Link of the list of its standing, unless it is being written; or of the list of free entries.
    link: Link,
    pub(super) segment: u32,
    pub(super) unit: u32,
    pub(super) bytes: u32,
    pub(super) device: u8,
    pub(super) state: State,
    pub(super) standing: Standing,
}

const _: () = assert!(size_of::<Entry>() <= 64);

#[derive(Debug, Default)]
pub(super) struct Table {
    chunks: Vec<Box<[Entry]>>,
    free: List,
}

const VACANT: Entry = Entry {
    key: BlockKey { namespace: 0, group: 0, hash: BlockHash([0; 32]) },
    link: Link { previous: crate::list::NIL, next: crate::list::NIL },
    segment: 0,
    unit: 0,
    bytes: 0,
    device: 0,
    state: State::Vacant,
    standing: Standing::ABOVE,
};

// === impl Table ===

impl Table {
    #[inline]
    pub(super) fn get(&self, id: u32) -> &Entry {
        &self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    /// Loads a word of an entry, if there is one: a prefetch in safe code.
    #[inline]
    pub(super) fn touch(&self, id: u32) -> u32 {
        let chunk = self.chunks.get(id as usize / CHUNK);
        chunk.map_or(0, |chunk| chunk[id as usize % CHUNK].bytes)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: u32) -> &mut Entry {
        &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    /// Returns the keys of the blocks in a chunk; `None` behind the last chunk.
    pub(super) fn keys_of(&self, chunk: usize) -> Option<impl Iterator<Item = &BlockKey>> {
        let entries = self.chunks.get(chunk)?.iter();
        Some(entries.filter(|entry| entry.state != State::Vacant).map(|entry| &entry.key))
    }

    /// Takes a free entry; `None` if all numbers are used.
    pub(super) fn take(&mut self) -> Option<u32> {
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
        self.get_mut(id).state = State::Vacant;
        let mut free = std::mem::take(&mut self.free);
        free.push_head(self, id);
        self.free = free;
    }
}

impl Links for Table {
    fn link(&mut self, id: u32) -> &mut Link {
        &mut self.get_mut(id).link
    }
}
