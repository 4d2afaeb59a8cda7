//! Peers and networks with every kind of fault: each fetch ends with its fault in its time, and each slot
//! comes back once.

mod rig;

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use mesh::transport::tcp::frame::{Ask, Frame, Hello};
use mesh::transport::tcp::{Config, Limits, Security, Tcp};
use mesh::transport::{Fault, Label, Peer, PeerNumber, Stage};
use rig::proxy::{Proxy, Trouble, Troubles};
use rig::{LONG, Node, Owner, acquaint, label, now, patient};

const SHORT: Duration = Duration::from_millis(300);
/// A limit reached only by a stall, even on a busy machine.
const MODERATE: Duration = Duration::from_secs(3);
/// Bytes sent by the owner until the first block's own bytes: a Welcome and a Block frame.
const BEFORE_BLOCK: u64 = 32 + 56;
/// Bytes sent by the reader until the first Ask: a Hello of `one` and `other`.
const BEFORE_ASK: u64 = 24 + 20 + 8;

/// Two nodes with these limits; `one` reaches `other` through a proxy.
fn proxied(limits: [Limits; 2], plan: Troubles) -> (Node, Node, Proxy) {
    let [one, other] = limits;
    let one = Node::new("one", Security::Plaintext, one);
    let other = Node::new("other", Security::Plaintext, other);
    acquaint(&one, &other);
    let proxy = Proxy::start(other.address(), plan);
    one.transport().join(PeerNumber(1), Peer { address: proxy.address, ..other.as_peer() });
    (one, other, proxy)
}

fn kept(other: &Node, count: u64, bytes: u32) -> Vec<Label> {
    let labels: Vec<_> = (0..count).map(|number| label(number, bytes)).collect();
    labels.iter().for_each(|label| other.keep(*label, true));
    labels
}

/// The end of one block under this trouble. The next one must arrive over a sound network. Prints both ends
/// and their times. The limits are those of the reader: the owner ends nothing before.
fn one_block(limits: Limits, plan: Troubles) -> Result<(), Fault> {
    let fault = format!("{plan:?}");
    let (mut one, other, proxy) = proxied([limits, patient()], plan);
    let labels = kept(&other, 1, 400_000);
    let began = now();
    let end = one.get(1, &labels, LONG)[0];
    let seconds = began.elapsed().as_secs_f64();
    proxy.trouble(Troubles::default());
    proxy.cut();
    one.wait("a failure that was told", |seen| (!seen.down.is_empty() || seen.done.len() == 1).then_some(()));
    while one.get(1, &labels, LONG) != [Ok(())] {
        std::thread::sleep(limits.back_off_min);
    }
    let heal = began.elapsed().as_secs_f64() - seconds;
    let ended = format!("{end:?}");
    eprintln!(
        r#"{{"fault": {fault:?}, "ended": {ended:?}, "seconds": {seconds:.3}, "seconds_to_heal": {heal:.3}}}"#
    );
    one.check_ends();
    other.check_releases();
    end
}

#[test]
fn a_stream_that_is_cut_in_a_block_is_short() {
    for at in [BEFORE_BLOCK + 1, BEFORE_BLOCK + 300_000] {
        for trouble in [Trouble::Cut(at), Trouble::HalfClose(at)] {
            assert_eq!(one_block(patient(), Troubles::down(trouble)), Err(Fault::Short));
        }
    }
}

#[test]
fn a_stream_that_is_cut_before_is_a_failed_connection() {
    let ended = |end| matches!(end, Err(Fault::Peer(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)));
    for at in [0, 5, 30, 40, BEFORE_BLOCK - 1] {
        for trouble in [Trouble::Cut(at), Trouble::HalfClose(at)] {
            let end = one_block(patient(), Troubles::down(trouble.clone()));
            assert!(ended(end), "{trouble:?}: {end:?}");
        }
    }
    for at in [0, 20, BEFORE_ASK, BEFORE_ASK + 50] {
        for trouble in [Trouble::Cut(at), Trouble::HalfClose(at)] {
            let end = one_block(patient(), Troubles::up(trouble.clone()));
            assert!(ended(end), "{trouble:?}: {end:?}");
        }
    }
}

#[test]
fn bytes_that_were_changed_are_never_taken() {
    let corrupt = |at| one_block(patient(), Troubles::down(Trouble::Flip(at, 0x10)));
    for at in [0, 1, 255, 256, 262_143, 262_144, 399_999] {
        assert_eq!(corrupt(BEFORE_BLOCK + at), Err(Fault::Corrupt), "byte {at} of the block");
    }
    for at in [0, 10, 31, 32, 50, 60, BEFORE_BLOCK - 1] {
        let end = corrupt(at);
        assert!(matches!(end, Err(Fault::Malformed(_) | Fault::Refused(_))), "byte {at}: {end:?}");
    }
    for at in [3, 30, BEFORE_ASK, BEFORE_ASK + 30, BEFORE_ASK + 90] {
        let end = one_block(patient(), Troubles::up(Trouble::Flip(at, 1)));
        assert!(matches!(end, Err(Fault::Refused(_) | Fault::Peer(_))), "byte {at}: {end:?}");
    }
}

#[test]
fn what_stalls_ends_by_the_limit_of_its_stage() {
    let stalled = |limits, at| one_block(limits, Troubles::down(Trouble::Stall(at)));
    let limits = Limits { handshake: SHORT, ..patient() };
    assert_eq!(stalled(limits, 0), Err(Fault::Timeout(Stage::Handshake)));
    assert_eq!(stalled(limits, 20), Err(Fault::Timeout(Stage::Handshake)));
    let limits = Limits { first_byte: SHORT, ..patient() };
    assert_eq!(stalled(limits, 32), Err(Fault::Timeout(Stage::FirstByte)));
    assert_eq!(stalled(limits, BEFORE_BLOCK - 1), Err(Fault::Timeout(Stage::FirstByte)));
    let limits = Limits { progress: SHORT, ..patient() };
    assert_eq!(stalled(limits, BEFORE_BLOCK + 1), Err(Fault::Timeout(Stage::Progress)));
    assert_eq!(stalled(limits, BEFORE_BLOCK + 390_000), Err(Fault::Timeout(Stage::Progress)));
    // A few bytes now and then are no progress.
    let drip = Trouble::Drip(BEFORE_BLOCK, 100, Duration::from_millis(5));
    assert_eq!(one_block(limits, Troubles::down(drip)), Err(Fault::Timeout(Stage::Progress)));
}

#[test]
fn a_fetch_that_is_slow_ends_by_its_own_limit_and_the_stream_stays() {
    let drip = Trouble::Drip(BEFORE_BLOCK, 40_000, Duration::from_millis(20));
    let (mut one, other, _proxy) = proxied([patient(); 2], Troubles::down(drip));
    let labels = kept(&other, 20, 400_000);
    let ends = one.get(1, &labels, SHORT);
    assert!(ends.contains(&Err(Fault::Timeout(Stage::Whole))), "{ends:?}");
    assert!(ends.iter().all(|end| matches!(end, Ok(()) | Err(Fault::Timeout(Stage::Whole)))), "{ends:?}");
    // Bytes of blocks already ended are read and dropped; then the stream serves again.
    assert_eq!(one.get(1, &labels[..1], LONG), [Ok(())]);
    one.seen(|seen| assert!(seen.down.is_empty(), "{:?}", seen.down));
    one.check_ends();
}

#[test]
fn a_block_may_take_longer_than_the_limit_of_a_part() {
    let limits = Limits { progress: Duration::from_secs(5), ..patient() };
    let large = |name| {
        Node::over(name, 1, Owner::Grants, (1, 16 << 20), |name, boot, blocks, up| {
            let config = Config { limits, ..Config::new(name, boot, Security::Plaintext) };
            let tcp = Tcp::start(config, blocks, up).unwrap();
            let address = tcp.address();
            (Box::new(tcp), address)
        })
    };
    let (mut one, other) = (large("one"), large("other"));
    acquaint(&one, &other);
    // At least 1,024 times: 6.1 s of pauses for the whole, 0.1 s for each part.
    let drip = Trouble::Drip(BEFORE_BLOCK, 16 << 10, Duration::from_millis(6));
    let proxy = Proxy::start(other.address(), Troubles::down(drip));
    one.transport().join(PeerNumber(1), Peer { address: proxy.address, ..other.as_peer() });
    let labels = kept(&other, 1, 16 << 20);
    let began = now();
    assert_eq!(one.get(1, &labels, LONG), [Ok(())]);
    let took = began.elapsed();
    assert!(took > limits.progress, "{took:?}");
    other.check_releases();
}

#[test]
fn a_cancel_ends_what_stalls_in_the_middle_of_a_block() {
    let limits = Limits { progress: MODERATE, ..patient() };
    let (mut one, other, _proxy) = proxied([limits; 2], Troubles::down(Trouble::Stall(BEFORE_BLOCK + 1000)));
    let labels = kept(&other, 10, 400_000);
    let fetching = one.fetch(1, &labels, LONG);
    other.wait("an ask", |seen| seen.asked.first().map(drop));
    one.transport().cancel(fetching.ticket);
    assert_eq!(one.ends(&fetching), [Err(Fault::Stopped); 10]);
    one.check_ends();
    other.check_releases();
}

#[test]
fn a_peer_that_does_not_answer_at_all() {
    // One listener accepts and sends nothing, one hangs up at once, and one is gone.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let rude = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let rude_address = rude.local_addr().unwrap();
    std::thread::spawn(move || rude.incoming().for_each(drop));
    let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();

    let limits = Limits { handshake: MODERATE, back_off_min: Duration::from_secs(60), ..patient() };
    let limits = Limits { back_off_max: Duration::from_secs(60), ..limits };
    let mut one = Node::new("one", Security::Plaintext, limits);
    let peer = |address| Peer { node: rig::node("other"), boot: None, address };
    for (number, address) in (1..).zip([silent.local_addr().unwrap(), rude_address, gone]) {
        one.transport().join(PeerNumber(number), peer(address));
    }
    let wanted = [label(1, 1000), label(2, 1000)];
    let ends: Vec<_> = (1..4).flat_map(|number| one.get(number, &wanted, LONG)).collect();
    let Ok([silent_end, _, rude_end, _, gone_end, _]) = <[_; 6]>::try_from(ends) else { panic!("six ends") };
    assert_eq!(silent_end, Err(Fault::Timeout(Stage::Handshake)));
    assert!(matches!(rude_end, Err(Fault::Peer(_))), "{rude_end:?}");
    assert_eq!(gone_end, Err(Fault::Peer(ErrorKind::ConnectionRefused)));
    // During its pause nothing is tried: the answer is the last fault, at once.
    let attempts = |listener: &TcpListener| {
        listener.set_nonblocking(true).unwrap();
        listener.incoming().take_while(Result::is_ok).count()
    };
    assert!(attempts(&silent) >= 1);
    assert_eq!(one.get(1, &wanted, LONG), [Err(Fault::Timeout(Stage::Handshake)); 2]);
    assert_eq!(attempts(&silent), 0);
    one.check_ends();
}

#[test]
fn one_that_connects_and_says_nothing_is_hung_up_on() {
    let limits = Limits { handshake: SHORT, ..patient() };
    let other = Node::new("other", Security::Plaintext, limits);
    let mut streams: Vec<_> =
        (0..20).map(|_| std::net::TcpStream::connect(other.address()).unwrap()).collect();
    for stream in &mut streams {
        assert!(matches!(stream.read(&mut [0; 8]), Ok(0)), "hung up");
    }
    // Twenty failures in a moment, noted once or a few times.
    other.wait("a note", |seen| (!seen.notes.is_empty()).then_some(()));
    other.seen(|seen| {
        assert!(seen.notes.len() < 20 && seen.notes[0].contains("took too long"), "{:?}", seen.notes)
    });
}

/// A connection to `other` from its peer 1, with an Ask for these blocks.
fn asking(other: &Node, labels: Vec<Label>) -> TcpStream {
    let one = Node::new("one", Security::Plaintext, patient());
    other.transport().join(PeerNumber(1), one.as_peer());
    let mut stream = TcpStream::connect(other.address()).unwrap();
    let hello =
        Hello { node: one.name.clone(), boot: one.boot, wanted_node: other.name.clone(), wanted_boot: None };
    let mut bytes = Vec::new();
    Frame::Hello(hello).encode(&mut bytes);
    Frame::Ask(Ask { ticket: 1, first: 0, labels }).encode(&mut bytes);
    stream.write_all(&bytes).unwrap();
    other.wait("an ask", |seen| seen.asked.first().map(drop));
    stream
}

#[test]
fn a_reader_that_stops_reading_does_not_keep_the_owners_slots() {
    let other = Node::new("other", Security::Plaintext, Limits { progress: SHORT, ..patient() });
    let labels = kept(&other, 200, 500_000);
    // 100 MB, and the peer reads none.
    let _stream = asking(&other, labels);
    other.check_releases();
}

#[test]
fn a_reader_that_dawdles_does_not_keep_the_owners_slots() {
    let other = Node::new("other", Security::Plaintext, Limits { whole: SHORT, ..patient() });
    let labels = kept(&other, 200, 500_000);
    let mut stream = asking(&other, labels);
    // 100 MB, and the peer reads a part now and then until the end.
    let mut part = vec![0; 100_000];
    while stream.read(&mut part).is_ok_and(|read| read > 0) {
        std::thread::sleep(SHORT / 10);
    }
    other.check_releases();
    other.seen(|seen| assert!(seen.released.values().flatten().all(|sent| *sent < 200), "not all was sent"));
}

#[test]
fn whatever_happens_to_the_bytes_nothing_wrong_is_taken_and_nothing_hangs() {
    let limits = Limits { connect: LONG, handshake: SHORT, first_byte: SHORT, progress: SHORT, ..patient() };
    let (mut one, other, proxy) = proxied([limits; 2], Troubles::default());
    let labels = kept(&other, 24, 60_001);
    let mut faults = 0;
    for seed in 0..150 {
        proxy.trouble(Troubles::seeded(seed, 600_000));
        proxy.cut();
        // `get` checks that every arrived block is byte-exact and that all ended.
        let ends = one.get(1, &labels, Duration::from_secs(2));
        faults += ends.iter().filter(|end| end.is_err()).count();
        assert!(!ends.contains(&Err(Fault::Absent)), "seed {seed}: a block that is kept is never absent");
    }
    assert!(faults > 100, "the proxy did something: {faults}");
    one.check_ends();
    other.check_releases();
    // A sound network again.
    proxy.trouble(Troubles::default());
    proxy.cut();
    while one.get(1, &labels, LONG).iter().any(Result::is_err) {
        std::thread::sleep(limits.back_off_min);
    }
}
