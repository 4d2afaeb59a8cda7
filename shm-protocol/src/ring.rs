//! A single-producer single-consumer ring of 64-byte slots between two processes without mutual trust.
//!
//! Each side keeps its own cursor in private memory and only publishes it. It reads the peer's cursor once
//! and checks it (`distance <= capacity`), so a wrong cursor is found and never followed. The code is generic
//! over [`RingMemory`], so loom checks the code of the product.

use thiserror::Error;

use crate::message::Slot;

/// The shared words of one ring.
pub trait RingMemory {
    /// Slots, a power of two.
    fn capacity(&self) -> u32;
    /// Loads the tail with acquire.
    fn load_tail(&self) -> u32;
    /// Stores the tail with release.
    fn store_tail(&self, tail: u32);
    /// Loads the head with acquire.
    fn load_head(&self) -> u32;
    /// Stores the head with release.
    fn store_head(&self, head: u32);
    /// Copies slot `index` out.
    fn read_slot(&self, index: u32) -> Slot;
    /// Fills slot `index`.
    fn write_slot(&self, index: u32, slot: &Slot);
}

/// The peer's cursor is impossible: the session must be closed.
#[derive(Debug, Error, Eq, PartialEq)]
#[error(
    "the peer's ring cursor {theirs} is {distance} slots from ours ({ours}); at most {capacity} are possible"
)]
pub struct CursorError {
    theirs: u32,
    ours: u32,
    distance: u32,
    capacity: u32,
}

/// The writing end.
#[derive(Debug)]
pub struct Producer<M> {
    memory: M,
    tail: u32,
    published: u32,
    head: u32,
}

/// The reading end.
#[derive(Debug)]
pub struct Consumer<M> {
    memory: M,
    head: u32,
    tail: u32,
}

// === impl Producer ===

impl<M: RingMemory> Producer<M> {
    /// Makes the writing end of an unused ring.
    pub fn new(memory: M) -> Self {
        Self { memory, tail: 0, published: 0, head: 0 }
    }

    /// Returns the free slots, after a fresh look at the peer's head. Fails on an impossible head.
    pub fn free(&mut self) -> Result<u32, CursorError> {
        // SYNC POINT(ring-head): acquire pairs with the consumer's release of `head`; a slot is reused only
        // after the consumer has copied it out.
        let head = self.memory.load_head();
        let capacity = self.memory.capacity();
        let distance = self.tail.wrapping_sub(head);
        let consumed = head.wrapping_sub(self.head);
        if distance > capacity || consumed > self.published.wrapping_sub(self.head) {
            return Err(CursorError { theirs: head, ours: self.tail, distance, capacity });
        }
        self.head = head;
        Ok(capacity - distance)
    }

    /// True if a slot beyond `reserved` others is free. Looks at the peer's cursor only if the last look does
    /// not suffice.
    pub fn has_room(&mut self, reserved: u32) -> Result<bool, CursorError> {
        let known = self.memory.capacity() - self.tail.wrapping_sub(self.head);
        Ok(known > reserved || self.free()? > reserved)
    }

    /// Writes one slot without publishing it. Panics if the ring is full: the caller checks for room first.
    pub fn push(&mut self, slot: &Slot) {
        assert!(self.tail.wrapping_sub(self.head) < self.memory.capacity(), "push into a full ring");
        self.memory.write_slot(self.tail & (self.memory.capacity() - 1), slot);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Makes every pushed slot visible. Returns true if there were new ones.
    pub fn publish(&mut self) -> bool {
        let fresh = self.published != self.tail;
        if fresh {
            // SYNC POINT(ring-tail): release pairs with the consumer's acquire of `tail`. Slots, and all
            // words written before them (keys, block ids), become visible with it.
            self.memory.store_tail(self.tail);
            self.published = self.tail;
        }
        fresh
    }

    /// Returns the number of slots pushed so far, modulo 2^32: the sequence number of the next one.
    pub fn sequence(&self) -> u32 {
        self.tail
    }

    /// Returns the peer's head as last seen: the peer has copied out everything before it.
    pub fn acknowledged(&self) -> u32 {
        self.head
    }

    /// The shared words.
    pub fn memory(&self) -> &M {
        &self.memory
    }
}

// === impl Consumer ===

impl<M: RingMemory> Consumer<M> {
    /// Makes the reading end of an unused ring.
    pub fn new(memory: M) -> Self {
        Self { memory, head: 0, tail: 0 }
    }

    /// Returns the slots ready to read, after a fresh look at the peer's tail. Fails on an impossible tail.
    pub fn ready(&mut self) -> Result<u32, CursorError> {
        // SYNC POINT(ring-tail): acquire, see `Producer::publish`.
        let tail = self.memory.load_tail();
        let capacity = self.memory.capacity();
        let distance = tail.wrapping_sub(self.head);
        if distance > capacity || distance < self.tail.wrapping_sub(self.head) {
            return Err(CursorError { theirs: tail, ours: self.head, distance, capacity });
        }
        self.tail = tail;
        Ok(distance)
    }

    /// Copies the next slot out, if [`Consumer::ready`] has seen one. [`Consumer::release`] gives its room
    /// back.
    pub fn pop(&mut self) -> Option<Slot> {
        if self.head == self.tail {
            return None;
        }
        let slot = self.memory.read_slot(self.head & (self.memory.capacity() - 1));
        self.head = self.head.wrapping_add(1);
        Some(slot)
    }

    /// Gives the popped slots, and their keys and block ids, back to the producer.
    pub fn release(&self) {
        // SYNC POINT(ring-head): release, see `Producer::free`.
        self.memory.store_head(self.head);
    }

    /// The shared words.
    pub fn memory(&self) -> &M {
        &self.memory
    }
}
