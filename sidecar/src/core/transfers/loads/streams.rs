//! Loads of streams: each has its blocks fetched in its turn, in the order of their keys, and gives the fetched
//! ones back at its end.
//!
//! At most a window of blocks is read for them at once. A refusal of one load refuses all behind it: the engine
//! computes the prompt from there.

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::message::Status;
use shm_protocol::pool::SlotRef;

use super::phases::{LoadEvent, LoadPhase};
use super::{
    Base, Binding, Context, OpKey, Queries, RunningLoad, SessionId, Transfers, Waiter, operations,
    refuse_load,
};

/// A stream leaves half of the room for arrivals to others.
const PARTS: u64 = 2;

/// Blocks of a load sent for, or found in memory, in one go.
#[derive(Debug, Default)]
struct TakenBlocks {
    slots: Vec<SlotRef>,
    held: Vec<SlotRef>,
    coming: Vec<BlockKey>,
}

/// The end of an attempt to send for a load's blocks.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum SentPart {
    /// All of them.
    Whole,
    /// There is no room for more, or their source works for others.
    Waits,
    /// The next one is nowhere.
    Absent,
}

// === impl Transfers ===

impl Transfers {
    /// Goes on with the streams moved by this event.
    pub(crate) fn go_on_streams(&mut self, queries: &mut Queries, base: &mut Base) {
        for session in std::mem::take(&mut self.moved_streams) {
            if let Some(stream) = queries.stream(session) {
                stream.note_moved(base.cx.now_ms);
                self.send_parts(session, queries, base);
            }
        }
    }

    /// Refuses the rest of streams slower than their engine, or too late, and goes on with the others.
    pub(crate) fn end_due_streams(&mut self, queries: &mut Queries, base: &mut Base) {
        self.refuse_abandoned(queries, base);
        for session in queries.streaming() {
            let Some(stream) = queries.stream(session).filter(|stream| !stream.queue.is_empty()) else {
                continue;
            };
            let (_, missing) = self.reading(session);
            if missing == 0 && self.streamed(session).any(|load| !load.is_deferred()) {
                // Its blocks are here: it waits for its engine.
                stream.note_moved(base.cx.now_ms);
            }
            match stream.over(missing, base) {
                Some(over) => {
                    base.cx.stats.count_over(over);
                    self.end_stream(session, None, queries, base);
                }
                None => self.send_parts(session, queries, base),
            }
        }
    }

    /// Refuses loads with blocks to be sent for after the end of their stream: the engine was barred.
    fn refuse_abandoned(&mut self, queries: &mut Queries, base: &mut Base) {
        let unsent = self.loads.iter().filter(|(_, load)| load.has_rest());
        let unsent: Vec<(OpKey, u64)> = unsent.map(|(key, load)| (*key, load.promise)).collect();
        for (key, promise) in unsent {
            let stream = queries.stream(key.0).filter(|stream| stream.has_promise(promise));
            if stream.is_none() {
                self.refuse_deferred(key, base);
            }
        }
    }

    /// Has a scheduler's streamed loads looked at: there may be more room.
    pub(crate) fn note_room(&mut self, session: SessionId, queries: &mut Queries) {
        if queries.stream(session).is_some() {
            self.moved_streams.insert(session);
        }
    }

    /// Ends the stream of a log, or of any: its loads with blocks still missing are refused.
    pub(crate) fn end_stream(
        &mut self,
        session: SessionId,
        log: Option<u32>,
        queries: &mut Queries,
        base: &mut Base,
    ) {
        if let Some(promise) = queries.end_stream(session, log) {
            self.refuse_parts((session, 0), promise, base);
        }
    }

    /// Refuses the deferred loads of a query, from one on.
    pub(super) fn refuse_parts(&mut self, from: OpKey, promise: u64, base: &mut Base) {
        let parts = self.loads.range(from..=*operations(from.0).end());
        let is_meant = |load: &RunningLoad| load.promise == promise && load.is_deferred();
        let parts: Vec<OpKey> = parts.filter(|(_, load)| is_meant(load)).map(|(key, _)| *key).collect();
        for key in parts {
            self.change_load(key, LoadEvent::Refused, &mut base.cx);
            refuse_load(key, Status::Absent, base);
        }
    }

    #[cfg(test)]
    pub(crate) fn blocks_read(&self, session: SessionId) -> usize {
        self.reading(session).0
    }

    /// Returns the number of blocks read for a scheduler's unended streamed loads, and of their missing blocks.
    fn reading(&self, session: SessionId) -> (usize, usize) {
        let loads = self.streamed(session);
        loads
            .fold((0, 0), |(reading, missing), load| (reading + load.brought.len(), missing + load.missing()))
    }

    /// Returns a scheduler's unended streamed loads.
    fn streamed(&self, session: SessionId) -> impl Iterator<Item = &RunningLoad> {
        self.loads.range(operations(session)).map(|(_, load)| load).filter(|load| load.streamed)
    }

    /// Sends for the blocks of a stream's loads, in their order, as far as there is room.
    fn send_parts(&mut self, session: SessionId, queries: &mut Queries, base: &mut Base) {
        while let Some(&op) = queries.stream(session).and_then(|stream| stream.queue.front()) {
            let key = (session, op);
            let sent =
                if self.is_deferred(key) { self.send_part(key, queries, base) } else { SentPart::Whole };
            if sent == SentPart::Waits {
                return;
            }
            if let Some(stream) = queries.stream(session) {
                stream.queue.pop_front();
            }
            match sent {
                SentPart::Whole => self.unpark(key, base),
                _ => self.refuse_deferred(key, base),
            }
        }
        queries.end_sent_stream(session);
    }

    /// Sends for the next blocks of a deferred load.
    fn send_part(&mut self, key: OpKey, queries: &mut Queries, base: &mut Base) -> SentPart {
        let (reading, under_way) = self.reading(key.0);
        let Some(stream) = queries.stream(key.0) else { return SentPart::Waits };
        let load = self.loads.get_mut(&key).expect("the caller found it");
        let LoadPhase::Deferred { missing, held, rest } = &mut load.phase else { return SentPart::Whole };
        // A load alone may be larger than the window.
        let window = if reading == 0 { rest.len() } else { stream.window(&load.binding, base) };
        let room = window.saturating_sub(reading);
        if under_way > 0 && !is_worth_asking(room.min(rest.len()), rest.len(), &load.binding, &base.cx) {
            return SentPart::Waits;
        }
        let waiter = Waiter::Load { session: key.0, op: key.1 };
        let taken = take_blocks(rest, room, waiter, &load.binding, base);
        let count = taken.slots.len();
        stream.note_sent(count, base.cx.arrivals.owed(&taken.coming, base.cx.now_ms));
        rest.drain(..count);
        *missing += taken.coming.len();
        held.extend(taken.held);
        load.slots.extend(taken.slots);
        load.brought.extend(taken.coming);
        load.sent = base.cx.now;
        let Some(next) = rest.first() else { return SentPart::Whole };
        let binding = &load.binding;
        let is_known = base.cx.dram.is_kept(&binding.block_key(next))
            || base.sources.may_arrive(binding, &rest[..1], false, &base.cx)
            || base.cx.arrivals.source(&binding.block_key(next)).is_some();
        if is_known { SentPart::Waits } else { SentPart::Absent }
    }
}

/// True if a source may be asked for the `rest` of a load, or for several of its blocks at once: half of a
/// stream's room for arrivals. `room`: the most of them for now.
fn is_worth_asking(room: usize, rest: usize, binding: &Binding, cx: &Context) -> bool {
    let most = cx.arrivals.bytes_max() / PARTS;
    let blocks = |bytes: u64| (bytes / binding.block_bytes()) as usize;
    room.min(blocks(most.saturating_sub(cx.arrivals.bytes()))) >= rest.min(blocks(most / 2))
}

/// Holds or sends for the leading blocks of a run, `room` of them at most beside those in memory.
fn take_blocks(
    run: &[BlockHash],
    room: usize,
    waiter: Waiter,
    binding: &Binding,
    base: &mut Base,
) -> TakenBlocks {
    let holder = binding.whose.holder;
    let mut taken = TakenBlocks::default();
    // Blocks in memory take no slot, but their engine's room.
    let held_max = (base.cx.dram.room(holder) / binding.block_bytes()) as usize;
    let brought = base.sources.bring(binding, &run[..run.len().min(room)], PARTS, false, &mut base.cx);
    let cx = &mut base.cx;
    for hash in run {
        let key = binding.block_key(hash);
        if taken.held.len() < held_max
            && let Some(slot) = cx.dram.hold(&key, holder)
        {
            taken.held.push(slot);
            taken.slots.push(slot);
        } else if taken.coming.len() < room
            && let Some(slot) = cx.arrivals.join_waiter(&key, waiter)
        {
            taken.coming.push(key);
            taken.slots.push(slot);
        } else {
            break;
        }
    }
    brought.held.into_iter().for_each(|slot| cx.dram.unhold(slot, holder));
    taken
}
