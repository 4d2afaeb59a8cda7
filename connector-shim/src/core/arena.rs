//! Memory lent to the sidecar until its head passes a message: key chunks and the block-id circle.

use std::collections::VecDeque;

use shm_protocol::layout::{BLOCK_IDS, CHUNKS};

use super::submission::has_passed;

/// The key arena's free chunks.
#[derive(Debug)]
pub(crate) struct Chunks {
    free: Vec<u32>,
    /// Chunks of closed logs, by the sequence number of their CLOSE.
    retired: VecDeque<(u32, Vec<u32>)>,
}

/// The block-id circle: used in message order. Ids are free again when the head has passed their message.
#[derive(Debug, Default)]
pub(crate) struct BlockIds {
    next: u32,
    freed: u32,
    /// End positions, by the sequence number of their message.
    posted: VecDeque<(u32, u32)>,
}

// === impl Chunks ===

impl Chunks {
    /// The whole arena, lowest chunks first to touch little memory.
    pub(crate) fn new() -> Self {
        Self { free: (0..CHUNKS as u32).rev().collect(), retired: VecDeque::new() }
    }

    /// Free chunks.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Takes a free chunk.
    pub(crate) fn take_chunk(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Lends the chunks of a log to the sidecar until its CLOSE has been copied out.
    pub(crate) fn retire(&mut self, sequence: u32, chunks: Vec<u32>) {
        if !chunks.is_empty() {
            self.retired.push_back((sequence, chunks));
        }
    }

    /// Takes back the chunks of logs whose CLOSE the sidecar has copied out.
    pub(crate) fn reclaim(&mut self, acknowledged: u32) {
        while let Some((_, chunks)) =
            self.retired.pop_front_if(|(sequence, _)| has_passed(acknowledged, *sequence))
        {
            self.free.extend(chunks.into_iter().rev());
        }
    }
}

// === impl BlockIds ===

impl BlockIds {
    /// Whether `count` more ids fit.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        count <= BLOCK_IDS - self.next.wrapping_sub(self.freed) as usize
    }

    /// The position of the next id.
    pub(crate) fn position(&self) -> u32 {
        self.next
    }

    /// Lends the next `count` ids to the message `sequence`.
    pub(crate) fn lend(&mut self, count: usize, sequence: u32) {
        self.next = self.next.wrapping_add(count as u32);
        self.posted.push_back((sequence, self.next));
    }

    /// Takes back the ids of messages that the sidecar has copied out.
    pub(crate) fn reclaim(&mut self, acknowledged: u32) {
        while let Some((_, end)) =
            self.posted.pop_front_if(|(sequence, _)| has_passed(acknowledged, *sequence))
        {
            self.freed = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_return_only_behind_their_close() {
        let mut chunks = Chunks::new();
        let taken: Vec<u32> = (0..3).map(|_| chunks.take_chunk().unwrap()).collect();
        assert_eq!(taken, [0, 1, 2]);
        let close = u32::MAX;
        chunks.retire(close, taken);
        chunks.reclaim(close);
        assert_eq!(chunks.free(), CHUNKS - 3, "the head stands before the message: it is not copied out yet");
        chunks.reclaim(close.wrapping_add(1));
        assert_eq!(chunks.free(), CHUNKS);
    }

    #[test]
    fn block_ids_are_a_circle_in_message_order() {
        let mut ids = BlockIds { next: u32::MAX - 9, freed: u32::MAX - 9, ..BlockIds::default() };
        assert!(ids.has_room(BLOCK_IDS) && !ids.has_room(BLOCK_IDS + 1));
        ids.lend(BLOCK_IDS - 1, 7);
        ids.lend(1, 8);
        assert!(!ids.has_room(1));
        ids.reclaim(8);
        assert!(ids.has_room(BLOCK_IDS - 1) && !ids.has_room(BLOCK_IDS));
        ids.reclaim(9);
        assert!(ids.has_room(BLOCK_IDS));
    }
}
