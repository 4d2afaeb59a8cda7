//! Queries for the last kept key.

use shm_protocol::message::QUERY_LAST;

use super::*;

#[test]
fn the_last_kept_key_alone_is_leased_loaded_and_renewed() {
    for is_old in [false, true] {
        let mut peer = Peer::new(1);
        peer.lease_ttl_ms = if is_old { 0 } else { peer.lease_ttl_ms };
        let (mut scheduler, mut served) = connected_with(&peer, BLOCK_BYTES, |config| config.last = true);
        let log = log_with(&mut scheduler, 4);
        let op = scheduler.post_query(log, 0, 4).unwrap();
        let messages = served.drain();
        let (chunks, query) = (messages[1].data, messages[2]);
        grant(&served, op, 0, 3, &chunks);
        assert_eq!(scheduler.poll(op), Some(3));
        assert_eq!((query.flags, query.from, query.count), (QUERY_LAST, 0, 4));
        if !is_old {
            assert!(
                scheduler.post_load(log, 1, &[5, 6], 1, false).is_empty(),
                "the key before it is not leased"
            );
        }
        let loads = scheduler.post_load(log, 2, &[6], 1, false).len();
        let asked = served.drain_kind(Kind::Query);
        let asked: Vec<_> = asked.iter().map(|query| (query.flags, query.from, query.count)).collect();
        // A later key may be kept by now.
        assert_eq!(asked, if is_old { vec![(QUERY_LAST, 2, 1)] } else { vec![] });
        assert_eq!(loads, usize::from(!is_old), "the renewal was not answered");
    }
}

#[test]
fn nothing_is_found_where_the_sidecar_does_not_know_states() {
    let mut peer = Peer::new(1);
    peer.states = false;
    let (mut scheduler, mut served) = connected_with(&peer, BLOCK_BYTES, |config| config.last = true);
    let log = log_with(&mut scheduler, 4);
    assert_eq!(scheduler.query(log, 0, 4), 0);
    scheduler.end_step();
    assert!(served.drain_kind(Kind::Query).is_empty(), "it would end the session");
    assert!(scheduler.take_notices()[0].contains("upgrade the sidecar"));
}
