//! Loads in parts: their number, and answers with more hits than the pool holds.

use shm_protocol::message::{LOAD_STREAMED, QUERY_STREAM};

use super::*;

#[test]
fn more_than_the_pool_holds_is_loaded_in_parts_without_slots() {
    let mut peer = Peer::new(1);
    let streams = |config: &mut SessionConfig| (config.part_blocks, config.streams) = (1, true);
    for knows in [false, true] {
        peer.streams = knows;
        let (mut scheduler, mut served) = connected_with(&peer, BLOCK_BYTES, streams);
        let log = log_with(&mut scheduler, 1000);
        let op = scheduler.post_query(log, 0, 1000).unwrap();
        let flags = served.drain_kind(Kind::Query)[0].flags;
        assert_eq!(flags, QUERY_ARRIVING | if knows { QUERY_STREAM } else { 0 });
        if !knows {
            continue;
        }
        served.answer(op, Status::Streamed, 1000);
        assert_eq!(scheduler.poll(op), Some(1000));
        assert!(scheduler.arriving(log), "no step waits for it");
        let blocks: Vec<u32> = (1..1001).collect();
        assert!(scheduler.post_load(log, 0, &blocks, 3, true).is_empty());
        let plans = scheduler.post_load(log, 0, &blocks, 3, false);
        assert_eq!(plans.len(), 250, "of 4 blocks each: 256 at most");
        assert!(plans.iter().all(|plan| plan.arriving() && plan.streamed()));
        assert_eq!(Plan::decode(&plans[0].encode()).as_ref(), Ok(&plans[0]));
        scheduler.end_step();
        let loads = served.drain_kind(Kind::Load);
        assert!(loads.iter().all(|load| load.flags == LOAD_ARRIVING | LOAD_STREAMED));
    }
    // Awaited keys of another engine are never streamed.
    peer.handover = true;
    let (mut scheduler, mut served) = connected_with(&peer, BLOCK_BYTES, streams);
    let log = log_with(&mut scheduler, 4);
    scheduler.await_producer(log);
    scheduler.post_query(log, 0, 4).unwrap();
    assert_eq!(served.drain_kind(Kind::Query)[0].flags & QUERY_STREAM, 0);
}

#[test]
fn a_long_load_has_no_more_parts_than_there_may_be() {
    let peer = Peer::new(1);
    let in_parts = |config: &mut SessionConfig| config.part_blocks = 1;
    let (mut scheduler, mut served) = connected_with(&peer, BLOCK_BYTES, in_parts);
    for (status, parts) in [(Status::Arriving, 50), (Status::Ok, 1)] {
        let log = log_with(&mut scheduler, 100);
        let op = scheduler.post_query(log, 0, 100).unwrap();
        served.answer(op, status, 100);
        assert_eq!(scheduler.poll(op), Some(100));
        let blocks: Vec<u32> = (1..101).collect();
        assert_eq!(scheduler.post_load(log, 0, &blocks, 3, false).len(), parts);
        scheduler.end_step();
        served.drain();
    }
}
