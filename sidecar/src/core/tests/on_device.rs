//! Blocks on the engine's device: the logs of ended requests, and saves of blocks about to be reused.

use shm_protocol::message::WAY_LAST;

use super::*;

impl Harness {
    /// Saves these keys under a log, in a step with the number of the operation. Returns the number of kept blocks.
    pub(super) fn keep_chain(&mut self, log: u32, op: u64, keys: std::ops::Range<u32>) -> u32 {
        let count = keys.len() as u32;
        self.open(log, keys);
        self.post_save(log, op, 0..count, false);
        self.fences(RANKS[0], op, op);
        self.copied();
        self.saved().expect("the save ends").committed
    }

    /// Keeps chains of a block, as operations from `op` on, until so many blocks went. Returns the next operation.
    pub(super) fn fill_until_evicted(&mut self, mut op: u64, blocks: u64) -> u64 {
        while self.core.base.cx.dram.stats().evicted_blocks_total < blocks {
            let first = 1000 + op as u32 * 8;
            assert!(self.keep_chain(9, op, first..first + 1) == 1 && op < 2000, "operation {op}");
            self.ask(SchedulerRequest::Close { log: 9, way: 0 });
            op += 1;
        }
        op
    }

    /// The number of blocks among these keys of an open log, found in the pool.
    pub(super) fn count_kept(&mut self, log: u32, op: u64, keys: std::ops::Range<u32>) -> u32 {
        let kept = self.query(log, op, keys.start, keys.len() as u32).value;
        self.ask(SchedulerRequest::Release { log });
        kept
    }
}

#[test]
fn copies_of_an_ended_request_go_first_and_are_made_again_from_its_log() {
    let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES);
    engine.join();
    engine.keep_chain(1, 1, 100..104);
    engine.ask(SchedulerRequest::Close { log: 1, way: 0 });
    engine.keep_chain(0, 2, 0..4);
    engine.ask(SchedulerRequest::Ended { log: 0, way: 7 });
    let op = engine.fill_until_evicted(3, 2);
    engine.open(1, 100..104);
    assert_eq!(engine.count_kept(1, 900, 0..4), 4, "no device has these, and they are older");
    assert_eq!(engine.count_kept(0, 901, 0..4), 2, "the deepest ones went");
    engine.out.clear();
    engine.post_save(0, op, 1..4, false);
    engine.fences(RANKS[0], op, op);
    let copies: Vec<u32> =
        engine.copies().iter().flat_map(|(.., pieces)| pieces).map(|piece| piece.block).collect();
    assert_eq!(copies, [2, 3], "key 1 is kept");
}

#[test]
fn blocks_of_a_conversation_s_last_request_go_next() {
    let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES);
    engine.join();
    for (log, op, way) in [(1_u32, 1, 7), (0, 2, WAY_LAST)] {
        engine.keep_chain(log, op, log * 100..log * 100 + 4);
        engine.ask(SchedulerRequest::Close { log, way });
    }
    engine.fill_until_evicted(3, 4);
    engine.open(1, 100..104);
    engine.open(0, 0..4);
    let kept = [(1, 900), (0, 901)].map(|(log, op)| engine.count_kept(log, op, 0..4));
    assert_eq!(kept, [4, 0], "the older one may go on");
}

#[test]
fn an_end_ends_the_lease_and_counts_once() {
    let mut engine = Harness::leasing(1);
    engine.ask(SchedulerRequest::Ended { log: 0, way: 0 });
    assert_eq!(engine.core.stats().leases, 0);
    let ended = |engine: &mut Harness| std::mem::take(&mut engine.core.base.cx.ended).len();
    assert_eq!(ended(&mut engine), 1);
    engine.ask(SchedulerRequest::Left { keys: LogKeys::new(0, 0..2) });
    engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
    assert_eq!(ended(&mut engine), 0);
    engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
    assert!(engine.closed().is_some(), "the log is closed");
}

#[test]
fn a_log_ends_once() {
    let mut engine = Harness::keeping(1, 2);
    engine.ask(SchedulerRequest::Ended { log: 0, way: 0 });
    engine.ask(SchedulerRequest::Ended { log: 0, way: 0 });
    assert!(engine.closed().unwrap().contains("log 0 cannot end on the device"));
}
