//! Two nodes over RDMA: fetched blocks equal kept blocks, regardless of the fate of leases, links and peers.
//!
//! The tests need two devices on the two ends of a wire, rxe0 (on h0) and rxe1 (on h1), and root: `make
//! test-rdma` makes them in a guest. Without them the tests are skipped with a message.

#![cfg(feature = "rdma")]

mod rig;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mesh::transport::rdma::{Rdma, RdmaConfig};
use mesh::transport::tcp::{self, Security, TcpLimits};
use mesh::transport::{FetchFault, Label, Peer, PeerNumber, Refusal};
use rig::certificates::{Authority, Folder, NAME};
use rig::{LONG, Node, Owner, acquaint, boot, exchange, label, node, patient};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use shm_protocol::random::Random;

/// Enough for every test, few enough for a guest to register them soon; larger than a READ.
const SLOTS: (u64, u64) = (24, 1280 << 10);
/// Set if the devices must be present.
const MUST: &str = "PILLION_TEST_RDMA";
/// Printed by an owner before its address.
const SERVES: &str = "serves at ";

/// The wire, for one test at a time; `None`, with a message, without devices.
fn wire() -> Option<MutexGuard<'static, ()>> {
    static WIRE: Mutex<()> = Mutex::new(());
    let present = ["rxe0", "rxe1"].iter().all(|name| Path::new("/sys/class/infiniband").join(name).exists());
    if !present {
        assert!(std::env::var_os(MUST).is_none(), "{MUST} is set, but there are no devices rxe0 and rxe1");
        // Not captured, unlike the output of eprintln.
        let text = "SKIPPED, no RDMA devices rxe0 and rxe1 here: `make test-rdma` runs this test\n";
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        return None;
    }
    let wire = WIRE.lock().unwrap_or_else(PoisonError::into_inner);
    mend();
    Some(wire)
}

/// Restores the wire after the test before.
fn mend() {
    for end in ["h0", "h1"] {
        // Fails if there is nothing to remove.
        let _ = Command::new("tc").args(["qdisc", "del", "dev", end, "root"]).stderr(Stdio::null()).status();
        network(&format!("ip link set {end} up"));
    }
    let active = |name: &str| {
        let state = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/ports/1/state"));
        state.unwrap().contains("ACTIVE")
    };
    while !(active("rxe0") && active("rxe1")) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A node on this NIC, after it has registered its pool.
fn on(nic: &str, name: &str, life: u64, owner: Owner, change: impl FnOnce(&mut RdmaConfig)) -> Node {
    let registered = |rdma: &Rdma| {
        while !rdma.ready() {
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    started(nic, name, life, owner, change, registered)
}

fn started(
    nic: &str,
    name: &str,
    life: u64,
    owner: Owner,
    change: impl FnOnce(&mut RdmaConfig),
    wait: impl FnOnce(&Rdma),
) -> Node {
    Node::over(name, life, owner, SLOTS, |name, boot, blocks, up| {
        let mut config =
            RdmaConfig::new(tcp::TcpConfig::new(name, boot, Security::Plaintext), vec![nic.into()]);
        (config.tcp.limits, config.lease) = (patient(), LONG);
        change(&mut config);
        let rdma = Rdma::start(config, blocks, up).unwrap();
        wait(&rdma);
        let address = rdma.listen_address();
        (Box::new(rdma), address)
    })
}

fn config(nics: Vec<String>) -> RdmaConfig {
    RdmaConfig::new(tcp::TcpConfig::new(node("one"), boot(1), Security::Plaintext), nics)
}

/// A node on this NIC that may not lock its pool in memory, after its note about that.
fn unregistered(nic: &str, name: &str) -> Node {
    let limit = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: Some(1 << 16), ..limit }).unwrap();
    let start = || {
        // The limit binds only without this capability. Threads started here inherit its loss. A device
        // accepts verbs only with the credentials of its open, so a thread of its own drops the capability
        // before the open.
        let mut rights = capabilities(None).unwrap();
        rights.effective.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, rights).unwrap();
        started(nic, name, 1, Owner::Grants, |_| {}, |_| {})
    };
    let node = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
    node.wait("a note", |seen| {
        seen.notes.iter().any(|note| note.contains("cannot register the pool")).then_some(())
    });
    setrlimit(Resource::Memlock, limit).unwrap();
    node
}

/// Two nodes on the two ends of the wire; each is peer 1 of the other.
fn pair(change: impl Fn(&mut RdmaConfig)) -> (Node, Node) {
    let one = on("rxe0", "one", 1, Owner::Grants, &change);
    let other = on("rxe1", "other", 1, Owner::Grants, &change);
    acquaint(&one, &other);
    (one, other)
}

fn labels(count: u64, bytes: u32) -> Vec<Label> {
    (0..count).map(|number| label(number, bytes)).collect()
}

/// Runs a command of iproute2.
fn network(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success(), "{command}: {status}");
}

/// Waits until blocks can be fetched again.
fn recovers(one: &mut Node, wanted: &[Label]) {
    while one.get(1, wanted, LONG).iter().any(Result::is_err) {
        std::thread::sleep(patient().back_off_max);
    }
}

#[test]
fn what_is_fetched_is_what_is_kept() {
    let Some(_wire) = wire() else { return };
    let (mut one, mut other) = pair(|_| {});
    // Sizes around the sizes of a packet and of a READ, and others.
    let sizes = [1, 7, 4095, 4096, 4097, 65_537, 1_048_575, 1_048_576, 1_048_577, 1_310_720];
    exchange(&mut one, &mut other, &sizes);
    for node in [&one, &other] {
        node.seen(|seen| assert_eq!(seen.released.values().flatten().sum::<u32>(), 3 * sizes.len() as u32));
    }
}

#[test]
fn two_nics_and_a_stream_over_each() {
    let Some(_wire) = wire() else { return };
    let (mut one, other) = pair(|config| config.nics = vec!["rxe0".into(), "rxe1".into()]);
    let labels = labels(20, 300_000);
    labels[..10].iter().for_each(|label| other.keep(*label, false));
    for (end, number) in one.get(1, &labels, LONG).into_iter().zip(0..) {
        assert_eq!(end, if number < 10 { Ok(()) } else { Err(FetchFault::Absent) }, "{number}");
    }
    other.check_releases();
    other.seen(|seen| assert_eq!(seen.released.values().flatten().sum::<u32>(), 10));
}

#[test]
fn asks_and_leases_go_over_tls() {
    let Some(_wire) = wire() else { return };
    let ca = Authority::new();
    let files = Folder::with(&ca, &ca, NAME, 2099);
    let (mut one, other) = pair(|config| config.tcp.security = Security::Tls(files.tls()));
    let labels = labels(8, 1_310_720);
    labels.iter().for_each(|label| other.keep(*label, false));
    for _ in 0..3 {
        assert!(one.get(1, &labels, LONG).iter().all(Result::is_ok));
    }
    other.transport().remove_peer(PeerNumber(1));
    assert!(one.get(1, &labels, LONG).iter().all(Result::is_err));
    other.check_releases();
}

#[test]
fn standing_asks_are_granted_behind_the_commit_and_let_others_pass() {
    let Some(_wire) = wire() else { return };
    let (mut one, other) = pair(|_| {});
    let labels = labels(14, 700_000);
    let (promised, others) = labels.split_at(8);
    others.iter().for_each(|label| other.keep(*label, false));
    let fetching = one.stand(1, promised, LONG);
    let asks = other.standing_asks(promised.len());
    assert!(asks.len() > 1, "of 4 MiB at most");
    assert!(one.get(1, others, LONG).iter().all(Result::is_ok), "they pass");
    let asked = other.seen(|seen| seen.asked.len());
    // A stream reads other blocks meanwhile, and the last ask is granted first.
    let beside = one.fetch(1, others, LONG);
    other.commit(asks.iter().rev());
    assert!(one.ends(&fetching).iter().chain(&one.ends(&beside)).all(Result::is_ok));
    let again =
        other.seen(|seen| seen.asked[asked..].iter().flat_map(|asked| asked.2.clone()).collect::<Vec<_>>());
    assert!(again.iter().all(|label| others.contains(label)), "no promised block was asked for again");
    one.check_ends();
    other.check_releases();
}

#[test]
fn a_standing_ask_over_a_link_that_goes_down_ends_and_gives_its_slots_back() {
    let Some(_wire) = wire() else { return };
    let (mut one, other) = pair(|_| {});
    let labels = labels(4, 1_310_720);
    let fetching = one.stand(1, &labels, Duration::from_millis(1500));
    let asks = other.standing_asks(labels.len());
    // The streams go over loopback and stay up: READs fail, or the time is over.
    network("ip link set h1 down");
    other.commit(&asks);
    let ends = one.ends(&fetching);
    mend();
    assert!(
        ends.iter().all(|end| matches!(end, Err(FetchFault::Peer(_) | FetchFault::Timeout(_)))),
        "{ends:?}"
    );
    recovers(&mut one, &labels);
    other.transport().remove_peer(PeerNumber(1));
    one.check_ends();
    other.check_releases();
}

#[test]
fn under_load_every_block_ends_once_and_a_slot_given_back_is_not_written() {
    let Some(_wire) = wire() else { return };
    let (mut one, other) = pair(|_| {});
    let labels: Vec<_> = (0..12).map(|number| label(number, 4096 + 100_111 * number as u32)).collect();
    labels.iter().for_each(|label| other.keep(*label, false));
    let mut random = Random(11);
    let mut stopped = 0;
    for round in 0..12 {
        let fetches = [one.fetch(1, &labels, LONG), one.fetch(1, &labels, LONG)];
        if round % 2 == 0 {
            one.wait("the first", |seen| {
                seen.done.keys().any(|(ticket, _)| *ticket == fetches[0].ticket).then_some(())
            });
        }
        fetches.iter().filter(|_| random.below(2) == 0).for_each(|some| one.transport().cancel(some.ticket));
        let ends: Vec<_> = fetches.iter().map(|fetching| one.ends(fetching)).collect();
        let places = fetches.iter().flat_map(|fetching| &fetching.blocks).zip(ends.iter().flatten());
        let ours: Vec<_> = places.filter(|(_, end)| end.is_err()).collect();
        assert!(ours.iter().all(|(_, end)| **end == Err(FetchFault::Stopped)), "{ends:?}");
        // These slots are free again: bytes written now must stay, even with READs under way before.
        ours.iter().for_each(|((_, offset), _)| assert!(one.blocks.fill(*offset, &[0xa5; 4096])));
        std::thread::sleep(Duration::from_millis(50));
        let stays = |offset: u64| one.blocks.bytes_at(offset, 4096).unwrap() == [0xa5; 4096];
        assert!(ours.iter().all(|((_, offset), _)| stays(*offset)));
        stopped += ours.len();
    }
    assert!(stopped > 12, "something was cancelled: {stopped}");
    one.check_ends();
    other.check_releases();
}

#[test]
fn what_does_not_fit_is_refused_and_said_on_both_sides() {
    let Some(_wire) = wire() else { return };
    let mut one = on("rxe0", "one", 1, Owner::Grants, |config| config.qps_per_peer = 3);
    let other = on("rxe1", "other", 1, Owner::Grants, |_| {});
    acquaint(&one, &other);
    let refused = Refusal::Queues { nics: 1, pairs: 2 };
    assert_eq!(one.get(1, &labels(1, 100), LONG), [Err(FetchFault::Refused(refused))]);
    assert!(refused.to_string().contains("1 NICs for RDMA and 2 queue pairs"), "{refused}");
    other.wait("a note", |seen| {
        seen.notes
            .iter()
            .any(|note| note.contains("one was refused") && note.contains("3 queue pairs"))
            .then_some(())
    });
    // The other way round too, and with another number of NICs.
    other.transport().remove_peer(PeerNumber(1));
    let two = on("rxe0", "two", 1, Owner::Grants, |config| config.nics.push("rxe1".into()));
    let mut third = on("rxe1", "third", 1, Owner::Grants, |_| {});
    acquaint(&two, &third);
    let refused = Refusal::Queues { nics: 2, pairs: 2 };
    assert_eq!(third.get(1, &labels(1, 100), LONG), [Err(FetchFault::Refused(refused))]);
}

#[test]
fn a_nic_that_cannot_be_used_stops_the_start_and_the_others_are_named() {
    let start = |nics: &[&str]| {
        let nics = nics.iter().map(|name| (*name).into()).collect();
        let started = Rdma::start(config(nics), rig::pool(1 << 20), |_| {});
        started.err().expect("it does not start").to_string()
    };
    let unknown = start(&["no_such_nic"]);
    assert!(unknown.contains("'no_such_nic'") && unknown.contains("NICs with RDMA here: "), "{unknown}");
    assert!(start(&[]).contains("name 1 to 16"));
    let Some(_wire) = wire() else { return };
    let unknown = start(&["rxe0", "no_such_nic"]);
    assert!(unknown.contains("'no_such_nic' does not exist; NICs with RDMA here: rxe0, rxe1"), "{unknown}");
    assert!(start(&["rxe0", "rxe0"]).contains("is named twice"));
    network("ip link set h1 down");
    let down = start(&["rxe1"]);
    mend();
    assert!(down.contains("'rxe1' is down: bring its link up"), "{down}");
}

#[test]
fn a_pool_that_cannot_be_registered_says_why() {
    let Some(_wire) = wire() else { return };
    let (sender, notes) = std::sync::mpsc::channel();
    let config = config(vec!["rxe0".into()]);
    // Memory that cannot be pinned: its file ends in the middle.
    let rdma = Rdma::start(config, rig::torn_pool(8 << 20), move |up| drop(sender.send(up))).unwrap();
    let note = notes.recv_timeout(LONG).unwrap();
    let text = format!("{note:?}");
    assert!(text.contains("rxe0 cannot register the pool") && text.contains("RLIMIT_MEMLOCK"), "{text}");
    assert!(!rdma.ready());
}

#[test]
fn blocks_of_a_pool_that_is_not_registered_travel_over_tcp_both_ways() {
    let Some(_wire) = wire() else { return };
    let (mut one, mut other) = (on("rxe0", "one", 1, Owner::Grants, |_| {}), unregistered("rxe1", "other"));
    acquaint(&one, &other);
    exchange(&mut one, &mut other, &[7, 65_537, 1_310_720]);
    let noted = |node: &Node, what: &str| {
        node.seen(|seen| seen.notes.iter().filter(|note| note.contains(what)).count())
    };
    assert_eq!(noted(&one, "blocks of other travel over TCP until"), 1);
    assert_eq!(noted(&other, "all blocks travel over TCP"), 1);
    // Blocks between nodes with registered pools still travel by RDMA.
    let third = on("rxe1", "third", 1, Owner::Grants, |_| {});
    one.transport().add_peer(PeerNumber(2), third.as_peer());
    third.transport().add_peer(PeerNumber(2), one.as_peer());
    third.keep(label(9, 1000), true);
    assert_eq!(one.get(2, &[label(9, 1000)], LONG), [Ok(())]);
    assert_eq!(noted(&one, "travel over TCP until"), 1);
}

#[test]
fn loss_and_delay_are_borne() {
    let Some(_wire) = wire() else { return };
    let (mut one, other) = pair(|_| {});
    let labels = labels(4, 400_000);
    labels.iter().for_each(|label| other.keep(*label, true));
    for trouble in ["loss 0.5%", "delay 5ms limit 10000", "duplicate 1%", "corrupt 0.2%"] {
        network(&format!("tc qdisc add dev h1 root netem {trouble}"));
        let ends = one.get(1, &labels, LONG);
        mend();
        assert!(ends.iter().all(Result::is_ok), "{trouble}: {ends:?}");
    }
    one.check_ends();
    other.check_releases();
}

/// The end of a fetch with `trouble` in the middle; the wire is slow enough for that.
fn in_the_middle(one: &mut Node, wanted: &[Label], trouble: impl FnOnce()) -> Vec<Result<(), FetchFault>> {
    network("tc qdisc add dev h1 root netem rate 60mbit limit 100000");
    let fetching = one.fetch(1, wanted, LONG);
    one.wait("the first", |seen| {
        seen.done.keys().any(|(ticket, _)| *ticket == fetching.ticket).then_some(())
    });
    trouble();
    let ends = one.ends(&fetching);
    mend();
    assert!(ends.iter().any(Result::is_err), "it was met in the middle: {ends:?}");
    ends
}

#[test]
fn a_link_that_goes_down_ends_what_is_read_and_comes_back() {
    let Some(_wire) = wire() else { return };
    let (mut one, other) = pair(|_| {});
    let labels = labels(20, 1_310_720);
    labels.iter().for_each(|label| other.keep(*label, true));
    // The streams go over loopback and stay up: only READs fail.
    let ends = in_the_middle(&mut one, &labels, || network("ip link set h1 down"));
    // No queue pair can be made meanwhile.
    let down = |end: &Result<(), FetchFault>| {
        matches!(end, Ok(()) | Err(FetchFault::Peer(_) | FetchFault::Refused(Refusal::Busy)))
    };
    assert!(ends.iter().all(down), "{ends:?}");
    recovers(&mut one, &labels[..2]);
    let ends = in_the_middle(&mut one, &labels, || network("tc qdisc add dev h0 root netem loss 100%"));
    assert!(ends.iter().all(down), "{ends:?}");
    recovers(&mut one, &labels[..2]);
    one.check_ends();
    other.check_releases();
}

#[test]
fn one_that_has_left_is_cut_off_in_the_middle() {
    let Some(_wire) = wire() else { return };
    let (mut one, other) = pair(|_| {});
    let labels = labels(20, 1_310_720);
    labels.iter().for_each(|label| other.keep(*label, true));
    // The owner fences the reader: its queue pairs end before its slots are given back.
    let ends = in_the_middle(&mut one, &labels, || other.transport().remove_peer(PeerNumber(1)));
    let cut = |end: &Result<(), FetchFault>| {
        matches!(
            end,
            Ok(()) | Err(FetchFault::Short | FetchFault::Peer(_) | FetchFault::Refused(Refusal::NotMember))
        )
    };
    assert!(ends.iter().all(cut), "{ends:?}");
    other.check_releases();
    other.transport().add_peer(PeerNumber(1), one.as_peer());
    recovers(&mut one, &labels[..2]);
    // The reader fences the owner.
    let leaving = one.transport_shared();
    let ends = in_the_middle(&mut one, &labels, || leaving.remove_peer(PeerNumber(1)));
    drop(leaving);
    // A guest without processor time for long may lose a READ by itself.
    let stopped =
        |end: &Result<(), FetchFault>| matches!(end, Ok(()) | Err(FetchFault::Stopped | FetchFault::Peer(_)));
    assert!(ends.iter().all(stopped), "{ends:?}");
    one.check_ends();
    other.check_releases();
}

#[test]
fn an_owner_that_does_not_decide_is_waited_for_until_the_limit() {
    let Some(_wire) = wire() else { return };
    let short = TcpLimits { first_byte: Duration::from_millis(300), ..patient() };
    let mut one = on("rxe0", "one", 1, Owner::Grants, |config| config.tcp.limits = short);
    let mut other = on("rxe1", "other", 1, Owner::Waits, |_| {});
    acquaint(&one, &other);
    let wanted = [label(1, 1000)];
    other.keep(wanted[0], true);
    assert_eq!(one.get(1, &wanted, LONG), [Err(FetchFault::Timeout(mesh::transport::FetchStage::FirstByte))]);
    let ask = other.wait("an ask", |seen| seen.asked.first().map(|(ask, ..)| *ask));
    other.grant(ask, &wanted);
    other.check_releases();
    other.seen(|seen| assert_eq!(seen.released[&ask], [0]));
    // An owner that ends meanwhile gives back its grants.
    std::thread::sleep(patient().back_off_max);
    let fetching = one.fetch(1, &wanted, LONG);
    other.wait("an ask", |seen| seen.asked.get(1).map(drop));
    other.kill();
    assert!(matches!(one.ends(&fetching)[..], [Err(FetchFault::Peer(_))]));
    one.check_ends();
}

/// One side in a process of its own. Killed at the end.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

// === impl Process ===

impl Process {
    /// Starts this test's binary again, as the test `test`, with `words` in its environment.
    fn start(test: &str, words: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--ignored", "--nocapture", test]).env("PEER", words);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The rest of its next line with `word`, after it.
    fn hear(&mut self, word: &str) -> String {
        let said = self
            .lines
            .by_ref()
            .map(Result::unwrap)
            .find_map(|line| Some(line.split_once(word)?.1.to_owned()));
        said.expect("the other process speaks")
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes()).unwrap();
    out.flush().unwrap();
}

#[test]
#[ignore = "the other process of the test below"]
fn the_owner() {
    let life = std::env::var_os("PEER").unwrap().to_str().unwrap().parse().unwrap();
    let other = on("rxe1", "other", life, Owner::Grants, |_| {});
    labels(20, 1_310_720).iter().for_each(|label| other.keep(*label, true));
    other
        .transport()
        .add_peer(PeerNumber(1), Peer { node: node("one"), boot: None, address: other.address() });
    say(&format!("{SERVES}{}\n", other.address()));
    // It runs until it is killed, or until its own limit if the test was killed.
    std::thread::sleep(Duration::from_secs(300));
}

#[test]
fn a_peer_killed_in_the_middle_ends_what_it_owed_and_is_another_when_it_is_back() {
    let Some(_wire) = wire() else { return };
    let peer = |owner: &mut Process, life| {
        let address: SocketAddr = owner.hear(SERVES).parse().unwrap();
        Peer { node: node("other"), boot: Some(boot(life)), address }
    };
    let mut owner = Process::start("the_owner", "1");
    let mut one = on("rxe0", "one", 1, Owner::Grants, |_| {});
    one.transport().add_peer(PeerNumber(1), peer(&mut owner, 1));
    let labels = labels(20, 1_310_720);
    let ends = in_the_middle(&mut one, &labels, || owner.kill());
    assert!(
        ends.iter().all(|end| matches!(end, Ok(()) | Err(FetchFault::Short | FetchFault::Peer(_)))),
        "{ends:?}"
    );
    let mut owner = Process::start("the_owner", "2");
    let back = peer(&mut owner, 2);
    one.transport().add_peer(PeerNumber(1), Peer { boot: Some(boot(1)), ..back.clone() });
    assert_eq!(one.get(1, &labels[..2], LONG), [Err(FetchFault::Refused(Refusal::OtherBoot)); 2]);
    one.transport().add_peer(PeerNumber(1), back);
    assert!(one.get(1, &labels, LONG).iter().all(Result::is_ok));
    one.check_ends();
}

#[test]
#[ignore = "the other process of the test below"]
fn the_reader() {
    let address: SocketAddr = std::env::var_os("PEER").unwrap().to_str().unwrap().parse().unwrap();
    let mut reader = on("rxe0", "one", 1, Owner::Grants, |_| {});
    reader.transport().add_peer(PeerNumber(1), Peer { node: node("other"), boot: Some(boot(1)), address });
    say(&format!("{SERVES}{}\n", reader.address()));
    // `get` checks every byte of arrived blocks.
    let mut lapsed = 0;
    loop {
        let ends = reader.get(1, &labels(12, 1_310_720), LONG);
        lapsed += ends.iter().filter(|end| **end == Err(FetchFault::Absent)).count();
        let told = |end: &Result<(), FetchFault>| {
            matches!(end, Ok(()) | Err(FetchFault::Absent | FetchFault::Peer(_) | FetchFault::Short))
        };
        assert!(ends.iter().all(told), "{ends:?}");
        if lapsed > 0 && ends.iter().all(Result::is_ok) {
            break;
        }
    }
    say("lapsed and came\n");
}

#[test]
fn a_reader_frozen_beyond_its_lease_reads_nothing_that_was_put_there_since() {
    let Some(_wire) = wire() else { return };
    let other = on("rxe1", "other", 1, Owner::Grants, |config| config.lease = Duration::from_millis(1500));
    let labels = labels(12, 1_310_720);
    labels.iter().for_each(|label| other.keep(*label, true));
    let mut reader = Process::start("the_reader", &other.address().to_string());
    other
        .transport()
        .add_peer(PeerNumber(1), Peer { node: node("one"), boot: None, address: other.address() });
    reader.hear(SERVES);
    // Frozen while blocks are lent, until all of them are given back.
    other.wait("an ask", |seen| (seen.asked.len() > seen.released.len()).then_some(()));
    reader.signal(Signal::STOP);
    other.wait("all releases", |seen| (seen.asked.len() == seen.released.len()).then_some(()));
    // The slots hold something else for a while, in which nothing is granted.
    other.scribble();
    reader.signal(Signal::CONT);
    std::thread::sleep(Duration::from_millis(500));
    other.restore();
    reader.hear("lapsed and came");
    other.check_releases();
    other.seen(|seen| {
        assert!(seen.notes.iter().any(|note| note.contains("had not read")), "{:?}", seen.notes)
    });
}
