//! Two nodes over loopback: fetched blocks equal kept blocks, regardless of cancels, absences, fences and
//! overload.

mod rig;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use mesh::refusals::Reason;
use mesh::transport::tcp::frame::{ASK_BLOCKS_MAX, AskFrame, Frame, HelloFrame};
use mesh::transport::tcp::{Security, TcpLimits};
use mesh::transport::{FetchFault, FetchStage, PeerNumber, Refusal};
use rig::{LONG, Node, Owner, acquaint, boot, exchange, label, node, now, pair, patient};
use shm_protocol::random::Random;

#[test]
fn what_is_fetched_is_what_is_kept() {
    let (mut one, mut other) = pair(patient());
    // Sizes around the size of a chunk, and others.
    exchange(&mut one, &mut other, &[1, 7, 512, 65_537, 262_143, 262_144, 262_145, 400_000, 524_288]);
}

#[test]
fn under_load_every_block_ends_once_and_a_slot_given_back_is_not_written() {
    let (mut one, mut other) = pair(patient());
    let labels: Vec<_> = (0..100).map(|number| label(number, 4096 + 2111 * number as u32)).collect();
    labels.iter().for_each(|label| one.keep(*label, false));
    labels.iter().for_each(|label| other.keep(*label, false));
    let mut random = Random(11);
    for _ in 0..25 {
        let mut fetches = Vec::new();
        for _ in 0..4 {
            let from = random.below(80) as usize;
            let some = &labels[from..from + 1 + random.below(20) as usize];
            fetches.push((one.fetch(1, some, LONG), other.fetch(1, some, LONG)));
        }
        for (left, _) in &fetches {
            if random.below(2) == 0 {
                one.transport().cancel(left.ticket);
            }
        }
        for (left, right) in &fetches {
            let ends = one.ends(left);
            assert!(ends.iter().all(|end| matches!(end, Ok(()) | Err(FetchFault::Stopped))), "{ends:?}");
            // These slots are free again: bytes written now must stay.
            for ((_, offset), end) in left.blocks.iter().zip(&ends) {
                if end.is_err() {
                    assert!(one.blocks.fill(*offset, &[0xa5; 4096]));
                }
            }
            assert!(other.ends(right).iter().all(Result::is_ok), "nobody cancels here");
            for ((_, offset), end) in left.blocks.iter().zip(&ends) {
                assert!(end.is_ok() || one.blocks.bytes_at(*offset, 4096).unwrap() == [0xa5; 4096]);
            }
        }
    }
    one.check_ends();
    other.check_releases();
}

#[test]
fn absent_blocks_are_absent_and_the_others_come() {
    let (mut one, other) = pair(patient());
    let labels: Vec<_> = (0..300).map(|number| label(number, 100)).collect();
    let kept = |number: u64| number.is_multiple_of(3);
    labels
        .iter()
        .zip(0..)
        .filter(|(_, number)| kept(*number))
        .for_each(|(label, _)| other.keep(*label, false));
    for (end, number) in one.get(1, &labels, LONG).into_iter().zip(0..) {
        assert_eq!(end, if kept(number) { Ok(()) } else { Err(FetchFault::Absent) }, "{number}");
    }
    other.check_releases();
    other.seen(|seen| assert_eq!(seen.released.values().flatten().sum::<u32>(), 100));
}

#[test]
fn another_life_is_neither_asked_nor_answered() {
    let mut one = Node::new("one", Security::Plaintext, patient());
    let other = Node::start("other", 2, Security::Plaintext, patient(), Owner::Grants);
    let wanted = [label(1, 1000)];
    other.keep(wanted[0], true);
    acquaint(&one, &other);
    // The reader expects an earlier life.
    let earlier = mesh::transport::Peer { boot: Some(boot(1)), ..other.as_peer() };
    one.transport().add_peer(PeerNumber(2), earlier);
    assert_eq!(one.get(2, &wanted, LONG), [Err(FetchFault::Refused(Refusal::OtherBoot))]);
    // The owner knows another life of the reader.
    other.transport().add_peer(PeerNumber(1), mesh::transport::Peer { boot: Some(boot(9)), ..one.as_peer() });
    assert_eq!(one.get(1, &wanted, LONG), [Err(FetchFault::Refused(Refusal::NotMember))]);
    // Another node answers than expected.
    let mistaken = mesh::transport::Peer { node: node("third"), ..other.as_peer() };
    one.transport().add_peer(PeerNumber(3), mistaken);
    assert_eq!(one.get(3, &wanted, LONG), [Err(FetchFault::Refused(Refusal::OtherNode))]);
    // A static list has no lives.
    other.transport().add_peer(PeerNumber(1), mesh::transport::Peer { boot: None, ..one.as_peer() });
    one.transport().add_peer(PeerNumber(4), mesh::transport::Peer { boot: None, ..other.as_peer() });
    assert_eq!(one.get(4, &wanted, LONG), [Ok(())]);
    one.seen(|seen| assert_eq!(seen.connected, [(PeerNumber(4), boot(2))]));
    other.seen(|seen| assert!(seen.notes.iter().any(|note| note.contains("refused")), "{:?}", seen.notes));
    for node in [&one, &other] {
        node.refused(Reason::OtherLife, 2);
        node.refused(Reason::NotMember, 1);
    }
}

#[test]
fn one_that_has_left_is_cut_off_in_both_directions() {
    let mut one = Node::new("one", Security::Plaintext, patient());
    let other = Node::start("other", 1, Security::Plaintext, patient(), Owner::Waits);
    acquaint(&one, &other);
    let wanted = [label(1, 1000)];
    other.keep(wanted[0], true);
    // The owner fences the reader, between its ask and its grant.
    let fetching = one.fetch(1, &wanted, LONG);
    let ask = other.wait("an ask", |seen| seen.asked.first().map(|(ask, ..)| *ask));
    other.transport().remove_peer(PeerNumber(1));
    assert_eq!(one.ends(&fetching), [Err(FetchFault::Peer(std::io::ErrorKind::UnexpectedEof))]);
    other.grant(ask, &wanted);
    other.check_releases();
    std::thread::sleep(patient().back_off_max);
    assert_eq!(one.get(1, &wanted, LONG), [Err(FetchFault::Refused(Refusal::NotMember))]);
    // The reader fences the owner.
    other.transport().add_peer(PeerNumber(1), one.as_peer());
    std::thread::sleep(patient().back_off_max);
    let fetching = one.fetch(1, &wanted, LONG);
    other.wait("an ask", |seen| seen.asked.get(1).map(drop));
    one.transport().remove_peer(PeerNumber(1));
    assert_eq!(one.ends(&fetching), [Err(FetchFault::Stopped)]);
    assert_eq!(one.get(1, &wanted, LONG), [Err(FetchFault::Refused(Refusal::NotMember))]);
    one.check_ends();
}

#[test]
fn an_owner_that_does_not_decide_is_waited_for_until_the_limit() {
    let limits = TcpLimits { first_byte: Duration::from_secs(3), ..patient() };
    let mut one = Node::new("one", Security::Plaintext, limits);
    let other = Node::start("other", 1, Security::Plaintext, patient(), Owner::Waits);
    acquaint(&one, &other);
    let wanted = [label(1, 1000)];
    other.keep(wanted[0], true);
    assert_eq!(one.get(1, &wanted, LONG), [Err(FetchFault::Timeout(FetchStage::FirstByte))]);
    one.seen(|seen| assert_eq!(seen.down, [(PeerNumber(1), FetchFault::Timeout(FetchStage::FirstByte))]));
    // A late grant comes back at once.
    let ask = other.wait("an ask", |seen| seen.asked.first().map(|(ask, ..)| *ask));
    other.grant(ask, &wanted);
    other.check_releases();
    other.seen(|seen| assert_eq!(seen.released[&ask], [0]));
    // A fetch's own limit holds too, and a cancel does not wait.
    std::thread::sleep(patient().back_off_max);
    assert_eq!(one.get(1, &wanted, Duration::from_millis(50)), [Err(FetchFault::Timeout(FetchStage::Whole))]);
    let fetching = one.fetch(1, &wanted, LONG);
    one.transport().cancel(fetching.ticket);
    assert_eq!(one.ends(&fetching), [Err(FetchFault::Stopped)]);
    one.check_ends();
}

#[test]
fn more_than_the_bounds_is_refused_at_once() {
    let mut one = Node::new("one", Security::Plaintext, patient());
    let other = Node::start("other", 1, Security::Plaintext, patient(), Owner::Waits);
    acquaint(&one, &other);
    let (wanted, began) = (label(1, 8), now());
    let fetches: Vec<_> = (0..400).map(|_| one.fetch(1, &[wanted], Duration::from_millis(300))).collect();
    drop(fetches.iter().map(|fetching| one.ends(fetching)).collect::<Vec<_>>());
    assert!(began.elapsed() >= Duration::from_millis(300), "the owner grants nothing");
    // Blocks waiting for a peer: 64 fetches of 256 fill the queue. Slots are shared, since nothing is
    // written.
    let offset = shm_protocol::pool::SEGMENT_ALIGN;
    for ticket in 1000..1070 {
        let blocks = vec![(wanted, offset); 256];
        let fetch =
            mesh::transport::Fetch { ticket, peer: PeerNumber(1), blocks, deadline: LONG, standing: None };
        one.transport().post_fetch(fetch);
    }
    let refused = Err(FetchFault::Refused(Refusal::Busy));
    one.wait("a refusal", |seen| (seen.done.get(&(1069, 255))?[..] == [refused]).then_some(()));
    (1000..1070).for_each(|ticket| one.transport().cancel(ticket));
    one.wait("all ends", |seen| (seen.done.len() == 400 + 70 * 256).then_some(()));
    one.check_ends();
}

/// A member whose frames the test writes.
fn speaker(other: &Node) -> TcpStream {
    let mut stream = TcpStream::connect(other.address()).unwrap();
    let hello = HelloFrame {
        node: node("raw"),
        boot: boot(5),
        wanted_node: other.name.clone(),
        wanted_boot: Some(other.boot),
    };
    say(&mut stream, &Frame::Hello(hello));
    let mut welcome = [0; 32];
    stream.read_exact(&mut welcome).unwrap();
    stream
}

fn say(stream: &mut TcpStream, frame: &Frame) {
    let mut bytes = Vec::new();
    frame.append_to(&mut bytes);
    stream.write_all(&bytes).unwrap();
}

fn raw_peer(other: &Node) {
    let address = other.address();
    other
        .transport()
        .add_peer(PeerNumber(7), mesh::transport::Peer { node: node("raw"), boot: None, address });
}

#[test]
fn a_peer_that_asks_out_of_all_bounds_is_hung_up_on() {
    let other = Node::start("other", 1, Security::Plaintext, patient(), Owner::Waits);
    raw_peer(&other);
    // Asks beyond the limit wait in the stream.
    let mut stream = speaker(&other);
    let ask = |ticket| Frame::Ask(AskFrame { ticket, first: 0, labels: vec![label(1, 8); ASK_BLOCKS_MAX] });
    (0..20).for_each(|ticket| say(&mut stream, &ask(ticket)));
    other.wait("asks", |seen| (seen.asked.len() == 4).then_some(()));
    // A frame with too large a length, or bytes that are not a frame.
    for bytes in [&[0xff; 24][..], b"GET / HTTP/1.1\r\nHost: other\r\n\r\n", &frame_of(u32::MAX)] {
        let mut stream = speaker(&other);
        stream.write_all(bytes).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.len() <= 32, "a refusal, or nothing");
    }
    let malformed = |(peer, fault): &(PeerNumber, FetchFault)| {
        *peer == PeerNumber(7) && matches!(fault, FetchFault::Malformed(_))
    };
    other.wait("three strikes", |seen| {
        (seen.down.iter().filter(|down| malformed(down)).count() == 3).then_some(())
    });
    other.refused(Reason::Malformed, 3);
    drop(stream);
    let asked: Vec<_> = other.seen(|seen| seen.asked.clone());
    asked.iter().for_each(|(ask, _, blocks)| other.grant(*ask, blocks));
    other.check_releases();
}

/// A head with this length.
fn frame_of(bytes: u32) -> Vec<u8> {
    let mut frame = Vec::new();
    Frame::Ask(AskFrame { ticket: 1, first: 0, labels: vec![label(1, 8)] }).append_to(&mut frame);
    frame[8..12].copy_from_slice(&bytes.to_le_bytes());
    frame
}

#[test]
fn draining_ends_what_is_under_way_and_takes_on_nothing() {
    let mut one = Node::new("one", Security::Plaintext, patient());
    let mut other = Node::start("other", 1, Security::Plaintext, patient(), Owner::Waits);
    acquaint(&one, &other);
    let wanted = [label(1, 1000)];
    other.keep(wanted[0], true);
    let fetching = one.fetch(1, &wanted, LONG);
    let ask = other.wait("an ask", |seen| seen.asked.first().map(|(ask, ..)| *ask));
    other.transport().drain();
    other.grant(ask, &wanted);
    assert_eq!(one.ends(&fetching), [Ok(())]);
    assert_eq!(one.get(1, &wanted, LONG), [Err(FetchFault::Refused(Refusal::Draining))]);
    assert_eq!(other.get(1, &wanted, LONG), [Err(FetchFault::Refused(Refusal::Draining))]);
    other.refused(Reason::Draining, 1);
    other.check_releases();
    other.kill();
    assert!(matches!(one.get(1, &wanted, LONG)[..], [Err(FetchFault::Peer(_))]));
}

#[test]
fn a_transport_that_ends_gives_back_everything() {
    let (mut one, mut other) = pair(patient());
    let labels: Vec<_> = (0..200).map(|number| label(number, 500_000)).collect();
    labels.iter().for_each(|label| other.keep(*label, false));
    let fetching = one.fetch(1, &labels, LONG);
    one.wait("the first", |seen| seen.done.keys().next().map(drop));
    // Granted slots are released, and the other blocks end.
    other.kill();
    let ends = one.ends(&fetching);
    let gone = |end: &Result<(), FetchFault>| {
        matches!(
            end,
            Err(FetchFault::Short
                | FetchFault::Peer(_)
                | FetchFault::Refused(Refusal::Draining)
                | FetchFault::Stopped)
        )
    };
    assert!(ends.iter().all(|end| end.is_ok() || gone(end)), "{ends:?}");
    other.seen(|seen| assert!(seen.released.values().all(|released| released.len() == 1)));
    let fetching = one.fetch(1, &labels[..1], LONG);
    one.kill();
    assert!(one.ends(&fetching).iter().all(gone));
    one.check_ends();
}
