//! Standing asks over loopback: granted behind the commit without another ask, and ended with their time or their
//! connection.

mod rig;

use std::time::Duration;

use mesh::transport::tcp::frame::STANDING_MAX;
use mesh::transport::tcp::{STREAMS_DEFAULT, Security};
use mesh::transport::{Fetch, FetchFault, FetchStage, Label, PeerNumber, StandingTerms};
use rig::{LONG, Node, Owner, acquaint, label, now, pair, patient};
use shm_protocol::pool::SEGMENT_ALIGN;

fn labels(numbers: std::ops::Range<u64>, bytes: u32) -> Vec<Label> {
    numbers.map(|number| label(number, bytes)).collect()
}

#[test]
fn blocks_follow_their_commit_without_another_ask_and_let_others_pass() {
    let (mut one, other) = pair(patient());
    let promised = labels(0..40, 500_000);
    let fetching = one.stand(1, &promised, LONG);
    let asks = other.standing_asks(promised.len());
    let places: Vec<u32> = other.seen(|seen| seen.standing.iter().map(|(_, terms)| terms.place).collect());
    assert_eq!(places.iter().min(), Some(&7), "the place of the first block");
    assert!(asks.len() >= STREAMS_DEFAULT, "every stream has some: {}", asks.len());
    // Other blocks pass all of them.
    let others = labels(100..120, 300_000);
    others.iter().for_each(|label| other.keep(*label, false));
    assert!(one.get(1, &others, LONG).iter().all(Result::is_ok));
    let asked = other.seen(|seen| seen.asked.len());
    other.commit(asks.iter().rev());
    assert!(one.ends(&fetching).iter().all(Result::is_ok));
    assert_eq!(other.seen(|seen| seen.asked.len()), asked, "nothing was asked for again");
    one.check_ends();
    other.check_releases();
}

#[test]
fn asks_and_standing_asks_mix_in_any_order() {
    let (mut one, other) = pair(patient());
    let kept = labels(0..60, 100_000);
    kept.iter().for_each(|label| other.keep(*label, false));
    for round in 0..20 {
        let promised = labels(1000 + 10 * round..1010 + 10 * round, 150_000);
        let fetching = one.stand(1, &promised, LONG);
        let before = one.fetch(1, &kept[..30], LONG);
        let asks = other.wait("standing asks", |seen| {
            let of_round = |(ask, _): &(u64, _)| {
                let (.., labels) = seen.asked.iter().find(|asked| asked.0 == *ask)?;
                promised.contains(&labels[0]).then(|| (*ask, labels.clone()))
            };
            let asks: Vec<_> = seen.standing.iter().filter_map(of_round).collect();
            (asks.iter().map(|(_, labels)| labels.len()).sum::<usize>() == promised.len()).then_some(asks)
        });
        for (at, (ask, labels)) in asks.iter().enumerate() {
            // Some are granted in part.
            labels.iter().skip(at % 2).for_each(|label| other.keep(*label, false));
            other.grant(*ask, labels);
        }
        let after = one.fetch(1, &kept[30..], LONG);
        let ends = one.ends(&fetching);
        assert!(ends.iter().all(|end| matches!(end, Ok(()) | Err(FetchFault::Absent))), "{ends:?}");
        assert!(ends.iter().any(Result::is_ok));
        for fetching in [before, after] {
            assert!(one.ends(&fetching).iter().all(Result::is_ok));
        }
    }
    one.check_ends();
    other.check_releases();
}

#[test]
fn a_standing_fetch_ends_in_time_and_its_stream_stays_usable() {
    let (mut one, other) = pair(patient());
    let promised = labels(0..6, 200_000);
    let fetching = one.stand(1, &promised, Duration::from_millis(100));
    let asks = other.standing_asks(promised.len());
    let late = Err(FetchFault::Timeout(FetchStage::Whole));
    assert_eq!(one.ends(&fetching), vec![late; promised.len()]);
    // A grant that comes later is read and dropped.
    other.commit(&asks);
    assert!(one.get(1, &promised, LONG).iter().all(Result::is_ok));
    one.seen(|seen| assert!(seen.down.is_empty(), "{:?}", seen.down));
    one.check_ends();
    other.check_releases();
}

#[test]
fn an_owner_that_never_answers_breaks_the_stream() {
    let limits = mesh::transport::tcp::TcpLimits { first_byte: Duration::from_millis(200), ..patient() };
    let mut one = Node::new("one", Security::Plaintext, limits);
    let other = Node::start("other", 1, Security::Plaintext, patient(), Owner::Waits);
    acquaint(&one, &other);
    let began = now();
    let fetching = one.stand(1, &labels(0..1, 1000), Duration::from_millis(300));
    assert_eq!(one.ends(&fetching), [Err(FetchFault::Timeout(FetchStage::Whole))]);
    one.wait("a fault", |seen| seen.down.first().copied());
    assert!(began.elapsed() >= Duration::from_millis(500));
    one.seen(|seen| assert_eq!(seen.down, [(PeerNumber(1), FetchFault::Timeout(FetchStage::FirstByte))]));
    other.wait("the end of the ask", |seen| seen.withdrawn.first().copied());
}

#[test]
fn a_standing_ask_ends_with_its_connection() {
    let (mut one, mut other) = pair(patient());
    let promised = labels(0..4, 100_000);
    let fetching = one.stand(1, &promised, LONG);
    let asks = other.standing_asks(promised.len());
    // The owner fences the reader.
    other.transport().remove_peer(PeerNumber(1));
    let ends = one.ends(&fetching);
    assert!(ends.iter().all(|end| matches!(end, Err(FetchFault::Peer(_)))), "{ends:?}");
    let withdrawn = other
        .wait("withdrawals", |seen| (seen.withdrawn.len() == asks.len()).then(|| seen.withdrawn.clone()));
    assert!(asks.iter().all(|(ask, _)| withdrawn.contains(ask)));
    asks.iter().for_each(|(ask, labels)| other.grant(*ask, labels));
    other.check_releases();
    // Both meet again, and the owner dies.
    other.transport().add_peer(PeerNumber(1), one.as_peer());
    std::thread::sleep(patient().back_off_max);
    let fetching = one.stand(1, &promised, LONG);
    other.standing_asks(2 * promised.len());
    other.kill();
    assert!(one.ends(&fetching).iter().all(Result::is_err));
    one.check_ends();
}

#[test]
fn a_cancelled_standing_fetch_gives_its_slots_back_at_once() {
    let (mut one, other) = pair(patient());
    let promised = labels(0..4, 100_000);
    let fetching = one.stand(1, &promised, LONG);
    let asks = other.standing_asks(promised.len());
    one.transport().cancel(fetching.ticket);
    assert_eq!(one.ends(&fetching), vec![Err(FetchFault::Stopped); promised.len()]);
    for (_, offset) in &fetching.blocks {
        assert!(one.blocks.fill(*offset, &[0xa5; 4096]));
    }
    other.commit(&asks);
    other.check_releases();
    for (_, offset) in &fetching.blocks {
        assert!(one.blocks.bytes_at(*offset, 4096).unwrap() == [0xa5; 4096], "it belongs to another by now");
    }
}

#[test]
fn so_many_asks_stand_over_the_streams_and_more_wait_their_turn() {
    let (mut one, other) = pair(patient());
    let (most, wanted) = (STREAMS_DEFAULT * STANDING_MAX, label(1, 8));
    // They share a slot: none of these blocks comes.
    let standing = Some(StandingTerms { patience_ms: 60_000, place: 0 });
    let post = |ticket| {
        let blocks = vec![(wanted, SEGMENT_ALIGN)];
        one.transport().post_fetch(Fetch { ticket, peer: PeerNumber(1), blocks, deadline: LONG, standing });
    };
    let tickets = 1_000_000..1_000_040 + most as u64;
    tickets.clone().for_each(post);
    other.wait("the most", |seen| (seen.standing.len() >= most).then_some(()));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(other.seen(|seen| seen.standing.len()), most);
    // An ask that is not for promised blocks passes.
    other.keep(wanted, true);
    assert_eq!(one.get(1, &[wanted], LONG), [Ok(())]);
    tickets.for_each(|ticket| one.transport().cancel(ticket));
}
